"""Restart positions: the published best sets and condition numbers follow from the criterion."""

from __future__ import annotations

import pytest
import torch

HALF, BRAIN = torch.float16, torch.bfloat16

# (table, dtype, restarts): (best positions, cond(Q) under the eigenvalue shift). Printed digits.
PUBLISHED = {
    ("gram_newton_schulz", HALF, 1): ((2,), "84.6"),
    ("gram_newton_schulz", HALF, 2): ((1, 2), "60.9"),
    ("nanochat", HALF, 1): ((2,), "118.6"),
    ("safety 1e-2", HALF, 1): ((1,), "679"),
    ("you", HALF, 1): ((2,), "53"),
    ("you", HALF, 2): ((1, 3), "35"),
    ("keller_jordan", HALF, 1): ((3,), "62.5"),
    ("keller_jordan", HALF, 2): ((2, 3), "19"),
    ("nanochat", BRAIN, 2): ((1, 2), "102"),
    ("safety 1e-2", BRAIN, 2): ((1, 2), "105"),
    ("gram_newton_schulz", BRAIN, 2): ((1, 2), "82"),
    ("you", BRAIN, 2): ((1, 3), "34"),
    ("keller_jordan", BRAIN, 1): ((2,), "148"),
}


@pytest.fixture(scope="module")
def tables(opt) -> dict:
    return {
        **{n: s.rows_for(5) for n, s in opt.COEFFICIENT_SETS.items() if len(s.rows) in (1, 5)},
        "nanochat": opt.polar_express_coefficients(),
        "safety 1e-2": opt.polar_express_coefficients(safety=1e-2),
    }


@pytest.mark.parametrize(("table", "dtype", "count"), PUBLISHED, ids=str)
def test_published_sets(restarts, tables, table, dtype, count) -> None:
    positions, printed = PUBLISHED[table, dtype, count]
    rows = tables[table]
    assert restarts.restart_positions(rows, dtype, count) == positions
    condition = restarts.worst_condition(rows, dtype, positions)
    digits = len(printed.partition(".")[2])
    assert f"{condition:.{digits}f}" == printed


def test_without_restart_the_condition_explodes(restarts, tables) -> None:
    rows = tables["gram_newton_schulz"]
    assert f"{restarts.worst_condition(rows, HALF, ()):.1e}" == "2.7e+12"
    one = [restarts.worst_condition(tables[t], BRAIN, (1,)) for t in ("nanochat", "safety 1e-2")]
    assert all(2.5e4 < condition < 1.1e5 for condition in one)


def test_defaults_keep_rounding_small(restarts, tables, opt) -> None:
    assert restarts.restart_positions(tables["nanochat"], HALF) == (2,)
    assert restarts.restart_positions(tables["gram_newton_schulz"], HALF) == (2,)
    # {1} is the best single restart for safety 1e-2, but its condition number 679 is too large.
    assert restarts.restart_positions(tables["safety 1e-2"], HALF) == (1, 2)
    # bfloat16 ends up restarting before every step: the direct iteration.
    assert restarts.restart_positions(tables["nanochat"], BRAIN) == (1, 2, 3, 4)
    for steps in range(1, 9):
        rows = opt.polar_express_coefficients(steps)
        positions = restarts.restart_positions(rows, HALF)
        assert restarts.worst_condition(rows, HALF, positions) <= 200


@pytest.mark.parametrize("table", ["nanochat", "keller_jordan"])
def test_search_is_exhaustive(restarts, tables, table) -> None:
    """Branch and bound finds what trying every pair finds."""
    rows = tables[table]
    pairs = [(i, j) for i in range(1, 5) for j in range(i + 1, 5)]
    every = {p: restarts.worst_condition(rows, HALF, p) for p in pairs}
    assert every[restarts.restart_positions(rows, HALF, 2)] == min(every.values())


def test_long_schedules_are_quick(restarts, opt) -> None:
    positions = restarts.restart_positions(opt.polar_express_coefficients(30), HALF)
    assert 1 <= len(positions) <= 4


def test_computed_once_per_table(restarts, tables) -> None:
    first = restarts.restart_positions(tables["you"], HALF)
    hits = restarts.restart_positions.cache_info().hits
    assert restarts.restart_positions(tables["you"], HALF) is first
    assert restarts.restart_positions.cache_info().hits == hits + 1


@pytest.mark.parametrize("count", [-1, 5, 1.0, True])
def test_bad_count(restarts, tables, count) -> None:
    with pytest.raises(ValueError, match=f"restarts={count!r}"):
        restarts.restart_positions(tables["nanochat"], HALF, count)


def test_unstable_count_raises(restarts, opt) -> None:
    with pytest.raises(ValueError, match="unstable"):
        restarts.restart_positions(opt.polar_express_coefficients(10), torch.bfloat16, 1)
