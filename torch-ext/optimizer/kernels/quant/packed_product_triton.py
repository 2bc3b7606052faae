"""Grouped products that decode packed experts in registers: the kernels and their launches.

    out = (x W_e + low F_e + b_e) gates        W (E, D, C) read from bytes of a stored (E, N, K)

A weight is decoded once per tile of rows: of a part of the order's tile, of all of it, or of two.
out^T = W^T x^T: decoded weights are the left operand of the tensor cores and a tile of rows is the
right one. A block of the format never leaves its row (bitsandbytes': K is a multiple of the
blocksize), so a step takes one scale per row and block, not one per element. What is multiplied is
the decoded weight, rounded once to x's dtype: the same numbers that dequantising first would give.

_along_rows    sums along the stored rows: the two nibbles of a byte are neighbours of the sum
_across_rows   sums across them: the two nibbles are neighbouring columns, an accumulator for each
_across_bytes  sums across rows whose elements are bytes

KIND is that of `PackedStack`: "4bit" (NF4, FP4), "mxfp4" or "fp8".

`gate_and_dot` is what follows a compiled product whose rows meet others: one pass over them.
"""

from __future__ import annotations

import dataclasses
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..experts import tile_tables as config
from ..experts.expert_sort import ExpertOrder, tile_rows_for
from ..experts.grouped_launch_triton import packed as packed_factor
from ..experts.grouped_launch_triton import widens
from ..experts.grouped_triton import _dot, _source, _tile_of
from ..launch.launch_plan import launch
from .dequant_triton import e4m3, load_scale, reads_e4m3
from .packed_product import PackedStack, shift_of


@triton.jit
def _load_table(codebook, NATIVE: tl.constexpr, KIND: tl.constexpr):
    """The codebook (16,); with NATIVE (1, 1), and lane l of a warp holds value l % 16 of it.

    Of one element every thread has a copy, so no conversion of its layout moves it between threads.
    """
    if KIND == "fp8":
        return codebook
    elif NATIVE:
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
def _nibbles(pair, table, NATIVE: tl.constexpr, KIND: tl.constexpr):
    """The codebook's values of the even and of the odd elements of bytes, float32.

    NATIVE: a nibble names the lane to read, element by element in whatever layout the tensor cores
    want, so that decoded weights never pass through shared memory (Triton moves a conversion above
    element-wise operations up to the loads). `tl.gather` is for the interpreter and other vendors.
    """
    if NATIVE:
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
    else:
        flat = tl.reshape(pair, (pair.numel,))
        high = tl.reshape(tl.gather(table, flat >> 4, 0), pair.shape)
        low = tl.reshape(tl.gather(table, flat & 15, 0), pair.shape)
    if KIND == "mxfp4":
        return low, high
    else:
        return high, low


@triton.jit
def _scales(stack, at_block, mask, NESTED: tl.constexpr, KIND: tl.constexpr):
    """float32 of blocks."""
    shift = stack[6][2]
    MX: tl.constexpr = KIND == "mxfp4"
    return load_scale(stack[1], stack[2], stack[3], stack[4], at_block, mask, shift, NESTED, MX)


@triton.jit
def _along_rows(  # noqa: PLR0913
    x,  # (BLOCK_M, 1) pointers to rows, the step along them, and which rows are inside
    stack,  # see _packed_product
    row,  # (BLOCK_C,) stored rows, one per column of the result
    scale_row,  # (BLOCK_C,) rows of scales
    within,
    depth,
    NESTED: tl.constexpr,
    WIDEN: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPANS: tl.constexpr,  # blocks of the format in a step
    EVEN: tl.constexpr,  # steps end with the row
    KIND: tl.constexpr,
):
    """(BLOCK_C, BLOCK_M): sums along the stored rows; a step takes SPANS scales per row."""
    at_x, x_col, inside = x
    packed, table, row_bytes, row_blocks = stack[0], stack[5], stack[6][0], stack[6][1]
    shift = stack[6][2]
    PER_BYTE: tl.constexpr = 1 if KIND == "fp8" else 2
    BYTES: tl.constexpr = BLOCK_D // PER_BYTE
    total = tl.zeros((BLOCK_C, BLOCK_M), tl.float32)
    at_packed = packed + row[:, None] * row_bytes
    at_block = scale_row[:, None] * row_blocks
    for start in range(0, depth, BLOCK_D):
        byte = (start // PER_BYTE + tl.arange(0, BYTES)).to(tl.int64)
        block = ((start >> shift) + tl.arange(0, SPANS)).to(tl.int64)
        k = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
        if EVEN:
            mask, block_mask, x_mask = within[:, None], within[:, None], inside[:, None]
        else:
            mask = within[:, None] & (byte < row_bytes)[None, :]
            block_mask = within[:, None] & (block < row_blocks)[None, :]
            x_mask = inside[:, None] & (k < depth)[None, :]
        pair = tl.load(at_packed + byte[None, :], mask=mask, other=0)
        scale = _scales(stack, at_block + block[None, :], block_mask, NESTED, KIND)
        wide = tl.broadcast_to(scale[:, :, None], (BLOCK_C, SPANS, BYTES // SPANS))
        wide = tl.reshape(wide, (BLOCK_C, BYTES))
        values = tl.load(at_x + k[None, :] * x_col, mask=x_mask, other=0.0)
        if KIND == "fp8":
            weights = (e4m3(pair, NATIVE) * wide).to(values.dtype)
        else:
            even, odd = _nibbles(pair.to(tl.int32), table, NATIVE, KIND)
            even = (even * wide).to(values.dtype)
            odd = (odd * wide).to(values.dtype)
            weights = tl.interleave(even, odd)
        total = _dot(weights, tl.trans(values), total, WIDEN)
    return total


@triton.jit
def _across_rows(
    x,  # (BLOCK_M, 1) pointers to rows, the step along them, and which rows are inside
    stack,
    first_row,  # stored row where the expert begins
    first_column,
    depth,
    NESTED: tl.constexpr,
    WIDEN: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks of the format that share the BLOCK_C columns
    KIND: tl.constexpr,
):
    """Two (BLOCK_C / 2, BLOCK_M), of even and odd columns: sums across the stored rows."""
    at_x, x_col, inside = x
    packed, table, row_bytes, row_blocks = stack[0], stack[5], stack[6][0], stack[6][1]
    shift = stack[6][2]
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
        scale = _scales(stack, at_block, mask, NESTED, KIND)
        # Behind the last row a nested scale is the offset; x is zero there.
        wide = tl.broadcast_to(scale[:, None, :], (BLOCKS, HALF // BLOCKS, BLOCK_D))
        wide = tl.reshape(wide, (HALF, BLOCK_D))
        mask = inside[:, None] & (n < depth)[None, :]
        values = tl.trans(tl.load(at_x + n[None, :] * x_col, mask=mask, other=0.0))
        first, second = _nibbles(pair, table, NATIVE, KIND)
        even = _dot((first * wide).to(values.dtype), values, even, WIDEN)
        odd = _dot((second * wide).to(values.dtype), values, odd, WIDEN)
    return even, odd


@triton.jit
def _across_bytes(
    x,  # (BLOCK_M, 1) pointers to rows, the step along them, and which rows are inside
    stack,
    row,  # stored row where the expert begins
    scale_row,  # row of scales where it begins
    first_column,
    depth,
    WIDEN: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks of the format that share the BLOCK_C columns
):
    """(BLOCK_C, BLOCK_M): sums of FP8 across the stored rows."""
    at_x, x_col, inside = x
    packed, scales, row_bytes, row_blocks = stack[0], stack[1], stack[6][0], stack[6][1]
    total = tl.zeros((BLOCK_C, BLOCK_M), tl.float32)
    column = first_column + tl.arange(0, BLOCK_C)
    block = (first_column >> stack[6][2]) + tl.arange(0, BLOCKS)
    for start in range(0, depth, BLOCK_D):
        n = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
        below = (n < depth)[None, :]
        at_packed = packed + (row + n)[None, :] * row_bytes + column[:, None]
        byte = tl.load(at_packed, mask=(column < row_bytes)[:, None] & below, other=0)
        at_block = (scale_row + (n >> stack[6][3]))[None, :] * row_blocks + block[:, None]
        scale = tl.load(scales + at_block, mask=(block < row_blocks)[:, None] & below, other=0.0)
        wide = tl.broadcast_to(scale[:, None, :], (BLOCKS, BLOCK_C // BLOCKS, BLOCK_D))
        wide = tl.reshape(wide, (BLOCK_C, BLOCK_D))
        values = tl.load(at_x + n[None, :] * x_col, mask=inside[:, None] & below, other=0.0)
        weights = (e4m3(byte, NATIVE) * wide).to(values.dtype)
        total = _dot(weights, tl.trans(values), total, WIDEN)
    return total


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
    x,  # as in `_along_rows`
    stack,
    first_rows,  # where the expert begins: the stored row, and that of scales
    first_column,
    columns_count,
    depth,  # 0 for sentinels
    lora,  # pointers to rows of (R, r) and to an expert's (r, C); its strides
    ranks,  # 0 for sentinels
    LAST: tl.constexpr,
    NESTED: tl.constexpr,
    LORA: tl.constexpr,
    WIDEN: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCKS: tl.constexpr,
    SPANS: tl.constexpr,
    EVEN: tl.constexpr,
    KIND: tl.constexpr,
):
    """(BLOCK_M, BLOCK_C): x W_e + low F_e."""
    at_low, at_factor, factor_rank, factor_col = lora
    inside = x[2]
    if LAST or KIND == "fp8":
        columns = first_column + tl.arange(0, BLOCK_C)
        within = columns < columns_count
        if LAST:
            total = _along_rows(
                x,
                stack,
                first_rows[0] + columns,
                first_rows[1] + (columns >> stack[6][3]),
                within & (depth > 0),
                depth,
                NESTED,
                WIDEN,
                NATIVE,
                BLOCK_M,
                BLOCK_C,
                BLOCK_D,
                SPANS,
                EVEN,
                KIND,
            )
        else:
            total = _across_bytes(
                x,
                stack,
                first_rows[0],
                first_rows[1],
                first_column,
                depth,
                WIDEN,
                NATIVE,
                BLOCK_M,
                BLOCK_C,
                BLOCK_D,
                BLOCKS,
            )
        if LORA:
            at_factor += columns[:, None] * factor_col
            total = _add_low_rank(
                total, at_low, at_factor, factor_rank, ranks, inside, within, WIDEN, BLOCK_R
            )
        return tl.trans(total)
    else:
        even, odd = _across_rows(
            x,
            stack,
            first_rows[0],
            first_column,
            depth,
            NESTED,
            WIDEN,
            NATIVE,
            BLOCK_M,
            BLOCK_C,
            BLOCK_D,
            BLOCKS,
            KIND,
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


@triton.jit
def _rows_of(
    program,
    tiles,
    offsets,
    experts,
    BLOCK_M: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    SHARE: tl.constexpr,
):
    """(expert, whether it is no sentinel, first row, end row) of a program; maybe no row."""
    share, tile = program % SHARE, program // SHARE
    expert = tl.load(tiles + 3 * tile)
    known = (expert >= 0) & (expert < experts)
    first, end = tl.load(tiles + 3 * tile + 1) + share * BLOCK_M, tl.load(tiles + 3 * tile + 2)
    if BLOCK_M > TILE_ROWS:  # the first of several tiles of an expert takes them all
        start = tl.load(offsets + expert, mask=known, other=0)
        last = tl.load(offsets + expert + 1, mask=known, other=0)
        end = tl.where(known, tl.minimum(last, first + BLOCK_M), end)
        end = tl.where(known & ((first - start) % BLOCK_M != 0), first, end)
    return expert, known, first, end


@triton.jit
def _store_dots(total, at_other, at_dots, known, inside, mask):
    """<row of total, row of other>; of sentinels other and the gate may hold anything."""
    values = tl.load(at_other, mask=mask, other=0.0)
    values = tl.where(mask, total, 0.0) * values.to(tl.float32)
    tl.store(at_dots, tl.where(known, tl.sum(values, 1), 0.0), mask=inside)


@triton.jit(
    do_not_specialize=[
        *("row_blocks", "shift", "row_shift", "scale_rows"),
        *("experts", "total_rows", "tile_count", "column_tiles"),
    ]
)
def _packed_product(  # noqa: PLR0913
    x,  # rows of D
    packed,  # (E N K / 2,) uint8; (E N K,) of FP8
    absmax,  # scales of blocks: float32, uint8 if NESTED or of MXFP4
    codebook,  # (16,) float32 unless FP8
    code,  # (256,) if NESTED
    code_scale,  # one per 256 blocks if NESTED
    code_offset,  # (1,) if NESTED
    low,  # (R, r) in expert order, contiguous, if LORA
    factor,  # (E, r, C) if LORA
    bias,  # (E, C) if BIAS
    gates,  # (R,) in slot order if GATED
    other,  # rows of C if DOTS
    slots,  # (R,)
    offsets,  # (E + 1,)
    tiles,  # (bound, 3)
    out,  # (R, C), contiguous, if STORES
    dots,  # (column tiles, R) in slot order if DOTS
    depth,  # D
    columns_count,  # C
    stored_rows,  # N
    row_bytes,  # K / 2, or K
    row_blocks,  # of a stored row
    shift,  # log2 of a block's columns
    row_shift,  # log2 of its rows
    scale_rows,  # of an expert
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
    FAN: tl.constexpr,
    OTHER_FAN: tl.constexpr,
    SCATTER: tl.constexpr,
    LORA: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    DOTS: tl.constexpr,
    STORES: tl.constexpr,
    WIDEN: tl.constexpr,
    NATIVE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCKS: tl.constexpr,  # of the format, that share BLOCK_C columns
    SPANS: tl.constexpr,  # of the format, in BLOCK_D columns
    EVEN: tl.constexpr,  # D is a multiple of BLOCK_D
    TILE_ROWS: tl.constexpr,  # at most, in a tile of rows
    SHARE: tl.constexpr,  # programs that share one
    GROUP: tl.constexpr,
    KIND: tl.constexpr,
):
    tile, column_tile = _tile_of(tl.program_id(0).to(tl.int64), tile_count, column_tiles, GROUP)
    expert, known, first, end = _rows_of(tile, tiles, offsets, experts, BLOCK_M, TILE_ROWS, SHARE)
    if (expert < 0) | (first >= end):
        return
    rows = first + tl.arange(0, BLOCK_M)
    inside = rows < end
    table = _load_table(codebook, NATIVE, KIND)
    sides = (row_bytes, row_blocks, shift, row_shift)
    stack = (packed, absmax, code, code_scale, code_offset, table, sides)
    total = _sum(
        (x + _source(rows, inside, slots, FAN)[:, None] * x_row, x_col, inside),
        stack,
        (expert * stored_rows, expert * scale_rows),
        column_tile * BLOCK_C,
        columns_count,
        tl.where(known, depth, 0),
        (low + rows[None, :] * rank, factor + expert * factor_expert, factor_rank, factor_col),
        tl.where(known, rank, 0),
        LAST,
        NESTED,
        LORA,
        WIDEN,
        NATIVE,
        BLOCK_M,
        BLOCK_C,
        BLOCK_D,
        BLOCK_R,
        BLOCKS,
        SPANS,
        EVEN,
        KIND,
    )
    columns = column_tile * BLOCK_C + tl.arange(0, BLOCK_C)
    within = columns < columns_count
    slot, mask = _source(rows, inside, slots, 1), inside[:, None] & within[None, :]
    if BIAS:
        at_bias = bias + expert * bias_expert + columns * bias_col
        total += tl.load(at_bias, mask=within & known, other=0.0).to(tl.float32)[None, :]
    if DOTS:
        at_other = other + _source(rows, inside, slots, OTHER_FAN)[:, None] * other_row
        at_dots = dots + column_tile * total_rows + slot
        _store_dots(total, at_other + columns[None, :] * other_col, at_dots, known, inside, mask)
    if STORES:
        if GATED:
            gate = tl.load(gates + slot, mask=inside & known, other=0.0)
            total *= gate.to(tl.float32)[:, None]
        at_out = out + (slot if SCATTER else rows)[:, None] * columns_count + columns[None, :]
        tl.store(at_out, total.to(out.dtype.element_ty), mask=mask)


def is_native(x: Tensor, kind: str) -> bool:
    """Whether codes become values by PTX, which the interpreter and other vendors do not know."""
    return reads_e4m3(x) if kind == "fp8" else x.is_cuda and torch.version.hip is None


@dataclasses.dataclass(frozen=True)
class Tile:
    """Block sizes of a product, and how Triton compiles it."""

    rows: int  # of x: a part of the order's tiles, one, or two
    columns: int  # of the result
    depth: int  # per step of the sum
    warps: int
    stages: int
    registers: int | None = None  # per thread at most


# Up to so many mean rows per expert: the tile of a long sum, and of one of less than _SHORT. Each
# takes the least time of 18 tiles over the products of four layers at means of 0.5 to 2048 rows, or
# at most 5 % more, on an H200 (docs/dev/decisions/2026-11-22-nf4-products.md), but for Mixtral's
# gate_up across rows at a mean of 128 (14 % more; there Qwen3's decided); a limit lies between two
# measured means.
ALONG = (
    (11, Tile(16, 64, 128, 4, 4), Tile(16, 128, 64, 4, 4)),
    (24, Tile(32, 64, 128, 4, 3), Tile(32, 128, 64, 4, 4)),
    (48, Tile(64, 128, 64, 4, 3), Tile(64, 128, 64, 4, 3)),
    (96, Tile(64, 128, 64, 4, 3, 168), Tile(128, 128, 64, 8, 3, 128)),
    (192, Tile(128, 64, 128, 4, 2), Tile(128, 128, 64, 8, 3, 128)),
    (math.inf, Tile(256, 128, 64, 8, 3), Tile(256, 128, 64, 8, 3)),
)
_SHORT = 1024
# Instead of ALONG's first tile, above and up to so many mean rows and for sums of so many terms or
# more: the fastest of 14 tiles over the forward's products of 16 tokens on an H200, where fewer
# columns or registers leave more bytes in flight (2026-11-23-gated-nf4-layer.md).
# Below the first bound and between _SHORT and the last depth no other tile was timed.
FEW_ALONG = (
    (0.7, 1.4, _SHORT, Tile(16, 128, 128, 4, 3)),  # Qwen3-30B-A3B, 137 to 126 us
    (1.4, 2.8, _SHORT, Tile(16, 64, 128, 4, 4, 128)),  # OLMoE-1B-7B, 124 to 120 and 73 to 70
    (2.8, 5.6, 4096, Tile(16, 64, 256, 4, 3)),  # Mixtral-8x7B, 414 to 398 and 225 to 200
)
# The second tile goes with dots, which take registers at the end: 168 of them would spill.
ACROSS = (
    (11, Tile(16, 128, 64, 4, 4), Tile(16, 128, 64, 4, 4)),
    (24, Tile(32, 128, 64, 4, 4), Tile(32, 128, 64, 4, 4)),
    (96, Tile(64, 128, 64, 4, 3, 168), Tile(64, 128, 64, 4, 3)),
    (math.inf, Tile(128, 128, 64, 4, 3), Tile(128, 128, 64, 4, 3)),
)


def choose_tile(mean: float, last: bool, depth: int, dots: bool, element_bytes: int) -> Tile:
    """The tile of a product: a pure function, so that every rank runs the same code.

    Args:
        mean: rows per expert.
        last: the sum runs along the stored rows.
        depth: what is summed over.
        dots: the product of every row with another one is wanted, too.
        element_bytes: of x; wide ones fill shared memory, and are not timed.
    """
    if element_bytes != 2:
        rows = tile_rows_for(math.ceil(mean), 1)
        return Tile(rows, 64, 32, 8 if rows >= 128 else 4, 3)
    if last:
        for above, up_to, least, tile in FEW_ALONG:
            if above < mean <= up_to and depth >= least:
                return tile
    second = depth < _SHORT if last else dots
    rule = next(rule for rule in (ALONG if last else ACROSS) if mean <= rule[0])
    return rule[1 + second]


def packed_product(  # noqa: PLR0913
    x: Tensor,  # rows of D
    stack: PackedStack,
    last: bool,  # the sum runs along K
    low: Tensor,  # (R, r)
    factor: Tensor | None,  # (E, r, C)
    order: ExpertOrder,
    out: Tensor | None,  # (R, C), contiguous
    *,
    fan: int,
    scatter: bool,
    bias: Tensor | None = None,  # (E, C)
    gates: Tensor | None = None,  # (T, k)
    other: Tensor | None = None,  # rows of C
    other_fan: int = 0,
    tile: Tile | None = None,
) -> Tensor | None:
    """out = (x W_e + low factor_e + bias_e) gates; returns <row before its gate, other>.

    `tile` is for tuning: its rows divide the order's or are a multiple; None for `choose_tile`.
    """
    packed, absmax, codebook, nested, (experts, n, k), blocksize, kind, block_rows = stack
    depth, columns = (k, n) if last else (n, k)
    rows, tiles = order.slots.shape[0], order.tiles
    tile = tile or choose_tile(rows / experts, last, depth, other is not None, x.element_size())
    share = triton.cdiv(order.tile_rows, tile.rows)
    if factor is not None:
        factor = packed_factor(factor, x.dtype)
    rank = 0 if factor is None else factor.shape[1]
    column_tiles = triton.cdiv(columns, tile.columns)
    shift = shift_of(blocksize)
    dots = None
    if other is not None:
        dots = torch.empty((column_tiles, rows), dtype=torch.float32, device=x.device)
    if tiles.shape[0] == 0:
        return None if dots is None else dots.sum(0)
    launch(_packed_product, (tiles.shape[0] * share * column_tiles,))(
        x,
        packed,
        absmax,
        packed if codebook is None else codebook,
        *(nested or (packed,) * 3),
        low,
        packed if factor is None else factor,
        packed if bias is None else bias,
        packed if gates is None else gates.contiguous(),
        packed if other is None else other,
        order.slots,
        order.offsets,
        tiles,
        packed if out is None else out,
        packed if dots is None else dots,
        depth,
        columns,
        n,
        k if kind == "fp8" else k // 2,
        triton.cdiv(k, blocksize),
        shift,
        shift_of(block_rows),
        triton.cdiv(n, block_rows),
        rank,
        experts,
        rows,
        tiles.shape[0] * share,
        column_tiles,
        *x.stride(),
        *((0, 0, 0) if factor is None else factor.stride()),
        *((0, 0) if bias is None else bias.stride()),
        *((0, 0) if other is None else other.stride()),
        LAST=last,
        NESTED=nested is not None,
        FAN=fan,
        OTHER_FAN=other_fan,
        SCATTER=scatter,
        LORA=factor is not None,
        BIAS=bias is not None,
        GATED=gates is not None,
        DOTS=other is not None,
        STORES=out is not None,
        WIDEN=widens(x),
        NATIVE=is_native(x, kind),
        BLOCK_M=tile.rows,
        BLOCK_C=tile.columns,
        BLOCK_D=tile.depth,
        BLOCK_R=config.block_rank(max(rank, 1)),
        BLOCKS=max(1, tile.columns >> shift),
        SPANS=max(1, tile.depth >> shift),
        EVEN=depth % tile.depth == 0,
        TILE_ROWS=order.tile_rows,
        SHARE=share,
        GROUP=config.GROUP,
        KIND=kind,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **({} if tile.registers is None else {"maxnreg": tile.registers}),
    )
    return None if dots is None else dots.sum(0)


_DOTS_BLOCK = 1024


@triton.jit
def _gate_and_dot(  # noqa: PLR0913
    out,  # (R, N), contiguous, in slot order if SCATTER
    other,  # rows of N
    gates,  # (R,) in slot order if GATED
    slots,  # (R,)
    offsets,  # (E + 1,)
    dots,  # (R,) in slot order
    width,  # N
    experts,
    other_row,
    other_col,
    FAN: tl.constexpr,  # where row i lies in other: 0 at i, f > 0 at slots[i] // f
    SCATTER: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    known = row < tl.load(offsets + experts)  # else a sentinel, whose other row may be anything
    source = row if FAN == 0 else slot // FAN
    at_out = out + (slot if SCATTER else row) * width
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        columns = (first + tl.arange(0, BLOCK)).to(tl.int64)
        mask = (columns < width) & known
        value = tl.load(at_out + columns, mask=mask, other=0.0).to(tl.float32)
        at_other = other + source * other_row + columns * other_col
        total += value * tl.load(at_other, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            value *= tl.load(gates + slot).to(tl.float32)
            tl.store(at_out + columns, value.to(out.dtype.element_ty), mask=mask)
    tl.store(dots + slot, tl.sum(total, 0))


def gate_and_dot(
    out: Tensor,  # (R, N), contiguous
    other: Tensor,  # rows of N
    gates: Tensor | None,  # (T, k)
    slots: Tensor,
    offsets: Tensor,
    fan: int,
    scatter: bool,
) -> Tensor:
    """<row of out, row of other> (R,) float32 in slot order, and out times gates, in place."""
    rows, width = out.shape
    dots = torch.empty(rows, dtype=torch.float32, device=out.device)
    if rows == 0:
        return dots
    launch(_gate_and_dot, (rows,))(
        out,
        other,
        out if gates is None else gates.contiguous(),
        slots,
        offsets,
        dots,
        width,
        offsets.shape[0] - 1,
        *other.stride(),
        FAN=fan,
        SCATTER=scatter,
        GATED=gates is not None,
        BLOCK=min(_DOTS_BLOCK, triton.next_power_of_2(width)),
    )
    return dots
