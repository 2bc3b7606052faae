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
"""

from __future__ import annotations

import dataclasses
import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..reference.nf4 import NF4_TABLE
from . import _grouped_config as config
from ._grouped_launch_triton import packed as packed_factor
from ._grouped_launch_triton import widens
from ._grouped_triton import _dot, _source, _tile_of
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
    packed,
    absmax,
    code,
    code_scale,
    code_offset,
    table,
    row,  # (BLOCK_C,) stored rows, one per column of the result
    within,
    depth,
    row_bytes,
    row_blocks,
    shift,
    NESTED: tl.constexpr,
    WIDEN: tl.constexpr,
    SHUFFLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """(BLOCK_C, BLOCK_M): sums along the stored rows; a step takes one absmax per row."""
    HALF: tl.constexpr = BLOCK_D // 2
    total = tl.zeros((BLOCK_C, BLOCK_M), tl.float32)
    at_packed = packed + row[:, None] * row_bytes
    for start in range(0, depth, BLOCK_D):
        byte = (start // 2 + tl.arange(0, HALF)).to(tl.int64)
        pair = tl.load(at_packed + byte[None, :], mask=within[:, None], other=0).to(tl.int32)
        block = row * row_blocks + (start >> shift)
        scale = _load_scale(absmax, code, code_scale, code_offset, block, within, shift, NESTED)
        k = (start + tl.arange(0, BLOCK_D)).to(tl.int64)
        values = tl.load(at_x + k[None, :] * x_col, mask=inside[:, None], other=0.0)
        high, low = _nibbles(pair, table, SHUFFLE)
        high = (high * scale[:, None]).to(values.dtype)
        low = (low * scale[:, None]).to(values.dtype)
        total = _dot(tl.interleave(high, low), tl.trans(values), total, WIDEN)
    return total


@triton.jit
def _across_rows(  # noqa: PLR0913
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
    depth,
    row_bytes,
    row_blocks,
    shift,
    NESTED: tl.constexpr,
    WIDEN: tl.constexpr,
    SHUFFLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCKS: tl.constexpr,  # blocks of the format that share the BLOCK_C columns
):
    """Two (BLOCK_C / 2, BLOCK_M), of even and odd columns: sums across the stored rows."""
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


@triton.jit(
    do_not_specialize=[
        "row_blocks",
        "shift",
        "experts",
        "total_rows",
        "tile_count",
        "column_tiles",
    ]
)
def _nf4_product(  # noqa: PLR0913
    x,  # rows of D
    packed,  # (E N K / 2,) uint8
    absmax,  # (E N K / blocksize,) float32, uint8 if NESTED
    codebook,  # (16,) float32
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
    FAN: tl.constexpr,
    OTHER_FAN: tl.constexpr,
    SCATTER: tl.constexpr,
    LORA: tl.constexpr,
    BIAS: tl.constexpr,
    GATED: tl.constexpr,
    DOTS: tl.constexpr,
    STORES: tl.constexpr,
    WIDEN: tl.constexpr,
    SHUFFLE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE_ROWS: tl.constexpr,  # at most, in a tile of rows
    SHARE: tl.constexpr,  # programs that share one
    GROUP: tl.constexpr,
):
    tile, column_tile = _tile_of(tl.program_id(0).to(tl.int64), tile_count, column_tiles, GROUP)
    share, tile = tile % SHARE, tile // SHARE
    expert = tl.load(tiles + 3 * tile)
    known = (expert >= 0) & (expert < experts)
    first, end = tl.load(tiles + 3 * tile + 1) + share * BLOCK_M, tl.load(tiles + 3 * tile + 2)
    if BLOCK_M > TILE_ROWS:  # the first of several tiles of an expert takes them all
        start = tl.load(offsets + expert, mask=known, other=0)
        last = tl.load(offsets + expert + 1, mask=known, other=0)
        end = tl.where(known, tl.minimum(last, first + BLOCK_M), end)
        end = tl.where(known & ((first - start) % BLOCK_M != 0), first, end)
    if (expert < 0) | (first >= end):
        return
    rows = first + tl.arange(0, BLOCK_M)
    inside = rows < end
    columns = column_tile * BLOCK_C + tl.arange(0, BLOCK_C)
    within = columns < columns_count
    at_x = x + _source(rows, inside, slots, FAN)[:, None] * x_row
    table = _load_table(codebook, SHUFFLE)
    steps = tl.where(known, depth, 0)
    first_rank = tl.where(known, rank, 0)
    at_low = low + rows[None, :] * rank
    at_factor = factor + expert * factor_expert
    if LAST:
        total = _along_rows(
            at_x,
            x_col,
            inside,
            packed,
            absmax,
            code,
            code_scale,
            code_offset,
            table,
            expert * stored_rows + columns,
            within & known,
            steps,
            row_bytes,
            row_blocks,
            shift,
            NESTED,
            WIDEN,
            SHUFFLE,
            BLOCK_M,
            BLOCK_C,
            BLOCK_D,
        )
        if LORA:
            at_factor += columns[:, None] * factor_col
            total = _add_low_rank(
                total, at_low, at_factor, factor_rank, first_rank, inside, within, WIDEN, BLOCK_R
            )
        total = tl.trans(total)
    else:
        even, odd = _across_rows(
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
            steps,
            row_bytes,
            row_blocks,
            shift,
            NESTED,
            WIDEN,
            SHUFFLE,
            BLOCK_M,
            BLOCK_C,
            BLOCK_D,
            BLOCKS,
        )
        if LORA:
            # Columns come in pairs: rows of the format have an even length.
            pair = column_tile * BLOCK_C + 2 * tl.arange(0, BLOCK_C // 2)
            at_even = at_factor + pair[:, None] * factor_col
            mask = pair < columns_count
            even = _add_low_rank(
                even, at_low, at_even, factor_rank, first_rank, inside, mask, WIDEN, BLOCK_R
            )
            at_odd = at_even + factor_col
            odd = _add_low_rank(
                odd, at_low, at_odd, factor_rank, first_rank, inside, mask, WIDEN, BLOCK_R
            )
        total = tl.interleave(tl.trans(even), tl.trans(odd))
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


@functools.cache
def nf4_codebook(device: torch.device) -> Tensor:
    """NF4's values on a device, copied there once."""
    return torch.tensor(NF4_TABLE, dtype=torch.float32, device=device)


@dataclasses.dataclass(frozen=True)
class Tile:
    """Block sizes of a product, and how Triton compiles it."""

    rows: int  # of x: a part of the order's tiles, one, or two
    columns: int  # of the result
    depth: int  # per step of the sum
    warps: int
    stages: int
    registers: int | None = None  # per thread at most


def choose_tile(rows: int, last: bool, blocksize: int, element_bytes: int) -> Tile:
    """The tile of a product.

    Args:
        rows: of the tiles of the order.
        last: the sum runs along the stored rows; a step stays within a block of the format then.
        blocksize: elements per absmax.
        element_bytes: of x.
    """
    narrow = element_bytes == 2
    depth = 64 if narrow else 32
    if last:
        depth = min(blocksize, depth)
    return Tile(rows, 128 if narrow else 64, depth, 8 if rows >= 128 else 4, 3)


def nf4_product(  # noqa: PLR0913
    x: Tensor,  # rows of D
    stack: tuple,  # packed, absmax, codebook, nested, stored (E, N, K), blocksize
    last: bool,  # the sum runs along K
    low: Tensor,  # (R, r)
    factor: Tensor | None,  # (E, r, C)
    slots: Tensor,
    offsets: Tensor,
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
    tile: Tile | None = None,
) -> Tensor | None:
    """out = (x W_e + low factor_e + bias_e) gates; returns <row before its gate, other>.

    `tile` is for tuning: at most `tile_rows` rows; None for `choose_tile`.
    """
    packed, absmax, codebook, nested, (experts, n, k), blocksize = stack
    depth, columns = (k, n) if last else (n, k)
    tile = tile or choose_tile(tile_rows, last, blocksize, x.element_size())
    share = triton.cdiv(tile_rows, tile.rows)
    if factor is not None:
        factor = packed_factor(factor, x.dtype)
    rank = 0 if factor is None else factor.shape[1]
    column_tiles = triton.cdiv(columns, tile.columns)
    rows = slots.shape[0]
    dots = None
    if other is not None:
        dots = torch.empty((column_tiles, rows), dtype=torch.float32, device=x.device)
    if tiles.shape[0] == 0:
        return None if dots is None else dots.sum(0)
    code, code_scale, code_offset = nested or (packed, packed, packed)
    _nf4_product[(tiles.shape[0] * share * column_tiles,)](
        x,
        packed,
        absmax,
        nf4_codebook(x.device) if codebook is None else codebook,
        code,
        code_scale,
        code_offset,
        low,
        packed if factor is None else factor,
        packed if bias is None else bias,
        packed if gates is None else gates.contiguous(),
        packed if other is None else other,
        slots,
        offsets,
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
        SHUFFLE=x.is_cuda and torch.version.hip is None,
        BLOCK_M=tile.rows,
        BLOCK_C=tile.columns,
        BLOCK_D=tile.depth,
        BLOCK_R=config.block_rank(max(rank, 1)),
        BLOCKS=max(1, tile.columns // blocksize),
        TILE_ROWS=tile_rows,
        SHARE=share,
        GROUP=config.GROUP,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **({} if tile.registers is None else {"maxnreg": tile.registers}),
    )
    return None if dots is None else dots.sum(0)
