"""What one process may save, checkpoints between numbers of ranks, and the first step's state."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributed import checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ._cases import bits, device, held_like, local, placed_like, whole
from ._ranks import on_ranks, same_everywhere
from .test_partition import (
    advance,
    assert_as_alone,
    give,
    gradients,
    message_of,
    module_of,
    on_all,
    outcome,
    plain_params,
)

pytestmark = pytest.mark.dist


def sharing(opt: Any, held: str) -> tuple[Any, list[Any]]:
    """An optimizer whose state the ranks hold in some way, and its parameters."""
    params = plain_params()
    if held == "unreduced":
        return opt.DistMuonAdamW([{"kind": "muon", "params": params, "lr": 0.1}]), params
    params = on_all("S0" if held == "sharded" else "R")
    return opt.Muon(params, beta2=0.9), params


@pytest.mark.parametrize("saver", ["save_optimizer", "save_optimizer_async"])
@pytest.mark.parametrize("held", ["sharded", "unreduced"])
@on_ranks(2)
def test_a_part_of_the_state_is_not_saved_as_the_whole(opt: Any, held, saver, tmp_path) -> Any:
    """Such a file would have the shapes of one rank's shards, and nothing could load it."""
    folder = tmp_path / "saved"
    optimizer, _ = sharing(opt, held)
    message = message_of(lambda: getattr(opt, saver)(optimizer, folder))
    assert message.startswith("TypeError: ")
    assert "save it with torch.distributed.checkpoint" in message
    assert ("'unreduced'" if held == "unreduced" else "group 0, parameter 0") in message
    assert not folder.exists()
    return message


@on_ranks(2)
def test_replicas_are_saved_by_one_rank_and_loaded_into_shards(opt, tmp_path) -> None:
    folder = tmp_path / "saved"
    optimizer, params = sharing(opt, "replicated")
    advance(optimizer, params, 0)
    if distributed.get_rank() == 0:
        opt.save_optimizer_async(optimizer, folder).wait()
    distributed.barrier()
    other, sharded = sharing(opt, "sharded")
    opt.load_optimizer(other, folder)
    with torch.no_grad():
        for param, replica in zip(sharded, params, strict=True):
            local(param).copy_(held_like(param, whole(replica)))
    advance(other, sharded, 1)
    assert_as_alone(opt, sharded, 2, beta2=0.9)


class OnItsWay:
    """An answer that comes later, as on a GPU."""

    def synchronize(self) -> None:
        pass


def answers_that_come_later(opt: Any, patch: Any) -> None:
    module = module_of(opt, "optimizers.sharded.consistency")

    def comparison(found, device, meaning):
        return module.Comparison(found, OnItsWay(), meaning)

    patch.setattr(module, "_comparison", comparison)


@on_ranks(2)
def test_a_checkpoint_hears_the_last_answer(opt, tmp_path) -> Any:
    """Right after a step that one rank took without a gradient, on any device."""
    optimizer, params = sharing(opt, "replicated")
    saved = optimizer.state_dict()
    with pytest.MonkeyPatch.context() as patch:
        answers_that_come_later(opt, patch)
        give(params, gradients(params, 0))
        if distributed.get_rank() == 1:
            params[2].grad = None
        optimizer.step()
        path = tmp_path / str(distributed.get_rank())
        messages = [
            message_of(lambda: opt.save_optimizer(optimizer, path)),
            message_of(optimizer.state_dict),
            message_of(optimizer.step),
        ]
        optimizer.load_state_dict(saved)
        advance(optimizer, params, 0)
        optimizer.state_dict()
    heard, *later = messages
    assert "ranks disagree on which parameters have gradients" in heard
    assert all("an earlier step failed midway" in message for message in later)
    assert not [*tmp_path.iterdir()]
    return messages


@on_ranks(2)
def test_offload_of_a_part_of_the_state_is_refused(opt: Any) -> Any:
    params = [torch.nn.Parameter(torch.ones(40, 30)), *plain_params()]
    groups = [
        {"kind": "adamw", "params": params[:1], "lr": 0.1},  # in slices
        {"kind": "muon", "params": params[1:], "lr": 0.1},
    ]
    optimizer = opt.DistMuonAdamW(groups)
    message = message_of(optimizer.turn_on_cpu_offload)
    for param in params:
        param.grad = torch.full_like(param, 1.0 + distributed.get_rank())
    optimizer.step()
    assert message.startswith("ValueError: CPU offload is not supported with gradients='unre")
    assert not optimizer.offloaded
    return message


@on_ranks(2)
def test_the_full_state_of_unreduced_gradients_is_that_of_owners(opt: Any) -> None:
    """As communication.md says: each matrix on one rank, so that no rank has the whole."""
    model = torch.nn.ModuleDict({name: torch.nn.Linear(6, 8, bias=False) for name in "abcd"})
    optimizer = opt.DistMuonAdamW([{"kind": "muon", "params": model.parameters(), "lr": 0.1}])
    options = StateDictOptions(full_state_dict=True)
    found = get_optimizer_state_dict(model, optimizer, options=options)["state"]
    owned = torch.tensor(["momentum_buffer" in found[f"{name}.weight"] for name in "abcd"]).int()
    owned = owned.to(device())
    assert owned.any()
    distributed.all_reduce(owned)
    assert owned.tolist() == [1] * 4


@pytest.mark.parametrize("later", [False, True], ids=["at once", "later"])
@pytest.mark.parametrize("spoilt", [math.nan, -1.0, None])
@pytest.mark.parametrize("held", ["sharded", "unreduced"])
@on_ranks(3)
def test_a_part_that_one_rank_refuses_to_load_stops_all(opt, held, spoilt, later) -> None:
    """The others would go on with another state than it.

    One rank's part holds a value that no step leaves, or lacks an entry, and that rank loads an
    older state_dict then. Answers come `later` as on a GPU.
    """
    _, params = sharing(opt, held)
    make = opt.MuonAdamW if held == "sharded" else opt.DistMuonAdamW
    optimizer = make([{"kind": "adamw", "lr": 0.1, "params": params}])
    older, rank = copy.deepcopy(optimizer.state_dict()), distributed.get_rank()
    of_rank = rank if held == "unreduced" else 0
    messages = []

    def step(seed: int) -> None:
        give(params, gradients(params, 2 * of_rank + seed))
        message, written = outcome(optimizer, params)
        messages.append(message)
        assert written == (message == "none")

    with pytest.MonkeyPatch.context() as patch:
        if later:
            answers_that_come_later(opt, patch)
        step(0)
        good = copy.deepcopy(optimizer.state_dict())
        bad = copy.deepcopy(good)
        if rank == 1 and spoilt is None:
            del bad["state"][0]["exp_avg"]
        elif rank == 1:
            local(bad["state"][0]["exp_avg_sq"]).fill_(spoilt)
        messages.append(message_of(lambda: optimizer.load_state_dict(bad)))
        if rank == 1:
            optimizer.load_state_dict(older)
        step(1)
        step(1)
        optimizer.load_state_dict(good)
        step(1)
        step(0)
    expected = "has no exp_avg" if spoilt is None else f"the loaded exp_avg_sq holds {spoilt}"
    first, load, *stopped, third, fourth = messages
    assert expected in load if rank == 1 else load == "none"
    assert first == third == fourth == "none"
    said = f"state_dicts were refused since the last step (here {int(rank == 1)}). Give"
    assert len(stopped) == 2 and all(said in message for message in stopped), stopped


@on_ranks(2)
def test_what_all_ranks_refuse_changes_nothing(opt: Any) -> Any:
    optimizer, params = sharing(opt, "sharded")
    advance(optimizer, params, 2)  # which makes the state
    bad = copy.deepcopy(optimizer.state_dict())
    bad["state"][0] = {}
    messages = []
    for seed in range(2):
        messages.append(message_of(lambda: optimizer.load_state_dict(bad)))
        give(params, gradients(params, seed))
        messages.append(message_of(optimizer.step))
    refused, stepped, *again = messages
    assert "the loaded state has no" in refused and stepped == "none"
    assert again == [refused, stepped]
    return refused


@on_ranks(2)
def test_one_rank_may_load_what_it_has_whole(opt: Any) -> None:
    optimizer, params = sharing(opt, "replicated")
    advance(optimizer, params, 0)
    if distributed.get_rank() == 0:
        optimizer.load_state_dict(optimizer.state_dict())
    give(params, gradients(params, 1))
    assert message_of(optimizer.step) == "none"


STEPS = 2  # before and after
# How the parameters are held, on how many ranks.
HELD = (("plain", 1), ("HSDP", 4), ("replicated", 3))
HELD += tuple((held, world) for held in ("FSDP2", "unreduced") for world in (2, 3, 4))


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
            {"kind": "muon", "params": matrices, "expert_keys": ("experts",), "beta2": 0.9, **both},
            {"kind": "adamw", "params": others, **both},
        ]
        arguments: dict[str, Any] = {}
        if held == "replicated":
            arguments = {"process_group": distributed.group.WORLD}
        elif held == "unreduced":
            arguments = {"gradients": "unreduced", "reduce_op": "sum"}
        self.optimizer = opt.MuonAdamW(groups, **arguments)

    def train(self, steps: range) -> None:
        for step in steps:
            for name, param in self.model.named_parameters():
                grad = value(name, step).to(param.dtype)
                if self.held == "unreduced":  # every element from one rank: an exact sum
                    mine = torch.arange(grad.numel()) % self.world == self.rank
                    grad = grad * mine.view(grad.shape)
                param.grad = placed_like(param, grad)
            self.optimizer.step()

    def state(self) -> dict[str, Any]:
        weights, state = get_state_dict(self.model, self.optimizer)
        return {"model": weights, "optimizer": state}

    def load(self, folder: Path) -> None:
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


def expected(opt: Any, narrow: bool = False) -> dict[str, bytes]:
    """The weights after all steps of a run that nothing interrupted."""
    run = Run(opt, "plain", narrow=narrow)
    run.train(range(2 * STEPS))
    return run.weights()


def save(opt: Any, held: str, folder: Path, narrow: bool = False) -> None:
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


def test_what_rounding_dropped_is_kept(ranks, tmp_path) -> None:
    ranks(3).run(save, "FSDP2", tmp_path / "saved", True)
    (uninterrupted,) = ranks(1).run(expected, True)
    for held, world in (("HSDP", 4), ("plain", 1), ("replicated", 3)):
        found = ranks(world).run(go_on, held, tmp_path / "saved", True)
        assert same_everywhere(found) == uninterrupted, held


@pytest.mark.parametrize(("held", "world"), [("HSDP", 4), ("unreduced", 3)])
@on_ranks()
def test_a_state_dict_per_rank_loads_without_code(opt, held, world, tmp_path) -> None:
    """`torch.load(..., weights_only=True)` of shards, and of owners' parts."""
    run = Run(opt, held)
    run.train(range(STEPS))
    path = tmp_path / f"{run.rank}.pt"
    torch.save([run.model.state_dict(), run.optimizer.state_dict()], path)
    other = Run(opt, held, weights=7)
    weights, state = torch.load(path, weights_only=True)
    other.model.load_state_dict(weights)
    other.optimizer.load_state_dict(state)
    other.train(range(STEPS, 2 * STEPS))
    assert other.weights() == expected(opt)


@on_ranks(2)
def test_a_model_may_be_sharded_after_the_optimizer_was_built(opt) -> None:
    """As accelerate does with FSDP2: parameters are swapped in the groups of an optimizer."""
    late, other = Run(opt, "plain"), Run(opt, "FSDP2")
    model, optimizer = late.model, late.optimizer
    optimizer.report()
    names = {param: name for name, param in model.named_parameters()}
    fully_shard(model, mesh=init_device_mesh("cpu", (late.world,)))
    swapped = dict(model.named_parameters())
    for group in optimizer.param_groups:
        group["params"] = [swapped[names[param]] for param in group["params"]]
    assert not optimizer.state
    for run in (late, other):
        run.train(range(2))
    assert set(optimizer.state) == {*swapped.values()}
    assert all(hasattr(param, "placements") for param in swapped.values())
    assert late.weights() == other.weights()


@pytest.mark.parametrize(
    ("held", "narrow", "world"),
    [("unreduced", False, 2), ("FSDP2", False, 3), ("FSDP2", True, 2), ("replicated", True, 2)],
)
@on_ranks()
def test_the_initial_step_of_dcp(opt: Any, held, narrow, world) -> None:
    run = Run(opt, held, narrow=narrow)
    with torch.no_grad():
        for param in run.model.parameters():
            if local(param).numel() > 1:
                local(param).view(-1)[:2] = torch.tensor([-0.0, float("inf")])
    before = run.weights()
    run.state()
    same = run.weights() == before
    tensors = [t for state in run.optimizer.state.values() for t in state.values()]
    assert same and tensors
    assert not any(local(tensor).any() for tensor in tensors)
    for param in run.model.parameters():
        param.grad = torch.ones_like(param)
    # The zeros that DCP made are not taken for gradients that something has reduced.
    error = message_of(run.optimizer.step)
    assert ("every rank has the same gradients" in error) == (held == "unreduced")


@on_ranks(2)
def test_a_warm_up_from_rate_zero_where_one_rank_has_zeros(opt: Any) -> None:
    """It is a step on all of them."""
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
    assert (counted, bool(optimizer.state[vector]["exp_avg"].to_local().any())) == (1.0, True)
