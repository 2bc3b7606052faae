"""The table a sweep leaves, as JSON and as Markdown."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from demo.config import ADAMW, MUON, OPTIMIZERS
from demo.corpus import Corpus
from demo.device import device_name
from demo.package import Package
from demo.report import markdown, steps_to
from demo.sweep import Result, mean_losses


@dataclass(frozen=True)
class Summary:
    """What a sweep found.

    Args:
        best_lr: Learning rate of each optimizer with the lowest mean held-out loss.
        steps: Steps of every run.
        reached: Per seed, the steps MuonAdamW takes to the final held-out loss of AdamW with the
            same seed, each at its best learning rate; None if it does not get there.
    """

    best_lr: dict[str, float]
    steps: int
    reached: list[int | None]

    @property
    def share(self) -> float | None:
        """Mean of `reached` over the seeds as a share of AdamW's steps, None if one is None."""
        if None in self.reached:
            return None
        return sum(self.reached) / len(self.reached) / self.steps


def summarize(results: Sequence[Result]) -> Summary:
    """Find the best learning rates and compare the optimizers there, seed by seed."""
    best = {}
    for name in OPTIMIZERS:
        losses = mean_losses(results, name)
        best[name] = min(losses, key=losses.get)
    at_best = {
        (result.run.optimizer, result.run.seed): result
        for result in results
        if result.run.lr == best[result.run.optimizer]
    }
    seeds = sorted({result.run.seed for result in results})
    return Summary(
        best_lr=best,
        steps=results[0].run.steps,
        reached=[steps_to(at_best[MUON, s].held_out, at_best[ADAMW, s].final) for s in seeds],
    )


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


def to_json(results: Sequence[Result], where: dict[str, Any]) -> dict[str, Any]:
    """Everything a sweep measured, with one row per run."""
    summary = summarize(results)
    shared = asdict(results[0].run)
    rows = [
        {
            "optimizer": result.run.optimizer,
            "lr": result.run.lr,
            "seed": result.run.seed,
            "held_out": [
                round(loss, 5) if math.isfinite(loss) else None for _, loss in result.held_out
            ],
        }
        for result in sorted(results, key=lambda r: (r.run.optimizer, r.run.lr, r.run.seed))
    ]
    return {
        **where,
        "run": {key: shared[key] for key in shared if key not in ("optimizer", "lr", "seed")},
        "summary": asdict(summary) | {"share": summary.share},
        "evaluated_after_steps": [step for step, _ in results[0].held_out],
        "rows": rows,
    }


def to_markdown(results: Sequence[Result], where: dict[str, Any]) -> str:
    """The sweep as a page: where it ran, one table per optimizer, the outcome."""
    summary = summarize(results)
    run = results[0].run
    seeds = len(summary.reached)
    package = where["package"]
    lines = [
        "# Learning-rate sweep of the demo",
        "",
        f"{run.model.layers} layers, {run.model.channels} channels, context {run.model.context}, "
        f"batch {run.batch}, {run.steps} steps ({run.warmup} of warm-up, then cosine to 0), "
        f"weight decay {run.weight_decay:g}, gradient norm clipped at {run.clip:g}, "
        f"{'bfloat16 autocast' if run.autocast else 'float32'}. "
        f"{where['device']}, torch {where['torch']}, {package['variant']} version "
        f"{package['version']}, commit {package['commit'] or 'unknown'}"
        f"{' with local changes' if package['dirty'] else ''}.",
        "",
        f"Held-out loss at the end, nats per byte; {seeds} seeds.",
    ]
    for name in OPTIMIZERS:
        rows = [["lr", *(f"seed {seed}" for seed in range(seeds)), "mean", ""]]
        for lr, mean in mean_losses(results, name).items():
            finals = {
                r.run.seed: r.final for r in results if (r.run.optimizer, r.run.lr) == (name, lr)
            }
            mark = "best" if lr == summary.best_lr[name] else ""
            losses = [f"{finals[seed]:.4f}" for seed in sorted(finals)]
            rows.append([f"{lr:g}", *losses, f"{mean:.4f}", mark])
        lines += ["", f"## {name}", "", markdown(rows)]
    reached = ", ".join("never" if steps is None else str(steps) for steps in summary.reached)
    outcome = "not at every seed" if summary.share is None else f"mean {summary.share:.1%}"
    lines += [
        "",
        "## Outcome",
        "",
        f"MuonAdamW at lr {summary.best_lr[MUON]:g} reaches the final held-out loss of AdamW at lr "
        f"{summary.best_lr[ADAMW]:g} after {reached} of {run.steps} steps (seeds 0 to {seeds - 1}; "
        f"evaluated every {run.eval_every} steps): {outcome}. "
        "Both best learning rates lie inside their grids.",
    ]
    return "\n".join(lines) + "\n"


def write(path: Path, results: Sequence[Result], where: dict[str, Any]) -> None:
    """Write `path`.json and `path`.md."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = to_json(results, where)
    rows = ",\n  ".join(json.dumps(row) for row in content.pop("rows"))  # one line per run
    head = "".join(f' "{key}": {json.dumps(value)},\n' for key, value in content.items())
    path.with_name(path.name + ".json").write_text(f'{{\n{head} "rows": [\n  {rows}\n ]\n}}\n')
    path.with_name(path.name + ".md").write_text(to_markdown(results, where))
