"""Grouped products that decode 4-bit experts in registers: the kernel and its launch.

    out = (x W_e + low F_e + b_e) gates        W (E, D, C) read from bytes of a stored (E, N, K)

Operands are swapped, out^T = W^T x^T: decoded weights are the left operand of the tensor cores and
a tile of rows is the right one, so a weight is decoded once per tile of at most 128 rows. A block
of the format never leaves its row (K is a multiple of the blocksize), so a step takes one absmax
per row and block, not one per element. What is multiplied is the decoded weight, rounded once to
x's dtype: the same numbers that dequantising first would give.

LAST: the sum runs along the stored rows, whose even elements are the high nibbles. x comes with the
even and odd elements of every BLOCK_D apart, so the two nibbles of a byte take one product each.
Otherwise the sum runs across the stored rows, and the two nibbles are two neighbouring columns.

Not measured yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from . import _grouped_config as config
from ._grouped_launch_triton import widens
from ._grouped_triton import _dot, _source, _tile_of
from .nf4_dequant_triton import _load_codebook, _load_scale


@triton.jit
def _lookup(table, nibble, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The codebook's values of a (ROWS, COLUMNS) tile, float32."""
    flat = tl.gather(table, tl.reshape(nibble, (ROWS * COLUMNS,)), 0)
    return tl.reshape(flat, (ROWS, COLUMNS))


@triton.jit
def _decoded_product(  # noqa: PLR0913
    at_x,  # (BLOCK_M, 1) pointers to rows
    x_col,
    inside,
    packed,
    absmax,
    code,
    code_scale,
    code_offset,
    table,
    first_row,  # stored row where the expert begins
    first_column,
    columns,  # (BLOCK_C,)
    within,
    depth,
    row_bytes,
    row_blocks,
    shift,
    LAST: tl.constexpr,
    NESTED: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """(BLOCK_M, BLOCK_C): x times the decoded tile; BLOCKS of the format share it unless LAST."""
    HALF_D: tl.constexpr = BLOCK_D // 2
    HALF_C: tl.constexpr = BLOCK_C // 2
    if LAST:
        total = tl.zeros((BLOCK_C, BLOCK_M), tl.float32)
        row = first_row + columns
        at_packed = packed + row[:, None] * row_bytes
        for start in range(0, depth, BLOCK_D):
            byte = (start // 2 + tl.arange(0, HALF_D)).to(tl.int64)
            pair = tl.load(at_packed + byte[None, :], mask=within[:, None], other=0).to(tl.int32)
            block = row * row_blocks + (start >> shift)
            scale = _load_scale(absmax, code, code_scale, code_offset, block, within, shift, NESTED)
            k = (start + tl.arange(0, HALF_D)).to(tl.int64)
            even = tl.load(at_x + k[None, :] * x_col, mask=inside[:, None], other=0.0)
            odd = tl.load(at_x + (k + HALF_D)[None, :] * x_col, mask=inside[:, None], other=0.0)
            high = (_lookup(table, pair >> 4, BLOCK_C, HALF_D) * scale[:, None]).to(even.dtype)
            low = (_lookup(table, pair & 15, BLOCK_C, HALF_D) * scale[:, None]).to(even.dtype)
            total = _dot(high, tl.trans(even), total, WIDEN)
            total = _dot(low, tl.trans(odd), total, WIDEN)
        return tl.trans(total)
    else:
        even = tl.zeros((HALF_C, BLOCK_M), tl.float32)
        odd = tl.zeros((HALF_C, BLOCK_M), tl.float32)
        byte = first_column // 2 + tl.arange(0, HALF_C)
        block = (first_column >> shift) + tl.arange(0, BLOCKS)
        for start in range(0, depth, BLOCK_D):
            n = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
            row = first_row + n
            w_mask = (byte < row_bytes)[:, None] & (n < depth)[None, :]
            at_packed = packed + row[None, :] * row_bytes + byte[:, None]
            pair = tl.load(at_packed, mask=w_mask, other=0).to(tl.int32)
            at_block = row[None, :] * row_blocks + block[:, None]
            block_mask = (block < row_blocks)[:, None] & (n < depth)[None, :]
            scale = _load_scale(
                absmax, code, code_scale, code_offset, at_block, block_mask, shift, NESTED
            )
            # Behind the last row a nested scale is the offset; x is zero there.
            wide = tl.broadcast_to(scale[:, None, :], (BLOCKS, HALF_C // BLOCKS, BLOCK_D))
            wide = tl.reshape(wide, (HALF_C, BLOCK_D))
            x_mask = inside[:, None] & (n < depth)[None, :]
            values = tl.trans(tl.load(at_x + n[None, :] * x_col, mask=x_mask, other=0.0))
            high = (_lookup(table, pair >> 4, HALF_C, BLOCK_D) * wide).to(values.dtype)
            low = (_lookup(table, pair & 15, HALF_C, BLOCK_D) * wide).to(values.dtype)
            even = _dot(high, values, even, WIDEN)
            odd = _dot(low, values, odd, WIDEN)
        return tl.interleave(tl.trans(even), tl.trans(odd))


@triton.jit
def _nf4_product(  # noqa: PLR0913
    x,  # rows of D
    packed,  # (E N K / 2,) uint8
    absmax,  # (E N K / blocksize,) float32, uint8 if NESTED
    codebook,  # (16,) float32 if CUSTOM
    code,  # (256,) if NESTED
    code_scale,  # one per 256 blocks if NESTED
    code_offset,  # (1,) if NESTED
    low,  # (R, r) in expert order, contiguous, if LORA
    factor,  # (E, r, C) if LORA
    bias,  # (E, C) if BIAS
    gates,  # (R,) in slot order if GATED
    other,  # rows of C if DOTS
    slots,  # (R,)
    tiles,  # (bound, 3)
    out,  # (R, C), contiguous, if STORES
    dots,  # (column tiles, R) in slot order if DOTS
    depth,  # D
    columns_count,  # C
    stored_rows,  # N
    row_bytes,  # K / 2
    row_blocks,  # K / blocksize
    shift,  # log2 of the blocksize
    rank,
    experts,
    total_rows,
    tile_count,
    column_tiles,
    x_row,
    x_col,
    factor_expert,
    factor_rank,
    factor_col,
    bias_expert,
    bias_col,
    other_row,
    other_col,
    LAST: tl.constexpr,
    NESTED: tl.constexpr,
    CUSTOM: tl.constexpr,
    FAN: tl.constexpr,
    OTHER_FAN: tl.constexpr,
    SCATTER: tl.constexpr,
    LORA: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    DOTS: tl.constexpr,
    STORES: tl.constexpr,
    WIDEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCKS: tl.constexpr,
    GROUP: tl.constexpr,
):
    tile, column_tile = _tile_of(tl.program_id(0).to(tl.int64), tile_count, column_tiles, GROUP)
    expert = tl.load(tiles + 3 * tile)
    if expert < 0:
        return
    known = expert < experts
    rows = tl.load(tiles + 3 * tile + 1) + tl.arange(0, BLOCK_M)
    inside = rows < tl.load(tiles + 3 * tile + 2)
    columns = column_tile * BLOCK_C + tl.arange(0, BLOCK_C)
    within = columns < columns_count
    at_x = x + _source(rows, inside, slots, FAN)[:, None] * x_row
    table = _load_codebook(codebook, CUSTOM)
    total = _decoded_product(
        at_x,
        x_col,
        inside,
        packed,
        absmax,
        code,
        code_scale,
        code_offset,
        table,
        expert * stored_rows,
        column_tile * BLOCK_C,
        columns,
        within & known,
        tl.where(known, depth, 0),
        row_bytes,
        row_blocks,
        shift,
        LAST,
        NESTED,
        WIDEN,
        BLOCK_M,
        BLOCK_C,
        BLOCK_D,
        BLOCKS,
    )
    if LORA:
        at_low = low + rows[:, None] * rank
        at_factor = factor + expert * factor_expert + columns[None, :] * factor_col
        for start in range(0, tl.where(known, rank, 0), BLOCK_R):
            r = (start + tl.arange(0, BLOCK_R)).to(tl.int64)
            low_mask = inside[:, None] & (r[None, :] < rank)
            values = tl.load(at_low + r[None, :], mask=low_mask, other=0.0)
            factor_mask = (r[:, None] < rank) & within[None, :]
            weights = tl.load(at_factor + r[:, None] * factor_rank, mask=factor_mask, other=0.0)
            total = _dot(values, weights.to(values.dtype), total, WIDEN)
    if BIAS:
        at_bias = bias + expert * bias_expert + columns * bias_col
        total += tl.load(at_bias, mask=within & known, other=0.0).to(tl.float32)[None, :]
    slot = _source(rows, inside, slots, 1)
    mask = inside[:, None] & within[None, :]
    if DOTS:
        at_other = other + _source(rows, inside, slots, OTHER_FAN)[:, None] * other_row
        values = tl.load(at_other + columns[None, :] * other_col, mask=mask, other=0.0)
        products = tl.sum(tl.where(mask, total, 0.0) * values.to(tl.float32), 1)
        tl.store(dots + column_tile * total_rows + slot, products, mask=inside)
    if STORES:
        if GATED:
            total *= tl.load(gates + slot, mask=inside, other=0.0).to(tl.float32)[:, None]
        target = slot if SCATTER else rows
        at_out = out + target[:, None] * columns_count + columns[None, :]
        tl.store(at_out, total.to(out.dtype.element_ty), mask=mask)


def halves_apart(x: Tensor, depth: int) -> Tensor:
    """x (M, D) with the even elements of every `depth` before the odd ones."""
    pairs = x.unflatten(1, (-1, depth // 2, 2))
    return pairs.transpose(2, 3).flatten(1)


def nf4_product(  # noqa: PLR0913
    x: Tensor,  # rows of D
    packed: Tensor,
    absmax: Tensor,
    codebook: Tensor | None,
    nested: tuple[Tensor, Tensor, Tensor] | None,  # absmax_code, absmax_scale, absmax_offset
    stored: tuple[int, int, int],  # (E, N, K)
    blocksize: int,
    last: bool,  # the sum runs along K
    low: Tensor,  # (R, r)
    factor: Tensor | None,  # (E, r, C)
    slots: Tensor,
    tiles: Tensor,
    out: Tensor | None,  # (R, C), contiguous
    *,
    tile_rows: int,
    fan: int,
    scatter: bool,
    bias: Tensor | None = None,  # (E, C)
    gates: Tensor | None = None,  # (T, k)
    other: Tensor | None = None,  # rows of C
    other_fan: int = 0,
) -> Tensor | None:
    """out = (x W_e + low factor_e + bias_e) gates; returns <row before its gate, other>."""
    experts, n, k = stored
    depth, columns = (k, n) if last else (n, k)
    narrow = x.element_size() == 2
    block_d = min(blocksize, 64 if narrow else 32) if last else 64 if narrow else 32
    block_c = 128 if narrow else 64
    if last:
        x = halves_apart(x, block_d)
    rank = 0 if factor is None else factor.shape[1]
    column_tiles = triton.cdiv(columns, block_c)
    rows = slots.shape[0]
    dots = None
    if other is not None:
        dots = torch.empty((column_tiles, rows), dtype=torch.float32, device=x.device)
    if tiles.shape[0] == 0:
        return None if dots is None else dots.sum(0)
    code, code_scale, code_offset = nested or (packed, packed, packed)
    _nf4_product[(tiles.shape[0] * column_tiles,)](
        x,
        packed,
        absmax,
        packed if codebook is None else codebook,
        code,
        code_scale,
        code_offset,
        low,
        packed if factor is None else factor,
        packed if bias is None else bias,
        packed if gates is None else gates.contiguous(),
        packed if other is None else other,
        slots,
        tiles,
        packed if out is None else out,
        packed if dots is None else dots,
        depth,
        columns,
        n,
        k // 2,
        k // blocksize,
        blocksize.bit_length() - 1,
        rank,
        experts,
        rows,
        tiles.shape[0],
        column_tiles,
        *x.stride(),
        *((0, 0, 0) if factor is None else factor.stride()),
        *((0, 0) if bias is None else bias.stride()),
        *((0, 0) if other is None else other.stride()),
        LAST=last,
        NESTED=nested is not None,
        CUSTOM=codebook is not None,
        FAN=fan,
        OTHER_FAN=other_fan,
        SCATTER=scatter,
        LORA=factor is not None,
        BIAS=bias is not None,
        GATED=gates is not None,
        DOTS=other is not None,
        STORES=out is not None,
        WIDEN=widens(x),
        BLOCK_M=tile_rows,
        BLOCK_C=block_c,
        BLOCK_D=block_d,
        BLOCK_R=config.block_rank(max(rank, 1)),
        BLOCKS=max(1, block_c // blocksize),
        GROUP=config.GROUP,
        num_warps=8 if tile_rows >= 128 else 4,
        num_stages=3,
    )
    return None if dots is None else dots.sum(0)
