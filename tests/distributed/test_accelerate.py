"""accelerate with FSDP2: the optimizer is made first, the model sharded by `prepare`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from ..optimizers._steps import TinyTransformer, language_loss
from ._cases import bits
from ._ranks import same_everywhere
from .test_wrappers import whole

pytestmark = pytest.mark.dist


def prepared(opt: Any, device: torch.device) -> tuple[Any, Any, Any]:
    """Accelerator, model and optimizer after `prepare`, on the ranks of this process's group.

    accelerate takes FSDP for something of GPUs: on a CPU its state is told by hand.
    """
    import accelerate
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from torch import distributed

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    plugin = accelerate.FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=True)
    cpu = device.type == "cpu"
    accelerator = accelerate.Accelerator(cpu=cpu, fsdp_plugin=None if cpu else plugin)
    if cpu:
        for state in (PartialState(), accelerator.state):
            state.distributed_type = accelerate.DistributedType.FSDP
        accelerator.state.fsdp_plugin = plugin
    assert accelerator.is_fsdp2 and accelerator.num_processes == distributed.get_world_size()
    torch.manual_seed(0)
    model = TinyTransformer()
    optimizer = opt.Muon(opt.get_default_muon_param_groups(model), lr=1e-3)
    return accelerator, *accelerator.prepare(model, optimizer)


def train(accelerator: Any, model: Any, optimizer: Any, steps: range) -> None:
    for step in steps:
        accelerator.backward(language_loss(model, seed=step))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()


def run(opt: Any, folder: str) -> tuple[list[bytes], list[bytes], list[bool]]:
    """Parameters after four steps, at once and from a checkpoint after two; where state lies."""
    from torch import distributed

    device = torch.device(os.environ["RANKS_DEVICE"])
    rank, world = str(distributed.get_rank()), str(distributed.get_world_size())
    launched = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    with patch.dict(os.environ, launched | {"OMP_NUM_THREADS": "1"}):
        accelerator, model, optimizer = prepared(opt, device)
        assert not optimizer.optimizer.state  # none while the parameters are whole
        train(accelerator, model, optimizer, range(2))
        accelerator.save_state(folder)
        train(accelerator, model, optimizer, range(2, 4))
        through = [bits(whole(param.detach())) for param in model.parameters()]
        states = [state for state in optimizer.state.values() if "momentum_buffer" in state]
        sharded = [hasattr(state["momentum_buffer"], "placements") for state in states]

        accelerator, model, optimizer = prepared(opt, device)
        accelerator.load_state(folder)
        train(accelerator, model, optimizer, range(2, 4))
    return through, [bits(whole(param.detach())) for param in model.parameters()], sharded


def test_accelerate_shards_saves_and_resumes(ranks, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    through, resumed, sharded = same_everywhere(ranks(2).run(run, str(tmp_path)))
    assert through == resumed
    assert sharded == [True] * 4
