"""Sums of squares by Triton against float64: under the interpreter on a CPU, compiled on a GPU."""

import pytest
import torch

from ..conftest import module_fixture

squares_triton = module_fixture("tensor_parallel.squares_triton")
FACTORS = {"alpha": 0.8260958358, "beta": -0.263842373, "delta": -2.367149489}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("rows", "n"), [(1, 1), (5, 15), (7, 33), (16, 128), (37, 8296)])
def test_diagonal_is_that_of_float64_rounded_once(squares_triton, device, dtype, rows, n) -> None:
    """On every rank's diagonal, of more columns than a block has, and nowhere else."""
    made = torch.Generator().manual_seed(n)
    unit = torch.finfo(dtype).eps / 2
    if device.type == "cpu" and dtype == torch.bfloat16:
        unit *= 2  # the interpreter truncates
    world = n // rows
    for rank in sorted({0, world // 2, world - 1}):
        # As in an iteration: squares of rows add up to about -delta / alpha.
        M = (torch.randn(rows, n, generator=made) * (3 / n) ** 0.5).to(dtype).to(device)
        C = torch.randn(rows, n, generator=made).to(dtype).to(device)
        out = torch.full_like(C, 3.0)
        added, written = (x.diagonal(offset=rank * rows) for x in (C, out))
        squares_triton.square_diagonal(M, added, written, **FACTORS)
        exact = FACTORS["alpha"] * M.double().square().sum(1) + FACTORS["delta"]
        exact += FACTORS["beta"] * added.double()
        assert ((written.double() - exact).abs() <= 1.01 * unit * exact.abs() + 1e-6).all()
        written.fill_(3.0)
        assert (out == 3.0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 5), (7, 8195)])
@pytest.mark.parametrize("turned", [False, True])
def test_sum_is_that_of_float64(squares_triton, device, dtype, shape, turned) -> None:
    made = torch.Generator().manual_seed(shape[1])
    x = torch.randn(shape, generator=made).to(dtype).to(device)
    x = x.t() if turned else x
    found = squares_triton.sum_of_squares(x)
    assert found.shape == () and found.dtype == torch.float64
    torch.testing.assert_close(found, x.double().square().sum(), rtol=1e-14, atol=0)


@pytest.mark.parametrize("value", [1e-42, 1e30, torch.nan, torch.inf])
def test_sum_has_the_range_of_float64(squares_triton, device, value: float) -> None:
    x = torch.full((3, 50), value, device=device)
    expected = x.double().square().sum()
    torch.testing.assert_close(squares_triton.sum_of_squares(x), expected, equal_nan=True)
