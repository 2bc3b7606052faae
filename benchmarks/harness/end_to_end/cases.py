"""Cases of `end_to_end.json`: whole trainings, whole models with experts, and first calls.

One file is made by several commands. Each measures the cases that it names and leaves the other
rows where they are; it refuses to put rows beside those of another machine, of other sources or of
another text. The rows of experts have a commit and sources of their own.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from .. import other_projects
from ..built_package import Built
from ..progress import Progress
from ..report import Row, Rows, difference, failed
from . import first_use, moe_model
from .pretraining import ALL_KINDS, PEERS, Plan, Pretraining, Run, choose
from .tokens import Recipe, Tokens

GPT = "gpt-124M"
CASES = (
    *(f"{GPT}/{name}" for name in ALL_KINDS),
    *(problem.case for problem in moe_model.LISTED),
    *first_use.CASES,
)
ON_REQUEST = ("compile", *PEERS)  # parts of names that a command must spell out
HEADING = f"{'case':<36}{'wall ms':>9}{'host':>9}{'x base':>9}{'k tokens/s':>12}"
MACHINE = ("gpu", "driver", "torch", "triton")


@dataclass(frozen=True)
class TrainingRow(Row):
    """A training from scratch. What has no meaning for it is absent, such as a floor."""

    # the rate with the least held-out loss of `sweep`, multiplied by a schedule.
    lr: float | None = None
    lr_at_edge: bool | None = None  # whether that is the first or the last one tried
    # {"lr", "loss"} of every rate, with the first seed; {"lr", "stopped", "behind"} of one
    # that was stopped after so many steps, with that loss if it was a number.
    sweep: list[dict] | None = None
    seed: int | None = None  # of the run that the next fields are about
    loss: float | None = None  # held-out, nats per token, at the end
    loss_mean: float | None = None  # over `seeds`
    seeds: list[dict] | None = None  # {"seed", "loss"} at the best rate
    steps: int | None = None  # of a run
    tokens: int | None = None  # that a run has trained on
    tokens_per_s: float | None = None  # in the median stretch between two evaluations
    optimizer_ms: float | None = None  # between device events around `step()`
    # (seconds, mean train loss); evaluations are not counted.
    curve: list[tuple[float, float]] | None = None
    held_out: list[tuple[int, float, float]] | None = None  # (steps, seconds, loss)


def selected(asked: Sequence[str]) -> list[str]:
    """The cases that names stand for: "qwen3-moe-8l/lora" for all of these, both token counts.

    Cases that compile the model, and those of peers, are taken only by names that say so.

    Raises:
        ValueError: a name stands for nothing.
    """
    found = []
    for name in asked:
        first, *parts = name.split("/")
        matches = [
            case
            for case in CASES
            if case.split("/")[0] == first
            and set(parts) <= set(case.split("/")[1:])
            and not any(word in case.split("/") and word not in parts for word in ON_REQUEST)
        ]
        if not matches:
            raise ValueError(f"{name!r} is no case; there are {', '.join(CASES)}")
        found += matches
    return list(dict.fromkeys(found))


def is_of_experts(case: str) -> bool:
    """Whether a row depends on the sources of the experts, else on those of the optimizers."""
    return not case.startswith(f"{GPT}/")


def refusal(earlier: dict | None, head: dict, cases: Iterable[str]) -> str | None:
    """Why rows of these cases cannot stand beside those of an earlier file; None if they can."""
    if earlier is None:
        return None
    if why := difference(earlier, head, MACHINE):
        return why
    cases = set(cases)
    for experts in (False, True):
        mine = {case for case in cases if is_of_experts(case) == experts}
        others = {row["case"] for row in earlier["rows"] if is_of_experts(row["case"]) == experts}
        if not mine or others <= mine:
            continue
        before, now = (part["experts"] if experts else part for part in (earlier, head))
        for key in ("commit", "sources", *(() if experts else ("corpus",))):
            if before[key] != now[key]:
                kept = ", ".join(sorted(others - mine))
                return f"the rows of {kept} are of {key} {before[key]}, this is {now[key]}"
    return None


def merged(
    earlier: dict | None, head: dict, rows: Sequence[Row], cases: Iterable[str]
) -> tuple[dict, list[Row | dict]]:
    """Header and rows of the file with `rows` in it, and without earlier rows of `cases`.

    Raises:
        ValueError: they cannot stand in one file.
    """
    why = refusal(earlier, head, cases)
    if why:
        raise ValueError(why)
    if earlier is None:
        return head, list(rows)
    cases = set(cases)
    kept = [row for row in earlier["rows"] if row["case"] not in cases]
    if any(not is_of_experts(row["case"]) for row in kept):
        head = head | {key: earlier[key] for key in ("commit", "sources", "corpus")}
    if any(is_of_experts(row["case"]) for row in kept):
        head = head | {"experts": earlier["experts"]}
    return head, sorted([*kept, *rows], key=lambda row: CASES.index(_case(row)))


def _case(row: Row | dict) -> str:
    return row["case"] if isinstance(row, dict) else row.case


def rows(
    built: Built,
    cases: Sequence[str],
    progress: Progress,
    tokens: Tokens | None = None,
    device: str = "cuda",
) -> Rows:
    """The rows of these cases; `tokens` are of the recipe's vocabulary, for trainings."""
    asked = [case for case in cases if not is_of_experts(case)]
    if progress.upcoming(*asked):
        yield from trainings(asked, Plan(), tokens, built, device, progress)
    for case in cases:
        if case in moe_model.CASES and progress.begin(case):
            yield from moe_model.rows(built, [case])
    of_first_use = [case for case in cases if case in first_use.CASES]
    yield from first_use.rows(progress.begin(*of_first_use))


def recipe() -> Recipe:
    """Of the text that the trainings read."""
    return Recipe(vocabulary=Plan().vocabulary)


def trainings(
    cases: Sequence[str], plan: Plan, tokens: Tokens, built: Built, device: str, progress: Progress
) -> Rows:
    """A row of each optimizer; the model is compiled once."""
    training = Pretraining(plan, tokens, built.package, device)
    training.warm_up()
    for case in cases:
        if not progress.begin(case):
            continue
        name = case.split("/")[1]
        if name not in PEERS:
            row = training_row(name, training)
            yield row, line(row)
            continue
        try:
            peer = other_projects.found(name)
        except other_projects.MissingError as reason:
            print(f"{case:<36} not run: {reason}", flush=True)
            continue
        yield from other_projects.rows(peer, functools.partial(peer_row, name, training))


def peer_row(name: str, training: Pretraining) -> Rows:
    """The row of a peer's optimizer."""
    row = replace(training_row(name, training), variant=name)
    yield row, line(row)


def training_row(name: str, training: Pretraining) -> Row:
    """Sweep, seeds and clock of one optimizer."""
    kind, plan = ALL_KINDS[name], training.plan
    runs: list[Run] = []
    for lr in kind.rates:
        leader = min(runs, key=lambda run: run.loss, default=None)
        runs.append(reported(name, training.run(name, lr, kind.seeds[0], leader)))
    try:
        best, at_edge = choose(runs)
    except ValueError as error:
        print(error, flush=True)
        return failed(f"{GPT}/{name}")
    more = [reported(name, training.run(name, best.lr, seed)) for seed in kind.seeds[1:]]
    losses = {run.seed: run.loss for run in (best, *more)}
    if not max(losses.values()) < training.untrained:
        return failed(f"{GPT}/{name}")
    times = training.clock(name, best.lr)
    (wall, host), (base_wall, base_host) = times[name], times["adamw"]
    return TrainingRow(
        case=f"{GPT}/{name}",
        variant="auto",
        ok=True,
        wall_ms=wall,
        host_ms=host,
        baseline_wall_ms=base_wall,
        baseline_host_ms=base_host,
        baseline="torch AdamW(fused=True) on all parameters",
        speedup=base_wall / wall,
        lr=best.lr,
        lr_at_edge=at_edge,
        sweep=[swept(run) for run in sorted(runs, key=lambda run: run.lr)],
        seed=best.seed,
        loss=best.loss,
        loss_mean=statistics.fmean(losses.values()),
        seeds=[{"seed": seed, "loss": loss} for seed, loss in losses.items()],
        steps=plan.steps,
        tokens=plan.steps * plan.tokens,
        tokens_per_s=plan.tokens / statistics.median(best.step_ms) * 1e3,
        optimizer_ms=best.optimizer_ms,
        curve=best.curve,
        held_out=best.held_out,
    )


def swept(run: Run) -> dict:
    """What a row keeps of a run of the sweep."""
    if not run.stopped:
        return {"lr": run.lr, "loss": run.loss}
    stopped = {"lr": run.lr, "stopped": run.held_out[-1][0]}
    return stopped | ({"behind": run.loss} if math.isfinite(run.loss) else {})


def reported(name: str, run: Run) -> Run:
    """The run, after a line about it."""
    steps = run.held_out[-1][0]
    print(
        f"  {name} lr {run.lr:g} seed {run.seed}: loss {run.loss:.4f} after {steps} steps, "
        f"{statistics.median(run.step_ms):.2f} ms a step, optimizer {run.optimizer_ms:.2f}",
        flush=True,
    )
    return run


def line(row: Row) -> str:
    """One printed line."""
    if not row.ok:
        return f"{row.case:<36} WRONG RESULTS, not timed"
    shown = f"{row.case:<36}{row.wall_ms:>9.2f}{row.host_ms:>9.2f}{row.speedup:>8.2f}x"
    shown += f"{row.tokens_per_s / 1e3:>12.1f}"
    if row.loss is not None:
        edge = ", at the edge of the sweep" if row.lr_at_edge else ""
        shown += f"  loss {row.loss_mean:.3f} at lr {row.lr:g}{edge}"
    return shown
