"""What pages quote of the committed result files, and nothing else.

README has a plot and a short table, docs/support.md what other GPUs' paths take, docs/benchmarks/ a
page with every table of each file and one with every opponent, and each file has a plot beside it.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import comparison, elementwise, orthogonalize
from .experts import moe_lora, quant
from .optimizer_step.several_gpus import LINK_TBPS
from .other_projects import CHECKOUTS, title
from .progress import is_partial
from .report import FLOOR_TBPS, FLOOR_TFLOPS
from .sources import RESULTS, SOURCES, entry_of, recorded, sources_digest

BEGIN, END = "<!-- results:begin -->", "<!-- results:end -->"
EMPTY = "No measurement has been committed yet."
FIGURES = ("communication", "tensor_parallel")  # result files whose rows are one figure each
PAGES = Path("docs/benchmarks")  # below the root: docs/benchmarks/<gpu>-<name>.md
# Optimizer of a training -> its line.
COLORS = {"adamw": "#999999", "torch_muon": "#c77d2e", "muon": "#2a6f97", "muon_adamw": "#61305d"}
COLORS |= {"dion": "#4c9a6a", "nanochat": "#b0413e"}

TITLES = {"end_to_end": "training of a GPT with 124M parameters"}  # of plots; others by file

# Result file -> names of the rows that were drawn at random: summed up, not listed.
DRAWN = {
    "elementwise": elementwise.random_cases,
    "moe_lora": moe_lora.random_cases,
    "orthogonalize": orthogonalize.random_cases,
    "quant": quant.random_cases,
}


def result_files(root: Path) -> list[Path]:
    """Every committed result file, sorted; a partial one is none."""
    found = (root / RESULTS).glob("*/*.json")
    return sorted(path for path in found if not is_partial(path))


@dataclass(frozen=True)
class Headline:
    """A row of README's table."""

    file: str  # name of the result file
    case: str | None  # of its row; None: the row that gains least, or loses most
    text: str  # what was timed
    # case -> name of the peers, where these are rows of their own.
    against: dict[str, str] | None = None


# Where README's rows are measured, how many there are, and which come first.
HEADLINE_GPU = "h200"
HEADLINE_ROWS = 8
_MUONS = {
    "gpt-124M/torch_muon": "torch.optim.Muon",
    "gpt-124M/dion": "dion",
    "gpt-124M/nanochat": "nanochat",
}
_LAYER = "an MoE layer of Qwen3-30B-A3B, 2,048 tokens, forward and backward"
HEADLINES = (
    Headline("end_to_end", "gpt-124M/muon", "training step of a 124M GPT with `Muon`", _MUONS),
    Headline("end_to_end", "gpt-124M/muon", "the same step beside AdamW's"),
    Headline("optimizer_step", "llama-1B/bfloat16/1gpu/heavy", "`Muon.step()` alone, 1B, bfloat16"),
    Headline("moe_lora", "Qwen3-30B-A3B/T2048/r16/fwd+bwd", f"LoRA on {_LAYER}, bfloat16"),
    Headline("quant", "Qwen3-30B-A3B/T2048/r16/fwd+bwd", f"LoRA on {_LAYER}, NF4"),
    Headline("orthogonalize", "real/8x2048x2048", "`orthogonalize`, momenta of 8 x 2048 x 2048"),
    Headline("elementwise", None, "the least favourable elementwise op"),
    Headline("elementwise", "nf4_dequant/128x1536x2048", "`nf4_dequant`, 128 experts"),
    Headline("orthogonalize", "real/12x3072x768", "`orthogonalize`, momenta of 12 x 3072 x 768"),
    Headline("optimizer_step", "gpt2-124M/1gpu/heavy", "`Muon.step()` alone, 124M"),
)


def headline_results(root: Path) -> dict[str, dict]:
    """The result files of the GPU that pages quote, by name."""
    return {
        path.stem: json.loads(path.read_text())
        for path in result_files(root)
        if path.parent.name == HEADLINE_GPU
    }


def _table(results: dict[str, dict]) -> tuple[list[str], str]:
    """The lines of README's table, at most HEADLINE_ROWS, and the machines it was measured on."""
    lines, machines = [], []
    for headline in HEADLINES:
        line = _headline(headline, results.get(headline.file))
        if line and len(lines) < HEADLINE_ROWS:
            lines.append(line)
            machine = "{gpu}, driver {driver}, torch {torch}".format(**results[headline.file])
            machines += [machine] * (machine not in machines)
    head = ["| wall-clock time of | ours, ms | beside, ms | times faster |", "|---|--:|---|--:|"]
    said = f"{'; '.join(machines)}. Below 1 the peer is faster."
    return [*head, *lines] if lines else [], said


def headlines(results: dict[str, dict]) -> str:
    """The markdown between README's markers: the plot of the trainings and one table."""
    lines, said = _table(results)
    if not lines:
        return EMPTY
    pages = ", ".join(
        f"[{name}]({page_of(RESULTS / HEADLINE_GPU / name).as_posix()})" for name in results
    )
    parts = ["\n".join(lines), f"{said} Every row: {pages}."]
    if _has_our_training(results):
        plot = (RESULTS / HEADLINE_GPU / "end_to_end.svg").as_posix()
        parts.insert(
            0, f"![held-out loss over seconds of training, a line for each optimizer]({plot})"
        )
    return "\n\n".join(parts)


def card(results: dict[str, dict]) -> str:
    """The table for the Hub's page, which has none of README's files; the plot lies in `source`."""
    lines, said = _table(results)
    parts = ["\n".join([*lines, "", said]) if lines else EMPTY]
    if _has_our_training(results):
        plot = f"raw/main/{(RESULTS / HEADLINE_GPU / 'end_to_end.svg').as_posix()}"
        shown = f"![held-out loss over seconds of training]({{{{ source }}}}/{plot})"
        parts.append(f"{{% if source %}}\n{shown}\n{{% endif %}}")
    return "\n\n".join(parts)


def _has_our_training(results: dict[str, dict]) -> bool:
    """Whether the plot of trainings has a line of ours: others' alone would say nothing."""
    rows = results.get("end_to_end", {"rows": ()})["rows"]
    return any(row["case"] == comparison.OURS and "curve" in row for row in rows)


def _headline(headline: Headline, result: dict | None) -> str | None:
    """The line of a headline; None where its rows were not measured."""
    rows = [row for row in result["rows"] if row["ok"]] if result else []
    ours = [row for row in rows if row["variant"] == "auto" and "speedup" in row]
    if headline.case is None:
        ours.sort(key=lambda row: row["speedup"])
    else:
        ours = [row for row in ours if row["case"] == headline.case]
    if not ours:
        return None
    row = ours[0]
    if headline.against:
        peers = [
            (peer["wall_ms"], headline.against[peer["case"]])
            for peer in rows
            if peer["case"] in headline.against
        ]
    else:
        peers = [(row["baseline_wall_ms"], comparison.opponent(row["baseline"]))] + [
            (peer["wall_ms"], title(peer["variant"]))
            for peer in rows
            if peer["case"] == row["case"] and peer["variant"] in CHECKOUTS
        ]
    if not peers:
        return None
    ms, name = min(peers)
    text = headline.text if headline.case else f"{headline.text}, `{row['case']}`"
    faster = ms / row["wall_ms"]
    return f"| {text} | {row['wall_ms']:.3g} | {name}: {ms:.3g} | {faster:.2f} |"


def page_of(path: Path) -> Path:
    """The page of a result file, relative to the root."""
    return PAGES / f"{path.parent.name}-{path.stem}.md"


def page(path: Path, root: Path) -> str:
    """The page of a result file: every table that is drawn from it."""
    result = json.loads(path.read_text())
    sections = {"end_to_end": _end_to_end_section} | dict.fromkeys(FIGURES, _figures_section)
    section = sections.get(path.stem, _section)(result, path, root)
    return (
        f"# {path.stem} on {result['gpu']}\n\n"
        "`make plots` draws this page from the result file. How these rows are measured, and what "
        f"their columns mean: [measuring.md](../dev/measuring.md).\n\n{section}\n"
    )


def _section(result: dict, path: Path, root: Path) -> str:
    """The table of a result file of single calls."""
    drawn = DRAWN[path.stem](result["commit"]) if path.stem in DRAWN else ()
    rows = [row for row in result["rows"] if row["ok"] and row["variant"] == "auto"]
    # Known spectra are there for their distances, not for their times.
    listed = [r for r in rows if r["case"] not in drawn and not r["case"].startswith("zoo/")]
    others = [row for row in rows if row["case"] in drawn]
    ceilings = result["ceilings"]
    lines = [
        "| case | wall clock, ms | host | device | of the floor | baseline's wall clock "
        "| times faster |",
        "|---|--:|--:|--:|--:|---|--:|",
        *(
            f"| `{row['case']}` | {row['wall_ms']:.3g} | {row['host_ms']:.3g} | {row['ms']:.3g} "
            f"| {row['fraction_of_floor']:.0%} | {row['baseline']}, "
            f"{row['baseline_wall_ms']:.3g} ms | {row['speedup']:.2f} |"
            for row in listed
        ),
    ]
    text = (
        f"{result['gpu']}, driver {result['driver']}, torch {result['torch']}, triton "
        f"{result['triton']}; a copy reaches {ceilings['copy_tbps']:.2f} TB/s there, an 8192³ "
        f"product {ceilings['bf16_tflops']:.0f} TFLOP/s. The floor counts each byte once at "
        f"{FLOOR_TBPS} TB/s and each operation once at {FLOOR_TFLOPS:.0f} TFLOP/s; its share is of "
        "the device's time. Times faster is of wall-clock time: eager calls, host included. "
        f"All rows: {_link(path, root)}."
    )
    if missing := result.get("missing"):
        text += f" Not measured: {', '.join(f'`{case}`' for case in missing)}."
    if entry_of(path) != path.stem:
        text += f" What a GPU sends counts at {LINK_TBPS} TB/s, beside the rest."
    if others:
        shares = statistics.median(row["fraction_of_floor"] for row in others)
        least = min(row["speedup"] for row in others)
        text += (
            f" On {len(others)} random shapes the median is {shares:.0%} of the floor, and the "
            f"least favourable one {least:.2f} times the baseline."
        )
    return "\n".join([*lines, "", text, "", _plot_link(path, root)])


def _link(path: Path, root: Path) -> str:
    """From a page to a result file."""
    name = path.relative_to(root).as_posix()
    return f"[{name}](../../{name})"


def _plot_link(path: Path, root: Path) -> str:
    plot = path.with_suffix(".svg").relative_to(root).as_posix()
    return f"![{path.parent.name}/{path.stem}](../../{plot})"


def _end_to_end_section(result: dict, path: Path, root: Path) -> str:
    """The tables of trainings, models and first calls."""
    good = [row for row in result["rows"] if row["ok"]]
    tables = (_training_table, _model_table, _first_call_table)
    parts = [text for text in (table(good) for table in tables) if text]
    parts.append(
        f"{result['gpu']}, driver {result['driver']}, torch {result['torch']}, triton "
        f"{result['triton']}. Milliseconds are wall-clock time, host included. "
        f"All rows: {_link(path, root)}."
    )
    if any("curve" in row for row in good):
        parts.append(_plot_link(path, root))
    return "\n\n".join(parts)


def _figures_section(result: dict, path: Path, root: Path) -> str:
    """The table of a result file whose rows are one figure each."""
    lines = ["| case | value | unit | target | beside | transport |", "|---|--:|---|--:|---|---|"]
    for row in result["rows"]:
        if not row["ok"]:
            continue
        goal = row["goals"]["value"]
        target = f"{row['target']:g}{'' if goal['met'] else ', missed'}"
        lines.append(
            f"| `{row['case']}` | {row['value']:.3g} | {row['unit']} | {target} "
            f"| {row['baseline']} | {row['transport']} |"
        )
    text = (
        f"{result['gpu']}, driver {result['driver']}, torch {result['torch']}. Times are the "
        f"device's, medians by turns. All rows: {_link(path, root)}."
    )
    return "\n".join([*lines, "", text, "", _plot_link(path, root)])


def _training_table(rows: list[dict]) -> str | None:
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


def _model_table(rows: list[dict]) -> str | None:
    rows = [row for row in rows if "tokens_per_s" in row and "curve" not in row]
    if not rows:
        return None
    lines = [
        "| model step | wall clock, ms | host | k tokens/s | baseline's wall clock "
        "| times faster |",
        "|---|--:|--:|--:|---|--:|",
        *(
            f"| `{row['case']}` | {row['wall_ms']:.3g} | {row['host_ms']:.3g} "
            f"| {row['tokens_per_s'] / 1e3:.1f} | {row['baseline']}, "
            f"{row['baseline_wall_ms']:.3g} ms{_compiled_baseline(row)} | {row['speedup']:.2f} |"
            for row in rows
        ),
    ]
    return "\n".join(lines)


def _compiled_baseline(row: dict) -> str:
    ms = row.get("baseline_compiled_wall_ms")
    return "" if ms is None else f" (compiled {ms:.3g} ms)"


def _first_call_table(rows: list[dict]) -> str | None:
    rows = [row for row in rows if row.get("unit") == "s"]
    if not rows:
        return None
    lines = ["| first call of a layer | seconds | at most | a compiler |", "|---|--:|--:|---|"]
    for row in rows:
        needs = "needed" if row["compiler"] else "not needed"
        lines.append(f"| `{row['case']}` | {row['value']:.2g} | {row['target']:.2g} | {needs} |")
    return "\n".join(lines)


# Page with markers -> what stands between them.
BETWEEN = {
    Path("README.md"): headlines,
    Path("CARD.md"): card,
    Path("docs/support.md"): comparison.forced,
}


def with_table(text: str, content: str, name: str) -> str:
    """The text of page `name` with `content` between its markers.

    Raises:
        ValueError: the markers are missing or repeated.
    """
    if text.count(BEGIN) != 1 or text.count(END) != 1 or text.index(BEGIN) > text.index(END):
        raise ValueError(f"{name} must hold {BEGIN} and, behind it, {END}, each once")
    before, rest = text.split(BEGIN)
    return f"{before}{BEGIN}\n{content}\n{END}{rest.split(END)[1]}"


def drawn_pages(root: Path) -> dict[Path, str]:
    """Path below the root -> text, of every page that holds nothing but results."""
    pages = {page_of(path): page(path, root) for path in result_files(root)}
    results = headline_results(root)
    pages[PAGES / f"{HEADLINE_GPU}-comparison.md"] = (
        f"# Beside other implementations, on {HEADLINE_GPU.upper()}\n\n"
        "`make plots` draws this page from the result files: all cases that were measured, wins "
        "and losses, in milliseconds of wall-clock time, host included. Above 1 ours is faster.\n\n"
        f"{comparison.comparison(results)}\n"
    )
    return pages


def draw(root: Path) -> None:
    """Rewrite the tables of pages, every page of results and every plot."""
    for name, content in BETWEEN.items():
        path = root / name
        path.write_text(with_table(path.read_text(), content(headline_results(root)), name.name))
    (root / PAGES).mkdir(parents=True, exist_ok=True)
    for name, text in drawn_pages(root).items():
        (root / name).write_text(text)
    for path in result_files(root):
        _plot(path)


def findings(root: Path) -> list[str]:
    """What `draw` would change, and results whose sources have changed since."""
    found = []
    for name, content in BETWEEN.items():
        text = (root / name).read_text()
        try:
            if with_table(text, content(headline_results(root)), name.name) != text:
                found.append(f"{name}: the results table is stale; run `make plots`")
        except ValueError as error:
            found.append(str(error))
    for name, text in drawn_pages(root).items():
        if not (root / name).is_file() or (root / name).read_text() != text:
            found.append(f"{name}: is stale; run `make plots`")
    for path in result_files(root):
        name = path.relative_to(root).as_posix()
        for entry, digest in recorded(path, json.loads(path.read_text())).items():
            if entry not in SOURCES:
                found.append(f"{name}: {entry} is not one of {', '.join(SOURCES)}")
            elif digest != sources_digest(entry, root):
                found.append(f"{name}: its sources have changed since; measure again")
        plot = path.with_suffix(".svg")
        if not plot.is_file() or _mark(path) not in plot.read_text():
            found.append(f"{name}: its plot is stale; run `make plots`")
    return found


def _mark(path: Path) -> str:
    """Names the content a plot was drawn from, inside the plot."""
    return "drawn from sha256 " + hashlib.sha256(path.read_bytes()).hexdigest()


def _plot(path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = path.stem  # the same file for the same content
    import matplotlib.pyplot as plt

    result = json.loads(path.read_text())
    drawings = {"end_to_end": _curves} | dict.fromkeys(FIGURES, _figures)
    draw_on = drawings.get(path.stem, _bars)
    what = TITLES.get(path.stem, path.stem)
    figure = draw_on(plt, result, f"{what} on {result['gpu']}")
    figure.savefig(path.with_suffix(".svg"), metadata={"Date": None, "Description": _mark(path)})
    plt.close(figure)


def _bars(plt, result: dict, title: str):
    """A figure with the share of the floor of every row."""
    rows = [row for row in result["rows"] if row["ok"]]
    labels = [
        row["case"] if row["variant"] == "auto" else f"{row['case']} [{row['variant']}]"
        for row in rows
    ]
    figure, axes = plt.subplots(figsize=(9, 0.32 * len(rows) + 1.4), layout="constrained")
    height = 0.4
    ours = [row["fraction_of_floor"] for row in rows]
    theirs = [row["floor_ms"] / row["baseline_ms"] for row in rows]
    positions = range(len(rows))
    axes.barh([p - height / 2 for p in positions], ours, height, label="optimizer", color="#2a6f97")
    axes.barh(
        [p + height / 2 for p in positions], theirs, height, label="baseline", color="#bbbbbb"
    )
    axes.set_yticks(list(positions), labels, fontsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("share of the floor (1 = no version can be faster)")
    axes.set_title(title, fontsize=10)
    axes.legend(loc="lower right", fontsize=8)
    return figure


def _figures(plt: Any, result: dict, title: str) -> Any:
    """A figure: every value as a share of its target."""
    rows = [row for row in result["rows"] if row["ok"]]
    figure, axes = plt.subplots(figsize=(9, 0.32 * len(rows) + 1.4), layout="constrained")
    shares = [row["value"] / row["target"] for row in rows]
    axes.barh([row["case"] for row in rows], shares, 0.6, color="#2a6f97")
    axes.tick_params(axis="y", labelsize=7)
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("value / target (for push at least 1, else at most 1)")
    axes.set_title(title, fontsize=10)
    return figure


def _curves(plt: Any, result: dict, title: str) -> Any:
    """A figure: held-out loss over seconds of training, a line for each optimizer at its best rate.

    Every step counts as the median one, so that what an optimizer compiles in its first steps does
    not move its line. The loss of the text that is trained on is drawn thin.
    """
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    for row in result["rows"]:
        if not row["ok"] or "curve" not in row:
            continue
        color = COLORS[row["case"].split("/")[1]]
        step = row["tokens"] / row["steps"] / row["tokens_per_s"]
        each = row["steps"] / len(row["curve"]) * step
        trained = [((i + 1) * each, loss) for i, (_, loss) in enumerate(row["curve"])]
        held_out = [(steps * step, loss) for steps, _, loss in row["held_out"]]
        label = f"{comparison.training_name(row['case'])}, lr {row['lr']:.2g}"
        axes.plot(*zip(*trained, strict=True), color=color, linewidth=0.8, alpha=0.4)
        axes.plot(*zip(*held_out, strict=True), "o-", color=color, markersize=4, label=label)
    if axes.lines:
        axes.legend(fontsize=8)
        axes.set_ylim(top=6)
    axes.set_xlabel("seconds of training steps")
    axes.set_ylabel("held-out loss, nats per token (thin: train loss)")
    axes.set_title(title, fontsize=10)
    return figure
