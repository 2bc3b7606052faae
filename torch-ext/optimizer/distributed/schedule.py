"""Chunks of work whose communication runs under the computation of other chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable

Phases = Generator[None, None, None]


def run_pipeline(
    chunks: Iterable[Phases],
    *,
    ahead: int = 1,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Run generators that yield when they have launched communication and not yet waited for it.

    A chunk yields at most twice: its gather is launched, its scatter is launched. One that never
    yields is done at once, and the next one takes its place. Every round
    launches the gather of a new chunk, computes another whose gather was launched before and
    launches its scatter, then waits for the scatter of the one computed in the round before. So
    every transfer has a computation to hide under. The order of all phases depends on the number
    of chunks alone: ranks with equal chunks communicate in equal order.

    Args:
        chunks: started one after another, each no earlier than needed.
        ahead: gathers that are launched before the first computation, at least 1. At most
            `in_flight(ahead)` chunks are alive.
        meanwhile: other work, done once under the first gathers.
    """
    if ahead < 1:
        raise ValueError(f"ahead must be at least 1, got {ahead}")
    waiting = iter(chunks)
    gathering: deque[Phases] = deque()
    scattering: deque[Phases] = deque()

    def start() -> None:
        for chunk in waiting:
            if _goes_on(chunk):
                gathering.append(chunk)
                return

    try:
        for _ in range(ahead):
            start()
        meanwhile()
        while gathering or scattering:
            start()
            computed = gathering.popleft() if gathering else None
            if computed is not None and _goes_on(computed):
                scattering.append(computed)
            while len(scattering) > (computed is not None):
                finishing = scattering.popleft()
                if _goes_on(finishing):
                    raise RuntimeError("a chunk yields at most twice")
    finally:
        for chunk in (*gathering, *scattering):
            chunk.close()


def in_flight(ahead: int) -> int:
    """The largest number of chunks that `run_pipeline` keeps alive."""
    return ahead + 2


def _goes_on(chunk: Phases) -> bool:
    """Take a chunk to its next yield; False at its end."""
    return next(chunk, chunk) is None
