"""Messages written into the memory of their receivers, which ranks share on CPUs."""

import contextlib
import copy
import os
import random
import signal
import time
from collections import Counter
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from ._arenas import Direct, Later, SharedMemory
from ._cases import CASES, Case, bits, expected_on
from ._ranks import on_ranks
from .test_faults import CLIP, build, give_step
from .test_graphs import told
from .test_shared_step import compare
from .test_sharing import (
    assert_as_alone,
    give,
    gradients,
    local,
    message_of,
    module_of,
    on_all,
    placed,
    plain_params,
)
from .test_unreduced import equals_one_rank

pytestmark = pytest.mark.dist


def compare_direct(opt: Any, cases: list[Case]) -> tuple[int, int]:
    with Direct(opt) as counted:
        compared = compare(opt, cases)
    assert not counted["without"]
    return compared, counted["p2p"]


def test_many_ranks_equal_one(ranks, world, device) -> None:
    generator = random.Random(200 + world)
    cases = [Case.random(generator, world, device.type) for _ in range(CASES[world] // 2)]
    for compared, exchanges in ranks(world).run(compare_direct, cases):
        assert compared > 4 * len(cases)
        assert exchanges > 2 * len(cases) or world == 1


@pytest.mark.parametrize("limit", [2**28, 20000])
@on_ranks()
def test_unreduced_equals_one_rank(opt: Any, world, limit) -> None:
    with Direct(opt) as counted:
        equals_one_rank(opt, "sum", limit)
    assert not counted["without"]
    assert counted["p2p"] > 8 or world == 1


TIMEOUT_MS = 1500
FAULTY = 1


def fault(
    opt: Any, held: str, how: str, number: int, on_threads: bool = False
) -> tuple[str, str, bool, bool, float]:
    """One rank is late or gone at an exchange. The others: an error, and whole parameters."""

    def made() -> tuple[Any, list[Any]]:
        optimizer, params = build(opt, held)
        optimizer.param_groups[0].update(weight_decay=0.1, cautious=False)
        give_step(params, held, 0)
        return optimizer, params

    def state(params: list[Any]) -> list[bytes]:
        return [bits(local(param.detach())) for param in params]

    twin, new = made()
    with Direct(opt):
        twin.step()
    optimizer, params = made()
    saved, old = optimizer.state_dict(), state(params)

    def before(exchange: int) -> None:
        if distributed.get_rank() == FAULTY and exchange == number:
            if how == "killed":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(2.5 * TIMEOUT_MS / 1000)

    later = Later(opt, number) if on_threads else contextlib.nullcontext()
    start = time.monotonic()
    with later, Direct(opt, before, timeout_ms=TIMEOUT_MS) as counted:
        optimizer.step()
        assert counted["p2p"] >= number
        heard = message_of(optimizer.state_dict)
        again = message_of(optimizer.step)
        seconds = time.monotonic() - start
        pairs = zip(state(params), old, state(new), strict=True)
        whole = all(found in either for found, *either in pairs)
        optimizer.load_state_dict(saved)  # goes on, with ranks that are still there
        moved = False
        if how == "late":
            give_step(params, held, 1)
            before_it = state(params)
            optimizer.step()
            optimizer.state_dict()
            moved = before_it != state(params)
    return heard, again, whole, moved, seconds


@pytest.mark.sees_defect("a rank that is late makes the others hang, or step with half a message")
@pytest.mark.parametrize(
    ("held", "how", "number", "on_threads"),
    [
        ("FSDP2", "late", 3, False),
        ("FSDP2", "late", 3, True),  # others go on to write to it while it reads
        ("FSDP2", "late", 4, True),
        ("FSDP2", "killed", 1, False),
        ("unreduced", "late", 1, False),
        ("unreduced", "late", 2, True),
        ("unreduced", "killed", 3, False),
    ],
)
def test_a_late_rank_is_an_error_in_time(doomed, held, how, number, on_threads) -> None:
    outcomes = doomed(3).outcomes(fault, held, how, number, on_threads, timeout=60)
    for rank, (answered, value) in enumerate(outcomes):
        if rank == FAULTY and how == "killed":
            assert not answered
            continue
        assert answered, value
        heard, again, whole, moved, seconds = value
        assert "did not arrive at an exchange" in heard
        assert "an earlier step failed midway" in again
        assert whole, f"a parameter of rank {rank} is neither old nor new"
        assert moved == (how == "late")
        assert seconds < 5 * TIMEOUT_MS / 1000 + 10


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


def few_slots(opt: Any, slots: int, prefetch: int) -> tuple[Counter[str], set[str]]:
    params = on_all("S0", [(24, 12)] * 16)
    config = opt.DistributedConfig(chunk_size=1, prefetch=prefetch)
    with Direct(opt, slots=slots or None) as counted:
        optimizer = opt.Muon(params, distributed=config)
        for step in range(3):
            give(params, gradients(params, step))
            optimizer.step()
    alone = plain_params([(24, 12)] * 16)
    single = opt.Muon(alone)
    for step in range(3):
        give(alone, gradients(alone, step))
        single.step()
    for param, other in zip(params, alone, strict=True):
        assert bits(local(param.detach())) == bits(expected_on(other, param, param.device_mesh))
    return counted, {row["transport"] for row in optimizer.comm_report()}


@pytest.mark.parametrize("prefetch", [1, 3])
def test_slots_are_as_many_as_a_step_needs(ranks, prefetch) -> None:
    """With those no exchange is only to say that a slot was read; one fewer takes such."""
    for counted, transports in ranks(2).run(few_slots, 0, prefetch):
        assert transports == {"p2p"}
        assert counted["barriers"] <= 3  # where a step begins
    for counted, transports in ranks(2).run(few_slots, prefetch + 2, prefetch):
        assert transports == {"p2p"} and counted["barriers"] > 3


def loads_alone(opt: Any, rank: int, held: str) -> int:
    """One rank loads its own state between two steps."""
    with Direct(opt) as counted:
        optimizer, params = build(opt, held)
        twin, expected = build(opt, held)
        for step in range(4):
            for one, of_one in ((optimizer, params), (twin, expected)):
                give_step(of_one, held, step)
                one.step()
            if step == 1 and distributed.get_rank() == rank:
                optimizer.load_state_dict(optimizer.state_dict())
        optimizer.state_dict()
    for param, other in zip(params, expected, strict=True):
        assert bits(local(param.detach())) == bits(local(other.detach()))
    return counted["p2p"]


@pytest.mark.sees_defect("a rank that loads state alone waits for others, which wait for it")
@pytest.mark.parametrize("held", ["FSDP2", "unreduced"])
def test_one_rank_loads_state(doomed, held) -> None:
    """Its plan is new and its messages are those of the one before, so that nobody is asked."""
    counts = doomed(3).run(loads_alone, 1, held, timeout=60)
    assert min(counts) > 16


def begins_anew(opt: Any, how: str) -> tuple[str, str, float]:
    """One rank has another optimizer than before, of which the others know nothing."""
    params = on_all("S0")
    config = opt.DistributedConfig(transport="p2p", strict=True, timeout_ms=TIMEOUT_MS)
    with Direct(opt, timeout_ms=TIMEOUT_MS):
        optimizer = opt.Muon(params, distributed=config)
        give(params, gradients(params, 0))
        optimizer.step()
        if distributed.get_rank() == FAULTY:
            optimizer = opt.Muon(params, distributed=config)
        start, heard = time.monotonic(), message_of(optimizer.step)
        seconds, late = time.monotonic() - start, message_of(optimizer.state_dict)
        distributed.barrier()
        params = on_all("S0")
        optimizer = opt.Muon(params, distributed=config)
        give(params, gradients(params, 0))
        optimizer.step()
        optimizer.state_dict()
    assert_as_alone(opt, params, 1)
    return heard, late, seconds


@pytest.mark.sees_defect("a rank with a new plan waits for others, which do not have one")
def test_one_rank_begins_anew(doomed) -> None:
    """It raises at once, the others after their time; optimizers that are new on all ranks run."""
    answers = doomed(2).run(begins_anew, "anew", timeout=60)
    for rank, (heard, late, seconds) in enumerate(answers):
        if rank == FAULTY:
            assert "other ranks go on with the plan that they have" in heard
        else:
            assert heard == "none" and "did not arrive at an exchange" in late
        assert seconds < TIMEOUT_MS / 1000 + 5


class WithoutFirst(SharedMemory):
    """Memory of which rank 0 has none."""

    @staticmethod
    def facts(device: torch.device) -> dict[str, Any]:
        if distributed.get_rank() == 0:
            raise RuntimeError("no driver")
        return SharedMemory.facts(device)


def two_teams(opt: Any) -> tuple[str, float]:
    """Ranks 0 and 1 share some parameters, ranks 1 and 2 others; rank 0 cannot have p2p."""
    rank, params = distributed.get_rank(), []
    transport = module_of(opt, "distributed.transport").GroupTransport
    for ranks in ((0, 1), (1, 2)):
        group = distributed.new_group(ranks)
        if rank in ranks:
            mesh = DeviceMesh.from_group(group, "cpu", mesh=torch.tensor(ranks))
            params += placed(plain_params(), mesh, [Shard(0)])
    with Direct(opt, timeout_ms=TIMEOUT_MS):
        transport.memory = WithoutFirst
        optimizer = opt.Muon(params)
        give(params, gradients(params, 0))
        start = time.monotonic()
        heard = message_of(lambda: (optimizer.step(), optimizer.state_dict()))
    return heard, time.monotonic() - start


@pytest.mark.sees_defect("a team that cannot have p2p keeps its ranks from another team's set-up")
def test_all_teams_are_settled_before_one_raises(doomed) -> None:
    answers = doomed(3).run(two_teams, timeout=60)
    heard = [text for text, _ in answers]
    assert all(text.startswith("CommUnavailable: ") and "no driver" in text for text in heard[:2])
    assert "rank 0 of the group did not arrive at an exchange" in heard[2]
    assert max(seconds for _, seconds in answers) < TIMEOUT_MS / 1000 + 4


def work_of_an_exchange(opt: Any, text: str, counts: int) -> dict[str, Any]:
    """What is pushed and copied in a step of 8 matrices, two of each owner in a chunk."""
    world = distributed.get_world_size()
    arena = module_of(opt, "distributed.symmetric.arena")
    exchange = module_of(opt, "optimizers.sharded.exchange")
    params = on_all(text, [(8 * world, 16)] * counts)
    config = opt.DistributedConfig(torch.float32, chunk_size=2 * world)
    optimizer, found = opt.Muon(params, distributed=config), {"pushes": [], "in place": []}
    push, batch_of = arena.push, exchange.batch_of

    def pushed(targets, sources, **options):
        found["pushes"].append(len(targets))
        push(targets, sources, **options)

    def batch(chunk, inbox, **options):
        made = batch_of(chunk, inbox, **options)
        found["in place"].append(made.data_ptr() == inbox.data_ptr())
        return made

    with pytest.MonkeyPatch.context() as patch, Direct(opt) as counted:
        for step in range(2):
            give(params, gradients(params, step))
            if step:
                patch.setattr(arena, "push", pushed)
                patch.setattr(exchange, "batch_of", batch)
                before = counted["p2p"]
            optimizer.step()
        found["exchanges"] = counted["p2p"] - before
    alone = plain_params([(8 * world, 16)] * counts)
    single = opt.Muon(alone)
    for step in range(2):
        give(alone, gradients(alone, step))
        single.step()
    for one, other in zip(params, placed(alone, params[0].device_mesh, [Shard(0)]), strict=True):
        if text == "S0":
            assert bits(local(one.detach())) == bits(local(other.detach()))
    return found


@pytest.mark.parametrize("count", [2, 3])
def test_nothing_is_put_together_on_the_way_to_an_owner(ranks, count) -> None:
    """One copy and one signal per rank, the own rows, and no copy of the batch behind them."""
    for found in ranks(count).run(work_of_an_exchange, "S0", 4 * count):
        assert found["in place"] == [True, True]
        # Two gathers and two ways back: to every other rank a message, to every rank a signal, and
        # what stays here.
        assert found["pushes"] == [2 * count] * found["exchanges"] and found["exchanges"] == 4


def test_columns_are_put_together(ranks) -> None:
    for found in ranks(2).run(work_of_an_exchange, "S1", 8):
        assert found["in place"] == [False, False]


@pytest.mark.sees_defect("an optimizer whose copy steps goes back to the all-to-all without a word")
@on_ranks(2)
def test_a_copy_has_memory_of_its_own(opt: Any) -> Any:
    params, exchanges = on_all("S0"), []
    with Direct(opt) as counted:
        optimizer = opt.Muon(params)
        give(params, gradients(params, 0))
        optimizer.step()
        twin = copy.deepcopy(optimizer)
        give(twin.param_groups[0]["params"], gradients(params, 1))
        give(params, gradients(params, 1))
        for one in (twin, optimizer):
            before = counted["p2p"]
            one.step()
            exchanges.append(counted["p2p"] - before)
            assert {row["transport"] for row in one.comm_report()} == {"p2p"}
    assert_as_alone(opt, params, 2)
    assert_as_alone(opt, twin.param_groups[0]["params"], 2)
    first, second = tuple(exchanges)
    assert first == second > 0
    return second
