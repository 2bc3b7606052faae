"""Errors that come before a step, and calls that must not wait for other ranks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
import torch

from ._cases import bits
from ._ranks import COLLECTIVE_TIMEOUT, same_everywhere
from .test_graphs import Captured
from .test_sharing import (
    assert_as_alone,
    give,
    gradients,
    local,
    module_of,
    placed,
    plain_params,
)

pytestmark = pytest.mark.dist


def rule_that_raises(opt: Any) -> tuple[str, float]:
    from torch import distributed

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
    counted = optimizer.state[other]["step"].item()
    good[0] = True
    optimizer.step()
    assert_as_alone(opt, params, 1, adjust_lr_fn=None)
    return "went on", counted


def test_a_rule_that_raises_leaves_the_optimizer_as_it_was(ranks) -> None:
    """Nothing is counted or sent yet, so the next step goes on."""
    assert same_everywhere(ranks(2).run(rule_that_raises)) == ("went on", 0)


def report_alone(opt: Any) -> tuple[int, timedelta | None]:
    from torch import distributed
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Replicate, Shard

    rank = distributed.get_rank()
    mesh = DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("copies", "shards"))  # rank 2 is not on it
    if rank == 2:
        return 0, None
    params = placed(plain_params(), mesh, [Replicate(), Shard(0)])
    optimizer = opt.Muon(params)
    lines = len(optimizer.report().splitlines()) if rank == 1 else 0
    give(params, gradients(params, 0))
    optimizer.step()
    assert_as_alone(opt, params, 1)
    (group,) = optimizer._ranks._teams._groups.values()
    return lines, group._get_backend(torch.device("cpu")).options._timeout


def test_a_report_before_the_first_step_waits_for_nobody(ranks) -> None:
    """Teams are made with the optimizer, whose collectives wait as long as those of the world."""
    answers = ranks(3).run(report_alone, timeout=60)
    assert [lines for lines, _ in answers] == [0, 7, 0]
    assert [timeout for _, timeout in answers[:2]] == [COLLECTIVE_TIMEOUT] * 2


def throw(error: BaseException) -> None:
    raise error


def message_of(call: Callable[[], Any]) -> str:
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def interrupted_beside_the_gathers(opt: Any, replayed: bool) -> list[str]:
    """Ctrl-C on every rank, in what it does under the first gathers, without or with graphs."""
    from torch import distributed

    params = [*plain_params(), torch.nn.Parameter(torch.ones(3))]
    groups = [{"kind": "muon", "params": params[:-1]}, {"kind": "adamw", "params": params[-1:]}]
    groups = [{**group, "lr": 0.1, "none_grad": False} for group in groups]
    optimizer = opt.MuonAdamW(groups, process_group=distributed.group.WORLD)
    give(params, gradients(params, 0))
    with Captured(opt) as counted, pytest.MonkeyPatch.context() as patch:
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
    return [*messages, str(counts.item())]


@pytest.mark.parametrize("replayed", [False, True], ids=["first step", "with graphs"])
def test_an_interrupt_beside_the_gathers(ranks, replayed) -> None:
    heard, *later, counts = same_everywhere(ranks(2).run(interrupted_beside_the_gathers, replayed))
    assert "KeyboardInterrupt" in heard
    assert all("an earlier step failed midway" in message for message in later), later
    assert float(counts) == (15 if replayed else 4)


def wide_statistics(opt: Any, held: str, narrow: torch.dtype) -> tuple[str, bool]:
    """What is said of float64 second moments of float32 directions, and whether all is as it was"""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    params = [torch.nn.Parameter(param.detach().double()) for param in plain_params()]
    options = {"kind": "muon", "lr": 0.1, "momentum_dtype": narrow, "beta2": 0.9}
    if held == "unreduced":
        call = partial(opt.MuonAdamW, [{"params": params, **options}], gradients="unreduced")
    else:
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        params = placed(params, mesh, [Shard(0) if held == "sharded" else Replicate()])
        optimizer = opt.MuonAdamW([{"params": params, **options}])
        give(params, [gradient.double() for gradient in gradients(params, 0)])
        call = optimizer.step
    before = [bits(local(param.detach())) for param in params]
    message = message_of(call)
    same = [bits(local(param.detach())) for param in params] == before
    if held != "unreduced":
        optimizer.param_groups[0]["beta2"] = None
        optimizer.step()
    return message, same


@pytest.mark.parametrize("narrow", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("held", ["sharded", "replicated", "unreduced"])
def test_statistics_wider_than_what_travels_are_refused(ranks, held, narrow) -> None:
    """On all ranks alike, before anything is sent or written."""
    message, same = same_everywhere(ranks(2).run(wide_statistics, held, narrow))
    assert message.startswith("ValueError: group 0, parameter 0: beta2 with momentum_dtype=")
    assert same
