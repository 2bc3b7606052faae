"""gram_polynomial: the reference's polynomials, their table, and what rounding must not do."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_error_at_most
from ..conftest import module_fixture
from ._matrices import known_matrix

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64


table = module_fixture("orthogonalize.polynomials")
method = module_fixture("orthogonalize.gram_polynomial")


def on_values(table, sigma: torch.Tensor, lift: float = 1.0) -> torch.Tensor:
    """What the table does to singular values; `lift` scales what the first polynomial gives."""
    for number, squares in enumerate(table.POLYNOMIALS):
        m = [sigma * sigma]
        for i, alpha, beta, delta in squares:
            m.append(alpha * m[-1] ** 2 + beta * m[i] + delta)
        sigma = sigma * m[-1] * (lift if number == 0 else 1.0)
    return sigma


def dense_values(lower: float) -> torch.Tensor:
    """[lower, 1], in float64, finer towards both ends: ripples narrow there."""
    rising = torch.logspace(torch.tensor(lower).log10().item(), 0, 100_001, dtype=DOUBLE)
    ending = torch.linspace(0.8, torch.pi / 2, 100_001, dtype=DOUBLE).sin()
    return torch.cat([rising, ending]).clamp(lower, 1)


@pytest.mark.parametrize(("lower", "low", "high"), [(1.2e-3, 0.942, 1.102), (1e-3, 0.857, 1.102)])
def test_band(table, lower, low, high) -> None:
    values = on_values(table, dense_values(lower))
    assert low <= values.min().item() and values.max().item() <= high


def test_slope_at_zero_is_that_of_five_steps(table, opt) -> None:
    """989 / 1.02 relative to the Frobenius norm, and the Schatten-4 norm is never larger."""
    slope = on_values(table, torch.tensor([1e-9], dtype=DOUBLE)).item() * 1e9
    assert slope == pytest.approx(1010.6, abs=0.1)
    steps = 1.0
    for a, _, _ in opt.polar_express_coefficients():
        steps *= a
    assert slope > steps / 1.02


@pytest.mark.parametrize("lift", [0.97, 1.03, 1.08])
def test_rounding_between_the_polynomials_has_room(table, lift) -> None:
    """float16 was seen to lift the largest value by 3 %; beyond 8 % the second one leaves."""
    values = on_values(table, dense_values(2e-3), lift)
    assert values.min().item() > 0.9
    assert values.max().item() < 1.11


def test_operands_come_earlier(table) -> None:
    for squares in table.POLYNOMIALS:
        assert all(0 <= square.operand <= j for j, square in enumerate(squares))
    assert sum(map(len, table.POLYNOMIALS)) == table.SQUARES == 10


@pytest.mark.parametrize("shape", [(40, 40), (24, 100), (100, 24), (3, 2, 17, 33), (1, 1), (1, 5)])
@pytest.mark.parametrize("dtype", [DOUBLE, SINGLE, HALF], ids=str)
def test_same_polynomials_as_the_reference(opt, reference, device, table, shape, dtype) -> None:
    x = torch.randn(shape, dtype=DOUBLE, generator=torch.Generator().manual_seed(1))
    wide = x if shape[-2] <= shape[-1] else x.mT
    exact = reference.gram_polynomial(wide, table.POLYNOMIALS, table.SAFETY)
    result = opt.orthogonalize(x.to(device), "gram_polynomial", dtype=dtype).cpu()
    budget = {DOUBLE: 1e-10, SINGLE: 1e-4, HALF: 0.06}[dtype]
    assert_error_at_most(result, exact if wide is x else exact.mT, budget)


@pytest.mark.parametrize("spectrum", ["log2", "power_half", "power_one"])
def test_values_land_where_the_polynomials_put_them(opt, device, table, spectrum) -> None:
    """The bound is the Schatten-4 norm, with a margin of 1.01."""
    known = known_matrix(spectrum, 64, 96)
    bound = known.values.pow(4).sum() ** 0.25
    wanted = on_values(table, known.values / (1.01 * bound))
    result = opt.orthogonalize(known.x.to(device), "gram_polynomial").cpu()
    values = torch.linalg.svdvals(result)
    torch.testing.assert_close(values, wanted.sort(descending=True).values, atol=1e-9, rtol=0)


def hostile(kind: str, m: int, n: int, generator: torch.Generator) -> torch.Tensor:
    """Matrices that round alike everywhere, or whose largest value sits at the end of the range."""
    normal = torch.randn(m, n, generator=generator)
    column, row = torch.randn(m, 1, generator=generator), torch.randn(1, n, generator=generator)
    small = 10 ** (-5 * torch.rand(1, generator=generator))
    k = torch.arange(max(m, n), dtype=torch.float32)
    return {
        "rank_1": column * row,
        "near_rank_1": column * row + small * normal,
        "near_ones": 1 + small * normal,
        "integers": normal.round(),
        "rows_of_any_size": normal * (3 * column).exp(),
        "sparse": normal * (torch.rand(m, n, generator=generator) < 0.1),
        "diagonal": torch.eye(m, n) * 10 ** (-5 * torch.rand(m, 1, generator=generator)),
        "hilbert": 1 / (k[:m, None] + k[None, :n] + 1),
    }[kind]


KINDS = (
    *("rank_1", "near_rank_1", "near_ones", "integers"),
    *("rows_of_any_size", "sparse", "diagonal", "hilbert"),
)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_no_value_leaves_the_band(opt, device, kind: str, dtype) -> None:
    """A bound that is too small by 2 % sends the largest value to infinity."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(m, aspect * m) for m in (1, 2, 3, 5, 8, 13, 21, 34) for aspect in (1, 2, 3)]
    for m, n in [*shapes, (128, 160)]:
        x = hostile(kind, m, n, generator)
        result = opt.orthogonalize(x.to(device), "gram_polynomial", dtype=dtype).cpu()
        largest = torch.linalg.matrix_norm(result.double(), 2).item()
        assert largest < (1.16 if dtype == HALF else 1.105), (m, n)


def test_bfloat16_and_other_step_counts_are_refused(opt, method, device) -> None:
    x = torch.randn(4, 6, device=device)
    with pytest.raises(ValueError, match="bfloat16"):
        opt.orthogonalize(x, "gram_polynomial", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="steps=4: gram_polynomial is made for 5"):
        opt.orthogonalize(x, "gram_polynomial", 4)
    with pytest.raises(TypeError, match="list"):
        method.gram_polynomial([[1.0]])
