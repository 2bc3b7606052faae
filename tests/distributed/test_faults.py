"""A rank that fails in the middle of a step: every other one ends with an error, soon."""

from __future__ import annotations

import os
import signal
import time
from datetime import timedelta
from typing import Any

import pytest
import torch

from ..conftest import ROOT
from ._cases import bits
from ._ranks import Ranks
from .test_sharing import alone, give, gradients, local, module_of, placed, plain_params

pytestmark = pytest.mark.dist

TIMEOUT = timedelta(seconds=8)
FAULTY = 1


@pytest.fixture
def doomed(opt, repo_id, device):
    """Three ranks of their own, whose collectives give up early."""
    pool = Ranks(3, repo_id, str(ROOT), device.type, timeout=TIMEOUT)
    yield pool
    pool.close()


def fail_midway(opt: Any, how: str) -> tuple[str, str, bool, float]:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
    params = placed(plain_params(), mesh, [Shard(0)])
    optimizer = opt.Muon(params)
    saved = optimizer.state_dict()
    give(params, gradients(params, 0))
    if distributed.get_rank() == FAULTY:
        step = module_of(opt, "optimizers.shared_step")
        original, calls = step.orthogonalize, []

        def orthogonalize(x, **options):
            calls.append(x)
            if len(calls) == 2:
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise torch.OutOfMemoryError("no room for this chunk")
            return original(x, **options)

        step.orthogonalize = orthogonalize
    start = time.monotonic()
    first = again = "none"
    try:
        optimizer.step()
    except Exception as error:
        first = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - start
    give(params, gradients(params, 1))
    try:
        optimizer.step()
    except RuntimeError as error:
        again = str(error)
    optimizer.load_state_dict(saved)
    return first, again, old_or_new(opt, params), seconds


def old_or_new(opt: Any, params) -> bool:
    from torch.distributed.tensor import distribute_tensor

    for param, old, new in zip(params, plain_params(), alone(opt, 1), strict=True):
        both = [
            bits(
                distribute_tensor(
                    value.detach(), param.device_mesh, param.placements, src_data_rank=None
                ).to_local()
            )
            for value in (old, new)
        ]
        if bits(local(param.detach())) not in both:
            return False
    return True


@pytest.mark.parametrize("how", ["raises", "killed"])
def test_the_others_end_with_an_error_in_time(doomed, how) -> None:
    outcomes = doomed.outcomes(fail_midway, how, timeout=120)
    for rank, (answered, value) in enumerate(outcomes):
        if rank == FAULTY and how == "killed":
            assert not answered
            continue
        assert answered, value
        first, again, whole, seconds = value
        assert first != "none"
        if rank == FAULTY:
            assert first == "OutOfMemoryError: no room for this chunk"
        assert "an earlier step failed midway" in again
        assert whole, f"a parameter of rank {rank} is neither old nor new"
        assert seconds < TIMEOUT.total_seconds() + 15
