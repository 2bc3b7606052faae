"""Decoding by Triton: NF4 and FP4 where no compiled kernel does it, MXFP4 and FP8 everywhere.

nf4    out[i] = codebook[nibble(g)] * absmax[g // blocksize], g = element of the whole stack
mxfp4  out[i] = e2m1[nibble(g)] * 2^(scale[g // 32] - 127)
fp8    out[i] = e4m3[byte] * scale of its block

Two nibbles are one kernel for both formats: each byte is loaded once and gives two neighbours; an
expert that starts inside a byte only shifts the mask.

Grid: one program per (named expert, chunk of its bytes). Unknown ids give NaN. BY_ROWS names no
expert: those from `first` on that have rows are decoded, for `decode_nibbles` and `decode_fp8`,
whose launches a plan can play again. Products in registers take `power_of_two` and `e4m3` from
here, too.
"""

import math
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton
from triton.runtime.jit import JITFunction

from ..._ops import add_op_namespace_prefix
from ...reference.fp8 import block_of
from ...reference.mxfp4 import BLOCK as MX_BLOCK
from ...reference.nf4 import NF4_TABLE
from ..checks import on_device_of
from ..launch.launch_plan import launch

# Bytes per program: 2048 elements, 16 per thread with 4 warps.
_BLOCK = 1024

_NF4 = tl.constexpr(NF4_TABLE)


@triton.jit
def _load_codebook(codebook, CUSTOM: tl.constexpr):
    lane = tl.arange(0, 16)
    if CUSTOM:
        return tl.load(codebook + lane)
    table = tl.zeros((16,), tl.float32)
    for i in tl.static_range(16):
        table = tl.where(lane == i, _NF4[i], table)
    return table


@triton.jit
def power_of_two(scale):
    """2^(scale - 127) in float32 of e8m0 bytes as int32: subnormal for 0, NaN for 255."""
    bits = tl.where(scale == 0, 1 << 22, scale << 23)
    return tl.where(scale == 255, 0x7FC00000, bits).to(tl.float32, bitcast=True)


@triton.jit
def load_scale(
    scales,
    code,
    code_scale,
    code_offset,
    block,
    mask,
    shift,
    NESTED: tl.constexpr,
    MX: tl.constexpr,
):
    """float32 of blocks."""
    if MX:
        return power_of_two(tl.load(scales + block, mask=mask, other=0).to(tl.int32))
    elif NESTED:
        q = tl.load(scales + block, mask=mask, other=0).to(tl.int32)
        scale = tl.load(code_scale + block // 256, mask=mask, other=0.0)
        # bitsandbytes rounds the product and then the sum. Written as a product, LLVM would
        # contract both into one fused multiply-add (seen in the PTX of 3.7.1, even through
        # float64). A fused multiply-add of -0.0 is that rounded product, if the compiler cannot
        # see that it is -0.0.
        minus_zero = (shift >> 31).to(tl.float32) * -1.0
        product = tl.fma(tl.load(code + q), scale, minus_zero)
        return product + tl.load(code_offset)
    else:
        return tl.load(scales + block, mask=mask, other=0.0)


@triton.jit
def _e2m1(code):
    """float32 of e2m1 codes as int32: their bits at float32's place, whose exponents differ."""
    bits = ((code & 7) << 22) | ((code & 8) << 28)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37  # 2^126


@triton.jit
def _expert_of(slot, active, first, num_experts, BY_ROWS: tl.constexpr):
    """(expert, whether it is decoded) of a place in the result."""
    if BY_ROWS:
        expert = first + slot
        return expert, tl.load(active + expert + 1) > tl.load(active + expert)
    else:
        expert = tl.load(active + slot).to(tl.int64)
        return expert, (expert >= 0) & (expert < num_experts)


@triton.jit
def _nibbles(  # noqa: PLR0913
    packed,  # (bytes,) uint8
    scales,  # (blocks,) float32, uint8 if NESTED or MX
    active,  # (n,) int32 or int64; (E + 1,) offsets if BY_ROWS
    codebook,  # (16,) float32 if CUSTOM
    code,  # (256,) float32 if NESTED
    code_scale,  # (ceil(blocks / 256),) float32 if NESTED
    code_offset,  # (1,) float32 if NESTED
    out,  # (n, elements)
    size,  # whole bytes of an expert
    num_experts,
    chunks,
    shift,  # log2 of the blocksize
    first,  # expert, if BY_ROWS
    MX: tl.constexpr,  # MXFP4: the even element is the low nibble
    WHOLE_BYTES: tl.constexpr,
    CUSTOM: tl.constexpr,
    NESTED: tl.constexpr,
    BY_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    slot = (program // chunks).to(tl.int64)
    chunk = (program % chunks).to(tl.int64)
    expert, known = _expert_of(slot, active, first, num_experts, BY_ROWS)
    byte = chunk * BLOCK + tl.arange(0, BLOCK)  # 0 holds the expert's first element
    # Apart, since products of an even number let the compiler vectorise loads and stores.
    if WHOLE_BYTES:
        odd, numel = 0, 2 * tl.cast(size, tl.int64)
        inside, index = known & (byte < size), expert * size + byte
    else:
        numel = 2 * tl.cast(size, tl.int64) + 1
        odd = expert * numel % 2
        inside, index = known & (2 * byte - odd < numel), expert * numel // 2 + byte
    pair = tl.load(packed + index, mask=inside, other=0).to(tl.int32)
    block = (2 * index) >> shift  # blocks are even: both nibbles share one
    scale = load_scale(scales, code, code_scale, code_offset, block, inside, shift, NESTED, MX)
    scale = tl.where(known, scale, float("nan"))
    if MX:
        even_value, odd_value = _e2m1(pair & 15) * scale, _e2m1(pair >> 4) * scale
    else:
        table = _load_codebook(codebook, CUSTOM)
        even_value = tl.gather(table, pair >> 4, 0) * scale
        odd_value = tl.gather(table, pair & 15, 0) * scale
    local = chunk * (2 * BLOCK) - odd + tl.arange(0, 2 * BLOCK)
    value = tl.interleave(even_value, odd_value).to(out.dtype.element_ty)
    mask = local < numel if WHOLE_BYTES else (local >= 0) & (local < numel)
    if BY_ROWS:
        mask &= known
    tl.store(out + slot * numel + local, value, mask=mask)


def _launch(kernel, programs: int, packed: Tensor, *operands, **constants) -> None:
    """On the device of `packed`. wrap_triton takes no kernels that TRITON_INTERPRET=1 makes."""
    if programs == 0:
        return
    with on_device_of(packed):
        if constants["BY_ROWS"]:
            started = launch(kernel, (programs,))
        else:
            traced = wrap_triton(kernel) if isinstance(kernel, JITFunction) else kernel
            started = traced[(programs,)]
        started(packed, *operands, **constants, BLOCK=_BLOCK)


def decode_nibbles(
    out: Tensor,
    packed: Tensor,
    scales: Tensor,
    active: Tensor,
    blocksize: int,
    codebook: Tensor | None = None,
    nested: Sequence[Tensor | None] = (None,) * 3,
    *,
    mx: bool,
    first: int | None = None,
) -> None:
    """Launch `_nibbles`; the arguments were checked before.

    Args:
        out: (n, N, K), contiguous, of the dtype that is wanted.
        packed: Of the whole stack, and so are the scales.
        scales: Of blocks.
        active: (n,) ids; or with `first` the (E + 1,) offsets of `expert_sort`.
        blocksize: Elements per scale.
        codebook: None for NF4, or MXFP4.
        nested: Code, scale and offset of nested scales.
        mx: MXFP4.
        first: Experts from here on are decoded that have rows; the others' places stay as they are.
    """
    numel = math.prod(out.shape[1:])
    chunks = triton.cdiv((numel + 1) // 2, _BLOCK)
    _launch(
        _nibbles,
        out.shape[0] * chunks,
        packed,
        scales,
        active,
        *(packed if operand is None else operand for operand in (codebook, *nested)),
        out,
        numel // 2,
        2 * packed.numel() // numel,
        chunks,
        int(blocksize).bit_length() - 1,
        first or 0,
        MX=mx,
        WHOLE_BYTES=numel % 2 == 0,
        CUSTOM=codebook is not None,
        NESTED=nested[0] is not None,
        BY_ROWS=first is not None,
    )


def _room(packed: Tensor, ids: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Of the named experts."""
    return torch.empty((ids.shape[0], *shape), dtype=dtype, device=packed.device)


@triton_op(add_op_namespace_prefix("nf4_dequant_triton"), mutates_args=())
def nf4_dequant_triton(
    packed: Tensor,
    absmax: Tensor,
    active_experts: Tensor,
    expert_shape: Sequence[int],
    blocksize: int,
    dtype: torch.dtype,
    codebook: Tensor | None,
    absmax_code: Tensor | None,
    absmax_scale: Tensor | None,
    absmax_offset: Tensor | None,
) -> Tensor:
    """`nf4_dequant` by Triton."""
    nested = (absmax_code, absmax_scale, absmax_offset)
    out = _room(packed, active_experts, expert_shape, dtype)
    decode_nibbles(out, packed, absmax, active_experts, blocksize, codebook, nested, mx=False)
    return out


@triton_op(add_op_namespace_prefix("mxfp4_dequant_triton"), mutates_args=())
def mxfp4_dequant_triton(
    packed: Tensor,
    scales: Tensor,
    active_experts: Tensor,
    expert_shape: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """`mxfp4_dequant` by Triton."""
    out = _room(packed, active_experts, expert_shape, dtype)
    decode_nibbles(out, packed, scales, active_experts, MX_BLOCK, mx=True)
    return out


@triton.jit
def e4m3(byte, NATIVE: tl.constexpr):
    """float32 of e4m3 bytes (uint8); NATIVE: by the instruction of capability 8.9 and later.

    Else by integers: the bits of e4m3 at float32's place, whose exponents differ by 120; what is
    subnormal in one is subnormal in the other.
    """
    if NATIVE:
        return byte.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        word = byte.to(tl.int32)
        bits = ((word & 0x7F) << 20) | ((word & 0x80) << 24)
        value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
        return tl.where((word & 0x7F) == 0x7F, float("nan"), value)


def reads_e4m3(x: Tensor) -> bool:
    """Whether the device of x converts e4m3 by an instruction."""
    if not x.is_cuda or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(x.device) >= (8, 9)


@triton.jit
def _fp8(  # noqa: PLR0913
    packed,  # (bytes,) uint8
    scales,  # (E, N / rows, K / columns) float32
    active,  # (n,) int32 or int64; (E + 1,) offsets if BY_ROWS
    out,  # (n, N, K)
    rows_count,  # N
    width,  # K
    num_experts,
    chunks,  # of a row
    scale_rows,  # of an expert
    scale_columns,
    block_rows,
    block_columns,
    first,  # expert, if BY_ROWS
    NATIVE: tl.constexpr,
    BY_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    line = (program // chunks).to(tl.int64)
    slot, row = line // rows_count, line % rows_count
    expert, known = _expert_of(slot, active, first, num_experts, BY_ROWS)
    column = program % chunks * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    at_row = packed + (expert * rows_count + row) * width
    byte = tl.load(at_row + column, mask=inside & known, other=0)
    at_scale = scales + (expert * scale_rows + row // block_rows) * scale_columns
    scale = tl.load(at_scale + column // block_columns, mask=inside & known, other=0.0)
    value = e4m3(byte, NATIVE) * tl.where(known, scale, float("nan"))
    if BY_ROWS:
        inside &= known
    tl.store(out + line * width + column, value.to(out.dtype.element_ty), mask=inside)


@triton_op(add_op_namespace_prefix("fp8_dequant_triton"), mutates_args=())
def fp8_dequant_triton(
    packed: Tensor,
    scales: Tensor,
    active_experts: Tensor,
    expert_shape: Sequence[int],
    block: Sequence[int],
    dtype: torch.dtype,
) -> Tensor:
    """`fp8_dequant` by Triton."""
    out = _room(packed, active_experts, expert_shape, dtype)
    decode_fp8(out, packed, scales, active_experts, block)
    return out


def decode_fp8(
    out: Tensor,
    packed: Tensor,
    scales: Tensor,
    active: Tensor,
    block: Sequence[int],
    first: int | None = None,
) -> None:
    """Launch `_fp8`; `block` as of `fp8_dequant`, the other arguments as of `decode_nibbles`."""
    places, n, k = out.shape
    rows, columns = block_of((n, k), block)
    chunks = triton.cdiv(k, _BLOCK)
    _launch(
        _fp8,
        places * n * chunks,
        packed,
        scales,
        active,
        out,
        n,
        k,
        packed.numel() // (n * k),
        chunks,
        triton.cdiv(n, rows),
        triton.cdiv(k, columns),
        rows,
        columns,
        first or 0,
        NATIVE=reads_e4m3(packed),
        BY_ROWS=first is not None,
    )
