"""README's tables and the plot of `end_to_end.json`: losses over wall clock, steps of models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

COLORS = {"adamw": "#999999", "torch_muon": "#c77d2e", "muon": "#2a6f97", "muon_adamw": "#61305d"}
COLORS |= {"dion": "#4c9a6a", "nanochat": "#b0413e"}


def section(result: dict, path: Path) -> str:
    """The markdown of the file at `path`, relative to the root."""
    good = [row for row in result["rows"] if row["ok"]]
    tables = (_trainings, _models, _first_calls)
    parts = [text for text in (table(good) for table in tables) if text]
    name = path.as_posix()
    parts.append(
        f"{result['gpu']}, driver {result['driver']}, torch {result['torch']}, triton "
        f"{result['triton']}. Milliseconds are by the clock, host included. "
        f"All rows: [{name}]({name})."
    )
    if any("curve" in row for row in good):
        plot = path.with_suffix(".svg").as_posix()
        parts.append(f"![{path.parent.name}/{path.stem}]({plot})")
    return "\n\n".join(parts)


def _trainings(rows: list[dict]) -> str | None:
    rows = [row for row in rows if "curve" in row]
    if not rows:
        return None
    lines = [
        "| training from scratch | step, ms | host | of it the optimizer | times AdamW's step "
        "| k tokens/s | best rate | held-out loss |",
        "|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        losses = [seed["loss"] for seed in row["seeds"]]
        spread = f" ({min(losses):.3f} to {max(losses):.3f})" if len(losses) > 1 else ""
        edge = ", the last one tried" if row["lr_at_edge"] else ""
        lines.append(
            f"| `{row['case']}` | {row['wall_ms']:.3g} | {row['host_ms']:.3g} "
            f"| {row['optimizer_ms']:.3g} | {row['wall_ms'] / row['baseline_wall_ms']:.3f} "
            f"| {row['tokens_per_s'] / 1e3:.0f} | {row['lr']:.2g}{edge} "
            f"| {row['loss_mean']:.3f}{spread} |"
        )
    first = rows[0]
    text = (
        f"Held-out loss in nats per token after {first['steps']} steps, "
        f"{first['tokens'] / 1e6:.1f} million tokens, the mean over seeds, at the best of "
        f"{len(first['sweep'])} rates. AdamW's step was timed by turns with each optimizer's. "
        "`muon_adamw` has nanochat's groups, the others one rate for all parameters."
    )
    return "\n".join([*lines, "", text])


def _models(rows: list[dict]) -> str | None:
    rows = [row for row in rows if "tokens_per_s" in row and "curve" not in row]
    if not rows:
        return None
    lines = [
        "| model step | clock, ms | host | k tokens/s | baseline's clock | times faster |",
        "|---|--:|--:|--:|---|--:|",
        *(
            f"| `{row['case']}` | {row['wall_ms']:.3g} | {row['host_ms']:.3g} "
            f"| {row['tokens_per_s'] / 1e3:.1f} | {row['baseline']}, "
            f"{row['baseline_wall_ms']:.3g} ms{_compiled(row)} | {row['speedup']:.2f} |"
            for row in rows
        ),
    ]
    return "\n".join(lines)


def _compiled(row: dict) -> str:
    ms = row.get("baseline_compiled_wall_ms")
    return "" if ms is None else f" (compiled {ms:.3g} ms)"


def _first_calls(rows: list[dict]) -> str | None:
    rows = [row for row in rows if row.get("unit") == "s"]
    if not rows:
        return None
    lines = ["| first call of a layer | seconds | at most | a compiler |", "|---|--:|--:|---|"]
    for row in rows:
        needs = "needed" if row["compiler"] else "not needed"
        lines.append(f"| `{row['case']}` | {row['value']:.2g} | {row['target']:.2g} | {needs} |")
    return "\n".join(lines)


def curves(plt: Any, result: dict, title: str) -> Any:
    """A figure: loss over seconds of training, a line for each optimizer at its best rate."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for row in result["rows"]:
        if not row["ok"] or "curve" not in row:
            continue
        name = row["case"].split("/")[1]
        seconds, losses = zip(*row["curve"], strict=True)
        label = f"{name}, lr {row['lr']:.2g}"
        axes.plot(seconds, losses, color=COLORS[name], linewidth=1.2, label=label)
        held_out = [(s, loss) for _, s, loss in row["held_out"]]
        axes.plot(*zip(*held_out, strict=True), "o", color=COLORS[name], markersize=4)
    if axes.lines:
        axes.legend(fontsize=8)
        axes.set_ylim(top=6)
    axes.set_xlabel("seconds of training steps")
    axes.set_ylabel("loss, nats per token (dots: held out)")
    axes.set_title(title, fontsize=10)
    return figure
