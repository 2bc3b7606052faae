"""The signals of the grouped product on sm_90a, as a model with random timing.

A model of kernels-src/grouped_lora/load_sm90.cuh and product_sm90.cuh: a weight thread and three
row warps fill a stage, each for itself and at its own pace, eight consumer warps read it. A row
warp's copies end in any order; it signals a stage when it has waited for its own copies of it,
one stage late.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest

from .test_pipeline_sm90 import Barrier

ROW_WARPS = 3
READERS = 8


@dataclasses.dataclass
class Machine:
    """One block; `total` stages over all its tiles."""

    ring: int = 3
    total: int = 23
    lag: int = 1  # stages between the copies of a stage and its signal
    waits_for_copies: bool = True
    waits_for_release: bool = True
    copied: float = 0.3  # how often a copy ends
    tile: int = 5  # stages of a tile; a reader releases a stage when it has begun the next

    def __post_init__(self) -> None:
        slots = range(self.ring)
        self.full = [Barrier(1 + ROW_WARPS) for _ in slots]
        self.empty = [Barrier(READERS) for _ in slots]
        self.memory = [[None] * (1 + ROW_WARPS) for _ in slots]
        self.copies: list[tuple] = []  # (slot, part, content)
        self.reads = self.seen = 0

    def is_free(self, index: int) -> bool:
        phase, slot = divmod(index, self.ring)
        return not self.waits_for_release or self.empty[slot].ended(phase % 2 ^ 1)

    def weights(self) -> Iterator[None]:
        for index in range(self.total):
            while not self.is_free(index):
                yield
            self.full[index % self.ring].arrive(expected=1)
            self.copies.append((index % self.ring, 0, index))
            yield

    def rows(self, warp: int) -> Iterator[None]:
        part = 1 + warp
        for index in range(self.total + self.lag):
            if index < self.total:
                while not self.is_free(index):
                    yield
                self.copies.append((index % self.ring, part, index))
                yield
            done = index - self.lag
            if done >= 0:
                mine = (done % self.ring, part, done)
                while self.waits_for_copies and mine in self.copies:
                    yield
                self.full[done % self.ring].arrive()
                yield

    def consume(self) -> Iterator[None]:
        for index in range(self.total):
            phase, slot = divmod(index, self.ring)
            while not self.full[slot].ended(phase % 2):
                yield
            self.read(index)
            yield
            if index % self.tile > 0:
                self.release(index - 1)
                yield
            if index % self.tile == self.tile - 1 or index == self.total - 1:
                self.release(index)
                for _ in range(random.randrange(20)):  # the epilogue
                    yield

    def read(self, index: int) -> None:
        held = self.memory[index % self.ring]
        assert held == [index] * (1 + ROW_WARPS), f"stage {index} found {held}"
        self.reads += 1

    def release(self, index: int) -> None:
        self.read(index)  # nobody wrote over it meanwhile
        self.empty[index % self.ring].arrive()

    def run(self, seed: int) -> None:
        random.seed(seed)
        agents = [self.weights(), *(self.rows(warp) for warp in range(ROW_WARPS))]
        agents += [self.consume() for _ in range(READERS)]
        speeds = [random.choice((0.1, 0.4, 1.0)) for _ in agents]
        steps = 0
        while agents:
            steps += 1
            if self.copies and random.random() < self.copied:
                slot, part, index = self.copies.pop(random.randrange(len(self.copies)))
                self.memory[slot][part] = index
                if part == 0:
                    self.full[slot].complete(1)
            at = random.randrange(len(agents))
            if random.random() < speeds[at] and next(agents[at], self) is self:
                del agents[at], speeds[at]
            if steps % 20_000 == 0:
                assert self.reads > self.seen, f"{len(agents)} agents wait for ever"
                self.seen = self.reads
        assert self.reads == 2 * READERS * self.total


@pytest.mark.parametrize(("total", "tile"), [(1, 1), (2, 1), (3, 5), (23, 5), (24, 1), (40, 33)])
@pytest.mark.parametrize("ring", (3, 4))
def test_every_stage_is_read_whole(ring, total, tile):
    for seed in range(3):
        Machine(ring=ring, total=total, tile=tile).run(seed)


def fails(**options) -> bool:
    for seed in range(8):
        try:
            Machine(**options).run(seed)
        except AssertionError:
            return True
    return False


def test_a_row_warp_waits_for_its_copies():
    assert fails(waits_for_copies=False, copied=0.05)


def test_a_stage_is_filled_when_all_have_read_it():
    assert fails(waits_for_release=False)


def test_a_signal_two_stages_late_stops_a_ring_of_three():
    """A consumer releases a stage when the next has come, so one stage must be free for it."""
    assert fails(lag=2)
    Machine(ring=4, lag=2).run(0)
