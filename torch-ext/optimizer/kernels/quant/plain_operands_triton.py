"""Operands that the compiled packed_product does not read, made plain by a launch ahead of it.

unnested  scales of blocks in float32 from nested ones: 4 bytes for 32 or more packed ones
padded    LoRA's low rows and factors with zeros up to a rank that is a multiple of 8
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.launch_plan import launch
from .dequant_triton import load_scale

_BLOCK = 1024


@triton.jit(do_not_specialize=["shift"])
def _unnest(
    scales,  # (blocks,) uint8
    code,  # (256,)
    code_scale,  # one per 256 blocks
    code_offset,  # (1,)
    out,  # (blocks,) float32
    blocks,
    shift,  # any that is not negative, and that the compiler does not know
    BLOCK: tl.constexpr,
):
    block = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = block < blocks
    scale = load_scale(scales, code, code_scale, code_offset, block, mask, shift, True, False)
    tl.store(out + block, scale, mask=mask)


def unnested(scales: Tensor, nested: Sequence[Tensor]) -> Tensor:
    """(blocks,) float32 of codes and their values, scales and offset, as bitsandbytes rounds."""
    blocks = scales.numel()
    out = torch.empty(blocks, dtype=torch.float32, device=scales.device)
    launch(_unnest, (triton.cdiv(blocks, _BLOCK),))(scales, *nested, out, blocks, 0, BLOCK=_BLOCK)
    return out


@triton.jit
def _pad(
    source,  # (A, r, B)
    out,  # (A, ranks, B), contiguous
    size,  # of out
    rank,
    ranks,
    width,  # B
    source_a,
    source_rank,
    source_b,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    line, b = at // width, at % width
    a, r = line // ranks, line % ranks
    where = source + a * source_a + r * source_rank + b * source_b
    value = tl.load(where, mask=inside & (r < rank), other=0.0)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


def padded(source: Tensor, dtype: torch.dtype, multiple: int = 8) -> Tensor:
    """source (A, r, B) of any strides in a dtype, contiguous; zeros up to the next multiple."""
    a, rank, width = source.shape
    ranks = triton.cdiv(rank, multiple) * multiple
    out = torch.empty((a, ranks, width), dtype=dtype, device=source.device)
    if out.numel() > 0:
        sizes = (out.numel(), rank, ranks, width, *source.stride())
        launch(_pad, (triton.cdiv(out.numel(), _BLOCK),))(source, out, *sizes, BLOCK=_BLOCK)
    return out
