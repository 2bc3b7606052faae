"""Messages written into the memory of their receivers, which ranks share on CPUs."""

import contextlib
import copy
import os
import random
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from ._arenas import Direct, SharedMemory, arenas_on_threads, staged
from ._cases import CASES, Case, bits, device, local
from ._ranks import on_ranks
from .test_faults import CLIP, FAULTY, Training, alone, assert_answered
from .test_graphs import told
from .test_partition import (
    advance,
    assert_as_alone,
    give,
    gradients,
    message_of,
    module_of,
    on_all,
    placed,
    plain_params,
)
from .test_shared_step import compare
from .test_unreduced import equals_one_rank

pytestmark = pytest.mark.dist


@on_ranks()
def test_many_ranks_equal_one(opt, world, device) -> None:
    generator = random.Random(200 + world)
    cases = [Case.random(generator, world, device.type) for _ in range(CASES[world] // 2)]
    with Direct(opt) as counted:
        compare(opt, cases)
    assert not counted["without"]
    assert counted["p2p"] > 2 * len(cases) or world == 1


@pytest.mark.parametrize("limit", [2**28, 20000])
@on_ranks()
def test_unreduced_equals_one_rank(opt: Any, world, limit) -> None:
    with Direct(opt) as counted:
        equals_one_rank(opt, "sum", limit)
    assert not counted["without"]
    assert counted["p2p"] > 8 or world == 1


TIMEOUT_MS = 1500


def wait() -> None:
    if device() == "cuda":
        torch.cuda.synchronize()


def fault(
    opt: Any, held: str, how: str, number: int, timeout_ms: int, most: float, on_threads=False
) -> None:
    """One rank is late or gone at an exchange: an error on the others, before `most` seconds.

    Every parameter is old or new then.
    """
    expected = alone(opt, 1)
    with staged(opt):
        with Direct(opt):  # everything is loaded
            warm = Training(opt, held)
            warm.step(0)
            warm.optimizer.state_dict()
        training = Training(opt, held)
        old, new = training.bits(), training.bits_of(expected)
        saved = training.optimizer.state_dict()
        training.give(0)
        wait()
        distributed.barrier()
        faulty = distributed.get_rank() == FAULTY

        def before(exchange: int) -> None:
            if faulty and exchange == number:
                if how == "late":
                    time.sleep((2.5 if device() == "cpu" else 1.4) * timeout_ms / 1000)
                elif how == "killed before":
                    os.kill(os.getpid(), signal.SIGKILL)

        direct = Direct(opt, before, timeout_ms=timeout_ms)
        threads = arenas_on_threads(opt, number) if on_threads else contextlib.nullcontext()
        start = time.monotonic()
        with threads, direct as counted:
            if faulty and how in ("killed during", "killed after"):
                inner = direct.engine.exchange

                def exchange(*arguments):
                    done = inner(*arguments)
                    if counted["p2p"] == number:
                        if how == "killed after":
                            time.sleep(0.3)
                        os.kill(os.getpid(), signal.SIGKILL)
                    return done

                direct.engine.exchange = exchange
            training.optimizer.step()
            assert counted["p2p"] >= number
            heard = message_of(training.optimizer.state_dict)
            seconds = time.monotonic() - start
            again = message_of(training.optimizer.step)
            found = training.bits()
            if how == "late":
                training.optimizer.load_state_dict(saved)
                training.step(1)
                training.optimizer.state_dict()
                assert training.bits() != found
    torch.zeros(1, device=device()).add_(1).item()  # the context lives
    assert "did not arrive at an exchange" in heard
    assert "an earlier step failed midway" in again
    assert all(one in both for one, *both in zip(found, old, new, strict=True))
    assert seconds < most


@pytest.mark.sees_defect("a rank that is late makes the others hang, or step with half a message")
@pytest.mark.parametrize(
    ("held", "how", "number", "on_threads"),
    [
        ("FSDP2", "late", 3, False),
        ("FSDP2", "late", 3, True),  # others go on to write to it while it reads
        ("FSDP2", "late", 4, True),
        ("FSDP2", "killed before", 1, False),
        ("unreduced", "late", 1, False),
        ("unreduced", "late", 2, True),
        ("unreduced", "killed before", 3, False),
    ],
)
def test_a_late_rank_is_an_error_in_time(doomed, held, how, number, on_threads) -> None:
    arguments = (held, how, number, TIMEOUT_MS, 5 * TIMEOUT_MS / 1000 + 10, on_threads)
    outcomes = doomed(3).outcomes(fault, *arguments, timeout=60)
    assert_answered(outcomes, but_faulty=how != "late")


@pytest.mark.parametrize(
    ("form", "wire", "inferring"),
    [
        ("shards", torch.float16, True),
        ("unreduced", torch.float32, True),
        ("unreduced", torch.float16, False),
    ],
    ids=str,
)
@on_ranks(2)
def test_stages_are_replayed_between_exchanges(opt: Any, form, wire, inferring) -> None:
    """Messages are where they were; plans change, and the arena stays."""
    with Direct(opt) as counted:
        replayed = told(opt, form, wire, inferring=inferring)["replayed"]
    assert not counted["without"]
    assert replayed > 100 and counted["p2p"] > 100


@on_ranks(2)
def test_a_step_that_failed_clips_nothing(opt: Any) -> None:
    names = ("layers.0.attn.q_proj.weight", "layers.0.attn.k_proj.weight")
    params = on_all("S0", [(8, 6), (8, 6)])
    groups = [{"kind": "muon", "params": params, "names": names, "lr": 0.1}]
    optimizer = opt.MuonAdamW(groups, clip_config=CLIP)
    give(params, gradients(params, 0))
    old = [bits(local(param.detach())) for param in params]

    def before(exchange: int) -> None:
        if distributed.get_rank() == FAULTY and exchange == 1:
            time.sleep(2.5 * TIMEOUT_MS / 1000)

    with Direct(opt, before, timeout_ms=TIMEOUT_MS):
        optimizer.step(qk_logits={0: torch.tensor([4.0, 4.0])})
        heard = message_of(optimizer.state_dict)
    assert "did not arrive at an exchange" in heard
    assert old == [bits(local(param.detach())) for param in params]


@pytest.mark.parametrize("prefetch", [1, 3])
@on_ranks(2)
def test_slots_are_as_many_as_a_step_needs(opt: Any, prefetch) -> None:
    """With those no exchange is only to say that a slot was read; one fewer takes such."""
    config = opt.DistributedConfig(chunk_size=1, prefetch=prefetch)
    for slots in (None, prefetch + 2):
        params = on_all("S0", [(24, 12)] * 16)
        with Direct(opt, slots=slots) as counted:
            optimizer = opt.Muon(params, distributed=config)
            advance(optimizer, params, 0, 1, 2)
        assert_as_alone(opt, params, 3, [(24, 12)] * 16)
        assert {row["transport"] for row in optimizer.comm_report()} == {"p2p"}
        # Three where a step begins.
        assert counted["barriers"] <= 3 if slots is None else counted["barriers"] > 3


def loads_alone(opt: Any, held: str) -> None:
    """One rank loads its own state between two steps."""
    with Direct(opt) as counted:
        training, twin = Training(opt, held), Training(opt, held)
        for step in range(4):
            training.step(step)
            twin.step(step)
            if step == 1 and distributed.get_rank() == FAULTY:
                training.optimizer.load_state_dict(training.optimizer.state_dict())
        training.optimizer.state_dict()
    assert training.bits() == twin.bits()
    assert counted["p2p"] > 16


@pytest.mark.sees_defect("a rank that loads state alone waits for others, which wait for it")
@pytest.mark.parametrize("held", ["FSDP2", "unreduced"])
def test_one_rank_loads_state(doomed, held) -> None:
    """Its plan is new and its messages are those of the one before, so that nobody is asked."""
    doomed(3).run(loads_alone, held, timeout=60)


def begins_anew(opt: Any) -> None:
    """One rank has another optimizer than before, of which the others know nothing."""
    params = on_all("S0")
    config = opt.DistributedConfig(transport="p2p", strict=True, timeout_ms=TIMEOUT_MS)
    with Direct(opt, timeout_ms=TIMEOUT_MS):
        optimizer = opt.Muon(params, distributed=config)
        advance(optimizer, params, 0)
        if distributed.get_rank() == FAULTY:
            optimizer = opt.Muon(params, distributed=config)
        start, heard = time.monotonic(), message_of(optimizer.step)
        seconds, late = time.monotonic() - start, message_of(optimizer.state_dict)
        distributed.barrier()
        params = on_all("S0")
        optimizer = opt.Muon(params, distributed=config)
        advance(optimizer, params, 0)
        optimizer.state_dict()
    assert_as_alone(opt, params, 1)
    assert seconds < TIMEOUT_MS / 1000 + 5
    if distributed.get_rank() == FAULTY:
        assert "other ranks go on with the plan that they have" in heard
    else:
        assert heard == "none" and "did not arrive at an exchange" in late


@pytest.mark.sees_defect("a rank with a new plan waits for others, which do not have one")
def test_one_rank_begins_anew(doomed) -> None:
    """It raises at once, the others after their time; optimizers that are new on all ranks run."""
    doomed(2).run(begins_anew, timeout=60)


class WithoutFirst(SharedMemory):
    """Memory of which rank 0 has none."""

    @staticmethod
    def facts(device: torch.device, **options: bool) -> dict[str, Any]:
        if distributed.get_rank() == 0:
            raise RuntimeError("no driver")
        return SharedMemory.facts(device)


def two_teams(opt: Any) -> None:
    """Ranks 0 and 1 share some parameters, ranks 1 and 2 others; rank 0 cannot have p2p."""
    rank, params = distributed.get_rank(), []
    transport = module_of(opt, "distributed.transport").GroupTransport
    for ranks in ((0, 1), (1, 2)):
        group = distributed.new_group(ranks)
        if rank in ranks:
            mesh = DeviceMesh.from_group(group, "cpu", mesh=torch.tensor(ranks))
            params += placed(plain_params(), mesh, "S0")
    with Direct(opt, timeout_ms=TIMEOUT_MS):
        transport.memory = WithoutFirst
        optimizer = opt.Muon(params)
        give(params, gradients(params, 0))
        start = time.monotonic()
        heard = message_of(lambda: (optimizer.step(), optimizer.state_dict()))
    assert time.monotonic() - start < TIMEOUT_MS / 1000 + 4
    if rank == 2:
        assert "rank 0 of the group did not arrive at an exchange" in heard
    else:
        assert heard.startswith("CommUnavailable: ") and "no driver" in heard


@pytest.mark.sees_defect("a team that cannot have p2p keeps its ranks from another team's set-up")
def test_all_teams_are_settled_before_one_raises(doomed) -> None:
    doomed(3).run(two_teams, timeout=60)


@pytest.mark.parametrize(("text", "world"), [("S0", 2), ("S0", 3), ("S1", 2)])
@on_ranks()
def test_nothing_is_put_together_on_the_way_to_an_owner(opt, text, world) -> None:
    """One copy and one signal per rank, the own rows, and no copy of the batch behind them.

    Of rows, in a step in which each owner has two matrices in a chunk; columns are put together.
    """
    arena = module_of(opt, "distributed.arena")
    exchange = module_of(opt, "optimizers.sharded.exchange")
    shapes = [(8 * world, 16)] * 4 * world
    params = on_all(text, shapes)
    config = opt.DistributedConfig(torch.float32, chunk_size=2 * world)
    optimizer, pushes, in_place = opt.Muon(params, distributed=config), [], []
    push, batch_of = arena.push, exchange.batch_of

    def pushed(targets, sources, **options):
        pushes.append(len(targets))
        push(targets, sources, **options)

    def batch(chunk, inbox, **options):
        made = batch_of(chunk, inbox, **options)
        in_place.append(made.data_ptr() == inbox.data_ptr())
        return made

    with pytest.MonkeyPatch.context() as patch, Direct(opt) as counted:
        for step in range(2):
            give(params, gradients(params, step))
            if step:
                patch.setattr(arena, "push", pushed)
                patch.setattr(exchange, "batch_of", batch)
                before = counted["p2p"]
            optimizer.step()
        assert counted["p2p"] - before == 4
    assert_as_alone(opt, params, 2, shapes)
    assert in_place == [text == "S0"] * 2
    # Two gathers and two ways back: to every other rank a message, to every rank a signal, and what
    # stays here.
    assert pushes == [2 * world] * 4


@pytest.mark.sees_defect("an optimizer whose copy steps goes back to the all-to-all without a word")
@on_ranks(2)
def test_a_copy_has_memory_of_its_own(opt: Any) -> Any:
    params, exchanges = on_all("S0"), []
    with Direct(opt) as counted:
        optimizer = opt.Muon(params)
        advance(optimizer, params, 0)
        for one in (copy.deepcopy(optimizer), optimizer):
            before, of_one = counted["p2p"], one.param_groups[0]["params"]
            advance(one, of_one, 1)
            exchanges.append(counted["p2p"] - before)
            assert {row["transport"] for row in one.comm_report()} == {"p2p"}
            assert_as_alone(opt, of_one, 2)
    first, second = exchanges
    assert first == second > 0
    return second


def messages_between(opt: Any, counts, rank: int) -> tuple[list[Any], dict[int, Any], int]:
    """What a rank sends and gets per exchange, the places of its messages, and the most bytes.

    `counts` has, per exchange, per sender, per receiver the bytes that travel.
    """
    message, ranks = module_of(opt, "distributed.message_layout").Message, len(counts[0])
    pairs, offsets = [], {}
    for of in counts:
        coming = message((), tuple(of[sender][rank] for sender in range(ranks)))
        pairs.append((message((), tuple(of[rank])), coming))
        offsets[id(coming)] = [sum(of[s][r] for s in range(rank)) for r in range(ranks)]
    largest = max(sum(of[s][r] for s in range(ranks)) for of in counts for r in range(ranks))
    return pairs, offsets, largest


def threads_of(opt: Any, counts, slots: int, timeout_ms: int = 20000) -> list[Any]:
    """The transports of some ranks as threads, after their handshake."""
    arena = module_of(opt, "distributed.arena")
    engine, ranks = module_of(opt, "distributed.p2p").PeerToPeer, len(counts[0])
    places = [messages_between(opt, counts, rank) for rank in range(ranks)]
    slot = places[0][2]
    size = arena.arena_bytes(ranks, slots, slot)
    memories = [torch.zeros(size, dtype=torch.uint8) for _ in range(ranks)]
    arenas = [arena.Arena(rank, memories, slots, slot, timeout_ms) for rank in range(ranks)]
    with ThreadPoolExecutor(ranks) as pool:
        found = [*pool.map(lambda one: one.handshake(arena.digest(repr(counts))), arenas)]
    assert found == [None] * ranks
    transports = []
    for one, (pairs, offsets, _) in zip(arenas, places, strict=True):
        transports.append(engine(one, offsets))
        transports[-1].pairs = pairs
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


def run_steps(transport, counts, alive: int, seed: int) -> list[str]:
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

    for step in range(3):
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
    arena = module_of(opt, "distributed.arena")
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


@pytest.mark.sees_defect("a captured exchange waits for one number in all replays")
def test_an_exchange_is_not_captured(opt, monkeypatch) -> None:
    (one, _) = threads_of(opt, [[[16] * 2] * 2], 2)
    one.arena._stream, launched = object(), one.arena.launched
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="cannot be captured in a CUDA graph"):
        one.arena.exchange([], [], None, torch.empty(0))
    assert one.arena.launched == launched
