"""What the precision on the wire keeps, and what NaN and inf do to it."""

from __future__ import annotations

import pytest
import torch

from ._cases import bits
from ._ranks import same_everywhere
from .test_sharing import give, gradients, placed, plain_params

pytestmark = pytest.mark.dist


def tiny_gradients(opt, wire, scale: float) -> tuple[float, float]:
    """Error of a step by what the wire rounds, and by rounding the directions to bfloat16."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    results = []
    for dtype in (torch.float32, wire):
        params = placed(plain_params([(24, 96)]), mesh, [Shard(1)])
        optimizer = opt.Muon(
            params,
            lr=1.0,
            adjust_lr_fn=None,
            weight_decay=0.0,
            distributed=opt.DistributedConfig(dtype),
        )
        give(params, [grad * scale for grad in gradients(params, 0)])
        optimizer.step()
        results.append(params[0].detach().full_tensor())
    (grad,) = gradients(params, 0)
    coarse = opt.orthogonalize(grad.bfloat16().float()) - opt.orthogonalize(grad)
    return (results[0] - results[1]).norm().item(), coarse.norm().item()


@pytest.mark.parametrize("scale", [1.0, 1e-9, 1e-30, 1e30])
def test_the_wire_keeps_eleven_bits_of_tiny_gradients(ranks, scale) -> None:
    """Bfloat16 would keep 8, float16 without a scale nothing of the tiny ones."""
    error, coarse = same_everywhere(ranks(3).run(tiny_gradients, torch.float16, scale))
    # Three bits more are an eighth of the error; the update is rounded to eleven bits as well.
    assert 0 < error < coarse / 4


def nan_on_one_rank(opt, wire) -> list[bytes]:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    params = placed(plain_params(), mesh, [Shard(0)])
    optimizer = opt.Muon(params, distributed=opt.DistributedConfig(wire))
    give(params, gradients(params, 0))
    if distributed.get_rank() == 1:
        params[0].grad.to_local()[0, 0] = float("nan")
        params[3].grad.to_local()[0, 0] = float("inf")
    optimizer.step()
    full = [param.detach().full_tensor() for param in params]
    assert full[0].isnan().all() and full[3].isnan().all()
    assert not any(full[i].isnan().any() for i in (1, 2, 4, 5))
    return [bits(tensor.nan_to_num()) for tensor in full]


@pytest.mark.parametrize("wire", [torch.float32, torch.float16])
def test_nan_and_inf_on_one_rank_stay_in_their_matrix_on_all(ranks, wire) -> None:
    same_everywhere(ranks(3).run(nan_on_one_rank, wire))
