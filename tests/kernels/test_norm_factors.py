"""norm_factors: the numbers that normalize would multiply by."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_same_bits
from ._normalize import PREFACTOR, draw
from ._symmetric import laid_out

pytestmark = pytest.mark.gpu

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@pytest.fixture(scope="session")
def norm_factors(submodule):
    return submodule("kernels.products.normalize").norm_factors


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ((3, 1, 1), (5, 130, 130), (2, 1025, 63), (0, 4, 4)), ids=str)
def test_factors_and_roots(norm_factors, device, shape, dtype):
    x = draw(*shape, dtype=torch.float32, device=device).to(dtype)
    if len(x):
        x[0, 0, 0] = 3.0
    expected = 1 / (PREFACTOR * torch.linalg.matrix_norm(x.double()))
    for view in (x, laid_out(x, "transposed"), laid_out(x, "shifted")):
        factors, roots = norm_factors(view, PREFACTOR)
        assert factors.dtype == roots.dtype == torch.float32
        assert torch.allclose(factors.double(), expected, rtol=2e-7, atol=0)
        assert torch.allclose(roots.double(), expected.sqrt(), rtol=2e-7, atol=0)


def test_zero_inf_and_nan(norm_factors, device):
    x = draw(4, 20, 30, dtype=torch.float32, device=device)
    x[0] = 0
    x[1, 3, 4] = torch.inf
    x[2, 5, 6] = torch.nan
    for values in norm_factors(x):
        assert values[0] == 0
        assert values[1:3].isnan().all() and values[3].isfinite()
    tiny = norm_factors(torch.full((1, 2, 2), 1e-42, device=device))[1]
    assert tiny.item() == pytest.approx((2e-42) ** -0.5, rel=1e-2)


def test_the_same_bits_in_any_batch(norm_factors, device):
    x = draw(9, 100, 37, dtype=torch.float32, device=device)
    every = norm_factors(x)
    for k in range(9):
        for one, many in zip(norm_factors(x[k : k + 1]), every, strict=True):
            assert_same_bits(one, many[k : k + 1])


SYMMETRIC_SIDES = (1, 64, 128, 129, 132, 260, 515, 1025)


def draw_symmetric(batch: int, side: int, dtype: torch.dtype, device) -> torch.Tensor:
    x = draw(batch, side, side, dtype=torch.float32, device=device)
    return (x.triu() + x.triu(1).mT).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_symmetric_matrices(norm_factors, device, dtype):
    """The promise changes what is read, not the result, for any side and layout."""
    for side in SYMMETRIC_SIDES:
        x = draw_symmetric(3, side, dtype, device)
        expected = 1 / (PREFACTOR * torch.linalg.matrix_norm(x.double()))
        for view in (x, laid_out(x, "transposed"), laid_out(x, "padded"), laid_out(x, "shifted")):
            factors, roots = norm_factors(view, PREFACTOR, symmetric=True)
            assert torch.allclose(factors.double(), expected, rtol=2e-7, atol=0), side
            assert torch.allclose(roots.double(), expected.sqrt(), rtol=2e-7, atol=0), side
        alone = norm_factors(x[1:2], PREFACTOR, symmetric=True)
        assert_same_bits(alone[0], norm_factors(x, PREFACTOR, symmetric=True)[0][1:2])


@pytest.mark.parametrize("place", ((0, 0), (3, 3), (7, 130), (0, 514), (514, 514)), ids=str)
def test_every_element_of_the_upper_triangle_counts(norm_factors, device, place):
    x = torch.zeros(1, 515, 515, dtype=torch.float16, device=device)
    x[0, place[0], place[1]] = x[0, place[1], place[0]] = 2.0
    expected = 0.5 if place[0] == place[1] else 0.125**0.5
    assert norm_factors(x, symmetric=True)[0].item() == pytest.approx(expected, rel=1e-6)
    x[0, place[0], place[1]] = x[0, place[1], place[0]] = torch.nan
    assert norm_factors(x, symmetric=True)[0].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_lies_below_the_diagonal_goes_unread(norm_factors, device, dtype):
    x = draw_symmetric(2, 1024, dtype, device)
    expected = norm_factors(x, symmetric=True)
    x.masked_fill_(torch.ones(1024, 1024, device=device).tril(-1).bool(), torch.nan)
    for poisoned, clean in zip(norm_factors(x, symmetric=True), expected, strict=True):
        assert_same_bits(poisoned, clean)


def test_symmetric_needs_square_matrices(norm_factors, device):
    with pytest.raises(RuntimeError, match="symmetric"):
        norm_factors(torch.ones(1, 2, 3, device=device), symmetric=True)


def test_opcheck(ops, device):
    x = torch.randn(3, 8, 12, device=device)
    arguments = (x, *torch.empty(2, 3, device=device), 1.5)
    torch.library.opcheck(ops.norm_factors, arguments)
    torch.library.opcheck(ops.norm_factors, (x[:, :, :8], *arguments[1:], True))


@pytest.mark.parametrize(
    ("shape", "dtype", "prefactor", "words"),
    [
        ((2, 2), torch.float32, 1.0, "x must be"),
        ((2, 0, 2), torch.float32, 1.0, "x must be"),
        ((1, 2, 2), torch.int32, 1.0, "x must be float16"),
        ((1, 2, 2), torch.float32, 0.0, "prefactor must be positive"),
    ],
)
def test_bad_arguments(norm_factors, device, shape, dtype, prefactor, words):
    with pytest.raises(RuntimeError, match=words):
        norm_factors(torch.ones(shape, dtype=dtype, device=device), prefactor)
