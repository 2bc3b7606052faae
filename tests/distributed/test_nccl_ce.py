"""What NCCL's copy engines need: equal splits, windows, group options. Nothing is sent here."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed

from ._arenas import SharedMemory
from ._ranks import same_everywhere
from .test_sharing import module_of


@pytest.fixture(scope="module")
def nccl_ce(opt):
    return module_of(opt, "distributed.nccl_ce")


@pytest.fixture(scope="module")
def sizes_of(opt):
    """Sizes of one exchange out of the bytes from every sender to every receiver."""
    policy = module_of(opt, "distributed.policy")

    def made(counts):
        ranks = range(len(counts))
        return policy.Sizes.of([[(counts[r], [counts[s][r] for s in ranks])] for r in ranks])

    return made


def test_equal_parts_are_not_padded(nccl_ce, sizes_of) -> None:
    split = nccl_ce.split_of(sizes_of([[64] * 4] * 4), 0, 2)
    assert (split.bytes, split.padded) == (64, False)
    assert nccl_ce.windows([split], 4) == 256


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
    policy = module_of(opt, "distributed.policy")
    calls: list[str] = []

    class Engines:
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

    one = transport.GroupTransport(distributed.group.WORLD)
    traffic = policy.Traffic((), torch.device("cpu"), 1.0, 0)
    options = policy.TransportOptions("nccl_ce", strict=True)
    raised = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(transport, "CopyEngineCollectives", Engines)
        patch.setattr(transport, "why_not_here", lambda: None)
        patch.setattr(transport.GroupTransport, "memory", SharedMemory)
        try:
            one.settle(traffic, options, together=True)
            one.settle(traffic, options, together=True)  # the next plan
        except opt.CommUnavailable as error:
            raised = str(error)
    return raised, calls


@pytest.mark.dist
@pytest.mark.sees_defect(
    "one rank has no room for windows, and the others register theirs for ever"
)
def test_ranks_agree_before_they_register(ranks) -> None:
    begun = ["made", "connected"]
    assert same_everywhere(ranks(2).run(settled, "")) == ("", [*begun, "closed", *begun])
    (here, calls), (there, failed) = ranks(2).run(settled, "made")
    assert here == there and "no room for windows" in here and "(rank 1: OutOfMemoryError" in here
    assert (calls, failed) == (["made", "closed"], [])
    (here, calls), (there, failed) = ranks(2).run(settled, "connected")
    assert here == there and "window not registered (rank 1: " in here
    assert (calls, failed) == ([*begun, "closed"], ["made", "closed"])


def test_closing_lets_go_of_windows_and_communicator(nccl_ce, monkeypatch) -> None:
    calls = []
    backend = SimpleNamespace(deregister_mem_pool=lambda pool: calls.append(pool))
    group = SimpleNamespace(_get_backend=lambda device: backend)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: calls.append("waited"))
    monkeypatch.setattr(distributed, "destroy_process_group", calls.append)
    one = object.__new__(nccl_ce.CopyEngineCollectives)
    one._group, one._device, one._pool, one._registered = group, "cuda:0", "pool", True
    one._leaving = one._arriving = torch.empty(0)
    one.close()
    assert calls == ["waited", "pool", group]
    assert one._leaving is one._arriving is one._pool is None
