"""Grouped products over 4-bit experts: decode the whole stack, then multiply."""

from __future__ import annotations

import torch
from torch import Tensor

from . import moe
from .nf4 import nf4_dequant


def decoded(
    packed: Tensor,
    absmax: Tensor,
    codebook: Tensor | None,
    nested: tuple[Tensor, Tensor, Tensor] | None,
    stored: tuple[int, int, int],  # (E, N, K)
    blocksize: int,
    transposed: bool,
    dtype: torch.dtype,
) -> Tensor:
    """The stack as (E, N, K), or (E, K, N) when transposed."""
    ids = torch.arange(stored[0], device=packed.device)
    weight = nf4_dequant(
        packed, absmax, ids, stored[1:], blocksize, dtype, codebook, *(nested or (None,) * 3)
    )
    return weight.transpose(1, 2) if transposed else weight


def grouped_lora_nf4_forward(x: Tensor, weight: tuple, *arguments) -> tuple[Tensor, Tensor]:
    """`moe.grouped_lora_forward` with the arguments of `decoded` in the weight's place."""
    return moe.grouped_lora_forward(x, decoded(*weight, x.dtype), *arguments)


def grouped_lora_nf4_dx(dy: Tensor, weight: tuple, *arguments) -> tuple[Tensor, Tensor, Tensor]:
    """`moe.grouped_lora_dx` with the arguments of `decoded` in the weight's place."""
    return moe.grouped_lora_dx(dy, decoded(*weight, dy.dtype), *arguments)


def nf4_product(  # noqa: PLR0913
    x: Tensor,  # rows of K (along) or of N
    packed: Tensor,
    absmax: Tensor,
    codebook: Tensor | None,
    stored: tuple[int, int, int],  # (E, N, K)
    blocksize: int,
    slots: Tensor,
    offsets: Tensor,
    *,
    along: bool,
    low: Tensor | None = None,
    factor: Tensor | None = None,
    bias: Tensor | None = None,
    gates: Tensor | None = None,
    fan: int,
    grouped_out: bool,
) -> Tensor:
    """`moe.grouped_product` with the stack as (E, K, N) if the sum runs `along` its rows."""
    weight = decoded(packed, absmax, codebook, None, stored, blocksize, along, x.dtype)
    return moe.grouped_product(
        x, weight, low, factor, bias, gates, slots, offsets, fan, grouped_out
    )


def gated_nf4_experts(
    x: Tensor,  # (T, H)
    first: tuple,  # what `decoded` takes up to transposed, a, b, bias, scaling
    second: tuple,
    gates: Tensor,  # (T, k)
    expert_ids: Tensor,  # (T, k)
    activation: str,
    interleaved: bool,
) -> Tensor:
    """Both stacks decoded, then `gated_experts`."""
    (*stack1, a1, b1, bias1, scaling1), (*stack2, a2, b2, bias2, scaling2) = first, second
    w1, w2 = (decoded(*stack, x.dtype) for stack in (stack1, stack2))
    factors = (w1, a1, b1, bias1, w2, a2, b2, bias2)
    scalings = (scaling1, scaling2)
    return moe.gated_experts(x, *factors, gates, expert_ids, scalings, activation, interleaved)
