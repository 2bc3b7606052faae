"""A rank that fails in the middle of a step: every other one ends with an error, soon."""

from __future__ import annotations

import copy
import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from ..conftest import ROOT
from ._cases import bits
from ._ranks import Ranks, same_everywhere
from .test_sharing import give, gradients, local, module_of, placed, plain_params
from .test_step_errors import message_of, throw

pytestmark = pytest.mark.dist

TIMEOUT = timedelta(seconds=8)
FAULTY = 1


# How parameters are held -> (ranks, which call of the faulty rank's iteration fails).
HELD = {"FSDP2": (3, 2), "HSDP": (4, 1), "unreduced": (3, 1)}


@pytest.fixture
def doomed(opt, repo_id, device):
    """Makes ranks of their own, whose collectives give up early."""
    pools = []

    def make(world: int) -> Ranks:
        pools.append(Ranks(world, repo_id, str(ROOT), device.type, timeout=TIMEOUT))
        return pools[-1]

    yield make
    for pool in pools:
        pool.close()


def matrices(params) -> list[dict[str, Any]]:
    return [{"kind": "muon", "params": params, "lr": 0.1, "none_grad": True}]


def build(opt: Any, held: str) -> tuple[Any, list[torch.nn.Parameter]]:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    params, world = plain_params(), distributed.get_world_size()
    if held == "unreduced":
        arguments = {"gradients": "unreduced", "reduce_op": "sum"}
        return opt.MuonAdamW(matrices(params), **arguments), params
    shape, placements = ((world,), [Shard(0)])
    if held == "HSDP":
        shape, placements = (2, world // 2), [Replicate(), Shard(0)]
    params = placed(params, init_device_mesh("cpu", shape), placements)
    return opt.MuonAdamW(matrices(params)), params


def give_step(params, held: str, step: int) -> None:
    from torch import distributed

    give(params, gradients(params, step))
    if held == "unreduced" and distributed.get_rank():  # all of it comes from one rank
        give(params, [torch.zeros_like(param) for param in params])


def alone(opt: Any, steps: int) -> list[torch.nn.Parameter]:
    params = plain_params()
    optimizer = opt.MuonAdamW(matrices(params), gradients="reduced")  # whoever else is alive
    for step in range(steps):
        give(params, gradients(params, step))
        optimizer.step()
    return params


def fail_midway(opt: Any, held: str, how: str) -> tuple[str, str, bool, float]:
    from torch import distributed

    optimizer, params = build(opt, held)
    saved = optimizer.state_dict()
    give_step(params, held, 0)
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
    first = again = "none"
    try:
        optimizer.step()
    except Exception as error:
        first = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    give_step(params, held, 1)
    try:
        optimizer.step()
    except RuntimeError as error:
        again = str(error)
    optimizer.load_state_dict(saved)
    return first, again, old_or_new(opt, params), seconds


def here(value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
    """What this rank has of a whole tensor that is held like a parameter."""
    from torch.distributed.tensor import distribute_tensor

    if not hasattr(param, "placements"):
        return value
    mesh, placements = param.device_mesh, param.placements
    return distribute_tensor(value, mesh, placements, src_data_rank=None).to_local()


def old_or_new(opt: Any, params) -> bool:
    for param, old, new in zip(params, plain_params(), alone(opt, 1), strict=True):
        both = [bits(here(value.detach(), param)) for value in (old, new)]
        if bits(local(param.detach())) not in both:
            return False
    return True


@pytest.mark.parametrize(
    ("held", "how"),
    [("FSDP2", "raises"), ("FSDP2", "killed"), ("HSDP", "raises"), ("unreduced", "raises")],
)
def test_the_others_end_with_an_error_in_time(doomed, held, how) -> None:
    outcomes = doomed(HELD[held][0]).outcomes(fail_midway, held, how, timeout=120)
    for rank, (answered, value) in enumerate(outcomes):
        if rank == FAULTY and how == "killed":
            assert not answered
            continue
        assert answered, value
        first, again, whole, seconds = value
        assert first != "none"
        if rank == FAULTY:
            assert first == "OutOfMemoryError: no room for this chunk"
        assert "an earlier step failed midway" in again
        assert whole, f"a parameter of rank {rank} is neither old nor new"
        assert seconds < TIMEOUT.total_seconds() + 15


def fail_everywhere_and_go_on(opt: Any, held: str) -> str:
    """All ranks fail behind the same exchange, load, and go on in the same processes."""
    optimizer, params = build(opt, held)
    give_step(params, held, 0)
    optimizer.step()
    kept = [local(param.detach()).clone() for param in params]
    saved = copy.deepcopy(optimizer.state_dict())
    give_step(params, held, 1)
    with pytest.MonkeyPatch.context() as patch:
        name = "reduce_scatter" if held == "unreduced" else "exchange"
        module, calls = module_of(opt, f"optimizers.sharded.{name}"), []
        original = module.apply

        def apply(*arguments: Any) -> None:
            calls.append(arguments)
            if len(calls) == 2:
                raise torch.OutOfMemoryError("no room for this update")
            original(*arguments)

        patch.setattr(module, "apply", apply)
        with pytest.raises(torch.OutOfMemoryError):
            optimizer.step()
    try:
        optimizer.step()
        message = "none"
    except RuntimeError as error:
        message = str(error)
    with torch.no_grad():
        for param, old in zip(params, kept, strict=True):
            local(param).copy_(old)
    optimizer.load_state_dict(saved)
    for step in (1, 2):
        give_step(params, held, step)
        optimizer.step()
    for param, expected in zip(params, alone(opt, 3), strict=True):
        assert bits(local(param.detach())) == bits(here(expected.detach(), param))
    return message


@pytest.mark.parametrize("held", HELD)
def test_a_step_that_fails_on_all_ranks_is_repeated_after_loading(ranks, held) -> None:
    """Messages that were on their way, and memory of the step, are no matter afterwards."""
    message = same_everywhere(ranks(HELD[held][0]).run(fail_everywhere_and_go_on, held))
    assert "an earlier step failed midway" in message


CLIP = {"q_indices": [0, 1], "k_indices": [0, 1], "head_dim": 4, "threshold": 1.0}


def die_in_largest_logits(opt: Any, held: str, folder: Path) -> list[str]:
    """One rank fails before it says which logits it has."""
    from torch import distributed

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
    return messages


@pytest.mark.parametrize("held", ["replicated", "unreduced"])
def test_a_rank_that_fails_in_the_clip_stops_the_others(doomed, held, tmp_path) -> None:
    """They do not go on unclipped, and no rank saves what was not clipped."""
    outcomes = doomed(2).outcomes(die_in_largest_logits, held, tmp_path, timeout=120)
    for rank, (answered, messages) in enumerate(outcomes):
        assert answered, messages
        heard, *later = messages
        assert ("KeyboardInterrupt" in heard) == (rank == FAULTY)
        assert heard != "none"
        assert all("an earlier step failed midway" in message for message in later), later
    assert not [*tmp_path.iterdir()]
