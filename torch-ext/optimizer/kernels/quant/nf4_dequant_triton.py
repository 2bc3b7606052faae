"""Triton twin of nf4_dequant, for GPUs that the compiled kernel does not cover.

out[i] = codebook[nibble(g)] * absmax[g // blocksize], g = element of the whole stack.
Grid: one program per (active expert, chunk of BLOCK bytes). Each byte is loaded once and gives two
neighbours; an expert that starts inside a byte only shifts the mask. Unknown ids give NaN.
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
from ...reference.nf4 import NF4_TABLE

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
def _load_scale(absmax, code, code_scale, code_offset, block, mask, shift, NESTED: tl.constexpr):
    if not NESTED:
        return tl.load(absmax + block, mask=mask, other=0.0)
    q = tl.load(absmax + block, mask=mask, other=0).to(tl.int32)
    scale = tl.load(code_scale + block // 256, mask=mask, other=0.0)
    # bitsandbytes rounds the product and then the sum. Written as a product, LLVM would contract
    # both into one fused multiply-add (seen in the PTX of 3.7.1, even through float64). A fused
    # multiply-add of -0.0 is that rounded product, if the compiler cannot see that it is -0.0.
    minus_zero = (shift >> 31).to(tl.float32) * -1.0
    product = tl.fma(tl.load(code + q), scale, minus_zero)
    return product + tl.load(code_offset)


@triton.jit
def _dequant(  # noqa: PLR0913
    packed,  # (bytes,) uint8
    absmax,  # (blocks,) float32, uint8 if NESTED
    active,  # (n,) int32 or int64
    codebook,  # (16,) float32 if CUSTOM
    code,  # (256,) float32 if NESTED
    code_scale,  # (ceil(blocks / 256),) float32 if NESTED
    code_offset,  # (1,) float32 if NESTED
    out,  # (n, numel)
    numel,
    num_experts,
    chunks,
    shift,  # log2 of the blocksize
    WHOLE_BYTES: tl.constexpr,
    CUSTOM: tl.constexpr,
    NESTED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    program = tl.program_id(0)
    slot = (program // chunks).to(tl.int64)
    chunk = (program % chunks).to(tl.int64)
    expert = tl.load(active + slot).to(tl.int64)
    known = (expert >= 0) & (expert < num_experts)
    source = expert * numel
    # Known at compile time, an even numel lets the compiler vectorise loads and stores.
    odd = 0 if WHOLE_BYTES else source % 2
    byte = chunk * BLOCK + tl.arange(0, BLOCK)  # 0 holds the expert's first element
    inside = known & (2 * byte - odd < numel)
    index = source // 2 + byte
    pair = tl.load(packed + index, mask=inside, other=0).to(tl.int32)
    block = (2 * index) >> shift  # blocks are even: both nibbles share one
    scale = _load_scale(absmax, code, code_scale, code_offset, block, inside, shift, NESTED)
    scale = tl.where(known, scale, float("nan"))
    table = _load_codebook(codebook, CUSTOM)
    even_value = tl.gather(table, pair >> 4, 0) * scale
    odd_value = tl.gather(table, pair & 15, 0) * scale
    local = chunk * (2 * BLOCK) - odd + tl.arange(0, 2 * BLOCK)
    value = tl.interleave(even_value, odd_value).to(out.dtype.element_ty)
    mask = local < numel if WHOLE_BYTES else (local >= 0) & (local < numel)
    tl.store(out + slot * numel + local, value, mask=mask)


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
    """Launch `_dequant`; the arguments were checked by `kernels.quant.nf4_dequant`."""
    numel = math.prod(expert_shape)
    active = active_experts.shape[0]
    out = torch.empty((active, *expert_shape), dtype=dtype, device=packed.device)
    # One byte more than half the elements: an odd start borrows half a byte at either end.
    chunks = triton.cdiv(numel // 2 + 1, _BLOCK)
    if active == 0:
        return out
    # wrap_triton takes compiled kernels only; TRITON_INTERPRET=1 makes interpreted ones.
    kernel = wrap_triton(_dequant) if isinstance(_dequant, JITFunction) else _dequant
    kernel[(active * chunks,)](
        packed,
        absmax,
        active_experts,
        packed if codebook is None else codebook,
        packed if absmax_code is None else absmax_code,
        packed if absmax_scale is None else absmax_scale,
        packed if absmax_offset is None else absmax_offset,
        out,
        numel,
        2 * packed.numel() // numel,
        chunks,
        int(blocksize).bit_length() - 1,
        WHOLE_BYTES=numel % 2 == 0,
        CUSTOM=codebook is not None,
        NESTED=absmax_code is not None,
        BLOCK=_BLOCK,
    )
    return out
