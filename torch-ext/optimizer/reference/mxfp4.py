"""MXFP4 in plain PyTorch: quantise and decode.

value = E2M1[code] * 2^(scale - 127) for blocks of 32 elements along the last dimension (Open
Compute Project, Microscaling Formats (MX) Specification v1.0); a scale of 255 is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 32  # elements per scale
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of codes 0 to 7
E2M1_TABLE = (*MAGNITUDES, *(-value for value in MAGNITUDES))
_LARGEST_EXPONENT = 2  # of a magnitude: 4 = 2^2
_NAN = 255


def checked_ids(ids: Tensor, experts: int) -> Tensor:
    """Ids as int64; IndexError on the CPU, where they can be looked at, unless in [0, experts)."""
    if ids.device.type == "cpu" and ids.numel() and not 0 <= ids.min() <= ids.max() < experts:
        raise IndexError(f"active_experts must be in [0, {experts}), got {ids.tolist()}")
    return ids.long()


def power_of_two(scale: Tensor) -> Tensor:
    """2^(scale - 127) in float32 of bytes: subnormal for 0, NaN for 255."""
    bits = scale.to(torch.int32) << 23
    bits = torch.where(scale == 0, 1 << 22, bits)
    return torch.where(scale == _NAN, 0x7FC00000, bits).view(torch.float32)


def mxfp4_quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise (..., K); arguments and result as in `kernels.mxfp4_quantize`."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1)
    exponent = torch.frexp(largest).exponent - 1 - _LARGEST_EXPONENT
    scale = torch.where(largest == 0, 0, (exponent + 127).clamp(0, _NAN - 1))
    scaled = blocks * power_of_two(254 - scale)[..., None]
    size = scaled.abs()
    # To the nearest magnitude; in the middle of two to the one whose code is even.
    code = (size > 0.25).to(torch.uint8) + (size >= 0.75) + (size > 1.25) + (size >= 1.75)
    code = code + (size > 2.5) + (size >= 3.5) + (size > 5)
    code = (code | scaled.signbit().to(torch.uint8) << 3).view(*largest.shape, BLOCK // 2, 2)
    scale = torch.where(largest.isfinite(), scale, _NAN).to(torch.uint8)
    return code[..., 0] | code[..., 1] << 4, scale


def mxfp4_dequant(
    packed: Tensor,
    scales: Tensor,
    active_experts: Tensor,
    expert_shape: Sequence[int],
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """Decode the named experts; arguments and result as in `kernels.mxfp4_dequant`.

    Raises:
        IndexError: if an id names no expert of the stack.
    """
    *rows, columns = expert_shape
    stacked = packed.reshape(-1, *rows, columns // 2)
    ids = checked_ids(active_experts, stacked.shape[0])
    byte = stacked[ids]
    code = torch.stack((byte & 15, byte >> 4), -1).flatten(-2)
    table = torch.tensor(E2M1_TABLE, device=packed.device)
    scale = power_of_two(scales.reshape(-1, *rows, columns // BLOCK)[ids])
    values = table[code.long()].unflatten(-1, (-1, BLOCK)) * scale[..., None]
    return values.flatten(-2).to(dtype)
