"""The Triton kernels of a gated layer: the activation where its operands are made.

_gated_forward   h = act(gate) up of x W_e + low F_e + b_e, whose columns are gate and up in turn
_gated_backward  the gradients of gate and up from d = dy W_e^T + low F_e; h again, and <d, h>

One program per (tile of rows, tile of columns), the tiles of `_grouped_triton`. What a program has
made, rounded, it also multiplies with its part of LoRA's next factor: parts of (R, r), one per tile
of columns, that `_sum_parts` adds in order. So nobody reads h or the gradient for a sum of rank r.
Gate and up are neighbours in the accumulator, whatever their place in memory: no data crosses
threads for the activation.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ._grouped_triton import _dot, _plus_low_rank, _product, _source, _tile_of
from .glu_triton import _activation, _factor


@triton.jit
def _place_of(pair, width, INTERLEAVED: tl.constexpr):
    """Where column `pair` (gate 0, up 0, gate 1, ...) lies in memory."""
    if INTERLEAVED:
        return pair
    return pair % 2 * width + pair // 2


@triton.jit
def _plus_product(
    part,  # (BLOCK_M, BLOCK_R)
    values,  # (BLOCK_M, depth) in the dtype of the activations
    at_factor,  # (depth,) pointers to the expert's first rank
    factor_rank,
    there,  # (depth,)
    rank,
    WIDEN: tl.constexpr,
):
    """part + values F_e of these columns."""
    r = tl.arange(0, part.shape[1]).to(tl.int64)
    mask = there[:, None] & (r[None, :] < rank)
    factor = tl.load(at_factor[:, None] + r[None, :] * factor_rank, mask=mask, other=0.0)
    return _dot(values, factor.to(values.dtype), part, WIDEN)


@triton.jit(do_not_specialize=["total_rows", "tile_count"])
def _gated_forward(  # noqa: PLR0913
    x,  # rows of K
    weight,  # (E, K, 2I)
    low,  # (R, r) in expert order, contiguous, if LORA
    factor,  # (E, r, 2I) if LORA; if PAIRED the columns of this launch, gate and up in turn
    bias,  # (E, 2I) if BIAS
    after,  # (E, a, I) if AFTER
    slots,  # (R,)
    tiles,  # (bound, 3)
    wide,  # (R, 2I), contiguous, if KEEPS
    out,  # (R, I), contiguous
    parts,  # (column tiles, R, a) if AFTER
    K,
    width,  # I
    rank,
    after_rank,
    experts,
    total_rows,
    tile_count,
    column_tiles,  # of this launch
    first_tile,
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
    after_expert,
    after_step,
    after_n,
    FAN: tl.constexpr,
    LORA: tl.constexpr,
    PAIRED: tl.constexpr,
    BIAS: tl.constexpr,
    AFTER: tl.constexpr,
    KEEPS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_A: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile, column_tile = _tile_of(tl.program_id(0).to(tl.int64), tile_count, column_tiles, GROUP)
    expert = tl.load(tiles + 3 * tile)
    if expert < 0:
        return
    rows = tl.load(tiles + 3 * tile + 1) + tl.arange(0, BLOCK_M)
    inside = rows < tl.load(tiles + 3 * tile + 2)
    known = expert < experts
    column_tile += first_tile
    pair = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    within = pair < 2 * width
    columns = _place_of(pair, width, INTERLEAVED)
    at_x = x + _source(rows, inside, slots, FAN) * x_row
    at_weight = weight + expert * weight_expert + columns * weight_n
    total = _product(
        at_x, at_weight, inside, within, x_col, weight_k, K, known, WIDEN, EVEN_K, EVEN_N, BLOCK_K
    )
    if LORA:
        place = pair - first_tile * BLOCK_N if PAIRED else columns
        at_factor = factor + expert * factor_expert + place * factor_n
        total = _plus_low_rank(
            total, low, at_factor, factor_rank, rows, inside, within, rank, known, WIDEN, BLOCK_R
        )
    if BIAS:
        at_bias = bias + expert * bias_expert + columns * bias_n
        total += tl.load(at_bias, mask=within & known, other=0.0).to(tl.float32)[None, :]
    rounded = total.to(out.dtype.element_ty)
    gate, up = tl.split(tl.reshape(rounded, (BLOCK_M, BLOCK_N // 2, 2)))
    inner = column_tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    mask = inside[:, None] & (inner < width)[None, :]
    if KEEPS:
        at_wide = wide + rows[:, None] * (2 * width)
        if INTERLEAVED:
            tl.store(at_wide + pair[None, :], rounded, mask=inside[:, None] & within[None, :])
        else:
            tl.store(at_wide + inner[None, :], gate, mask=mask)
            tl.store(at_wide + width + inner[None, :], up, mask=mask)
    value, _ = _activation(gate.to(tl.float32), KIND)
    other, _ = _factor(up.to(tl.float32), KIND)
    h = (value * other).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * width + inner[None, :], h, mask=mask)
    if AFTER:
        at_after, there = after + expert * after_expert + inner * after_n, (inner < width) & known
        part = tl.zeros((BLOCK_M, BLOCK_A), tl.float32)
        part = _plus_product(part, h, at_after, after_step, there, after_rank, WIDEN)
        r = tl.arange(0, BLOCK_A).to(tl.int64)
        at_part = parts + (column_tile * total_rows + rows)[:, None] * after_rank + r[None, :]
        tl.store(at_part, part, mask=inside[:, None] & (r[None, :] < after_rank))


@triton.jit
def _half_backward(  # noqa: PLR0913
    total,  # (BLOCK_M, C): the gradient of h before its gate
    part,  # (BLOCK_M, BLOCK_A)
    first,  # of the C columns
    gate_of_row,  # (BLOCK_M,)
    rows,
    inside,
    known,
    wide,
    out,
    h,
    at_after,
    after_step,
    after_n,
    after_rank,
    width,
    PAIRED: tl.constexpr,
    AFTER: tl.constexpr,
    STORES: tl.constexpr,
    KEEPS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    WIDEN: tl.constexpr,
):
    """(<total, h> of these columns, part + gradient of (gate, up) times LoRA's factor)."""
    COLUMNS: tl.constexpr = total.shape[1]
    inner = first + tl.arange(0, COLUMNS)
    pair = 2 * first + tl.arange(0, 2 * COLUMNS)
    mask = inside[:, None] & (inner < width)[None, :]
    pair_mask = inside[:, None] & (pair < 2 * width)[None, :]
    start = rows[:, None] * (2 * width)
    if INTERLEAVED:
        both = tl.load(wide + start + pair[None, :], mask=pair_mask, other=0.0)
        gate, up = tl.split(tl.reshape(both, (total.shape[0], COLUMNS, 2)))
    else:
        gate = tl.load(wide + start + inner[None, :], mask=mask, other=0.0)
        up = tl.load(wide + start + width + inner[None, :], mask=mask, other=0.0)
    value, value_slope = _activation(gate.to(tl.float32), KIND)
    other, other_slope = _factor(up.to(tl.float32), KIND)
    made = (value * other).to(wide.dtype.element_ty)
    products = tl.sum(total * made.to(tl.float32), 1)
    if KEEPS:
        tl.store(h + rows[:, None] * width + inner[None, :], made, mask=mask)
    if STORES:
        total *= gate_of_row[:, None]
        d_gate = (total * other * value_slope).to(wide.dtype.element_ty)
        d_up = (total * value * other_slope).to(wide.dtype.element_ty)
        if INTERLEAVED or AFTER:
            both = tl.reshape(tl.join(d_gate, d_up), (total.shape[0], 2 * COLUMNS))
        if INTERLEAVED:
            tl.store(out + start + pair[None, :], both, mask=pair_mask)
        else:
            tl.store(out + start + inner[None, :], d_gate, mask=mask)
            tl.store(out + start + width + inner[None, :], d_up, mask=mask)
        if AFTER:
            place = pair if PAIRED else _place_of(pair, width, INTERLEAVED)
            there = (pair < 2 * width) & known
            part = _plus_product(
                part, both, at_after + place * after_n, after_step, there, after_rank, WIDEN
            )
    return products, part


@triton.jit(do_not_specialize=["total_rows", "tile_count"])
def _gated_backward(  # noqa: PLR0913
    dy,  # rows of K
    weight,  # (E, K, I)
    low,  # (R, r) in expert order, contiguous, if LORA
    factor,  # (E, r, I) if LORA
    wide,  # (R, 2I), contiguous: gate and up
    gates,  # (R,) in slot order
    after,  # (E, a, 2I) if AFTER; columns in pairs if PAIRED
    slots,  # (R,)
    tiles,  # (bound, 3)
    out,  # (R, 2I), contiguous, if STORES: the gradients of gate and up
    h,  # (R, I), contiguous, if KEEPS
    dots,  # (column tiles, R) in slot order if DOTS
    parts,  # (column tiles, R, a) if AFTER
    K,
    width,  # I
    rank,
    after_rank,
    experts,
    total_rows,
    tile_count,
    column_tiles,
    dy_row,
    dy_col,
    weight_expert,
    weight_k,
    weight_n,
    factor_expert,
    factor_rank,
    factor_n,
    after_expert,
    after_step,
    after_n,
    FAN: tl.constexpr,
    LORA: tl.constexpr,
    PAIRED: tl.constexpr,
    AFTER: tl.constexpr,
    STORES: tl.constexpr,
    KEEPS: tl.constexpr,
    DOTS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_A: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile, column_tile = _tile_of(tl.program_id(0).to(tl.int64), tile_count, column_tiles, GROUP)
    expert = tl.load(tiles + 3 * tile)
    if expert < 0:
        return
    rows = tl.load(tiles + 3 * tile + 1) + tl.arange(0, BLOCK_M)
    inside = rows < tl.load(tiles + 3 * tile + 2)
    known = expert < experts
    inner = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    within = inner < width
    at_dy = dy + _source(rows, inside, slots, FAN) * dy_row
    at_weight = weight + expert * weight_expert + inner * weight_n
    total = _product(
        at_dy, at_weight, inside, within, dy_col, weight_k, K, known, WIDEN, EVEN_K, EVEN_N, BLOCK_K
    )
    if LORA:
        at_factor = factor + expert * factor_expert + inner * factor_n
        total = _plus_low_rank(
            total, low, at_factor, factor_rank, rows, inside, within, rank, known, WIDEN, BLOCK_R
        )
    slot = _source(rows, inside, slots, 1)
    gate = tl.load(gates + slot, mask=inside, other=0.0).to(tl.float32)
    # Half of the columns at a time: the whole tile's activations do not fit into the registers.
    halves = tl.permute(tl.reshape(total, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1))
    left, right = tl.split(halves)
    part = tl.zeros((BLOCK_M, BLOCK_A), tl.float32)
    at_after = after + expert * after_expert
    products = tl.zeros((BLOCK_M,), tl.float32)
    for half in tl.static_range(2):
        more, part = _half_backward(
            left if half == 0 else right,
            part,
            column_tile * BLOCK_N + half * (BLOCK_N // 2),
            gate,
            rows,
            inside,
            known,
            wide,
            out,
            h,
            at_after,
            after_step,
            after_n,
            after_rank,
            width,
            PAIRED,
            AFTER,
            STORES,
            KEEPS,
            INTERLEAVED,
            KIND,
            WIDEN,
        )
        products += more
    if DOTS:
        tl.store(dots + column_tile * total_rows + slot, products, mask=inside)
    if AFTER:
        r = tl.arange(0, BLOCK_A).to(tl.int64)
        at_part = parts + (column_tile * total_rows + rows)[:, None] * after_rank + r[None, :]
        tl.store(at_part, part, mask=inside[:, None] & (r[None, :] < after_rank))
