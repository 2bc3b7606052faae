"""The first step of several ranks makes their state, also behind a trainer that shards late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

from ._cases import bits
from ._ranks import same_everywhere
from .test_saving import Model, Run, value, whole

pytestmark = pytest.mark.dist


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    named = [*model.named_parameters()]
    table = [(name, p) for name, p in named if p.ndim < 2 or name == "embed.weight"]
    others = [(name, p) for name, p in named if p.ndim > 1 and name != "embed.weight"]
    both = {"lr": 0.05, "weight_decay": 0.1}
    return [
        {"kind": "muon", "params": others, "expert_keys": ("experts",), **both},
        {"kind": "adamw", "params": table, **both},
    ]


def sharded_late(opt: Any, late: bool) -> dict[str, bytes]:
    """As accelerate does with FSDP2: parameters are swapped in the groups of an optimizer."""
    model = Model()
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(value(name, -1))
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    if not late:
        fully_shard(model, mesh=mesh)
    optimizer = opt.MuonAdamW(groups_of(model))
    if late:
        optimizer.report()
        names = {param: name for name, param in model.named_parameters()}
        fully_shard(model, mesh=mesh)
        swapped = dict(model.named_parameters())
        for group in optimizer.param_groups:
            group["params"] = [swapped[names[param]] for param in group["params"]]
        assert not optimizer.state
    for step in range(2):
        for name, param in model.named_parameters():
            param.grad = distribute_tensor(
                value(name, step), mesh, param.placements, src_data_rank=None
            )
        optimizer.step()
    held = {p for group in optimizer.param_groups for p in group["params"]}
    assert set(optimizer.state) == held
    assert all(hasattr(p, "placements") for p in held)
    return {name: bits(whole(param)) for name, param in model.named_parameters()}


def test_a_model_may_be_sharded_after_the_optimizer_was_built(ranks) -> None:
    late = same_everywhere(ranks(2).run(sharded_late, True))
    assert late == same_everywhere(ranks(2).run(sharded_late, False))


def initial(opt: Any, held: str, narrow: bool) -> tuple[bool, float, int, str]:
    """What DCP's initial step leaves, and what the first real one says of equal gradients."""
    run = Run(opt, held, narrow=narrow)
    with torch.no_grad():
        for param in run.model.parameters():
            here = param.to_local() if hasattr(param, "to_local") else param
            if here.numel() > 1:
                here.view(-1)[:2] = torch.tensor([-0.0, float("inf")])
    before = run.weights()
    run.state()
    same = run.weights() == before
    tensors = [t for state in run.optimizer.state.values() for t in state.values()]
    here = [t.to_local() if hasattr(t, "to_local") else t for t in tensors]
    left = sum(t.abs().sum().item() for t in here)
    for param in run.model.parameters():
        param.grad = torch.ones_like(param)
    try:
        run.optimizer.step()
    except RuntimeError as error:
        return same, left, len(tensors), str(error)
    return same, left, len(tensors), ""


@pytest.mark.parametrize(
    ("held", "narrow", "world"),
    [("unreduced", False, 2), ("FSDP2", False, 3), ("FSDP2", True, 2), ("replicated", True, 2)],
)
def test_the_initial_step_of_dcp(ranks, held, narrow, world) -> None:
    for same, left, tensors, error in ranks(world).run(initial, held, narrow):
        assert same
        assert left == 0
        assert tensors > 0
        # The zeros that DCP made are not taken for gradients that something has reduced.
        assert ("every rank has the same gradients" in error) == (held == "unreduced")


def one_rank_has_zeros(opt: Any) -> tuple[float, bool]:
    rank = distributed.get_rank()
    matrix, vector = (nn.Parameter(torch.ones(shape)) for shape in ((4, 6), (2000,)))
    optimizer = opt.DistMuonAdamW(
        [
            {"kind": "muon", "params": [matrix], "lr": 0.0},
            {"kind": "adamw", "params": [vector], "lr": 0.0},
        ]
    )
    for param in (matrix, vector):
        param.grad = torch.full_like(param, float(rank))
    optimizer.step()
    counted = optimizer.state[vector]["step"].item()
    return counted, bool(optimizer.state[vector]["exp_avg"].to_local().any())


def test_a_warm_up_from_rate_zero_where_one_rank_has_zeros(ranks) -> None:
    """It is a step on all of them."""
    assert ranks(2).run(one_rank_has_zeros) == [(1.0, True)] * 2
