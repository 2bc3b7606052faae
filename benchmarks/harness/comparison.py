"""What pages say of others' rows and of other GPUs' paths: text drawn from the result files."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from .other_projects import CHECKOUTS, title
from .paths import MMA_SYNC, TORCH
from .report import geomean

Results = Mapping[str, Mapping[str, Any]]  # name of a result file -> its content

# Name of a result file -> what its rows time.
TIMED = {
    "end_to_end": "training and fine-tuning steps",
    "optimizer_step": "the optimizer's step alone",
    "moe_lora": "MoE layers with LoRA",
    "quant": "MoE layers with quantized experts",
    "orthogonalize": "orthogonalization",
    "elementwise": "elementwise ops and dequantization",
}
# Trainings in end_to_end: ours, the baseline of every row, and those of others -> their optimizer.
OURS, ADAMW = "gpt-124M/muon", "gpt-124M/adamw"
TRAININGS = {
    ADAMW: "torch.optim.AdamW(fused=True)",
    "gpt-124M/torch_muon": "torch.optim.Muon",
    "gpt-124M/dion": "dion",
    "gpt-124M/nanochat": "nanochat",
}
OURSELVES = "the same "  # begins the name of a baseline that is this package's, too
# Variant of a row -> the GPUs that take the path, beside the row's own.
FORCED = {
    TORCH: "8.0 and newer except 9.0",
    MMA_SYNC: "8.0 and newer except 9.0, sides of 4096 and more",
    "triton": "8.0 and newer except 9.0",
}


@dataclass(frozen=True)
class Pair:
    """A case of ours beside one opponent, in milliseconds by the clock."""

    file: str
    case: str
    opponent: str
    ours: float
    theirs: float

    @property
    def times(self) -> float:
        """How many times faster ours is."""
        return self.theirs / self.ours


def _rows(results: Results, name: str) -> list[Mapping[str, Any]]:
    """Those of a file that passed their gate; none where the file is missing."""
    return [row for row in results.get(name, {"rows": ()})["rows"] if row["ok"]]


def opponent(baseline: str) -> str:
    """A baseline without torch's release, which stands beside the machine."""
    rest = re.sub(r"^torch \d[^ ,]*,? ", "", baseline)
    return rest if rest == baseline or rest.startswith("torch") else f"torch {rest}"


def pairs(results: Results) -> Iterator[Pair]:
    """Every case of ours on the path that a user gets, beside each opponent measured for it."""
    for name in TIMED:
        rows = _rows(results, name)
        ours = {
            row["case"]: row
            for row in rows
            if row["variant"] == "auto" and "speedup" in row and row["case"] not in TRAININGS
        }
        for case, row in ours.items():
            if not row["baseline"].startswith(OURSELVES):
                theirs = row["baseline_wall_ms"]
                yield Pair(name, case, opponent(row["baseline"]), row["wall_ms"], theirs)
            yield from (
                Pair(name, case, title(peer["variant"]), row["wall_ms"], peer["wall_ms"])
                for peer in rows
                if peer["case"] == case and peer["variant"] in CHECKOUTS
            )
            if case == OURS:
                yield from (
                    Pair(name, case, TRAININGS[peer["case"]], row["wall_ms"], peer["wall_ms"])
                    for peer in rows
                    if peer["case"] in TRAININGS and peer["case"] != ADAMW
                )


def comparison(results: Results) -> str:
    """The page beside all others: trainings, each opponent, and where the opponent is faster."""
    found = list(pairs(results))
    if not found:
        return "No measurement has been committed yet."
    parts = [_trainings(results), _opponents(found), _losses(found)]
    machines = dict.fromkeys(
        "{gpu}, driver {driver}, torch {torch}".format(**result) for result in results.values()
    )
    said = f"{'; '.join(machines)}."
    if commits := _commits(results):
        said += f" Others' code: {', '.join(commits)}."
    return "\n\n".join([*filter(None, parts), said])


def _commits(results: Results) -> list[str]:
    """ "<checkout> <seven digits>" of all that peers' rows measured, sorted."""
    rows = (row for name in results for row in _rows(results, name) if "peer_commit" in row)
    commits = {commit for row in rows for commit in row["peer_commit"].split(", ")}
    return sorted(commit[: commit.index(" ") + 8] for commit in commits)


def training_name(case: str) -> str:
    """The optimizer of a training."""
    return TRAININGS.get(case) or {OURS: "Muon", "gpt-124M/muon_adamw": "MuonAdamW"}[case]


def _trainings(results: Results) -> str | None:
    rows = [row for row in _rows(results, "end_to_end") if "curve" in row]
    if not rows:
        return None
    lines = [
        "## Training a GPT of 124M parameters",
        "",
        "| optimizer | step, ms | of it the optimizer | held-out loss |",
        "|---|--:|--:|--:|",
    ]
    for row in rows:
        name = training_name(row["case"])
        name = name if row["case"] in TRAININGS else f"**`{name}`**"
        times = f"{row['wall_ms']:.3g} | {row['optimizer_ms']:.3g}"
        lines.append(f"| {name} | {times} | {row['loss_mean']:.3f} |")
    first = rows[0]
    nanochat = any(row["case"].endswith("/nanochat") for row in rows)
    whose = "nanochat's and `MuonAdamW` have" if nanochat else "`MuonAdamW` has"
    text = (
        f"After {first['steps']} steps, each optimizer at the best of {len(first['sweep'])} rates. "
        f"{whose} nanochat's groups and rates, the others one rate for all parameters."
    )
    return "\n".join([*lines, "", text])


def _opponents(found: list[Pair]) -> str:
    lines = [
        "## Every case, by opponent",
        "",
        "Times faster than the opponent: the geometric mean over all cases, the least favourable "
        "case and the most favourable one.",
        "",
        "| timed | opponent | cases | mean | least | most | slower in |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for key in dict.fromkeys((pair.file, pair.opponent) for pair in found):
        times = sorted(pair.times for pair in found if (pair.file, pair.opponent) == key)
        page = f"[{TIMED[key[0]]}](h200-{key[0]}.md)"
        lines.append(
            f"| {page} | {key[1]} | {len(times)} | {geomean(times):.2f} | {times[0]:.2f} "
            f"| {times[-1]:.2f} | {sum(one < 1 for one in times)} |"
        )
    return "\n".join(lines)


def _losses(found: list[Pair]) -> str:
    lost = sorted((pair for pair in found if pair.times < 1), key=lambda pair: pair.times)
    lines = [
        f"## Where the opponent is faster: {len(lost)} of {len(found)} cases",
        "",
        "| case | ours, ms | opponent | its ms | times faster |",
        "|---|--:|---|--:|--:|",
    ]
    for pair in lost:
        lines.append(
            f"| `{pair.case}` | {pair.ours:.3g} | {pair.opponent} | {pair.theirs:.3g} "
            f"| {pair.times:.2f} |"
        )
    return "\n".join(lines)


def forced(results: Results) -> str:
    """The table of what other GPUs' paths take on this one, beside its own and the baseline."""
    lines = [
        "| timed | path of capability | cases | of this GPU's own speed | beside the baseline |",
        "|---|---|--:|--:|--:|",
    ]
    for name in TIMED:
        rows = [row for row in _rows(results, name) if "speedup" in row]
        own = {row["case"]: row["wall_ms"] for row in rows if row["variant"] == "auto"}
        for variant, capability in FORCED.items():
            chosen = [row for row in rows if row["variant"] == variant and row["case"] in own]
            if not chosen:
                continue
            share = geomean([own[row["case"]] / row["wall_ms"] for row in chosen])
            beside = geomean([row["speedup"] for row in chosen])
            lines.append(
                f"| {TIMED[name]} | {capability} | {len(chosen)} | {share:.2f} | {beside:.2f} |"
            )
    if len(lines) == 2:
        return "No measurement has been committed yet."
    gpus = ", ".join(dict.fromkeys(result["gpu"] for result in results.values()))
    return "\n".join(
        [
            *lines,
            "",
            f"{gpus}; geometric means of wall-clock times, above 1 faster. The baselines are those "
            "of [the comparison](benchmarks/h200-comparison.md).",
        ]
    )
