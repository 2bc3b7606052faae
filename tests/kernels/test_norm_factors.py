"""norm_factors: the numbers that normalize would multiply by."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_same_bits
from ._normalize import PREFACTOR, draw
from ._symmetric import laid_out

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


@pytest.fixture(scope="session")
def norm_factors(submodule):
    return submodule("kernels.norm_factors").norm_factors


@pytest.mark.kernels_ci
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


def test_opcheck(ops, device):
    x = torch.randn(3, 8, 12, device=device)
    arguments = (x, *torch.empty(2, 3, device=device), 1.5)
    torch.library.opcheck(ops.norm_factors_reference, arguments)
    if device.type == "cuda":
        torch.library.opcheck(ops.norm_factors, arguments)


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ((torch.ones(2, 2),), ValueError, "x must be"),
        ((torch.ones(2, 0, 2),), ValueError, "x must be"),
        ((torch.ones(1, 2, 2, dtype=torch.int32),), TypeError, "x must be dense"),
        ((torch.ones(1, 2, 2), 0.0), ValueError, "prefactor must be positive"),
        ((torch.ones(1, 2, 2), "1"), TypeError, "prefactor must be a number"),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_bad_arguments(norm_factors, arguments, error, words):
    with pytest.raises(error, match=words):
        norm_factors(*arguments)
