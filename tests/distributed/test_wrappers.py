"""Models as torch's wrappers shard them: FSDP2, HSDP, tensor parallel with FSDP2, DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ._cases import bits
from ._ranks import same_everywhere

pytestmark = pytest.mark.dist

STEPS = 2


class Model(nn.Module):
    """Rows that no number of ranks divides, and fewer rows than ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(13, 6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.router = nn.Linear(6, 3, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        x = x + self.down(self.up(x).relu())
        return self.router(x)


class EvenModel(Model):
    """FSDP2 over tensor parallelism wants rows that divide."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8, bias=False)
        self.router = nn.Linear(8, 4, bias=False)


def build(wrapper: str, world: int) -> tuple[nn.Module, nn.Module]:
    """(the model to call, the model with the parameters)."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )
    from torch.nn.parallel import DistributedDataParallel

    torch.manual_seed(0)
    model = EvenModel() if wrapper == "TP" else Model()
    if wrapper == "DDP":
        return DistributedDataParallel(model), model
    if wrapper == "FSDP2":
        mesh = init_device_mesh("cpu", (world,))
    elif wrapper == "HSDP":
        mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    else:
        both = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("data", "tensor"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        parallelize_module(model, both["tensor"], plan)
        mesh = both["data"]
    fully_shard(model.up, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, model


def train_beside_one_rank(opt: Any, wrapper: str) -> list[bytes]:
    """Steps on the wrapper's own gradients equal steps of one rank on the same gradients."""
    from torch import distributed

    world = distributed.get_world_size()
    called, model = build(wrapper, world)
    arguments = {"process_group": distributed.group.WORLD} if wrapper == "DDP" else {}
    optimizer = opt.Muon(opt.get_default_muon_param_groups(model), lr=0.1, **arguments)
    names = [name for name, _ in model.named_parameters()]
    single = {
        name: nn.Parameter(whole(param.detach()).clone())
        for name, param in model.named_parameters()
    }
    routed = {
        name: group["use_muon"] for group, names_of in grouped(optimizer) for name in names_of
    }
    beside = opt.Muon(
        [
            {"params": [(n, single[n]) for n in names if routed[n] is kind], "use_muon": kind}
            for kind in (True, False)
        ],
        lr=0.1,
    )
    for step in range(STEPS):
        torch.manual_seed(100 * step + distributed.get_rank() // (2 if wrapper == "TP" else 1))
        logits = called(torch.randint(0, 13, (4, 5)))
        logits.square().mean().backward()
        for name, param in model.named_parameters():
            single[name].grad = None if param.grad is None else whole(param.grad).clone()
        optimizer.step()
        beside.step()
        optimizer.zero_grad()
    assert sum(routed.values()) == 3
    results = []
    for name, param in model.named_parameters():
        together = whole(param.detach())
        assert bits(together) == bits(single[name]), name
        results.append(bits(together))
    return results


def grouped(optimizer):
    groups = enumerate(optimizer.param_groups)
    return [(group, optimizer.parameter_names(number)) for number, group in groups]


def whole(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


@pytest.mark.parametrize(
    ("wrapper", "world"), [("FSDP2", 3), ("FSDP2", 4), ("HSDP", 4), ("TP", 4), ("DDP", 3)]
)
def test_wrapped_models_step_as_on_one_rank(ranks, wrapper, world) -> None:
    same_everywhere(ranks(world).run(train_beside_one_rank, wrapper))
