"""Rows, result files and the printed table."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

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
    goals: dict[str, dict] | None = None  # see nf4_goals


@dataclass(frozen=True)
class Measured:
    """What was measured for a case that passed its gate."""

    ms: float
    floor_ms: float
    baseline: str
    baseline_ms: float
    error: float
    error_baseline: float
    peak_mb: float
    peak_baseline_mb: float | None = None


def passed(case: str, measured: Measured, variant: str = "auto") -> Row:
    """The row of a case that passed its gate."""
    return Row(
        case=case,
        variant=variant,
        ok=True,
        fraction_of_floor=measured.floor_ms / measured.ms,
        speedup=measured.baseline_ms / measured.ms,
        **asdict(measured),
    )


def failed(case: str, variant: str = "auto") -> Row:
    """The row of a case whose results were wrong."""
    return Row(case=case, variant=variant, ok=False)


def folder_name(gpu: str, count: int = 1) -> str:
    """ "NVIDIA H200" -> "h200", with 8 devices "h200x8"."""
    name = re.sub(r"^nvidia\s+", "", gpu.lower())
    return re.sub(r"[^a-z0-9]+", "-", name) + (f"x{count}" if count > 1 else "")


def write(path: Path, header: dict, rows: Sequence[Row]) -> None:
    """Write a result file; numbers keep five digits, which is more than they repeat to."""
    entries = [
        {key: _rounded(value) for key, value in asdict(row).items() if value is not None}
        for row in rows
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**header, "rows": entries}, indent=1) + "\n")


def _rounded(value: object) -> object:
    if isinstance(value, dict):
        return {key: _rounded(inner) for key, inner in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def line(row: Row, *, gigabytes: float, copy_ms: float | None = None) -> str:
    """One printed line: case, us, GB/s, share of the floor, share of a copy's rate, x baseline."""
    if not row.ok:
        return f"{row.case:<44} WRONG RESULTS, not timed"
    copy = "" if copy_ms is None else f"{copy_ms / row.ms:>7.1%}"
    return (
        f"{row.case:<44}{row.ms * 1e3:>9.1f}{gigabytes / row.ms * 1e3:>9.0f}"
        f"{row.fraction_of_floor:>9.1%}{copy:>9}{row.speedup:>8.2f}x"
    )


HEADING = f"{'case':<44}{'us':>9}{'GB/s':>9}{'% floor':>9}{'% copy':>9}{'x base':>9}"


def geomean(values: Sequence[float]) -> float:
    """Geometric mean; NaN without values."""
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan
