"""The learning-rate sweep of the demo: many runs at a time on one device, and their table."""

from __future__ import annotations

import json
import math
import multiprocessing
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from demo.config import ADAMW, MUON, OPTIMIZERS, DemoError, RunConfig
from demo.corpus import Corpus, read_corpus
from demo.device import prepare_device
from demo.package import Package, load_package
from demo.report import markdown, steps_to
from demo.training import Trainer, train

EXTENSIONS = 6  # how often a grid may grow at its edge before the sweep gives up

Row = dict[str, Any]  # of one run: "optimizer", "lr", "seed", and "held_out", its losses

_worker: tuple[Corpus, Any, Package]


def _set_up(device: str, threads: int, text: dict[str, Any]) -> None:
    global _worker
    found = prepare_device(device, threads=threads)
    _worker = read_corpus(**text, device=found), found, load_package(found)


def _run(run: RunConfig) -> Row:
    losses = [loss for _, loss in train(Trainer(run, *_worker)).held_out]
    losses = [round(loss, 5) if math.isfinite(loss) else None for loss in losses]
    return {"optimizer": run.optimizer, "lr": run.lr, "seed": run.seed, "held_out": losses}


def _final(row: Row) -> float:
    """Held-out loss at the end; infinite if the run diverged."""
    return math.inf if row["held_out"][-1] is None else row["held_out"][-1]


def sweep(
    runs: dict[str, RunConfig], *, seeds: int, jobs: int, device: str, threads: int, text: Row
) -> list[Row]:
    """Train at seven rates about that of each run, and widen a grid until its best is inside.

    Args:
        runs: a run of each optimizer.
        seeds: runs per rate, with seeds 0, 1, ...
        jobs: runs at a time, each in a process with `threads` CPU threads, on one device.
        device: name of the device.
        threads: of each process.
        text: arguments of `read_corpus`.

    Raises:
        DemoError: a grid still ends at its best rate after `EXTENSIONS` extensions.
    """
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    rows: list[Row] = []
    wanted = {
        name: [float(f"{runs[name].lr * 2 ** (k / 2):.2g}") for k in range(-3, 4)]
        for name in reversed(OPTIMIZERS)  # slow ones first
    }
    pool = ProcessPoolExecutor(jobs, spawn, _set_up, (device, threads, text))
    try:
        for _ in range(EXTENSIONS + 1):
            started = [
                pool.submit(_run, replace(runs[name], lr=lr, seed=seed))
                for name, rates in wanted.items()
                for lr in rates
                for seed in range(seeds)
            ]
            for done in tqdm(as_completed(started), total=len(started), unit="run"):
                rows.append(done.result())
            wanted = {name: beyond_the_edge(mean_losses(rows, name)) for name in OPTIMIZERS}
            if not any(wanted.values()):
                return sorted(rows, key=lambda row: (row["optimizer"], row["lr"], row["seed"]))
            print(f"the best learning rate is at the edge, adding {wanted}")
    finally:
        pool.shutdown(cancel_futures=True)
    raise DemoError(
        f"no interior best learning rate after {EXTENSIONS} extensions, which end at {wanted}; "
        "start from other rates: --lr-adamw, --lr-muon"
    )


def mean_losses(rows: list[Row], optimizer: str) -> dict[float, float]:
    """Learning rate, ascending -> final held-out loss, mean over the seeds."""
    losses: dict[float, list[float]] = {}
    for row in rows:
        if row["optimizer"] == optimizer:
            losses.setdefault(row["lr"], []).append(_final(row))
    return {lr: sum(values) / len(values) for lr, values in sorted(losses.items())}


def beyond_the_edge(losses: dict[float, float]) -> list[float]:
    """The learning rates to add: none if the best one has a worse neighbour on either side."""
    rates = list(losses)
    best = min(rates, key=losses.get)
    below = [rates[0] ** 2 / rates[1]] if best == rates[0] else []  # the grid goes on evenly
    above = [rates[-1] ** 2 / rates[-2]] if best == rates[-1] else []
    return [float(f"{rate:.2g}") for rate in below + above]


def write(path: Path, rows: list[Row], run: RunConfig, machine: dict[str, Any]) -> str:
    """Write `path`.json, everything that was measured, and `path`.md; returns the latter's text."""
    best = {name: min(means := mean_losses(rows, name), key=means.get) for name in OPTIMIZERS}
    ends = [*range(run.eval_every, run.steps, run.eval_every), run.steps]
    at_best = {(r["optimizer"], r["seed"]): r for r in rows if r["lr"] == best[r["optimizer"]]}
    seeds = sorted({row["seed"] for row in rows})
    curves = [list(zip(ends, at_best[MUON, seed]["held_out"], strict=True)) for seed in seeds]
    reached = [
        steps_to([(n, loss) for n, loss in curve if loss is not None], _final(at_best[ADAMW, seed]))
        for seed, curve in zip(seeds, curves, strict=True)
    ]
    share = None if None in reached else sum(reached) / len(reached) / run.steps
    shared = {k: v for k, v in asdict(run).items() if k not in ("optimizer", "lr", "seed")}
    summary = {"best_lr": best, "steps": run.steps, "reached": reached, "share": share}
    head = machine | {"run": shared, "summary": summary, "evaluated_after_steps": ends}
    lines = "".join(f' "{key}": {json.dumps(value)},\n' for key, value in head.items())
    each = ",\n  ".join(json.dumps(row) for row in rows)  # one line per run
    path.with_name(path.name + ".json").write_text(f'{{\n{lines} "rows": [\n  {each}\n ]\n}}\n')
    text = _page(rows, run, machine, summary)
    path.with_name(path.name + ".md").write_text(text)
    return text


def _page(rows: list[Row], run: RunConfig, machine: dict[str, Any], summary: Row) -> str:
    """Where it ran, one table per optimizer, the outcome."""
    best, package = summary["best_lr"], machine["package"]
    lines = [
        "# Learning-rate sweep of the demo\n",
        f"{run.model.layers} layers, {run.model.channels} channels, context {run.model.context}, "
        f"batch {run.batch}, {run.steps} steps ({run.warmup} of warm-up, then cosine to 0), "
        f"weight decay {run.weight_decay:g}, gradient norm clipped at {run.clip:g}, "
        f"{'bfloat16 autocast' if run.autocast else 'float32'}. {machine['device']}, torch "
        f"{machine['torch']}, {package['variant']} version {package['version']}, commit "
        f"{package['commit'] or 'unknown'}{' with local changes' if package['dirty'] else ''}.\n",
        f"Held-out loss at the end, nats per byte; {len(summary['reached'])} seeds.",
    ]
    for name in OPTIMIZERS:
        table = [["lr", *(f"seed {seed}" for seed in range(len(summary["reached"]))), "mean", ""]]
        for lr, mean in mean_losses(rows, name).items():
            finals = [_final(r) for r in rows if (r["optimizer"], r["lr"]) == (name, lr)]
            cells = [f"{loss:.4f}" for loss in [*finals, mean]]
            table.append([f"{lr:g}", *cells, "best" if lr == best[name] else ""])
        lines.append(f"\n## {name}\n\n{markdown(table)}")
    reached = ", ".join("never" if steps is None else str(steps) for steps in summary["reached"])
    share = summary["share"]
    lines.append(
        f"\n## Outcome\n\nMuonAdamW at lr {best[MUON]:g} reaches the final held-out loss of AdamW "
        f"at lr {best[ADAMW]:g} after {reached} of {run.steps} steps (evaluated every "
        f"{run.eval_every} steps): {'not at every seed' if share is None else f'mean {share:.1%}'}."
        " Both best learning rates lie inside their grids.\n"
    )
    return "\n".join(lines)
