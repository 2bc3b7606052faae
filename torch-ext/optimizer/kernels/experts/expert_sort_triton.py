"""Triton path of expert_sort: a stable counting sort in four launches, without atomics.

1. _count   one program per chunk of slots: how many of each expert it holds
2. _scan    one program per block of experts: exclusive sums over the chunks, and totals
3. _place   one program per chunk: row of every slot = start of its expert + slots of it in earlier
            chunks + equal slots before it in the chunk
4. _tiles   one program per expert and one for the unused rest: the tile map

Group E holds the sentinels. Everything is integers; the host waits for nothing.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference.moe import tile_bound
from ..launch.launch_plan import launch

_CHUNK = 128  # slots; a chunk compares its slots pairwise, 128 x 128
_SCAN_CHUNKS = 128
_SCAN_GROUPS = 16
_FILL = 256


@triton.jit
def _group_of(ids, slots, total, experts):
    """The group of each slot: its expert, E for sentinels, -1 beyond the end."""
    inside = slots < total
    expert = tl.load(ids + slots, mask=inside, other=0).to(tl.int64)
    expert = tl.where((expert >= 0) & (expert < experts), expert, experts)
    return tl.where(inside, expert, -1)


@triton.jit(do_not_specialize=["total"])
def _count(
    ids,  # (R,)
    counts,  # (chunks, E + 1)
    total,
    experts,
    CHUNK: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    group = _group_of(ids, chunk * CHUNK + tl.arange(0, CHUNK), total, experts)
    for start in range(0, experts + 1, BLOCK_G):
        candidates = start + tl.arange(0, BLOCK_G)
        found = tl.sum((group[:, None] == candidates[None, :]).to(tl.int32), 0)
        at = counts + chunk * (experts + 1) + candidates
        tl.store(at, found, mask=candidates <= experts)


@triton.jit(do_not_specialize=["chunks"])
def _scan(
    counts,  # (chunks, E + 1), replaced by exclusive sums over the chunks
    totals,  # (E + 1,)
    chunks,
    groups,
    BLOCK_C: tl.constexpr,
    BLOCK_G: tl.constexpr,
):
    group = tl.program_id(0) * BLOCK_G + tl.arange(0, BLOCK_G)
    carried = tl.zeros((BLOCK_G,), tl.int32)
    for start in range(0, chunks, BLOCK_C):
        chunk = (start + tl.arange(0, BLOCK_C)).to(tl.int64)
        mask = (chunk[:, None] < chunks) & (group[None, :] < groups)
        at = counts + chunk[:, None] * groups + group[None, :]
        found = tl.load(at, mask=mask, other=0)
        before = tl.cumsum(found, 0) - found + carried[None, :]
        tl.store(at, before, mask=mask)
        carried += tl.sum(found, 0)
    tl.store(totals + group, carried, mask=group < groups)


@triton.jit
def _starts(totals, experts, BLOCK: tl.constexpr):
    """(group, its rows, its first row) of all E + 1 groups."""
    group = tl.arange(0, BLOCK)
    size = tl.load(totals + group, mask=group <= experts, other=0)
    return group, size, tl.cumsum(size, 0) - size


@triton.jit(do_not_specialize=["total"])
def _place(
    ids,  # (R,)
    counts,  # (chunks, E + 1) exclusive
    totals,  # (E + 1,)
    offsets,  # (E + 1,), written by the first program
    slots,  # (R,)
    rows,  # (R,)
    total,
    experts,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunk = tl.program_id(0).to(tl.int64)
    group, _, first = _starts(totals, experts, BLOCK)
    tl.store(offsets + group, first.to(tl.int64), mask=(group <= experts) & (chunk == 0))
    lane = tl.arange(0, CHUNK)
    slot = chunk * CHUNK + lane
    inside = slot < total
    mine = _group_of(ids, slot, total, experts)
    # Equal slots to the left; the chunk's own slots are compared pairwise.
    earlier = (mine[None, :] == mine[:, None]) & (lane[None, :] < lane[:, None])
    rank = tl.sum(earlier.to(tl.int32), 1)
    known = tl.where(inside, mine, 0)
    start = tl.gather(first, known.to(tl.int32), 0)
    before = tl.load(counts + chunk * (experts + 1) + known, mask=inside, other=0)
    row = (start + before + rank).to(tl.int64)
    tl.store(rows + slot, row, mask=inside)
    tl.store(slots + row, slot, mask=inside)


@triton.jit(do_not_specialize=["bound"])
def _tiles(
    totals,  # (E + 1,)
    tiles,  # (bound, 3)
    bound,
    experts,
    tile_rows,
    BLOCK: tl.constexpr,
    FILL: tl.constexpr,
):
    mine = tl.program_id(0)
    group, size, first = _starts(totals, experts, BLOCK)
    count = (size + tile_rows - 1) // tile_rows
    own = group == mine
    begin = tl.sum(tl.where(group < mine, count, 0), 0)
    row = tl.sum(tl.where(own, first, 0), 0).to(tl.int64)
    end = row + tl.sum(tl.where(own, size, 0), 0)
    used = mine <= experts  # the last program marks what is left
    many = tl.where(used, tl.sum(tl.where(own, count, 0), 0), bound - begin)
    for start in range(0, many, FILL):
        tile = start + tl.arange(0, FILL)
        at = tiles + (begin + tile).to(tl.int64) * 3
        mask = tile < many
        top = row + tile.to(tl.int64) * tile_rows
        tl.store(at, tl.where(used, mine, -1).to(tl.int64) + tl.zeros_like(top), mask=mask)
        tl.store(at + 1, tl.where(used, top, -1), mask=mask)
        tl.store(at + 2, tl.where(used, tl.minimum(top + tile_rows, end), -1), mask=mask)


def expert_sort_triton(
    expert_ids: Tensor, num_experts: int, tile_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the four kernels; arguments and results as in `kernels.experts.expert_sort`."""
    ids = expert_ids.reshape(-1).contiguous()  # reshape may give a view with gaps
    total, groups = ids.numel(), num_experts + 1

    def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=ids.device)

    slots, rows, offsets = new(total), new(total), new(groups)
    bound = tile_bound(total, num_experts, tile_rows)
    tiles = new(bound, 3)
    if total == 0:
        return slots, rows, offsets.zero_(), tiles
    chunks = triton.cdiv(total, _CHUNK)
    block = triton.next_power_of_2(groups)
    counts, totals = new(chunks, groups, dtype=torch.int32), new(groups, dtype=torch.int32)
    launch(_count, (chunks,))(ids, counts, total, num_experts, CHUNK=_CHUNK, BLOCK_G=min(64, block))
    launch(_scan, (triton.cdiv(groups, _SCAN_GROUPS),))(
        counts, totals, chunks, groups, BLOCK_C=_SCAN_CHUNKS, BLOCK_G=_SCAN_GROUPS
    )
    launch(_place, (chunks,))(
        ids, counts, totals, offsets, slots, rows, total, num_experts, CHUNK=_CHUNK, BLOCK=block
    )
    launch(_tiles, (groups + 1,))(
        totals, tiles, bound, num_experts, tile_rows, BLOCK=block, FILL=_FILL
    )
    return slots, rows, offsets, tiles
