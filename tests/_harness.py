"""The modules of benchmarks/harness as run.py imports them, and the form of their result files."""

import importlib
import math
import re
from pathlib import Path
from types import ModuleType

from ._project import ROOT, write_files

BENCHMARKS = ROOT / "benchmarks"
COMMIT = "0123456789" * 4
HEAD = {
    "gpu": "NVIDIA H200",
    "driver": "580.1",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "commit": COMMIT,
    "sources": "ab" * 32,
    "ceilings": {"bf16_tflops": 770.0, "fp16_tflops": 760.0, "copy_tbps": 4.25},
}


class Harness:
    """`harness.nf4` is the module of that name, in whichever folder of the harness it lies."""

    def __getattr__(self, name: str) -> ModuleType:
        if name == "run":
            return importlib.import_module(name)
        (path,) = (BENCHMARKS / "harness").rglob(f"{name}.py")
        dotted = path.relative_to(BENCHMARKS).with_suffix("").as_posix().replace("/", ".")
        module = importlib.import_module(dotted)
        setattr(self, name, module)
        return module

    def copy_sources(self, entry: str, root: Path) -> None:
        for path in self.sources.source_files(entry):
            write_files(root, {path.relative_to(ROOT).as_posix(): path.read_text()})

    def write_pages(self, root: Path) -> None:
        """Those that quote results, with something else between their markers."""
        text = f"# title\n{self.plots.BEGIN}\nold\n{self.plots.END}\ntail\n"
        write_files(root, {path.as_posix(): text for path in self.plots.BETWEEN})


TEXTS = ("gpu", "driver", "torch", "triton", "commit", "sources")
CEILINGS = ("bf16_tflops", "fp16_tflops", "copy_tbps")
# Only a row that passed its correctness gate has them.
CLOCK = ("wall_ms", "host_ms", "baseline_wall_ms", "baseline_host_ms")
TIMES = (*CLOCK, "ms", "floor_ms", "baseline_ms")
# Of whole models, which have no floor, and of trainings.
MODEL = (*CLOCK, "tokens_per_s")
TRAINING = (*MODEL, "loss", "loss_mean", "lr", "optimizer_ms", "steps", "tokens")
LISTS = ("curve", "held_out", "seeds", "sweep")  # of trainings
SPEEDUP = ("speedup", "baseline_wall_ms", "wall_ms")
SHARE = ("fraction_of_floor", "floor_ms", "ms")
ROUNDING = 0.01  # the ratios are stored rounded
QUOTE = re.compile(r"benchmarks/results/([\w-]+)/([\w.-]+)\.(?:json|csv|svg|png|md)\b")


def result_findings(name: str, result: object) -> list[str]:
    """Faults of one result file, each beginning with its name."""
    if not isinstance(result, dict):
        return [f"{name}: must be a JSON object"]
    if "partial" in result:
        return [f"{name}: is not complete; the command that wrote it goes on with it"]
    findings = [
        f"{name}: {key} must be text"
        for key in TEXTS
        if not isinstance(result.get(key), str) or not result[key]
    ]
    stated = {"": result} | ({"experts.": result["experts"]} if "experts" in result else {})
    for part, entry in stated.items():
        for key, digits in (("commit", 40), ("sources", 64)):
            value = entry.get(key) if isinstance(entry, dict) else None
            if not re.fullmatch(rf"[0-9a-f]{{{digits}}}", str(value)):
                findings.append(f"{name}: {part}{key} must be {digits} hexadecimal digits")
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
    if "value" in row:  # one figure with its unit and target instead of times
        needed = ("unit", "target")
        if not str(row.get("case")).startswith("first_use/"):
            needed += ("transport",)
        return faults + [f"{key} is missing" for key in needed if key not in row]
    model, training = "tokens_per_s" in row, "curve" in row
    if training:
        times, numbers = TRAINING, ()
    elif model:
        times, numbers = MODEL, ("error", "peak_mb")
    else:
        times, numbers = TIMES, ("error", "error_baseline", "peak_mb")
    faults += [f"{key} must be a positive number" for key in times if not _positive(row.get(key))]
    if not isinstance(row.get("baseline"), str) or not row["baseline"]:
        faults.append("baseline must be text")
    for key in numbers:
        if not (_number(row.get(key)) and row[key] >= 0):
            faults.append(f"{key} must be a number")
    if training:
        faults += _training_faults(row)
    if not faults:
        for key, over, under in (SPEEDUP,) if model else (SHARE, SPEEDUP):
            expected = row[over] / row[under]
            if not _number(row.get(key)) or not math.isclose(row[key], expected, rel_tol=ROUNDING):
                faults.append(f"{key} is {row.get(key)}, but {over} / {under} is {expected:.4g}")
    return faults


def _training_faults(row: dict) -> list[str]:
    """The chosen rate is the best one of the sweep, and the row says so if it was the last."""
    faults = [f"{key} must be a list" for key in LISTS if not isinstance(row.get(key), list)]
    if faults:
        return faults
    trained = {run["lr"]: run["loss"] for run in row["sweep"] if "loss" in run}
    rates = [run["lr"] for run in row["sweep"]]
    if len(rates) < 5:
        faults.append(f"sweep has {len(rates)} rates, at least 5 are needed")
    if not trained or row.get("lr") != min(trained, key=trained.get):
        faults.append(f"lr is {row.get('lr')}, which is not the best one of the sweep")
    elif row.get("lr_at_edge") is not (row["lr"] in (min(rates), max(rates))):
        faults.append("lr_at_edge must say whether lr is the first or the last one tried")
    return faults


def _number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _positive(value: object) -> bool:
    return _number(value) and value > 0


def quoted_results(document: str) -> set[Path]:
    """The result files that a document quotes, itself or by a plot drawn from it."""
    return {Path(gpu) / f"{name}.json" for gpu, name in QUOTE.findall(document)}
