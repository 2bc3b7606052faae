"""The Triton kernels of a gated layer: the activation where its operands are made.

_gated_forward   h = act(gate) up of x W_e + low F_e + b_e, whose columns are gate and up in turn
_gated_backward  the gradients of gate and up from d = dy W_e^T + low F_e; h again, and <d, h>

One program per (tile of rows, tile of columns), the tiles of `grouped_triton`. A tile of the
forward holds 8 columns of the gate, the same 8 of up, and so on, as wgmma's accumulator holds
blocks of 8: a thread has both of each pair, and no data crosses threads for the activation. Where
memory alternates them one by one, so does the tile.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .grouped_triton import _begins_next, _product_with_low_rank, _source, _tile_of
from .rows_triton import _activation, _factor

_UNIT = tl.constexpr(8)


@triton.jit
def _place_of(inner, is_up, width, INTERLEAVED: tl.constexpr):
    """Where gate (is_up 0) and up (1) of column `inner` of h lie."""
    if INTERLEAVED:
        return 2 * inner + is_up
    return inner + is_up * width


@triton.jit
def _columns_of_tile(first, INTERLEAVED: tl.constexpr, BLOCK_N: tl.constexpr):
    """(columns of h, whether they are up's) of a tile of gate and up that begins at h's `first`."""
    lane = tl.arange(0, BLOCK_N)
    if INTERLEAVED:
        return first + lane // 2, lane % 2
    return first + lane // (2 * _UNIT) * _UNIT + lane % _UNIT, lane // _UNIT % 2


@triton.jit
def _gate_and_up(tile, INTERLEAVED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The two halves (BLOCK_M, BLOCK_N / 2) of a tile with the columns of `_columns_of_tile`."""
    if INTERLEAVED:
        return tl.split(tl.reshape(tile, (BLOCK_M, BLOCK_N // 2, 2)))
    UNITS: tl.constexpr = BLOCK_N // (2 * _UNIT)
    blocks = tl.reshape(tile, (BLOCK_M, UNITS, 2, _UNIT))
    gate, up = tl.split(tl.permute(blocks, (0, 1, 3, 2)))
    return tl.reshape(gate, (BLOCK_M, BLOCK_N // 2)), tl.reshape(up, (BLOCK_M, BLOCK_N // 2))


@triton.jit(do_not_specialize=["tile_count"])
def _gated_forward(  # noqa: PLR0913
    x,  # rows of K
    weight,  # (E, K, 2I)
    low,  # (R, r) in expert order, contiguous, if LORA
    factor,  # (E, r, .) if LORA: gate and up of the columns of h from first_column on
    bias,  # (E, 2I) if BIAS
    slots,  # (R,)
    tiles,  # (bound, 3)
    wide,  # (R, 2I), contiguous, if KEEPS
    out,  # (R, I), contiguous
    K,
    width,  # I
    rank,
    experts,
    tile_count,
    column_tiles,  # of this launch
    first_tile,
    factor_width,  # columns from a gate to its up in factor
    first_column,
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
    FAN: tl.constexpr,
    LORA: tl.constexpr,
    AHEAD: tl.constexpr,
    BIAS: tl.constexpr,
    KEEPS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EARLY: tl.constexpr,  # launched before `low` and `factor` are there; so many do not wait
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP: tl.constexpr,
    NEXT: tl.constexpr,  # the next launch may begin beside this one
):
    _begins_next(NEXT)
    tile, column_tile = _tile_of(tl.program_id(0).to(tl.int64), tile_count, column_tiles, GROUP)
    expert = tl.load(tiles + 3 * tile)
    if expert < 0:
        return
    rows = tl.load(tiles + 3 * tile + 1) + tl.arange(0, BLOCK_M)
    inside = rows < tl.load(tiles + 3 * tile + 2)
    known = expert < experts
    column_tile += first_tile
    inner, is_up = _columns_of_tile(column_tile * (BLOCK_N // 2), INTERLEAVED, BLOCK_N)
    within = inner < width
    columns = _place_of(inner, is_up, width, INTERLEAVED)
    at_x = x + _source(rows, inside, slots, FAN) * x_row
    at_weight = weight + expert * weight_expert + columns * weight_n
    at_factor = at_weight
    if LORA:
        place = _place_of(inner - first_column, is_up, factor_width, INTERLEAVED)
        at_factor = factor + expert * factor_expert + place * factor_n
    total = _product_with_low_rank(
        (at_x, at_weight, at_factor),
        low,
        (rows, inside, within),
        (x_col, weight_k, factor_rank),
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
    rounded = total.to(out.dtype.element_ty)
    if KEEPS and INTERLEAVED:
        at_wide = wide + rows[:, None] * (2 * width) + columns[None, :]
        tl.store(at_wide, rounded, mask=inside[:, None] & within[None, :])
    gate, up = _gate_and_up(rounded, INTERLEAVED, BLOCK_M, BLOCK_N)
    inner = column_tile * (BLOCK_N // 2) + tl.arange(0, BLOCK_N // 2)
    mask = inside[:, None] & (inner < width)[None, :]
    if KEEPS and not INTERLEAVED:
        at_wide = wide + rows[:, None] * (2 * width) + inner[None, :]
        tl.store(at_wide, gate, mask=mask)
        tl.store(at_wide + width, up, mask=mask)
    value, _ = _activation(gate.to(tl.float32), KIND)
    other, _ = _factor(up.to(tl.float32), KIND)
    h = (value * other).to(out.dtype.element_ty)
    tl.store(out + rows[:, None] * width + inner[None, :], h, mask=mask)


@triton.jit
def _columns(tile, piece: tl.constexpr, PIECES: tl.constexpr):
    """Columns of a tile (BLOCK_M, BLOCK_N), the piece of so many; PIECES is 1, 2 or 4."""
    found = tile
    if PIECES > 1:
        HALF: tl.constexpr = tile.shape[1] // 2
        halves = tl.permute(tl.reshape(tile, (tile.shape[0], 2, HALF)), (0, 2, 1))
        left, right = tl.split(halves)
        if piece < PIECES // 2:
            found = _columns(left, piece, PIECES // 2)
        else:
            found = _columns(right, piece - PIECES // 2, PIECES // 2)
    return found


@triton.jit
def _piece_backward(
    total,  # (BLOCK_M, C): the gradient of h before its gate
    first,  # of the C columns
    gate_of_row,  # (BLOCK_M,)
    rows,
    inside,
    wide,
    out,
    h,
    width,
    STORES: tl.constexpr,
    KEEPS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
):
    """Store the gradients of gate and up, and h; <total, h> of these columns (BLOCK_M,)."""
    COLUMNS: tl.constexpr = total.shape[1]
    inner = first + tl.arange(0, COLUMNS)
    within = inner < width
    mask = inside[:, None] & within[None, :]
    at = rows[:, None] * (2 * width)
    if INTERLEAVED:
        pair = 2 * first + tl.arange(0, 2 * COLUMNS)
        pair_mask = inside[:, None] & (pair < 2 * width)[None, :]
        both = tl.load(wide + at + pair[None, :], mask=pair_mask, other=0.0)
        gate, up = tl.split(tl.reshape(both, (total.shape[0], COLUMNS, 2)))
    else:
        gate = tl.load(wide + at + inner[None, :], mask=mask, other=0.0)
        up = tl.load(wide + at + width + inner[None, :], mask=mask, other=0.0)
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
        if INTERLEAVED:
            both = tl.reshape(tl.join(d_gate, d_up), (total.shape[0], 2 * COLUMNS))
            tl.store(out + at + pair[None, :], both, mask=pair_mask)
        else:
            tl.store(out + at + inner[None, :], d_gate, mask=mask)
            tl.store(out + at + width + inner[None, :], d_up, mask=mask)
    return products


@triton.jit(do_not_specialize=["total_rows", "tile_count"])
def _gated_backward(  # noqa: PLR0913
    dy,  # rows of K
    weight,  # (E, K, I)
    low,  # (R, r) in expert order, contiguous, if LORA
    factor,  # (E, r, I) if LORA
    wide,  # (R, 2I), contiguous: gate and up
    gates,  # (R,) in slot order
    slots,  # (R,)
    tiles,  # (bound, 3)
    out,  # (R, 2I), contiguous, if STORES: the gradients of gate and up
    h,  # (R, I), contiguous, if KEEPS
    dots,  # (column tiles, R) in slot order if DOTS
    K,
    width,  # I
    rank,
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
    FAN: tl.constexpr,
    LORA: tl.constexpr,
    AHEAD: tl.constexpr,
    STORES: tl.constexpr,
    KEEPS: tl.constexpr,
    DOTS: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    KIND: tl.constexpr,
    WIDEN: tl.constexpr,
    EVEN_K: tl.constexpr,
    EVEN_N: tl.constexpr,
    EARLY: tl.constexpr,  # launched before `low` and `factor` are there; so many do not wait
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PIECE: tl.constexpr,
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
    at_factor = at_weight
    if LORA:
        at_factor = factor + expert * factor_expert + inner * factor_n
    total = _product_with_low_rank(
        (at_dy, at_weight, at_factor),
        low,
        (rows, inside, within),
        (dy_col, weight_k, factor_rank),
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
    slot = _source(rows, inside, slots, 1)
    gate = tl.load(gates + slot, mask=inside, other=0.0).to(tl.float32)
    # PIECE columns at a time: the whole tile's activations do not fit into the registers.
    PIECES: tl.constexpr = BLOCK_N // PIECE
    products = tl.zeros((BLOCK_M,), tl.float32)
    for piece in tl.static_range(PIECES):
        products += _piece_backward(
            _columns(total, piece, PIECES),
            column_tile * BLOCK_N + piece * PIECE,
            gate,
            rows,
            inside,
            wide,
            out,
            h,
            width,
            STORES,
            KEEPS,
            INTERLEAVED,
            KIND,
        )
    if DOTS:
        tl.store(dots + column_tile * total_rows + slot, products, mask=inside)
