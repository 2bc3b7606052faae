"""torch.distributed.checkpoint between numbers of ranks and ways to hold the parameters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ._cases import bits
from ._ranks import same_everywhere

pytestmark = pytest.mark.dist

STEPS = 2  # before and after
# How the parameters are held, on how many ranks.
HELD = (
    ("plain", 1),
    ("FSDP2", 2),
    ("FSDP2", 3),
    ("FSDP2", 4),
    ("HSDP", 4),
    ("replicated", 3),
    ("unreduced", 2),
    ("unreduced", 3),
    ("unreduced", 4),
)


class Model(nn.Module):
    """Rows that no number of ranks divides, fewer rows than ranks, a large table, experts."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(41, 30)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.router = nn.Linear(6, 3, bias=False)
        self.experts = nn.Parameter(torch.empty(5, 6, 4))


def shapes() -> dict[str, tuple[int, ...]]:
    return {name: tuple(param.shape) for name, param in Model().named_parameters()}


def value(name: str, step: int) -> Tensor:
    """The parameter before the first step (-1), or its gradient."""
    generator = torch.Generator().manual_seed(100 * (step + 1) + sorted(shapes()).index(name))
    return torch.randn(shapes()[name], generator=generator)


class Run:
    """A model and its optimizer, held in some way by the ranks of the group, from equal weights."""

    def __init__(self, opt: Any, held: str, weights: int = -1, narrow: bool = False) -> None:
        from torch import distributed
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.held = held
        self.world, self.rank = distributed.get_world_size(), distributed.get_rank()
        self.model = Model().to(torch.bfloat16 if narrow else torch.float32)
        with torch.no_grad():
            for name, param in self.model.named_parameters():
                param.copy_(value(name, weights))
        if held in ("FSDP2", "HSDP"):
            shape, names = ((self.world,), ("shards",))
            if held == "HSDP":
                shape, names = (2, self.world // 2), ("copies", "shards")
            fully_shard(self.model, mesh=init_device_mesh("cpu", shape, mesh_dim_names=names))
        named = dict(self.model.named_parameters())
        matrices = [(name, p) for name, p in named.items() if p.ndim > 1 and name != "embed.weight"]
        others = [(name, p) for name, p in named.items() if p.ndim < 2 or name == "embed.weight"]
        both = {"lr": 0.05, "weight_decay": 0.1, "rounding": "residual" if narrow else "nearest"}
        groups = [
            {"kind": "muon", "params": matrices, "expert_keys": ("experts",), **both},
            {"kind": "adamw", "params": others, **both},
        ]
        arguments: dict[str, Any] = {}
        if held == "replicated":
            arguments = {"process_group": distributed.group.WORLD}
        elif held == "unreduced":
            arguments = {"gradients": "unreduced", "reduce_op": "sum"}
        self.optimizer = opt.MuonAdamW(groups, **arguments)

    def train(self, steps: range) -> None:
        from torch.distributed.tensor import distribute_tensor

        for step in steps:
            for name, param in self.model.named_parameters():
                grad = value(name, step).to(param.dtype)
                if hasattr(param, "placements"):
                    mesh, placed = param.device_mesh, param.placements
                    grad = distribute_tensor(grad, mesh, placed, src_data_rank=None)
                elif self.held == "unreduced":  # every element from one rank: an exact sum
                    mine = torch.arange(grad.numel()) % self.world == self.rank
                    grad = grad * mine.view(grad.shape)
                param.grad = grad
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        from torch.distributed.checkpoint.state_dict import get_state_dict

        weights, state = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": state}

    def load(self, folder: Path) -> None:
        from torch.distributed import checkpoint as dcp
        from torch.distributed.checkpoint.state_dict import set_state_dict

        content = self.state()
        dcp.load(content, checkpoint_id=folder)
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
        )

    def weights(self) -> dict[str, bytes]:
        return {name: bits(whole(param)) for name, param in self.model.named_parameters()}


def whole(param: Tensor) -> Tensor:
    return param.full_tensor() if hasattr(param, "full_tensor") else param


def expected(opt: Any, narrow: bool = False) -> dict[str, bytes]:
    """The weights after all steps of a run that nothing interrupted."""
    run = Run(opt, "plain", narrow=narrow)
    run.train(range(2 * STEPS))
    return run.weights()


def save(opt: Any, held: str, folder: Path, narrow: bool = False) -> None:
    from torch.distributed import checkpoint as dcp

    run = Run(opt, held, narrow=narrow)
    run.train(range(STEPS))
    dcp.save(run.state(), checkpoint_id=folder)


def go_on(opt: Any, held: str, folder: Path, narrow: bool = False) -> dict[str, bytes]:
    run = Run(opt, held, weights=7, narrow=narrow)
    run.load(folder)
    run.train(range(STEPS, 2 * STEPS))
    return run.weights()


@pytest.fixture(scope="module")
def saved(ranks, tmp_path_factory) -> dict[tuple[str, int], Path]:
    folder = tmp_path_factory.mktemp("checkpoints")
    made = {}
    for held, world in HELD:
        made[held, world] = folder / f"{held}-{world}"
        ranks(world).run(save, held, made[held, world])
    return made


@pytest.mark.parametrize(("held", "world"), HELD, ids=[f"{h}-{w}" for h, w in HELD])
def test_any_ranks_go_on_to_the_same_bits(ranks, saved, held, world) -> None:
    """The optimizer's results do not depend on how many ranks there are; so nothing may change."""
    (uninterrupted,) = ranks(1).run(expected)
    for source, folder in saved.items():
        found = same_everywhere(ranks(world).run(go_on, held, folder))
        differing = [name for name in found if found[name] != uninterrupted[name]]
        assert not differing, f"saved by {source}: {differing}"


@pytest.mark.parametrize(("held", "world"), [("HSDP", 4), ("plain", 1), ("replicated", 3)])
def test_what_rounding_dropped_is_kept(ranks, held, world, tmp_path) -> None:
    """bfloat16 parameters with their residuals, saved by three ranks."""
    ranks(3).run(save, "FSDP2", tmp_path / "saved", True)
    (uninterrupted,) = ranks(1).run(expected, True)
    found = same_everywhere(ranks(world).run(go_on, held, tmp_path / "saved", True))
    assert found == uninterrupted


def only_the_model(opt: Any, held: str, folder: Path) -> tuple[dict[str, bytes], float]:
    from torch.distributed import checkpoint as dcp

    run = Run(opt, held, weights=7)
    content = {"model": run.state()["model"]}
    dcp.load(content, checkpoint_id=folder)
    run.model.load_state_dict(content["model"])
    states = run.optimizer.state.values()
    kept = sum(whole(t).abs().sum().item() for state in states for t in state.values())
    return run.weights(), kept


def after_the_first_steps(opt: Any) -> dict[str, bytes]:
    run = Run(opt, "plain")
    run.train(range(STEPS))
    return run.weights()


@pytest.mark.parametrize(("held", "world"), [("FSDP2", 3), ("unreduced", 2)])
def test_the_weights_alone(ranks, saved, held, world) -> None:
    """A checkpoint of both serves a run that begins with new state, or none."""
    (trained,) = ranks(1).run(after_the_first_steps)
    answers = ranks(world).run(only_the_model, held, saved["FSDP2", 4])
    for found, kept in answers:
        assert found == trained
        assert kept == 0


def file_per_rank(opt: Any, held: str, folder: Path) -> dict[str, bytes]:
    """Save and load this rank's state_dicts as plain data, and go on."""
    run = Run(opt, held)
    run.train(range(STEPS))
    path = folder / f"{run.rank}.pt"
    torch.save([run.model.state_dict(), run.optimizer.state_dict()], path)
    other = Run(opt, held, weights=7)
    weights, state = torch.load(path, weights_only=True)
    other.model.load_state_dict(weights)
    other.optimizer.load_state_dict(state)
    other.train(range(STEPS, 2 * STEPS))
    return other.weights()


@pytest.mark.parametrize(("held", "world"), [("HSDP", 4), ("unreduced", 3)])
def test_a_state_dict_per_rank_loads_without_code(ranks, held, world, tmp_path) -> None:
    """`torch.load(..., weights_only=True)` of shards, and of owners' parts."""
    (uninterrupted,) = ranks(1).run(expected)
    assert same_everywhere(ranks(world).run(file_per_rank, held, tmp_path)) == uninterrupted
