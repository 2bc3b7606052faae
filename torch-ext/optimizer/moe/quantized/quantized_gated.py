"""A gated layer of 4-bit experts in one op, where its products decode in registers.

The op is `kernels.quant.gated_nf4_experts`; what it does not take, `moe.experts` composes of
`quantized_lora_linear` and the activation.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...kernels.autocast import without_autocast
from ...kernels.experts.expert_sort import ExpertOrder
from ...kernels.experts.grouped_lora import ExpertWeights
from ...kernels.quant.gated_nf4_experts import gated_nf4_experts, gated_nf4_experts_backward
from .expert_weights import QuantizedWeight
from .strategy import pick_strategy


class _QuantizedGated(torch.autograd.Function):
    """Both products, the activation between them and the sum over a token's experts."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # (T, H)
        a1: Tensor | None,  # (E, r, H)
        b1: Tensor | None,  # (E, 2I, r)
        a2: Tensor | None,
        b2: Tensor | None,
        gates: Tensor,  # (T, k)
        biases: tuple[Tensor | None, Tensor | None],
        weights: tuple[QuantizedWeight, QuantizedWeight],
        scalings: tuple[float, float],
        order: ExpertOrder,
        options: tuple[str, bool, str],  # activation, interleaved, path
        keeps: bool,
    ) -> Tensor:
        # Not saved tensors: packed bytes are the module's own, and no hook may pin or move them.
        ctx.constants = (biases, weights, scalings, order, options)
        arguments = _arguments(a1, b1, a2, b2, gates, *ctx.constants)
        out, *kept = gated_nf4_experts(x, *arguments, keeps)
        if keeps:
            ctx.save_for_backward(x, *kept, a1, b1, a2, b2, gates)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, wide, h, xa1, xa2, *factors, gates = ctx.saved_tensors
        arguments = _arguments(*factors, gates, *ctx.constants)
        needs = ctx.needs_input_grad[:6]
        with without_autocast(grad.device):
            found = gated_nf4_experts_backward(
                grad, x, wide, h, xa1, xa2, *arguments, [bool(need) for need in needs]
            )
        pairs = zip(found, needs, strict=True)
        return (*(one if need else None for one, need in pairs), *(None,) * 6)


def _arguments(
    a1: Tensor | None,
    b1: Tensor | None,
    a2: Tensor | None,
    b2: Tensor | None,
    gates: Tensor,
    biases: tuple[Tensor | None, Tensor | None],
    weights: tuple[QuantizedWeight, QuantizedWeight],
    scalings: tuple[float, float],
    order: ExpertOrder,
    options: tuple[str, bool, str],
) -> tuple:
    """What both ops take behind their own rows."""
    parts = zip(weights, ((a1, b1), (a2, b2)), biases, scalings, strict=True)
    projections = (
        one
        for weight, factors, bias, scaling in parts
        for one in (*weight.operands(), *factors, bias, scaling)
    )
    return *projections, gates, *order.operands(), *options


def quantized_gated_linear(
    x: Tensor,
    first: ExpertWeights,
    second: ExpertWeights,
    order: ExpertOrder,
    gates: Tensor,
    *,
    activation: str,
    interleaved: bool,
    path: str,
    by_name: bool,
) -> Tensor | None:
    """`gated_lora_linear` over 4-bit experts, whose checks have been made.

    Args:
        x: (T, H).
        first: Its weight a record seen as (E, H, 2I).
        second: The same, (E, I, H).
        order: Of `expert_sort`.
        gates: (T, k).
        activation: Of `ExpertsLayout`, as interleaved.
        interleaved: Whether gate and up alternate.
        path: Of the products.
        by_name: Whether the path was asked for.

    Returns:
        (T, H), or None where a product must run on its own.
    """
    projections, taken = (first, second), path
    for one in projections:
        if one.bias is not None and torch.is_grad_enabled() and one.bias.requires_grad:
            return None
        rows = order.slots.shape[0]
        strategy, taken = pick_strategy(x, one.weight, rows, one.rank, path, by_name)
        if strategy != "fused":
            return None
    leaves = (x, first.a, first.b, second.a, second.b, gates)
    needs = any(leaf is not None and leaf.requires_grad for leaf in leaves)
    return _QuantizedGated.apply(
        *leaves,
        tuple(one.bias for one in projections),
        tuple(one.weight for one in projections),
        tuple(float(one.scaling) for one in projections),
        order,
        (activation, interleaved, taken),
        torch.is_grad_enabled() and needs,
    )
