"""The benchmark of this folder away from a GPU: its baseline, its distances, its gate."""

from types import SimpleNamespace

import pytest
import torch

from benchmarks.harness import orthogonalize as entry
from benchmarks.harness import paths, timer
from benchmarks.harness.built_package import module as module_of

from .._compare import relative_error
from ._matrices import known_matrix, matrix


@pytest.fixture
def built(opt) -> SimpleNamespace:
    return SimpleNamespace(package=opt, commit="0" * 40, clean=True)


def test_the_baseline_is_five_steps_in_bfloat16(opt, reference) -> None:
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


def test_distances_to_the_polar_factor(opt, reference) -> None:
    """Of 1.1 U V^T 0.1; a tail down to 1e-7 of the norm is followed to its end."""
    known = [known_matrix(name, 48, 80) for name in ("log2", "log7")]
    x, polar = (torch.stack([getattr(k, part) for k in known]) for part in ("x", "polar"))
    rows = opt.polar_express_coefficients()
    exact = reference.newton_schulz(x, rows, 1.02)
    for turn in (lambda t: t, lambda t: t.mT):
        found = entry.Exact(opt, turn(x)).distances(turn(1.1 * polar), turn(exact))
        assert found.ours == pytest.approx(0.1, rel=1e-5)
        assert found.baseline == pytest.approx(relative_error(exact, polar), rel=1e-5)
        least = min(relative_error(e, p) for e, p in zip(exact, polar, strict=True))
        assert found.worst == pytest.approx(0.1 / least, rel=1e-5)
    with pytest.raises(RuntimeError, match="matrix 0 did not converge"):
        entry.Exact(opt, torch.zeros(1, 4, 4))


def gated(built, monkeypatch, ours=None, repeats=True):
    """The row of a small case whose timing is given; `ours` replaces what a user calls."""
    times = timer.Times
    taken = {"ours": times(2.0, 3.0, 0.5), "baseline": times(4.0, 9.0, 1.5)}
    monkeypatch.setattr(entry.Case, "capture", lambda self: None)
    monkeypatch.setattr(entry.Case, "replay_repeats", lambda self: repeats)
    monkeypatch.setattr(entry, "added_mb", lambda call: 1.0)
    monkeypatch.setattr(entry.Case, "times", lambda self, *_: taken)
    if ours is not None:
        monkeypatch.setattr(entry.Case, "ours", ours)
    problem = entry.Problem(1, 48, 64, "heavy")
    inputs = [entry.made(problem, torch.Generator().manual_seed(0), "cpu")]
    distances = entry.Exact(built.package, inputs[0]).distances
    task = entry.Task("1x48x64/heavy", inputs, distances, 1.0, 1.02)
    return entry.measure(task, entry.Case(inputs, built, entry.polar_express_bf16))


@pytest.mark.parametrize("fault", [None, "scaled", "nan", "four steps", "replay"])
def test_right_results_alone_are_timed(opt, built, monkeypatch, fault) -> None:
    ours = {
        "scaled": lambda case, k: opt.orthogonalize(case.inputs[k]) * 1.2,
        "nan": lambda case, k: opt.orthogonalize(case.inputs[k]) * float("nan"),
        "four steps": lambda case, k: opt.polar_express(case.inputs[k], 4),
    }.get(fault)
    row, line = gated(built, monkeypatch, ours, repeats=fault != "replay")
    assert row.ok == (fault is None) and ("not timed" in line) == (fault is not None)
    timed = (row.ms, row.wall_ms, row.speedup) == (2.0, 3.0, 3.0)
    assert timed and "1x48x64/heavy" in line if fault is None else row.ms is None


def test_forced_paths_replace_functions_and_put_them_back(opt) -> None:
    """Every name is still the package's: a function that moves must be moved here, too."""
    products = module_of(opt, "orthogonalize.products")
    others = [module_of(opt, f"orthogonalize.{name}") for name in ("slices", "gram_polynomial")]
    before = {module: dict(vars(module)) for module in (products, *others)}
    where = (torch.float16, torch.device("cpu"))
    with paths.forced(opt, paths.MMA_SYNC):
        assert not products.batch_is_free(*where) and not others[0].batch_is_free(*where)
        symmetric_matmul = module_of(opt, "kernels.products.symmetric_matmul")
        assert symmetric_matmul.TILES[products.AUTO] == "128x128"
        assert products.runs_symmetric is before[products]["runs_symmetric"]
    with pytest.raises(RuntimeError, match="within"), paths.forced(opt, paths.TORCH):
        assert not products.runs_symmetric(4096, *where)
        assert others[1].runs_symmetric is products.runs_symmetric
        raise RuntimeError("within")
    assert {module: dict(vars(module)) for module in before} == before


@pytest.mark.parametrize("path", ["mma.sync", "torch"])
def test_every_path_passes_the_gate(opt, path) -> None:
    x = entry.made(entry.Problem(2, 48, 128, "heavy"), torch.Generator().manual_seed(0), "cpu")
    with paths.forced(opt, path):
        for g in (x, x.mT.contiguous()):
            exact = entry.Exact(opt, g)
            found = exact.distances(opt.orthogonalize(g), entry.polar_express_bf16(g))
            assert found.worst <= 1.02
            half = opt.orthogonalize(g, dtype=torch.float16)
            assert exact.distances(half, half).worst <= 1.05
