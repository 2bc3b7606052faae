"""Rows, result files and the printed table."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from .timer import Times

# Fixed, so that a hot or a cold chip does not move the floor.
FLOOR_TBPS = 4.3
FLOOR_TFLOPS = 790.0


def floor_ms(*, bytes_moved: float, flops: float = 0.0) -> float:
    """The least time a device can need: the larger of its bytes and its 16-bit operations."""
    return max(bytes_moved / FLOOR_TBPS, flops / FLOOR_TFLOPS) / 1e9


@dataclass(frozen=True)
class Row:
    """One case of a result file. A row that is not ok carries no time."""

    case: str
    variant: str
    ok: bool
    wall_ms: float | None = None
    host_ms: float | None = None
    baseline_wall_ms: float | None = None
    baseline_host_ms: float | None = None
    ms: float | None = None
    floor_ms: float | None = None
    fraction_of_floor: float | None = None
    baseline: str | None = None
    baseline_ms: float | None = None
    speedup: float | None = None
    error: float | None = None
    error_baseline: float | None = None
    peak_mb: float | None = None
    peak_baseline_mb: float | None = None
    goals: dict[str, dict] | None = None  # see `judged`
    peer_commit: str | None = None  # of the checkouts that the row measured instead of ours
    # One figure instead of times.
    value: float | None = None
    unit: str | None = None
    target: float | None = None
    transport: str | None = None


Line = tuple[Row, str]  # and what is printed of it
Rows = Iterator[Line]


def passed(
    case: str,
    times: Mapping[str, Times],
    baseline: str,
    floor_ms: float,
    *,
    variant: str = "auto",
    errors: Sequence[float] = (0.0, 0.0),
    **peaks: float,
) -> Row:
    """The row of a case that passed its gate; times and errors are of "ours" and "baseline"."""
    ours, other = times["ours"], times["baseline"]
    return Row(
        case=case,
        variant=variant,
        ok=True,
        wall_ms=ours.wall_ms,
        host_ms=ours.host_ms,
        baseline_wall_ms=other.wall_ms,
        baseline_host_ms=other.host_ms,
        ms=ours.ms,
        floor_ms=floor_ms,
        fraction_of_floor=floor_ms / ours.ms,
        baseline=baseline,
        baseline_ms=other.ms,
        speedup=other.wall_ms / ours.wall_ms,
        error=errors[0],
        error_baseline=errors[1],
        **peaks,
    )


def failed(case: str, variant: str = "auto") -> Row:
    """The row of a case whose results were wrong."""
    return Row(case=case, variant=variant, ok=False)


def folder_name(gpu: str, count: int = 1) -> str:
    """ "NVIDIA H200" -> "h200", with 8 devices "h200x8"."""
    name = re.sub(r"^nvidia\s+", "", gpu.lower())
    return re.sub(r"[^a-z0-9]+", "-", name) + (f"x{count}" if count > 1 else "")


def entry(row: Row) -> dict:
    """A row as a file holds it; numbers keep five digits, which is more than they repeat to."""
    return {key: _rounded(value) for key, value in asdict(row).items() if value is not None}


def write(path: Path, header: dict, rows: Sequence[Row | dict]) -> None:
    """Write a result file, whole or not at all; a dict is an entry that was read from one."""
    entries = [row if isinstance(row, dict) else entry(row) for row in rows]
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".tmp")
    unfinished.write_text(json.dumps({**header, "rows": entries}, indent=1) + "\n")
    os.replace(unfinished, path)


def read(path: Path) -> dict | None:
    """A result file, if there is one."""
    return json.loads(path.read_text()) if path.is_file() else None


def difference(earlier: dict, head: dict, keys: Iterable[str]) -> str | None:
    """The first of the keys in which a file's header is not `head`, as a sentence; None if none."""
    for key in keys:
        if earlier[key] != head[key]:
            return f"the file has {key} {earlier[key]}, this is {head[key]}"
    return None


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(inner) for inner in value]
    return float(f"{value:.5g}") if isinstance(value, float) else value


def name_of(row: Row) -> str:
    """The case, and what is not the path that a user gets."""
    return row.case if row.variant == "auto" else f"{row.case} [{row.variant}]"


def line(row: Row, *, gigabytes: float, copy_ms: float | None = None) -> str:
    """One printed line: case, us of clock, host and device, GB/s, shares of floor and copy, x."""
    name = name_of(row)
    if not row.ok:
        return f"{name:<44} WRONG RESULTS, not timed"
    copy = "" if copy_ms is None else f"{copy_ms / row.ms:>7.1%}"
    clock = "".join(f"{ms * 1e3:>9.1f}" for ms in (row.wall_ms, row.host_ms, row.ms))
    return (
        f"{name:<44}{clock}{gigabytes / row.ms * 1e3:>9.0f}"
        f"{row.fraction_of_floor:>9.1%}{copy:>9}{row.speedup:>8.2f}x"
    )


HEADING = (
    f"{'case':<44}{'wall us':>9}{'host':>9}{'device':>9}{'GB/s':>9}{'% floor':>9}{'% copy':>9}"
    f"{'x base':>9}"
)


def geomean(values: Sequence[float]) -> float:
    """Geometric mean; NaN without values."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


@dataclass(frozen=True)
class Goal:
    """A bound of a value: from below, or from above."""

    bound: float
    at_least: bool

    def met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


def judged(row: Row, goals: Mapping[str, Goal], values: Mapping[str, float | str]) -> Row:
    """The row with its goals; `values` hold what the row itself does not, or why it is missing."""
    if not row.ok or not goals:
        return row
    own = {"speedup": row.speedup, "ms": row.ms, "host_ms": row.host_ms}
    if row.baseline_host_ms:
        own["host_of_baseline"] = row.host_ms / row.baseline_host_ms
    if row.peak_baseline_mb:
        own["of_baseline_peak"] = row.peak_mb / row.peak_baseline_mb
    found = {}
    for name, goal in goals.items():
        value = values.get(name, own.get(name))
        met = None if isinstance(value, str) else goal.met(value)
        found[name] = {"value": value, "goal": goal.bound, "met": met}
    return replace(row, goals=found)


def figure(
    case: str,
    value: float | None,
    baseline: str,
    goal: Goal,
    transport: str,
    *,
    unit: str,
    missing: str = "WRONG RESULTS",
) -> Line:
    """The row of one value with its goal, and its line; `missing` is why there is no value."""
    if value is None:
        return Row(case=case, variant="auto", ok=False), f"{case:<52}{missing}, not timed"
    row = Row(
        case=case,
        variant="auto",
        ok=True,
        baseline=baseline,
        value=value,
        unit=unit,
        target=goal.bound,
        transport=transport,
    )
    met = "met" if goal.met(value) else "MISSED"
    line = f"{case:<52}{value:>8.4g}  {unit} (goal {goal.bound:g} {met})"
    return judged(row, {"value": goal}, {"value": value}), line


def said(row: Row) -> str:
    """The goals for a printed line."""
    parts = [_said(name, one) for name, one in (row.goals or {}).items()]
    return "  " + ", ".join(parts) if parts else ""


def _said(name: str, one: Mapping) -> str:
    value = one["value"] if one["met"] is None else format(one["value"], ".3g")
    words = {True: "met", False: "MISSED", None: "not measured"}
    return f"{name} {value} of {one['goal']:.3g} {words[one['met']]}"


def goals_summary(rows: Iterable[Row]) -> str:
    """How many goals are met, and those that are not, a line each; nothing where there are none."""
    found = [(row, name, one) for row in rows for name, one in (row.goals or {}).items()]
    short = [f"  {name_of(r)}: {_said(name, one)}" for r, name, one in found if not one["met"]]
    if not found:
        return ""
    return "\n".join([f"{len(found) - len(short)} of {len(found)} goals are met", *short])
