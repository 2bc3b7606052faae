"""tools/tune.py: how many tiles the busiest multiprocessor has, and the times fitted to that."""

from __future__ import annotations

import importlib.util

import pytest

from ..conftest import ROOT


@pytest.fixture(scope="module")
def tune():
    spec = importlib.util.spec_from_file_location("tune", ROOT / "tools" / "tune.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def row(op: str, tile: str, batch: int, m: int, k: int, n: int) -> dict:
    return {"op": op, "tile": tile, "batch": batch, "m": m, "k": k, "n": n}


@pytest.mark.parametrize(
    ("op", "tile", "problem", "rounds"),
    [
        ("symmetric_matmul", "sm90_128x128", (1, 2048, 2048, 2048), 2),  # 136 tiles, 132 processors
        ("symmetric_matmul", "sm90_64x128", (1, 2048, 2048, 2048), 3),  # 272
        ("symmetric_matmul", "sm90_128x192", (1, 2048, 2048, 2048), 1),  # 101
        ("symmetric_matmul", "sm90_128x192", (48, 768, 768, 768), 6),  # 2 + 3 + 5 + 6 each, 768
        ("symmetric_matmul", "sm90_128x256", (48, 768, 768, 768), 5),  # 2 + 4 + 6 each, 576
        ("matmul_add", "sm90_128x256", (12, 768, 768, 3072), 7),  # 72 each, 864
        ("matmul_add", "sm90_256x128", (1, 257, 64, 128), 1),
    ],
)
def test_rounds_of_the_busiest_multiprocessor(tune, op, tile, problem, rounds):
    assert tune.rounds_of(row(op, tile, *problem), 132) == rounds


@pytest.mark.parametrize("op", ("symmetric_matmul", "matmul_add"))
def test_the_fit_finds_the_times(tune, op):
    rows = []
    for batch, m, k, n, _ in tune.problems(op, len(tune.SHAPES)):
        found = row(op, "sm90_128x256", batch, m, k, n)
        stages = -(-k // 64)
        rows.append({**found, "ours_ms": tune.rounds_of(found, 132) * (stages * 0.6 + 2.5) / 1000})
    assert tune.fit(rows, 132) == pytest.approx((0.6, 2.5))
    free = [{**r, "ours_ms": tune.rounds_of(r, 132) * -(-r["k"] // 64) * 6e-4} for r in rows]
    block, tile = tune.fit(free, 132)
    assert block == pytest.approx(0.6) and tile == pytest.approx(0.0, abs=1e-9) and tile >= 0


def test_it_runs_every_tile_that_the_op_names(tune, submodule):
    for op in tune.OPS:
        assert tune._tiles(op) == list(submodule(f"kernels.products.{op}").TILES)
