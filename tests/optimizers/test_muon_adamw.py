"""The names for many ranks, with one rank, and the lines and arguments that are documented."""

from __future__ import annotations

import inspect
import re

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from .._compare import assert_all_same_bits, assert_same_bits
from ._steps import new_gradients, parameters, train, values


def groups(params, **options):
    return [
        {"kind": "muon", "params": params[:2], "lr": 0.05, "weight_decay": 0.1, **options},
        {"kind": "adamw", "params": params[2:], "lr": 0.05},
    ]


SHAPES = [(6, 4), (4, 6), (5,)]


@pytest.fixture(scope="module")
def world(tmp_path_factory):
    """An initialised gloo group of one process."""
    store = distributed.FileStore(str(tmp_path_factory.mktemp("gloo") / "store"), 1)
    distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


def trained(opt, device, make) -> list[torch.Tensor]:
    params = parameters(SHAPES, device=device)
    optimizer = make(groups(params))
    assert isinstance(optimizer, opt.MuonAdamW)
    train(optimizer, params, 4)
    return values(params)


@pytest.mark.sees_defect("two classes whose logic drifted apart")
def test_dist_muon_adamw_with_one_rank(opt, device) -> None:
    """One class, so that the rule cannot drift apart; closures and empty groups too."""
    plain = trained(opt, device, opt.MuonAdamW)
    assert_all_same_bits(plain, trained(opt, device, opt.DistMuonAdamW))
    optimizer = opt.DistMuonAdamW([{"kind": "muon", "params": [], "lr": 0.1}])
    assert optimizer.step(lambda: 3.0) == 3.0


def test_an_initialised_group_changes_nothing(opt, device, world) -> None:
    assert distributed.is_initialized()
    plain = trained(opt, device, opt.MuonAdamW)
    ways = [
        opt.DistMuonAdamW,
        lambda g: opt.DistMuonAdamW(g, world),
        lambda g: opt.DistMuonAdamW(g, process_group=world),
        lambda g: opt.MuonAdamW(g, gradients="unreduced"),
        lambda g: opt.MuonAdamW(g, gradients="unreduced", process_group=world),
    ]
    for make in ways:
        assert_all_same_bits(plain, trained(opt, device, make))


def test_wrong_distribution_arguments(opt, world) -> None:
    with pytest.raises(
        ValueError, match="gradients must be one of 'reduced', 'unreduced', got 'mean'"
    ):
        opt.MuonAdamW(groups(parameters(SHAPES)), gradients="mean")
    with pytest.raises(ValueError, match="reduce_op must be one of 'avg', 'sum', got 'max'"):
        opt.DistMuonAdamW(groups(parameters(SHAPES)), reduce_op="max")


@pytest.fixture(scope="module")
def mesh(world):
    return init_device_mesh("cpu", (1,))


def replicated(mesh, param, placement):
    sharded = torch.nn.Parameter(distribute_tensor(param.detach().clone(), mesh, [placement]))
    sharded.grad = distribute_tensor(param.grad.clone(), mesh, [placement])
    return sharded


@pytest.mark.sees_defect("replicated DTensors go to kernels as they are")
def test_replicated_dtensors_step_as_local_tensors(opt, submodule, mesh) -> None:
    """The work is done on local tensors; state is placed like the parameter."""
    plain = parameters(SHAPES)
    params = [replicated(mesh, param, Replicate()) for param in plain]
    optimizer, other = opt.MuonAdamW(groups(params)), opt.MuonAdamW(groups(plain))
    for step in range(3):
        new_gradients(plain, seed=step)
        for param, local in zip(params, plain, strict=True):
            param.grad = distribute_tensor(local.grad.clone(), mesh, [Replicate()])
        optimizer.step()
        other.step()
    for param, local in zip(params, plain, strict=True):
        assert_same_bits(param.detach().to_local(), local.detach())
    buffer = optimizer.state[params[0]]["momentum_buffer"]
    assert buffer.placements == (Replicate(),)
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same_bits(optimizer.state[params[0]]["momentum_buffer"].to_local(), buffer.to_local())
    optimizer.load_state_dict(other.state_dict())


def test_sums_that_are_not_made_are_refused_by_name(opt, mesh) -> None:
    (param,) = parameters([(6, 4)])
    partial = torch.nn.Parameter(DTensor.from_local(param.detach(), mesh, [Partial()]))
    with pytest.raises(TypeError, match=r"parameter 'w': a DTensor with placements \(Partial"):
        opt.Muon([("w", partial)])
    with pytest.raises(TypeError, match=r"parameter 'w': a DTensor with placements \(Partial"):
        opt.Muon([{"params": [("w", partial)], "use_muon": False}])


def test_a_gradient_placed_otherwise_is_refused(opt, mesh) -> None:
    (param,) = parameters([(6, 4)])
    sharded = replicated(mesh, param, Shard(0))
    optimizer = opt.Muon([("w", sharded)])
    sharded.grad = distribute_tensor(param.grad, mesh, [Shard(1)])
    with pytest.raises(TypeError, match=r"'w': gradient: it is placed as \(Shard\(dim=1\)"):
        optimizer.step()


def test_a_partial_gradient_is_refused_before_any_write(opt, mesh) -> None:
    plain = parameters([(6, 4), (6, 4)])
    params = [replicated(mesh, param, Replicate()) for param in plain]
    params[1].grad = DTensor.from_local(plain[1].grad, mesh, [Partial()])
    optimizer = opt.Muon(params)
    with pytest.raises(TypeError, match=r"parameter 1: gradient: a DTensor with .*Partial"):
        optimizer.step()
    assert_same_bits(params[0].detach().to_local(), plain[0].detach())


def test_public_names(opt) -> None:
    assert opt.muon.Muon is opt.Muon
    assert opt.muon.get_default_muon_param_groups is opt.get_default_muon_param_groups
    assert opt.muon.default_is_muon is opt.default_is_muon
    assert opt.integrations.checkpoint.save_optimizer is opt.save_optimizer
    assert opt.integrations.checkpoint.load_optimizer is opt.load_optimizer


def documented_arguments(docstring: str) -> set[str]:
    """The names before the colons of the Args section; "a, b: text" counts as two."""
    section = inspect.cleandoc(docstring).split("Args:\n", 1)[1].split("\n\n", 1)[0]
    heads = re.findall(r"^    (\w[\w, ]*):", section, re.MULTILINE)
    return {name for head in heads for name in head.split(", ")}


@pytest.mark.sees_defect("the documentation lists arguments that do not exist")
@pytest.mark.parametrize(
    "name",
    [
        "Muon",
        "MuonAdamW",
        "DistMuonAdamW",
        "default_is_muon",
        "get_default_muon_param_groups",
        "save_optimizer",
        "load_optimizer",
        "save_optimizer_async",
        "convert_state_dict",
        "profile_steps",
        "ProfileCallback",
    ],
)
def test_documented_arguments_are_the_arguments(opt, name) -> None:
    subject = getattr(opt, name)
    arguments = set(inspect.signature(subject).parameters) - {"self"}
    assert documented_arguments(subject.__doc__) == arguments


def test_step_keeps_the_predecessors_argument_names(opt) -> None:
    arguments = list(inspect.signature(opt.Muon.step).parameters)
    assert arguments == ["self", "closure", "qk_logits"]
    assert documented_arguments(opt.Muon.step.__doc__) == {"closure", "qk_logits"}


def test_every_option_of_a_group_is_an_argument_of_muon(opt, submodule) -> None:
    """And has a default in MuonAdamW, except lr; AdamW's own are named as in Muon."""
    options = submodule("optimizers.groups.options")
    names = set(options.option_names(options.MuonOptions))
    assert names <= set(inspect.signature(opt.Muon).parameters)
    defaults = submodule("optimizers.muon_adamw").DEFAULTS
    own = submodule("optimizers.groups.param_groups").DEFAULT_KEYS
    adamw = {own.get(name, name) for name in options.option_names(options.AdamWOptions)}
    assert set(defaults) == (names | adamw) - {"lr"}
