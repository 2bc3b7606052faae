"""Turns two finished runs into a plot and a table."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.optim import Optimizer

from demo.config import ADAMW, MUON, OPTIMIZERS, RunConfig
from demo.corpus import Corpus
from demo.device import device_name
from demo.package import Package
from demo.training import History

COLOR = {ADAMW: "tab:orange", MUON: "tab:blue"}


def steps_to(held_out: Sequence[tuple[int, float]], target: float) -> int | None:
    """Steps done at the first evaluation at or below `target`, None if there is none."""
    return next((step for step, loss in held_out if loss <= target), None)


def smooth(losses: Sequence[float], *, span: int) -> list[float]:
    """Mean of each loss and the up to `span - 1` before it."""
    return [
        sum(losses[max(0, end - span) : end]) / min(span, end) for end in range(1, len(losses) + 1)
    ]


@contextmanager
def curves(path: Path, ylabel: str) -> Iterator[Any]:
    """Axes to draw on, which become an image."""
    import matplotlib

    matplotlib.use("Agg")  # a terminal has no display
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    yield axes
    axes.set_xlabel("step")
    axes.set_ylabel(ylabel)
    axes.legend()
    axes.grid(alpha=0.3)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def plot(path: Path, runs: dict[str, RunConfig], histories: dict[str, History]) -> None:
    """Draw held-out loss and smoothed train loss of both runs over the steps."""
    with curves(path, "loss, nats per byte (line: held out, pale: train)") as axes:
        for name, history in histories.items():
            steps, losses = zip(*history.held_out, strict=True)
            train = smooth(history.train, span=runs[name].eval_every)
            axes.plot(range(1, len(train) + 1), train, color=COLOR[name], alpha=0.35, linewidth=1)
            label = f"{name}, lr {runs[name].lr:g}: {losses[-1]:.3f}"
            axes.plot(steps, losses, color=COLOR[name], label=label)
        target = histories[ADAMW].held_out[-1][1]
        axes.axhline(target, color=COLOR[ADAMW], linestyle=":", linewidth=1)
        reached = steps_to(histories[MUON].held_out, target)
        if reached is not None:
            loss = dict(histories[MUON].held_out)[reached]
            share = reached / runs[ADAMW].steps
            label = f"AdamW's final loss after {reached} steps ({share:.0%})"
            axes.plot(reached, loss, "o", color=COLOR[MUON], label=label)
        losses = [loss for history in histories.values() for _, loss in history.held_out]
        best = min(filter(math.isfinite, losses), default=0.0)
        axes.set_ylim(best - 0.1, 2 * best + 0.1)  # the first steps fall through the top


def machine(corpus: Corpus, device: torch.device, package: Package) -> dict[str, Any]:
    """What the numbers depend on besides the options."""
    return {
        "device": device_name(device),
        "torch": torch.__version__,
        "package": package.describe(),
        "corpus": {
            "files": list(corpus.files),
            "train_bytes": len(corpus.train),
            "sha256": corpus.digest,
        },
    }


def table(
    runs: dict[str, RunConfig],
    histories: dict[str, History],
    kernels: dict[str, list[str]],
    *,
    swept: bool,
) -> str:
    """A Markdown table with one column per optimizer.

    Args:
        runs: Both runs.
        histories: What they recorded.
        kernels: As from `kernels_that_ran`.
        swept: Whether a sweep found the learning rates, or the user gave them; if not, a note says
            so.
    """
    target = histories[ADAMW].held_out[-1][1]
    total = runs[ADAMW].steps
    rows = [["", *OPTIMIZERS], ["peak learning rate"], ["held-out loss, nats per byte"]]
    rows += [["steps to AdamW's held-out loss"], ["seconds in training steps"], ["tokens/s"]]
    for name in OPTIMIZERS:
        run, history = runs[name], histories[name]
        reached = steps_to(history.held_out, target)
        cells = [
            f"{run.lr:g}",
            f"{history.held_out[-1][1]:.4f}",
            "not reached" if reached is None else f"{reached} ({reached / total:.0%})",
            f"{history.seconds:.1f}",
            f"{history.step * run.batch * run.model.context / history.seconds:,.0f}",
        ]
        for row, cell in zip(rows[1:], cells, strict=True):
            row.append(cell)
    ran = [f"- {name}: {line}" for name in OPTIMIZERS for line in kernels[name]]
    note = [] if swept else ["", "Note: rates not swept for this model; --sweep finds the best."]
    return "\n".join([markdown(rows), *note, "", "Kernels that ran:", *ran])


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Rows of cells as a Markdown table whose columns are also aligned as plain text."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in rows
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def kernels_that_ran(package: Package, optimizer: Optimizer) -> dict[str, list[str]]:
    """Which implementation made each optimizer's steps, in lines of text.

    `explain` decides as the step does, given the group's options and the dtype of its directions,
    which is that of the momentum, at least float32.

    Args:
        package: The loaded package.
        optimizer: Its MuonAdamW; all its Muon parameters are matrices and none is cut.
    """
    lines = [f"{package.repo_id} version {package.version}, {package.variant}"]
    for group in optimizer.param_groups:
        if group["kind"] != "muon":
            continue
        problems = Counter(
            (*param.shape, group["momentum_dtype"] or param.dtype, param.device)
            for param in group["params"]
        )
        for (rows, columns, dtype, device), count in problems.items():
            pick = package.module.explain(
                "orthogonalize",
                shape=(count, rows, columns),
                dtype=torch.promote_types(dtype, torch.float32),
                device=device,
                steps=group["ns_steps"],
                method=group["method"],
                iterate_dtype=group["dtype"],
            )
            sentences = pick.rstrip(".").split(". ")  # the pick, its reasons, what runs it
            method = sentences[0].split(": ")[-1]  # without the problem, which the line states
            matrices = "matrix" if count == 1 else "matrices"
            lines.append(f"{count} {matrices} of {rows} x {columns}: {method}; {sentences[-1]}")
    return {ADAMW: [f"torch {torch.__version__}, fused"], MUON: lines}
