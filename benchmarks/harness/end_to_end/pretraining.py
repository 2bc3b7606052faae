"""A GPT of 124M trained from scratch with each of several optimizers.

The model is compiled once; a run puts other weights into the same parameters. Steps are queued
without waiting for the device; the clock stops for evaluations. Every optimizer's rate is swept.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import numpy as np

from .. import other_projects, timer
from ..built_package import demo_modules
from ..lazy import torch
from .tokens import Tokens

DECAY, BETAS = 0.1, (0.9, 0.95)
DRAWN = 1 << 20  # apart from any seed of a run
STILL = 1e-3  # of the rate, in bursts for the clock: two optimizers step the same parameters


@dataclass(frozen=True)
class Plan:
    """Size of the model and of a run."""

    # Layers to context are of the model.
    layers: int = 12
    channels: int = 768
    heads: int = 12
    context: int = 1024
    vocabulary: int = 16384  # of the tokens
    batch: int = 32  # sequences of a step
    steps: int = 400  # of a run
    warmup: int = 30  # steps of the linear way up
    down: float = 0.4  # share of the steps of the linear way down
    every: int = 100  # steps between evaluations, in which nothing is waited for
    held_out: int = 8  # batches of an evaluation, the same ones every time
    # nats by which a rate may lie behind another one at the same step; then it stops.
    behind: float = 0.5
    averaged: int = 10  # steps of which the curve shows the mean train loss
    bursts: int = 3  # of the clock
    calls: int = timer.CALLS  # of the clock

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.batch * self.context

    def factor(self, step: int) -> float:
        """What the rate is multiplied with: linear up, one, linear down to nearly zero."""
        if step < self.warmup:
            return (step + 1) / self.warmup
        return min(1.0, (self.steps - step) / max(self.down * self.steps, 1))


def _all_adamw(package: ModuleType, model: Any, lr: float) -> list[Any]:
    return [_adamw(model.parameters(), lr)]


def _muon(package: ModuleType, model: Any, lr: float) -> list[Any]:
    groups = package.get_default_muon_param_groups(model, no_decay=False, split_fused=False)
    return [package.Muon(groups, lr=lr, weight_decay=DECAY, adamw_betas=BETAS, none_grad=True)]


def _torch_muon(package: ModuleType, model: Any, lr: float) -> list[Any]:
    matrices, rest = package.get_default_muon_param_groups(model, no_decay=False, split_fused=False)
    rule = {"lr": lr, "weight_decay": DECAY, "adjust_lr_fn": "match_rms_adamw"}
    return [torch.optim.Muon(matrices["params"], **rule), _adamw(rest["params"], lr)]


def _muon_adamw(package: ModuleType, model: Any, lr: float) -> list[Any]:
    return [package.MuonAdamW(_nanochat_groups(model, lr))]


def _nanochat_groups(model: Any, lr: float) -> list[dict]:
    """nanochat's groups, whose rates stand in fixed proportions; its own are those of 2e-3."""
    scale = (model.config.channels / 768) ** -0.5
    adamw = {"kind": "adamw", "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.0}
    matrices = [p for p in model.blocks.parameters() if p.ndim == 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    muon = {"kind": "muon", "params": matrices, "lr": 10 * lr, "weight_decay": DECAY}
    return [
        {**adamw, "params": [model.head.weight], "lr": 2 * lr * scale},
        {**adamw, "params": [model.embedding.weight], "lr": 100 * lr * scale},
        {**adamw, "params": vectors, "lr": 5 * lr * scale},
        muon,
    ]


def _nanochat(package: ModuleType, model: Any, lr: float) -> list[Any]:
    return [other_projects.found("nanochat").call(_nanochat_groups(model, lr))]


def _dion(package: ModuleType, model: Any, lr: float) -> list[Any]:
    matrices, rest = package.get_default_muon_param_groups(model, no_decay=False, split_fused=False)
    rule = {"lr": lr, "weight_decay": DECAY}
    kinds = (("muon", matrices), ("adamw", rest))
    groups = [{"kind": kind, "params": group["params"], **rule} for kind, group in kinds]
    return [other_projects.found("dion").call(groups)]


def _adamw(params: Any, lr: float) -> Any:
    return torch.optim.AdamW(params, lr=lr, betas=BETAS, weight_decay=DECAY, fused=True)


@dataclass(frozen=True)
class Kind:
    """How an optimizer is made, the middle of its rates, and the seeds of its best rate."""

    make: Callable[[ModuleType, Any, float], list[Any]]
    centre: float
    seeds: tuple[int, ...] = (0, 1, 2)

    @property
    def rates(self) -> list[float]:
        """Five rates, each twice the last; the centre comes first."""
        return [self.centre * 2.0**k for k in (0, -1, 1, -2, 2)]


KINDS = {
    "adamw": Kind(_all_adamw, 1.5e-3, seeds=(0,)),
    "muon": Kind(_muon, 2e-3),
    "muon_adamw": Kind(_muon_adamw, 2e-3),
    "torch_muon": Kind(_torch_muon, 2e-3),
}
PEERS = {"dion": Kind(_dion, 2e-3, seeds=(0,)), "nanochat": Kind(_nanochat, 2e-3, seeds=(0,))}
ALL_KINDS = KINDS | PEERS


class Optimizers:
    """The optimizers of all parameters as one, whose rates follow a schedule."""

    def __init__(self, parts: Sequence[Any]) -> None:
        self.parts = parts
        self.groups = [group for part in parts for group in part.param_groups]
        # Numbers: a peer's rate is a tensor that its step writes to.
        self.peaks = [float(group["lr"]) for group in self.groups]

    def set_factor(self, factor: float) -> None:
        """Multiply every group's peak rate."""
        for group, peak in zip(self.groups, self.peaks, strict=True):
            group["lr"] = peak * factor

    def step(self) -> None:
        """One step of all."""
        for part in self.parts:
            part.step()


@dataclass
class Run:
    """One run, or what there is of it: one whose loss is no number or hopeless ends early."""

    lr: float  # main rate
    seed: int  # of weights and batches
    # (steps, seconds, loss) of each evaluation; seconds are those of the steps.
    held_out: list[tuple[int, float, float]] = field(default_factory=list)
    # (seconds, mean train loss) of each few steps.
    curve: list[tuple[float, float]] = field(default_factory=list)
    # per step, of each stretch between evaluations.
    step_ms: list[float] = field(default_factory=list)
    optimizer_ms: float = math.nan  # median between the events around `step()`
    stopped: bool = False  # whether it ended early

    @property
    def loss(self) -> float:
        """Of the held-out text at the end; infinity if there was no number."""
        last = self.held_out[-1][2] if self.held_out else math.nan
        return last if math.isfinite(last) else math.inf

    def is_behind(self, other: Run | None, nats: float) -> bool:
        """Whether the last loss is no number, or so far above the other run's at that step."""
        if not math.isfinite(self.loss):
            return True
        step = self.held_out[-1][0]
        at = {steps: loss for steps, _, loss in other.held_out} if other else {}
        return self.loss > at.get(step, math.inf) + nats


class Stamps:
    """Milliseconds between two points of the device's stream, read after the run."""

    def __init__(self, device: str) -> None:
        self.on_gpu = device == "cuda"
        self.pairs: list[tuple[Any, Any]] = []

    def around(self, call: Callable[[], object]) -> None:
        """Call it between two events, which wait for nothing."""
        first = self._now()
        call()
        self.pairs.append((first, self._now()))

    def _now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def median_ms(self) -> float:
        """Over all calls; the device must be idle."""
        if self.on_gpu:
            return statistics.median(a.elapsed_time(b) for a, b in self.pairs)
        return statistics.median((b - a) * 1e3 for a, b in self.pairs)


class Pretraining:
    """The model, its text, and runs over them."""

    def __init__(self, plan: Plan, tokens: Tokens, package: ModuleType, device: str) -> None:
        self.plan, self.package, self.device = plan, package, device
        self.demo = demo_modules()
        sizes = (plan.layers, plan.channels, plan.heads, plan.context, plan.vocabulary)
        self.config = self.demo["model"].ModelConfig(*sizes)
        self.initial: dict[int, list[Any]] = {}
        self.untrained = math.inf
        self.model = self.demo["model"].Decoder(self.config, seed=0).to(device)
        self.loss = torch.compile(self.model, dynamic=False) if device == "cuda" else self.model
        ids = (torch.from_numpy(part.astype(np.int32)) for part in (tokens.train, tokens.held_out))
        self.train, held_out = (part.to(device) for part in ids)
        needed = plan.held_out * plan.tokens + 1
        if min(len(self.train), len(held_out)) < needed:
            raise ValueError(f"{len(self.train)}, {len(held_out)} tokens; {needed} of each needed")
        starts = torch.arange(plan.held_out * plan.batch, device=device) * plan.context
        self.held_out = [self._windows(held_out, some) for some in starts.split(plan.batch)]

    def _windows(self, ids: Any, starts: Any) -> tuple[Any, Any]:
        """Tokens and targets, both (B, T) int64."""
        return self.demo["corpus"].windows(ids, starts, self.plan.context)

    def wait(self) -> None:
        """Until the device is idle."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def _compute(self, batch: tuple[Any, Any]) -> Any:
        on_gpu = self.device == "cuda"
        with torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext():
            return self.loss(*batch)

    def reset(self, seed: int) -> None:
        """The first weights of a seed, in the parameters that the compiled model has."""
        if seed not in self.initial:
            fresh = self.demo["model"].Decoder(self.config, seed=seed)
            self.initial[seed] = [p.detach().to(self.device) for p in fresh.parameters()]
        with torch.no_grad():
            for param, value in zip(self.model.parameters(), self.initial[seed], strict=True):
                param.copy_(value)
                param.grad = None

    def starts(self, seed: int, steps: int) -> Any:
        """First tokens of every sequence of every step, (steps, B) int64, on the device."""
        generator = torch.Generator().manual_seed(seed)
        size = (steps, self.plan.batch)
        drawn = torch.randint(len(self.train) - self.plan.context, size, generator=generator)
        return drawn.to(self.device)

    def evaluate(self) -> float:
        """Loss of the held-out text, by the graph that trains: no other is compiled."""
        return sum(self._compute(batch).item() for batch in self.held_out) / len(self.held_out)

    def step(self, optimizer: Optimizers, starts: Any, call: Callable = lambda step: step()) -> Any:
        """One step over the windows at `starts` (B,); the loss stays on the device."""
        loss = self._compute(self._windows(self.train, starts))
        loss.backward()
        call(optimizer.step)
        for param in self.model.parameters():
            param.grad = None
        return loss.detach()

    def warm_up(self) -> None:
        """Compile the model, and keep the held-out loss of one that has not been trained."""
        self.reset(0)
        optimizer = Optimizers(KINDS["adamw"].make(self.package, self.model, 1e-6))
        for starts in self.starts(DRAWN, 3):
            self.step(optimizer, starts)
        self.untrained = self.evaluate()

    def run(self, name: str, lr: float, seed: int, other: Run | None = None) -> Run:
        """Train from scratch at this peak rate; nothing is waited for between two evaluations.

        The run must keep up with the `other` one of its seed.
        """
        plan, run = self.plan, Run(lr, seed)
        self.reset(seed)
        optimizer = Optimizers(ALL_KINDS[name].make(self.package, self.model, lr))
        starts, stamps, seconds = self.starts(seed, plan.steps), Stamps(self.device), 0.0
        for first in range(0, plan.steps, plan.every):
            steps = range(first, min(first + plan.every, plan.steps))
            losses = []
            self.wait()
            begin = time.perf_counter()
            for index in steps:
                optimizer.set_factor(plan.factor(index))
                losses.append(self.step(optimizer, starts[index], stamps.around))
            self.wait()
            taken = time.perf_counter() - begin
            run.step_ms.append(taken / len(steps) * 1e3)
            run.curve += averaged(torch.stack(losses).tolist(), seconds, taken, plan.averaged)
            seconds += taken
            run.held_out.append((steps[-1] + 1, seconds, self.evaluate()))
            if steps[-1] + 1 < plan.steps and run.is_behind(other, plan.behind):
                run.stopped = True
                break
        run.optimizer_ms = stamps.median_ms()
        return run

    def clock(self, name: str, lr: float) -> dict[str, tuple[float, float]]:
        """(wall, host) ms of a step, by turns with AdamW's: bursts from an idle device.

        The weights are those that the last run left. Both optimizers go on from them by rates that
        hardly move them.
        """
        sets = self.starts(DRAWN, timer.LEAST_SETS)
        calls = {}
        for who, kind, rate in ((name, ALL_KINDS[name], lr), ("adamw", KINDS["adamw"], 1e-3)):
            optimizer = Optimizers(kind.make(self.package, self.model, STILL * rate))
            calls[who] = lambda number, optimizer=optimizer: self.step(optimizer, sets[number])
        size = {"bursts": self.plan.bursts, "calls": self.plan.calls}
        return timer.clock(calls, sets=len(sets), synchronize=self.wait, **size)


def averaged(
    losses: Sequence[float], begin: float, seconds: float, count: int
) -> list[tuple[float, float]]:
    """(seconds, mean loss) of every `count` of losses, which are spread evenly over `seconds`."""
    found = []
    for first in range(0, len(losses), count):
        some = losses[first : first + count]
        found.append((begin + seconds * (first + len(some)) / len(losses), statistics.fmean(some)))
    return found


def choose(runs: Sequence[Run]) -> tuple[Run, bool]:
    """The run to the end with the least held-out loss, and whether its rate is the first or last.

    Raises:
        ValueError: no run came to its end.
    """
    whole = [run for run in runs if not run.stopped]
    if not whole:
        raise ValueError(f"no rate of {sorted(run.lr for run in runs)} trains")
    best = min(whole, key=lambda run: run.loss)
    rates = [run.lr for run in runs]
    return best, best.lr in (min(rates), max(rates))
