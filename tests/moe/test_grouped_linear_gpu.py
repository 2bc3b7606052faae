"""What only a GPU shows of grouped_lora_linear: real shapes, capture, no waiting, memory."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from .._compare import assert_same_bits, relative_error
from ._eager import NAMES, Problem
from .conftest import gradients
from .test_grouped_linear import assert_close_to_eager

pytestmark = pytest.mark.gpu

# One projection of each listed model, with experts cut down so that float64 fits in seconds; rows
# per expert, K and N are the models' own.
REAL = {
    "Qwen3.5": Problem(512, 8, 64, 2048, 1024, 16),
    "Qwen3": Problem(1024, 8, 64, 2048, 1536, 16),
    "OLMoE": Problem(1024, 8, 32, 2048, 2048, 64),
    "Mixtral": Problem(1024, 2, 4, 4096, 3584, 16),
    "decode": Problem(1, 8, 64, 2048, 1024, 16),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("model", REAL)
def test_real_shapes(run, device, model, dtype):
    problem = dataclasses.replace(REAL[model], dtype=dtype, peft=True, gates=True)
    assert_close_to_eager(problem, run, device, "triton")


@pytest.mark.parametrize("rank", [1, 3, 8, 12, 24, 64, 96, 128, 200, 256])
def test_any_rank(run, device, rank):
    problem = Problem(300, 4, 8, 256, 192, rank, dtype=torch.bfloat16, peft=True)
    assert_close_to_eager(problem, run, device, "triton")


@pytest.mark.parametrize("routing", ["one", "gap", "sentinels", "all-sentinels"])
def test_routings_at_size(run, device, routing):
    problem = Problem(2000, 4, 16, 512, 320, 16, dtype=torch.bfloat16, routing=routing)
    problem = dataclasses.replace(problem, bias=True, gates=True)
    assert_close_to_eager(problem, run, device, "triton")


def test_two_runs_give_the_same_bits(run, device):
    problem = dataclasses.replace(REAL["Qwen3"], dtype=torch.bfloat16, gates=True)
    leaves, ids = problem.inputs(device), problem.ids(device)
    grad = torch.randn(problem.grad_shape(), device=device).bfloat16()
    first = run(problem, leaves, ids, grad, "triton")
    for name, value in run(problem, leaves, ids, grad, "triton").items():
        assert_same_bits(value, first[name])


def test_auto_takes_triton(opt, device):
    assert opt.explain("grouped_lora_linear", device=device).startswith("triton: ")


@pytest.mark.sees_defect("the fallback loops over experts on the host")
def test_nothing_waits_for_the_device(run, device):
    problem = dataclasses.replace(
        REAL["Qwen3.5"], dtype=torch.bfloat16, gates=True, bias=True, routing="sentinels"
    )
    leaves, ids = problem.inputs(device), problem.ids(device)
    grad = torch.randn(problem.grad_shape(), device=device).bfloat16()
    run(problem, leaves, ids, grad, "triton")  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        run(problem, leaves, ids, grad, "triton")
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_captured_step_follows_another_routing(run, device):
    problem = Problem(64, 4, 16, 256, 128, 16, dtype=torch.bfloat16, gates=True, bias=True)
    leaves, ids = problem.inputs(device), problem.ids(device)
    grad = torch.randn(problem.grad_shape(), device=device).bfloat16()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run(problem, leaves, ids, grad, "triton")
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run(problem, leaves, ids, grad, "triton")
    for seed, routing in enumerate(("one", "gap", "sentinels", "all-sentinels", "random")):
        ids.copy_(dataclasses.replace(problem, routing=routing).ids(device, seed))
        graph.replay()
        for name, value in run(problem, leaves, ids, grad, "triton").items():
            assert_same_bits(captured[name], value)


def test_compiled_by_inductor(moe, device):
    problem = dataclasses.replace(REAL["Qwen3"], tokens=64, dtype=torch.bfloat16, gates=True)
    leaves, ids = problem.inputs(device), problem.ids(device)

    def step():
        order = moe.expert_sort(ids, problem.experts)
        return moe.grouped_lora_linear(
            leaves["x"],
            leaves["weight"],
            order,
            leaves["lora_a"],
            leaves["lora_b"],
            gates=leaves["gates"],
        )

    y = step()
    grad = torch.randn_like(y)
    expected = gradients(y, leaves, grad)
    compiled = torch.compile(step, fullgraph=True)()
    assert_same_bits(compiled, y)
    for name, value in gradients(compiled, leaves, grad).items():
        assert relative_error(value, expected[name]) < 1e-2


def test_stack_above_two_to_the_31_elements(moe, device):
    """The last expert of a stack of 2.2e9 elements, in forward, dX and the gradients of LoRA."""
    experts, k, n = 130, 4096, 4096
    weight = torch.empty(experts, n, k, dtype=torch.bfloat16, device=device)
    assert weight.numel() > 2**31
    weight[-1].normal_(std=k**-0.5)
    small = {
        "x": torch.randn(40, k, device=device).bfloat16(),
        "lora_a": torch.randn(1, 8, k, device=device),
        "lora_b": torch.randn(1, n, 8, device=device),
    }

    def run(stack, expert, factors):
        leaves = [t.clone().requires_grad_() for t in (small["x"], *factors)]
        ids = torch.full((40, 1), expert, device=device)
        order = moe.expert_sort(ids, stack.shape[0])
        y = moe.grouped_lora_linear(leaves[0], stack.mT, order, *leaves[1:], backend="triton")
        found = torch.autograd.grad(y, leaves, torch.ones_like(y))
        return [y, found[0], *(grad[expert] for grad in found[1:])]

    alone = run(weight[-1:], 0, (small["lora_a"], small["lora_b"]))
    wide = [small[name].expand(experts, -1, -1) for name in ("lora_a", "lora_b")]
    for one, other in zip(run(weight, experts - 1, wide), alone, strict=True):
        assert relative_error(one, other) < 1e-2  # tiles follow rows per expert: other sums


def test_peak_memory_of_a_step(moe, device):
    """Frozen weights get no gradient: a step stays below a tenth of the stack's bytes."""
    problem = Problem(256, 8, 128, 2048, 1536, 16, dtype=torch.bfloat16, gates=True)
    leaves, ids = problem.inputs(device), problem.ids(device)
    leaves["weight"].requires_grad_(False)
    wanted = [leaves[name] for name in NAMES if leaves[name] is not None and name != "weight"]

    def step():
        order = moe.expert_sort(ids, problem.experts)
        y = moe.grouped_lora_linear(
            leaves["x"],
            leaves["weight"],
            order,
            leaves["lora_a"],
            leaves["lora_b"],
            gates=leaves["gates"],
        )
        return torch.autograd.grad(y.float().square().sum(), wanted)

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    weight_bytes = leaves["weight"].numel() * 2
    assert torch.cuda.max_memory_allocated() - before < weight_bytes / 10
