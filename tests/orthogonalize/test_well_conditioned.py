"""The short cuts of gram_polynomial: who takes them, how close they come, that they are checked."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_same_bits
from ._matrices import known_matrix

HALF, SINGLE, DOUBLE = torch.float16, torch.float32, torch.float64
M, N = 256, 1024


@pytest.fixture(scope="session")
def table(submodule):
    return submodule("orthogonalize.polynomials")


@pytest.fixture(scope="session")
def dtype(device):
    """Of the iterates: what `auto` takes."""
    return HALF if device.type == "cuda" else SINGLE


@pytest.fixture
def orthogonalize(opt, dtype):
    def run(x: torch.Tensor) -> torch.Tensor:
        return opt.orthogonalize(x, "gram_polynomial", dtype=dtype)

    return run


@pytest.fixture
def the_long_way(orthogonalize, submodule, monkeypatch):
    """Results of the two polynomials that serve every matrix."""

    def run(x: torch.Tensor) -> torch.Tensor:
        with monkeypatch.context() as patch:
            name = "short_cut"
            patch.setattr(submodule("orthogonalize.gram_polynomial"), name, lambda x, side: None)
            return orthogonalize(x)

    return run


def gaussian(m: int = M, n: int = N, seed: int = 0) -> torch.Tensor:
    return torch.randn(m, n, generator=torch.Generator().manual_seed(seed))


def distance(result: torch.Tensor) -> float:
    """Root mean square of s - 1 over the singular values: per value, from some polar factor."""
    values = torch.linalg.svdvals(result.double().cpu())
    return (values - 1).square().mean().sqrt().item()


def with_values(values: torch.Tensor) -> torch.Tensor:
    """(M, N) with these singular values and random vectors."""
    u, _, v = torch.linalg.svd(known_matrix("linear", M, N).x, full_matrices=False)
    return ((u * values.double()) @ v).float()


HOSTILE = {
    "one_zero": torch.ones(M).index_fill(0, torch.tensor([3]), 0.0),
    "four_zeros": torch.ones(M).index_fill(0, torch.arange(4), 0.0),
    "one_large": torch.ones(M).index_fill(0, torch.tensor([0]), 1.5),
    "half_small": torch.where(torch.arange(M) < M // 2, 1.0, 0.2),
}


def test_band(table) -> None:
    x = torch.linspace(0.1026, 1.0255, 200_001, dtype=DOUBLE)
    m = [x]
    for i, alpha, beta, delta in table.WELL_CONDITIONED:
        m.append(alpha * m[-1] ** 2 + beta * m[i] + delta)
    assert (x.sqrt() * m[-1] - 1).abs().max() < 0.0211


def applied(squares, x: torch.Tensor) -> torch.Tensor:
    """Singular values of the result, of eigenvalues x."""
    m = [x]
    for i, alpha, beta, delta in squares:
        m.append(alpha * m[-1] ** 2 + beta * m[i] + delta)
    return x.sqrt() * m[-1]


def test_quarter_circle(table) -> None:
    """The root mean square for square Gaussians, and the ends: 0, and beyond the largest value."""
    angle = (torch.arange(100_000, dtype=DOUBLE) + 0.5) / 100_000 * torch.pi / 2
    values = applied(table.QUARTER_CIRCLE, angle.cos().square())
    error = (2 * angle.sin().square() * (values - 1).square()).mean().sqrt().item()
    assert 0.107 < error < 0.1083
    assert values.min() > 0 and values.max() < 1.15
    assert values[angle.cos() > 0.05].min() > 0.87
    residual = (2 * angle.sin().square() * (values.square() - 1).square()).mean().item()
    assert residual < 0.0235
    beyond = applied(table.QUARTER_CIRCLE, torch.linspace(1, 1.036, 1000, dtype=DOUBLE))
    assert beyond.min() > 0.91 and beyond.max() < 1.2


@pytest.mark.parametrize(
    ("shape", "share"),
    [
        ((512, 512), 0.96),
        ((512, 576), 0.5),
        ((256, 320), 0.4),
        ((600, 257), 0.3),
        ((129, 162), 0.45),
        ((136, 408), 0.3),
    ],
)
def test_gaussians_of_any_aspect_are_as_close_as_five_steps(
    orthogonalize, the_long_way, reference, opt, device, shape, share
) -> None:
    """`share`: of the distance of five steps in float64."""
    x = gaussian(*shape, seed=1)
    result = orthogonalize(x.to(device))
    assert not torch.equal(result, the_long_way(x.to(device)))
    factors = torch.linalg.svd(x.double(), full_matrices=False)
    polar = factors.U @ factors.Vh
    steps = reference.newton_schulz(
        x.double() if shape[0] <= shape[1] else x.mT.double(),
        opt.polar_express_coefficients(),
        1.02,
    )
    steps = steps if shape[0] <= shape[1] else steps.mT
    assert (result.double().cpu() - polar).norm() < share * (steps - polar).norm()


@pytest.mark.parametrize(
    ("shape", "most"), [((M, N), 0.016), ((N, M), 0.016), ((M, 682), 0.031), ((257, 1031), 0.016)]
)
def test_gaussians_take_it_and_are_close(orthogonalize, the_long_way, device, shape, most):
    """Five exact steps leave 0.093; two polynomials of degree 65 about 0.04."""
    x = gaussian(*shape).to(device)
    result = orthogonalize(x)
    assert distance(result) < most
    assert not torch.equal(result, the_long_way(x))
    sign = torch.linalg.svd(x.double().cpu(), full_matrices=False)
    polar = sign.U @ sign.Vh
    assert (result.double().cpu() - polar).norm() < 1.05 * most * min(shape) ** 0.5


@pytest.mark.parametrize("spectrum", ["linear", "log2", "power_half", "half_zero", "two_and_1e-3"])
def test_spread_spectra_do_not(orthogonalize, the_long_way, device, spectrum) -> None:
    x = known_matrix(spectrum, M, N).x.float().to(device)
    assert_same_bits(orthogonalize(x), the_long_way(x))


@pytest.mark.parametrize("kind", HOSTILE)
def test_what_the_moments_do_not_show_is_refused(
    orthogonalize, the_long_way, submodule, device, monkeypatch, kind
) -> None:
    """Tried, since nearly all values are alike; unchecked, the result would be far off."""
    x = with_values(HOSTILE[kind]).to(device)
    assert_same_bits(orthogonalize(x), the_long_way(x))
    monkeypatch.setattr(submodule("orthogonalize.well_conditioned"), "RESIDUAL", 1e9)
    if kind != "half_small":  # not even tried
        assert not torch.equal(orthogonalize(x), the_long_way(x))


def like_a_gaussian(m: int, n: int, spoiled: slice, value: float) -> torch.Tensor:
    """(m, n) with a Gaussian's singular values, some of which are `value` times the largest."""
    u, values, v = torch.linalg.svd(gaussian(m, n).double(), full_matrices=False)
    values[spoiled] = value * values[0]
    return ((u * values) @ v).float()


@pytest.mark.parametrize(
    ("shape", "spoiled", "value"),
    [
        ((512, 512), slice(256, 264), 0.0),
        ((512, 512), slice(1), 1.05),
        ((256, 384), slice(9, 12), 0),
    ],
    ids=["eight_zeros", "one_large", "three_zeros"],
)
def test_a_gaussian_with_spoiled_values_is_refused(
    orthogonalize, the_long_way, submodule, device, monkeypatch, shape, spoiled, value
) -> None:
    """Its moments hardly differ from a Gaussian's, so it is tried."""
    x = like_a_gaussian(*shape, spoiled, value).to(device)
    assert_same_bits(orthogonalize(x), the_long_way(x))
    for name in ("RESIDUAL_BETWEEN", "RESIDUAL_NEARLY_SQUARE"):
        monkeypatch.setattr(submodule("orthogonalize.well_conditioned"), name, 1e9)
    assert not torch.equal(orthogonalize(x), the_long_way(x))


def test_shapes_and_what_they_are_tried_with(submodule, table, device) -> None:
    short_cut = submodule("orthogonalize.well_conditioned").short_cut
    batch_is_free = submodule("orthogonalize.products").batch_is_free
    able = device.type == "cpu" or batch_is_free(HALF, device)

    def tried(m, n, side=None):
        found = short_cut(torch.empty(1, m, n, dtype=HALF, device=device), side or min(m, n))
        return None if found is None else (found.squares, found.residual, found.wide)

    wide, between, nearly_square = (
        (squares, residual, squares is table.WELL_CONDITIONED) if able else None
        for squares, residual in (
            (table.WELL_CONDITIONED, 0.004),
            (table.QUARTER_CIRCLE, 0.006),
            (table.QUARTER_CIRCLE, 0.028),
        )
    )
    assert tried(256, 640) == tried(640, 256) == tried(264, 1024, 257) == wide
    assert tried(136, 408, 129) == wide
    assert tried(256, 632) == tried(632, 256) == tried(136, 170) == between
    assert tried(512, 512) == tried(632, 512) == nearly_square
    for small in ((256, 312), (312, 256), (504, 504), (128, 1024), (512, 512, 511)):
        assert tried(*small) is None
    assert tried(136, 1024, 128) is None


@pytest.mark.parametrize("shape", [(512, 512), (264, 512), (600, 256)])
def test_spread_is_that_of_gaussians(submodule, device, shape) -> None:
    """d^2 of a Gaussian is m / n; linear spectra of aspect 2 have 0.9 where it has 0.71."""
    x = torch.empty(1, *shape, dtype=HALF, device=device)
    cut = submodule("orthogonalize.well_conditioned").short_cut(x, min(shape))
    if cut is None:
        pytest.skip("not tried on this device")
    R = gaussian(*shape).double()
    R = R @ R.mT if shape[0] < shape[1] else R.mT @ R
    m = min(shape)
    d = (m * R.square().sum() / R.trace() ** 2 - 1).sqrt().item()
    assert 1.03 * d < cut.spread < 1.06 * (min(shape) / max(shape)) ** 0.5


def assert_each_decides_for_itself(opt, orthogonalize, x: torch.Tensor, dtype) -> None:
    """x ends with a zero matrix and one with a NaN."""
    for view in (x, x.mT):
        together = orthogonalize(view)
        wider = opt.orthogonalize(view, "gram_polynomial", dtype=dtype, out=torch.empty_like(view))
        assert_same_bits(wider, together.float())
        for i in range(len(x)):
            assert_same_bits(together[i], orthogonalize(view[i]))
        assert torch.count_nonzero(together[-2]) == 0
        assert together[-1].isnan().all()


def test_every_matrix_of_a_batch_decides_for_itself(opt, orthogonalize, device, dtype) -> None:
    matrices = [gaussian(seed=seed) for seed in range(3)]
    matrices += [with_values(values) for values in HOSTILE.values()]
    matrices += [gaussian(seed=4), known_matrix("power_one", M, N).x.float(), torch.zeros(M, N)]
    broken = gaussian(seed=5)
    broken[3, 4] = torch.nan
    x = torch.stack([*matrices, broken]).to(device)
    assert_each_decides_for_itself(opt, orthogonalize, x, dtype)


@pytest.mark.parametrize("shape", [(512, 512), (256, 328)])
def test_every_narrow_matrix_decides_for_itself(opt, orthogonalize, device, dtype, shape) -> None:
    matrices = [gaussian(*shape), known_matrix("log2", *shape).x.float(), gaussian(*shape, seed=1)]
    matrices += [like_a_gaussian(*shape, slice(9, 18), 0.0), torch.zeros(shape)]
    broken = gaussian(*shape)
    broken[3, 4] = torch.inf
    x = torch.stack([*matrices, broken]).to(device)
    assert_each_decides_for_itself(opt, orthogonalize, x, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(M, N), (512, 512)])
def test_captured_without_synchronization(opt, device, shape) -> None:
    """A replay decides anew: the graph was captured with other spectra."""
    tail = known_matrix("power_one", *shape).x.float()
    x = torch.stack([gaussian(*shape, seed=1), tail, gaussian(*shape, seed=2)]).to(device)
    out = torch.empty_like(x, dtype=HALF)
    opt.orthogonalize(x, "gram_polynomial", out=out)
    torch.cuda.set_sync_debug_mode("error")
    try:
        opt.orthogonalize(x, "gram_polynomial", out=out)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        opt.orthogonalize(x, "gram_polynomial", out=out)
    for order in ([1, 0, 2], [1, 1, 1], [0, 0, 2]):
        x.copy_(x[order].clone())
        graph.replay()
        captured = out.clone()
        assert_same_bits(captured, opt.orthogonalize(x, "gram_polynomial", out=out))
