"""Times of several variants by turns: what a user's clock shows, and what the device needs.

The clock is the result: bursts of eager calls from an idle device, nothing synchronised inside. The
device's time, between events and behind a busy device that hides the host, explains it.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from .lazy import torch

# Calls of a burst. The host is read off shorter ones: a full queue of launches makes it wait for
# the device.
CALLS, HOST_CALLS, BURSTS = 30, 8, 7
FEW_BURSTS = 3  # of strategies that nobody gets, and of shapes drawn at random
LEAST_SETS = 4  # of inputs, at other addresses, that the calls take turns over

# A variant runs for so long, untimed, before each burst whose wall time counts: a GPU at its limit
# of power lowers its clock within some 100 ms, and a burst would else pay for what the variant
# before it drew. The host is read off before it, since caches that hold one layer flatter it.
SETTLE_MS = 120.0

# Calls take turns over enough input sets that a set is evicted before its next turn. Nothing is
# flushed by writing: dirty lines would be written back inside the timed region, and a flush by
# reading would leave the last writes of the region uncounted in the cache.
COLD = 3  # times the L2 cache between two uses of a set

# The device is occupied while the host queues calls whose device time is taken: for this long, and
# twice as long as the clock said that the host needs.
PAUSE_MS, HOST_TWICE = 1.0, 2.0
CYCLES_PER_MS = 2_000_000


class CudaStopwatch:
    """An event pair per call. The host runs ahead, so no launch gap is timed."""

    def __init__(self) -> None:
        self._events: list[tuple] = []

    def pause(self, ms: float) -> None:
        """Occupy the device for about so long, in which the host queues what is timed next."""
        torch.cuda._sleep(round(ms * CYCLES_PER_MS))

    def time(self, call: Callable[[], object]) -> None:
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        self._events.append((start, stop))

    def finish(self) -> list[float]:
        """Milliseconds of every call since construction, in order."""
        torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in self._events]


def cold_sets(bytes_per_call: int, l2_bytes: int | None = None) -> int:
    """Input sets to take turns over: enough that none is in the cache (None: this GPU's)."""
    if l2_bytes is None:
        l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return max(LEAST_SETS, math.ceil(COLD * l2_bytes / max(bytes_per_call, 1)))


def medians(
    variants: Mapping[str, Callable[[int], object]],
    *,
    sets: int,
    rounds: int = 30,
    warmup: int = 5,
    host_ms: Mapping[str, float] | None = None,
    alone: bool = False,
    stopwatch: Callable[[], CudaStopwatch] = CudaStopwatch,
) -> dict[str, float]:
    """Median milliseconds per variant.

    Args:
        variants: name -> call of an input set's number.
        sets: number of input sets that the calls take turns over.
        rounds: timed rounds; each calls every variant once, so that drift hits all alike.
        warmup: rounds before them.
        host_ms: name -> what the host needs to queue a call; None: next to nothing.
        alone: occupy the device before every call, not once for a round, whose launches may be more
            than the queue holds: a call that follows would be timed with the host's delay.
        stopwatch: how to time.
    """
    for number in range(warmup):
        for call in variants.values():
            call(number % sets)
    pauses = {name: HOST_TWICE * (host_ms[name] if host_ms else 0.0) for name in variants}
    watch = stopwatch()
    for number in range(rounds):
        if not alone:
            watch.pause(PAUSE_MS + sum(pauses.values()))
        for name, call in variants.items():
            if alone:
                watch.pause(PAUSE_MS + pauses[name])
            watch.time(lambda call=call, number=number: call(number % sets))
    times = watch.finish()
    count = len(variants)
    return {name: statistics.median(times[i::count]) for i, name in enumerate(variants)}


@dataclass(frozen=True)
class Times:
    """Milliseconds per call: of the device, of the clock, and until the host has queued it."""

    ms: float
    wall_ms: float
    host_ms: float


def burst(
    call: Callable[[int], object],
    first: int,
    count: int,
    sets: int,
    *,
    synchronize: Callable[[], None],
    now: Callable[[], float] = time.perf_counter,
) -> tuple[float, float]:
    """(wall, host) milliseconds per call of `count` calls from an idle device, sets by turns."""
    synchronize()
    start = now()
    for number in range(first, first + count):
        call(number % sets)
    queued = now()
    synchronize()
    return (now() - start) / count * 1e3, (queued - start) / count * 1e3


def clock(
    variants: Mapping[str, Callable[[int], object]],
    *,
    sets: int,
    between: Callable[[], object] = lambda: None,
    bursts: int = BURSTS,
    calls: int = CALLS,
    host_calls: int = HOST_CALLS,
    settle_ms: float = SETTLE_MS,
    synchronize: Callable[[], None] | None = None,
    now: Callable[[], float] = time.perf_counter,
) -> dict[str, tuple[float, float]]:
    """Median (wall, host) milliseconds of eager calls, per variant; bursts take turns.

    Args:
        variants: name -> call of an input set's number.
        sets: input sets that the calls take turns over.
        between: what changes between two bursts, such as parameters in place.
        bursts: of each kind and variant.
        calls: of a burst whose wall time counts.
        host_calls: of a burst whose host time counts: few enough that the queue takes all launches.
        settle_ms: for how long a variant runs before a burst whose wall time counts.
        synchronize: waits for the device; None for CUDA's.
        now: seconds.
    """
    if synchronize is None:
        synchronize = torch.cuda.synchronize
    watch = {"synchronize": synchronize, "now": now}
    for call in variants.values():
        burst(call, 0, host_calls, sets, **watch)
    walls: dict[str, list[float]] = {name: [] for name in variants}
    hosts: dict[str, list[float]] = {name: [] for name in variants}
    for number in range(bursts):
        for name, call in variants.items():
            between()
            _, host = burst(call, number, host_calls, sets, **watch)
            start = now()
            while (now() - start) * 1e3 < settle_ms:
                burst(call, number, host_calls, sets, **watch)
            between()
            wall, _ = burst(call, number, calls, sets, **watch)
            walls[name].append(wall)
            hosts[name].append(host)
    return {
        name: (statistics.median(walls[name]), statistics.median(hosts[name])) for name in variants
    }


def times(
    variants: Mapping[str, Callable[[int], object]],
    *,
    sets: int,
    between: Callable[[], object] = lambda: None,
    bursts: int = BURSTS,
    host_calls: int = HOST_CALLS,
    device: Mapping[str, Callable[[int], object]] | None = None,
    **options,
) -> dict[str, Times]:
    """The clock and the device's time of every variant; `device` has other calls for the latter.

    The named arguments are those of `clock`, the options those of `medians`.
    """
    shown = clock(variants, sets=sets, between=between, bursts=bursts, host_calls=host_calls)
    host = {name: host for name, (_, host) in shown.items()}
    ms = medians(device or variants, sets=sets, host_ms=host, **options)
    return {name: Times(ms[name], *shown[name]) for name in variants}
