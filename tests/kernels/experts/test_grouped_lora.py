"""The ops grouped_lora_*: results slot by slot, gradients, strides, opcheck; what they launch."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ..._compare import assert_error_at_most, assert_same_bits
from ._grouped import EXPERTS, PATHS, RANK, TOKENS, TOP_K, K, N, doubles, operands, valid_slots

FORWARD_NAMES = ("x", "weight", "lora_a", "lora_b", "bias")


def forward_arguments(problem: dict, path: str, grouped_out: bool = False) -> tuple:
    operands = (*(problem[name] for name in FORWARD_NAMES), 0.5, *problem["order"].operands())
    return (*operands, TOP_K, grouped_out, path)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("grouped_out", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_forward_results(submodule, ops, device, path, grouped_out):
    """y and the scaled xa of every slot; zero where an id names no expert."""
    problem = operands(submodule, device)
    y, xa = ops.grouped_lora_forward(*forward_arguments(problem, path, grouped_out))
    wide = doubles(problem)
    expected = torch.zeros(TOKENS * TOP_K, N, dtype=torch.float64)
    low = torch.zeros(TOKENS * TOP_K, RANK, dtype=torch.float64)
    for slot, token, e in valid_slots(problem):
        x = wide["x"][token]
        low[slot] = 0.5 * wide["lora_a"][e] @ x
        expected[slot] = x @ wide["weight"][e] + wide["lora_b"][e] @ low[slot] + wide["bias"][e]
    slots = problem["slots"].cpu()
    assert_error_at_most(y.cpu(), expected[slots] if grouped_out else expected, 1e-6)
    assert_error_at_most(xa.cpu(), low[slots], 1e-6)
    invalid = torch.ones(TOKENS * TOP_K, dtype=torch.bool)
    invalid[[slot for slot, _, _ in valid_slots(problem)]] = False
    assert (y.cpu()[invalid[slots] if grouped_out else invalid] == 0).all()


@pytest.mark.parametrize("path", PATHS)
def test_forward_opcheck(submodule, ops, device, path):
    problem = operands(submodule, device, torch.bfloat16)
    torch.library.opcheck(ops.grouped_lora_forward.default, forward_arguments(problem, path))


@pytest.mark.parametrize("path", ["compiled", "measured"])
def test_decoded_slices_of_4_bit_experts_take_triton(submodule, ops, device, path):
    """Paths of the product over packed weights; decoded ones are weights like all others."""
    problem = operands(submodule, device)
    expected = ops.grouped_lora_forward(*forward_arguments(problem, "triton"))
    for one, other in zip(
        ops.grouped_lora_forward(*forward_arguments(problem, path)), expected, strict=True
    ):
        assert torch.equal(one, other)


@pytest.mark.sees_defect(
    "gradients are added by atomics in the parameter's dtype: rounded often, never the same"
)
def test_no_kernel_uses_atomics(submodule):
    """Two additions in an order that differs from run to run would differ in their last bits."""
    folder = Path(submodule("kernels").__file__).parent
    sources = [path.read_text() for path in folder.rglob("*.py")]
    assert sum("@triton.jit" in source for source in sources) >= 5
    assert not any(re.search(r"\btl\.atomic", source) for source in sources)


@pytest.fixture
def calls(submodule, monkeypatch):
    """Names of the launches on the Triton path, in order."""
    made: list[str] = []
    module = submodule("kernels.experts.grouped_launch_triton")

    def watch(name: str) -> None:
        real = getattr(module, name)

        def launch(*arguments, **options):
            made.append(name)
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, launch)

    for name in ("low_rank", "grouped_product", "expert_products"):
        watch(name)
    return made


@pytest.mark.sees_defect("x A^T is computed again for every tile of columns")
@pytest.mark.sees_defect("dY B is computed again for every tile of columns")
@pytest.mark.sees_defect("dA and dB compute x A^T and dY B again for every block")
def test_low_rank_products_are_computed_once(submodule, moe_problem, calls):
    """x A^T once in forward, dY B once in dX; the gradients of A and B read both again."""
    y, leaves = moe_problem
    assert calls == ["low_rank", "grouped_product"]
    calls.clear()
    torch.autograd.grad(y.sum(), leaves)
    assert calls == ["low_rank", "grouped_product", "expert_products"]


@pytest.fixture
def moe_problem(submodule, device, calls):
    """(y, its leaves) of one differentiable product on the Triton path."""
    problem = operands(submodule, device)
    leaves = [problem[name].detach().requires_grad_() for name in ("x", "lora_a", "lora_b")]
    order = submodule("moe").expert_sort(problem["ids"].to(device), 3)
    x, a, b = leaves
    linear = submodule("moe").grouped_lora_linear
    y = linear(x, problem["weight"], order, a, b, backend="triton")
    return y, leaves


@pytest.fixture
def launched(submodule, monkeypatch, device):
    """{launch: its tensors} of forward on the Triton path; nothing runs. And the operands."""
    module = submodule("kernels.experts.grouped_launch_triton")
    seen: dict[str, list] = {}
    for name in ("low_rank", "grouped_product"):
        monkeypatch.setattr(
            module, name, lambda *operands, name=name, **_: seen.update({name: operands})
        )
    problem = operands(submodule, device, torch.float16)
    records = submodule("kernels.experts.grouped_lora")
    lora = records.LoraFactors(problem["lora_a"], problem["lora_b"], 0.5)
    weights = records.ExpertWeights(problem["weight"], lora, problem["bias"])
    module.grouped_lora_forward_triton(problem["x"], weights, problem["order"], TOP_K, True)
    return problem, seen


def same_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    return (one.data_ptr(), one.dtype) == (other.data_ptr(), other.dtype)


@pytest.mark.sees_defect("rows are gathered by a pass of their own")
def test_no_gathered_copy(launched):
    """Rows are gathered by the kernel's loads: it gets x itself, T rows, and the slots."""
    problem, seen = launched
    for name in ("low_rank", "grouped_product"):
        assert same_memory(seen[name][0], problem["x"])
        assert any(one is problem["order"] for one in seen[name])


def test_factors_are_read_in_place(launched):
    """Float32 factors under float16, B in PEFT's strides: launches get them as they are."""
    problem, seen = launched
    assert not problem["lora_b"].is_contiguous() and problem["lora_b"].dtype == torch.float32
    assert same_memory(seen["low_rank"][1], problem["lora_a"])
    assert same_memory(seen["grouped_product"][1], problem["weight"])
    assert same_memory(seen["grouped_product"][3], problem["lora_b"])


DX_NAMES = ("dy", "weight", "lora_a", "lora_b", "bias")


def dx_arguments(
    problem: dict, path: str, grouped_out: bool = False, wants_dx: bool = True
) -> tuple:
    return (
        *(problem[name] for name in DX_NAMES),
        0.5,
        *problem["order"].operands(),
        problem["gates"],
        problem["x"],
        1,
        TOP_K,
        grouped_out,
        wants_dx,
        path,
    )


@pytest.mark.kernels_ci
@pytest.mark.parametrize("grouped_out", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_dx_results(submodule, ops, device, path, grouped_out):
    problem = operands(submodule, device)
    dx, yb, dgates = ops.grouped_lora_dx(*dx_arguments(problem, path, grouped_out))
    wide = doubles(problem)
    slots = problem["slots"].cpu()
    expected = torch.zeros(TOKENS * TOP_K, K, dtype=torch.float64)
    low = torch.zeros(TOKENS * TOP_K, RANK, dtype=torch.float64)
    dots = torch.zeros(TOKENS * TOP_K, dtype=torch.float64)
    for slot, token, e in valid_slots(problem):
        dy = wide["dy"][slot]
        low[slot] = 0.5 * dy @ wide["lora_b"][e]
        through = wide["weight"][e] @ dy + low[slot] @ wide["lora_a"][e]
        expected[slot] = wide["gates"].reshape(-1)[slot] * through
        dots[slot] = through @ wide["x"][token] + dy @ wide["bias"][e]
    assert_error_at_most(dx.cpu(), expected[slots] if grouped_out else expected, 1e-6)
    assert_error_at_most(yb.cpu(), low[slots], 1e-6)
    assert_error_at_most(dgates.cpu(), dots, 1e-6)


@pytest.mark.parametrize("path", PATHS)
def test_without_dx_the_rest_is_the_same(submodule, ops, device, path):
    problem = operands(submodule, device)
    _, yb, dgates = ops.grouped_lora_dx(*dx_arguments(problem, path))
    dx, again, gates_again = ops.grouped_lora_dx(*dx_arguments(problem, path, wants_dx=False))
    assert dx.shape == (0, K)
    assert torch.equal(yb, again) and torch.equal(dgates, gates_again)


@pytest.mark.parametrize("path", PATHS)
def test_dx_opcheck(submodule, ops, device, path):
    problem = operands(submodule, device, torch.bfloat16)
    torch.library.opcheck(ops.grouped_lora_dx.default, dx_arguments(problem, path))


ROWS = TOKENS * TOP_K


def dab_arguments(submodule, device, path, dtype=torch.float32, wants=(True, True)) -> tuple:
    problem = operands(submodule, device, dtype)
    generator = torch.Generator().manual_seed(1)
    xa, yb = torch.randn(2, ROWS, RANK, generator=generator).to(device, dtype).unbind()
    tensors = (problem["x"], problem["dy"], xa, yb, problem["lora_a"], problem["lora_b"])
    order = problem["order"].operands()
    return problem, (*tensors, *order, problem["gates"], TOP_K, 1, *wants, path)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("path", PATHS)
def test_dab_results(submodule, ops, device, path):
    problem, given = dab_arguments(submodule, device, path)
    da, db = ops.grouped_lora_dab(*given)
    wide = doubles(problem)
    xa, yb = given[2].double().cpu(), given[3].double().cpu()
    expected_a = torch.zeros(da.shape, dtype=torch.float64)
    expected_b = torch.zeros(db.shape, dtype=torch.float64)
    rows = problem["rows"].cpu()
    for slot, token, e in valid_slots(problem):
        gate = wide["gates"].reshape(-1)[slot]
        expected_a[e] += gate * torch.outer(yb[rows[slot]], wide["x"][token])
        expected_b[e] += gate * torch.outer(wide["dy"][slot], xa[rows[slot]])
    assert_error_at_most(da.cpu(), expected_a, 1e-6)
    assert_error_at_most(db.cpu(), expected_b, 1e-6)


@pytest.mark.parametrize("path", PATHS)
def test_experts_without_rows_get_exact_zeros(submodule, ops, device, path):
    problem, given = dab_arguments(submodule, device, path)
    empty = sorted(set(range(EXPERTS)) - {e for _, _, e in valid_slots(problem)})
    assert empty == [1]
    for gradient in ops.grouped_lora_dab(*given):
        assert_same_bits(gradient[1].contiguous(), torch.zeros_like(gradient[1]).contiguous())


@pytest.mark.parametrize("path", PATHS)
def test_gradients_have_the_strides_of_the_parameters(submodule, ops, device, path):
    """PEFT's B (N, r E) is read through a view; its gradient comes in the same memory order."""
    problem, given = dab_arguments(submodule, device, path)
    da, db = ops.grouped_lora_dab(*given)
    assert da.stride() == problem["lora_a"].stride()
    assert db.stride() == problem["lora_b"].stride() == (1, RANK * EXPERTS, EXPERTS)
    assert (da.dtype, db.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wants", [(True, False), (False, True)])
def test_dab_what_is_not_wanted_is_empty(submodule, ops, device, path, wants):
    _, given = dab_arguments(submodule, device, path)
    both = ops.grouped_lora_dab(*given)
    _, given = dab_arguments(submodule, device, path, wants=wants)
    for wanted, one, of_both in zip(wants, ops.grouped_lora_dab(*given), both, strict=True):
        assert torch.equal(one, of_both) if wanted else one.numel() == 0


@pytest.mark.parametrize("path", PATHS)
def test_dab_opcheck(submodule, ops, device, path):
    _, given = dab_arguments(submodule, device, path, torch.bfloat16)
    torch.library.opcheck(ops.grouped_lora_dab.default, given)


DW_NAMES = ("x", "dy", "weight", "bias")


def dw_arguments(problem: dict, path: str, wants=(True, True)) -> tuple:
    operands = (*(problem[name] for name in DW_NAMES), *problem["order"].operands())
    return (*operands, problem["gates"], TOP_K, 1, *wants, path)


@pytest.mark.sees_defect("the gradient of a bias is None and that of a trained weight is zero")
@pytest.mark.kernels_ci
@pytest.mark.parametrize("path", PATHS)
def test_dw_results(submodule, ops, device, path):
    problem = operands(submodule, device)
    dw, dbias = ops.grouped_lora_dw(*dw_arguments(problem, path))
    wide = doubles(problem)
    expected_w = torch.zeros(dw.shape, dtype=torch.float64)
    expected_b = torch.zeros(dbias.shape, dtype=torch.float64)
    for slot, token, e in valid_slots(problem):
        grad = wide["gates"].reshape(-1)[slot] * wide["dy"][slot]
        expected_w[e] += torch.outer(wide["x"][token], grad)
        expected_b[e] += grad
    assert_error_at_most(dw.cpu(), expected_w, 1e-6)
    assert_error_at_most(dbias.cpu(), expected_b, 1e-6)
    assert dw.stride() == problem["weight"].stride()
    assert_same_bits(dw[1].contiguous(), torch.zeros_like(dw[1]).contiguous())


@pytest.mark.parametrize("path", PATHS)
def test_dw_what_is_not_wanted_is_empty(submodule, ops, device, path):
    problem = operands(submodule, device)
    dw, dbias = ops.grouped_lora_dw(*dw_arguments(problem, path, wants=(False, True)))
    assert dw.numel() == 0 and dbias.shape == problem["bias"].shape


@pytest.mark.parametrize("path", PATHS)
def test_dw_opcheck(submodule, ops, device, path):
    problem = operands(submodule, device, torch.bfloat16)
    torch.library.opcheck(ops.grouped_lora_dw.default, dw_arguments(problem, path))


LINEAR_NAMES = ("x", "weight", "lora_a", "lora_b", "bias")


def linear_arguments(problem: dict, path: str, gated: bool = True) -> tuple:
    operands = (*(problem[name] for name in LINEAR_NAMES), 0.5, *problem["order"].operands())
    return (*operands, problem["gates"] if gated else None, False, False, path)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_equals_the_shipped_reference(submodule, ops, device, path, gated):
    problem = operands(submodule, device)
    y, _ = ops.grouped_lora_linear(*linear_arguments(problem, path, gated))
    names = ("x", "weight", "lora_a", "lora_b", "bias", "gates")
    wide = [problem[name].double().cpu() for name in names]
    wide[5] = wide[5] if gated else None
    reference = submodule("reference.moe").grouped_lora_linear
    assert_error_at_most(y.cpu(), reference(*wide, problem["ids"], 0.5), 1e-6)


@pytest.mark.sees_defect("a flat list of fifteen arguments, no registered op")
@pytest.mark.parametrize("path", PATHS)
def test_linear_opcheck(submodule, ops, device, path):
    problem = operands(submodule, device)
    for name in ("x", "weight", "lora_a", "lora_b", "bias", "gates"):
        problem[name] = problem[name].detach().requires_grad_()
    torch.library.opcheck(ops.grouped_lora_linear.default, linear_arguments(problem, path))
