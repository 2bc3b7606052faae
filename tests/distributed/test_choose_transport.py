"""Every reason for which a transport is not what was asked for is said, and raises under strict."""

import dataclasses
import random
import re
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from ..conftest import module_fixture
from ._arenas import Direct, SharedMemory
from ._ranks import on_ranks, same_everywhere
from .test_partition import (
    advance,
    assert_as_alone,
    give,
    gradients,
    message_of,
    messages_of,
    module_of,
    on_all,
)

nccl_ce = module_fixture("distributed.nccl_ce")
GPU = {"host": "a", "missing": "", "overlap": False}


def facts(*changes: dict[str, Any]) -> list[dict[str, Any]]:
    """Two ranks on two GPUs of one host, each of which reaches both; with changes."""
    names = ["gpu 0", "gpu 1"]
    found = [{**GPU, "device": name, "seen": names, "reached": names} for name in names]
    for one, change in zip(found, changes, strict=False):
        one.update(change)
    return found


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"missing": "no CUDA peers: the parameters are on cpu"}, "rank 1: no CUDA peers"),
        ({"missing": "torch too old: 2.4 has no symmetric memory"}, "rank 1: torch too old"),
        ({"missing": "backend frozen: it is NVSHMEM's"}, "rank 1: backend frozen"),
        ({"host": "b"}, "multi-node"),
        ({"device": "gpu 0"}, "overlapping devices"),
        ({"reached": ["gpu 1"]}, "no peer access: the GPU of rank 1 cannot reach that of rank 0"),
    ],
)
def test_what_keeps_ranks_from_sharing_memory(opt, change, reason) -> None:
    why = module_of(opt, "distributed.arena").why_not_shared
    assert why(facts()) is None
    assert why(facts({}, change)).startswith(reason)
    assert why(facts()[:1]).startswith("single rank")
    overlapping = {"device": "gpu 0", "overlap": True}  # which tests allow
    assert why(facts({"overlap": True}, overlapping)) is None
    assert why(facts({}, overlapping)).startswith("overlapping")


class OtherBackend:
    """torch's symmetric memory with a backend that was chosen before."""

    def __init__(self, name: str | None, frozen: bool) -> None:
        self.name, self.frozen = name, frozen

    def rendezvous(self) -> None: ...

    def get_backend(self, device: torch.device) -> str | None:
        return self.name

    def set_backend(self, name: str) -> None:
        if self.frozen:
            raise RuntimeError("the backend cannot be changed")
        self.name = name


@pytest.mark.parametrize(
    ("name", "frozen", "missing"),
    [
        (None, True, ""),
        ("CUDA", True, ""),
        ("NVSHMEM", False, ""),
        ("NVSHMEM", True, "backend frozen: symmetric memory of this process is NVSHMEM's"),
    ],
)
def test_the_backend_of_symmetric_memory(opt, monkeypatch, name, frozen, missing) -> None:
    module, other = module_of(opt, "distributed.arena"), OtherBackend(name, frozen)
    if not hasattr(torch._C._distributed_c10d, "_SymmetricMemory"):
        pytest.fail("this torch has no symmetric memory")
    monkeypatch.setattr(distributed, "_symmetric_memory", other)
    here = torch.device("cuda", 0)
    taken = module._missing(here, sets_backend=False)  # by "auto", which changes nothing
    assert taken.startswith("another backend") == (name == "NVSHMEM") and other.name == name
    found = module._missing(here, sets_backend=True)
    assert found.startswith(missing) if missing else found == ""
    monkeypatch.setattr(distributed, "_symmetric_memory", SimpleNamespace())
    assert module._missing(here, sets_backend=True).startswith("torch too old")


def test_what_auto_predicts(opt) -> None:
    policy = module_of(opt, "distributed.choose_transport")
    counts = [304 * 10**6] * 2  # one of two parts leaves: 1 ms
    sizes = policy.Sizes.of([[(counts, counts)]] * 2)
    assert policy.why_not_auto(sizes, 10.0, 8) is None
    assert policy.why_not_auto(sizes, 1.0, 8).startswith("duty above crossover: ")
    assert policy.why_not_auto(sizes, 10.0, 2).startswith("nothing to overlap")
    assert policy.predicted_ms(sizes.sent()) == pytest.approx(1.0)


def test_plans_that_do_not_fit(opt) -> None:
    sizes = module_of(opt, "distributed.choose_transport").Sizes
    tables = [[([0, 16], [0, 32])], [([32, 0], [16, 0])]]
    assert sizes.of(tables).mismatch() is None
    tables[1] = [([32, 0], [48, 0])]
    assert sizes.of(tables).mismatch() == (
        "ranks 0 and 1 have different plans: in exchange 0 one sends 16 bytes, the other expects 48"
    )


class Failing(SharedMemory):
    """Memory that one rank cannot have."""

    at = ""

    @classmethod
    def facts(cls, device: torch.device, **options: bool) -> dict[str, Any]:
        if cls.at == "facts" and distributed.get_rank() == 1:
            raise RuntimeError("no driver")
        return SharedMemory.facts(device)

    @classmethod
    def allocate(cls, size: int, device: torch.device) -> torch.Tensor:
        if cls.at == "allocate" and distributed.get_rank() == 1:
            raise torch.OutOfMemoryError("no room for an arena")
        return SharedMemory.allocate(size, device)

    @staticmethod
    def no_room(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room for messages")

    @classmethod
    def mapped(cls, memory: torch.Tensor, group: Any) -> tuple[list[torch.Tensor], Any]:
        buffers, keep = SharedMemory.mapped(memory, group)
        if cls.at == "mapped" and distributed.get_rank() == 1:
            raise OSError("no such descriptor")
        if cls.at == "arena" and distributed.get_rank() == 1:
            return [], keep  # of which no arena can be made
        if cls.at == "stranger" and distributed.get_rank() == 1:
            buffers[0] = torch.zeros_like(buffers[0])
        return buffers, keep


ON_CPU = "rank 0: no CUDA peers: the parameters are on cpu"
# What is missing -> where it fails, options of the distribution, and what is said.
NOT_THERE = {
    "no CUDA peers": ("", {}, ON_CPU),
    "no room": (
        "allocate",
        {},
        "smaller messages (in_flight_bytes) take less (rank 1: OutOfMemoryError: no room",
    ),
    "rendezvous failed": ("mapped", {}, "rendezvous failed (rank 1: OSError: no such descriptor)"),
    "no arena": ("arena", {}, "rendezvous failed (rank 1: IndexError: "),
    "no facts": (
        "facts",
        {},
        "a rank cannot say what its device can do (rank 1: RuntimeError: no driver)",
    ),
    "few slots": (
        "none",
        {"slots": 2, "chunk_size": 1, "prefetch": 3},
        "slots=2 are fewer than the 5 messages that arrive or are read at once; give 6",
    ),
    "handshake mismatch": (
        "stranger",
        {},
        "look at the other ranks, or give timeout_ms more (rank 0: rank 1 wrote nothing within 500",
    ),
    "below min_bytes": (
        "none",
        {"min_bytes": 2**40},
        "below min_bytes: no message has 1099511627776 bytes",
    ),
    "calibration": (
        "calibration",
        {},
        "no room to calibrate (rank 1: OutOfMemoryError: no room for messages)",
    ),
}
# What keeps "auto" from p2p before it is tried is a choice, which the report says.
TRIED = ("no room", "rendezvous failed", "few slots", "calibration")
ASKED = [("p2p", what) for what in NOT_THERE if what != "calibration"]
ASKED += [("nccl_ce", "no CUDA peers"), *(("auto", what) for what in TRIED)]


@pytest.mark.dist
@pytest.mark.sees_defect('what fails while memory is set up for "auto" is silent')
@pytest.mark.parametrize(("transport", "what"), ASKED)
@pytest.mark.parametrize("strict", [False, True])
@on_ranks(2)
def test_what_cannot_be_had_is_said_once_or_raises(opt, transport, what, strict) -> Any:
    """On all ranks alike, before anything is written; the step has the bits of one rank."""
    at, options, said = NOT_THERE[what]
    place = module_of(opt, "distributed.transport").GroupTransport
    policy = module_of(opt, "distributed.choose_transport")
    params = on_all("S0")
    policy._say_once.cache_clear()
    Failing.at = at
    with pytest.MonkeyPatch.context() as patch, messages_of(policy.logger) as lines:
        patch.setattr(policy, "LINK_RATE", 1e15)
        if at:
            patch.setattr(place, "memory", Failing)
        if at == "calibration" and distributed.get_rank() == 1:
            patch.setattr(place, "_room_for", Failing.no_room)
        options = {"transport": transport, "timeout_ms": 500, "strict": strict, **options}
        config = opt.DistributedConfig(**options)
        lenient = dataclasses.replace(config, strict=False)
        optimizer = opt.Muon(params, distributed=config)
        give(params, gradients(params, 0))
        raised = message_of(optimizer.step)
        if strict:
            assert optimizer.comm_report()
            optimizer = opt.Muon(params, distributed=lenient)
            optimizer.step()
        others = on_all("S0")
        advance(opt.Muon(others, distributed=lenient), others, 0)
        assert_as_alone(opt, params, 1)
    (reason,) = {row["reason"] for row in optimizer.comm_report()}
    assert {row["transport"] for row in optimizer.comm_report()} == {"gloo"}
    assert said in reason
    (line,) = lines  # of two optimizers
    assert reason in line and "strict=True raises" in line
    expected = f"CommUnavailable: transport={transport!r} cannot be taken: {reason}"
    assert raised == (expected if strict else "none")
    return lines


@pytest.mark.dist
@pytest.mark.sees_defect("a rank that is strict raises alone, and the others wait for it")
@pytest.mark.parametrize("rank", [0, 1])
@on_ranks(2)
def test_one_rank_that_is_strict_is_enough(opt: Any, rank) -> None:
    config = opt.DistributedConfig(transport="p2p", strict=distributed.get_rank() == rank)
    params = on_all("S0")
    give(params, gradients(params, 0))
    message = message_of(lambda: opt.Muon(params, distributed=config).step())
    assert message == f"CommUnavailable: transport='p2p' cannot be taken: {ON_CPU}"


@pytest.mark.dist
@pytest.mark.parametrize("strict", [False, True])
@on_ranks(2)
def test_a_message_without_a_slot_is_not_silent(opt: Any, strict) -> Any:
    """A plan that has more messages alive than it said."""
    policy = module_of(opt, "distributed.choose_transport")
    policy._say_once.cache_clear()
    params = on_all("S0", [(24, 12)] * 8)
    plan = module_of(opt, "optimizers.sharded.shared_plan")
    with (
        pytest.MonkeyPatch.context() as patch,
        messages_of(policy.logger) as lines,
        Direct(opt, strict=strict, slots=2),
    ):
        patch.setattr(plan, "in_flight", lambda ahead: 2)
        config = opt.DistributedConfig(chunk_size=1, prefetch=3)
        optimizer = opt.Muon(params, distributed=config)
        give(params, gradients(params, 0))
        raised = message_of(optimizer.step)
    transports = {row["transport"] for row in optimizer.comm_report()}
    assert ("CommUnavailable" in raised and "no slot was free: slots=2" in raised) == strict
    if not strict:
        assert raised == "none"
        assert transports == {"p2p", "gloo"}
        (line,) = lines
        assert "no slot was free: slots=2" in line
    return lines


def what_auto_takes(
    opt: Any, slow: dict[int, str], config: dict[str, Any], link_rate: float = 1e15
) -> tuple[str, str, bool]:
    """The transport and the reason of "auto", with memory to share; whether it was calibrated.

    `slow`: of a rank, the transport that takes long by its clock.
    """
    names = "transport", "choose_transport", "p2p"
    transport, policy, p2p = (module_of(opt, f"distributed.{name}") for name in names)
    params, timed = on_all("S0"), []
    mine = slow.get(distributed.get_rank(), "")
    with pytest.MonkeyPatch.context() as patch, Direct(opt, transport="auto", **config):
        patch.setattr(policy, "LINK_RATE", link_rate)
        for name, place in (("p2p", p2p.PeerToPeer), ("all-to-all", transport.AllToAll)):
            original = place.exchange

            def late(*arguments, name=name, original=original):
                timed.append(name)
                future = original(*arguments)
                if name == mine and len(timed) <= 8:  # of the calibration; no other rank waits
                    time.sleep(0.2)
                return future

            patch.setattr(place, "exchange", late)
        optimizer = opt.Muon(params)
        advance(optimizer, params, 0)
        optimizer.state_dict()
    assert_as_alone(opt, params, 1)
    (chosen,) = {(row["transport"], row["reason"]) for row in optimizer.comm_report()}
    return *chosen, timed[:8] == ["p2p"] * 4 + ["all-to-all"] * 4


# Slow transports by rank, options, bytes per second of the link -> what is taken, and why.
CALIBRATED, BELOW = (
    r"calibration: \S+ ms by p2p, \S+ ms by gloo",
    "below min_bytes: no message has .*",
)
AUTO = [
    ({0: "all-to-all"}, {}, 1e15, "p2p", CALIBRATED),
    ({0: "p2p"}, {}, 1e15, "gloo", CALIBRATED),
    ({0: "all-to-all", 1: "p2p"}, {}, 1e15, "p2p", CALIBRATED),
    ({0: "p2p", 1: "all-to-all"}, {}, 1e15, "gloo", CALIBRATED),
]
for _strict in (False, True):  # what would not pay is a choice, so that nothing raises
    AUTO.append(({}, {"strict": _strict}, 1.0, "gloo", "duty above crossover: transfers are .*"))
    AUTO.append(({}, {"strict": _strict, "min_bytes": 2**40}, 1e15, "gloo", BELOW))


@pytest.mark.dist
@pytest.mark.parametrize(("slow", "config", "link_rate", "chosen", "reason"), AUTO)
def test_auto_predicts_and_then_measures(ranks, slow, config, link_rate, chosen, reason) -> None:
    """By rank 0's clock, for all ranks; the report says why, with what was read."""
    found = ranks(2).run(what_auto_takes, slow, config, link_rate)
    taken, said, calibrated = same_everywhere(found)
    assert taken == chosen and calibrated == bool(slow)
    assert re.fullmatch(reason, said)


@pytest.mark.dist
@pytest.mark.sees_defect("a rank that loads state alone asks others, which go on with their plan")
@pytest.mark.parametrize("shares", [False, True])
@on_ranks(2)
def test_one_rank_goes_on_with_collectives(opt: Any, shares) -> None:
    params = on_all("S0")
    policy = module_of(opt, "distributed.choose_transport")
    with pytest.MonkeyPatch.context() as patch:
        if shares:
            patch.setattr(module_of(opt, "distributed.transport").GroupTransport, "memory", Failing)
            patch.setattr(policy, "LINK_RATE", 1.0)
        optimizer = opt.Muon(params)
        for step in range(3):
            give(params, gradients(params, step))
            optimizer.step()
            if step == 0 and distributed.get_rank() == 1:
                optimizer.load_state_dict(optimizer.state_dict())
    assert_as_alone(opt, params, 3)
    reasons = {row["reason"].split(":")[0] for row in optimizer.comm_report()}
    assert reasons == {"duty above crossover" if shares else "no CUDA peers"}


@pytest.mark.dist
@on_ranks(2)
def test_the_report_says_what_ran(opt: Any) -> None:
    params = on_all("S0")
    optimizer = opt.Muon(params)
    assert optimizer.comm_report() == []
    with Direct(opt):
        advance(optimizer, params, 0, 1)
    rows = optimizer.comm_report()
    assert rows
    for row in rows:
        assert set(row) == {
            *("ranks", "what", "count", "transport", "reason", "bytes", "duty", "ms"),
            *("arena_bytes", "setup_ms"),
        }
        assert row["ranks"] == 2 and row["transport"] == "p2p" and row["reason"] == "asked for"
        assert row["bytes"] > 0 and row["ms"] > 0 and row["duty"] > 0
        assert row["arena_bytes"] > row["bytes"] and row["setup_ms"] > 0


@pytest.mark.parametrize(("name", "number"), [("cuda", 1), ("cuda:0", 0)])
def test_what_a_rank_says_of_its_gpu(opt, monkeypatch, name, number) -> None:
    """Its GPU, those it sees and those it reaches, by ids that hold in every process."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda k: SimpleNamespace(uuid=f"GPU-{k}")
    )
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda here, there: there != 2)
    found = module_of(opt, "distributed.arena").SymmetricMemory.facts(torch.device(name))
    assert found["device"] == f"GPU-{number}"
    assert found["seen"] == ["GPU-0", "GPU-1", "GPU-2"]
    assert found["reached"] == ["GPU-0", "GPU-1"]
    assert found["missing"] == ""


@pytest.fixture(scope="module")
def sizes_of(opt):
    """Sizes of one exchange out of the bytes from every sender to every receiver."""
    policy = module_of(opt, "distributed.choose_transport")

    def made(counts):
        ranks = range(len(counts))
        return policy.Sizes.of([[(counts[r], [counts[s][r] for s in ranks])] for r in ranks])

    return made


@pytest.mark.parametrize("seed", range(10))
def test_padded_parts_arrive(nccl_ce, sizes_of, seed) -> None:
    """Every rank packs its window, equal parts change places, every rank takes its window apart."""
    generator = random.Random(seed)
    ranks = generator.randint(2, 5)
    counts = [[16 * generator.randint(0, 5) for _ in range(ranks)] for _ in range(ranks)]
    sizes = sizes_of(counts)
    splits = [nccl_ce.split_of(sizes, 0, rank) for rank in range(ranks)]
    part = {split.bytes for split in splits}
    assert part == {max(map(max, counts))}
    (part,) = part
    outboxes = [torch.arange(sum(counts[s])) % 251 + s for s in range(ranks)]
    leaving = []
    for split, outbox in zip(splits, outboxes, strict=True):
        window = torch.full((nccl_ce.windows(splits, ranks),), -1)
        for here, there in split.places(split.going):
            window[there] = outbox[here]
        leaving.append(window)
    for receiver, split in enumerate(splits):
        window = torch.cat([w[receiver * part : (receiver + 1) * part] for w in leaving])
        inbox = torch.full((sum(split.coming),), -2)
        for here, there in split.places(split.coming):
            inbox[here] = window[there]
        expected = [outboxes[s].split(counts[s])[receiver] for s in range(ranks)]
        assert torch.equal(inbox, torch.cat(expected))


class NCCL:
    """As much of ProcessGroupNCCL as options take."""

    NCCL_CTA_POLICY_ZERO = 2
    register_mem_pool = None

    class Options:
        def __init__(self) -> None:
            self.config = SimpleNamespace(cta_policy=None)


def test_the_group_takes_no_multiprocessor(nccl_ce) -> None:
    assert nccl_ce.group_options(NCCL).config.cta_policy == 2


@pytest.mark.parametrize(
    ("torch_version", "nccl_version", "lacks", "reason"),
    [
        ("2.11.0", (2, 28, 9), "", None),
        ("2.10.1", (2, 28, 9), "", "torch too old: 2.10.1; nccl_ce needs 2.11"),
        ("2.13.0+cu130", (2, 27, 5), "", "NCCL too old: (2, 27, 5); nccl_ce needs 2.28"),
        ("2.13.0", (2, 29, 7), "NCCL_CTA_POLICY_ZERO", "CTA policy not zero"),
        ("2.13.0", (2, 29, 7), "register_mem_pool", "window not registered"),
    ],
)
def test_what_this_process_may_lack(
    nccl_ce, monkeypatch, torch_version, nccl_version, lacks, reason
) -> None:
    kept = {name: value for name, value in vars(NCCL).items() if name != lacks}
    monkeypatch.setattr(distributed, "ProcessGroupNCCL", SimpleNamespace(**kept), raising=False)
    monkeypatch.setattr(distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: nccl_version)
    monkeypatch.setattr(torch, "__version__", torch_version)
    found = nccl_ce.why_not_here()
    assert found is None if reason is None else found.startswith(reason)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert nccl_ce.why_not_here() == "NCCL is not there"


@pytest.mark.sees_defect("a rank decides by what it has itself, and others begin without it")
def test_what_one_rank_lacks_no_rank_takes(nccl_ce) -> None:
    there = {"host": "", "missing": "", "overlap": False, "seen": (), "reached": ()}
    facts = [{**there, "device": rank, "copy_engines": None} for rank in range(2)]
    assert nccl_ce.why_not_copy_engines(facts) is None
    facts[1]["copy_engines"] = "NCCL is not there"
    assert nccl_ce.why_not_copy_engines(facts) == "rank 1: NCCL is not there"


def settled(opt: Any, at: str) -> tuple[str, list[str]]:
    """What is begun and ended where rank 1 fails; why nothing is exchanged so, and the calls."""
    transport = module_of(opt, "distributed.transport")
    policy = module_of(opt, "distributed.choose_transport")
    calls: list[str] = []

    class Engines(transport.CopyEngineCollectives):
        def __init__(self, *arguments: Any) -> None:
            self.run("made")

        def connect(self) -> None:
            distributed.barrier()  # all ranks must be here
            self.run("connected")

        def close(self) -> None:
            calls.append("closed")

        def run(self, what: str) -> None:
            if what == at and distributed.get_rank() == 1:
                raise torch.OutOfMemoryError(f"not {what}")
            calls.append(what)

        def moves(self, coming: Any) -> bool:
            return True

    one = transport.GroupTransport(distributed.group.WORLD)
    message = module_of(opt, "distributed.message_layout").Message((), (4, 4))
    exchanges = (policy.Planned("momentum", message, message),)
    traffic = policy.Traffic(exchanges, torch.device("cpu"), 1.0, 2)
    options = policy.TransportOptions("nccl_ce", strict=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "CopyEngineCollectives", Engines)
        patch.setattr(transport, "why_not_here", lambda: None)
        patch.setattr(transport.GroupTransport, "memory", SharedMemory)
        raised = message_of(lambda: [one.settle(traffic, options, together=True) for _ in range(2)])
    (row,) = one.report()
    expected = "nccl_ce", "asked for"
    if raised != "none":
        expected = "gloo", raised.split(" cannot be taken: ")[1]
    assert (row.transport, row.reason) == expected
    return raised, calls


@pytest.mark.dist
@pytest.mark.sees_defect(
    "one rank has no room for windows, and the others register theirs for ever"
)
def test_ranks_agree_before_they_register(ranks) -> None:
    begun = ["made", "connected"]
    assert same_everywhere(ranks(2).run(settled, "")) == ("none", [*begun, "closed", *begun])
    (here, calls), (there, failed) = ranks(2).run(settled, "made")
    assert here == there and here.startswith("CommUnavailable: ")
    assert "no room for windows" in here and "(rank 1: OutOfMemoryError" in here
    assert (calls, failed) == (["made", "closed"], [])
    (here, calls), (there, failed) = ranks(2).run(settled, "connected")
    assert here == there and "window not registered (rank 1: " in here
    assert (calls, failed) == ([*begun, "closed"], ["made", "closed"])
