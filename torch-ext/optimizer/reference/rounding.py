"""How float32 values become 16-bit parameters: stochastic rounding, and rounding with a residual.

Bits are handled as int64 tensors. `Philox4x32-10` (Salmon et al., Parallel random numbers: as easy
as 1, 2, 3, SC 2011) makes a random number a pure function of seed, step, parameter and element.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
RESIDUAL_UNIT = 2.0**-40  # of float16 parameters below 2^-14


def _multiply(x: Tensor, constant: int) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of x * constant, both below 2^32; int64 holds no full product."""
    low = x * (constant & 0xFFFF)
    high = x * (constant >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(counter: tuple[Tensor, ...], seed: int) -> list[Tensor]:
    """Four random words for every element of the counter's four words, all int64 below 2^32."""
    c0, c1, c2, c3 = counter
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(10):
        high0, low0 = _multiply(c0, _MULTIPLIERS[0])
        high1, low1 = _multiply(c2, _MULTIPLIERS[1])
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return [c0, c1, c2, c3]


def random_bits(
    shape: torch.Size, *, seed: int, step: Tensor, parameter: int, offset: int, device: torch.device
) -> Tensor:
    """16 random bits per element, int64 of `shape`; eight neighbours share one Philox block.

    Args:
        shape: of the tensor whose elements they are for, numbered in row-major order.
        seed: 64 bits.
        step: 0-D, int64 or float32; its lower 32 bits count.
        parameter: identity of the parameter, 32 bits.
        offset: number of the first element in the whole parameter.
        device: where to compute.
    """
    count = shape.numel()
    index = torch.arange(offset, offset + count, device=device)
    block = index >> 3
    zeros = torch.zeros_like(block)
    step = step.to(device=device, dtype=torch.int64) & _WORD
    words = philox((block & _WORD, block >> 32, zeros + (parameter & _WORD), zeros + step), seed)
    lane = index & 7
    word = torch.stack(words).gather(0, (lane >> 1)[None])[0]
    return ((word >> (16 * (lane & 1))) & 0xFFFF).reshape(shape)


def _bits(x: Tensor) -> Tensor:
    return x.float().contiguous().view(torch.int32).long() & _WORD


def _from_words(words: Tensor, dtype: torch.dtype) -> Tensor:
    """The lower 16 bits of int64 words as a 16-bit type."""
    words = words & 0xFFFF
    return torch.where(words >= 0x8000, words - 0x10000, words).to(torch.int16).view(dtype)


def _from_bits(bits: Tensor) -> Tensor:
    """The lower 32 bits of int64 numbers as float32."""
    bits = bits & _WORD
    return torch.where(bits >= 1 << 31, bits - (1 << 32), bits).int().view(torch.float32)


def stochastic_round(x: Tensor, dtype: torch.dtype, random: Tensor) -> Tensor:
    """Round float32 x up in magnitude with a probability equal to what truncation would drop.

    Args:
        x: float32.
        dtype: bfloat16 or float16.
        random: int64 in [0, 2^16), one per element. float16 values from 2^-17 down, which drop more
            than 16 bits, have their probability cut to 16 bits: an error of the mean below 2^-40.

    Returns:
        x in `dtype`. inf and NaN stay.
    """
    bits = _bits(x)
    magnitude, sign = bits & 0x7FFFFFFF, (bits >> 16) & 0x8000
    if dtype == torch.bfloat16:
        rounded = (magnitude >> 16) + (random < (magnitude & 0xFFFF))
        return torch.where(x.isnan(), x.to(dtype), _from_words(sign | rounded, dtype))
    exponent = magnitude >> 23
    normal = (magnitude >> 13) - (112 << 10) + (random < (magnitude & 0x1FFF) << 3)
    drop = (126 - exponent).clamp(14, 63)
    mantissa = (magnitude & 0x7FFFFF) | 0x800000
    rest = mantissa & ((1 << drop.clamp(max=24)) - 1)
    fraction = torch.where(drop < 16, rest << (16 - drop).clamp(min=0), rest >> (drop - 16))
    small = (mantissa >> drop) + (random < fraction)
    rounded = torch.where(exponent >= 113, normal, small)
    return torch.where(exponent >= 143, x.to(dtype), _from_words(sign | rounded, dtype))


def split(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(parameter, int16 residual) of float32 x, from which `join` makes x again.

    bfloat16: the bits of x are (parameter << 16) + residual, with the parameter rounded to nearest,
    ties away from zero; nothing is lost. float16: the bits of x are those of the parameter in
    float32 plus the residual; where the parameter is below 2^-14, the residual counts 2^-40
    instead. Nothing is lost from 2^-17 to 65519, and at most 2^-41 below.
    """
    bits = _bits(x)
    if dtype == torch.bfloat16:
        param = _from_words((bits + 0x8000) >> 16, dtype)
        residual = _from_words(bits, torch.int16)
        return torch.where(x.isnan(), x.to(dtype), param), residual.masked_fill(x.isnan(), 0)
    param = x.to(dtype)
    small = param.abs() < 2.0**-14
    units = (x - param.float()) / RESIDUAL_UNIT
    units = torch.trunc(units + torch.where(units < 0, -0.5, 0.5))
    # A tie that went down: 2^15 does not fit, so the neighbour above takes -2^15.
    above = (param.view(torch.int16) + torch.where(x < 0, -1, 1)).to(torch.int16).view(dtype)
    moved = small & (units >= 2**15)
    param = torch.where(moved, above, param)
    still_small = param.abs() < 2.0**-14
    units = torch.where(moved, -(2.0**15), units)
    difference = bits - _bits(param)
    residual = torch.where(still_small, units.nan_to_num().long(), difference)
    finite = param.isfinite()
    return param, torch.where(finite, residual, 0).to(torch.int16)


def join(param: Tensor, residual: Tensor) -> Tensor:
    """The float32 values that `split` took apart."""
    if param.dtype == torch.bfloat16:
        words = param.contiguous().view(torch.int16).long() << 16
        return _from_bits(words + residual.long())
    wide = param.float()
    small = param.abs() < 2.0**-14
    return torch.where(
        small, wide + residual.float() * RESIDUAL_UNIT, _from_bits(_bits(param) + residual.long())
    )


def load(param: Tensor, residual: Tensor | None) -> Tensor:
    """The parameter in float32 (float64 stays), with its residual if it has one."""
    if residual is not None:
        return join(param, residual)
    return param.to(torch.promote_types(param.dtype, torch.float32))


def store(
    param: Tensor, value: Tensor, residual: Tensor | None = None, random: Tensor | None = None
) -> None:
    """Write float32 values to a parameter: with a residual, stochastically, or to nearest."""
    if residual is not None:
        rounded, rest = split(value, param.dtype)
        param.copy_(rounded)
        residual.copy_(rest)
    elif random is not None and param.dtype in (torch.bfloat16, torch.float16):
        param.copy_(stochastic_round(value, param.dtype, random))
    else:
        param.copy_(value)
