"""What a step on several GPUs is to reach, and whether each row does.

On shards a step must be half of N times as fast as on one GPU, with unreduced gradients no slower:
an exchange may cost what the division of the work gains. `held_mb` is memory beside parameters,
gradients and state.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from ..report import Goal, Row, judged

HELD_MB = 805.0  # 768 MiB
ERROR_SHARE = 0.25  # of what iterating in bfloat16 would make: the gate of a row
WORDS = {True: "pass", False: "short", None: "missing"}


def goals(case: str, ranks: int) -> dict[str, Goal]:
    """Those of a row on so many ranks."""
    times = ranks / 2 if case.endswith("/fsdp2") else 1.0
    return {
        "error_share": Goal(ERROR_SHARE, at_least=False),
        "over_one_gpu": Goal(times, at_least=True),
        "held_mb": Goal(HELD_MB, at_least=False),
    }


def of_one_gpu(single: Path | None) -> dict[str, float]:
    """Model -> a step's wall on one GPU, in ms, from its result file; empty where there is none."""
    if single is None or not single.is_file():
        return {}
    rows = json.loads(single.read_text())["rows"]
    return {
        row["case"].split("/")[0]: row["wall_ms"]
        for row in rows
        if row["ok"] and row["variant"] == "auto" and row["case"].endswith("/1gpu/heavy")
    }


def with_goals(row: Row, ranks: int, alone: Mapping[str, float], *, on_cpus: bool) -> Row:
    """The row with what it reached, or why that is not known."""
    if not row.ok:
        return row
    one = alone.get(row.case.split("/")[0])
    coarse = row.error_baseline or 0.0
    values: dict[str, float | str] = {
        "error_share": row.error / coarse if coarse else float(row.error > 0),
        "over_one_gpu": one / row.wall_ms
        if one
        else "no row of one GPU: make bench OP=optimizer_step",
        "held_mb": "not counted on CPUs" if on_cpus else row.peak_mb,
    }
    return judged(row, goals(row.case, ranks), values)


def lines(rows: Iterable[Row], left: Iterable[str], ranks: int) -> Iterator[str]:
    """A line for every goal of every row, the rows that were left out, and the sum."""
    counts = dict.fromkeys(WORDS.values(), 0)
    yield f"{'row':<30}{'what':<14}{'value':>10}{'goal':>10}  verdict"
    for case, name, one in _judgements(rows, left, ranks):
        word = WORDS[one["met"]]
        counts[word] += 1
        number = isinstance(one["value"], float)
        value = format(one["value"], ".3g") if number else "-"
        why = "" if number else f": {one['value']}"
        sign = ">=" if goals(case, ranks)[name].at_least else "<="
        goal = f"{sign} {one['goal']:.3g}"
        yield f"{case:<30}{name:<14}{value:>10}{goal:>10}  {word}{why}"
    total = sum(counts.values())
    yield f"verdict on {ranks} ranks, of {total}: " + ", ".join(
        f"{n} {w}" for w, n in counts.items()
    )


def _judgements(
    rows: Iterable[Row], left: Iterable[str], ranks: int
) -> Iterator[tuple[str, str, Mapping]]:
    for row in rows:
        for name, goal in goals(row.case, ranks).items():
            known = (row.goals or {}).get(name)
            wrong = {"value": "wrong results, not timed", "goal": goal.bound, "met": False}
            yield row.case, name, known or wrong
    for case in left:
        for name, goal in goals(case, ranks).items():
            why = "the time was over"
            yield case, name, {"value": why, "goal": goal.bound, "met": None}
