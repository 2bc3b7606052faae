"""nanochat's script on several ranks: its class, which adds up gradients, is replaced by ours."""

import functools

import pytest
import torch
from torch import nn

from ..optimizers.test_nanochat import JULY, NanochatMuonAdamW, script
from ._cases import bits, device
from ._ranks import on_ranks

pytestmark = pytest.mark.dist


def losses(opt) -> tuple[list[float], list[float]]:
    from torch import distributed

    place = {"rank": distributed.get_rank(), "world": distributed.get_world_size()}
    theirs = script(NanochatMuonAdamW, 50, **place)
    return theirs, script(functools.partial(opt.DistMuonAdamW, **JULY), 50, **place)


def test_the_script_runs_with_our_class(ranks) -> None:
    """Nothing in it but the class is another; every rank sees other data, and the same losses."""
    results = ranks(2).run(losses)
    assert results[0][0] != results[1][0]
    for theirs, ours in results:
        torch.testing.assert_close(ours, theirs, rtol=5e-3, atol=0.0)


SHAPES = {"a": (12, 8), "b": (8, 12), "c": (12, 8), "d": (30, 7), "e": (8, 8)}
OPTIONS = {
    "july": JULY,
    "july without variance reduction": {**JULY, "beta2": None},
    "transposed": {**JULY, "transposed": True, "split_sizes": {"b": (3, 9), "e": (4, 4)}},
    "heads in columns": {"transposed": True, "num_heads": {"a": 2, "b": 4}},
}


def as_one_process(opt, sharing: str, options: dict) -> None:
    from torch import distributed
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh(device(), (distributed.get_world_size(),))
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(shape, generator=generator) for shape in SHAPES.values()]
    alone = [nn.Parameter(value.to(device())) for value in drawn]
    shared = [nn.Parameter(p.detach().clone()) for p in alone]
    if sharing == "sharded":
        split = enumerate(shared)
        shared = [nn.Parameter(distribute_tensor(p, mesh, [Shard(k % 2)])) for k, p in split]
    options = {"kind": "muon", "lr": 0.1, "names": [*SHAPES], **options}
    make = {
        "unreduced": opt.DistMuonAdamW,
        "replicas": functools.partial(opt.MuonAdamW, process_group=distributed.group.WORLD),
        "sharded": opt.MuonAdamW,
    }[sharing]
    one, many = opt.MuonAdamW([{**options, "params": alone}]), make([{**options, "params": shared}])
    for _ in range(3):
        for param, piece in zip(alone, shared, strict=True):
            # Of eight bits, so that the contributions of both ranks have exactly this mean.
            grad = torch.randn(param.shape, generator=generator).bfloat16().float().to(device())
            param.grad = grad
            if sharing == "unreduced":
                piece.grad = grad * (0.5 + distributed.get_rank())
            elif sharing == "sharded":
                piece.grad = distribute_tensor(grad, mesh, piece.placements)
            else:
                piece.grad = grad.clone()
        one.step()
        many.step()
    for param, piece in zip(alone, shared, strict=True):
        assert bits(param) == bits(piece.full_tensor() if sharing == "sharded" else piece)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("sharing", ["unreduced", "replicas", "sharded"])
def test_ranks_give_the_bits_of_one_process(ranks, sharing, options) -> None:
    """Norms are of whole rows and matrices, which their owner has: also with columns sharded."""
    if device() == "cuda":
        pytest.skip("messages are float16 there, and directions of one process are not")
    ranks(2).run(as_one_process, sharing, options)


@pytest.mark.parametrize("sharding", ["replicas", "sharded"])
@on_ranks(2)
def test_the_size_of_gradients_changes_nothing_on_a_float16_wire(opt, sharding) -> None:
    """The wire multiplies every matrix by a power of two; rows get the norm 1 behind it.

    Float16 rounds the directions: 6e-4 to 8e-4 of an update.
    """
    from torch import distributed
    from torch.distributed.tensor import Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh(device(), (distributed.get_world_size(),))

    def stepped(factor: float, sharding: str = "", **options) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        params = []
        for number, shape in enumerate(SHAPES.values()):
            grad = torch.randn(shape, generator=generator) * factor
            grad = (grad * torch.logspace(0, -3, shape[0])[:, None]).to(device())
            value = torch.zeros_like(grad)
            if sharding == "sharded":
                placements = [Shard(number % 2)]
                value, grad = (distribute_tensor(x, mesh, placements) for x in (value, grad))
            params.append(nn.Parameter(value))
            params[-1].grad = grad
        rule = {"lr": 1.0, "weight_decay": 0.0, "dtype": torch.float32, **JULY}
        opt.Muon(params, **rule, **options).step()
        return [p.full_tensor() if sharding == "sharded" else p.detach() for p in params]

    alone = torch.cat([param.flatten() for param in stepped(2.0**-20)])
    options = {"distributed": opt.DistributedConfig(torch.float16)}
    if sharding == "replicas":
        options["process_group"] = distributed.group.WORLD
    found, errors = [], []
    for factor in (1.0, 2.0**-20, 1e-5):
        params = stepped(factor, sharding, **options)
        found.append([bits(param) for param in params])
        whole = torch.cat([param.flatten() for param in params])
        errors.append(((whole - alone).norm() / alone.norm()).item())
    whole, small, other = found
    assert small == whole != other
    assert max(errors) < 2e-3, errors
