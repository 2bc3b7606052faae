"""The result files under benchmarks/results: their form, and which of them README quotes."""

from __future__ import annotations

import math
import re
from pathlib import Path

TEXTS = ("gpu", "driver", "torch", "triton", "commit", "sources")
CEILINGS = ("bf16_tflops", "fp16_tflops", "copy_tbps")
# Only a row that passed its correctness gate has them.
TIMES = (
    *("wall_ms", "host_ms", "baseline_wall_ms", "baseline_host_ms"),
    *("ms", "floor_ms", "baseline_ms"),
)
ROUNDING = 0.01  # the ratios are stored rounded
QUOTE = re.compile(r"benchmarks/results/([\w-]+)/([\w-]+)\.(?:json|csv|svg|png|md)\b")


def result_findings(name: str, result: object) -> list[str]:
    """Faults of one result file, each beginning with its name."""
    if not isinstance(result, dict):
        return [f"{name}: must be a JSON object"]
    findings = [
        f"{name}: {key} must be text"
        for key in TEXTS
        if not isinstance(result.get(key), str) or not result[key]
    ]
    for key, digits in (("commit", 40), ("sources", 64)):
        if not re.fullmatch(rf"[0-9a-f]{{{digits}}}", str(result.get(key))):
            findings.append(f"{name}: {key} must be {digits} hexadecimal digits")
    ceilings = result.get("ceilings")
    for key in CEILINGS:
        if not isinstance(ceilings, dict) or not _positive(ceilings.get(key)):
            findings.append(f"{name}: ceilings.{key} must be a positive number")
    rows = result.get("rows")
    if not isinstance(rows, list) or not rows:
        return [*findings, f"{name}: rows must be a list with at least one row"]
    seen = set()
    for number, row in enumerate(rows):
        if not isinstance(row, dict):
            findings.append(f"{name}: row {number} must be an object")
            continue
        findings += [f"{name}: row {number}: {fault}" for fault in _row_faults(row)]
        key = (row.get("case"), row.get("variant"))
        if key in seen:
            findings.append(f"{name}: row {number}: {key[0]} / {key[1]} stands there twice")
        seen.add(key)
    return findings


def _row_faults(row: dict) -> list[str]:
    faults = [
        f"{key} must be text"
        for key in ("case", "variant")
        if not isinstance(row.get(key), str) or not row[key]
    ]
    if not isinstance(row.get("ok"), bool):
        return [*faults, "ok must be true or false"]
    if not row["ok"]:
        timed = [
            key
            for key in ("wall_ms", "ms", "speedup", "fraction_of_floor")
            if row.get(key) is not None
        ]
        return faults + [f"is not ok, so it must have no {key}" for key in timed]
    if "value" in row:  # a communication figure: its unit and target instead of a time
        faults += [f"{key} is missing" for key in ("unit", "target", "transport") if key not in row]
        return faults
    faults += [f"{key} must be a positive number" for key in TIMES if not _positive(row.get(key))]
    if not isinstance(row.get("baseline"), str) or not row["baseline"]:
        faults.append("baseline must be text")
    for key in ("error", "error_baseline", "peak_mb"):
        if not (_number(row.get(key)) and row[key] >= 0):
            faults.append(f"{key} must be a number")
    if not faults:
        for key, over, under in (
            ("fraction_of_floor", "floor_ms", "ms"),
            ("speedup", "baseline_wall_ms", "wall_ms"),
        ):
            expected = row[over] / row[under]
            if not _number(row.get(key)) or not math.isclose(row[key], expected, rel_tol=ROUNDING):
                faults.append(f"{key} is {row.get(key)}, but {over} / {under} is {expected:.4g}")
    return faults


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _positive(value: object) -> bool:
    return _number(value) and value > 0


def quoted_results(document: str) -> set[Path]:
    """The result files that a document quotes, itself or by a plot drawn from it."""
    return {Path(gpu) / f"{name}.json" for gpu, name in QUOTE.findall(document)}
