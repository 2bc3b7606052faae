"""Memory that stays between steps, and a report of what this rank does."""

from __future__ import annotations

import itertools
import re
from typing import Any

import pytest
import torch
from torch import distributed, nn

from ._cases import device
from ._ranks import same_everywhere
from .test_sharing import give, gradients, module_of, on_all, plain_params
from .test_unreduced import contribution

pytestmark = pytest.mark.dist

MATRICES = [(16, 8)] * 6 + [(24, 16)] * 2
TABLE = (384, 16)
LIMIT = 3 * 4096


def unreduced(opt, **config: Any) -> tuple[Any, list[nn.Parameter]]:
    params = [nn.Parameter(torch.ones(shape, device=device())) for shape in [*MATRICES, TABLE]]
    muon = {"kind": "muon", "params": params[:-1], "lr": 0.1}
    others = {"kind": "adamw", "params": params[-1:], "lr": 0.1}
    config = opt.DistributedConfig(**config)
    return opt.DistMuonAdamW([muon, others], distributed=config), params


def memory(opt, wire: torch.dtype | None) -> tuple[int, int, int, int]:
    """Bytes of messages, of all blocks, and of the two pools that are asked for."""
    optimizer, params = unreduced(opt, in_flight_bytes=LIMIT, wire_dtype=wire)
    for step in range(2):
        for index, param in enumerate(params):
            param.grad = contribution(param.shape, distributed.get_rank(), step, index)
        optimizer.step()
    shared = optimizer._plan.shared
    (where,) = shared.staging.devices()
    blocks = shared.staging._blocks
    messages = sum(block.numel() for block in blocks["message", where])
    names = module_of(opt, "optimizers.sharded.cuda_graphs")
    here, beside = (shared.graphs._room[where, pool] for pool in (names.HERE, names.BESIDE))
    return messages, shared.staging.held(where), here, beside


@pytest.mark.parametrize("wire", [None, torch.float16], ids=str)
def test_messages_are_bounded(ranks, wire) -> None:
    """Also those of new rows, which come back in float32 where contributions go in float16."""
    travels = wire or torch.float32
    for messages, blocks, here, beside in ranks(2).run(memory, wire):
        assert 0 < messages <= LIMIT
        largest = max(6 // 2 * 16 * 8, 24 * 16)  # elements that an owner orthogonalizes at once
        # directions of two batches, and updates of those that are computed or on their way
        assert blocks <= LIMIT + largest * (2 * 4 + 3 * travels.itemsize)
        # contributions of a sixth of all messages, in float32, if they travel in float16
        assert 0 < here <= 2 * LIMIT // 6 if wire else here == 0
        assert beside == 13 * largest


def order_of_a_step(opt) -> list[str]:
    """The kinds of chunks that a step begins, one after another."""
    optimizer, _ = unreduced(opt, in_flight_bytes=LIMIT // 8)
    optimizer.fit_state()
    optimizer.report()  # which plans
    return [type(chunk).__name__ for _, chunk in optimizer._plan.shared.order]


def test_slices_travel_between_bands(ranks) -> None:
    """They keep the wire busy, and bands the multiprocessors."""
    order = same_everywhere(ranks(2).run(order_of_a_step))
    bands = [number for number, kind in enumerate(order) if kind == "Bands"]
    assert len(bands) >= 3 and order.count("SliceChunk") > len(bands)
    assert all(later - one > 1 for one, later in itertools.pairwise(bands))


def pool_of_captures(opt) -> int:
    """Bytes reserved by captures that work in ever larger memory, and do not stay."""
    where = torch.device("cuda", torch.cuda.current_device())
    capture = module_of(opt, "optimizers.sharded.cuda_graphs").capturer(where, 2**26)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for power in (23, 24, 25, 26):
        graph = capture(lambda size=2**power: _work_in(size, where))
        graph.replay()
        torch.cuda.synchronize()
        del graph
    return torch.cuda.memory_reserved() - before


def _work_in(size: int, where: torch.device) -> None:
    torch.empty(size, dtype=torch.uint8, device=where).zero_()


@pytest.mark.gpu
def test_captures_cut_up_one_block(ranks) -> None:
    """Not the sum of their sizes; and the pool outlives the last of them."""
    for reserved in ranks(2).run(pool_of_captures):
        assert 2**26 <= reserved <= 2**26 + 2**22


SHAPES = [(12, 8), (12, 8), (40, 30)]  # two matrices, a table for AdamW
PER_ELEMENT = 7 * 4  # gradient, buffer or moments twice, direction twice, parameter twice
MOMENTUM = 4 * 4  # gradient, buffer twice, direction


def reported(opt: Any, held: str) -> tuple[list[int], str]:
    params = on_all("S0", SHAPES) if held == "sharded" else plain_params(SHAPES)
    arguments = {"gradients": "unreduced"} if held == "unreduced" else {}
    groups = [
        {"kind": "muon", "params": params[:2], "lr": 0.1, "beta2": None},
        {"kind": "adamw", "params": params[2:], "lr": 0.1},
    ]
    optimizer = opt.MuonAdamW(groups, **arguments)
    optimizer.measure_steps()
    values = gradients(params, distributed.get_rank() if held == "unreduced" else 0)
    give(params, values)
    optimizer.step()
    *lines, last = optimizer.report(verbose=True).splitlines()
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
