"""Cases of `tensor_parallel.json`: products that communicate, and Newton-Schulz on sharded rows.

A row is one figure, a time over another one, with its target; it stands only if the results were
right. On one GPU: what one of eight ranks computes of a sharded Newton-Schulz iteration, over the
whole. On several GPUs of one host, under torchrun: fused products over plain ones, called eagerly
and replayed from CUDA graphs, and the sharded iteration over that of an owner.
"""

from __future__ import annotations

import functools
import statistics
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from . import report
from .built_package import Built, module
from .lazy import torch
from .optimizer_step.several_gpus import Ranks
from .progress import Progress
from .report import Goal, Line, Rows
from .timer import medians

HEADING = f"{'case':<52}{'value':>8}  unit"
UNIT = "times the time"
SIDE = 8192  # of the matrix that is iterated
SHARE = f"sharded_ns/{SIDE}/share_of_8"
OF_EIGHT = 8
SHARE_GOAL = Goal(0.25, at_least=False)
# Of an owner's time, by the number of ranks: rows C8 of the model on paper, and between them.
SHARDED_GOALS = {2: 0.80, 4: 0.60, 8: 0.45}
FUSED_GOAL = Goal(1.0, at_least=False)
TOLERANCE = 2e-2  # relative distance of a sharded result from the owner's
ROUNDINGS = 3  # of bfloat16, that a fused result may be from a plain one
SCALINGS = {"bf16": None, "fp8": "rowwise_sharded"}
# M of all ranks, N, K; the smaller one takes float8 too little time to be fused.
PRODUCTS = {"bf16": ((4096, 3584, 8192), (16384, 3584, 8192)), "fp8": ((16384, 3584, 8192),)}
PATIENCE = 120  # seconds that a rank waits for the others
ROUNDS, CALLS = 5, 5  # of bursts, and calls in each


figure = functools.partial(report.figure, unit=UNIT)


def rows(built: Built, cases: Progress) -> Rows:
    """Each row that one GPU can show, and its printed line."""
    if cases.begin(SHARE):
        yield share_of_one_rank(built)
    cases.begin()


@dataclass
class Together:
    """Ranks that are threads of one process on one device: what they give each other."""

    world: int
    barrier: threading.Barrier = field(init=False)
    given: list = field(init=False)

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.world, timeout=PATIENCE)
        self.given = [None] * self.world

    def all_given(self, rank: int, value: Any) -> list:
        """Every rank's value, once all have given theirs."""
        self.given[rank] = value
        self.barrier.wait()
        found = list(self.given)
        self.barrier.wait()
        return found


@dataclass
class ThreadRank:
    """One of `Together`, as `sharded_newton_schulz` knows its ranks; notes what it was given."""

    together: Together
    rank: int
    noted: list = field(default_factory=list)

    @property
    def world(self) -> int:
        return self.together.world

    def total(self, value: Any) -> Any:
        return self._noted(sum(self.together.all_given(self.rank, value)))

    def reduced_rows(self, partial: Any) -> Any:
        partials = self.together.all_given(self.rank, partial)
        parts = torch.stack([one.chunk(self.world)[self.rank] for one in partials])
        return self._noted(parts).sum(0, dtype=torch.float32)

    def gathered(self, rows: Any) -> Any:
        return self._noted(torch.cat(self.together.all_given(self.rank, rows)))

    def exchanged(self, going: Any, sent: Any, _: Any) -> Any:
        given = self.together.all_given(self.rank, going.split(sent))
        return self._noted(torch.cat([parts[self.rank] for parts in given]))

    def _noted(self, value: Any) -> Any:
        if self.rank == 0:
            self.noted.append(value)
        return value


@dataclass
class Alone:
    """The first of some ranks, without the others: what they would give it is there already."""

    world: int
    noted: list
    rank: int = 0
    position: int = 0

    def total(self, value: Any) -> Any:
        return self._next()

    def reduced_rows(self, partial: Any) -> Any:
        return self._next().sum(0, dtype=torch.float32)

    def gathered(self, rows: Any) -> Any:
        return self._next()

    def exchanged(self, going: Any, sent: Any, received: Any) -> Any:
        return self._next()

    def _next(self) -> Any:
        value = self.noted[self.position]
        self.position = (self.position + 1) % len(self.noted)
        return value


def sharded_by_threads(
    built: Built, x: Any, world: int, schedule: str = "auto"
) -> tuple[Any, list]:
    """The result of as many ranks as threads, put together, and what the first was given."""
    sharded = module(built.package, "tensor_parallel.sharded_newton_schulz")
    method, dtype = iteration_of(built, x)
    together, results, shards = Together(world), [None] * world, x.chunk(world)
    rows = [len(shard) for shard in shards]
    ranks = [ThreadRank(together, rank) for rank in range(world)]
    failures: list[Exception] = []

    @torch.no_grad()
    def run(rank: int) -> None:
        try:
            decided = method, 5, schedule, dtype, ranks[rank]
            results[rank] = sharded.of_rows(shards[rank], rows, *decided)
        except Exception as error:
            failures.append(error)  # before the others fail at the barrier
            together.barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return torch.cat(results), ranks[0].noted


def iteration_of(built: Built, x: Any) -> tuple[str, Any]:
    """The method and dtype that the package picks for a matrix."""
    choice = module(built.package, "orthogonalize").choose(*x.shape, dtype=x.dtype, device=x.device)
    return choice.method, choice.dtype


def share_of_one_rank(built: Built, side: int = SIDE, world: int = OF_EIGHT) -> Line:
    """What the first of eight ranks computes, over the whole iteration of an owner."""
    sharded = module(built.package, "tensor_parallel.sharded_newton_schulz")
    x = gaussian(side)
    method, dtype = iteration_of(built, x)
    owner = built.package.orthogonalize(x)
    result, noted = sharded_by_threads(built, x, world)
    apart = distance(result, owner)
    print(f"{SHARE}: {apart:.2e} from the owner's result, at most {TOLERANCE:.0e} is right")
    exact = built.package.orthogonalize(x, method, dtype=torch.float64)
    from_exact = f"{distance(result, exact):.2e}, owner {distance(owner, exact):.2e}"
    print(f"{SHARE}: from float64 {from_exact}")
    del exact
    baseline = f"orthogonalize of {side} x {side}"
    if not apart <= TOLERANCE:
        return figure(SHARE, None, baseline, SHARE_GOAL, "none")
    alone, shard = Alone(world, noted), x.chunk(world)[0]
    rows = [len(shard)] * world
    last = torch.empty_like(owner)

    @torch.no_grad()
    def share(_: int = 0) -> None:
        sharded.of_rows(shard, rows, method, 5, "auto", dtype, alone)

    calls = {"share": share, "whole": lambda _: built.package.orthogonalize(x, out=last)}
    found = medians(calls, sets=1, rounds=10, host_ms=dict.fromkeys(calls, 3.0), alone=True)
    print(f"{SHARE}: {found['share']:.3f} ms of {found['whole']:.3f}, {method}")
    return figure(SHARE, found["share"] / found["whole"], baseline, SHARE_GOAL, "none")


def gaussian(side: int, seed: int = 0) -> Any:
    """A Gaussian matrix on this device, the same on every rank."""
    made = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(side, side, generator=made, device="cuda")


def distance(found: Any, expected: Any) -> float:
    """Of two results, relative, in the Frobenius norm."""
    return ((found.float() - expected.float()).norm() / expected.float().norm()).item()


def rows_on_ranks(built: Built, ranks: Ranks) -> Rows:
    """Each row that several GPUs of one host show, and its printed line."""
    for name, shapes in PRODUCTS.items():
        for shape in shapes:
            yield from product_rows(built, ranks, name, *shape)
    yield sharded_row(built, ranks)


def product_rows(built: Built, ranks: Ranks, name: str, m: int, n: int, k: int) -> Rows:
    """Gathered and scattered products, fused over plain, eager and replayed."""
    tp, made = built.package.tensor_parallel, torch.Generator("cuda").manual_seed(ranks.rank)
    kind = {"generator": made, "device": "cuda", "dtype": torch.bfloat16}
    weight = torch.randn(n, k, **kind).t()
    shard, whole = torch.randn(m // ranks.count, k, **kind), torch.randn(m, k, **kind)
    scaling = SCALINGS[name]

    def gather(fuse: str) -> Any:
        return tp.all_gather_matmul(shard, [weight], 0, scaling=scaling, fuse=fuse)[0]

    def scatter(fuse: str) -> Any:
        return tp.matmul_reduce_scatter(whole, weight, "sum", 0, scaling=scaling, fuse=fuse)

    transport = "symmetric memory over NVLink"
    for op, call in {"all_gather_matmul": gather, "matmul_reduce_scatter": scatter}.items():
        case = f"{op}/{name}/{m}x{n}x{k}"
        with torch.no_grad():
            tp.reset_comm_report()
            error = ranks.largest(distance(call("auto"), call("never")))
            paths = sorted(record.path for record in tp.comm_report())
            right = error <= ROUNDINGS * torch.finfo(torch.bfloat16).eps
            fused = paths == ["fused", "plain"]
            missing = f"NOT FUSED ({', '.join(paths)})" if right else "WRONG RESULTS"
            timed = ("auto", "never") if right and fused else ()
            calls = {fuse: (lambda fuse=fuse, call=call: call(fuse)) for fuse in timed}
            replays = {fuse: captured(one) for fuse, one in calls.items()}
            for how, variants in {"eager": calls, "graph": replays}.items():
                value = None
                if variants:
                    times = by_clock(ranks, variants)
                    value = times["auto"] / times["never"]
                    if ranks.first:
                        both = f"{times['auto']:.3f} ms fused, {times['never']:.3f} plain"
                        print(f"{case}/{how}: {both}")
                baseline = "a collective and a product"
                yield figure(
                    f"{case}/{how}", value, baseline, FUSED_GOAL, transport, missing=missing
                )


def captured(call: Callable[[], object]) -> Callable[[], None]:
    """A replay of the call as a CUDA graph."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        call()
    return graph.replay


def by_clock(ranks: Ranks, variants: Mapping[str, Callable[[], object]]) -> dict[str, float]:
    """Milliseconds of a call by the clock of the slowest rank, medians of bursts by turns."""
    from torch import distributed

    times: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(ROUNDS + 1):
        for name, call in variants.items():
            ranks.synchronize()
            distributed.barrier()
            ranks.synchronize()
            begun = time.perf_counter()
            for _ in range(CALLS):
                call()
            ranks.synchronize()
            taken = ranks.largest((time.perf_counter() - begun) / CALLS * 1e3)
            if number:  # the first one warms up
                times[name].append(taken)
    return {name: statistics.median(found) for name, found in times.items()}


def sharded_row(built: Built, ranks: Ranks) -> Line:
    """A sharded iteration over that of one owner, while the others wait."""
    case = f"sharded_ns/{SIDE}/{ranks.count}gpus"
    x = gaussian(SIDE)
    shard = x.chunk(ranks.count)[ranks.rank].contiguous()
    rows = [len(part) for part in x.chunk(ranks.count)]

    def sharded() -> Any:
        return built.package.tensor_parallel.sharded_newton_schulz(shard, rows=rows)

    orthogonalize = built.package.orthogonalize
    expected = orthogonalize(x).chunk(ranks.count)[ranks.rank]
    goal = Goal(SHARDED_GOALS.get(ranks.count, 1.0), at_least=False)
    baseline, transport = f"orthogonalize of {SIDE} x {SIDE} on one GPU", "NCCL"
    apart = ranks.largest(distance(sharded(), expected))
    if ranks.first:
        print(f"{case}: {apart:.2e} from the owner's result, at most {TOLERANCE:.0e} is right")
    if not apart <= TOLERANCE:
        return figure(case, None, baseline, goal, transport)
    times = by_clock(ranks, {"sharded": sharded, "owner": lambda: orthogonalize(x)})
    if ranks.first:
        print(f"{case}: {times['sharded']:.3f} ms, owner {times['owner']:.3f}")
    return figure(case, times["sharded"] / times["owner"], baseline, goal, transport)
