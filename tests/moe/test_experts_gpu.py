"""What only a GPU shows of a layer of experts: CUDA graphs, memory, compiled code."""

from __future__ import annotations

import contextlib

import pytest
import torch

from .._compare import assert_same_bits, relative_error
from ._layers import LayerProblem, assert_layer_close_to_eager

pytestmark = pytest.mark.gpu


def triton_layer(problem: LayerProblem, moe, device):
    """The path that never waits for the device, by name: what "auto" takes may change."""
    layer = problem.module(moe, device)
    layer.backend = "triton"
    return layer


def test_a_training_step_in_a_cuda_graph(moe, device):
    """Forward and backward are captured once; replays follow new tokens and a new routing.

    The routings differ in which experts get tokens, so a captured host decision would show.
    """
    problem = LayerProblem(tokens=64, bias=True, dtype=torch.bfloat16)
    layer = triton_layer(problem, moe, device)
    x, gates, grad = problem.inputs(device)
    ids = problem.ids(device)
    parameters = [p for p in layer.parameters() if p.requires_grad]

    def step() -> tuple[torch.Tensor, ...]:
        out = layer(x, ids, gates)
        return out, *torch.autograd.grad(out, [x, gates, *parameters], grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and warms the allocator up
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed, routing in enumerate(("random", "one", "no-ends", "sentinels", "all-sentinels")):
        other = LayerProblem(tokens=64, bias=True, dtype=torch.bfloat16, routing=routing)
        new_x, new_gates, new_grad = other.inputs(device, seed)
        with torch.no_grad():
            for old, new in ((x, new_x), (gates, new_gates), (grad, new_grad)):
                old.copy_(new)
            ids.copy_(other.ids(device, seed))
        graph.replay()
        for ours, theirs in zip(captured, step(), strict=True):
            assert_same_bits(ours, theirs)


def test_sums_beside_dx_in_a_cuda_graph(moe, submodule, device, monkeypatch):
    """Bits are those of one stream, captured or not."""
    launches = submodule("kernels.experts.gated_launch_triton")
    problem = LayerProblem(512, 2, 8, 256, 256, 8, 8, dtype=torch.bfloat16)
    layer = triton_layer(problem, moe, device)
    x, gates, grad = problem.inputs(device)
    ids = problem.ids(device)
    leaves = [x, gates, *(p for p in layer.parameters() if p.requires_grad)]
    chosen, real = [], launches.sums_fit_beside

    def step() -> tuple[torch.Tensor, ...]:
        # Without its graph: a leaf's node of autograd would wait in the capture for this stream.
        out = layer(x, ids, gates)
        return out.detach(), *torch.autograd.grad(out, leaves, grad)

    def watched(*arguments) -> bool:
        chosen.append(real(*arguments))
        return chosen[-1]

    with monkeypatch.context() as alone:
        alone.setattr(launches, "sums_fit_beside", lambda *_: False)
        alone.setattr(launches, "packing", lambda factors, *_: contextlib.nullcontext(factors))
        expected = step()
    monkeypatch.setattr(launches, "sums_fit_beside", watched)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        found = [step() for _ in range(3)]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found.append(step())
    graph.replay()
    for results in found:
        for one, other in zip(results, expected, strict=True):
            assert_same_bits(one, other)
    assert chosen == [True] * 4


def test_a_step_does_not_wait_for_the_device(moe, device):
    problem = LayerProblem(tokens=64, bias=True, dtype=torch.bfloat16)
    layer = triton_layer(problem, moe, device)
    x, gates, grad = problem.inputs(device)
    ids = problem.ids(device)
    layer(x, ids, gates).backward(grad)
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x, ids, gates).backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_a_step_allocates_a_fraction_of_the_weights(moe, device):
    """Few tokens over many experts: no copy of a stack, no gradient for a frozen one."""
    problem = LayerProblem(
        tokens=64,
        experts=64,
        hidden=512,
        intermediate=512,
        rank=8,
        rank_down=8,
        dtype=torch.bfloat16,
    )
    layer = triton_layer(problem, moe, device)
    x, gates, grad = problem.inputs(device)
    ids = problem.ids(device)
    layer(x, ids, gates).backward(grad)  # compiles; the gradients of LoRA exist from now on
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layer(x, ids, gates).backward(grad)
    extra = torch.cuda.max_memory_allocated() - before
    stack = layer.down_proj.nbytes
    lora = sum(p.nbytes for p in layer.parameters() if p.requires_grad)
    assert extra - 2 * lora < 0.25 * stack, f"{extra / 1e6:.1f} MB, a stack has {stack / 1e6:.1f}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_compiled_by_inductor(moe, device, dtype):
    torch._dynamo.reset()
    problem = LayerProblem(bias=True, routing="sentinels", dtype=dtype)

    def compiled(layer, *inputs):
        layer.backend = "triton"
        return torch.compile(layer, fullgraph=True)(*inputs)

    assert_layer_close_to_eager(moe, device, problem, call=compiled)


@pytest.mark.parametrize("sizes", [(256, 2048, 512, 8), (64, 2048, 1024, 8), (8, 4096, 14336, 2)])
def test_real_sizes(moe, device, sizes):
    """One layer of Qwen3.5-35B-A3B, OLMoE-1B-7B and Mixtral-8x7B over 512 tokens, in bfloat16."""
    experts, hidden, intermediate, top_k = sizes
    torch.manual_seed(0)
    layer = moe.Experts(experts, hidden, intermediate, device=device, dtype=torch.bfloat16)
    layer.add_adapter(r=16, alpha=32)
    for projection in layer.expert_lora.values():
        torch.nn.init.normal_(projection.lora_B["default"].weight, std=0.01)
    problem = LayerProblem(512, top_k, experts, hidden, dtype=torch.bfloat16)
    x, gates, grad = problem.inputs(device)
    ids = problem.ids(device)
    leaves = [x, gates, *(p for p in layer.parameters() if p.requires_grad)]
    results = {}
    for backend in ("triton", "triton", "reference"):
        layer.backend = backend
        out = layer(x, ids, gates)
        found = (out.detach(), *torch.autograd.grad(out, leaves, grad))
        if backend in results:
            for ours, theirs in zip(found, results[backend], strict=True):
                assert_same_bits(ours, theirs)
        results[backend] = found
    for ours, theirs in zip(results["triton"], results["reference"], strict=True):
        assert relative_error(ours, theirs) < 2**-7  # two roundings to bfloat16 apart
