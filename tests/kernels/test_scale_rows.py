"""scale_rows: rows of norm 1 and matrices of norm sqrt(min(m, n)), in place, in any batch."""

import math

import pytest
import torch

from .._compare import assert_error_at_most, assert_same_bits
from ..conftest import module_fixture

SHAPES = [(1, 1, 1), (3, 5, 7), (2, 8, 64), (2, 3, 2056), (1, 130, 1030), (4, 1, 3), (2, 600, 2)]
# float32: norms and products are rounded once each; 16 bits: their own rounding besides.
BUDGETS = {torch.float32: 5e-7, torch.float16: 6e-4, torch.bfloat16: 5e-3, torch.float64: 5e-15}


module = module_fixture("kernels.step.scale_rows")


def drawn(shape, dtype, device, seed: int = 0) -> torch.Tensor:
    """Rows of sizes from 1 down to 1e-3."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x * torch.logspace(0, -3, shape[1])[:, None]).to(device, dtype)


def rows_of_norm_one(x: torch.Tensor) -> torch.Tensor:
    usual = x.double().norm(dim=(1, 2), keepdim=True) / math.sqrt(x.shape[1])
    return x.double() / x.double().norm(dim=-1, keepdim=True).maximum(1e-6 * usual)


def of_a_polar_factors_norm(x: torch.Tensor) -> torch.Tensor:
    target = math.sqrt(min(x.shape[1:]))
    return x.double() * target / x.double().norm(dim=(1, 2), keepdim=True)


FORMULAS = {"equilibrate_rows": rows_of_norm_one, "renormalize": of_a_polar_factors_norm}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_formula(module, device, shape, dtype, name) -> None:
    x = drawn(shape, dtype, device)
    expected = FORMULAS[name](x)
    getattr(module, name)(x)
    assert_error_at_most(x, expected, BUDGETS[dtype])


@pytest.mark.parametrize("name", FORMULAS)
def test_memory_around_stays_as_it_was(module, device, name) -> None:
    """A batch that starts on no boundary of 16 bytes, between other numbers."""
    memory = drawn((1, 1, 500), torch.float32, device).flatten()
    before = memory.clone()
    x = memory[3 : 3 + 2 * 10 * 12].view(2, 10, 12)
    expected = FORMULAS[name](x)
    getattr(module, name)(x)
    assert_error_at_most(x, expected, 5e-7)
    assert_same_bits(memory[:3], before[:3])
    assert_same_bits(memory[243:], before[243:])


@pytest.mark.parametrize("name", FORMULAS)
def test_a_matrix_has_the_same_bits_in_any_batch(module, device, name) -> None:
    x = drawn((5, 70, 130), torch.float32, device)
    alone = x.clone()
    getattr(module, name)(x)
    for k in range(5):
        getattr(module, name)(alone[k : k + 1])
    assert_same_bits(alone, x)


@pytest.mark.parametrize("scale", [2.0**-90, 2.0**-20, 2.0**20, 1e-5, 1e5])
@pytest.mark.parametrize("name", FORMULAS)
def test_the_size_of_a_matrix_changes_nothing(module, device, name, scale) -> None:
    """The same bits for powers of two, also of rows so small that others bound their factor."""
    x = drawn((3, 70, 130), torch.float32, device)
    x[1, :4] *= 1e-7
    scaled = x * scale
    getattr(module, name)(x)
    getattr(module, name)(scaled)
    if math.frexp(scale)[0] == 0.5:
        assert_same_bits(scaled, x)
    assert_error_at_most(scaled, x.double(), 1e-6)


@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
def test_rows_of_rounding_noise_grow_no_further_than_a_millionth(module, device, dtype) -> None:
    x = drawn((2, 40, 30), torch.float64, device) * 100
    x[0, 20:23] *= 1e-5
    x[1, 3] *= 1e-8
    x = x.to(dtype)
    expected = rows_of_norm_one(x)
    module.equilibrate_rows(x)
    assert_error_at_most(x, expected, BUDGETS[dtype])
    norms = x.double().norm(dim=-1)
    assert (norms[1, 3] < 0.1) and (norms[1, 4:] > 0.99).all() and (norms[0, :20] > 0.99).all()


@pytest.mark.parametrize("dtype", BUDGETS, ids=str)
@pytest.mark.parametrize("name", FORMULAS)
def test_zeros_nan_and_inf(module, device, name, dtype) -> None:
    x = drawn((6, 6, 10), torch.float32, device).to(dtype)
    x[0, 2], x[1] = 0.0, 0.0
    x[2, 1, 3], x[3, 4, 0], x[4, 5, 9], x[4, 0] = torch.nan, torch.inf, -torch.inf, 0.0
    getattr(module, name)(x)
    assert (x[0, 2] == 0).all() and (x[1] == 0).all() and x[[0, 5]].isfinite().all()
    assert x[2:5].isnan().all()


@pytest.mark.parametrize("name", FORMULAS)
def test_numbers_whose_factor_no_float32_holds(module, device, name) -> None:
    """Subnormal numbers grow by the largest float32, zeros stay."""
    x = torch.zeros(1, 3, 4, device=device)
    x[0, 0, 1] = 2.0**-149
    getattr(module, name)(x)
    assert x[0, 0, 1] > 0 and x.isfinite().all() and x.count_nonzero() == 1


@pytest.mark.parametrize("shape", [(0, 3, 4), (2, 0, 4), (2, 3, 0)], ids=str)
def test_nothing_to_scale(module, device, shape) -> None:
    x = torch.empty(shape, device=device)
    module.equilibrate_rows(x)
    module.renormalize(x)


@pytest.mark.gpu
def test_the_op_is_registered_as_it_works(submodule, device) -> None:
    ops = submodule("_ops").ops
    x = drawn((2, 3, 8), torch.float32, device)
    for to_norm_one in (False, True):
        torch.library.opcheck(ops.scale_rows, (x, torch.ones(2, device=device), to_norm_one))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("x", "factors", "words"),
    [
        (torch.ones(2, 3), torch.ones(2), "x must be contiguous"),
        (torch.ones(2, 3, 4).mT, torch.ones(2), "x must be contiguous"),
        (torch.ones(2, 3, 4, dtype=torch.float64), torch.ones(2), "x must be float32"),
        (torch.ones(2, 3, 4), torch.ones(3), "factors must be"),
        (torch.ones(2, 3, 4), torch.ones(2, dtype=torch.float16), "factors must be"),
    ],
)
def test_refused(submodule, device, x, factors, words) -> None:
    with pytest.raises(RuntimeError, match=words):
        submodule("_ops").ops.scale_rows(x.to(device), factors.to(device), True)
