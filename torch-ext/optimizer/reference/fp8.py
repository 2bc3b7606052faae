"""FP8 (e4m3) experts in plain PyTorch: quantise and decode.

value = e4m3[byte] * scale of its block of rows and columns, as `weight_scale_inv` of DeepSeek-V3's
checkpoints (arXiv:2412.19437) multiplies. e4m3 has no infinity; bytes 0x7f and 0xff are NaN
(arXiv:2209.05433).
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .mxfp4 import checked_ids

LARGEST = 448.0
_TINY = torch.finfo(torch.float32).tiny


def block_of(shape: Sequence[int], block: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a block; 0 stands for the whole side."""
    return tuple(size or side for side, size in zip(shape[-2:], block, strict=True))


def scale_shape(shape: Sequence[int], block: Sequence[int]) -> tuple[int, ...]:
    """(..., ceil(N / block rows), ceil(K / block columns)) of a stack (..., N, K)."""
    sides = zip(shape[-2:], block_of(shape, block), strict=True)
    return *shape[:-2], *(-(-side // size) for side, size in sides)


def _spread(scales: Tensor, shape: Sequence[int], block: Sequence[int]) -> Tensor:
    """(..., N, K) of (..., ceil(N / block rows), ceil(K / block columns))."""
    rows, columns = block_of(shape, block)
    rows, columns = min(rows, shape[-2]), min(columns, shape[-1])
    tall = scales.repeat_interleave(rows, -2)[..., : shape[-2], :]
    return tall.repeat_interleave(columns, -1)[..., : shape[-1]]


def fp8_quantize(weight: Tensor, block: Sequence[int] = (128, 128)) -> tuple[Tensor, Tensor]:
    """Quantise (..., N, K); arguments and result as in `kernels.fp8_quantize`."""
    *_, n, k = weight.shape
    rows, columns = map(min, block_of(weight.shape, block), (n, k))
    padded = torch.nn.functional.pad(weight.float(), (0, -k % columns, 0, -n % rows))
    parts = padded.unflatten(-1, (-1, columns)).unflatten(-3, (-1, rows))
    scales = (parts.abs().amax((-3, -1)) / LARGEST).clamp(min=_TINY)  # NaN propagates
    scaled = weight.float() / _spread(scales, weight.shape, block)
    return scaled.clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scales


def fp8_dequant(
    packed: Tensor,
    scales: Tensor,
    active_experts: Tensor,
    expert_shape: Sequence[int],
    block: Sequence[int] = (128, 128),
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Decode the named experts; arguments and result as in `kernels.fp8_dequant`.

    Raises:
        IndexError: if an id names no expert of the stack.
    """
    experts = packed.numel() // math.prod(expert_shape)
    ids = checked_ids(active_experts, experts)
    bytes_of = packed.reshape(experts, *expert_shape).view(torch.uint8)[ids]
    chosen = scales.reshape(scale_shape((experts, *expert_shape), block))[ids]
    values = bytes_of.view(torch.float8_e4m3fn).float()
    return (values * _spread(chosen, expert_shape, block)).to(dtype)
