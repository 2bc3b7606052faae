"""The pipelined all-gather without a GPU: its buffers and words among threads of one process."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import distributed

from ..conftest import module_fixture
from ..distributed._arenas import SharedMemory
from ..distributed._ranks import on_ranks
from ..distributed.test_partition import module_of

pipelined = module_fixture("tensor_parallel.pipelined")
arenas = module_fixture("distributed.arena")

ROWS, INNER, COLUMNS = 3, 8, 5
HALF = torch.bfloat16


def feeders(pipelined, arenas, ranks: int, timeout_ms: int = 20_000) -> list[Any]:
    """One per rank, on arenas that threads share."""
    size = pipelined.slot_bytes(ranks, ROWS, INNER)
    whole = arenas.arena_bytes(ranks, pipelined.BUFFERS, size)
    memories = [torch.zeros(whole, dtype=torch.uint8) for _ in range(ranks)]
    made = [
        arenas.Arena(rank, memories, pipelined.BUFFERS, size, timeout_ms) for rank in range(ranks)
    ]
    with ThreadPoolExecutor(ranks) as pool:
        assert [*pool.map(lambda arena: arena.handshake(b"gathered"), made)] == [None] * ranks
    return [pipelined.PipelinedAllGatherMatmul.over(arena, ROWS, INNER, HALF) for arena in made]


def part(call: int, rank: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * call + rank)
    return torch.randint(-3, 4, (ROWS, INNER), generator=generator).to(HALF)


B = torch.randint(-3, 4, (INNER, COLUMNS), generator=torch.Generator().manual_seed(0)).to(HALF)


def wrong_calls(made: list[Any], calls: int, pause=lambda rank: None) -> list[tuple[int, int]]:
    """(rank, call) of every product that is not the one of the gathered rows."""
    wrong = []

    def run(one: Any) -> None:
        for call in range(calls):
            pause(one.rank)
            exact = torch.cat([part(call, rank) for rank in range(len(made))]) @ B
            if not torch.equal(one(part(call, one.rank), B), exact):
                wrong.append((one.rank, call))

    with ThreadPoolExecutor(len(made)) as pool:
        list(pool.map(run, made))
    return wrong


@pytest.mark.parametrize("ranks", (2, 3, 4))
def test_every_call_has_the_rows_of_all_ranks(pipelined, arenas, ranks):
    made = feeders(pipelined, arenas, ranks)
    dice = random.Random(ranks)
    assert not wrong_calls(made, 40, lambda _: time.sleep(dice.choice((0, 0, 0.002))))
    for one in made:
        assert one.calls == 40 and one._words.tolist() == [40] * ranks
        one.check(wait=True)
        one.close()


@pytest.mark.parametrize(("buffers", "right"), ((2, True), (1, False)))
def test_two_buffers_are_what_a_slow_reader_needs(pipelined, arenas, monkeypatch, buffers, right):
    """With one, a fast rank overwrites what a slow one has waited for and not yet read."""
    monkeypatch.setattr(pipelined, "BUFFERS", buffers)
    product = pipelined.progress_matmul

    def slow(a, b, words, rank, *, epoch, timeout_ms, status, out, blocks):
        pipelined.wait_signals(words, epoch, timeout_ms, status)
        time.sleep(0.05 * (rank == 1))
        return product(a, b, words, rank, epoch=epoch, status=status, out=out)

    monkeypatch.setattr(pipelined, "progress_matmul", slow)
    wrong = wrong_calls(feeders(pipelined, arenas, 2), 10)
    assert (not wrong) == right


def test_words_begin_again_at_zero(pipelined, arenas):
    made = feeders(pipelined, arenas, 2)
    for one in made:
        one.calls = 2**32 - 3
        for words in (one._words, one._sent):
            words.view(torch.int32).fill_(-3)
    assert not wrong_calls(made, 6)
    assert made[0]._words.tolist() == [3, 3]


def test_a_rank_that_does_not_come_is_named_and_nobody_goes_on(pipelined, arenas):
    made = feeders(pipelined, arenas, 3, timeout_ms=300)
    assert not wrong_calls(made, 2)
    began = time.monotonic()
    came = [threading.Thread(target=one, args=(part(2, one.rank), B)) for one in made[:2]]
    for thread in came:
        thread.start()
    for thread in came:
        thread.join()
    assert time.monotonic() - began < 5
    for one in made[:2]:
        for call in (one.check, lambda one=one: one(part(3, one.rank), B)):
            with pytest.raises(RuntimeError, match="rank 2 of the group sent no rows within 300"):
                call()
    # The rank that comes late has the rows of the others for that call, and for no later one.
    made[2](part(2, 2), B)
    made[2].check()
    made[2](part(3, 2), B)
    with pytest.raises(RuntimeError, match="rank 0 of the group sent no rows"):
        made[2].check()


def test_a_rank_that_failed_sends_no_word(pipelined, arenas):
    """Its host may not know yet, and what it computed from may be worthless."""
    first, second = feeders(pipelined, arenas, 2, timeout_ms=100)
    first(part(0, 0), B)
    first.check = lambda: None
    first(part(1, 0), B)
    assert second._words.tolist() == [1, 0]


@pytest.mark.sees_defect("a rank that gave up writes over rows that a late one still multiplies")
def test_a_product_beside_one_that_gave_up_has_a_status(pipelined, arenas, monkeypatch):
    """Rank 0 gives up on call 2, and its call 3 writes what rank 1 multiplies in call 1."""
    first, second = feeders(pipelined, arenas, 2, timeout_ms=200)
    reads, written, product = threading.Event(), threading.Event(), pipelined.progress_matmul

    def slow(a, b, words, rank, *, epoch, **options):
        if rank == 1:
            pipelined.wait_signals(words, epoch, 10_000, options["status"])
            reads.set()
            assert written.wait(20)
        return product(a, b, words, rank, epoch=epoch, **options)

    monkeypatch.setattr(pipelined, "progress_matmul", slow)
    first.check = lambda: None  # its host does not know yet
    with ThreadPoolExecutor(1) as pool:
        late = pool.submit(second, part(0, 1), B)
        first(part(0, 0), B)
        assert reads.wait(20)
        for call in (1, 2):
            first(part(call, 0), B)
        written.set()
        found = late.result()
    exact = torch.cat([part(0, rank) for rank in range(2)]) @ B
    assert not torch.equal(found, exact)
    with pytest.raises(RuntimeError, match=r"rank 0 of the group .* or had given up"):
        second.check(wait=True)


def test_the_end_of_one_that_is_not_closed_waits(pipelined, arenas):
    one, _ = feeders(pipelined, arenas, 2)
    waited = []

    class Event:
        def synchronize(self) -> None:
            waited.append(self)

    one._last = pipelined.Done(Event())
    del one
    assert len(waited) == 1


WRONG = {
    "a_shard must be \\(rows, inner\\)": {"a_shard": torch.zeros(ROWS + 1, INNER, dtype=HALF)},
    "a_shard must be contiguous": {"a_shard": torch.zeros(INNER, ROWS, dtype=HALF).mT},
    "a_shard must have dtype bfloat16": {"a_shard": torch.zeros(ROWS, INNER)},
    "b must be \\(inner, N\\)": {"b": torch.zeros(INNER + 1, COLUMNS, dtype=HALF)},
    "b must have 2 dimensions": {"b": torch.zeros(INNER, dtype=HALF)},
    "b must be on the device": {"b": torch.zeros(INNER, COLUMNS, dtype=HALF, device="meta")},
}


@pytest.mark.parametrize("why", WRONG)
def test_refusals_send_nothing(pipelined, arenas, why):
    one, other = feeders(pipelined, arenas, 2)
    arguments = {"a_shard": part(0, 0), "b": B} | WRONG[why]
    with pytest.raises((TypeError, ValueError), match=why):
        one(**arguments)
    assert one.calls == 0 and other._words.tolist() == [0, 0]


def test_sizes_and_dtypes_are_checked_before_any_rank_is_asked(pipelined):
    make = pipelined.PipelinedAllGatherMatmul
    with pytest.raises(TypeError, match="dtype must be one of"):
        make(None, 4, 8, torch.float32, "cuda")
    with pytest.raises(ValueError, match="rows and inner must be positive"):
        make(None, 0, 8, HALF, "cuda")


@on_ranks(2)
def test_processes_make_it_together(opt) -> None:
    """Sizes are compared, what cannot be had is said, and in shared memory it runs."""
    rank, world = distributed.get_rank(), distributed.get_world_size()
    make = opt.tensor_parallel.PipelinedAllGatherMatmul
    with pytest.raises(ValueError, match="must be the same on all ranks"):
        make(None, ROWS + rank, INNER, HALF, "cpu")
    with pytest.raises(opt.CommUnavailable, match="no CUDA peers"):
        make(None, ROWS, INNER, HALF, "cpu")
    transport = module_of(opt, "distributed.transport").GroupTransport
    kept, transport.memory = transport.memory, SharedMemory
    try:
        product = make(distributed.group.WORLD, ROWS, INNER, HALF, "cpu", timeout_ms=20_000)
    finally:
        transport.memory = kept
    for call in range(5):
        exact = torch.cat([part(call, of) for of in range(world)]) @ B
        assert torch.equal(product(part(call, rank), B), exact)
    distributed.barrier()
    product.close()
