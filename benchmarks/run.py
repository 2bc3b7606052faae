"""Measure one group of ops on this GPU, or draw what was measured.

python benchmarks/run.py elementwise [--out DIR] [--draft]    writes DIR/<gpu>/elementwise.json
python benchmarks/run.py optimizer_step                       whole steps on one GPU
python benchmarks/run.py orthogonalize                        the same for orthogonalize.json
python benchmarks/run.py moe_lora [-m MODEL ...] [-r RANK ...] [-T TOKENS]
python benchmarks/run.py nf4                                  layers on 4-bit experts, decoding
python benchmarks/run.py plots [--check]                      README's table and the plots

A case is timed only after its results were compared with the reference. `--draft` measures a build
with uncommitted changes and writes nothing. With `-m` moe_lora measures layers of these models only
(a name of harness/moe_problems.py, a Hugging Face id or a folder) and writes nothing. See
docs/measuring.md.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from pathlib import Path

from harness import plots
from harness.sources import RESULTS, ROOT, sources_digest

# Result file -> the module of harness/ that holds its cases.
ENTRIES = {
    "elementwise": "harness.elementwise",
    "moe_lora": "harness.moe_lora",
    "nf4": "harness.nf4",
    "optimizer_step": "harness.optimizer_step",
    "orthogonalize": "harness.orthogonalize",
}


def header(built, name: str, count: int) -> dict:
    """What a result file says about the machine and the code."""
    import torch
    import triton
    from harness import ceilings

    gpu = torch.cuda.get_device_name(0)
    return {
        "gpu": gpu if count == 1 else f"{count} x {gpu}",
        "driver": ceilings.driver(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": built.commit,
        "sources": sources_digest(name),
        "ceilings": ceilings.measure(),
    }


def measure(name: str, out: Path, *, draft: bool, **problem: object) -> int:
    """Measure one result file; returns the number of rows with wrong results."""
    import torch
    from harness import package, report

    if not torch.cuda.is_available():
        raise SystemExit("benchmarks need a CUDA device")
    entry = importlib.import_module(ENTRIES[name])
    built = package.load(ROOT)
    if not built.clean and not draft:
        raise SystemExit(
            "build/ was not made from a clean commit, so its times could not be traced to sources: "
            "commit, run `make build`, or pass --draft to print without writing"
        )
    head = header(built, name, count=1)
    print(*(f"{key}: {value}" for key, value in head.items()), sep="\n")
    print(f"\n{getattr(entry, 'HEADING', report.HEADING)}")
    rows = []
    for row, line in entry.rows(built, **problem):
        print(line, flush=True)
        rows.append(row)
    timed = [row for row in rows if row.ok]
    print(
        f"{len(rows) - len(timed)} wrong; geometric means: "
        f"{report.geomean([row.fraction_of_floor for row in timed]):.1%} of the floor, "
        f"{report.geomean([row.speedup for row in timed]):.2f}x the baseline"
    )
    if hasattr(entry, "summary"):
        print(entry.summary(rows))
    if not draft:
        path = out / report.folder_name(torch.cuda.get_device_name(0)) / f"{name}.json"
        report.write(path, head, rows)
        print(f"wrote {path}")
    return len(rows) - len(timed)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=(*ENTRIES, "plots"))
    parser.add_argument("--out", type=Path, default=ROOT / RESULTS, help="folder of the results")
    parser.add_argument("--draft", action="store_true", help="print only; any build will do")
    parser.add_argument(
        "--check", action="store_true", help="plots: write nothing, find stale ones"
    )
    parser.add_argument("-m", "--models", nargs="+", help="moe_lora: these models only")
    parser.add_argument("-r", "--ranks", nargs="+", type=int, default=[16, 32, 64])
    parser.add_argument("-T", "--seq-len", type=int, default=2048, help="moe_lora: tokens")
    options = parser.parse_args(arguments)
    if options.what != "plots":
        problem = {}
        if options.models:
            if options.what != "moe_lora":
                parser.error(f"{options.what} takes no --models")
            problem = {"models": options.models, "ranks": options.ranks, "tokens": options.seq_len}
        draft = options.draft or bool(problem)
        return min(measure(options.what, options.out, draft=draft, **problem), 1)
    if not options.check:
        plots.draw(ROOT)
        return 0
    findings = plots.findings(ROOT)
    print(*findings, sep="\n", file=sys.stderr)
    return min(len(findings), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
