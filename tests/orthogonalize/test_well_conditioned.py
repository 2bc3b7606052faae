"""The short cut of gram_polynomial: who takes it, how close it comes, and that it is checked."""

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
            name = "may_be_well_conditioned"
            patch.setattr(submodule("orthogonalize.gram_polynomial"), name, lambda x, side: False)
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


def test_narrow_and_small_matrices_are_not_tried(submodule, device) -> None:
    tried = submodule("orthogonalize.well_conditioned").may_be_well_conditioned
    batch_is_free = submodule("orthogonalize.products").batch_is_free
    able = device.type == "cpu" or batch_is_free(HALF, device)

    def empty(m, n):
        return torch.empty(1, m, n, dtype=HALF, device=device)

    assert tried(empty(256, 512), 256) == tried(empty(512, 256), 256) == able
    assert not tried(empty(256, 504), 256)
    assert not tried(empty(248, 1024), 248)
    assert tried(empty(264, 1024), 257) == able
    assert not tried(empty(256, 1024), 255)


def test_every_matrix_of_a_batch_decides_for_itself(opt, orthogonalize, device, dtype) -> None:
    matrices = [gaussian(seed=seed) for seed in range(3)]
    matrices += [with_values(values) for values in HOSTILE.values()]
    matrices += [torch.zeros(M, N), gaussian(seed=4), known_matrix("power_one", M, N).x.float()]
    broken = gaussian(seed=5)
    broken[3, 4] = torch.nan
    x = torch.stack([*matrices, broken]).to(device)
    for view in (x, x.mT):
        together = orthogonalize(view)
        wider = opt.orthogonalize(view, "gram_polynomial", dtype=dtype, out=torch.empty_like(view))
        assert_same_bits(wider, together.float())
        for i in range(len(x)):
            assert_same_bits(together[i], orthogonalize(view[i]))
    assert torch.count_nonzero(orthogonalize(x)[7]) == 0
    assert orthogonalize(x)[-1].isnan().all()


@pytest.mark.gpu
def test_captured_without_synchronization(opt, device) -> None:
    """A replay decides anew: the graph was captured with other spectra."""
    tail = known_matrix("power_one", M, N).x.float()
    x = torch.stack([gaussian(seed=1), tail, gaussian(seed=2)]).to(device)
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
