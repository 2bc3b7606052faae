"""Grouped products over packed experts of which some at a time are decoded to memory.

Slices of so many experts follow one another in one buffer, each decoded by one launch and
multiplied by another, and write their own rows of one result. An expert without rows is not
decoded. What does not depend on the weights (low-rank factors, tiles per slice, block sizes) is
made once. Nothing is computed by torch, so that a plan can play a layer of such products. ACTIVE is
one slice of the experts that have rows, wherever they lie, which torch finds and gathers.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..experts.expert_sort import ExpertOrder
from ..experts.grouped_launch_triton import launch_product, tile_of
from ..experts.grouped_launch_triton import packed as packed_factor
from ..launch.launch_plan import launch
from .formats import Stack
from .grouped_lora_quantized import ACTIVE, active_of

_TILES = 256  # of a program of `_tiles_of_slices`


@triton.jit(do_not_specialize=["bound"])
def _tiles_of_slices(
    tiles,  # (bound, 3)
    out,  # (slices, bound, 3)
    bound,
    count,
    BLOCK: tl.constexpr,
):
    number = tl.program_id(1)
    tile = (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    inside = tile < bound
    expert = tl.load(tiles + 3 * tile, mask=inside, other=-1)
    local = expert - number * count
    is_last = number == tl.num_programs(1) - 1
    mine = (expert >= 0) & (local >= 0) & ((local < count) | is_last)
    at = out + 3 * (number.to(tl.int64) * bound + tile)
    tl.store(at, tl.where(mine, local, -1), mask=inside)
    for place in tl.static_range(1, 3):
        value = tl.load(tiles + 3 * tile + place, mask=inside)
        tl.store(at + place, value, mask=inside)


def tiles_of_slices(tiles: Tensor, experts: int, count: int) -> Tensor:
    """(slices, bound, 3): tiles with experts counted within their slice, -1 for another slice's.

    Tiles of sentinels belong to the last slice, where they follow its experts.
    """
    slices = triton.cdiv(experts, count)
    if slices == 1:
        return tiles[None]
    bound = tiles.shape[0]
    out = torch.empty((slices, bound, 3), dtype=tiles.dtype, device=tiles.device)
    grid = (triton.cdiv(bound, _TILES), slices)
    launch(_tiles_of_slices, grid)(tiles, out, bound, count, BLOCK=_TILES)
    return out


def tiles_of_active(tiles: Tensor, position: Tensor, count: int) -> Tensor:
    """The tiles with experts named by their `position`; sentinels follow the `count` experts."""
    named = torch.cat((position, torch.full_like(position[:1], count)))
    expert = tiles[:, 0]
    local = torch.where(expert < 0, -1, named[expert.clamp(min=0)])
    return torch.cat((local[:, None], tiles[:, 1:]), 1)


def sliced_product(  # noqa: PLR0913
    x: Tensor,  # rows of the summed dimension
    stack: Stack,
    low: Tensor,  # (R, r)
    factor: Tensor | None,  # (E, r, columns)
    order: ExpertOrder,
    out: Tensor | None,
    *,
    count: int,  # experts per slice, or ACTIVE
    fan: int,
    scatter: bool,
    direction: str,
    bias: Tensor | None = None,
    gates: Tensor | None = None,
    other: Tensor | None = None,
    other_fan: int = 0,
) -> Tensor | None:
    """out = (x W_e + low factor_e + bias_e) gates; returns <row before its gate, other>."""
    experts, depth, columns = stack.shape
    slots, offsets, tiles = order.slots, order.offsets, order.tiles
    if factor is not None:
        factor = packed_factor(factor, x.dtype)
    rank = 0 if factor is None else factor.shape[1]
    kind = direction if other is None else "dots"
    tile = tile_of(x, order.tile_rows, depth, columns, kind, rank)
    dots = None
    if other is not None:  # every slice writes its own rows
        shape = (triton.cdiv(columns, tile.columns), slots.shape[0])
        dots = torch.empty(shape, dtype=torch.float32, device=x.device)

    def multiply(weight: Tensor, mine: slice | Tensor, part: Tensor) -> None:
        launch_product(
            x,
            weight.mT if stack.transposed else weight,
            low,
            None if factor is None else factor[mine],
            dataclasses.replace(order, tiles=part),
            out,
            tile=tile,
            fan=fan,
            scatter=scatter,
            bias=None if bias is None else bias[mine],
            gates=gates,
            other=other,
            other_fan=other_fan,
            dots=dots,
        )

    if tiles.shape[0] == 0:
        pass
    elif count == ACTIVE:
        ids, position = active_of(offsets, slots.shape[0])
        part = tiles_of_active(tiles, position, ids.shape[0])
        multiply(stack.decoder(x.dtype)(ids), ids, part)
    else:
        sizes = (min(count, experts), *stack.stored[1:])
        room = torch.empty(sizes, dtype=x.dtype, device=x.device)
        parts = tiles_of_slices(tiles, experts, count)
        for number in range(parts.shape[0]):
            first = number * count
            weight = room[: experts - first]
            stack.decode_slice(first, offsets, weight)
            multiply(weight, slice(first, first + weight.shape[0]), parts[number])
    return None if dots is None else dots.sum(0)
