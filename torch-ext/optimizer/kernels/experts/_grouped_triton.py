"""The Triton kernels of the grouped products; with `_low_rank_triton` what the paths compose.

_grouped_product  out = x W_e + low F_e + b_e: one program per (tile of rows, tile of columns)
_expert_sum       out (E, b) = sum g right: one program per (expert, tile of b)

A tile of rows belongs to one expert; tiles of expert E hold sentinels and write zeros, unused ones
(-1) return. Rows are gathered on load: row i lies at i (FAN 0) or at slots[i] // FAN. Every element
is owned by one program and summed in order of the rows or of k: no atomics. What follows the number
of tokens is not specialized, so that another length of sequence compiles nothing.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _begins_next(NEXT: tl.constexpr):
    """The next launch, if it is an early one, may begin; what it must wait for, it waits for."""
    if NEXT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _waits(EARLY: tl.constexpr):
    """Goes on when the launch before this one has ended and its results are there."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@triton.jit
def _source(rows, inside, slots, FAN: tl.constexpr):
    """Where rows in expert order lie in a tensor, int64."""
    if FAN == 0:
        return rows
    slot = tl.load(slots + rows, mask=inside, other=0)
    if FAN == 1:
        return slot
    return slot // FAN


@triton.jit
def _dot(a, b, total, WIDEN: tl.constexpr):
    """total + a b in float32; WIDEN because the interpreter multiplies the bits of bfloat16.

    float32 operands run on the FMA units, which round every addition: a step is summed on its own,
    so that the rounding errors of a long sum do not all pass through one chain of additions. The
    product with 1 keeps the compiler from folding the two sums into one.
    """
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), total, input_precision="ieee")
    if a.dtype == tl.float32:
        return tl.fma(tl.dot(a, b, input_precision="ieee"), 1.0, total)
    return tl.dot(a, b, total, input_precision="ieee")


@triton.jit
def _tile_of(program, tile_count, column_tiles, GROUP: tl.constexpr):
    """(row tile, column tile): GROUP row tiles walk the columns together and share weights."""
    per_group = GROUP * column_tiles
    first = program // per_group * GROUP
    size = tl.minimum(tile_count - first, GROUP)
    inner = program % per_group
    return first + inner % size, inner // size


@triton.jit
def _product(
    at_rows,  # (BLOCK_M,) pointers to the rows' first elements
    at_columns,  # (BLOCK_N,) pointers to the columns' first elements
    inside,
    within,
    row_step,
    column_step,
    K,
    known,
    WIDEN: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The products of rows and columns over K, (BLOCK_M, BLOCK_N); zero unless known."""
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    at_x = at_rows[:, None] + k[None, :] * row_step
    at_weight = at_columns[None, :] + k[:, None] * column_step
    x_step, weight_step = tl.full((), row_step, tl.int64), tl.full((), column_step, tl.int64)
    total = tl.zeros((at_rows.shape[0], at_columns.shape[0]), tl.float32)
    for start in range(0, tl.where(known, K, 0), BLOCK_K):
        if EVEN_K:
            values = tl.load(at_x + start * x_step, mask=inside[:, None], other=0.0)
        else:
            x_mask = inside[:, None] & (k[None, :] < K - start)
            values = tl.load(at_x + start * x_step, mask=x_mask, other=0.0)
        if EVEN_K and EVEN_N:
            weights = tl.load(at_weight + start * weight_step)
        else:
            weight_mask = (k[:, None] < K - start) & within[None, :]
            weights = tl.load(at_weight + start * weight_step, mask=weight_mask, other=0.0)
        total = _dot(values, weights, total, WIDEN)
    return total


@triton.jit
def _low_rank_step(
    low,  # (R, r), contiguous
    at_factor,  # (BLOCK_N,) pointers to the columns of the expert's first rank
    factor_rank,
    start,
    rows,
    inside,
    within,
    rank,
    known,
    BLOCK_R: tl.constexpr,
):
    """Ranks from start on of low and of F_e, zero unless known."""
    r = (start + tl.arange(0, BLOCK_R)).to(tl.int64)
    low_mask = (inside & known)[:, None] & (r[None, :] < rank)
    values = tl.load(low + rows[:, None] * rank + r[None, :], mask=low_mask, other=0.0)
    mask = (r[:, None] < rank) & (within & known)[None, :]
    weights = tl.load(at_factor[None, :] + r[:, None] * factor_rank, mask=mask, other=0.0)
    return values, weights


@triton.jit
def _plus_step(total, values, weights, inside, within, WIDEN: tl.constexpr):
    """total + values weights of `_low_rank_step`, which has had a sum's time to arrive.

    What is selected is there already; without it the compiler would move the operands into shared
    memory, and wait for them, where they are loaded.
    """
    values = tl.where(inside[:, None], values, 0.0)
    weights = tl.where(within[None, :], weights, 0.0).to(values.dtype)
    return _dot(values, weights, total, WIDEN)


@triton.jit
def _plus_low_rank(
    total,
    low,  # (R, r), contiguous
    at_factor,  # (BLOCK_N,) pointers to the columns of the expert's first rank
    factor_rank,
    rows,
    inside,
    within,
    rank,
    known,
    WIDEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """total + low F_e."""
    # One or two steps: in flight they would only take memory, float32 factors beyond what is.
    for start in tl.range(0, tl.where(known, rank, 0), BLOCK_R, num_stages=1):
        values, weights = _low_rank_step(
            low, at_factor, factor_rank, start, rows, inside, within, rank, known, BLOCK_R
        )
        total = _dot(values, weights.to(values.dtype), total, WIDEN)
    return total


@triton.jit
def _product_with_low_rank(  # noqa: PLR0913
    at_rows,
    at_columns,
    at_factor,  # (BLOCK_N,) pointers to the columns of the expert's first rank, if LORA
    low,
    rows,
    inside,
    within,
    row_step,
    column_step,
    factor_rank,
    K,
    rank,
    known,
    LORA: tl.constexpr,
    AHEAD: tl.constexpr,
    EARLY: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """`_product`, and with LORA low F_e.

    AHEAD: low and F_e are loaded before the sum over K, which hides how long that takes. The first
    EARLY programs may begin before there is anything to load, and do so after their sum.
    """
    if LORA and AHEAD:
        there = known
        if EARLY > 0:
            late = tl.program_id(0) < EARLY
            if not late:
                _waits(EARLY)
            there = known & (not late)
        values, weights = _low_rank_step(
            low, at_factor, factor_rank, 0, rows, inside, within, rank, there, BLOCK_R
        )
    total = _product(
        at_rows,
        at_columns,
        inside,
        within,
        row_step,
        column_step,
        K,
        known,
        WIDEN,
        EVEN_K,
        EVEN_N,
        BLOCK_K,
    )
    if LORA and AHEAD:
        if EARLY > 0:
            late = tl.program_id(0) < EARLY
            if late:
                _waits(EARLY)
                values, weights = _low_rank_step(
                    low, at_factor, factor_rank, 0, rows, inside, within, rank, known, BLOCK_R
                )
        total = _plus_step(total, values, weights, inside, within, WIDEN)
    else:
        _waits(EARLY)
    if LORA and not AHEAD:
        total = _plus_low_rank(
            total, low, at_factor, factor_rank, rows, inside, within, rank, known, WIDEN, BLOCK_R
        )
    return total


@triton.jit(do_not_specialize=["total_rows", "tile_count"])
def _grouped_product(  # noqa: PLR0913
    x,  # rows of K
    weight,  # (E, K, N)
    low,  # (R, r) in expert order, contiguous, if LORA
    factor,  # (E, r, N) if LORA
    bias,  # (E, N) if BIAS
    gates,  # (R,) in slot order if GATED
    other,  # rows of N if DOTS
    slots,  # (R,)
    tiles,  # (bound, 3)
    out,  # rows of N, whose columns are contiguous, if STORES
    dots,  # (column tiles, R) in slot order if DOTS
    K,
    N,
    rank,
    experts,
    total_rows,
    tile_count,
    column_tiles,
    x_row,
    x_col,
    weight_expert,
    weight_k,
    weight_n,
    factor_expert,
    factor_rank,
    factor_n,
    bias_expert,
    bias_n,
    other_row,
    other_col,
    out_row,
    FAN: tl.constexpr,
    OTHER_FAN: tl.constexpr,
    SCATTER: tl.constexpr,
    LORA: tl.constexpr,
    AHEAD: tl.constexpr,  # LoRA's operands are loaded before the sum over K, which hides the wait
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    DOTS: tl.constexpr,
    STORES: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    EVEN_N: tl.constexpr,
    EARLY: tl.constexpr,  # launched before `low` and `factor` are there; so many do not wait
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile, column_tile = _tile_of(tl.program_id(0).to(tl.int64), tile_count, column_tiles, GROUP)
    expert = tl.load(tiles + 3 * tile)
    if expert < 0:
        return
    first = tl.load(tiles + 3 * tile + 1)
    rows = first + tl.arange(0, BLOCK_M)
    inside = rows < tl.load(tiles + 3 * tile + 2)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    within = columns < N
    known = expert < experts
    at_x = x + _source(rows, inside, slots, FAN) * x_row
    at_weight = weight + expert * weight_expert + columns * weight_n
    at_factor = at_weight
    if LORA:
        at_factor = factor + expert * factor_expert + columns * factor_n
    total = _product_with_low_rank(
        at_x,
        at_weight,
        at_factor,
        low,
        rows,
        inside,
        within,
        x_col,
        weight_k,
        factor_rank,
        K,
        rank,
        known,
        LORA,
        AHEAD,
        EARLY,
        WIDEN,
        EVEN_K,
        EVEN_N,
        BLOCK_K,
        BLOCK_R,
    )
    if BIAS:
        at_bias = bias + expert * bias_expert + columns * bias_n
        total += tl.load(at_bias, mask=within & known, other=0.0).to(tl.float32)[None, :]
    slot = _source(rows, inside, slots, 1)
    mask = inside[:, None] & within[None, :]
    if DOTS:
        at_other = other + _source(rows, inside, slots, OTHER_FAN)[:, None] * other_row
        values = tl.load(at_other + columns[None, :] * other_col, mask=mask, other=0.0)
        products = tl.sum(total * values.to(tl.float32), 1)
        tl.store(dots + column_tile * total_rows + slot, products, mask=inside)
    if STORES:
        if GATED:
            total *= tl.load(gates + slot, mask=inside, other=0.0).to(tl.float32)[:, None]
        target = slot if SCATTER else rows
        at_out = out + target[:, None] * out_row + columns[None, :]
        tl.store(at_out, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _expert_sum(  # noqa: PLR0913
    right,  # rows of B
    gates,  # (R,) in slot order if GATED
    slots,  # (R,)
    offsets,  # (E + 1,)
    out,  # (E, B)
    B,
    right_row,
    right_col,
    out_expert,
    out_b,
    FAN: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    expert = tl.program_id(0).to(tl.int64)
    b = (tl.program_id(1) * BLOCK_B + tl.arange(0, BLOCK_B)).to(tl.int64)
    begin = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    total = tl.zeros((BLOCK_B,), tl.float32)
    for start in range(0, (end - begin).to(tl.int32), BLOCK_M):
        rows = begin + start + tl.arange(0, BLOCK_M)
        inside = rows < end
        at_right = right + _source(rows, inside, slots, FAN)[:, None] * right_row
        mask = inside[:, None] & (b[None, :] < B)
        values = tl.load(at_right + b[None, :] * right_col, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            slot = _source(rows, inside, slots, 1)
            values *= tl.load(gates + slot, mask=inside, other=0.0).to(tl.float32)[:, None]
        total += tl.sum(values, 0)
    tl.store(out + expert * out_expert + b * out_b, total.to(out.dtype.element_ty), mask=b < B)
