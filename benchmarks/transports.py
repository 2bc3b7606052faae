"""What transports cost between the GPUs of one host: rows C2 to C7 and C13 of the acceptance.

torchrun --standalone --nproc-per-node 8 benchmarks/transports.py [--only C3 C4] [--out FILE]

Every row is one figure of "nccl" and one of "p2p", on the slowest rank, median of several, with the
goal that docs/concepts/communication.md states. Before a row is timed, messages are compared with
those of the all-to-all, and steps by their bits. `--device cpu` tries the code over gloo.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from harness import package
from harness.optimizer_step import one_gpu, several_gpus
from harness.sources import ROOT

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
STEPS = {
    "C5": ("256x1024", "fsdp2"),
    "C6": ("llama-8B", "fsdp2"),
    "C7": ("nanochat-d24", "unreduced-fp32"),
}
SMALL_STEPS = {"C5": ("tiny", "fsdp2"), "C7": ("tiny", "unreduced-fp32")}


@dataclasses.dataclass(frozen=True)
class Found:
    """One figure."""

    row: str
    case: str
    transport: str
    value: float
    unit: str
    goal: str

    def line(self) -> str:
        figure = f"{self.value:>12.4g} {self.unit:<6}"
        return f"{self.row:<4} {self.case:<26} {self.transport:<6} {figure} goal {self.goal}"


class Link:
    """The two ways of one exchange: as many bytes from every rank to every other and itself.

    `matrices`: of which they are rows; p2p puts these together at the owner.
    """

    def __init__(
        self, built: package.Built, ranks: several_gpus.Ranks, size: int, matrices: int = 1
    ) -> None:
        import torch
        from torch import distributed

        module = package.module(built.package, "distributed.transport")
        messages = package.module(built.package, "distributed.message_layout")
        policy = package.module(built.package, "distributed.policy")
        unit = 16 * matrices
        self.ranks, part = ranks, size // ranks.count // unit * unit
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

    def take(self, name: str) -> bool:
        """Exchange by a transport from here on; whether it can be had."""
        self.transport.settle(self.traffic, self.options(transport=name), together=True)
        rows = self.transport.report()
        self.report = rows[0]
        self.transport.begin()
        self.lease = self.transport.inbox(self.coming)
        return name == "nccl" or self.report.transport == name

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


def bandwidth(built: package.Built, ranks: several_gpus.Ranks, size: int) -> Iterator[Found]:
    """C3 and C13: bytes that leave every GPU in an exchange, and what setting it up takes."""
    import torch

    link, seen = Link(built, ranks, size), []
    for name in TRANSPORTS:
        if not link.take(name):
            continue
        link.once()
        link.launch().wait()
        ranks.synchronize()
        seen.append(link.place().clone())
        if not torch.equal(seen[0], seen[-1]):
            raise SystemExit(f"{name}: messages differ from those of the all-to-all")
        ms = median(ranks, link.once)
        sent = size * (ranks.count - 1) / ranks.count
        case = f"a2a {size // MIB} MiB"
        yield Found("C3", case, name, sent / ms / 1e6, "GB/s", ">= 320 of 8 GPUs (256 MiB)")
        if name == "p2p":
            setup = ranks.largest(link.report.setup_ms)
            yield Found("C13", "arena", name, setup, "ms", "<= 2000")
            yield Found("C13", "arena", name, link.report.arena_bytes, "bytes", "is said")


def beside(
    ranks: several_gpus.Ranks, launch: Callable[[], object], times: int, work: Callable[[], object]
) -> float:
    """Milliseconds of work on the current stream while exchanges run on theirs."""
    import torch
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
    built: package.Built, ranks: several_gpus.Ranks, n: int, count: int, size: int
) -> Iterator[Found]:
    """C2: Newton-Schulz of `count` matrices (n, n) beside exchanges one behind another."""
    import torch

    x = torch.randn((1, n, n), device=ranks.device, dtype=torch.bfloat16)
    half = torch.float16 if ranks.device.type == "cuda" else torch.float32

    def work() -> None:
        for _ in range(count):
            built.package.newton_schulz(x.to(half), steps=5)

    alone = median(ranks, work)
    link = Link(built, ranks, size)
    goal = "<= 1.08" if n >= 4096 else "<= 1.10"
    for name in TRANSPORTS:
        if not link.take(name):
            continue
        one, begun = median(ranks, link.once), time.perf_counter()
        for _ in range(8):
            link.launch()
        host = 1e3 * (time.perf_counter() - begun) / 8
        # As many as last longer than the work, though some are over before all are launched.
        times = min(400, math.ceil(ranks.largest(1.3 * alone / max(one - host, one / 4))))
        taken = [beside(ranks, link.launch, times, work) for _ in range(WARMUP + ROUNDS)]
        link.launch().wait()
        ranks.synchronize()
        ms = statistics.median(taken[WARMUP:])
        yield Found("C2", f"{count} x {n}^2, {size // MIB} MiB", name, ms / alone, "x", goal)


def gather(
    built: package.Built, ranks: several_gpus.Ranks, count: int, n: int, goal: str
) -> Iterator[Found]:
    """C4: rows of `count` matrices (n, n) in 16 bits to their owners, as one batch there."""
    link = Link(built, ranks, count * n * n * 2 // ranks.count, count // ranks.count)
    exchange = package.module(built.package, "optimizers.sharded.exchange")

    def phase() -> None:
        link.launch().wait()
        if link.lease is None:
            found = link.place().view(ranks.count, count // ranks.count, -1)
            exchange.in_words(found).transpose(0, 1).contiguous()
        else:
            link.lease.give()
            link.lease = link.transport.inbox(link.coming)

    for name in TRANSPORTS:
        if link.take(name):
            case = f"gather {count} x {n}^2"
            yield Found("C4", case, name, 1e3 * median(ranks, phase), "us", goal)
            start = time.perf_counter()
            phase()
            host = 1e6 * (time.perf_counter() - start)
            ranks.synchronize()
            yield Found("C4", f"{case}, host", name, ranks.largest(host), "us", "see above")


class StepCase(several_gpus.RankCase):
    """A set of parameters whose optimizer exchanges by a transport."""

    name = "nccl"

    def _optimizer(self, matrices: Any, others: Any, *, alone: bool, dtype: Any = None) -> Any:
        made = super()._optimizer(matrices, others, alone=alone, dtype=dtype)
        if not alone:
            ranks = made._ranks
            ranks.config = dataclasses.replace(ranks.config, transport=self.name)
        return made


def steps(
    built: package.Built, ranks: several_gpus.Ranks, row: str, model: str, form: str
) -> Iterator[Found]:
    """C5 to C7: a whole step, and its time in units of that over the all-to-all."""
    import torch

    goals = {"C5": "<= 0.60", "C6": "<= 0.95", "C7": "<= 0.85"}
    base, bits = None, None
    for name in TRANSPORTS:
        case = type(name, (StepCase,), {"name": name})(
            several_gpus.Problem(model, form), built, ranks
        )
        for _ in range(4):
            case.ours.step()
        case.ours.state_dict()
        found = [several_gpus._local(p.detach()).clone() for p in case.matrices[:8]]
        if {one["transport"] for one in case.ours.comm_report()} != {name} and name == "p2p":
            print(f"{row}: {case.ours.comm_report()[0]['reason']}", file=sys.stderr)
            return
        if bits is not None and not all(map(torch.equal, bits, found)):
            raise SystemExit(f"{row}: a step by {name} has other bits")
        bits = found
        ms = median(ranks, case.ours.step)
        base = base or ms
        yield Found(row, f"{model}/{form}", name, ms, "ms", "-")
        if name != TRANSPORTS[0]:
            yield Found(row, f"{model}/{form}", name, ms / base, "x", goals[row])
        del case
        if ranks.device.type == "cuda":
            torch.cuda.empty_cache()


def rows(
    built: package.Built, ranks: several_gpus.Ranks, only: list[str], *, small: bool
) -> Iterator[Found]:
    """All of them, or those that were named."""
    one_gpu.SHAPES.update(SETS)
    if not only or {"C3", "C13"} & {*only}:
        for size in (1,) if small else (64, 256):
            yield from bandwidth(built, ranks, size * MIB)
    if not only or "C4" in only:
        sets = [(8, 64, "-")] if small else [(32, 4096, "<= 500"), (64, 1024, "<= 350")]
        for count, n, goal in sets:
            yield from gather(built, ranks, count, n, goal)
    if not only or "C2" in only:
        sets = [(64, 2, 1)] if small else [(4096, 8, 256), (2048, 40, 64)]
        for n, count, size in sets:
            yield from contention(built, ranks, n, count, size * MIB)
    for row, (model, form) in (SMALL_STEPS if small else STEPS).items():
        if not only or row in only:
            yield from steps(built, ranks, row, model, form)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", default=[], help="rows, such as C3 C5")
    parser.add_argument("--out", type=Path, help="JSON file")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    with several_gpus.joined(options.device) as ranks:
        built = package.load(ROOT, options.device)
        found = []
        for one in rows(built, ranks, options.only, small=options.device == "cpu"):
            if ranks.first:
                print(one.line(), flush=True)
            found.append(dataclasses.asdict(one))
        if ranks.first and options.out is not None:
            said = {"commit": built.commit, "ranks": ranks.count, "rows": found}
            options.out.write_text(json.dumps(said, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
