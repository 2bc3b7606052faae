"""Train a small byte-level transformer with torch.optim.AdamW and with MuonAdamW, and compare.

    python examples/train_demo.py                       # both runs, then a table and a plot
    python examples/train_demo.py --resume              # go on after an interruption
    python examples/train_demo.py --sweep --jobs 12     # the learning-rate sweep

The text is the source of Python's standard library, found on this machine; the optimizer is the
package in this checkout's build/ folder, loaded with `kernels.get_kernel` as any user loads it.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch
from demo import report
from demo.checkpoint import Checkpoints
from demo.command_line import INTERRUPTED, StopSignals, exit_status, positive_integer
from demo.config import ADAMW, MUON, OPTIMIZERS, PRESETS, DemoError, Preset, RunConfig
from demo.corpus import Corpus, read_corpus
from demo.device import device_name, has_bfloat16, prepare_device
from demo.package import Package, load_first
from demo.sweep import sweep, write
from demo.training import History, Trainer, train


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", choices=PRESETS, help="size (default: gpu on a CUDA device, else cpu)")
    add(
        "--device",
        help="cpu, cuda, cuda:1, ... (default: cuda where there is one and a variant for it)",
    )
    add("--steps", type=positive_integer, help="steps per run (default: the model's)")
    add("--seed", type=int, default=0, help="of the weights and the batches (default: 0)")
    swept = ", ".join(name for name, preset in PRESETS.items() if preset.swept)
    add(
        "--lr-adamw",
        type=learning_rate,
        help=f"peak learning rate of AdamW (default: the model's; the sweep's best for {swept})",
    )
    add("--lr-muon", type=learning_rate, help="peak learning rate of MuonAdamW (default: likewise)")
    add("--corpus", type=Path, metavar="DIR", help="train on the *.py files below DIR")
    add("--out-dir", type=Path, default=Path("demo_out"), help="results (default: demo_out)")
    add("--threads", type=positive_integer, help="CPU threads per run (default: torch's choice)")
    add("--resume", action="store_true", help="continue the interrupted run in --out-dir")
    add(
        "--checkpoint-every", type=positive_integer, default=50, metavar="STEPS", help="default: 50"
    )
    add("--sweep", action="store_true", help="try seven learning rates each, and more seeds")
    add("--seeds", type=positive_integer, default=3, help="of the sweep (default: 3)")
    add("--jobs", type=positive_integer, default=1, help="runs of the sweep at a time (default: 1)")
    options = parser.parse_args(arguments)
    if options.sweep and options.resume:
        parser.error("--sweep cannot be resumed")
    return options


def learning_rate(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not a positive learning rate")
    return value


def configure(
    options: argparse.Namespace, preset: Preset, device: torch.device
) -> dict[str, RunConfig]:
    """The two runs: equal but for the optimizer and its learning rate."""
    chosen = {ADAMW: options.lr_adamw, MUON: options.lr_muon}
    return {
        name: RunConfig(
            optimizer=name,
            lr=chosen[name] or preset.lr[name],
            model=preset.model,
            batch=preset.batch,
            steps=options.steps or preset.steps,
            eval_sequences=preset.eval_sequences,
            autocast=preset.autocast and has_bfloat16(device),
            seed=options.seed,
        )
        for name in OPTIMIZERS
    }


def run_demo(
    options: argparse.Namespace,
    preset: Preset,
    runs: dict[str, RunConfig],
    corpus: Corpus,
    device: torch.device,
    package: Package,
) -> int:
    """Train with both optimizers, write plot and table; returns the exit status."""
    folder = options.out_dir
    machine = report.machine(corpus, device, package)
    stores = {
        name: Checkpoints(
            folder=folder / "checkpoints" / name.lower(),
            every=options.checkpoint_every,
            identity={"run": asdict(run), **machine},
            package=package.module,
        )
        for name, run in runs.items()
    }
    if options.resume:
        check_resumable(stores, runs, folder)
    else:
        for store in stores.values():
            store.clear()
    histories: dict[str, History] = {}
    with StopSignals() as signals:
        for name, run in runs.items():
            trainer = Trainer(run, corpus, device, package)
            histories[name] = train(
                trainer,
                checkpoints=stores[name],
                resume=options.resume,
                interrupted=lambda: signals.received,
                progress=True,
            )
            if histories[name].step < run.steps:
                again = [sys.executable, *sys.argv, *["--resume"] * (not options.resume)]
                print(f"interrupted and saved; go on with\n  {shlex.join(again)}")
                return INTERRUPTED
    report.plot(folder / "loss.png", runs, histories)
    kernels = report.kernels_that_ran(package, trainer.optimizer)  # the last run is MuonAdamW's
    given = options.lr_adamw and options.lr_muon
    text = report.table(runs, histories, kernels, swept=bool(preset.swept or given))
    (folder / "table.md").write_text(text + "\n")
    content = {"machine": machine, "runs": {n: asdict(r) for n, r in runs.items()}}
    content["histories"] = {name: vars(history) for name, history in histories.items()}
    (folder / "results.json").write_text(json.dumps(content))
    print(f"\n{text}\n\n{folder}/ holds loss.png, table.md and results.json")
    return 0


def check_resumable(
    stores: dict[str, Checkpoints], runs: dict[str, RunConfig], folder: Path
) -> None:
    """Refuse to resume where there is nothing to go on with."""
    saved = {name: store.read_history() for name, store in stores.items()}
    if not any(saved.values()):
        raise DemoError(f"cannot resume: {folder} holds no checkpoint; run without --resume")
    if all(saved[name] and len(saved[name]["train"]) == runs[name].steps for name in runs):
        raise DemoError(
            f"cannot resume: {folder} holds two finished runs; repeat them without --resume"
        )


def instead_of(found: torch.device, device: torch.device) -> str:
    """Words for the first line where a GPU is left idle, else nothing."""
    if device == found:
        return ""
    return (
        f"; no {found.type} variant was built for {device_name(found)}, "
        f"`make build BACKEND={found.type}` builds it"
    )


def run(options: argparse.Namespace) -> int:
    """Prepare both runs and train; returns the exit status."""
    found = prepare_device(options.device, threads=options.threads)
    # without --device, whatever has been built for this machine will do
    package, device = load_first([found] if options.device else [found, torch.device("cpu")])
    preset = PRESETS[options.model or ("gpu" if device.type == "cuda" else "cpu")]
    limits = {"context": preset.model.context, "max_bytes": preset.max_bytes}
    corpus = read_corpus(options.corpus, **limits, device=device)
    runs = configure(options, preset, device)
    print(
        f"{package.repo_id} version {package.version}, {package.variant}, on "
        f"{device_name(device)}{instead_of(found, device)}\n"
        f"{sum(corpus.files)} files: {len(corpus.train):,} train and "
        f"{len(corpus.held_out):,} held-out bytes"
    )
    if not options.sweep:
        return run_demo(options, preset, runs, corpus, device, package)
    rows = sweep(
        runs,
        seeds=options.seeds,
        jobs=options.jobs,
        device=str(device),
        threads=options.threads or max(1, torch.get_num_threads() // options.jobs),
        text={"folder": options.corpus} | limits,
    )
    options.out_dir.mkdir(parents=True, exist_ok=True)
    machine = report.machine(corpus, device, package)
    print(write(options.out_dir / "sweep", rows, runs[ADAMW], machine))
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = parse(arguments)
    lost = "stopped, nothing was saved since the last checkpoint"
    return exit_status("train_demo", lambda: run(options), lost)


if __name__ == "__main__":
    sys.exit(main())
