"""The Triton kernels of the LoRA intermediates, and the reordering of factors; see _grouped_triton.

_low_rank   out (R, r) = s x F_e^T: one program per (BLOCK_M of a tile's rows, block of the rank,
            part of K)
_sum_parts  out = s (sum over the parts) + more: one program per block of elements, in order
_reorder    (E, r, N) between two strides: one program per tile of N x (r E)

A long K is cut into parts so that few tiles of rows still fill the device. Where the cuts lie
depends on K alone, so the bits of a row do not depend on how many rows there are.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._grouped_triton import _begins_next, _dot, _source, _waits


@triton.jit(do_not_specialize=["total_rows"])
def _low_rank(  # noqa: PLR0913
    x,  # rows of K
    factor,  # (E, r, K)
    slots,  # (R,)
    tiles,  # (bound, 3)
    out,  # (parts, R, r), contiguous
    K,
    rank,
    experts,
    total_rows,
    span,  # of K per part
    x_row,
    x_col,
    factor_expert,
    factor_rank,
    factor_col,
    scaling,
    FAN: tl.constexpr,
    SCATTER: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN: tl.constexpr,  # every step of every part lies within K
    SHARE: tl.constexpr,  # programs that share a tile of rows
    EARLY: tl.constexpr,  # launched before its predecessor ended
    BLOCK_M: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NEXT: tl.constexpr,  # the next launch may begin beside this one
):
    _waits(EARLY)
    _begins_next(NEXT)  # not before: the next launch reads what the one before this wrote
    program = tl.program_id(0).to(tl.int64)
    tile = program // SHARE
    ranks = (tl.program_id(1) * BLOCK_R + tl.arange(0, BLOCK_R)).to(tl.int64)
    part = tl.program_id(2)
    expert = tl.load(tiles + 3 * tile)
    first = tl.load(tiles + 3 * tile + 1) + program % SHARE * BLOCK_M
    last = tl.load(tiles + 3 * tile + 2)
    if (expert < 0) | (first >= last):
        return
    rows = first + tl.arange(0, BLOCK_M)
    inside = rows < last
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    at_x = x + _source(rows, inside, slots, FAN)[:, None] * x_row + k[None, :] * x_col
    at_factor = factor + expert * factor_expert + ranks[None, :] * factor_rank
    at_factor += k[:, None] * factor_col
    wanted = ranks[None, :] < rank
    total = tl.zeros((BLOCK_M, BLOCK_R), tl.float32)
    begin = part * span
    end = tl.where(expert < experts, tl.minimum(begin + span, K), begin)
    x_step, factor_step = tl.full((), x_col, tl.int64), tl.full((), factor_col, tl.int64)
    for start in range(begin, end, BLOCK_K):
        if EVEN:
            x_mask, factor_mask = inside[:, None], wanted
        else:
            x_mask = inside[:, None] & (k[None, :] < K - start)
            factor_mask = (k[:, None] < K - start) & wanted
        values = tl.load(at_x + start * x_step, mask=x_mask, other=0.0)
        weights = tl.load(at_factor + start * factor_step, mask=factor_mask, other=0.0)
        total = _dot(values, weights.to(values.dtype), total, WIDEN)
    target = _source(rows, inside, slots, 1) if SCATTER else rows
    at_out = out + (part.to(tl.int64) * total_rows + target)[:, None] * rank + ranks[None, :]
    value = (scaling * total).to(out.dtype.element_ty)
    tl.store(at_out, value, mask=inside[:, None] & wanted)


@triton.jit(do_not_specialize=["size"])
def _sum_parts(
    parts,  # (parts, size) float32
    more,  # (size,) float32 if MORE
    out,  # (size,)
    size,
    count,
    scaling,
    MORE: tl.constexpr,
    BLOCK: tl.constexpr,
    NEXT: tl.constexpr,  # the next launch may begin beside this one
):
    _begins_next(NEXT)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    step = tl.full((), size, tl.int64)
    for part in range(count):
        total += tl.load(parts + part * step + at, mask=at < size, other=0.0)
    total *= scaling
    if MORE:
        total += tl.load(more + at, mask=at < size, other=0.0)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=at < size)


@triton.jit
def _at(column, experts, by_expert, by_rank, FLAT: tl.constexpr):
    """Where column (rank, expert), expert fastest, begins; FLAT: columns follow one another."""
    if FLAT:
        return column * by_expert
    return column % experts * by_expert + column // experts * by_rank


@triton.jit
def _reorder(  # noqa: PLR0913
    source,  # (E, r, N), any strides
    target,  # (E, r, N), other strides
    N,
    columns,  # r E
    experts,
    source_expert,
    source_rank,
    source_n,
    target_expert,
    target_rank,
    target_n,
    SOURCE_FLAT: tl.constexpr,
    TARGET_FLAT: tl.constexpr,
    EARLY: tl.constexpr,  # launched before its predecessor ended, which it does not read
    BLOCK_N: tl.constexpr,
    BLOCK_C: tl.constexpr,
    NEXT: tl.constexpr,  # the next launch may begin beside this one
):
    _begins_next(NEXT)
    n = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    mask = (n[:, None] < N) & (column[None, :] < columns)
    at = _at(column, experts, source_expert, source_rank, SOURCE_FLAT)
    value = tl.load(source + n[:, None] * source_n + at[None, :], mask=mask)
    at = _at(column, experts, target_expert, target_rank, TARGET_FLAT)
    place = target + n[:, None] * target_n + at[None, :]
    tl.store(place, value.to(target.dtype.element_ty), mask=mask)
    if EARLY:  # it ends after its predecessor: who waits for this waits for both
        is_first = (tl.program_id(0) == 0) & (tl.program_id(1) == 0)
        if is_first:
            _waits(EARLY)
