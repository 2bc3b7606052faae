"""Measure one group of ops on this GPU, or draw what was measured.

python benchmarks/run.py elementwise [--out DIR] [--draft]    writes DIR/<gpu>/elementwise.json
python benchmarks/run.py optimizer_step                       whole steps on one GPU
torchrun --nproc-per-node 8 benchmarks/run.py optimizer_step  on several: DIR/<gpu>x8/..., and a
                                                              verdict on each of its goals
python benchmarks/run.py orthogonalize                        the same for orthogonalize.json
python benchmarks/run.py moe_lora [-m MODEL ...] [-r RANK ...] [-T TOKENS]
python benchmarks/run.py communication                        copies, products that wait, launches
python benchmarks/run.py quant                                layers on packed experts, decoding
python benchmarks/run.py tensor_parallel                      one rank's share of Newton-Schulz
torchrun --nproc-per-node 4 benchmarks/run.py tensor_parallel products that communicate, all of it
torchrun --nproc-per-node 8 benchmarks/run.py communication   transports between GPUs of one host
python benchmarks/run.py end_to_end --case CASE [CASE ...]    trainings, models, first calls
python benchmarks/run.py plots [--check]                      README's table, docs/benchmarks, plots

A case is timed only after its results were compared with the reference. Finished rows stand in
DIR/<gpu>/<name>.partial.json until the file is complete; after a cut-off the same command goes on
with it. The same command started on several GPUs of one machine (CUDA_VISIBLE_DEVICES=0, 1, ...)
shares the cases of one file. `--budget SECONDS` begins no case after that time, counted from the
start of the command: exit status 3 then says that some are left. `--again CASE` measures cases of a
file once more whose commit and sources are the same, such as after a defect of the harness.
`--draft` measures a build with uncommitted changes and writes nothing. With `-m`, `-r` or `-T`
moe_lora measures layers of these models (a name of harness/experts/problems.py, a Hugging Face id
or a folder; default: those of problems.py), ranks and tokens only and writes nothing. A command of
end_to_end measures the cases that it names (such as gpt-124M/muon, qwen3-moe-8l, first_use) and
puts their rows into the file that is there; token ids and compiled models stay in --cache for the
next one. PEERS=<folder>, an environment variable, names checkouts of other projects, which get rows
beside ours (harness/other_projects.py). Under torchrun `--device cpu` tries tiny sets over gloo and
writes nothing. See docs/dev/measuring.md.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from harness import plots
from harness.sources import PART, RESULTS, ROOT, entry_of, sources_digest

UNFINISHED = 3  # exit status: the time was over before the last case
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "optimizer-benchmarks"
# Result file -> the module of harness/ that holds its cases.
ENTRIES = {
    "communication": "harness.communication",
    "elementwise": "harness.elementwise",
    "end_to_end": "harness.end_to_end.cases",
    "moe_lora": "harness.experts.moe_lora",
    "optimizer_step": "harness.optimizer_step.one_gpu",
    "orthogonalize": "harness.orthogonalize",
    "quant": "harness.experts.quant",
    "tensor_parallel": "harness.tensor_parallel",
}
ON_RANKS = ("communication", "optimizer_step", "tensor_parallel")  # that torchrun may start


def header(built, entry: str, count: int) -> dict:
    """What a result file says about the machine and the code; `entry` is one of SOURCES."""
    import torch
    import triton
    from harness import device

    gpu = torch.cuda.get_device_name(0)
    return {
        "gpu": gpu if count == 1 else f"{count} x {gpu}",
        "driver": device.driver(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": built.commit,
        "sources": sources_digest(entry),
        "ceilings": device.ceilings(),
    }


def check_clean(built, *, draft: bool) -> None:
    if not built.clean and not draft:
        raise SystemExit(
            "build/ was not made from a clean commit, so its times could not be traced to sources: "
            "commit, run `make build`, or pass --draft to print without writing"
        )


def status(rows: Sequence, left: Sequence[str], remedy: str) -> int:
    """Exit status of a command that measured `rows` and left these cases, after a line of these."""
    if not left:
        return int(any(not row.ok for row in rows))
    print(f"the time is over, {len(left)} cases are left: {remedy}")
    return UNFINISHED


def measure(
    name: str,
    out: Path,
    *,
    draft: bool,
    end: float | None,
    again: Sequence[str] = (),
    **problem: object,
) -> int:
    """Measure what a result file lacks, and cases `again`, until `end`; returns the exit status."""
    import torch
    from harness import built_package, progress, report

    start = time.monotonic()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks need a CUDA device")
    entry = importlib.import_module(ENTRIES[name])
    built = built_package.load(ROOT)
    check_clean(built, draft=draft)
    path = out / report.folder_name(torch.cuda.get_device_name(0)) / f"{name}.json"
    head = header(built, entry_of(path), count=1)
    print(*(f"{key}: {value}" for key, value in head.items()), sep="\n")
    with contextlib.ExitStack() as stack:
        file = None
        if not draft:
            try:
                file = progress.PartialFile(path, head, again)
            except ValueError as error:
                raise SystemExit(f"{progress.partial_path(path)}: {error}") from error
            stack.callback(file.release)
            if file.is_written:
                print(f"{path} is complete; delete it to measure it anew")
                return 0
            if file.rows:
                print(f"goes on behind {len(file.rows)} rows of {file.source}")
        rows = file.rows if file else []
        cases = progress.Progress(end=end, file=file)
        print(f"\n{getattr(entry, 'HEADING', report.HEADING)}")
        for row, line in entry.rows(built, cases, **problem):
            print(f"{line}  [{time.monotonic() - start:.0f} s]", flush=True)
            rows.append(row)
        is_whole = file is not None and file.complete(cases.begun, [*cases.cases])
        print(summary(rows))
        if hasattr(entry, "summary"):
            print(entry.summary(rows))
    if is_whole:
        print(f"wrote {path}")
    elif file and not cases.left:
        print("other commands measure what is missing: the last one writes the file")
    kept = rows and not draft
    return status(rows, cases.left, "the same command goes on" if kept else "give it more time")


def finish(name: str, folder: Path) -> int:
    """A partial file becomes the result with what it has; `missing` names the cases that it lacks.

    Raises:
        SystemExit: there is no such file, or its sources are not those of this checkout.
    """
    from types import SimpleNamespace

    from harness import progress, report

    path = folder / f"{name}.json"
    partial = progress.partial_path(path)
    earlier = report.read(partial)
    if earlier is None:
        raise SystemExit(f"{partial} does not exist")
    if earlier["sources"] != sources_digest(entry_of(path)):
        raise SystemExit(f"{partial} is of other sources than this checkout")
    late = progress.Progress(earlier["done"], end=0.0)
    entry = importlib.import_module(ENTRIES[name])
    assert not list(entry.rows(SimpleNamespace(commit=earlier["commit"]), late))
    head = progress.header_of(earlier) | {"missing": sorted(set(late.left))}
    report.write(path, head, earlier["rows"])
    partial.unlink()
    print(f"wrote {path} without {len(set(late.left))} cases")
    return 0


def measure_cases(
    asked: list[str], out: Path, cache: Path, *, draft: bool, end: float | None
) -> int:
    """Measure some cases of end_to_end.json until `end`; returns the exit status."""
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache / "inductor"))
    import torch
    from harness import built_package, progress, report
    from harness.end_to_end import cases as end_to_end
    from harness.end_to_end import tokens

    try:
        cases = end_to_end.selected(asked)
    except ValueError as error:
        raise SystemExit(f"--case {error}") from error
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks need a CUDA device")
    built = built_package.load(ROOT)
    check_clean(built, draft=draft)
    path = out / report.folder_name(torch.cuda.get_device_name(0)) / "end_to_end.json"
    head = header(built, "end_to_end", count=1)
    text = None
    if any(end_to_end.is_of_experts(case) for case in cases):
        head["experts"] = {"commit": built.commit, "sources": sources_digest("end_to_end" + PART)}
    if not all(end_to_end.is_of_experts(case) for case in cases):
        text = tokens.prepare(cache, end_to_end.recipe())
        head["corpus"] = text.digest
    print(*(f"{key}: {value}" for key, value in head.items()), sep="\n")
    if not draft and (why := end_to_end.refusal(report.read(path), head, cases)):
        raise SystemExit(f"{path}: {why}; measure those again too, or take them out of the file")
    print(f"\n{end_to_end.HEADING}", flush=True)
    rows, until = [], progress.Progress(end=end)
    for row, line in end_to_end.rows(built, cases, until, text):
        print(line, flush=True)
        rows.append(row)
        if not draft:
            with progress.Claims(path.resolve()).alone():  # commands on other GPUs write there, too
                report.write(path, *end_to_end.merged(report.read(path), head, rows, cases))
            print(f"wrote {path}", flush=True)
    return status(rows, until.left, f"--case {' '.join(until.left)}")


def summary(rows: list) -> str:
    from harness import report

    timed = [row for row in rows if row.ok and row.variant == "auto" and row.speedup]
    text = f"{sum(not row.ok for row in rows)} wrong"
    if timed or not rows:
        text += (
            "; geometric means: "
            f"{report.geomean([row.fraction_of_floor for row in timed]):.1%} of the floor, "
            f"{report.geomean([row.speedup for row in timed]):.2f}x the baseline"
        )
    return "\n".join(filter(None, (text, report.goals_summary(rows))))


def measure_on_ranks(
    name: str, out: Path, *, draft: bool, device: str, end: float | None = None
) -> int:
    """Measure a file on the ranks of torchrun, until `end`; returns the exit status.

    "tensor_parallel" knows neither CPUs nor an end.
    """
    import torch
    from harness import built_package, report, tensor_parallel, transports
    from harness.optimizer_step import several_gpus, verdict

    with several_gpus.joined(device) as ranks:
        built, on_cpus = built_package.load(ROOT, device), device == "cpu"
        draft = draft or on_cpus
        check_clean(built, draft=draft)
        say = print if ranks.first else lambda *_, **__: None
        path = head = single = None
        if not on_cpus and ranks.first:
            gpu = torch.cuda.get_device_name(0)
            single = out / report.folder_name(gpu) / f"{name}.json"
            path = out / report.folder_name(gpu, ranks.count) / single.name
            head = header(built, entry_of(path), ranks.count)
            say(*(f"{key}: {value}" for key, value in head.items()), sep="\n")
        rows, left, steps = [], [], name == "optimizer_step"
        if name == "tensor_parallel":
            entry, found = tensor_parallel, tensor_parallel.rows_on_ranks(built, ranks)
        else:
            entry = several_gpus if steps else transports
            found = entry.rows(built, ranks, left, end)
        alone = verdict.of_one_gpu(single) if steps else None
        say(f"\n{entry.HEADING}")
        for row, line in found:
            say(line, flush=True)
            if steps:
                row = verdict.with_goals(row, ranks.count, alone, on_cpus=on_cpus)
            rows.append(row)
        said = verdict.lines(rows, left, ranks.count) if steps else [summary(rows)]
        say("", *said, sep="\n")
        if path is not None and rows and not draft:
            report.write(path, head | ({"missing": left} if left else {}), rows)
            say(f"wrote {path}")
    return int(any(not row.ok for row in rows)) or UNFINISHED * bool(left)


def asked_for(options: argparse.Namespace) -> dict[str, object]:
    """The layers that -m, -r and -T name, whichever of them is given; none: the whole list."""
    if options.models is None and options.ranks is None and options.seq_len is None:
        return {}
    from harness.experts.problems import MODELS

    return {
        "models": options.models or list(MODELS),
        "ranks": options.ranks or [16, 32, 64],
        "tokens": 2048 if options.seq_len is None else options.seq_len,
    }


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
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="under torchrun: cpu for a try"
    )
    parser.add_argument("-m", "--models", nargs="+", help="moe_lora: these models only")
    parser.add_argument("-r", "--ranks", nargs="+", type=int, help="moe_lora: 16 32 64")
    parser.add_argument("-T", "--seq-len", type=int, help="moe_lora: tokens, 2048")
    parser.add_argument("--case", nargs="+", help="end_to_end: which rows")
    parser.add_argument(
        "--cache", type=Path, default=CACHE, help="end_to_end: token ids and compiled models"
    )
    parser.add_argument(
        "--finish", type=Path, metavar="FOLDER", help="make a result of its partial file there"
    )
    parser.add_argument("--again", nargs="+", default=[], help="cases to measure once more")
    parser.add_argument(
        "--budget", type=float, metavar="SECONDS", help="begin no case after that; exit status 3"
    )
    options = parser.parse_args(arguments)
    end = None if options.budget is None else time.monotonic() + options.budget
    problem = asked_for(options)
    if (options.what == "end_to_end") != (options.case is not None):
        parser.error("end_to_end takes --case, and nothing else does")
    if problem and options.what != "moe_lora":
        parser.error(f"{options.what} takes no --models, --ranks or --seq-len; moe_lora does")
    if options.finish:
        return finish(options.what, options.finish)
    if options.what != "plots":
        draft = options.draft or bool(problem)
        ranks = int(os.environ.get("WORLD_SIZE", "1")) > 1
        tried = ranks and options.what in ON_RANKS and options.what != "tensor_parallel"
        if options.device == "cpu" and not tried:
            parser.error("--device cpu is for optimizer_step and communication under torchrun")
        if ranks:
            if options.what not in ON_RANKS:
                parser.error(f"{options.what} runs on one GPU; start it without torchrun")
            where = {"draft": draft, "device": options.device, "end": end}
            return measure_on_ranks(options.what, options.out, **where)
        if options.case:
            return measure_cases(options.case, options.out, options.cache, draft=draft, end=end)
        again = options.again
        return measure(options.what, options.out, draft=draft, end=end, again=again, **problem)
    if not options.check:
        plots.draw(ROOT)
        return 0
    findings = plots.findings(ROOT)
    print(*findings, sep="\n", file=sys.stderr)
    return min(len(findings), 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
