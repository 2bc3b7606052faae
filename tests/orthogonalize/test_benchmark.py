"""The benchmark of this folder away from a GPU: its baseline, its distances, its gate."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness import timer

from .._compare import relative_error
from ._matrices import known_matrix, matrix


@pytest.fixture(scope="module")
def entry():
    from benchmarks.harness import orthogonalize

    return orthogonalize


@pytest.fixture
def built(opt) -> SimpleNamespace:
    return SimpleNamespace(package=opt, commit="0" * 40, clean=True)


def test_the_baseline_is_five_steps_in_bfloat16(opt, entry, reference) -> None:
    """Within the error of bfloat16, norm included; a step less is six times as far."""
    rows = opt.polar_express_coefficients()
    for row, derived in zip(entry.COEFFICIENTS, rows, strict=True):
        assert row == pytest.approx(derived, rel=1e-13)
    x = torch.stack([matrix("gaussian", 96, 256, seed).float() for seed in range(3)])
    for g in (x, x.mT):
        result = entry.polar_express_bf16(g)
        assert result.dtype == torch.bfloat16
        wide = result if g is x else result.mT
        assert relative_error(wide, reference.newton_schulz(x, rows, 1.02)) < 0.08


def test_heavy_tails_are_what_they_are_called(entry) -> None:
    """Unit columns: ||x||_F^2 near pi^2 / 6, a largest value near 1, in any orientation."""
    for m, n in ((128, 128), (64, 256), (256, 64)):
        problem = entry.Problem(2, m, n, "heavy")
        x = entry.made(problem, torch.Generator().manual_seed(0), "cpu")
        assert x.shape == (2, m, n) and x.dtype == torch.float32
        for one in x:
            assert one.norm().square().item() == pytest.approx(torch.pi**2 / 6, rel=0.15)
            assert torch.linalg.matrix_norm(one, 2).item() == pytest.approx(1, rel=0.15)
    brain = entry.made(
        entry.Problem(1, 8, 8, "heavy", "bfloat16"), torch.Generator().manual_seed(0), "cpu"
    )
    assert brain.dtype == torch.bfloat16


def test_distances_to_the_polar_factor(opt, entry, reference) -> None:
    """Of 1.1 U V^T 0.1; a tail down to 1e-7 of the norm is followed to its end."""
    known = [known_matrix(name, 48, 80) for name in ("log2", "log7")]
    x, polar = (torch.stack([getattr(k, part) for k in known]) for part in ("x", "polar"))
    rows = opt.polar_express_coefficients()
    exact = reference.newton_schulz(x, rows, 1.02)
    for turn in (lambda t: t, lambda t: t.mT):
        found = entry.distances(opt, turn(x), turn(1.1 * polar), turn(exact))
        assert found.ours == pytest.approx(0.1, rel=1e-5)
        assert found.baseline == pytest.approx(relative_error(exact, polar), rel=1e-5)
        least = min(relative_error(e, p) for e, p in zip(exact, polar, strict=True))
        assert found.worst == pytest.approx(0.1 / least, rel=1e-5)
    with pytest.raises(RuntimeError, match="matrix 0 did not converge"):
        entry.distances(opt, torch.zeros(1, 4, 4), polar[:1], polar[:1])


@pytest.mark.parametrize("shape", [(2, 96, 96), (1, 64, 256), (1, 130, 70)], ids=str)
def test_auto_passes_the_gate_of_its_rows(opt, entry, shape) -> None:
    x = entry.made(entry.Problem(*shape, "heavy"), torch.Generator().manual_seed(0), "cpu")
    baseline = entry.polar_express_bf16(x)
    found = entry.distances(opt, x, opt.orthogonalize(x), baseline)
    assert found.worst <= 1.02
    assert found.baseline < 1  # the baseline is close too: the factor is the right one


def gated(entry, built, monkeypatch, ours=None, repeats=True):
    """The row of a case whose timing is given; `ours` replaces what a user calls."""
    times = timer.Times
    taken = {"ours": times(2.0, 3.0, 0.5), "baseline": times(4.0, 9.0, 1.5)}
    monkeypatch.setattr(entry.Case, "capture", lambda self: None)
    monkeypatch.setattr(entry.Case, "replay_repeats", lambda self: repeats)
    monkeypatch.setattr(entry.Case, "peak_mb", lambda self: 1.0)
    monkeypatch.setattr(entry.Case, "times", lambda self, bursts: taken)
    if ours is not None:
        monkeypatch.setattr(entry.Case, "ours", ours)
    problem = entry.Problem(1, 48, 64, "heavy")
    inputs = [entry.made(problem, torch.Generator().manual_seed(0), "cpu")]

    def found(mine, theirs):
        return entry.distances(built.package, inputs[0], mine, theirs)

    task = entry.Task(problem.case, inputs, found, 1.0, 1.02)
    return entry.measure(task, entry.Case(inputs, built, entry.polar_express_bf16))


def test_right_results_are_timed(entry, built, monkeypatch) -> None:
    row, line = gated(entry, built, monkeypatch)
    assert row.ok and (row.ms, row.wall_ms, row.speedup) == (2.0, 3.0, 3.0)
    assert "1x48x64/heavy" in line


@pytest.mark.parametrize("fault", ["scaled", "nan", "four steps", "replay"])
def test_wrong_results_are_not_timed(opt, entry, built, monkeypatch, fault) -> None:
    ours = {
        "scaled": lambda case, k: opt.orthogonalize(case.inputs[k]) * 1.2,
        "nan": lambda case, k: opt.orthogonalize(case.inputs[k]) * float("nan"),
        "four steps": lambda case, k: opt.polar_express(case.inputs[k], 4),
        "replay": None,
    }[fault]
    row, line = gated(entry, built, monkeypatch, ours, repeats=fault != "replay")
    assert not row.ok and row.ms is None
    assert "not timed" in line
