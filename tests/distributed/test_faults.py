"""Errors before a step, and a rank that fails within one: every other rank ends with an error."""

import copy
import os
import signal
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh

from .._compare import fail_at
from ._cases import bits, device, held_like, local, mesh_of, spread
from ._ranks import COLLECTIVE_TIMEOUT, DOOMED_TIMEOUT, on_ranks
from .test_graphs import captured
from .test_partition import (
    advance,
    assert_as_alone,
    give,
    gradients,
    message_of,
    module_of,
    placed,
    plain_params,
)

pytestmark = pytest.mark.dist


@on_ranks(2)
def test_a_rule_that_raises_leaves_the_optimizer_as_it_was(opt: Any) -> None:
    """Nothing is counted or sent yet, so the next step goes on."""
    good = [True]

    def rule(lr: float, rows: int, columns: int) -> float:
        if not good[0]:
            raise ArithmeticError("no rate for this shape")
        return lr

    params = plain_params()
    other = torch.nn.Parameter(torch.zeros(3))
    groups = [
        {"params": params, "use_muon": True, "adjust_lr_fn": rule},
        {"params": [other], "use_muon": False},
    ]
    optimizer = opt.Muon(groups, lr=1e-3, process_group=distributed.group.WORLD)
    good[0] = False
    give(params, gradients(params, 0))
    other.grad = torch.ones(3)
    with pytest.raises(ArithmeticError):
        optimizer.step()
    assert optimizer.state[other]["step"].item() == 0
    good[0] = True
    optimizer.step()
    assert_as_alone(opt, params, 1, adjust_lr_fn="none")


@on_ranks(3)
def test_a_report_before_the_first_step_waits_for_nobody(opt: Any) -> None:
    """Teams are made with the optimizer, whose collectives wait as long as those of the world."""
    rank = distributed.get_rank()
    mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("copies", "shards"))  # rank 2 is not on it
    if rank == 2:
        return
    params = placed(plain_params(), mesh, "R", "S0")
    optimizer = opt.Muon(params)
    if rank == 1:
        assert len(optimizer.report(verbose=True).splitlines()) == 7
    advance(optimizer, params, 0)
    assert_as_alone(opt, params, 1)
    (group,) = optimizer._ranks._teams._groups.values()
    assert group._get_backend(torch.device("cpu")).options._timeout == COLLECTIVE_TIMEOUT


def throw(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize("replayed", [False, True], ids=["first step", "with graphs"])
@on_ranks(2)
def test_an_interrupt_beside_the_gathers(opt: Any, replayed) -> Any:
    """Ctrl-C on every rank, in what it does under the first gathers, without or with graphs."""
    params = [*plain_params(), torch.nn.Parameter(torch.ones(3))]
    groups = [{"kind": "muon", "params": params[:-1]}, {"kind": "adamw", "params": params[-1:]}]
    groups = [{**group, "lr": 0.1, "none_grad": False} for group in groups]
    optimizer = opt.MuonAdamW(groups, process_group=distributed.group.WORLD)
    give(params, gradients(params, 0))
    with captured(opt) as counted, pytest.MonkeyPatch.context() as patch:
        for _ in range(12 if replayed else 1):
            optimizer.step()
        assert bool(counted["replayed"]) == replayed
        saved = copy.deepcopy(optimizer.state_dict())
        planted = KeyboardInterrupt()
        patch.setattr(module_of(opt, "optimizers.step"), "adamw", lambda *_: throw(planted))
        messages = [message_of(optimizer.step), message_of(optimizer.step)]
        messages.append(message_of(optimizer.state_dict))
        patch.undo()
        optimizer.load_state_dict(saved)
        for _ in range(3):
            optimizer.step()
        counts = optimizer.state_dict()["state"][len(params) - 1]["step"]
    heard, *later = messages
    assert "KeyboardInterrupt" in heard
    assert all("an earlier step failed midway" in message for message in later), later
    assert counts.item() == (15 if replayed else 4)
    return messages


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("held", ["sharded", "replicated", "unreduced"])
@on_ranks(2)
def test_statistics_wider_than_what_travels_are_refused(opt: Any, held, narrow) -> Any:
    """On all ranks alike, before anything is sent or written."""
    params = [torch.nn.Parameter(param.detach().double()) for param in plain_params()]
    options = {"kind": "muon", "lr": 0.1, "momentum_dtype": narrow, "beta2": 0.9}
    if held == "unreduced":
        call = partial(opt.MuonAdamW, [{"params": params, **options}], gradients="unreduced")
    else:
        mesh = mesh_of((distributed.get_world_size(),))
        params = placed(params, mesh, "S0" if held == "sharded" else "R")
        optimizer = opt.MuonAdamW([{"params": params, **options}])
        give(params, [gradient.double() for gradient in gradients(params, 0)])
        call = optimizer.step
    before = [bits(local(param.detach())) for param in params]
    message = message_of(call)
    assert before == [bits(local(param.detach())) for param in params]
    if held != "unreduced":
        optimizer.param_groups[0]["beta2"] = None
        optimizer.step()
    assert message.startswith("ValueError: group 0, parameter 0: beta2 with momentum_dtype=")
    return message


FAULTY = 1
# How parameters are held -> (ranks, which call of the faulty rank's iteration fails).
HELD = {"FSDP2": (3, 2), "HSDP": (4, 1), "unreduced": (3, 1)}
FEW_SHAPES = [(64, 32), (32, 64), (64, 32), (96, 96), (64, 32), (33, 65)]


def values(seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator).to(device()) for shape in FEW_SHAPES]


class Training:
    """Parameters of all ranks, or of one alone, and their optimizer."""

    def __init__(self, opt: Any, held: str, **options: Any) -> None:
        self.opt, self.held = opt, held
        config = opt.DistributedConfig(torch.float32, in_flight_bytes=2**16)
        self.params = [torch.nn.Parameter(self.placed(value)) for value in values(0)]
        decay = {"weight_decay": 0.1, "cautious": False}  # changes what a zero update would not
        groups = [{"kind": "muon", "params": self.params, "lr": 0.1, **decay, **options}]
        gradients = "unreduced" if held == "unreduced" else "reduced"
        self.optimizer = opt.MuonAdamW(
            groups, gradients=gradients, reduce_op="sum", distributed=config
        )

    def placed(self, value: torch.Tensor) -> torch.Tensor:
        world = distributed.get_world_size()
        if self.held == "FSDP2":
            return spread(value, mesh_of((world,)), "S0")
        return spread(value, mesh_of((2, world // 2)), "R", "S0") if self.held == "HSDP" else value

    def give(self, step: int) -> None:
        for param, value in zip(self.params, values(1 + step), strict=True):
            mine = self.held != "unreduced" or distributed.get_rank() == 0
            param.grad = self.placed(value if mine else torch.zeros_like(value))

    def step(self, *numbers: int) -> None:
        for number in numbers:
            self.give(number)
            self.optimizer.step()

    def bits(self) -> list[bytes]:
        return [bits(local(param.detach())) for param in self.params]

    def bits_of(self, other: "Training") -> list[bytes]:
        """What this rank would have of another one's parameters."""
        pairs = zip(self.params, other.params, strict=True)
        return [bits(held_like(mine, whole.detach())) for mine, whole in pairs]


def alone(opt: Any, steps: int) -> Training:
    training = Training(opt, "alone")  # whoever else is alive
    training.step(*range(steps))
    return training


def assert_answered(outcomes: list[tuple[bool, Any]], *, but_faulty: bool) -> None:
    """Every rank came to its end, or every one but FAULTY, which is gone."""
    for rank, (answered, value) in enumerate(outcomes):
        assert answered != (but_faulty and rank == FAULTY), value


def fail_midway(opt: Any, held: str, how: str) -> None:
    """An error on every rank in time; every parameter is old or new then."""
    training = Training(opt, held, none_grad=True)
    either = [*zip(training.bits(), training.bits_of(alone(opt, 1)), strict=True)]
    saved = training.optimizer.state_dict()
    training.give(0)
    if distributed.get_rank() == FAULTY:
        step = module_of(opt, "optimizers.step")
        original, calls = step.orthogonalize, []

        def orthogonalize(x, **options):
            calls.append(x)
            if len(calls) == HELD[held][1]:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise torch.OutOfMemoryError("no room for this chunk")
            return original(x, **options)

        step.orthogonalize = orthogonalize
    start = time.monotonic()
    first = message_of(training.optimizer.step)
    seconds = time.monotonic() - start
    training.give(1)
    again = message_of(training.optimizer.step)
    training.optimizer.load_state_dict(saved)
    assert all(found in both for found, both in zip(training.bits(), either, strict=True))
    assert first != "none"
    if distributed.get_rank() == FAULTY:
        assert first == "OutOfMemoryError: no room for this chunk"
    assert "an earlier step failed midway" in again
    assert seconds < DOOMED_TIMEOUT.total_seconds() + 15


@pytest.mark.parametrize(
    ("held", "how"),
    [("FSDP2", "raises"), ("FSDP2", "killed"), ("HSDP", "raises"), ("unreduced", "raises")],
)
def test_the_others_end_with_an_error_in_time(doomed, held, how) -> None:
    outcomes = doomed(HELD[held][0]).outcomes(fail_midway, held, how, timeout=120)
    assert_answered(outcomes, but_faulty=how == "killed")


@pytest.mark.parametrize(("held", "world"), [(held, of[0]) for held, of in HELD.items()])
@on_ranks()
def test_a_step_that_fails_on_all_ranks_is_repeated_after_loading(opt, held, world) -> Any:
    """All fail behind the same exchange, load, and go on in the same processes.

    Messages that were on their way, and memory of the step, are no matter afterwards.
    """
    training = Training(opt, held, none_grad=True)
    training.step(0)
    kept = [local(param.detach()).clone() for param in training.params]
    saved = copy.deepcopy(training.optimizer.state_dict())
    training.give(1)
    name = "reduce_scatter" if held == "unreduced" else "exchange"
    module = module_of(opt, f"optimizers.sharded.{name}")
    with pytest.MonkeyPatch.context() as patch:
        fail_at(patch, module, "apply", 2, torch.OutOfMemoryError("no room for this update"))
        with pytest.raises(torch.OutOfMemoryError):
            training.optimizer.step()
    message = message_of(training.optimizer.step)
    with torch.no_grad():
        for param, old in zip(training.params, kept, strict=True):
            local(param).copy_(old)
    training.optimizer.load_state_dict(saved)
    training.step(1, 2)
    assert training.bits() == training.bits_of(alone(opt, 3))
    assert "an earlier step failed midway" in message
    return message


CLIP = {"q_indices": [0, 1], "k_indices": [0, 1], "head_dim": 4, "threshold": 1.0}


def die_in_largest_logits(opt: Any, held: str, folder: Path) -> None:
    """One rank fails before it says which logits it has."""
    params = plain_params([(8, 6), (8, 6)])
    names = ("layers.0.attn.q_proj.weight", "layers.0.attn.k_proj.weight")
    groups = [{"kind": "muon", "params": params, "names": names, "lr": 0.1}]
    arguments = {"gradients": "unreduced"} if held == "unreduced" else {}
    if held == "replicated":
        arguments = {"process_group": distributed.group.WORLD, "gradients": "reduced"}
    optimizer = opt.MuonAdamW(groups, clip_config=CLIP, **arguments)
    saved = optimizer.state_dict()
    rank = distributed.get_rank()
    factor = rank + 1 if held == "unreduced" else 1
    give(params, [gradient * factor for gradient in gradients(params, 0)])
    with pytest.MonkeyPatch.context() as patch:
        if rank == FAULTY:
            planted = KeyboardInterrupt()
            module = module_of(opt, "optimizers.step")
            patch.setattr(module, "largest_logits", lambda *_: throw(planted))
        heard = message_of(lambda: optimizer.step(qk_logits={0: torch.tensor([4.0, 4.0])}))
    messages = [heard, message_of(optimizer.step), message_of(optimizer.state_dict)]
    messages.append(message_of(lambda: opt.save_optimizer(optimizer, folder / str(rank))))
    optimizer.load_state_dict(saved)
    heard, *later = messages
    assert ("KeyboardInterrupt" in heard) == (rank == FAULTY) and heard != "none"
    assert all("an earlier step failed midway" in message for message in later), later


@pytest.mark.parametrize("held", ["replicated", "unreduced"])
def test_a_rank_that_fails_in_the_clip_stops_the_others(doomed, held, tmp_path) -> None:
    """They do not go on unclipped, and no rank saves what was not clipped."""
    outcomes = doomed(2).outcomes(die_in_largest_logits, held, tmp_path, timeout=120)
    assert_answered(outcomes, but_faulty=False)
    assert not [*tmp_path.iterdir()]
