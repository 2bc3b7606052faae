"""Sums over 4-bit weights that are decoded in registers, for `_nf4_product_triton`.

out^T = W^T x^T: decoded weights are the left operand of the tensor cores and a tile of rows is the
right one. A block of the format never leaves its row (K is a multiple of the blocksize), so a step
takes one absmax per row and block, not one per element. What is multiplied is the decoded weight,
rounded once to x's dtype: the same numbers that dequantising first would give.

_along_rows   sums along the stored rows: the two nibbles of a byte are neighbours of the sum
_across_rows  sums across them: the two nibbles are neighbouring columns, an accumulator for each
"""

from __future__ import annotations

import triton
import triton.language as tl

from ..experts.grouped_triton import _dot
from .nf4_dequant_triton import _load_scale


@triton.jit
def _load_table(codebook, SHUFFLE: tl.constexpr):
    """The codebook (16,); with SHUFFLE (1, 1), and lane l of a warp holds value l % 16 of it.

    Of one element every thread has a copy, so no conversion of its layout moves it between threads.
    """
    if SHUFFLE:
        lane = tl.inline_asm_elementwise(
            "mov.u32 $0, %laneid; and.b32 $0, $0, 15;",
            "=r,r",
            [tl.program_id(0)],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        return tl.load(codebook + lane + tl.zeros((1, 1), tl.int32))
    else:
        return tl.load(codebook + tl.arange(0, 16))


@triton.jit
def _nibbles(pair, table, SHUFFLE: tl.constexpr):
    """The codebook's values of the high and of the low nibbles of bytes, float32.

    SHUFFLE: a nibble names the lane to read, element by element in whatever layout the tensor cores
    want, so that decoded weights never pass through shared memory (Triton moves a conversion above
    element-wise operations up to the loads). `tl.gather` is for the interpreter and other vendors.
    """
    if SHUFFLE:
        high = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $2, $1, 0x101f, 0xffffffff;",
            "=r,r,r",
            [pair >> 4, table],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        low = tl.inline_asm_elementwise(
            "shfl.sync.idx.b32 $0, $2, $1, 0x101f, 0xffffffff;",
            "=r,r,r",
            [pair, table],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
        return high, low
    else:
        flat = tl.reshape(pair, (pair.numel,))
        high = tl.reshape(tl.gather(table, flat >> 4, 0), pair.shape)
        return high, tl.reshape(tl.gather(table, flat & 15, 0), pair.shape)


@triton.jit
def _along_rows(  # noqa: PLR0913
    at_x,  # (BLOCK_M, 1) pointers to rows
    x_col,
    inside,
    stack,  # see _nf4_product
    row,  # (BLOCK_C,) stored rows, one per column of the result
    within,
    depth,
    NESTED: tl.constexpr,
    WIDEN: tl.constexpr,
    SHUFFLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPANS: tl.constexpr,  # blocks of the format in a step
    EVEN: tl.constexpr,  # steps end with the row
):
    """(BLOCK_C, BLOCK_M): sums along the stored rows; a step takes SPANS absmax per row."""
    packed, absmax, code, code_scale, code_offset, table, row_bytes, row_blocks, shift = stack
    HALF: tl.constexpr = BLOCK_D // 2
    total = tl.zeros((BLOCK_C, BLOCK_M), tl.float32)
    at_packed = packed + row[:, None] * row_bytes
    at_block = row[:, None] * row_blocks
    for start in range(0, depth, BLOCK_D):
        byte = (start // 2 + tl.arange(0, HALF)).to(tl.int64)
        block = ((start >> shift) + tl.arange(0, SPANS)).to(tl.int64)
        k = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
        if EVEN:
            mask, block_mask, x_mask = within[:, None], within[:, None], inside[:, None]
        else:
            mask = within[:, None] & (byte < row_bytes)[None, :]
            block_mask = within[:, None] & (block < row_blocks)[None, :]
            x_mask = inside[:, None] & (k < depth)[None, :]
        pair = tl.load(at_packed + byte[None, :], mask=mask, other=0).to(tl.int32)
        scale = _load_scale(
            absmax,
            code,
            code_scale,
            code_offset,
            at_block + block[None, :],
            block_mask,
            shift,
            NESTED,
        )
        wide = tl.broadcast_to(scale[:, :, None], (BLOCK_C, SPANS, HALF // SPANS))
        wide = tl.reshape(wide, (BLOCK_C, HALF))
        values = tl.load(at_x + k[None, :] * x_col, mask=x_mask, other=0.0)
        high, low = _nibbles(pair, table, SHUFFLE)
        high = (high * wide).to(values.dtype)
        low = (low * wide).to(values.dtype)
        total = _dot(tl.interleave(high, low), tl.trans(values), total, WIDEN)
    return total


@triton.jit
def _across_rows(  # noqa: PLR0913
    at_x,  # (BLOCK_M, 1) pointers to rows
    x_col,
    inside,
    stack,
    first_row,  # stored row where the expert begins
    first_column,
    depth,
    NESTED: tl.constexpr,
    WIDEN: tl.constexpr,
    SHUFFLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks of the format that share the BLOCK_C columns
):
    """Two (BLOCK_C / 2, BLOCK_M), of even and odd columns: sums across the stored rows."""
    packed, absmax, code, code_scale, code_offset, table, row_bytes, row_blocks, shift = stack
    HALF: tl.constexpr = BLOCK_C // 2
    even = tl.zeros((HALF, BLOCK_M), tl.float32)
    odd = tl.zeros((HALF, BLOCK_M), tl.float32)
    byte = first_column // 2 + tl.arange(0, HALF)
    block = (first_column >> shift) + tl.arange(0, BLOCKS)
    for start in range(0, depth, BLOCK_D):
        n = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
        row = first_row + n
        mask = (byte < row_bytes)[:, None] & (n < depth)[None, :]
        at_packed = packed + row[None, :] * row_bytes + byte[:, None]
        pair = tl.load(at_packed, mask=mask, other=0).to(tl.int32)
        at_block = row[None, :] * row_blocks + block[:, None]
        mask = (block < row_blocks)[:, None] & (n < depth)[None, :]
        scale = _load_scale(absmax, code, code_scale, code_offset, at_block, mask, shift, NESTED)
        # Behind the last row a nested scale is the offset; x is zero there.
        wide = tl.broadcast_to(scale[:, None, :], (BLOCKS, HALF // BLOCKS, BLOCK_D))
        wide = tl.reshape(wide, (HALF, BLOCK_D))
        mask = inside[:, None] & (n < depth)[None, :]
        values = tl.trans(tl.load(at_x + n[None, :] * x_col, mask=mask, other=0.0))
        high, low = _nibbles(pair, table, SHUFFLE)
        even = _dot((high * wide).to(values.dtype), values, even, WIDEN)
        odd = _dot((low * wide).to(values.dtype), values, odd, WIDEN)
    return even, odd


@triton.jit
def _add_low_rank(
    total,  # (BLOCK_C, BLOCK_M)
    at_low,  # (1, BLOCK_M) pointers to rows of (R, r)
    at_factor,  # (BLOCK_C, 1) pointers to columns of an expert's (r, C)
    factor_rank,
    rank,
    inside,
    within,
    WIDEN: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """total + factor^T low^T."""
    for start in range(0, rank, BLOCK_R):
        r = (start + tl.arange(0, BLOCK_R)).to(tl.int64)
        mask = (r[:, None] < rank) & inside[None, :]
        values = tl.load(at_low + r[:, None], mask=mask, other=0.0)
        mask = within[:, None] & (r[None, :] < rank)
        weights = tl.load(at_factor + r[None, :] * factor_rank, mask=mask, other=0.0)
        total = _dot(weights.to(values.dtype), values, total, WIDEN)
    return total


@triton.jit
def _sum(  # noqa: PLR0913
    at_x,
    x_col,
    inside,
    stack,
    first_row,
    first_column,
    columns_count,
    depth,  # 0 for sentinels
    lora,  # pointers to rows of (R, r) and to an expert's (r, C); its strides
    ranks,  # 0 for sentinels
    LAST: tl.constexpr,
    NESTED: tl.constexpr,
    LORA: tl.constexpr,
    WIDEN: tl.constexpr,
    SHUFFLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPANS: tl.constexpr,
    EVEN: tl.constexpr,
):
    """(BLOCK_M, BLOCK_C): x W_e + low F_e."""
    at_low, at_factor, factor_rank, factor_col = lora
    if LAST:
        columns = first_column + tl.arange(0, BLOCK_C)
        within = columns < columns_count
        total = _along_rows(
            at_x,
            x_col,
            inside,
            stack,
            first_row + columns,
            within & (depth > 0),
            depth,
            NESTED,
            WIDEN,
            SHUFFLE,
            BLOCK_M,
            BLOCK_C,
            BLOCK_D,
            SPANS,
            EVEN,
        )
        if LORA:
            at_factor += columns[:, None] * factor_col
            total = _add_low_rank(
                total, at_low, at_factor, factor_rank, ranks, inside, within, WIDEN, BLOCK_R
            )
        return tl.trans(total)
    else:
        even, odd = _across_rows(
            at_x,
            x_col,
            inside,
            stack,
            first_row,
            first_column,
            depth,
            NESTED,
            WIDEN,
            SHUFFLE,
            BLOCK_M,
            BLOCK_C,
            BLOCK_D,
            BLOCKS,
        )
        if LORA:  # columns come in pairs: rows of the format have an even length
            pair = first_column + 2 * tl.arange(0, BLOCK_C // 2)
            at_factor += pair[:, None] * factor_col
            there = pair < columns_count
            even = _add_low_rank(
                even, at_low, at_factor, factor_rank, ranks, inside, there, WIDEN, BLOCK_R
            )
            at_factor += factor_col
            odd = _add_low_rank(
                odd, at_low, at_factor, factor_rank, ranks, inside, there, WIDEN, BLOCK_R
            )
        return tl.interleave(tl.trans(even), tl.trans(odd))
