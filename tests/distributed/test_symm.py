"""p2p on GPUs: `make test-symm`, on one GPU for all ranks or more.

It has the bits of the all-to-all; a late or lost rank, another plan, no memory are errors on the
other ranks. A function runs many cases, since processes are slow to start, and says what failed.
Parts of them run beside each other: tools/symm_parts.py.
"""

import json
import os
import random
import time
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn

from ._arenas import Direct, staged
from ._cases import (
    Case,
    assert_tensors_equal,
    bits,
    device,
    local,
    mesh_of,
    run_alone,
    run_together,
    spread,
)
from .test_faults import FAULTY, Training, assert_answered
from .test_graphs import told
from .test_in_backward import trained
from .test_low_contention import collectives
from .test_p2p import fault, messages_between
from .test_partition import message_of, module_of
from .test_unreduced import equals_one_rank

pytestmark = [pytest.mark.gpu, pytest.mark.dist, pytest.mark.part("faults")]

CASES = {2: 45, 4: 35}  # of a batch
SOAKED = {2: 10000, 4: 2000}
_KEPT: dict[Any, Any] = {}  # arenas of this rank
two_ranks = pytest.mark.part("two ranks")


def two_or_four(four: str = "four ranks") -> pytest.MarkDecorator:
    """Parametrizes `count`; the tests of four ranks are of the part `four`."""
    each = [pytest.param(2, marks=two_ranks), pytest.param(4, marks=pytest.mark.part(four))]
    return pytest.mark.parametrize("count", each)


def write_log(name: str, answers: Any) -> None:
    """Everything that the ranks said, beside the one line of the test."""
    if folder := os.environ.get("OUT"):
        path = Path(folder) / f"symm-{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(answers, indent=1, default=str))


def compare_cases(opt: Any, cases: list[Case]) -> dict[str, Any]:
    found: dict[str, Any] = {"compared": 0, "exchanges": 0, "failed": [], "not_alone": []}
    start = time.monotonic()
    with staged(opt):
        for number, case in enumerate(cases):
            try:
                with Direct(opt, kept=_KEPT) as counted:
                    direct = run_together(opt, case)
                found["exchanges"] += counted["p2p"]
                with Direct(opt, transport="nccl") as counted:
                    plain = run_together(opt, case)
                assert not counted["p2p"], "all-to-all: took p2p"
                found["compared"] += assert_tensors_equal(direct, plain, "all-to-all")
                if number % 4 == 0:
                    alone = run_alone(opt, case)
                    found["compared"] += assert_tensors_equal(direct, alone, "one rank")
            except AssertionError as error:  # others go on with the same exchanges
                kind = "failed" if "all-to-all" in str(error) else "not_alone"
                found[kind].append(f"{case}: {error}")
            except Exception:
                found["failed"].append(f"{case}: {traceback.format_exc()}")
                break
    return found | {"cases": number + 1, "seconds": time.monotonic() - start}


@pytest.mark.parametrize("batch", range(4))
@two_or_four("random cases of four ranks")
def test_cases_have_the_bits_of_the_all_to_all(gpu_ranks, record_property, count, batch) -> None:
    """Meshes, shapes, dtypes, wires, options and missing gradients at random."""
    generator = random.Random(300 + 10 * count + batch)
    cases = [Case.random(generator, count, "cuda") for _ in range(CASES[count])]
    answers = gpu_ranks(count).run(compare_cases, cases, timeout=280)
    write_log(f"cases-{count}-{batch}", answers)
    print(f"{count} ranks:", {**answers[0], "failed": len(answers[0]["failed"])})
    record_property("random cases", answers[0]["cases"])
    for answer in answers:
        assert not answer["failed"], answer["failed"][:3]
        assert answer["cases"] == CASES[count]
        assert answer["exchanges"] > 2 * CASES[count]
        assert not answer["not_alone"], answer["not_alone"][:3]


def unreduced_direct(opt: Any, limit: int) -> int:
    with staged(opt), Direct(opt, kept=_KEPT) as counted:
        equals_one_rank(opt, "sum", limit)
    return counted["p2p"]


@two_or_four()
@pytest.mark.parametrize("limit", [2**28, 20000])
def test_unreduced_gradients(gpu_ranks, count, limit) -> None:
    assert min(gpu_ranks(count).run(unreduced_direct, limit)) > 8


def in_backward(opt: Any, pushed: int, silent: tuple[int, ...]) -> None:
    with staged(opt):
        trained(opt, 1, 1, True, pushed, silent)


@two_or_four()
@pytest.mark.parametrize(
    ("pushed", "silent"),
    [(0, ()), (2**40, ()), (0, (1, 2))],
    ids=["in place", "packed", "some ranks send in the step"],
)
def test_gradients_leave_in_backward(gpu_ranks, count, pushed, silent) -> None:
    """Ranks need not have sent equally many; without a GPU an exchange would wait for them."""
    gpu_ranks(count).run(in_backward, pushed, silent)


def replayed(opt: Any, form: str, wire: torch.dtype) -> tuple[int, int]:
    with staged(opt), Direct(opt, kept=_KEPT) as direct:
        counted = told(opt, form, wire)
    assert not direct["without"]
    return counted["replayed"], direct["p2p"]


@two_or_four()
@pytest.mark.parametrize("wire", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("form", ["shards", "unreduced"])
def test_replayed_stages(gpu_ranks, count, wire, form) -> None:
    answers = gpu_ranks(count).run(replayed, form, wire)
    write_log(f"replayed-{count}-{form}-{wire}", answers)
    for stages, exchanges in answers:
        assert stages > 100 and exchanges > 100


@two_or_four()
def test_low_contention_collectives(gpu_ranks, count) -> None:
    gpu_ranks(count).run(collectives)


def arena_of(opt: Any, slots: int, slot_bytes: int, timeout_ms: int = 20000, plan="soak") -> Any:
    """An arena of all ranks, and what is wrong with their handshake."""
    arena = module_of(opt, "distributed.arena")
    memory = module_of(opt, "distributed.arena").SymmetricMemory
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    place = torch.device("cuda", torch.cuda.current_device())
    mine = memory.allocate(arena.arena_bytes(ranks, slots, slot_bytes), place)
    distributed.barrier()
    buffers, keep = memory.mapped(mine, distributed.group.WORLD)
    made = arena.Arena(rank, buffers, slots, slot_bytes, timeout_ms, keep)
    return made, made.handshake(arena.digest(plan))


def soak(opt: Any, exchanges: int) -> dict[str, Any]:
    """Two arenas by turns, ranks late at random; every message is checked on the device."""
    p2p = module_of(opt, "distributed.p2p")
    rank, ranks = distributed.get_rank(), distributed.get_world_size()
    generator, late = random.Random(5), random.Random(50 + rank)
    engines = []
    for _ in range(2):
        counts = [
            [[generator.choice([0, 16, 4096, 65536]) for _ in range(ranks)] for _ in range(ranks)]
            for _ in range(6)
        ]
        pairs, offsets, largest = messages_between(opt, counts, rank)
        made, wrong = arena_of(opt, 3, largest)
        assert wrong is None
        engines.append((p2p.PeerToPeer(made, offsets), pairs))
    outboxes = [
        [torch.empty(g.size, dtype=torch.uint8, device="cuda") for g, _ in pairs]
        for _, pairs in engines
    ]
    senders = [
        [
            torch.repeat_interleave(torch.arange(ranks), torch.tensor(c.counts)).cuda()
            for _, c in pairs
        ]
        for _, pairs in engines
    ]
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    start = time.monotonic()
    for number in range(exchanges):
        which, k = number % 2, number // 2 % 6
        engine, pairs = engines[which]
        if k == 0:
            engine.begin(early=False)
        going, coming = pairs[k]
        outbox = outboxes[which][k]
        outbox.fill_((number + 17 * rank) % 251)
        lease = engine.inbox(coming)
        done = engine.exchange(going, outbox, coming, lease.bytes)
        if late.random() < 0.02:
            torch.cuda._sleep(int(late.random() * 2e6))
        if late.random() < 0.002:
            time.sleep(late.random() / 50)
        done.wait()
        expected = (number + 17 * senders[which][k]) % 251
        wrong += (lease.bytes != expected).sum()
        lease.give()
        if number % 1000 == 999:
            torch.cuda.synchronize()
    seconds = time.monotonic() - start
    for engine, _ in engines:
        engine.check()
    found = {"wrong": int(wrong), "seconds": seconds, "barriers": [e.barriers for e, _ in engines]}
    distributed.barrier()
    for engine, _ in engines:
        engine.arena.close()
    return found


@two_or_four()
def test_a_soak_of_two_arenas(gpu_ranks, record_property, count) -> None:
    answers = gpu_ranks(count).run(soak, SOAKED[count], timeout=290)
    write_log(f"soak-{count}", answers)
    print(f"{count} ranks: {SOAKED[count]} exchanges,", answers[0])
    record_property("exchanges", SOAKED[count])
    assert [answer["wrong"] for answer in answers] == [0] * count


def run_on_the_device(call: Callable[[], Any]) -> Counter[str]:
    """What a call runs there, by name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as trace:
        call()
        torch.cuda.synchronize()
    on_device = torch.autograd.DeviceType.CUDA
    return Counter(event.name for event in trace.events() if event.device_type == on_device)


def traced(opt: Any) -> dict[str, Any]:
    """What runs on the device in a step, by name."""
    mesh = mesh_of((distributed.get_world_size(),))
    starts = [torch.randn((512, 512), device="cuda") for _ in range(8)]
    params = [nn.Parameter(spread(start, mesh, "S0")) for start in starts]
    for param in params:
        param.grad = param.detach().clone()
    exchange, in_place = module_of(opt, "optimizers.sharded.exchange"), []
    arena, looks = module_of(opt, "distributed.arena").Arena, []
    batch_of, look = exchange.batch_of, arena.zeros_unless_alive

    def batch(chunk, inbox, **options):
        made = batch_of(chunk, inbox, **options)
        in_place.append(made.data_ptr() == inbox.data_ptr())
        return made

    with pytest.MonkeyPatch.context() as patch, staged(opt), Direct(opt, kept=_KEPT) as counted:
        patch.setattr(exchange, "batch_of", batch)
        patch.setattr(arena, "zeros_unless_alive", lambda *of: (looks.append(of), look(*of)))
        optimizer = opt.Muon(params, distributed=opt.DistributedConfig(cuda_graphs=False))
        for _ in range(3):
            optimizer.step()
        before = counted["p2p"]
        looks.clear()
        torch.cuda.synchronize()
        names = run_on_the_device(optimizer.step)
        exchanges = counted["p2p"] - before
    found = {"names": names, "exchanges": exchanges, "looks": len(looks), "in place": in_place}
    return found | {"rows": optimizer.comm_report()}


@two_ranks
def test_nothing_is_packed_and_nothing_of_nccl_runs(gpu_ranks) -> None:
    """Beside Newton-Schulz: the kernels of the step, a wait per exchange and update, and copies."""
    answers = gpu_ranks(2).run(traced)
    write_log("traced", answers)
    for answer in answers:
        waits = sum(n for name, n in answer["names"].items() if "wait_kernel" in name)
        assert waits == answer["exchanges"] + answer["looks"] and answer["exchanges"] > 0
        assert answer["in place"] and all(answer["in place"])
        assert not [name for name in answer["names"] if "ncclDevKernel_SendRecv" in name]
        # That of the comparison of options, which is of a few numbers.
        assert sum(n for name, n in answer["names"].items() if "CatArray" in name) <= 1


def by_transport(opt: Any, name: str, strict: bool) -> dict[str, Any]:
    """Steps that go as asked, beside those of the all-to-all; what the last one runs on the GPU."""
    mesh = mesh_of((distributed.get_world_size(),))
    generator = torch.Generator().manual_seed(4)
    starts = [torch.randn((1024, 512), generator=generator).to(device()) for _ in range(24)]
    found: dict[str, Any] = {}
    with staged(opt):
        for transport in ("nccl", name):
            params = [nn.Parameter(spread(start, mesh, "S0")) for start in starts]
            for param in params:
                param.grad = param.detach().clone()
            config = opt.DistributedConfig(
                torch.float32, chunk_size=4, cuda_graphs=False, transport=transport, strict=strict
            )
            optimizer = opt.Muon(params, lr=0.02, distributed=config)
            for _ in range(3):
                optimizer.step()
            found["names"] = [*run_on_the_device(optimizer.step)]
            optimizer.state_dict()
            found["rows"] = optimizer.comm_report()
            found[transport] = [bits(local(param.detach())) for param in params]
    return found | {"same": found.pop("nccl") == found.pop(name)}


@two_or_four()
def test_auto_decides_alike_on_all_ranks(gpu_ranks, count) -> None:
    """By the predicted duty, and below its crossover by what rank 0 measured."""
    answers = gpu_ranks(count).run(by_transport, "auto", False)
    write_log(f"auto-{count}", answers)
    reasons = {row["reason"] for answer in answers for row in answer["rows"]}
    taken = {row["transport"] for answer in answers for row in answer["rows"]}
    assert all(answer["same"] for answer in answers)
    (reason,) = {reason.split("; ")[0] for reason in reasons}
    print(f"{count} ranks:", taken, reason)
    assert reason.startswith(("calibration: ", "duty above crossover: "))
    assert len(taken) == 1


@pytest.mark.part("several GPUs")
@pytest.mark.parametrize("count", [2, 4])
def test_copy_engines_of_nccl_have_the_bits_of_the_all_to_all(doomed, count) -> None:
    """On a GPU per rank; NCCL's kernels for an all-to-all are not in the trace."""
    if torch.cuda.device_count() < count:
        pytest.skip("NCCL takes a GPU per rank")
    answers = doomed(count).run(by_transport, "nccl_ce", True, timeout=90)
    write_log(f"nccl_ce-{count}", answers)
    for answer in answers:
        assert answer["same"]
        assert {row["transport"] for row in answer["rows"]} == {"nccl_ce"}
        moved = [name for name in answer["names"] if "SendRecv" in name or "AlltoAll" in name]
        assert not moved, answer["names"]


TIMEOUT_MS = 4000
RANKS = 3
FAULTS = [
    ("FSDP2", "late", 2),
    ("FSDP2", "killed before", 1),
    ("FSDP2", "killed during", 3),
    ("unreduced", "late", 3),
    ("unreduced", "killed after", 2),
]


@pytest.mark.parametrize(("held", "how", "number"), FAULTS)
def test_the_others_end_with_an_error_in_time(gpu_ranks, doomed, held, how, number) -> None:
    arguments = (held, how, number, TIMEOUT_MS, 3 * TIMEOUT_MS / 1000 + 5)
    outcomes = doomed(RANKS).outcomes(fault, *arguments, timeout=90)
    write_log(f"fault-{held}-{how}-{number}", outcomes)
    assert_answered(outcomes, but_faulty=how != "late")


def refused(opt: Any) -> list[str]:
    """No memory on one rank; two plans; then all is well."""
    symmetric = module_of(opt, "distributed.arena").SymmetricMemory
    found, original = [], symmetric.allocate

    def allocate(size: int, where: torch.device) -> torch.Tensor:
        return original(2**46 if distributed.get_rank() == FAULTY else size, where)

    with staged(opt), Direct(opt):
        symmetric.allocate = staticmethod(allocate)
        try:
            training = Training(opt, "FSDP2")
            training.give(0)
            found.append(message_of(training.optimizer.step))
        finally:
            symmetric.allocate = staticmethod(original)
        training = Training(opt, "FSDP2")
        training.give(0)
        training.optimizer.step()
        found.append(message_of(training.optimizer.state_dict))
    _, wrong = arena_of(opt, 2, 64, plan="one" if distributed.get_rank() else "another")
    distributed.barrier()
    return [*found, str(wrong)]


@two_ranks
def test_no_memory_and_two_plans_are_refused_by_all(gpu_ranks) -> None:
    answers = gpu_ranks(2).run(refused)
    write_log("refused", answers)
    for no_memory, afterwards, plans in answers:
        assert no_memory.startswith("CommUnavailable: ") and "(rank 1: " in no_memory, no_memory
        assert afterwards == "none"
        assert "have different plans" in plans


def left_out(opt: Any) -> tuple[str, float]:
    made, _ = arena_of(opt, 2, 64, 1000)
    start = time.monotonic()
    if distributed.get_rank() == 0:
        inbox = made.slot(0, 0)
        inbox.fill_(9)
        made.exchange([], [], None, inbox).wait()
        assert not inbox.any()
    late = made.late_rank()
    seconds = time.monotonic() - start
    distributed.barrier()
    made.close()
    return str(late), seconds


@two_ranks
def test_a_rank_that_does_not_come_is_an_error_in_time(gpu_ranks) -> None:
    (late, seconds), (there, _) = gpu_ranks(2).run(left_out)
    assert (late, there) == ("1", "None")
    assert 0.9 < seconds < 6
