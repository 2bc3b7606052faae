"""The signals between producer and consumers of the sm_90a kernels, as a model with random timing.

A model of kernels-src/sm90/product.cuh: every warp is an agent of its own, copies end
in any order, and a barrier tells phases by their parity alone, as mbarrier.try_wait.parity does.
What it must show: each warp reads the stage that it means, until it releases it, and all finish;
a consumer finishes a tile where its courier has brought its C, and what leaves is that tile.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator

import pytest

WARPS = 4  # of a consumer warpgroup
CONSUMERS = 2


@dataclasses.dataclass
class Barrier:
    """A phase ends when `arrivals` arrivals and all expected bytes came."""

    arrivals: int
    phase: int = 0
    pending: int = 0
    bytes: int = 0

    def __post_init__(self) -> None:
        self.pending = self.arrivals

    def ended(self, parity: int) -> bool:
        return self.phase % 2 != parity

    def arrive(self, expected: int = 0) -> None:
        assert self.pending > 0, "more arrivals than the phase takes"
        self.bytes += expected
        self.pending -= 1
        self._end()

    def complete(self, count: int) -> None:
        self.bytes -= count
        self._end()

    def sync(self) -> Iterator[None]:
        """Of a named barrier: arrive, then wait for the others."""
        phase = self.phase
        self.arrive()
        while self.phase == phase:
            yield

    def _end(self) -> None:
        if self.pending == 0 and self.bytes == 0:
            self.phase += 1
            self.pending = self.arrivals


@dataclasses.dataclass
class Machine:
    """The blocks of one cluster; every block has its own list of tiles of equally many stages."""

    ring: int
    turns: bool
    cluster: int = 1
    tiles: int = 5
    stages: int = 7
    rows_apart: tuple[bool, ...] = (True,)  # of tile after tile; where not, columns hold the rows
    waits_for_turn: bool = True
    waits_for_cluster: bool = True  # a stage is free when every block of the cluster released it
    waits_for_copies: bool = True  # the courier, until copies out have read, before it goes on
    waits_for_courier: bool = True
    reads_c: bool = True  # else the staging memory is only free

    def __post_init__(self) -> None:
        readers = (1 if self.turns else CONSUMERS) * WARPS
        readers *= self.cluster if self.waits_for_cluster else 1
        blocks = range(self.cluster)
        self.full = [[Barrier(1) for _ in range(self.ring)] for _ in blocks]
        self.empty = [[Barrier(readers) for _ in range(self.ring)] for _ in blocks]
        self.turn = [[Barrier(WARPS) for _ in range(CONSUMERS)] for _ in blocks]
        # slot -> what its rows and each cluster block's share of the columns hold
        shares = 1 + self.cluster
        self.memory = [[[None] * shares for _ in range(self.ring)] for _ in blocks]
        self.copies: list[tuple] = []  # (block, slot, share, content)
        self.origins = [[None] * self.ring for _ in blocks]
        consumers = [(block, consumer) for block in blocks for consumer in range(CONSUMERS)]
        self.c_there = {at: Barrier(1) for at in consumers}
        self.prepared = {at: Barrier(WARPS + 1) for at in consumers}
        self.finished = {at: Barrier(WARPS + 1) for at in consumers}
        self.staging = {at: [None] * WARPS for at in consumers}  # what each warp's part holds
        self.carried: list[tuple] = []  # copies: (consumer, content, whether it comes in)
        self.stored: list[tuple] = []
        self.reads = self.seen = 0

    def produce(self, block: int) -> Iterator[None]:
        for index in range(self.tiles * self.stages):
            phase, slot = divmod(index, self.ring)
            while not self.empty[block][slot].ended(phase % 2 ^ 1):
                yield
            if index % self.stages == 0:
                self.origins[block][slot] = index // self.stages
            apart = self.copies_rows(index)
            self.full[block][slot].arrive(expected=apart + self.cluster)
            if apart:
                self.copies.append((block, slot, 0, index))
            self.copies += [(to, slot, 1 + block, index) for to in range(self.cluster)]
            yield

    def copies_rows(self, index: int) -> bool:
        return self.rows_apart[index // self.stages % len(self.rows_apart)]

    def tiles_of(self, consumer: int) -> range:
        return range(consumer, self.tiles, CONSUMERS) if self.turns else range(self.tiles)

    def consume(self, block: int, consumer: int, warp: int) -> Iterator[None]:
        turn, at = int(consumer == 0), (block, consumer)
        for done, tile in enumerate(self.tiles_of(consumer)):
            if self.turns and self.waits_for_turn:
                while not self.turn[block][consumer].ended(turn):
                    yield
                turn ^= 1
            for stage in range(self.stages):
                index = tile * self.stages + stage
                phase, slot = divmod(index, self.ring)
                while not self.full[block][slot].ended(phase % 2):
                    yield
                if stage == 0:
                    assert self.origins[block][slot] == tile
                self.read(block, index)
                if self.turns and stage == self.stages - 1:
                    self.turn[block][consumer ^ 1].arrive()
                yield
                if stage > 0:
                    self.release(block, index - 1)
                yield
            self.release(block, index)
            if self.waits_for_courier:
                yield from self.prepared[at].sync()
            while self.reads_c and not self.c_there[at].ended(done % 2):
                yield
            for _ in range(random.randrange(40)):
                yield
            assert self.staging[at][warp] == ("C", tile), "C of another tile, or too early"
            self.staging[at][warp] = ("result", tile)
            self.finished[at].arrive()

    def carry(self, block: int, consumer: int) -> Iterator[None]:
        at = block, consumer
        for tile in self.tiles_of(consumer):
            yield from self.copies_read(at)
            if self.reads_c:
                self.c_there[at].arrive(expected=1)
                self.carried.append((at, ("C", tile), True))
            else:
                self.staging[at] = [("C", tile)] * WARPS
            if self.waits_for_courier:
                self.prepared[at].arrive()
            yield
            yield from self.finished[at].sync()
            self.carried.append((at, ("result", tile), False))
            yield
            yield from self.copies_read(at)
            self.staging[at] = [("mirror image", tile)] * WARPS
            self.carried.append((at, ("mirror image", tile), False))
            yield
        while any(copy[0] == at for copy in self.carried):
            yield

    def copies_read(self, at: tuple[int, int]) -> Iterator[None]:
        while self.waits_for_copies and any(copy[0] == at for copy in self.carried):
            yield

    def move(self) -> None:
        """Some copy of a courier, at once: in any order, as if each took its own time."""
        at, content, comes_in = self.carried.pop(random.randrange(len(self.carried)))
        if comes_in:
            self.staging[at] = [content] * WARPS
            self.c_there[at].complete(1)
        else:
            assert self.staging[at] == [content] * WARPS, f"{content} was gone before it left"
            self.stored.append((at, content))

    def read(self, block: int, index: int) -> None:
        held = self.memory[block][index % self.ring]
        first = not self.copies_rows(index)
        wanted = [index] * (1 + self.cluster)
        assert held[first:] == wanted[first:], f"stage {index} found {held}"
        self.reads += 1

    def release(self, block: int, index: int) -> None:
        self.read(block, index)  # nobody wrote over it meanwhile
        others = range(self.cluster) if self.waits_for_cluster else (block,)
        for other in others:
            self.empty[other][index % self.ring].arrive()

    def run(self, seed: int) -> None:
        random.seed(seed)
        blocks = range(self.cluster)
        agents = [self.produce(block) for block in blocks]
        agents += [
            self.consume(block, consumer, warp)
            for block, consumer in self.staging
            for warp in range(WARPS)
        ]
        agents += [self.carry(*at) for at in self.staging]
        speeds = [random.choice((0.1, 0.4, 1.0)) for _ in agents]
        steps = 0
        while agents:
            steps += 1
            if self.copies and random.random() < 0.5:
                to, slot, share, index = self.copies.pop(random.randrange(len(self.copies)))
                self.memory[to][slot][share] = index
                self.full[to][slot].complete(1)
            if self.carried and random.random() < 0.1:
                self.move()
            at = random.randrange(len(agents))
            if random.random() < speeds[at] and next(agents[at], self) is self:
                del agents[at], speeds[at]
            if steps % 20_000 == 0:
                assert self.reads > self.seen, f"{len(agents)} agents wait for ever"
                self.seen = self.reads
        assert not self.copies and not self.carried
        parts = self.tiles if self.turns else CONSUMERS * self.tiles
        assert len(set(self.stored)) == len(self.stored) == 2 * self.cluster * parts
        warps = WARPS * self.cluster * (1 if self.turns else CONSUMERS)
        assert self.reads == 2 * warps * self.tiles * self.stages


MACHINES = [
    {"ring": ring, "turns": turns, "cluster": cluster, "tiles": tiles, "stages": stages}
    for ring, turns, cluster in (
        *((3, False, 1), (4, False, 1), (3, False, 2), (5, True, 1), (7, True, 1), (5, True, 2)),
    )
    for tiles, stages in ((1, 1), (4, 1), (5, 3), (3, 8))
]


@pytest.mark.parametrize("options", MACHINES, ids=lambda o: "-".join(map(str, o.values())))
def test_every_stage_is_read_in_its_place(options):
    for seed in range(4):
        Machine(**options).run(seed)


@pytest.mark.parametrize("options", MACHINES, ids=lambda o: "-".join(map(str, o.values())))
def test_stages_of_one_operand_have_fewer_bytes(options):
    for seed in range(2):
        Machine(**options, rows_apart=(False, True, True)).run(seed)


def fails(**options) -> bool:
    for seed in range(20):
        try:
            Machine(**options).run(seed)
        except AssertionError:
            return True
    return False


def test_without_turns_a_consumer_takes_an_old_phase_for_its_own():
    """Two phases ahead have the same parity: the model sees what the turn's signal prevents."""
    assert fails(ring=3, turns=True, tiles=4, stages=12, waits_for_turn=False)


def test_a_stage_is_free_only_when_the_whole_cluster_has_read_it():
    assert fails(ring=3, turns=False, cluster=2, tiles=3, stages=9, waits_for_cluster=False)


@pytest.mark.parametrize("options", MACHINES, ids=lambda o: "-".join(map(str, o.values())))
def test_without_c_the_staging_memory_is_handed_over_too(options):
    for seed in range(2):
        Machine(**options, reads_c=False).run(seed)


@pytest.mark.parametrize("turns", [False, True])
@pytest.mark.parametrize("missing", ["waits_for_copies", "waits_for_courier"])
def test_the_staging_memory_has_one_owner_at_a_time(turns, missing):
    assert fails(ring=4, turns=turns, tiles=6, stages=2, reads_c=False, **{missing: False})
