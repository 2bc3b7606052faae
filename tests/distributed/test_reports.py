"""report() on several ranks: what this one does, not what all of them do."""

from __future__ import annotations

import re
from typing import Any

import pytest
from torch import nn

from .test_sharing import give, gradients, placed, plain_params

pytestmark = pytest.mark.dist

SHAPES = [(12, 8), (12, 8), (40, 30)]  # two matrices, a table for AdamW
PER_ELEMENT = 7 * 4  # gradient, buffer or moments twice, direction twice, parameter twice
MOMENTUM = 4 * 4  # gradient, buffer twice, direction


def reported(opt: Any, held: str) -> tuple[list[int], str]:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard

    params: list[nn.Parameter] = plain_params(SHAPES)
    arguments = {"gradients": "unreduced"} if held == "unreduced" else {}
    if held == "sharded":
        mesh = init_device_mesh("cpu", (distributed.get_world_size(),))
        params = placed(params, mesh, [Shard(0)])
    groups = [
        {"kind": "muon", "params": params[:2], "lr": 0.1, "beta2": None},
        {"kind": "adamw", "params": params[2:], "lr": 0.1},
    ]
    optimizer = opt.MuonAdamW(groups, **arguments)
    optimizer.measure_steps()
    values = gradients(params, distributed.get_rank() if held == "unreduced" else 0)
    give(params, values)
    optimizer.step()
    *lines, last = optimizer.report().splitlines()
    moved = [int(re.search(r"(\d+) bytes moved", line)[1]) for line in lines]
    return moved, last


@pytest.mark.parametrize("held", ["sharded", "unreduced"])
def test_bytes_are_those_of_this_rank(ranks, held) -> None:
    """The whole parameter on every rank would count everything twice."""
    answers = ranks(2).run(reported, held)
    totals = [sum(of_param) for of_param in zip(*(moved for moved, _ in answers), strict=True)]
    matrix, table = 12 * 8, 40 * 30
    if held == "sharded":
        assert totals == [matrix * PER_ELEMENT] * 2 + [table * PER_ELEMENT]
    else:  # one owner advances the momentum, and both apply the update
        assert totals == [matrix * (MOMENTUM + 2 * 12)] * 2 + [table * PER_ELEMENT]
    for _, last in answers:
        assert ", of what this rank does" in last
    measured = [last.endswith("beside what ranks share") for _, last in answers]
    assert measured == [held == "sharded"] * 2  # AdamW on shards is each rank's own
