"""What one process may save of an optimizer that steps with other ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ._ranks import same_everywhere
from .test_sharing import assert_as_alone, give, gradients, local, placed, plain_params

pytestmark = pytest.mark.dist


def sharing(opt: Any, held: str) -> tuple[Any, list[Any]]:
    """An optimizer whose state the ranks hold in some way, and its parameters."""
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    params = plain_params()
    if held == "unreduced":
        return opt.DistMuonAdamW([{"kind": "muon", "params": params, "lr": 0.1}]), params
    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    params = placed(params, mesh, [Shard(0) if held == "sharded" else Replicate()])
    return opt.Muon(params), params


def save_a_part(opt: Any, held: str, saver: str, folder: Path) -> tuple[str, bool]:
    optimizer, _ = sharing(opt, held)
    try:
        getattr(opt, saver)(optimizer, folder)
    except TypeError as error:
        return str(error), folder.exists()
    return "none", True


@pytest.mark.parametrize("saver", ["save_optimizer", "save_optimizer_async"])
@pytest.mark.parametrize("held", ["sharded", "unreduced"])
def test_a_part_of_the_state_is_not_saved_as_the_whole(ranks, held, saver, tmp_path) -> None:
    """M3: such a file would have the shapes of one rank's shards, and nothing could load it."""
    message, written = same_everywhere(ranks(2).run(save_a_part, held, saver, tmp_path / "saved"))
    assert "save it with torch.distributed.checkpoint" in message
    assert ("'unreduced'" if held == "unreduced" else "group 0, parameter 0") in message
    assert not written


def save_replicas(opt: Any, folder: Path) -> None:
    from torch import distributed

    optimizer, params = sharing(opt, "replicated")
    give(params, gradients(params, 0))
    optimizer.step()
    if distributed.get_rank() == 0:
        opt.save_optimizer_async(optimizer, folder).wait()
    distributed.barrier()
    other, sharded = sharing(opt, "sharded")
    opt.load_optimizer(other, folder)
    with torch.no_grad():
        for param, replica in zip(sharded, params, strict=True):
            local(param).copy_(replica.redistribute(placements=param.placements).to_local())
    give(sharded, gradients(params, 1))
    other.step()
    assert_as_alone(opt, sharded, 2)


def test_replicas_are_saved_by_one_rank_and_loaded_into_shards(ranks, tmp_path) -> None:
    ranks(2).run(save_replicas, tmp_path / "saved")
