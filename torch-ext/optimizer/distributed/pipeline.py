"""Chunks of work whose communication runs under the computation of other chunks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator

# What the third yield gives: how many more computations come before the scatter can be launched;
# None of one that is launched ahead of those which had to wait.
Phases = Generator[int | None, None, None]


def run_pipeline(
    chunks: Iterable[Phases],
    *,
    ahead: int = 1,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Run generators that have launched communication when they yield, and not yet waited for it.

    A chunk yields four times: it is open (small messages that its gather needs are on their way),
    its gather is launched, it is computed, its scatter is launched. Then it waits for the scatter.
    One that never yields is done at once, and the next one takes its place. Every round

        computes the oldest chunk whose gather was launched
        waits for the scatter of the round before
        opens a new chunk
        launches a scatter: what a gather needs first must not queue behind it
        launches the gather of the new chunk

    so that every transfer has a computation to hide under. The order of all phases depends on the
    number of chunks and on what they yield: ranks with equal chunks communicate in equal order.

    Args:
        chunks: started one after another, each no earlier than needed.
        ahead: with one more, gathers that are launched before the first computation; at least 1.
            At most `in_flight(ahead)` chunks are alive that do not wait for others.
        meanwhile: other work, done once under the first gathers.
    """
    if ahead < 1:
        raise ValueError(f"ahead must be at least 1, got {ahead}")
    pipeline = _Pipeline(chunks)
    try:
        for _ in range(ahead):
            pipeline.launch_gather(pipeline.open())
        opened = pipeline.open()
        meanwhile()
        pipeline.launch_gather(opened)
        while pipeline.busy():
            pipeline.round()
    finally:
        pipeline.close()


def in_flight(ahead: int) -> int:
    """The largest number of chunks that `run_pipeline` keeps alive, if none waits for others."""
    return ahead + 2


class _Pipeline:
    """Chunks by their phase, each kind in order."""

    def __init__(self, chunks: Iterable[Phases]) -> None:
        self._waiting: Iterator[Phases] = iter(chunks)
        self._next = next(self._waiting, None)
        self._alive: set[Phases] = set()
        self._gathering: deque[Phases] = deque()
        # (chunk, the computation after which its scatter can be launched)
        self._computed: deque[tuple[Phases, int]] = deque()
        self._scattering: deque[Phases] = deque()
        self._computations = 0

    def busy(self) -> bool:
        return bool(self._gathering or self._computed or self._scattering)

    def open(self) -> Phases | None:
        """The next chunk that communicates, open."""
        while self._next is not None:
            chunk, self._next = self._next, next(self._waiting, None)
            self._alive.add(chunk)
            if self._goes_on(chunk):
                return chunk
        return None

    def launch_gather(self, chunk: Phases | None) -> None:
        if chunk is not None and self._goes_on(chunk):
            self._gathering.append(chunk)

    def round(self) -> None:
        if self._gathering:
            self._compute(self._gathering.popleft())
        opened = None
        if self._next is not None:  # its memory is that of the chunk which ends
            self._finish()
            opened = self.open()
        leaving = None
        if self._computed:
            chunk, ready = self._computed[0]
            if ready <= self._computations or not self._gathering:
                self._computed.popleft()
                leaving = chunk if self._goes_on(chunk) else None
        self.launch_gather(opened)
        self._finish()
        if leaving is not None:
            self._scattering.append(leaving)

    def close(self) -> None:
        for chunk in self._alive:
            chunk.close()

    def _compute(self, chunk: Phases) -> None:
        self._computations += 1
        later = next(chunk, self)
        if later is self:
            self._alive.discard(chunk)
        else:
            computed = chunk, self._computations + (later or 0)
            # What has its answer at once does not queue behind what waited for a later computation.
            (self._computed.appendleft if later is None else self._computed.append)(computed)

    def _finish(self) -> None:
        while self._scattering:
            if self._goes_on(self._scattering.popleft()):
                raise RuntimeError("a chunk yields at most four times")

    def _goes_on(self, chunk: Phases) -> bool:
        """Take a chunk to its next yield; False at its end."""
        if next(chunk, self) is self:
            self._alive.discard(chunk)
            return False
        return True
