"""Order and signals of a chain of squares: its list of tickets, its buffers, and a model of a run.

The list and the rule of buffers are the kernel's own (kernels-src/products/chain.h), compiled
for the host. The model is that of chain_sm90.cuh: dealers, producers, consumers and couriers are
agents with random timing, blocks appear whenever they like, and a tile must find its operands
stored.
"""

from __future__ import annotations

import ctypes
import itertools
import random
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..conftest import ROOT
from .test_pipeline_sm90 import CONSUMERS, WARPS, Barrier

OPERANDS = (0, 0, 1, 2, 2)  # of gram_polynomial


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    """The host build of chain.h."""
    library = tmp_path_factory.mktemp("probe") / "chain.so"
    compiler = shutil.which("g++")
    assert compiler, "the host build of the schedule needs g++"
    source = Path(__file__).with_name("chain_probe.cpp")
    command = [compiler, "-std=c++17", "-O2", "-Wall", "-shared", "-fPIC"]
    command += [f"-I{ROOT / 'kernels-src'}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.groups.restype = loaded.tickets.restype = ctypes.c_int64
    loaded.refused.restype = ctypes.c_char_p
    return loaded


def tickets(probe, m: int, matrices: int, groups: int, products: int = 5) -> list[tuple[int, ...]]:
    """(product, matrix, row, column) in the order of the tickets; tiles of 128 x 128."""
    count = probe.tickets(m, 128, 128, matrices, groups, products, None)
    found = (ctypes.c_int * (4 * count))()
    probe.tickets(m, 128, 128, matrices, groups, products, found)
    return [tuple(found[i : i + 4]) for i in range(0, len(found), 4)]


SHAPES = ((1, 1, 1), (128, 5, 2), (512, 7, 3), (513, 12, 1), (768, 13, 4), (1024, 3, 3))


@pytest.mark.parametrize(("m", "matrices", "groups"), SHAPES)
def test_every_tile_comes_once_and_behind_its_operands(probe, m, matrices, groups):
    """All tiles of M_j of a matrix have smaller tickets than any tile of M_j+1."""
    order = tickets(probe, m, matrices, groups)
    blocks = -(-m // 128)
    each = blocks * (blocks + 1) // 2
    assert len(set(order)) == len(order) == 5 * matrices * each
    assert all(row <= col < m and row % 128 == col % 128 == 0 for _, _, row, col in order)
    stored: dict[tuple[int, int], int] = {}
    for product, matrix, _, _ in order:
        assert product == 0 or stored[product - 1, matrix] == each
        stored[product, matrix] = stored.get((product, matrix), 0) + 1
    assert set(stored) == set(itertools.product(range(5), range(matrices)))


def test_groups_are_equal_and_one_behind_the_other(probe):
    for matrices, groups in ((128, 5), (48, 4), (7, 7), (10, 3)):
        sizes, seen = [], []
        for product, matrix, row, col in tickets(probe, 128, matrices, groups):
            assert (row, col) == (0, 0)
            if matrix not in seen and product == 0:
                seen.append(matrix)
            if product == 4 and len(seen) > sum(sizes):
                sizes.append(len(seen) - sum(sizes))  # the first last product of a group
        assert seen == list(range(matrices))
        assert sum(sizes) == matrices and len(sizes) == groups
        assert max(sizes) - min(sizes) <= 1


def test_a_group_has_tiles_for_every_multiprocessor_and_few_more(probe):
    """Between two thirds and three halves of so many, if there are so many."""
    for m in range(1, 1025, 37):
        blocks = -(-m // 128)
        each = blocks * (blocks + 1) // 2
        wanted = 132 * (2 + blocks / 2)
        for matrices in (1, 2, 7, 48, 128, 300, 5000):
            count = probe.groups(matrices, m, 132)
            assert 1 <= count <= matrices
            size = matrices // count  # of the smallest
            assert count == 1 or size * each >= 2 / 3 * wanted - each
            assert (matrices - 1) // count * each <= 1.5 * wanted + each
    # What was the fastest, or within one in a hundred of it, on an H200.
    measured = {(128, 512): 2, (64, 768): 2, (48, 768): 2, (24, 1024): 1, (12, 768): 1}
    measured |= {(256, 256): 2, (500, 128): 2}
    assert {key: probe.groups(*key, 132) for key in measured} == measured


def refused(probe, operands, places, buffers: int) -> str:
    numbers = ctypes.c_int64 * len(operands)
    return probe.refused(numbers(*operands), numbers(*places), len(operands), buffers).decode()


def intact(operands, places) -> bool:
    """Whether every product finds what it reads where its M was put, while later ones write."""
    memory, of = {0: 0}, [0, *places]
    for j, i in enumerate(operands):
        if memory.get(of[j]) != j or memory.get(of[i]) != i or places[j] in (of[j], of[i]):
            return False
        memory[places[j]] = j + 1
    return True


def test_a_place_is_refused_exactly_if_it_holds_what_is_read(probe):
    for operands in itertools.product(*(range(j + 1) for j in range(4))):
        for places in itertools.product(range(3), repeat=4):
            assert (refused(probe, operands, places, 3) == "") == intact(operands, places)
    assert "operand" in refused(probe, (0, 2), (1, 2), 3)
    assert "no buffer" in refused(probe, (0, 0), (1, 3), 3)


def test_python_puts_every_matrix_where_it_may_lie(probe, submodule):
    module = submodule("kernels.products.square_chain")
    assert (
        probe.most_squares(),
        probe.most_buffers(),
    ) == (module.MOST_SQUARES, module.MOST_BUFFERS)
    assert module.places_of(OPERANDS) == ([1, 2, 0, 1, 0], 3)
    for operands in itertools.product(*(range(j + 1) for j in range(probe.most_squares()))):
        places, count = module.places_of(operands)
        assert intact(operands, places)
        assert count <= probe.most_buffers()
        assert refused(probe, operands, places, count) == ""


class Chain:
    """One launch: tickets, counts of stored tiles, and blocks that a device may hold or not."""

    def __init__(self, order, each: int, *, drawn: bool = True, prompt: bool = True) -> None:
        self.order, self.each = order, each
        self.drawn = drawn  # tickets from one counter; else ticket t runs on block t mod blocks
        self.prompt = prompt  # a tile is counted behind it; else when the courier has its next
        self.next = self.finished = 0
        self.stored: dict[tuple[int, int], int] = {}

    def count(self, tile) -> None:
        self.stored[tile[:2]] = self.stored.get(tile[:2], 0) + 1
        self.finished += 1

    def ready(self, tile) -> bool:
        product, matrix = tile[:2]
        return product == 0 or self.stored.get((product - 1, matrix), 0) == self.each

    def block(self, number: int, blocks: int) -> list[Iterator[None]]:
        dealt = [Barrier(1) for _ in range(CONSUMERS)]
        taken = [Barrier(1 + WARPS + 1) for _ in range(CONSUMERS)]
        prepared = [Barrier(1) for _ in range(CONSUMERS)]
        finished = [Barrier(WARPS) for _ in range(CONSUMERS)]
        loaded: list = []
        staging: list = [None] * CONSUMERS
        mail = [None] * CONSUMERS
        agents = [self.deal(mail, dealt, taken, number, blocks)]
        agents.append(self.produce(mail, dealt, taken, loaded))
        for c in range(CONSUMERS):
            shared = prepared, finished, staging
            agents.append(self.consume(mail, dealt, taken, loaded, c, *shared))
            agents.append(self.carry(mail, dealt, taken, c, *shared))
        return agents

    def deal(self, mail, dealt, taken, number: int, blocks: int) -> Iterator[None]:
        ends = at = 0
        mine = itertools.count(number, blocks)
        while ends < CONSUMERS:
            ticket = self.next if self.drawn else next(mine)
            self.next += 1
            yield
            tile = self.order[ticket] if ticket < len(self.order) else None
            ends += tile is None
            while tile is not None and not self.ready(tile):
                yield
            slot, phase = at % CONSUMERS, at // CONSUMERS
            while not taken[slot].ended(phase % 2 ^ 1):
                yield
            mail[slot] = (at, tile)
            dealt[slot].arrive()
            at += 1

    def read(self, mail, at: int):
        number, tile = mail[at % CONSUMERS]
        assert number == at, "the mailbox was written over"
        return tile

    def produce(self, mail, dealt, taken, loaded) -> Iterator[None]:
        for at in itertools.count():
            slot, phase = at % CONSUMERS, at // CONSUMERS
            while not dealt[slot].ended(phase % 2):
                yield
            tile = self.read(mail, at)
            yield
            taken[slot].arrive()
            if tile is None:
                return
            assert self.ready(tile), "an operand is not stored"
            while len(loaded) > at + 3:  # the ring holds so much
                yield
            loaded.append(tile)

    def consume(self, mail, dealt, taken, loaded, consumer, prepared, finished, staging):
        for at in itertools.count(consumer, CONSUMERS):
            phase = at // CONSUMERS % 2
            while not dealt[consumer].ended(phase):
                yield
            tile = self.read(mail, at)
            for _ in range(WARPS):
                yield
                taken[consumer].arrive()
            if tile is None:
                return
            while len(loaded) <= at:
                yield
            assert loaded[at] == tile
            for _ in range(random.randrange(10)):  # products
                yield
            while not prepared[consumer].ended(phase):
                yield
            for _ in range(WARPS):
                assert staging[consumer] == ("C", tile), "C is not there"
                yield
                finished[consumer].arrive()
                yield

    def carry(self, mail, dealt, taken, consumer, prepared, finished, staging):
        waiting = None
        for at in itertools.count(consumer, CONSUMERS):
            phase = at // CONSUMERS % 2
            while not dealt[consumer].ended(phase):
                yield
            if waiting:
                self.count(waiting)
            tile = self.read(mail, at)
            yield
            taken[consumer].arrive()
            if tile is None:
                return
            staging[consumer] = "C", tile
            prepared[consumer].arrive()
            while not finished[consumer].ended(phase):
                yield
            for _ in range(random.randrange(10)):  # stores
                yield
            waiting = None if self.prompt else tile
            if self.prompt:
                self.count(tile)


def run(chains: list[Chain], blocks: int, places: int, seed: int) -> bool:
    """Whether all chains end on a device with `places` for blocks, each kept until it ends."""
    random.seed(seed)
    waiting = [(chain, number) for number in range(blocks) for chain in chains]
    held: list[list[Iterator[None]]] = []
    idle = 0
    while waiting or held:
        while waiting and len(held) < places:
            chain, number = waiting.pop(0)
            held.append(chain.block(number, blocks))
        before = sum(chain.finished for chain in chains), len(held)
        agents = random.choice(held)
        at = random.randrange(len(agents))
        if next(agents[at], agents) is agents:
            del agents[at]
            held = [block for block in held if block]
        same = (sum(chain.finished for chain in chains), len(held)) == before
        idle = idle + 1 if same else 0
        if idle > 20_000:
            return False
    assert all(chain.finished == len(chain.order) for chain in chains)
    return True


CASES = [(128, 3, 1), (128, 1, 1), (256, 2, 2), (384, 1, 1)]


@pytest.mark.parametrize(("m", "matrices", "groups"), CASES)
@pytest.mark.parametrize(("blocks", "places"), ((1, 1), (4, 4), (4, 3), (6, 2)))
def test_two_chains_end_wherever_their_blocks_run(probe, m, matrices, groups, blocks, places):
    """Also where some blocks begin only when others have ended."""
    order = tickets(probe, m, matrices, groups)
    each = len(order) // (5 * matrices)
    for seed in range(3):
        assert run([Chain(order, each), Chain(order, each)], blocks, places, seed)


def test_tiles_that_belong_to_blocks_deadlock(probe):
    """What tickets are for: a resident block may wait for a tile of one that cannot begin."""
    order = tickets(probe, 256, 2, 1)
    chains = [Chain(order, 3, drawn=False) for _ in range(2)]
    assert not run(chains, 4, 4, 0)


def test_a_count_that_waits_for_the_next_tile_deadlocks(probe):
    """What the last tile of M_j owes may be what its courier's next tile waits for."""
    order = tickets(probe, 128, 1, 1)
    assert not run([Chain(order, 1, prompt=False)], 2, 2, 0)
