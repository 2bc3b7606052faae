"""CUDA-event times of several variants, interleaved, on cold inputs."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping
from typing import Protocol

# Calls take turns over enough input sets that a set is evicted before its next turn. Nothing is
# flushed by writing: dirty lines would be written back inside the timed region, and a flush by
# reading would leave the last writes of the region uncounted in the cache.
COLD = 3  # times the L2 cache between two uses of a set


class Stopwatch(Protocol):
    """Times calls on a device without waiting for each."""

    def begin_round(self) -> None: ...
    def time(self, call: Callable[[], object]) -> None: ...
    def finish(self) -> list[float]: ...


class CudaStopwatch:
    """An event pair per call. The host runs ahead, so no launch gap is timed."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._events: list[tuple] = []

    def begin_round(self) -> None:
        """Occupy the device for about a millisecond, in which the host queues the round."""
        self._torch.cuda._sleep(2_000_000)

    def time(self, call: Callable[[], object]) -> None:
        start, stop = (self._torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        call()
        stop.record()
        self._events.append((start, stop))

    def finish(self) -> list[float]:
        """Milliseconds of every call since construction, in order."""
        self._torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in self._events]


def cold_sets(bytes_per_call: int, l2_bytes: int) -> int:
    """Input sets to take turns over; 1 when a call alone sweeps the cache."""
    return max(1, math.ceil(COLD * l2_bytes / max(bytes_per_call, 1)))


def medians(
    variants: Mapping[str, Callable[[int], object]],
    *,
    sets: int,
    rounds: int = 30,
    warmup: int = 5,
    stopwatch: Callable[[], Stopwatch] = CudaStopwatch,
) -> dict[str, float]:
    """Median milliseconds per variant.

    Args:
        variants: name -> call of an input set's number.
        sets: number of input sets that the calls take turns over.
        rounds: timed rounds; each calls every variant once, so that drift hits all alike.
        warmup: rounds before them.
        stopwatch: how to time.
    """
    for number in range(warmup):
        for call in variants.values():
            call(number % sets)
    watch = stopwatch()
    for number in range(rounds):
        watch.begin_round()
        for call in variants.values():
            watch.time(lambda call=call, number=number: call(number % sets))
    times = watch.finish()
    count = len(variants)
    return {name: statistics.median(times[i::count]) for i, name in enumerate(variants)}
