"""The accuracy rule: `auto` is as close to the polar factor as five exact steps of Polar Express.

On every matrix of the zoo the distance, on the subspace of non-zero singular values, is at most
1.02 times that of the five steps in float64 arithmetic, 1.1 times where rounding rules.
"""

from __future__ import annotations

from types import ModuleType

import pytest
import torch

from .._compare import assert_error_at_most

HALF, SINGLE = torch.float16, torch.float32
SPECTRA = [
    *("linear", "log_1e-2", "log_1e-3", "log_1e-5", "log_1e-7", "power_half", "power_one"),
    *("half_zero", "rank_10", "two_and_1e-3", "two_and_1e-5", "two_and_1e-7", "gamma"),
]
FIXED = [f"gaussian_1:{aspect}" for aspect in (1, 2, 4, 8)] + ["heavy_1:1", "heavy_1:4"]
TRAINED = [
    f"{kind}_{name}" for kind in ("gradient", "momentum") for name in ("qkv", "out", "up", "down")
]
NAMES = [*SPECTRA, *FIXED, *TRAINED]


@pytest.fixture(scope="module")
def matrices() -> ModuleType:
    """The benchmark's zoo, which the official builder does not have when it collects tests."""
    from benchmarks.harness import zoo

    return zoo


@pytest.fixture(scope="module")
def zoo(opt, reference, matrices) -> dict:
    """name -> (specimen, distance of five exact steps)."""
    rows = opt.polar_express_coefficients()
    found = matrices.zoo(136)
    return {
        name: (specimen, specimen.distance(reference.newton_schulz(specimen.x, rows, 1.02)))
        for name, specimen in found.items()
    }


def test_the_zoo_is_complete(zoo) -> None:
    assert sorted(zoo) == sorted(NAMES)
    for name in TRAINED:  # real ones are neither flat nor all alike
        values = zoo[name][0].values
        assert values[0] > 3 * values[len(values) // 2]


@pytest.mark.parametrize("dtype", [None, HALF, SINGLE], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_auto_is_as_close_as_five_exact_steps(opt, device, matrices, zoo, name: str, dtype) -> None:
    specimen, five_steps = zoo[name]
    result = opt.orthogonalize(specimen.x.float().to(device), dtype=dtype).cpu()
    assert specimen.distance(result) <= matrices.allowed(name) * five_steps


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
@pytest.mark.parametrize("name", NAMES)
def test_gram_polynomial_is_as_close_as_five_exact_steps(
    opt, device, matrices, zoo, name: str, dtype
) -> None:
    """By its name, on every device; the tall form computes other products."""
    specimen, five_steps = zoo[name]
    for x in (specimen.x, specimen.x.mT):
        result = opt.orthogonalize(x.float().to(device), "gram_polynomial", dtype=dtype).cpu()
        result = result if x is specimen.x else result.mT
        assert specimen.distance(result) <= matrices.allowed(name) * five_steps


# Measured at most 0.48, 0.43, 0.70 and 0.92; a schedule that only just keeps the rule fails here.
@pytest.mark.parametrize(
    ("name", "share"),
    [("gaussian_1:4", 0.5), ("log_1e-2", 0.5), ("two_and_1e-3", 0.8), ("heavy_1:1", 0.95)],
)
def test_gram_polynomial_is_closer(opt, device, zoo, name: str, share: float) -> None:
    specimen, five_steps = zoo[name]
    result = opt.orthogonalize(specimen.x.float().to(device), "gram_polynomial", dtype=HALF).cpu()
    assert specimen.distance(result) <= share * five_steps


def test_the_rule_can_be_broken(opt, device, matrices, zoo) -> None:
    """Four steps of Polar Express fail it."""
    for name in ("heavy_1:1", "two_and_1e-3", "gaussian_1:1"):
        specimen, five_steps = zoo[name]
        result = opt.polar_express(specimen.x.float().to(device), 4).cpu()
        assert specimen.distance(result) > matrices.allowed(name) * five_steps


def test_trained_matrices_repeat_and_leave_the_generator_alone(matrices) -> None:
    before = torch.get_rng_state()
    first, second = (matrices.trained(16, steps=2) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), before)
    assert first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def test_distances_are_from_the_polar_factor(reference, matrices) -> None:
    """Of U V^T 0, of 1.1 U V^T 0.1; what lies in the null space does not count."""
    specimen = matrices.known("half_zero", 12, 24)
    polar = specimen.u @ specimen.v.mT
    assert specimen.distance(polar) < 1e-12
    assert specimen.distance(1.1 * polar) == pytest.approx(0.1)
    outside = torch.eye(12, 24, dtype=torch.float64)
    outside -= specimen.u @ (specimen.u.mT @ outside)
    assert specimen.distance(polar + outside) < 1e-12
    full = matrices.known("log_1e-2", 12, 24)
    assert_error_at_most(full.u @ full.v.mT, reference.polar_factor(full.x), 1e-10)
