"""p2p on GPUs: a late or lost rank, another plan, no memory are errors on the other ranks."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.tensor import distribute_tensor

from ._arenas import Direct, Staged
from ._cases import bits, device, expected_on, mesh_of, placement
from .test_sharing import local, message_of, module_of
from .test_symm_exchanges import write_log

pytestmark = [pytest.mark.gpu, pytest.mark.dist]

TIMEOUT_MS = 4000
FAULTY, RANKS = 1, 3
SHAPES = [(64, 32), (32, 64), (64, 32), (96, 96), (64, 32), (33, 65)]


def values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device()) for shape in SHAPES]


class Training:
    """Parameters of all ranks, or of one alone, and their optimizer."""

    def __init__(self, opt: Any, held: str) -> None:
        self.opt, self.held = opt, held
        config = opt.DistributedConfig(torch.float32, in_flight_bytes=2**16)
        self.params = [nn.Parameter(self.placed(value)) for value in values(0)]
        decay = {"weight_decay": 0.1, "cautious": False}  # changes what a zero update would not
        groups = [{"kind": "muon", "params": self.params, "lr": 0.1, **decay}]
        gradients = "unreduced" if held == "unreduced" else "reduced"
        self.optimizer = opt.MuonAdamW(
            groups, gradients=gradients, reduce_op="sum", distributed=config
        )

    def placed(self, value: torch.Tensor) -> torch.Tensor:
        if self.held != "FSDP2":
            return value.clone()
        mesh = mesh_of((distributed.get_world_size(),))
        return distribute_tensor(value, mesh, [placement("S0")], src_data_rank=None)

    def give(self, step: int) -> None:
        for param, value in zip(self.params, values(1 + step), strict=True):
            mine = self.held != "unreduced" or distributed.get_rank() == 0
            param.grad = self.placed(value if mine else torch.zeros_like(value))

    def bits(self) -> list[bytes]:
        return [bits(local(param.detach())) for param in self.params]

    def bits_of(self, other: Training) -> list[bytes]:
        """What this rank would have of another one's parameters."""
        mesh = mesh_of((distributed.get_world_size(),))
        pairs = zip(other.params, self.params, strict=True)
        return [bits(expected_on(o.detach(), mine.detach(), mesh)) for o, mine in pairs]


def fault(opt: Any, held: str, how: str, number: int) -> dict[str, Any]:
    alone = Training(opt, "alone")
    alone.give(0)
    alone.optimizer.step()
    with Staged(opt):
        with Direct(opt):  # everything is loaded
            warm = Training(opt, held)
            warm.give(0)
            warm.optimizer.step()
            warm.optimizer.state_dict()
        training = Training(opt, held)
        old, new = training.bits(), training.bits_of(alone)
        saved = training.optimizer.state_dict()
        training.give(0)
        torch.cuda.synchronize()
        distributed.barrier()
        faulty = distributed.get_rank() == FAULTY

        def before(exchange: int) -> None:
            if faulty and exchange == number:
                if how == "late":
                    time.sleep(1.4 * TIMEOUT_MS / 1000)
                elif how == "killed before":
                    os.kill(os.getpid(), signal.SIGKILL)

        direct = Direct(opt, before, timeout_ms=TIMEOUT_MS)
        start = time.monotonic()
        with direct as counted:
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
            stepped = time.monotonic() - start
            heard = message_of(training.optimizer.state_dict)
            seconds = time.monotonic() - start
            again = message_of(training.optimizer.step)
            found = training.bits()
            moved = None
            if how == "late":
                training.optimizer.load_state_dict(saved)
                training.give(1)
                training.optimizer.step()
                training.optimizer.state_dict()
                moved = training.bits() != found
    torch.zeros(1, device=device()).add_(1).item()  # the context lives
    return {
        "heard": heard,
        "again": again,
        "whole": [f in (o, n) for f, o, n in zip(found, old, new, strict=True)],
        "stepped": stepped,
        "seconds": seconds,
        "moved": moved,
    }


FAULTS = [
    ("FSDP2", "late", 2),
    ("FSDP2", "killed before", 1),
    ("FSDP2", "killed during", 3),
    ("unreduced", "late", 3),
    ("unreduced", "killed after", 2),
]


@pytest.mark.parametrize(("held", "how", "number"), FAULTS)
def test_the_others_end_with_an_error_in_time(gpu_ranks, doomed, held, how, number) -> None:
    outcomes = doomed(RANKS).outcomes(fault, held, how, number, timeout=90)
    write_log(f"fault-{held}-{how}-{number}", outcomes)
    for rank, (answered, value) in enumerate(outcomes):
        if rank == FAULTY and how != "late":
            assert not answered
            continue
        assert answered, value
        assert "did not arrive at an exchange" in value["heard"], value
        assert "an earlier step failed midway" in value["again"], value
        assert all(value["whole"]), value
        assert value["seconds"] < 3 * TIMEOUT_MS / 1000 + 5, value
        assert value["moved"] in (None, True), value


def refused(opt: Any) -> list[str]:
    """No memory on one rank; two plans; then all is well."""
    arena = module_of(opt, "distributed.symmetric.arena")
    symmetric = module_of(opt, "distributed.symmetric.memory").SymmetricMemory
    found, original = [], symmetric.allocate

    def allocate(size: int, where: torch.device) -> torch.Tensor:
        return original(2**46 if distributed.get_rank() == FAULTY else size, where)

    with Staged(opt), Direct(opt):
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
    place = torch.device("cuda", torch.cuda.current_device())
    ranks = distributed.get_world_size()
    mine = symmetric.allocate(arena.arena_bytes(ranks, 2, 64), place)
    distributed.barrier()
    buffers, keep = symmetric.mapped(mine, distributed.group.WORLD)
    made = arena.Arena(distributed.get_rank(), buffers, 2, 64, 20000, keep)
    plan = "one" if distributed.get_rank() else "another"
    found.append(str(made.handshake(arena.digest(plan))))
    distributed.barrier()
    return found


def test_no_memory_and_two_plans_are_refused_by_all(gpu_ranks) -> None:
    answers = gpu_ranks(2).run(refused)
    write_log("refused", answers)
    for no_memory, afterwards, plans in answers:
        assert no_memory.startswith("CommUnavailable: ") and "(rank 1: " in no_memory, no_memory
        assert afterwards == "none"
        assert "have different plans" in plans


def left_out(opt: Any) -> tuple[str, float]:
    """Rank 1 does not come to an exchange at all: C11."""
    arena = module_of(opt, "distributed.symmetric.arena")
    symmetric = module_of(opt, "distributed.symmetric.memory").SymmetricMemory
    place = torch.device("cuda", torch.cuda.current_device())
    mine = symmetric.allocate(arena.arena_bytes(2, 2, 64), place)
    distributed.barrier()
    buffers, keep = symmetric.mapped(mine, distributed.group.WORLD)
    made = arena.Arena(distributed.get_rank(), buffers, 2, 64, 1000, keep)
    assert made.handshake(arena.digest("plan")) is None
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


def test_a_rank_that_does_not_come_is_an_error_in_time(gpu_ranks) -> None:
    (late, seconds), (there, _) = gpu_ranks(2).run(left_out)
    assert (late, there) == ("1", "None")
    assert 0.9 < seconds < 6
