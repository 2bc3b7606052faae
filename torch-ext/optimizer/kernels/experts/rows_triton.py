"""The Triton kernels of expert_sort, combine and glu: all of a layer that is no product.

expert_sort is a stable counting sort in three launches, without atomics:
1. _count   one program per chunk of slots: how many of each expert it holds
2. _scan    one program per block of experts: exclusive sums over the chunks, and totals
3. _place   one program per chunk: row of every slot = start of its expert + slots of it in earlier
            chunks + equal slots before it in the chunk
            one program per expert and one for the unused rest: the tile map
Group E holds the sentinels. Everything is integers; the host waits for nothing.

_combine    out[t] = sum_j gates[t, j] y[rows[t k + j]] over valid rows: one program per (token,
            block of columns); y is read once and out written once
_glu        forward and backward: one program per (row, block of columns). tanh(x) is
            2 sigmoid(2 x) - 1, so that the interpreter and every backend compute the same
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...reference.glu import ELEMENTWISE, GPT_OSS_ALPHA, GPT_OSS_LIMIT
from ...reference.moe import tile_bound
from ..launch.launch_plan import launch

_CHUNK = 128  # slots; a chunk compares its slots pairwise, 128 x 128
_SCAN_CHUNKS = 128
_SCAN_GROUPS = 16
_FILL = 256
KINDS = {name: kind for kind, name in enumerate((*ELEMENTWISE, "gpt_oss"))}
_GELU = tl.constexpr(KINDS["gelu"])
_GELU_TANH = tl.constexpr(KINDS["gelu_tanh"])
_RELU = tl.constexpr(KINDS["relu"])
_RELU2 = tl.constexpr(KINDS["relu2"])
_GPT_OSS = tl.constexpr(KINDS["gpt_oss"])
_ALPHA = tl.constexpr(GPT_OSS_ALPHA)
_LIMIT = tl.constexpr(GPT_OSS_LIMIT)
_BLOCK = 1024


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


@triton.jit
def _place_slots(
    chunk,
    ids,
    counts,
    totals,
    offsets,
    slots,
    rows,
    total,
    experts,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
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


@triton.jit
def _mark_tiles(
    mine,
    totals,
    tiles,
    bound,
    experts,
    tile_rows,
    BLOCK: tl.constexpr,
    FILL: tl.constexpr,
):
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


@triton.jit(do_not_specialize=["total", "chunks", "bound"])
def _place(  # noqa: PLR0913
    ids,  # (R,)
    counts,  # (chunks, E + 1) exclusive
    totals,  # (E + 1,)
    offsets,  # (E + 1,), written by the first program
    slots,  # (R,)
    rows,  # (R,)
    tiles,  # (bound, 3)
    total,
    chunks,
    bound,
    experts,
    tile_rows,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
    FILL: tl.constexpr,
):
    program = tl.program_id(0)
    if program < chunks:
        chunk = program.to(tl.int64)
        _place_slots(chunk, ids, counts, totals, offsets, slots, rows, total, experts, CHUNK, BLOCK)
    else:
        _mark_tiles(program - chunks, totals, tiles, bound, experts, tile_rows, BLOCK, FILL)


def expert_sort_triton(
    expert_ids: Tensor, num_experts: int, tile_rows: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the three kernels; results as in `kernels.experts.expert_sort`.

    The ids (T, k) are contiguous, and some.
    """
    ids = expert_ids.view(-1)
    total, groups = ids.numel(), num_experts + 1

    def new(*shape: int, dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=ids.device)

    slots, rows, offsets = new(total), new(total), new(groups)
    bound = tile_bound(total, num_experts, tile_rows)
    tiles = new(bound, 3)
    chunks = triton.cdiv(total, _CHUNK)
    block = triton.next_power_of_2(groups)
    counts, totals = new(chunks, groups, dtype=torch.int32), new(groups, dtype=torch.int32)
    launch(_count, (chunks,))(ids, counts, total, num_experts, CHUNK=_CHUNK, BLOCK_G=min(64, block))
    launch(_scan, (triton.cdiv(groups, _SCAN_GROUPS),))(
        counts, totals, chunks, groups, BLOCK_C=_SCAN_CHUNKS, BLOCK_G=_SCAN_GROUPS
    )
    launch(_place, (chunks + groups + 1,))(
        *(ids, counts, totals, offsets, slots, rows, tiles, total, chunks, bound, num_experts),
        tile_rows,
        CHUNK=_CHUNK,
        BLOCK=block,
        FILL=_FILL,
    )
    return slots, rows, offsets, tiles


@triton.jit
def _combine(  # noqa: PLR0913
    y,  # (R, N)
    gates,  # (T, k) if GATED
    rows,  # (R,)
    offsets,  # (E + 1,)
    out,  # (T, N), contiguous
    N,
    top_k,
    experts,
    y_row,
    y_col,
    gates_token,
    gates_choice,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    valid_rows = tl.load(offsets + experts)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(top_k):
        row = tl.load(rows + token * top_k + j)
        valid = row < valid_rows
        mask = (columns < N) & valid
        value = tl.load(y + row * y_row + columns * y_col, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            at = gates + token * gates_token + j * gates_choice
            value *= tl.load(at, mask=valid, other=0.0).to(tl.float32)
        total += value
    tl.store(out + token * N + columns, total.to(out.dtype.element_ty), mask=columns < N)


def combine_triton(
    y: Tensor,
    gates: Tensor | None,
    rows: Tensor,
    offsets: Tensor,
    top_k: int,
    out: Tensor | None = None,
) -> Tensor:
    """Launch `_combine`; arguments as in `combine`, and where the result (T, N) goes."""
    tokens, n = rows.shape[0] // top_k, y.shape[1]
    out = y.new_empty((tokens, n)) if out is None else out
    if out.numel() == 0:
        return out
    block = min(_BLOCK, triton.next_power_of_2(n))
    launch(_combine, (tokens, triton.cdiv(n, block)))(
        y,
        y if gates is None else gates,
        rows,
        offsets,
        out,
        n,
        top_k,
        offsets.shape[0] - 1,
        *y.stride(),
        *((0, 0) if gates is None else gates.stride()),
        GATED=gates is not None,
        BLOCK=block,
    )
    return out


@triton.jit
def _activation(gate, KIND: tl.constexpr):
    """(act(gate), its derivative) in float32."""
    if KIND == _RELU:
        return tl.maximum(gate, 0.0), tl.where(gate > 0, 1.0, 0.0)
    if KIND == _RELU2:
        positive = tl.maximum(gate, 0.0)
        return positive * positive, 2.0 * positive
    if KIND == _GELU:
        cdf = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))  # 1 / sqrt(2)
        density = 0.3989422804014327 * tl.exp(-0.5 * gate * gate)  # 1 / sqrt(2 pi)
        return gate * cdf, cdf + gate * density
    if KIND == _GELU_TANH:  # gate * sigmoid(2 sqrt(2 / pi) (gate + 0.044715 gate^3))
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
        cdf = tl.sigmoid(inner)
        return gate * cdf, cdf + gate * cdf * (1.0 - cdf) * slope
    if KIND == _GPT_OSS:
        clamped = tl.minimum(gate, _LIMIT)
        cdf = tl.sigmoid(clamped * _ALPHA)
        slope = cdf + clamped * cdf * (1.0 - cdf) * _ALPHA
        return clamped * cdf, tl.where(gate <= _LIMIT, slope, 0.0)
    cdf = tl.sigmoid(gate)
    return gate * cdf, cdf + gate * cdf * (1.0 - cdf)


@triton.jit
def _factor(up, KIND: tl.constexpr):
    """(what the activation is multiplied with, its derivative) in float32."""
    if KIND == _GPT_OSS:
        inside = (up >= -_LIMIT) & (up <= _LIMIT)
        clamped = tl.minimum(tl.maximum(up, -_LIMIT), _LIMIT)
        return clamped + 1.0, tl.where(inside, 1.0, 0.0)
    return up, tl.full(up.shape, 1.0, tl.float32)


@triton.jit
def _glu(
    gate_up,  # (M, 2I)
    grad,  # (M, I) if BACKWARD
    out,  # (M, I), or (M, 2I) if BACKWARD; contiguous
    width,  # I
    row_stride,
    col_stride,
    grad_row,
    grad_col,
    KIND: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mask = columns < width
    gate_at = 2 * columns if INTERLEAVED else columns
    up_at = gate_at + 1 if INTERLEAVED else width + columns
    base = gate_up + row * row_stride
    gate = tl.load(base + gate_at * col_stride, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(base + up_at * col_stride, mask=mask, other=0.0).to(tl.float32)
    value, value_slope = _activation(gate, KIND)
    factor, factor_slope = _factor(up, KIND)
    if BACKWARD:
        at = grad + row * grad_row + columns * grad_col
        dy = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        target = out + row * 2 * width
        d_gate = (dy * factor * value_slope).to(out.dtype.element_ty)
        d_up = (dy * value * factor_slope).to(out.dtype.element_ty)
        tl.store(target + gate_at, d_gate, mask=mask)
        tl.store(target + up_at, d_up, mask=mask)
    else:
        result = (value * factor).to(out.dtype.element_ty)
        tl.store(out + row * width + columns, result, mask=mask)


def glu_triton(
    gate_up: Tensor, activation: str, interleaved: bool, grad: Tensor | None = None
) -> Tensor:
    """The result (M, I), or with `grad` of it the gradient of gate_up (M, 2I)."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((rows, width) if grad is None else gate_up.shape)
    if rows == 0:
        return out
    block = min(_BLOCK, triton.next_power_of_2(width))
    launch(_glu, (rows, triton.cdiv(width, block)))(
        gate_up,
        gate_up if grad is None else grad,
        out,
        width,
        *gate_up.stride(),
        *((0, 0) if grad is None else grad.stride()),
        KIND=KINDS[activation],
        INTERLEAVED=interleaved,
        BACKWARD=grad is not None,
        BLOCK=block,
    )
    return out
