"""grouped_lora_linear over 4-bit experts: strategies equal decoded weights and are explained."""

import dataclasses
import re

import pytest
import torch

from .._compare import assert_all_same_bits, assert_same_bits, relative_error
from ._eager import Problem, assert_graph_follows, eager, gradients, kept_for_backward, product

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


class Case:
    """A problem over packed experts made of its weight, which decode to `dense` (E, K, N).

    Stored rows lie along the sum, or `across` it.
    """

    def __init__(self, opt, device, problem: Problem, across: bool = False, **options) -> None:
        self.opt, self.problem = opt, problem
        self.leaves, self.ids = problem.inputs(device), problem.ids(device)
        weight = self.leaves["weight"].detach()
        stored = weight if across else weight.mT.contiguous()
        packed = opt.moe.QuantizedExperts.from_weight(stored, **options)
        self.weight = packed.quantized_weight() if across else packed.transpose(1, 2)
        self.dense = self.weight.decode(dtype=problem.dtype)
        generator = torch.Generator().manual_seed(5)
        grad = torch.randn(problem.grad_shape(), generator=generator)
        self.grad = grad.to(device, problem.dtype)

    def product(self, backend="auto", weight=None, **leaves) -> torch.Tensor:
        weight = self.weight if weight is None else weight
        given = {**self.leaves, **leaves}
        return product(self.opt.moe, self.problem, given, self.ids, weight, backend=backend)

    def results(self, backend="auto", weight=None) -> dict[str, torch.Tensor]:
        """The product and its gradients by name."""
        return self._with_gradients(self.product(backend, weight))

    def eager(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """The same by eager torch over the decoded weight."""
        leaves = {**self.leaves, "weight": self.dense}
        return self._with_gradients(eager(self.problem, leaves, self.ids, dtype))

    def _with_gradients(self, y: torch.Tensor) -> dict[str, torch.Tensor]:
        return gradients(y, {**self.leaves, "weight": None}, self.grad.to(y.dtype))

    def assert_close(self, found, floor: float, factor: float = 0.0) -> None:
        """Each error is at most `factor` times that of decode-then-eager, plus a floor."""
        plain = self.eager(self.problem.dtype) if factor else None
        for name, value in self.eager(torch.float64).items():
            budget = floor + (factor * relative_error(plain[name], value) if factor else 0.0)
            assert relative_error(found[name], value) <= budget, name


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
    case = Case(opt, device, problem, strategy=strategy, **options)
    actual, expected = case.results("reference"), case.results("reference", case.dense)
    for name, value in expected.items():
        if problem.k % 8 == 0 and problem.n % 8 == 0:
            assert_same_bits(actual[name], value)
        else:
            assert relative_error(actual[name], value) <= 1e-6, name


@pytest.mark.parametrize("across", (False, True))
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("problem", (SHAPES[1], SHAPES[3]), ids=str)
def test_triton_products_over_decoded_slices(opt, device, small_chunks, problem, strategy, across):
    case = Case(opt, device, problem, across, strategy=strategy)
    case.assert_close(case.results("triton"), 5e-6)


GATED = {"gates": True, "routing": "sentinels"}
NESTED, MXFP4, FP8 = {"nested": True}, {"quant_type": "mxfp4"}, {"quant_type": "fp8"}
ROWS, WHOLE = ({**FP8, "block_rows": rows, "block_columns": 0} for rows in (1, 0))
# And how the stack is packed. Sides end inside of blocks and tiles, and a step of the sum holds
# several scales.
FUSED = (
    (Problem(29, bias=True, grouped_in=True, k=64, n=96, **GATED), {"blocksize": 32, **NESTED}),
    (Problem(40, experts=5, rank=3, k=96, n=64, routing="no-ends"), {"blocksize": 32, **NESTED}),
    (
        Problem(21, rank=None, grouped_out=True, k=64, n=33, routing="one"),
        {"blocksize": 32, "quant_type": "fp4"},
    ),
    (Problem(0, bias=True, k=64, n=32, **GATED), {"blocksize": 32, **NESTED}),
    (Problem(23, bias=True, k=192, n=70, rank=3, **GATED), NESTED),
    (Problem(23, k=96, n=128, rank=3, **GATED), {"across": True}),
    (Problem(50, bias=True, k=256, n=33, rank=20, routing="gap"), {"blocksize": 256}),
    (Problem(23, bias=True, k=96, n=70, rank=3, **GATED), MXFP4),
    (Problem(23, k=33, n=160, rank=1, **GATED), {"across": True, **MXFP4}),
    (Problem(2, bias=True, k=64, n=64, rank=128), MXFP4),
    (Problem(23, bias=True, k=200, n=150, rank=3, **GATED), FP8),
    (
        Problem(7, bias=True, k=150, n=89, rank=128, **GATED),
        {"across": True, **FP8, "block_rows": 32, "block_columns": 32},
    ),
    (Problem(23, k=57, n=40, rank=1, grouped_out=True), ROWS),
    (Problem(23, bias=True, k=33, n=16, rank=None, **GATED), {"across": True, **WHOLE}),
    (Problem(0, bias=True, k=64, n=32, **GATED), MXFP4),
    (Problem(0, bias=True, k=57, n=40, **GATED), FP8),
    (Problem(5, k=64, n=64, rank=127, **GATED), MXFP4),
    (Problem(5, k=33, n=40, rank=64, **GATED), {"across": True, **FP8}),
)
# Few in the narrow dtypes: the interpreter is slow.
WIDTHS = [(*case, torch.float32) for case in FUSED]
WIDTHS += [(*FUSED[n], dtype) for n in (4, 7, 10) for dtype in (torch.float16, torch.bfloat16)]
WIDTHS += [(*FUSED[5], torch.bfloat16)]


@pytest.mark.parametrize("backend", ("triton", "reference"))
@pytest.mark.parametrize(("problem", "options", "dtype"), WIDTHS, ids=str)
def test_fused(opt, device, problem, options, dtype, backend):
    """Every gradient of the product that decodes on the way."""
    problem = dataclasses.replace(problem, dtype=dtype)
    case = Case(opt, device, problem, strategy="fused", **options)
    truncates = backend == "triton" and device.type == "cpu" and dtype == torch.bfloat16
    factor = 0.0 if dtype == torch.float32 else 3.5 if truncates else 1.5
    case.assert_close(case.results(backend), 5e-6, factor)


def test_fused_refuses_blocks_that_straddle_rows(opt, device):
    problem = Problem(4)  # K = 24
    with pytest.raises(ValueError, match="blocks that do not leave their row"):
        Case(opt, device, problem, strategy="fused").product()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("strategy", (*STRATEGIES, "fused"))
def test_on_a_gpu_within_the_budget_of_dequantize_then_eager(opt, device, strategy, dtype):
    """Shapes of Qwen3-30B-A3B's down projection on a sixteenth of its experts."""
    problem = Problem(
        300, experts=8, top_k=4, gates=True, k=768, n=2048, rank=16, dtype=dtype, grouped_in=True
    )
    case = Case(opt, device, problem, strategy=strategy)
    ours, again = case.results("triton"), case.results("triton")
    assert_all_same_bits(ours.values(), again.values())
    case.assert_close(ours, 1e-6, 1.5)


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float16), ids=str)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_narrow_dtypes_within_the_budget_of_dequantize_then_eager(
    opt, device, small_chunks, strategy, dtype
):
    problem = Problem(50, gates=True, bias=True, k=64, n=96, dtype=dtype)
    case = Case(opt, device, problem, strategy=strategy)
    case.assert_close(case.results(), 1e-6, 1.5)


def test_only_packed_bytes_are_kept_for_backward(opt, device):
    problem = Problem(16, experts=4, k=64, n=96, gates=True, dtype=torch.bfloat16)
    case = Case(opt, device, problem)
    kept = kept_for_backward(case.product)
    assert max(tensor.numel() for tensor in kept) < case.dense.numel() // 4


def decoded_counts(submodule, monkeypatch) -> list[int]:
    """How many experts every decoding to memory has room for, in a list that grows."""
    kind, seen = submodule("kernels.quant.formats").Blockwise4Bit, []
    decoder, decode_slice = kind.decoder, kind.decode_slice

    def spying(*arguments):
        decode = decoder(*arguments)
        return lambda ids: [seen.append(ids.shape[0]), decode(ids)][1]

    def spying_on_slices(*arguments):
        seen.append(arguments[-1].shape[0])
        decode_slice(*arguments)

    monkeypatch.setattr(kind, "decoder", spying)
    monkeypatch.setattr(kind, "decode_slice", spying_on_slices)
    return seen


@pytest.mark.sees_defect("at training lengths the whole stack is decoded")
def test_no_slice_decodes_more_than_its_bound(opt, submodule, device, small_chunks, monkeypatch):
    """chunked: SLICE_BYTES; selective: min(E, T k) experts, however the tokens are routed."""
    seen = decoded_counts(submodule, monkeypatch)
    for strategy, expected in (("chunked", [2, 2, 2, 2, 1]), ("selective", [4])):
        case = Case(opt, device, Problem(2, experts=9, top_k=2), strategy=strategy)
        seen.clear()
        y = case.product("triton")
        assert seen == expected
        y.sum().backward()
        assert seen == 2 * expected


@pytest.mark.parametrize("strategy", (*STRATEGIES, "fused"))
def test_the_reference_decodes_an_expert_at_a_time(opt, submodule, device, monkeypatch, strategy):
    seen = decoded_counts(submodule, monkeypatch)
    case = Case(opt, device, Problem(2, experts=9, top_k=2, k=64), strategy=strategy)
    seen.clear()
    y = case.product("reference")
    assert seen == [1] * len(case.ids[(case.ids >= 0) & (case.ids < 9)].unique())
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


@pytest.mark.parametrize("strategy", ("fused", "chunked"))
@pytest.mark.parametrize("backend", ("auto", "triton"))
def test_times_choose_the_fused_product_unless_a_path_is_named(
    opt, submodule, device, backend, strategy, monkeypatch, watch
):
    """Triton's path by itself gives way to what is faster; asked for by name it stays."""
    linear, module = submodule("moe.grouped_linear"), submodule("moe.quantized.quantized_linear")
    monkeypatch.setattr(linear, "experts_path_name", lambda *_, **__: "triton")
    case, seen = Case(opt, device, Problem(8, rank=3, k=64, n=64), strategy=strategy), []
    for name in ("grouped_lora_quantized_forward", "grouped_lora_quantized_dx"):
        watch(module, name, lambda *_, path, **__: path, seen)
    case.product(backend).sum().backward()
    chosen = "measured" if backend == "auto" and strategy == "fused" else "triton"
    assert seen == [chosen] * 2


def test_two_forwards_and_retained_graphs_agree(opt, device):
    case = Case(opt, device, Problem(30, gates=True, bias=True))
    first, x = case.product(), case.leaves["x"]
    assert_same_bits(first, case.product())
    grads = [torch.autograd.grad(first.sum(), x, retain_graph=True)[0] for _ in range(2)]
    assert_same_bits(*grads)


def test_float64_is_refused(opt, device):
    problem = dataclasses.replace(Problem(4), dtype=torch.float64)
    leaves, ids = problem.inputs(device), problem.ids(device)
    module = opt.moe.QuantizedExperts((4, 40, 24), device=device)
    with pytest.raises(TypeError, match="x over packed experts must have one of"):
        product(opt.moe, problem, leaves, ids, module.transpose(1, 2))


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
    return opt.moe.explain_quantized(weight, mean * weight.shape[0], **options)


def test_cuda_and_triton_by_rows_and_direction(opt, submodule, on_hopper, monkeypatch):
    """The rule is the kernels' own, asked with the depth of either sum."""
    asked = []

    def pays(mean, depth, least_rows):
        asked.append((mean, depth))
        return len(asked) == 1

    monkeypatch.setattr(submodule("kernels.quant.packed_product"), "pays", pays)
    said = explain(opt, stack(opt), 64)
    assert said == (
        "fused: 64 rows per expert, at most 512; forward by CUDA, backward by Triton, as measured"
    )
    assert asked == [(64, 2048), (64, 1024)]  # rows, depth


@pytest.mark.parametrize(
    ("shape", "made", "asked", "words"),
    [
        ((8, 1024, 2048), {"nested": True}, {}, "^fused: .*by CUDA, backward by CUDA"),
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


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", (*STRATEGIES, "fused"))
def test_a_captured_step_follows_another_routing(opt, submodule, device, monkeypatch, strategy):
    """Of which `chunked` decodes four experts at a time: an odd last slice."""
    both = (4 * PROBLEM.k * PROBLEM.n * 2,) * 2
    monkeypatch.setattr(submodule("moe.quantized.strategy"), "SLICE_BYTES", both)
    case = Case(opt, device, PROBLEM, strategy=strategy)

    def redraw(seed: int, routing: str) -> None:
        case.ids.copy_(dataclasses.replace(PROBLEM, routing=routing).ids(device, seed))
        case.leaves["x"].mul_(-1)

    assert_graph_follows(case.results, redraw)
