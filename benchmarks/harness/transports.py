"""Cases of `communication.json` on several GPUs of one host: rows C2 to C7 and C13.

Each is one figure of "p2p", on the slowest rank, median of several, beside that of the all-to-all.
A row stands only if messages are those of the all-to-all, and steps have its bits. What is
predicted for eight GPUs stands in docs/dev/transports.md.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from . import built_package, report
from .built_package import Built
from .lazy import torch
from .optimizer_step import one_gpu, several_gpus
from .report import Goal, Line, Rows

HEADING = f"{'case':<52}{'value':>8}  unit"
MIB = 2**20
ROUNDS, WARMUP = 9, 3
TRANSPORTS = ("nccl", "p2p")
# Matrices for Muon and a table for AdamW, beside the sets of harness/optimizer_step.
SETS = {
    "256x1024": (((1024, 1024),) * 256, ((8192, 1024),)),
    "llama-8B": (
        ((4096, 4096),) * 64 + ((1024, 4096),) * 64 + ((14336, 4096),) * 64 + ((4096, 14336),) * 32,
        ((16384, 4096),),
    ),
    "nanochat-d24": (
        ((1536, 1536),) * 96 + ((6144, 1536),) * 24 + ((1536, 6144),) * 24,
        ((65536, 1536),) * 2,
    ),
}
# Row -> set, form, and the goal in units of the step by the all-to-all. The largest is the last.
STEPS = {
    "C5": ("256x1024", "fsdp2", 0.60),
    "C7": ("nanochat-d24", "unreduced-fp32", 0.85),
    "C6": ("llama-8B", "fsdp2", 0.95),
}
SMALL_STEPS = {"C5": ("tiny", "fsdp2", 0.60), "C7": ("tiny", "unreduced-fp32", 0.85)}
SETUP_GOAL = 2000.0  # ms until memory is shared


def figure(
    case: str, found: dict[str, float], goal: Goal, *, unit: str, missing: str = "WRONG RESULTS"
) -> Line:
    """The row of p2p's figure beside that of the all-to-all; without one, why it is missing."""
    beside = found.get("nccl")
    baseline = "-" if beside is None else f"all-to-all, {beside:.4g} {unit}"
    return report.figure(case, found.get("p2p"), baseline, goal, "p2p", unit=unit, missing=missing)


class Link:
    """The two ways of one exchange: as many bytes from every rank to every other and itself.

    `matrices`: of which they are rows; p2p puts these together at the owner. `missing` says why a
    transport has no figure.
    """

    def __init__(
        self, built: Built, ranks: several_gpus.Ranks, size: int, matrices: int = 1
    ) -> None:
        from torch import distributed

        module = built_package.module(built.package, "distributed.transport")
        messages = built_package.module(built.package, "distributed.message_layout")
        policy = built_package.module(built.package, "distributed.choose_transport")
        unit = 16 * matrices
        self.missing, part = "WRONG RESULTS", size // ranks.count // unit * unit
        counts = (part,) * ranks.count
        # One message object per direction: a transport knows its exchanges by them.
        rows = (matrices,) * ranks.count
        self.going, self.coming = messages.Message((), counts, rows), messages.Message((), counts)
        planned = policy.Planned("bytes", self.going, self.coming)
        self.traffic = policy.Traffic((planned,), ranks.device, 1.0, 4)
        self.transport = module.GroupTransport(distributed.group.WORLD)
        self.options = policy.TransportOptions
        self.outbox, self.inbox = (
            torch.empty(part * ranks.count, dtype=torch.uint8, device=ranks.device)
            for _ in range(2)
        )
        self.outbox.random_(0, 255)

    def transports(self) -> Iterator[str]:
        """Those that can be had, on all ranks alike; from each on exchanges go by it."""
        for name in TRANSPORTS:
            self.transport.settle(self.traffic, self.options(transport=name), together=True)
            self.report = self.transport.report()[0]
            self.transport.begin()
            self.lease = self.transport.inbox(self.coming)
            if name == "nccl" or self.report.transport == name:
                yield name
            else:
                self.missing = f"NOT TAKEN ({self.report.reason})"

    def place(self) -> Any:
        return self.inbox if self.lease is None else self.lease.bytes

    def launch(self) -> Any:
        return self.transport.exchange(self.going, self.outbox, self.coming, self.place())

    def once(self) -> None:
        """One exchange, over and read: its slot may be written again."""
        self.launch().wait()
        if self.lease is not None:
            self.lease.give()
            self.lease = self.transport.inbox(self.coming)


def median(ranks: several_gpus.Ranks, call: Callable[[], object]) -> float:
    """Milliseconds of a call on the slowest rank."""
    for _ in range(WARMUP):
        call()
    return statistics.median(ranks.milliseconds(call) for _ in range(ROUNDS))


def bandwidth(built: Built, ranks: several_gpus.Ranks, size: int) -> Rows:
    """C3 and C13: bytes that leave every GPU in an exchange, and what setting it up takes."""
    link, seen, rates, setup = Link(built, ranks, size), [], {}, {}
    for name in link.transports():
        link.once()
        link.launch().wait()
        ranks.synchronize()
        seen.append(link.place().clone())
        if ranks.largest(float(not torch.equal(seen[0], seen[-1]))):
            break
        sent = size * (ranks.count - 1) / ranks.count
        rates[name] = sent / median(ranks, link.once) / 1e6
        if name == "p2p":
            setup[name] = ranks.largest(link.report.setup_ms)
            if ranks.first:
                print(f"C13: {link.report.arena_bytes} bytes are shared by every rank")
    case, goal = f"C3/a2a {size // MIB} MiB", Goal(320.0, at_least=True)
    yield figure(case, rates, goal, unit="GB/s", missing=link.missing)
    case, goal = f"C13/setup for {size // MIB} MiB", Goal(SETUP_GOAL, at_least=False)
    yield figure(case, setup, goal, unit="ms", missing=link.missing)


def beside(
    ranks: several_gpus.Ranks, launch: Callable[[], object], times: int, work: Callable[[], object]
) -> float:
    """Milliseconds of work on the current stream while exchanges run on theirs."""
    from torch import distributed

    distributed.barrier()
    ranks.synchronize()
    for _ in range(times):
        launch()
    if ranks.device.type != "cuda":
        return ranks.largest(several_gpus._time(work))
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    work()
    stop.record()
    ranks.synchronize()
    return ranks.largest(start.elapsed_time(stop))


def contention(
    built: Built, ranks: several_gpus.Ranks, n: int, count: int, size: int, goal: float
) -> Rows:
    """C2: Newton-Schulz of `count` matrices (n, n) beside exchanges one behind another."""
    half = torch.float16 if ranks.device.type == "cuda" else torch.float32
    x = torch.randn((1, n, n), device=ranks.device).to(half)

    def work() -> None:
        for _ in range(count):
            built.package.newton_schulz(x, steps=5)

    alone, found = median(ranks, work), {}
    link = Link(built, ranks, size)
    for name in link.transports():
        one, begun = median(ranks, link.once), time.perf_counter()
        for _ in range(8):
            link.launch()
        host = 1e3 * (time.perf_counter() - begun) / 8
        # As many as last longer than the work, though some are over before all are launched.
        times = min(400, math.ceil(ranks.largest(1.3 * alone / max(one - host, one / 4))))
        taken = [beside(ranks, link.launch, times, work) for _ in range(WARMUP + ROUNDS)]
        link.launch().wait()
        ranks.synchronize()
        found[name] = statistics.median(taken[WARMUP:]) / alone
    case = f"C2/{count} x {n}^2 beside {size // MIB} MiB"
    unit = "times the time alone"
    yield figure(case, found, Goal(goal, at_least=False), unit=unit, missing=link.missing)


def gather(
    built: Built, ranks: several_gpus.Ranks, count: int, n: int, goal: float, host_goal: float
) -> Rows:
    """C4: rows of `count` matrices (n, n) in 16 bits to their owners, as one batch there."""
    link = Link(built, ranks, count * n * n * 2 // ranks.count, count // ranks.count)
    exchange = built_package.module(built.package, "optimizers.sharded.exchange")
    found, on_host = {}, {}

    def phase() -> None:
        link.launch().wait()
        if link.lease is None:
            parts = link.place().view(ranks.count, count // ranks.count, -1)
            exchange.in_words(parts).transpose(0, 1).contiguous()
        else:
            link.lease.give()
            link.lease = link.transport.inbox(link.coming)

    for name in link.transports():
        found[name] = 1e3 * median(ranks, phase)
        start = time.perf_counter()
        phase()
        on_host[name] = ranks.largest(1e6 * (time.perf_counter() - start))
        ranks.synchronize()
    case, what = f"C4/gather {count} x {n}^2", {"unit": "us", "missing": link.missing}
    yield figure(case, found, Goal(goal, at_least=False), **what)
    yield figure(f"{case}, host", on_host, Goal(host_goal, at_least=False), **what)


class StepCase(several_gpus.RankCase):
    """A set of parameters whose optimizer exchanges by a transport."""

    name = "nccl"

    def _optimizer(self, matrices: Any, others: Any, *, alone: bool, dtype: Any = None) -> Any:
        made = super()._optimizer(matrices, others, alone=alone, dtype=dtype)
        if not alone:
            ranks = made._ranks
            ranks.config = dataclasses.replace(ranks.config, transport=self.name)
        return made


def step(
    built: Built, ranks: several_gpus.Ranks, row: str, model: str, form: str, goal: float
) -> Rows:
    """C5 to C7: a whole step over that by the all-to-all, whose bits it must have."""
    bits, times, missing = None, {}, "WRONG RESULTS"
    for name in TRANSPORTS:
        kind = type(name, (StepCase,), {"name": name})
        case = kind(several_gpus.Problem(model, form), built, ranks)
        for _ in range(4):
            case.ours.step()
        case.ours.state_dict()
        found = [several_gpus._local(p.detach()).clone() for p in case.matrices[:8]]
        said = case.ours.comm_report()
        if name == "p2p" and {one["transport"] for one in said} != {name}:
            missing = f"NOT TAKEN ({said[0]['reason']})"
            break
        same = bits is None or all(map(torch.equal, bits, found))
        if ranks.largest(float(not same)):
            break
        bits, times[name] = found, median(ranks, case.ours.step)
        del case, found
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()
    if ranks.first:
        print(f"{row}: " + ", ".join(f"{name} {ms:.4g} ms" for name, ms in times.items()))
    if times:
        times = {name: ms / times["nccl"] for name, ms in times.items()}
    unit = "times the step"
    goal = Goal(goal, at_least=False)
    yield figure(f"{row}/{model}/{form}", times, goal, unit=unit, missing=missing)


def rows(
    built: Built, ranks: several_gpus.Ranks, left: list[str], end: float | None = None
) -> Rows:
    """Every row of the file; on CPUs small ones.

    Those that would begin after `end`, a time of `time.monotonic`, are added to `left` instead, on
    all ranks as soon as one of them is that late.
    """
    one_gpu.SHAPES.update(SETS)
    small = ranks.device.type == "cpu"
    calls: dict[str, Callable[[], Rows]] = {}
    for size in (1,) if small else (64, 256):
        calls[f"C3/{size}"] = functools.partial(bandwidth, built, ranks, size * MIB)
    sets = [(8, 64, 500.0, 250.0)]
    sets = sets if small else [(32, 4096, 500.0, 250.0), (64, 1024, 350.0, 350.0)]
    for one in sets:
        calls[f"C4/{one[1]}"] = functools.partial(gather, built, ranks, *one)
    sets = [(64, 2, MIB, 1.08)]
    sets = sets if small else [(4096, 8, 256 * MIB, 1.08), (2048, 40, 64 * MIB, 1.10)]
    for one in sets:
        calls[f"C2/{one[0]}"] = functools.partial(contention, built, ranks, *one)
    for row, one in (SMALL_STEPS if small else STEPS).items():
        calls[row] = functools.partial(step, built, ranks, row, *one)
    for name, call in calls.items():
        if end is not None and ranks.largest(time.monotonic() - end) > 0:
            left.append(name)
            continue
        yield from call()
