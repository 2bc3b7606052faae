"""Slots, generations and signals of an arena that threads of one process share, on random plans."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from .test_sharing import module_of


def threads_of(opt: Any, counts, slots: int, timeout_ms: int = 20000) -> list[Any]:
    """The transports of some ranks as threads, after their handshake.

    Args:
        opt: the package.
        counts: per exchange, per sender, per receiver the bytes that travel.
        slots: of each arena.
        timeout_ms: of every wait.
    """
    arena, p2p = (
        module_of(opt, "distributed.symmetric.arena"),
        module_of(opt, "distributed.symmetric.p2p"),
    )
    messages = module_of(opt, "distributed.message_layout")
    ranks = len(counts[0])
    slot = max(sum(of[s][r] for s in range(ranks)) for of in counts for r in range(ranks))
    size = arena.arena_bytes(ranks, slots, slot)
    memories = [torch.zeros(size, dtype=torch.uint8) for _ in range(ranks)]
    arenas = [arena.Arena(rank, memories, slots, slot, timeout_ms) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        found = [*pool.map(lambda one: one.handshake(arena.digest(repr(counts))), arenas)]
    assert found == [None] * ranks
    transports = []
    for rank, one in enumerate(arenas):
        pairs = [
            (
                messages.Message((), tuple(of[rank])),
                messages.Message((), tuple(of[sender][rank] for sender in range(ranks))),
            )
            for of in counts
        ]
        offsets = {
            id(coming): [sum(of[s][r] for s in range(rank)) for r in range(ranks)]
            for (_, coming), of in zip(pairs, counts, strict=True)
        }
        transport = p2p.PeerToPeer(one, offsets)
        transport.pairs = pairs
        transports.append(transport)
    return transports


def content(step: int, exchange: int, sender: int, receiver: int, size: int) -> torch.Tensor:
    """Bytes that say where they belong."""
    generator = torch.Generator().manual_seed(hash((step, exchange, sender, receiver)) % 2**31)
    return torch.randint(0, 256, (size,), generator=generator, dtype=torch.uint8)


@st.composite
def plans(draw) -> tuple[list[list[list[int]]], int, int]:
    """Bytes per exchange, sender and receiver; slots; exchanges alive at once."""
    ranks = draw(st.integers(2, 4))
    sizes = st.sampled_from([0, 16, 16, 48, 4096, 100000])
    matrix = st.lists(
        st.lists(sizes, min_size=ranks, max_size=ranks), min_size=ranks, max_size=ranks
    )
    counts = draw(st.lists(matrix, min_size=1, max_size=9))
    alive = draw(st.integers(1, 4))
    return counts, draw(st.integers(2, 5)), alive


def run_steps(transport, counts, alive: int, seed: int, steps: int = 3) -> list[str]:
    """Exchange and check everything; what was wrong."""
    rank, ranks, wrong = transport.arena.rank, transport.arena.ranks, []
    late = random.Random(seed * 10 + rank)
    order = random.Random(seed)  # messages are used in one order on all ranks

    def use(step, number, lease, inbox) -> None:
        expected = [content(step, number, s, rank, counts[number][s][rank]) for s in range(ranks)]
        if late.random() < 0.2:
            time.sleep(late.random() / 200)
        if not torch.equal(inbox, torch.cat(expected)):
            wrong.append(f"step {step}, exchange {number}, rank {rank}")
        inbox.fill_(255)  # whoever still reads it would see
        lease.give()

    for step in range(steps):
        transport.begin(early=False)
        held = []
        for number, (going, coming) in enumerate(transport.pairs):
            outbox = torch.cat(
                [content(step, number, rank, r, counts[number][rank][r]) for r in range(ranks)]
            )
            lease = transport.inbox(coming)
            while lease is None:  # no slot is free on any rank
                use(*held.pop(order.randrange(len(held))))
                lease = transport.inbox(coming)
            if late.random() < 0.2:
                time.sleep(late.random() / 200)
            transport.exchange(going, outbox, coming, lease.bytes).wait()
            held.append((step, number, lease, lease.bytes))
            if len(held) > alive:
                use(*held.pop(order.randrange(len(held))))
        for entry in held:
            use(*entry)
        transport.check()
    return wrong


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(plan=plans(), seed=st.integers(0, 2**16))
def test_every_byte_arrives_where_it_belongs(opt, plan, seed) -> None:
    """Whatever the order in which slots are used, and however late a rank is."""
    counts, slots, alive = plan
    transports = threads_of(opt, counts, slots)
    with ThreadPoolExecutor(len(transports)) as pool:
        found = pool.map(lambda one: run_steps(one, counts, alive, seed), transports)
        assert [*found] == [[]] * len(transports)


def test_enough_slots_need_no_barrier(opt) -> None:
    """Signals say that slots are read; with a slot too few an empty exchange says it."""
    counts = [[[16] * 2] * 2] * 12
    for slots, barriers in ((4, 0), (2, 10)):
        transports = threads_of(opt, counts, slots)
        with ThreadPoolExecutor(2) as pool:
            for found in pool.map(lambda one: run_steps(one, counts, 1, 0, steps=1), transports):
                assert found == []
        assert {one.barriers for one in transports} == {barriers}


@pytest.mark.sees_defect("a rank that gave up waiting goes on to send what it made of nothing")
def test_a_late_rank_is_an_error_and_what_it_missed_is_zeros(opt) -> None:
    """Its message is zeros, its signal stays, and the third rank does not take what it sends."""
    counts = [[[16] * 3] * 3] * 3
    transports = threads_of(opt, counts, 3, timeout_ms=300)
    begun = threading.Barrier(2)

    def run(rank: int) -> tuple[str, list[int], float]:
        transport, seconds, sums = transports[rank], time.monotonic(), []
        for going, coming in transport.pairs:
            lease = transport.inbox(coming)
            lease.bytes.fill_(7)
            outbox = torch.ones(going.size, dtype=torch.uint8)
            if not sums and rank == 1:
                begun.wait()
                time.sleep(0.15)  # rank 0 gives up before this one does
            elif not sums:
                begun.wait()
            transport.exchange(going, outbox, coming, lease.bytes).wait()
            sums.append(int(lease.bytes.sum()))
        with pytest.raises(RuntimeError, match="did not arrive at an exchange") as raised:
            transport.check()
        assert transport.alive.item() == 0
        return str(raised.value), sums, time.monotonic() - seconds

    with ThreadPoolExecutor(2) as pool:
        (first, sums, seconds), (second, others, _) = pool.map(run, (0, 1))
    assert first.startswith(("rank 1", "rank 2"))
    assert second.startswith(("rank 0", "rank 2"))
    assert sums == others == [0, 0, 0]
    assert seconds < 2  # only the first wait takes its time


def test_a_signal_that_comes_late_is_no_excuse(opt) -> None:
    """What went wrong stays wrong until there is a new arena."""
    transports = threads_of(opt, [[[16] * 2] * 2] * 2, 3, timeout_ms=100)
    first, second = transports

    def step(transport, number: int) -> int:
        going, coming = transport.pairs[number]
        lease = transport.inbox(coming)
        transport.exchange(going, torch.ones(32, dtype=torch.uint8), coming, lease.bytes)
        return int(lease.bytes.sum())

    assert step(first, 0) == 0  # the second is not there
    assert step(second, 0) == 32  # it came, and finds what the first had sent
    with ThreadPoolExecutor(2) as pool:
        assert [*pool.map(lambda one: step(one, 1), transports)] == [0, 0]
    for transport in transports:
        with pytest.raises(RuntimeError, match="did not arrive"):
            transport.check()


def test_the_handshake_sees_a_wrong_arena(opt) -> None:
    """Another plan, an arena that is another rank's, and a rank that does not come."""
    arena = module_of(opt, "distributed.symmetric.arena")
    size = arena.arena_bytes(2, 2, 64)

    def shake(plans, swapped: bool = False, timeout_ms: int = 5000) -> list[str | None]:
        memories = [torch.zeros(size, dtype=torch.uint8) for _ in range(2)]
        stranger = torch.zeros(size, dtype=torch.uint8)
        views = [memories, [stranger, memories[1]] if swapped else memories]
        arenas = [arena.Arena(rank, views[rank], 2, 64, timeout_ms) for rank in range(2)]
        with ThreadPoolExecutor(2) as pool:
            return [*pool.map(lambda one, plan: one.handshake(plan), arenas, plans)]

    same = arena.digest("a plan")
    assert shake([same, same]) == [None, None]
    assert shake([same, arena.digest("another")])[0] == "ranks 0 and 1 have different plans"
    late = shake([same, same], swapped=True, timeout_ms=200)
    assert late[0] == "rank 1 wrote nothing within 200 ms"


def test_a_closed_arena_lets_go(opt) -> None:
    transports = threads_of(opt, [[[16] * 2] * 2], 2)
    transports[0].arena.close()
    transports[0].arena.close()
    assert not transports[0].arena._memories


@pytest.mark.sees_defect("a captured exchange waits for one number in all replays")
def test_an_exchange_is_not_captured(opt, monkeypatch) -> None:
    (one, _) = threads_of(opt, [[[16] * 2] * 2], 2)
    one.arena._stream, launched = object(), one.arena.launched
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
        one.arena.exchange([], [], None, torch.empty(0))
    assert one.arena.launched == launched
