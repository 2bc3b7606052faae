"""Options of a step on shards: QK-clip of the rows that are here, and the rounding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from ._cases import bits, expected_on, placement

pytestmark = pytest.mark.dist

NAMES = ("layers.0.attn.q_proj.weight", "layers.0.attn.k_proj.weight")
SHAPES = ((12, 6), (4, 6))  # three query heads of four rows, one key head
CONFIG = {"q_indices": [0, 1, 2], "k_indices": [0, 0, 0], "head_dim": 4, "threshold": 10.0}


def clip_on_shards(opt, world: int, text: str, rounding: str) -> int:
    """Two clipped steps on shards and on one rank; returns how many tensors were compared."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    mesh = init_device_mesh("cpu", (world,))

    def spread(tensor: torch.Tensor) -> torch.Tensor:
        return distribute_tensor(tensor.clone(), mesh, [placement(text)], src_data_rank=None)

    generator = torch.Generator().manual_seed(3)
    starts = [torch.randn(shape, generator=generator).bfloat16() for shape in SHAPES]
    grads = [[torch.randn(s, generator=generator).bfloat16() for s in SHAPES] for _ in range(2)]
    results = []
    for place in (torch.clone, spread):
        params = [nn.Parameter(place(start)) for start in starts]
        optimizer = opt.Muon(
            zip(NAMES, params, strict=True), rounding=rounding, clip_config=CONFIG, lr=0.02
        )
        for of_step in grads:
            for param, grad in zip(params, of_step, strict=True):
                param.grad = place(grad)
            optimizer.step(qk_logits={0: torch.tensor([40.0, 5.0, 20.0])})
        results.append([{"param": param.detach(), **optimizer.state[param]} for param in params])
    compared = 0
    for alone, together in zip(*results, strict=True):
        for key, found in together.items():
            here = found.to_local() if hasattr(found, "to_local") else found
            assert bits(here) == bits(expected_on(alone[key], found, mesh)), f"{text}: {key}"
            compared += 1
    return compared


@pytest.mark.parametrize("rounding", ["nearest", "residual"])
def test_qk_clip_scales_the_rows_that_are_here(ranks, rounding) -> None:
    """Three ranks have four, four and four rows of 12, and two, two and none of 4."""
    for text in ("S0", "S1", "R"):
        for compared in ranks(3).run(clip_on_shards, 3, text, rounding):
            assert compared == (4 if rounding == "nearest" else 6)


# Of rank 0, 1 and 2. Only the whole says what is to be clipped by how much.
LOGITS = [[40.0, 5.0, math.nan], [11.0, math.inf, 20.0], None]
LARGEST = [40.0, 5.0, 20.0]


def clip_by_ranks(opt, held: str) -> tuple[list[bytes], list[bytes]]:
    """Parameters of this rank, and those of one process that was given the largest logits."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    rank, world = distributed.get_rank(), distributed.get_world_size()
    arguments = {}
    if held == "process_group":
        arguments = {"process_group": distributed.group.WORLD}
    elif held == "unreduced":
        arguments = {"gradients": "unreduced", "reduce_op": "sum"}
    results = []
    for alone in (False, True):
        generator = torch.Generator().manual_seed(3)
        params = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]
        if not alone and held in ("S0", "R"):
            mesh = init_device_mesh("cpu", (world,))
            params = [
                nn.Parameter(distribute_tensor(p.detach(), mesh, [placement(held)])) for p in params
            ]
        group = {"kind": "muon", "params": params, "names": NAMES, "lr": 0.02}
        optimizer = opt.MuonAdamW([group], clip_config=CONFIG, **({} if alone else arguments))
        for step in range(3):
            for param, shape in zip(params, SHAPES, strict=True):
                grad = torch.randn(shape, generator=generator)
                if not alone and held == "unreduced" and rank != step:
                    grad = torch.zeros(shape)  # all of it comes from one rank
                if hasattr(param, "placements"):
                    grad = distribute_tensor(grad, param.device_mesh, param.placements)
                param.grad = grad
            given = LARGEST if alone else LOGITS[(rank + step) % 3]
            if step == 1:
                given = None  # of nobody
            optimizer.step(qk_logits=given and {0: torch.tensor(given)})
        whole = [p.full_tensor() if hasattr(p, "placements") else p for p in params]
        results.append([bits(param) for param in whole])
    return results[0], results[1]


@pytest.mark.parametrize("held", ["S0", "R", "process_group", "unreduced"])
def test_ranks_clip_by_the_largest_logits_of_all(ranks, held) -> None:
    """Each measures on its own part of the data; replicas would drift apart."""
    for found, expected in ranks(3).run(clip_by_ranks, held):
        assert found == expected


def refused(opt, shape: tuple[int, ...], kind: str) -> str:
    """The message for noise on a sharded parameter."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.ones(shape, dtype=torch.bfloat16)
    param = nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None))
    with pytest.raises(ValueError) as error:
        opt.MuonAdamW([{"kind": kind, "params": [param], "lr": 1e-3, "rounding": "stochastic"}])
    return str(error.value)


@pytest.mark.parametrize("kind", ["muon", "adamw"])
def test_noise_that_would_depend_on_the_shards_is_refused(ranks, kind) -> None:
    for message in ranks(2).run(refused, (4, 4), kind):
        assert "rounding='stochastic' is not supported" in message
        assert "use rounding='residual'" in message


def refused_at_the_step(opt) -> str:
    """The same for replicas that share the work, which a plan finds out."""
    from torch import distributed

    param = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    param.grad = torch.ones_like(param)
    optimizer = opt.Muon([param], rounding="stochastic", process_group=distributed.group.WORLD)
    with pytest.raises(ValueError) as error:
        optimizer.step()
    assert torch.equal(param.detach(), torch.ones(4, 4, dtype=torch.bfloat16))
    return str(error.value)


def test_noise_on_replicas_that_share_the_work_is_refused(ranks) -> None:
    for message in ranks(2).run(refused_at_the_step):
        assert "rounding='stochastic' is not supported" in message
