"""The Triton kernels of the grouped products; with `_low_rank_triton` what the paths compose.

_grouped_product  out = x W_e + low F_e + b_e: one program per (tile of rows, tile of columns)
_expert_product   out (E, a, b) = sum g left^T right: one program per (expert, tile of a, tile of b)
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
def _described(
    weight, expert, k, n, DESCRIBED: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The tile (BLOCK_K, BLOCK_N) of an expert at (k, n); what lies outside the stack is zero."""
    e, n = expert.to(tl.int32), n.to(tl.int32)
    if DESCRIBED == "K":  # stored (E, N, K)
        return tl.reshape(weight.load([e, n, k]), (BLOCK_N, BLOCK_K)).T
    return tl.reshape(weight.load([e, k, n]), (BLOCK_K, BLOCK_N))


@triton.jit(do_not_specialize=["total_rows", "tile_count"])
def _grouped_product(  # noqa: PLR0913
    x,  # rows of K, or their tensor descriptor
    weight,  # (E, K, N), or its tensor descriptor
    low,  # (R, r) in expert order, contiguous, if LORA
    factor,  # (E, r, N) if LORA
    bias,  # (E, N) if BIAS
    gates,  # (R,) in slot order if GATED
    other,  # rows of N if DOTS
    slots,  # (R,)
    tiles,  # (bound, 3)
    out,  # (R, N), contiguous, if STORES
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
    FAN: tl.constexpr,
    OTHER_FAN: tl.constexpr,
    SCATTER: tl.constexpr,
    LORA: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    DOTS: tl.constexpr,
    STORES: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN_K: tl.constexpr,  # K is a multiple of BLOCK_K
    EVEN_N: tl.constexpr,
    DESCRIBED: tl.constexpr,  # weight is a descriptor: "K" or "N" is what lies together; or ""
    ROWS_DESCRIBED: tl.constexpr,  # x is a descriptor, in expert order
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
    k = tl.arange(0, BLOCK_K).to(tl.int64)
    if not ROWS_DESCRIBED:
        at_x = x + _source(rows, inside, slots, FAN)[:, None] * x_row + k[None, :] * x_col
    if DESCRIBED == "":
        at_weight = weight + expert * weight_expert + columns[None, :] * weight_n
        at_weight += k[:, None] * weight_k
    x_step, weight_step = tl.full((), x_col, tl.int64), tl.full((), weight_k, tl.int64)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    known = expert < experts
    for start in range(0, tl.where(known, K, 0), BLOCK_K):
        if ROWS_DESCRIBED:  # rows of the next expert come along and are not stored
            values = x.load([first.to(tl.int32), start])
        elif EVEN_K:
            values = tl.load(at_x + start * x_step, mask=inside[:, None], other=0.0)
        else:
            x_mask = inside[:, None] & (k[None, :] < K - start)
            values = tl.load(at_x + start * x_step, mask=x_mask, other=0.0)
        if DESCRIBED != "":
            weights = _described(
                weight, expert, start, column_tile * BLOCK_N, DESCRIBED, BLOCK_N, BLOCK_K
            )
        elif EVEN_K and EVEN_N:
            weights = tl.load(at_weight + start * weight_step)
        else:
            weight_mask = (k[:, None] < K - start) & within[None, :]
            weights = tl.load(at_weight + start * weight_step, mask=weight_mask, other=0.0)
        total = _dot(values, weights, total, WIDEN)
    if LORA:
        at_low = low + rows[:, None] * rank
        at_factor = factor + expert * factor_expert + columns[None, :] * factor_n
        # One or two steps: in flight they would only take memory, float32 factors beyond what is.
        for start in tl.range(0, tl.where(known, rank, 0), BLOCK_R, num_stages=1):
            r = (start + tl.arange(0, BLOCK_R)).to(tl.int64)
            low_mask = inside[:, None] & (r[None, :] < rank)
            values = tl.load(at_low + r[None, :], mask=low_mask, other=0.0)
            factor_mask = (r[:, None] < rank) & within[None, :]
            weights = tl.load(at_factor + r[:, None] * factor_rank, mask=factor_mask, other=0.0)
            total = _dot(values, weights.to(values.dtype), total, WIDEN)
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
        at_out = out + target[:, None] * N + columns[None, :]
        tl.store(at_out, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _expert_product(  # noqa: PLR0913
    left,  # rows of A
    right,  # rows of B
    gates,  # (R,) in slot order if GATED
    slots,  # (R,)
    offsets,  # (E + 1,)
    out,  # (E, A, B)
    A,
    B,
    a_tiles,
    b_tiles,
    left_row,
    left_col,
    right_row,
    right_col,
    out_expert,
    out_a,
    out_b,
    LEFT_FAN: tl.constexpr,
    RIGHT_FAN: tl.constexpr,
    GATED: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_A: tl.constexpr,
    BLOCK_B: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    expert = program // (a_tiles * b_tiles)
    a = program // b_tiles % a_tiles * BLOCK_A + tl.arange(0, BLOCK_A)
    b = program % b_tiles * BLOCK_B + tl.arange(0, BLOCK_B)
    begin = tl.load(offsets + expert)
    end = tl.load(offsets + expert + 1)
    total = tl.zeros((BLOCK_A, BLOCK_B), tl.float32)
    for start in range(0, (end - begin).to(tl.int32), BLOCK_M):
        rows = begin + start + tl.arange(0, BLOCK_M)
        inside = rows < end
        at_left = left + _source(rows, inside, slots, LEFT_FAN)[None, :] * left_row
        left_mask = inside[None, :] & (a[:, None] < A)
        left_values = tl.load(at_left + a[:, None] * left_col, mask=left_mask, other=0.0)
        at_right = right + _source(rows, inside, slots, RIGHT_FAN)[:, None] * right_row
        right_mask = inside[:, None] & (b[None, :] < B)
        right_values = tl.load(at_right + b[None, :] * right_col, mask=right_mask, other=0.0)
        if GATED:
            slot = _source(rows, inside, slots, 1)
            gate = tl.load(gates + slot, mask=inside, other=0.0).to(tl.float32)
            left_values = (left_values.to(tl.float32) * gate[None, :]).to(right_values.dtype)
        total = _dot(left_values, right_values, total, WIDEN)
    at_out = out + expert * out_expert + a[:, None] * out_a + b[None, :] * out_b
    mask = (a[:, None] < A) & (b[None, :] < B)
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
