"""grouped_lora_linear over 4-bit experts: strategies equal decoded weights and are explained."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch

from .._compare import assert_same_bits, relative_error
from .._gpu import capture
from ._eager import Problem, eager, product

STRATEGIES = ("chunked", "selective")
SHAPES = (
    Problem(33, rank=5, bias=True),
    Problem(29, gates=True, bias=True, grouped_in=True, routing="sentinels"),
    Problem(21, rank=None, grouped_out=True, routing="one"),
    Problem(3, experts=9, gates=True, k=25, n=33, routing="random"),  # odd sizes, few active
    Problem(40, experts=5, rank=3, gates=True, routing="no-ends"),
    Problem(17, experts=5, routing="all-sentinels", gates=True),
    Problem(0, gates=True, bias=True),
)


def quantize(opt, problem, leaves, **options):
    """4-bit experts made of the problem's weight (E, K, N), and that weight as it decodes."""
    stored = leaves["weight"].detach().transpose(1, 2).contiguous()
    module = opt.moe.QuantizedExperts.from_weight(stored, **options)
    return module, module.decode(dtype=problem.dtype).transpose(1, 2)


def run(opt, problem, leaves, ids, weight, backend="auto"):
    return product(opt.moe, problem, leaves, ids, weight, backend=backend)


def results(y, leaves, grad) -> dict[str, torch.Tensor]:
    wanted = [k for k, v in leaves.items() if v is not None and k != "weight"]
    found = torch.autograd.grad(y, [leaves[k] for k in wanted], grad)
    return {"y": y.detach(), **dict(zip(wanted, found, strict=True))}


@pytest.fixture
def small_chunks(submodule, monkeypatch):
    """Slices of two experts of the largest problem."""
    both = (2 * 24 * 40 * 4,) * 2
    monkeypatch.setattr(submodule("moe.quantized.strategy"), "SLICE_BYTES", both)


FORMATS = ({}, {"nested": True}, {"quant_type": "fp4"}, {"quant_type": "fp8", "block_columns": 0})


@pytest.mark.parametrize("options", FORMATS, ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("problem", SHAPES, ids=str)
def test_bits_of_the_decoded_weight(opt, device, small_chunks, problem, strategy, options):
    """On the reference path the experts are computed one by one, so nothing may differ.

    Rows of odd length begin at other addresses in a slice than in the stack, and a CPU's BLAS sums
    in another order there.
    """
    leaves, ids = problem.inputs(device), problem.ids(device)
    packed, dense = quantize(opt, problem, leaves, strategy=strategy, **options)
    grad = torch.randn(problem.grad_shape(), generator=torch.Generator().manual_seed(5)).to(device)
    actual = results(
        run(opt, problem, leaves, ids, packed.transpose(1, 2), "reference"), leaves, grad
    )
    expected = results(run(opt, problem, leaves, ids, dense, "reference"), leaves, grad)
    for name, value in expected.items():
        if problem.k % 8 == 0 and problem.n % 8 == 0:
            assert_same_bits(actual[name], value)
        else:
            assert relative_error(actual[name], value) <= 1e-6, name


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("problem", (SHAPES[1], SHAPES[3]), ids=str)
def test_triton_products_over_decoded_slices(opt, device, small_chunks, problem, strategy):
    leaves, ids = problem.inputs(device), problem.ids(device)
    packed, dense = quantize(opt, problem, leaves, strategy=strategy)
    grad = torch.randn(problem.grad_shape(), generator=torch.Generator().manual_seed(5)).to(device)
    actual = results(run(opt, problem, leaves, ids, packed.transpose(1, 2), "triton"), leaves, grad)
    with torch.no_grad():
        leaves["weight"].copy_(dense)
    exact = eager(problem, leaves, ids, torch.float64)
    expected = results(exact, leaves, grad.double())
    for name, value in expected.items():
        assert relative_error(actual[name], value) <= 5e-6, name


FUSED = (
    Problem(29, gates=True, bias=True, grouped_in=True, k=64, n=96, routing="sentinels"),
    Problem(40, experts=5, rank=3, gates=True, k=96, n=64, routing="no-ends"),
    Problem(21, rank=None, grouped_out=True, k=64, n=33, routing="one"),
    Problem(0, gates=True, bias=True, k=64, n=32),
)


@pytest.mark.parametrize("backend", ("triton", "reference"))
@pytest.mark.parametrize("problem", FUSED, ids=str)
def test_fused(opt, device, problem, backend):
    """Every gradient of the product that decodes on the way, nested absmax included."""
    leaves, ids = problem.inputs(device), problem.ids(device)
    packed, dense = quantize(
        opt, problem, leaves, strategy="fused", blocksize=32, nested=problem.rank is not None
    )
    grad = torch.randn(problem.grad_shape(), generator=torch.Generator().manual_seed(5)).to(device)
    actual = results(run(opt, problem, leaves, ids, packed.transpose(1, 2), backend), leaves, grad)
    with torch.no_grad():
        leaves["weight"].copy_(dense)
    expected = results(eager(problem, leaves, ids, torch.float64), leaves, grad.double())
    for name, value in expected.items():
        assert relative_error(actual[name], value) <= 5e-6, name


def test_fused_refuses_blocks_that_straddle_rows(opt, device):
    problem = Problem(4)  # K = 24
    leaves, ids = problem.inputs(device), problem.ids(device)
    packed, _ = quantize(opt, problem, leaves, strategy="fused")
    with pytest.raises(ValueError, match="blocks that do not leave their row"):
        run(opt, problem, leaves, ids, packed.transpose(1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("strategy", (*STRATEGIES, "fused"))
def test_on_a_gpu_within_the_budget_of_dequantize_then_eager(opt, device, strategy, dtype):
    """Shapes of Qwen3-30B-A3B's down projection on a sixteenth of its experts."""
    problem = Problem(
        300, experts=8, top_k=4, gates=True, k=768, n=2048, rank=16, dtype=dtype, grouped_in=True
    )
    leaves, ids = problem.inputs(device), problem.ids(device)
    packed, dense = quantize(opt, problem, leaves, strategy=strategy)
    with torch.no_grad():
        leaves["weight"].copy_(dense)
    grad = torch.randn(problem.grad_shape(), generator=torch.Generator().manual_seed(5))
    grad = grad.to(device, dtype)
    weight = packed.transpose(1, 2)
    ours = results(run(opt, problem, leaves, ids, weight, "triton"), leaves, grad)
    again = results(run(opt, problem, leaves, ids, weight, "triton"), leaves, grad)
    plain = eager(problem, leaves, ids, dtype)
    plain = results(plain, leaves, grad.to(plain.dtype))
    exact = results(eager(problem, leaves, ids, torch.float64), leaves, grad.double())
    for name, value in exact.items():
        assert_same_bits(ours[name], again[name])
        budget = 1.5 * relative_error(plain[name], value) + 1e-6
        assert relative_error(ours[name], value) <= budget, name


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", (*STRATEGIES, "fused"))
def test_no_strategy_waits_for_the_device(opt, device, strategy):
    """Forward and backward are captured in a CUDA graph, and replayed with the same bits."""
    problem = Problem(64, experts=8, gates=True, k=128, n=256, dtype=torch.bfloat16)
    leaves, ids = problem.inputs(device), problem.ids(device)
    packed, _ = quantize(opt, problem, leaves, strategy=strategy)
    weight = packed.transpose(1, 2)
    grad = torch.ones(problem.grad_shape(), device=device, dtype=torch.bfloat16)
    eager_run = results(run(opt, problem, leaves, ids, weight, "triton"), leaves, grad)
    graph, captured = capture(
        lambda: results(run(opt, problem, leaves, ids, weight, "triton"), leaves, grad)
    )
    graph.replay()
    torch.cuda.synchronize()
    for name, value in eager_run.items():
        assert_same_bits(captured[name], value)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_narrow_dtypes_within_the_budget_of_dequantize_then_eager(
    opt, device, small_chunks, strategy
):
    for dtype in (torch.bfloat16, torch.float16):
        problem = Problem(50, gates=True, bias=True, k=64, n=96, dtype=dtype)
        leaves, ids = problem.inputs(device), problem.ids(device)
        packed, dense = quantize(opt, problem, leaves, strategy=strategy)
        with torch.no_grad():
            leaves["weight"].copy_(dense)
        grad = torch.randn(problem.grad_shape(), generator=torch.Generator().manual_seed(5))
        grad = grad.to(device, dtype)
        ours = results(run(opt, problem, leaves, ids, packed.transpose(1, 2)), leaves, grad)
        narrow = eager(problem, leaves, ids, dtype)
        plain = results(narrow, leaves, grad.to(narrow.dtype))
        exact = results(eager(problem, leaves, ids, torch.float64), leaves, grad.double())
        for name, value in exact.items():
            budget = 1.5 * relative_error(plain[name], value) + 1e-6
            assert relative_error(ours[name], value) <= budget, (dtype, name)


def test_only_packed_bytes_are_kept_for_backward(opt, device):
    problem = Problem(16, experts=4, k=64, n=96, gates=True, dtype=torch.bfloat16)
    leaves, ids = problem.inputs(device), problem.ids(device)
    packed, _ = quantize(opt, problem, leaves)
    kept = []

    def pack(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run(opt, problem, leaves, ids, packed.transpose(1, 2))
    assert kept
    weight_elements = leaves["weight"].numel()
    assert max(tensor.numel() for tensor in kept) < weight_elements // 4


def decoded_counts(submodule, monkeypatch) -> list[int]:
    """How many experts every decoding to memory makes, in a list that grows."""
    kind, seen = submodule("kernels.quant.formats").Blockwise4Bit, []
    real = kind.decoder

    def spying(*arguments):
        decode = real(*arguments)
        return lambda ids: [seen.append(ids.shape[0]), decode(ids)][1]

    monkeypatch.setattr(kind, "decoder", spying)
    return seen


@pytest.mark.sees_defect("at training lengths the whole stack is decoded")
def test_no_slice_decodes_more_than_its_bound(opt, submodule, device, small_chunks, monkeypatch):
    """chunked: SLICE_BYTES; selective: min(E, T k) experts, however the tokens are routed."""
    seen = decoded_counts(submodule, monkeypatch)
    problem = Problem(2, experts=9, top_k=2)
    leaves, ids = problem.inputs(device), problem.ids(device)
    for strategy, expected in (("chunked", [2, 2, 2, 2, 1]), ("selective", [4])):
        packed, _ = quantize(opt, problem, leaves, strategy=strategy)
        seen.clear()
        y = run(opt, problem, leaves, ids, packed.transpose(1, 2), "triton")
        assert seen == expected
        y.sum().backward()
        assert seen == 2 * expected


@pytest.mark.parametrize("strategy", (*STRATEGIES, "fused"))
def test_the_reference_decodes_an_expert_at_a_time(opt, submodule, device, monkeypatch, strategy):
    """And none that has no rows."""
    seen = decoded_counts(submodule, monkeypatch)
    problem = Problem(2, experts=9, top_k=2, k=64)
    leaves, ids = problem.inputs(device), problem.ids(device)
    packed, _ = quantize(opt, problem, leaves, strategy=strategy)
    seen.clear()
    y = run(opt, problem, leaves, ids, packed.transpose(1, 2), "reference")
    assert seen == [1] * len(ids[(ids >= 0) & (ids < 9)].unique())
    count = len(seen)
    y.sum().backward()
    assert seen == [1] * 2 * count


@pytest.mark.sees_defect("nothing ever turns it on")
def test_choice_is_a_pure_function_of_rows_per_expert(opt, submodule, monkeypatch):
    choose = opt.moe.choose_strategy
    monkeypatch.setattr(submodule("moe.quantized.strategy"), "FUSED_UP_TO_ROWS", 200)
    for rows in (8, 128, 200 * 128):
        assert choose(rows, 128).name == "fused"
    assert choose(200 * 128 + 1, 128).name == "chunked"
    assert choose(512 * 128, 128, compiled=True).name == "fused"
    assert choose(512 * 128 + 1, 128, compiled=True).name == "chunked"
    for refused in ({"fusable": False}, {"fast": False}):
        assert choose(8, 128, **refused).name == "selective"
        assert choose(64, 128, **refused).name == "selective"
        assert choose(65, 128, **refused).name == "chunked"
    assert choose(1 << 20, 128, "fused", fast=False).name == "fused"
    assert choose(8, 128, "chunked").name == "chunked"
    with pytest.raises(ValueError, match="wanted must be one of"):
        choose(8, 128, "quick")
    with pytest.raises(ValueError, match=r'wanted="resident" .* is gone'):
        choose(8, 128, "resident")


@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16), ids=str)
def test_auto_knows_where_the_fused_product_is_fast(
    opt, submodule, device, dtype, monkeypatch, watch
):
    """Half precision on a GPU; on the CPU nothing is decoded in registers."""
    module = submodule("moe.quantized.strategy")
    seen = watch(module, "choose_strategy", lambda *_, fast, **__: fast)
    problem = Problem(2, experts=9, top_k=2, dtype=dtype)
    packed, _ = quantize(opt, problem, problem.inputs(device))
    run(opt, problem, problem.inputs(device), problem.ids(device), packed.transpose(1, 2))
    assert seen == [device.type == "cuda" and dtype == torch.bfloat16]


@pytest.mark.parametrize("strategy", ("fused", "chunked"))
@pytest.mark.parametrize("backend", ("auto", "triton"))
def test_times_choose_the_fused_product_unless_a_path_is_named(
    opt, submodule, device, backend, strategy, monkeypatch, watch
):
    """Triton's path by itself gives way to what is faster; asked for by name it stays."""
    linear, module = submodule("moe.grouped_linear"), submodule("moe.quantized.quantized_linear")
    monkeypatch.setattr(linear, "experts_path_name", lambda *_, **__: "triton")
    problem = Problem(8, rank=3, k=64, n=64)
    leaves, seen = problem.inputs(device), []
    packed, _ = quantize(opt, problem, leaves, strategy=strategy)
    for name in ("grouped_lora_quantized_forward", "grouped_lora_quantized_dx"):
        watch(module, name, lambda *_, path, **__: path, seen)
    y = run(opt, problem, leaves, problem.ids(device), packed.transpose(1, 2), backend)
    y.sum().backward()
    chosen = "measured" if backend == "auto" and strategy == "fused" else "triton"
    assert seen == [chosen] * 2


def test_chunks_are_equal_and_bounded(submodule):
    chunk = submodule("moe.quantized.strategy").chunk_experts
    assert chunk(128, 1536 * 2048, 2) == 16  # eight slices of 96 MiB
    assert chunk(256, 1024 * 2048, 2) == 32  # eight of 128 MiB, the most
    assert chunk(64, 1024 * 2048, 2) == 16  # four of 64 MiB, the least
    assert chunk(512, 2048 * 4096, 2) == 8
    assert chunk(8, 28672 * 4096, 2) == 1  # one expert exceeds the bound alone


def test_two_forwards_and_retained_graphs_agree(opt, device):
    problem = Problem(30, gates=True, bias=True)
    leaves, ids = problem.inputs(device), problem.ids(device)
    packed, _ = quantize(opt, problem, leaves)
    first = run(opt, problem, leaves, ids, packed.transpose(1, 2))
    second = run(opt, problem, leaves, ids, packed.transpose(1, 2))
    assert_same_bits(first, second)
    grads = [torch.autograd.grad(first.sum(), leaves["x"], retain_graph=True)[0] for _ in range(2)]
    assert_same_bits(*grads)


def test_checkpoint_recomputes_the_same(opt, device):
    from torch.utils.checkpoint import checkpoint

    problem = Problem(30, gates=True)
    leaves, ids = problem.inputs(device), problem.ids(device)
    packed, _ = quantize(opt, problem, leaves)

    def layer(x):
        return run(opt, problem, {**leaves, "x": x}, ids, packed.transpose(1, 2))

    plain = torch.autograd.grad(layer(leaves["x"]).square().sum(), leaves["x"])[0]
    again = checkpoint(layer, leaves["x"], use_reentrant=False)
    assert_same_bits(torch.autograd.grad(again.square().sum(), leaves["x"])[0], plain)


def test_float64_is_refused(opt, device):
    problem = dataclasses.replace(Problem(4), dtype=torch.float64)
    leaves, ids = problem.inputs(device), problem.ids(device)
    module = opt.moe.QuantizedExperts((4, 40, 24), device=device)
    with pytest.raises(TypeError, match="x over packed experts must have one of"):
        run(opt, problem, leaves, ids, module.transpose(1, 2))


def test_whole_layer_on_4_bit_experts(opt, device):
    """Experts with both projections in 4 bits equal the same module with the decoded weights."""
    torch.manual_seed(0)
    experts = opt.moe.Experts(5, 48, 40, device=device)
    experts.add_adapter(r=3, alpha=6)
    with torch.no_grad():
        for parameter in experts.expert_lora.parameters():
            parameter.normal_(std=0.1)
    x = torch.randn(11, 48, device=device)
    ids = torch.randint(0, 5, (11, 2), device=device)
    gates = torch.rand(11, 2, device=device)
    packed = {
        name: opt.moe.QuantizedExperts.from_weight(getattr(experts, name).detach())
        for name in ("gate_up_proj", "down_proj")
    }
    with torch.no_grad():
        for name, module in packed.items():
            getattr(experts, name).copy_(module.decode(dtype=torch.float32))
    expected = experts(x, ids, gates)
    for name, module in packed.items():
        delattr(experts, name)
        setattr(experts, name, module)
    assert_same_bits(experts(x, ids, gates), expected)
    experts(x, ids, gates).sum().backward()
    assert all(p.grad is not None for p in experts.expert_lora.parameters())
    assert all(p.grad is None for module in packed.values() for p in module.parameters())


@pytest.fixture
def on_hopper(submodule, dispatch, monkeypatch):
    """Decisions as on an H200, made on tensors of the CPU."""
    module = submodule("moe.quantized.strategy")

    def pick(device, dtype, backend="auto"):
        name = "triton" if backend == "auto" else backend
        return dispatch.Path(name, "Triton on NVIDIA H200")

    monkeypatch.setattr(module, "experts_path", pick)
    monkeypatch.setattr(dispatch, "is_hopper", lambda device: True)
    monkeypatch.setattr(module, "decodes_in_registers", lambda device, dtype: dtype.itemsize == 2)


def stack(opt, shape=(8, 1024, 2048), **options):
    return opt.moe.QuantizedExperts(shape, **options)


def explain(opt, weight, mean, **options) -> str:
    return opt.moe.explain_quantized(weight, mean * weight.shape[0], rank=16, **options)


def test_cuda_and_triton_by_rows_and_direction(opt, submodule, on_hopper, monkeypatch):
    """The rule is the kernels' own, asked with the depth of either sum."""
    asked = []

    def pays(mean, depth, *others):
        asked.append((mean, depth, others[-1]))
        return others[-1]

    monkeypatch.setattr(submodule("kernels.quant.packed_product"), "pays", pays)
    said = explain(opt, stack(opt), 64)
    assert said == (
        "fused: 64 rows per expert, at most 512; forward by CUDA, backward by Triton, as measured"
    )
    assert asked == [(64, 2048, True), (64, 1024, False)]  # rows, depth, along the stored rows


@pytest.mark.parametrize(
    ("shape", "made", "asked", "words"),
    [
        ((8, 1024, 2048), {"nested": True}, {}, "by Triton, since.*: absmax is nested"),
        ((8, 1024, 2048), {}, {"dtype": torch.float16}, "needs bfloat16, got torch.float16"),
        ((8, 1024, 2048), {"blocksize": 32}, {}, "the blocksize must be 64 or more"),
        ((8, 1024, 2048), {}, {"backend": "triton"}, "by Triton, asked for by name"),
        ((8, 1024, 2048), {}, {"backend": "compiled"}, "by CUDA, asked for by name"),
        ((8, 1024, 96), {}, {}, "^chunked: .*blocks of 64 leave their row of 96 elements"),
        ((8, 1024, 2048), {}, {"dtype": torch.float32}, "^chunked: .*float32.* not decoded in reg"),
        ((8, 1024, 2048), {"strategy": "selective"}, {}, "^selective: asked for by name$"),
        ((8, 1024, 2048), {"quant_type": "mxfp4"}, {}, "^fused: .*by CUDA, backward by CUDA"),
        ((8, 1024, 2048), {"quant_type": "fp8"}, {}, "^fused: .*by CUDA, backward by CUDA"),
        ((8, 1024, 96), {"quant_type": "mxfp4"}, {}, "by Triton, since.*multiple of 64.*K = 96"),
        ((8, 1024, 72), {"quant_type": "fp8"}, {}, "by Triton, since.*multiple of 16.*K = 72"),
    ],
)
def test_what_is_in_the_way(opt, on_hopper, shape, made, asked, words):
    said = explain(opt, stack(opt, shape, **made), 64, **asked)
    assert re.search(words, said), said


def test_many_rows_and_none(opt, on_hopper):
    assert explain(opt, stack(opt), 513) == "chunked: 513 rows per expert, more than 512"
    assert explain(opt, stack(opt), 0) == "selective: an empty batch"


def test_other_devices(opt):
    weight = stack(opt, (4, 32, 64))
    said = opt.moe.explain_quantized(weight, 64, device="cpu")
    assert "products are reference's" in said and said.startswith("chunked: 16 rows per expert")
    weight.strategy = "fused"
    said = opt.moe.explain_quantized(weight.transpose(1, 2), 64, device="cpu")
    assert said.endswith("products are reference's, which decodes expert after expert")
    with pytest.raises(ValueError, match="blocks that do not leave their row"):
        opt.moe.explain_quantized(stack(opt, (4, 32, 48), strategy="fused"), 64)
    with pytest.raises(TypeError, match="weight must be in 4 bits, got Tensor"):
        opt.moe.explain_quantized(torch.zeros(2, 3, 4), 64)


@pytest.mark.parametrize("k", [64, 96])
@pytest.mark.parametrize("tokens", [1, 40, 900])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_it_is_what_runs(opt, submodule, device, monkeypatch, dtype, tokens, k, watch):
    module = submodule("moe.quantized.strategy")
    seen = watch(module, "choose_strategy", lambda chosen, *_, **__: chosen)
    weight = torch.randn(8, 32, k, device=device)
    weight = opt.moe.QuantizedExperts.from_weight(weight)
    order = opt.moe.expert_sort(torch.randint(8, (tokens, 1), device=device), 8)
    x = torch.randn(tokens, k, device=device, dtype=dtype)
    opt.moe.grouped_lora_linear(x, weight.transpose(1, 2), order)
    said = opt.moe.explain_quantized(weight, tokens, dtype=dtype)
    assert said.startswith(f"{seen[0].name}: {seen[0].reason}")


PROBLEM = Problem(96, 4, 15, 256, 128, 16, dtype=torch.bfloat16, gates=True, bias=True)


def packed_experts(opt, submodule, monkeypatch, leaves, strategy):
    """4-bit experts (E, K, N), of which `chunked` decodes four at a time: an odd last slice."""
    both = (4 * PROBLEM.k * PROBLEM.n * 2,) * 2
    monkeypatch.setattr(submodule("moe.quantized.strategy"), "SLICE_BYTES", both)
    return quantize(opt, PROBLEM, leaves, strategy=strategy)[0].transpose(1, 2)


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ("chunked", "fused"))
def test_a_captured_step_follows_another_routing(opt, submodule, device, monkeypatch, strategy):
    """Capture forks to the second stream and joins it; the replay gives the bits of eager calls."""
    leaves, ids = PROBLEM.inputs(device), PROBLEM.ids(device)
    weight = packed_experts(opt, submodule, monkeypatch, leaves, strategy)
    grad = torch.randn(PROBLEM.grad_shape(), device=device).bfloat16()

    def step():
        return results(run(opt, PROBLEM, leaves, ids, weight), leaves, grad)

    graph, captured = capture(step, 3)
    for seed, routing in enumerate(("one", "gap", "sentinels", "all-sentinels", "random")):
        ids.copy_(dataclasses.replace(PROBLEM, routing=routing).ids(device, seed))
        with torch.no_grad():
            leaves["x"].mul_(-1)
        expected = step()
        for value in captured.values():
            value.fill_(torch.nan)
        graph.replay()
        for name, value in expected.items():
            assert_same_bits(captured[name], value)


@pytest.mark.gpu
def test_slices_take_turns_over_two_streams(opt, submodule, device, monkeypatch):
    """And whatever follows on the current stream waits for both, though the second one is late."""
    leaves, ids = PROBLEM.inputs(device), PROBLEM.ids(device)
    weight = packed_experts(opt, submodule, monkeypatch, leaves, "chunked")
    expected = run(opt, PROBLEM, leaves, ids, weight).detach()
    kind = submodule("kernels.quant.formats").Blockwise4Bit
    decoder, used = kind.decoder, []

    def late(*arguments):
        decode = decoder(*arguments)

        def slowly(ids):
            used.append(torch.cuda.current_stream())
            if used[-1] != torch.cuda.default_stream():
                torch.cuda._sleep(20_000_000)
            return decode(ids)

        return slowly

    monkeypatch.setattr(kind, "decoder", late)
    found = run(opt, PROBLEM, leaves, ids, weight).detach()
    assert_same_bits(found, expected)
    assert len(used) == 4 and used[0] == used[2] != used[1] == used[3]
