"""grouped_lora_linear and parallel_linear_lora against eager experts in float64, on every path."""

import dataclasses
import functools
import logging
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .._compare import assert_error_at_most, assert_same_bits, no_waits, relative_error
from ._eager import (
    Problem,
    assert_graph_follows,
    assert_no_worse,
    eager,
    gradients,
    in_float64,
    predecessors,
    product,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOOR = {torch.float32: 5e-7, torch.bfloat16: 1e-3, torch.float16: 1.3e-4}


def usual_sizes(problem, leaves, ids, grad) -> dict[str, float]:
    """The norm of every result if the signs of its terms were drawn: of operands squared."""
    squares = {name: x if x is None else x.detach() ** 2 for name, x in in_float64(leaves).items()}
    squares = {name: x if x is None else x.requires_grad_() for name, x in squares.items()}
    squared = dataclasses.replace(problem, scaling=problem.scaling**2)
    sums = gradients(eager(squared, squares, ids, torch.float64), squares, grad.double() ** 2)
    return {name: value.sum().sqrt().item() for name, value in sums.items()}


def assert_close_to_eager(problem, run, device, backend="auto", factor=1.5, seed=0) -> None:
    """Each error is at most `factor` times eager's, or half a rounding of the usual size."""
    ids = problem.ids(device, seed)
    leaves = problem.inputs(device, seed)
    generator = torch.Generator().manual_seed(seed + 2)
    grad = torch.randn(problem.grad_shape(), generator=generator, dtype=torch.float64)
    grad = grad.to(device, problem.dtype)
    actual, wide = run(problem, leaves, ids, grad, backend), in_float64(leaves)
    exact = gradients(eager(problem, wide, ids, torch.float64), wide, grad.double())
    plain = gradients(eager(problem, leaves, ids, problem.dtype), leaves, grad)
    usual = usual_sizes(problem, leaves, ids, grad)
    floors = {
        name: FLOOR[problem.dtype] * max(usual[name] / max(expected.norm().item(), 1e-300), 1.0)
        for name, expected in exact.items()
    }
    assert_no_worse(actual, plain, exact, factor, floors)


SHAPES = (
    Problem(33),
    Problem(33, peft=True),
    Problem(40, top_k=3, experts=5, rank=None, bias=True),
    Problem(29, gates=True),
    Problem(29, gates=True, bias=True, peft=True),
    Problem(29, grouped_in=True, gates=True, bias=True),
    Problem(29, grouped_out=True, bias=True),
    Problem(29, grouped_in=True, grouped_out=True),
    Problem(50, top_k=1, experts=3, rank=12),
    Problem(17, k=96, n=80, rank=1),
    Problem(20, k=32, n=32, rank=8, peft=True, gates=True),
    Problem(64, rank=48, gates=True),
)


@pytest.mark.sees_defect("the gradient of a bias is None and that of a trained weight is zero")
@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("problem", SHAPES, ids=str)
def test_error_against_float64(run, device, problem, dtype):
    assert_close_to_eager(dataclasses.replace(problem, dtype=dtype), run, device)


@pytest.mark.sees_defect("float32 LoRA over half-precision activations raises")
@pytest.mark.parametrize("lora_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gates", [False, True])
def test_lora_dtype_differs_from_the_activations(run, device, lora_dtype, gates):
    """PEFT keeps LoRA in float32 over a bfloat16 base; gradients come in the LoRA's dtype."""
    problem = Problem(40, dtype=torch.bfloat16, lora_dtype=lora_dtype, peft=True, gates=gates)
    assert_close_to_eager(problem, run, device)


ROUTINGS = ("random", "one", "no-ends", "gap", "sentinels", "all-sentinels")


@pytest.mark.sees_defect("no tokens")
@pytest.mark.sees_defect(
    "masked loads without a value for masked lanes, sizes that are no multiple of a tile"
)
@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 40),
    top_k=st.integers(1, 4),
    experts=st.integers(1, 9),
    k=st.integers(1, 40),
    n=st.integers(1, 40),
    rank=st.none() | st.integers(1, 20),
    options=st.lists(st.booleans(), min_size=5, max_size=5),
    routing=st.sampled_from(ROUTINGS),
    seed=st.integers(0, 1000),
)
def test_generated_problems(
    run, device, tokens, top_k, experts, k, n, rank, options, routing, seed
):
    flags = dict(zip(("bias", "gates", "grouped_in", "grouped_out", "peft"), options, strict=True))
    flags["grouped_out"] &= not flags["gates"]
    problem = Problem(tokens, top_k, experts, k, n, rank, **flags, routing=routing)
    assert_close_to_eager(problem, run, device, seed=seed)


E, T, TOP_K, K, N, R = 3, 5, 2, 8, 16, 4


@pytest.fixture
def good(moe) -> dict:
    ids = torch.randint(0, E, (T, TOP_K), generator=torch.Generator().manual_seed(0))
    return {
        "x": torch.ones(T, K),
        "weight": torch.ones(E, K, N),
        "order": moe.expert_sort(ids, E),
        "lora_a": torch.ones(E, R, K),
        "lora_b": torch.ones(E, N, R),
        "bias": torch.ones(E, N),
        "gates": torch.ones(T, TOP_K),
    }


CASES = [
    ({"x": [[1.0]]}, TypeError, "x must be a dense tensor"),
    ({"x": torch.ones(T, K, dtype=torch.int64)}, TypeError, "x must have dtype"),
    ({"x": torch.ones(1, T, K)}, ValueError, "x must have 2 dimensions"),
    ({"x": torch.ones(T + 1, K)}, ValueError, "x must have T = 5 rows"),
    ({"x": torch.ones(T, K + 1)}, ValueError, r"weight must be \(E, K, N\)"),
    ({"x": torch.ones(T, K), "grouped_in": True}, ValueError, "x must have T k = 10 rows"),
    ({"weight": torch.ones(E, N, K)}, ValueError, r"weight\.transpose\(1, 2\)"),
    ({"weight": torch.ones(E + 1, K, N)}, ValueError, "E = 3"),
    ({"weight": torch.ones(E, K, 0)}, ValueError, "weight must have positive sizes"),
    ({"weight": torch.ones(E, K, N).half()}, TypeError, "weight must have dtype float32"),
    ({"weight": torch.ones(E, K, N, device="meta")}, ValueError, "weight must be on the device"),
    ({"order": (1, 2)}, TypeError, "order must be the result of expert_sort"),
    ({"lora_b": None}, ValueError, "give both or none"),
    ({"lora_a": None}, ValueError, "give both or none"),
    ({"lora_a": torch.ones(E, R, K + 1)}, ValueError, r"lora_a must be \(E, r, K\)"),
    ({"lora_a": torch.ones(E, 0, K)}, ValueError, "r >= 1"),
    ({"lora_b": torch.ones(E, R, N)}, ValueError, r"lora_b must be \(E, N, r\)"),
    ({"lora_b": torch.ones(E, N, R + 1)}, ValueError, r"lora_b must be \(E, N, r\)"),
    ({"lora_a": torch.ones(E, R, K).double()}, TypeError, "lora_a is float64"),
    ({"lora_b": torch.ones(E, N, R, device="meta")}, ValueError, "lora_b must be on the device"),
    ({"scaling": "2"}, TypeError, "scaling must be a number"),
    ({"scaling": torch.tensor(2.0)}, TypeError, "scaling must be a number"),
    ({"bias": torch.ones(N)}, ValueError, "bias must have 2 dimensions"),
    ({"bias": torch.ones(E, K)}, ValueError, r"bias must be \(E, N\)"),
    ({"gates": torch.ones(T, 1)}, ValueError, r"gates must be \(T, k\)"),
    ({"gates": torch.ones(T, TOP_K).long()}, TypeError, "gates must have dtype"),
    ({"grouped_out": True}, ValueError, "gates combine them"),
    ({"backend": "cutlass"}, ValueError, "backend must be one of"),
    ({"backend": "grouped_mm"}, ValueError, 'takes no LoRA; use "auto"'),
]


@pytest.mark.parametrize(("change", "error", "message"), CASES, ids=lambda value: str(value)[:40])
def test_wrong_arguments(moe, good, monkeypatch, submodule, change, error, message):
    launched = mock.Mock(side_effect=AssertionError("an op was launched"))
    monkeypatch.setattr(submodule("moe.grouped_linear"), "_op", launched)
    arguments = {**good, **change}
    with pytest.raises(error, match=message):
        moe.grouped_lora_linear(**arguments)


def test_the_portable_path_says_so_once(good, moe, dispatch, caplog):
    dispatch.say_once.cache_clear()
    with caplog.at_level(logging.WARNING):
        moe.grouped_lora_linear(**good)
        moe.grouped_lora_linear(**good)
    said = [record.message for record in caplog.records if "portable path" in record.message]
    assert len([line for line in said if line.startswith("grouped_lora_linear")]) == 1


def test_explain(opt, device):
    text = opt.explain("grouped_lora_linear", device="cpu")
    assert text.startswith("reference: ")
    assert opt.explain("grouped_lora_linear", device="cpu", backend="triton").startswith("triton")
    with pytest.raises(ValueError, match="backend must be one of"):
        opt.explain("grouped_lora_linear", device="cpu", backend="cutlass")


def test_adapters_by_twice_the_same_target_and_by_a_tensor(opt) -> None:
    experts = opt.moe.Experts(3, 4, 5)
    experts.add_adapter("one", r=2, alpha=4.0, targets=("down", "down"))
    assert [name for name, p in experts.expert_lora.items() if "one" in p.adapters] == ["down"]
    with pytest.raises(TypeError, match="dropout"):
        experts.add_adapter("two", r=2, alpha=4.0, dropout=torch.zeros(2))
    assert not any("two" in p.adapters for p in experts.expert_lora.values())


PATHS_SHAPES = (
    Problem(33, rank=5, bias=True, peft=True),
    Problem(15, gates=True, bias=True, grouped_in=True, routing="sentinels"),
    Problem(40, experts=3, rank=20, gates=True, k=70, n=130, routing="gap"),
    Problem(21, rank=None, grouped_out=True, routing="one"),
    Problem(20, top_k=1, grouped_in=True, grouped_out=True, rank=3),
)


WIDTHS = [(problem, torch.float32) for problem in PATHS_SHAPES]
WIDTHS += [(problem, dtype) for problem in PATHS_SHAPES[:2] for dtype in DTYPES[1:]]


@pytest.mark.parametrize(("problem", "dtype"), WIDTHS, ids=str)
def test_triton(run, device, problem, dtype):
    """The interpreter truncates where it stores bfloat16, xa and y: twice rounding's error each."""
    truncates = device.type == "cpu" and dtype == torch.bfloat16
    problem = dataclasses.replace(problem, dtype=dtype)
    assert_close_to_eager(problem, run, device, "triton", factor=3.5 if truncates else 1.5)


def test_the_compiled_path_is_for_4_bit_experts(moe, opt, dispatch, monkeypatch, device):
    """On any device: over dense weights the error names what to use instead."""
    problem = Problem(4)
    leaves, order = problem.inputs(device), moe.expert_sort(problem.ids(device), problem.experts)
    said = r'is for 4-bit experts: .* use "auto" or "triton"'
    with pytest.raises(ValueError, match=said):
        moe.grouped_lora_linear(leaves["x"], leaves["weight"], order, backend="compiled")
    with pytest.raises(ValueError, match=said):
        opt.explain("grouped_lora_linear", device=device, backend="compiled")
    path = dispatch.experts_path.__wrapped__
    pick = functools.partial(path, device, torch.bfloat16, "compiled")
    monkeypatch.setattr(dispatch, "is_hopper", lambda _: False)
    with pytest.raises(ValueError, match=r"needs a device of capability 9\.0 and Triton"):
        pick()
    monkeypatch.setattr(dispatch, "is_hopper", lambda _: True)
    assert pick().name == "compiled"
    with pytest.raises(ValueError, match=said):
        pick(dense=True)


@pytest.mark.parametrize("packed", [None, "nf4", "mxfp4", "fp8"])
@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_rows_and_gates_of_sentinels_are_not_read(moe, device, backend, packed):
    """They may hold anything, such as what memory held before."""
    problem = Problem(9, k=64, n=64, gates=True, grouped_in=True, routing="sentinels")
    ids, leaves = problem.ids(device), problem.inputs(device)
    sort_backend = "triton" if backend == "triton" else "auto"
    order, weight = moe.expert_sort(ids, problem.experts, backend=sort_backend), None
    valid = int(order.offsets[-1])
    assert 0 < valid < ids.numel()
    if packed is not None:
        stack = leaves["weight"].detach().mT.contiguous()
        experts = moe.QuantizedExperts.from_weight(stack, quant_type=packed, strategy="fused")
        weight = experts.quantized_weight().transpose(1, 2)

    def run() -> list[torch.Tensor]:
        y = product(moe, problem, leaves, ids, weight, backend=backend)
        wanted = [x for name, x in leaves.items() if x is not None and name != "weight"]
        return [y.detach(), *torch.autograd.grad(y.square().sum(), wanted)]

    expected = run()
    with torch.no_grad():
        leaves["x"][valid:] = torch.nan
        leaves["gates"].view(-1)[order.slots[valid:]] = torch.nan
    for actual, wanted in zip(run(), expected, strict=True):
        assert_same_bits(actual, wanted)


@pytest.mark.parametrize("rank", [4, None])
@pytest.mark.parametrize("gated", [False, True])
def test_two_projections_as_the_predecessor_chains_them(moe, device, gated, rank):
    """gate_up to expert order, down with k = 1 from it, gates or slot order at the end."""
    call, wide = moe.parallel_linear_lora, torch.float64
    up, down = Problem(19, 3, 6, 16, 12, rank), Problem(57, 1, 6, 12, 16, rank)
    first, second, ids = up.inputs(device), down.inputs(device, seed=1), up.ids(device)
    gates = torch.rand(19, 3, device=device, requires_grad=True)
    leaves = [first["x"], first["weight"], second["weight"]]
    leaves += [of[name] for of in (first, second) for name in ("lora_a", "lora_b") if rank]
    leaves += [gates] if gated else []

    hidden = call(**predecessors(up, first, ids, grouped_out=True, use_fused_dX=True)).relu()
    options = {"gates": gates if gated else None, "grouped_in": True}
    y = call(**predecessors(down, {**second, "x": hidden}, ids, **options))
    hidden = eager(up, first, ids, wide).relu()
    right = eager(down, {**second, "x": hidden}, ids.reshape(-1, 1), wide)
    if gated:
        right = (right.view(19, 3, 16) * gates.double()[..., None]).sum(1)

    grad = torch.randn_like(right)
    found = [y, *torch.autograd.grad(y, leaves, grad.float())]
    wanted = [right, *torch.autograd.grad(right, leaves, grad)]
    for one, other in zip(found, wanted, strict=True):
        assert_error_at_most(one, other, 1e-5)


def test_wrong_arguments_parallel(moe, device):
    problem = Problem(5, 2, 4, 8, 8, 2)
    good = predecessors(problem, problem.inputs(device), problem.ids(device))
    for changes, words in (
        ({"expert_offsets": good["expert_offsets"][:-1]}, "expert_offsets must be"),
        ({"sorted_expert_idxs": good["sorted_expert_idxs"][:-1]}, "sorted_expert_idxs must be"),
        ({"k": 3}, "k must divide"),
        ({"lora_B": good["lora_B"][:, :-1]}, "must share r E"),
        ({"lora_A": torch.tensor(1.0)}, r"lora_A must be \(r E, K\)"),
    ):
        with pytest.raises(ValueError, match=words):
            moe.parallel_linear_lora(**{**good, **changes})


# One projection of each listed model, with experts cut down so that float64 fits in seconds; rows
# per expert, K and N are the models' own.
REAL = {
    "Qwen3.5": Problem(512, 8, 64, 2048, 1024, 16),
    "Qwen3": Problem(1024, 8, 64, 2048, 1536, 16),
    "OLMoE": Problem(1024, 8, 32, 2048, 2048, 64),
    "Mixtral": Problem(1024, 2, 4, 4096, 3584, 16),
    "decode": Problem(1, 8, 64, 2048, 1024, 16),
}


RANKS = (1, 3, 8, 12, 24, 64, 96, 128, 200, 256)
BFLOAT16 = {"dtype": torch.bfloat16}
AT_SIZE = [
    *(
        dataclasses.replace(problem, dtype=dtype, peft=True, gates=True)
        for problem in REAL.values()
        for dtype in DTYPES
    ),
    *(Problem(300, 4, 8, 256, 192, rank, **BFLOAT16, peft=True) for rank in RANKS),
    *(
        Problem(2000, 4, 16, 512, 320, 16, **BFLOAT16, bias=True, gates=True, routing=routing)
        for routing in ("one", "gap", "sentinels", "all-sentinels")
    ),
]


@pytest.mark.gpu
@pytest.mark.parametrize("problem", AT_SIZE, ids=str)
def test_triton_at_size(run, device, problem):
    assert_close_to_eager(problem, run, device, "triton")


@pytest.mark.gpu
def test_auto_takes_triton(opt, device):
    assert opt.explain("grouped_lora_linear", device=device).startswith("triton: ")


@pytest.mark.gpu
@pytest.mark.sees_defect("the fallback loops over experts on the host")
def test_nothing_waits_for_the_device(run, device):
    problem = dataclasses.replace(
        REAL["Qwen3.5"], dtype=torch.bfloat16, gates=True, bias=True, routing="sentinels"
    )
    leaves, ids = problem.inputs(device), problem.ids(device)
    grad = torch.randn(problem.grad_shape(), device=device).bfloat16()
    run(problem, leaves, ids, grad, "triton")  # compiles
    with no_waits():
        run(problem, leaves, ids, grad, "triton")


@pytest.mark.gpu
def test_a_captured_step_follows_another_routing(run, device):
    problem = Problem(64, 4, 16, 256, 128, 16, dtype=torch.bfloat16, gates=True, bias=True)
    leaves, ids = problem.inputs(device), problem.ids(device)
    grad = torch.randn(problem.grad_shape(), device=device).bfloat16()

    def redraw(seed: int, routing: str) -> None:
        ids.copy_(dataclasses.replace(problem, routing=routing).ids(device, seed))

    assert_graph_follows(lambda: run(problem, leaves, ids, grad, "triton"), redraw)


@pytest.mark.gpu
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
