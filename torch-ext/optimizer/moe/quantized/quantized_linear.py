"""Products over packed experts with autograd: of one projection, and of a gated layer in one op.

Backward decodes again: packed bytes are all that is kept of the weights, whatever the strategy.
What `quantized_gated_linear` does not take, `moe.experts` composes of `quantized_lora_linear` and
the activation.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...kernels.autocast import without_autocast
from ...kernels.experts.expert_sort import ExpertOrder
from ...kernels.experts.grouped_lora import ExpertWeights, GatedLayer, gradients_of_linear
from ...kernels.experts.rows import combine_rows
from ...kernels.quant.codec import DTYPES
from ...kernels.quant.gated_quantized_experts import (
    gated_quantized_experts,
    gated_quantized_experts_backward,
)
from ...kernels.quant.grouped_lora_quantized import (
    grouped_lora_quantized_dx,
    grouped_lora_quantized_forward,
)
from .expert_weights import QuantizedWeight
from .strategy import pick_slices, pick_strategy, slice_experts


class _QuantizedLora(torch.autograd.Function):
    """One projection; the weight gets no gradient."""

    @staticmethod
    def forward(
        ctx,
        x: Tensor,  # (T, K) or (R, K)
        lora_a: Tensor | None,  # (E, r, K)
        lora_b: Tensor | None,  # (E, N, r)
        bias: Tensor | None,  # (E, N)
        gates: Tensor | None,  # (T, k)
        weight: QuantizedWeight,  # (E, K, N)
        order: ExpertOrder,
        scaling: float,
        x_fan: int,
        grouped_out: bool,
        path: str,
        count: int,  # slice_experts of the ops
    ) -> Tensor:
        weights = ExpertWeights.of(weight, lora_a, lora_b, bias, scaling)
        layout = {"fan": x_fan, "grouped_out": grouped_out or gates is not None, "path": path}
        y, xa = grouped_lora_quantized_forward(x, weights, order, slice_experts=count, **layout)
        needs = ctx.needs_input_grad
        ctx.save_for_backward(
            x if needs[0] or needs[1] or needs[4] else None,
            lora_a,
            lora_b,
            bias,
            gates,
            xa if needs[2] else None,
        )
        # Not a saved tensor: packed bytes are the module's own, and no hook may pin or move them.
        ctx.constants = (weight, order, scaling, x_fan, grouped_out, path, count)
        return y if gates is None else combine_rows(y, gates, order, path)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, lora_a, lora_b, bias, gates, xa = ctx.saved_tensors
        weight, order, scaling, x_fan, grouped_out, path, count = ctx.constants
        weights = ExpertWeights.of(weight, lora_a, lora_b, bias, scaling)
        needs_x, *needs = ctx.needs_input_grad[:5]
        with without_autocast(dy.device):
            dx, _, *found = gradients_of_linear(
                dy,
                x,
                xa,
                weights,
                order,
                gates,
                (needs_x, False, *needs),
                x_fan=x_fan,
                grouped_out=grouped_out,
                path=path,
                input_gradients=functools.partial(grouped_lora_quantized_dx, slice_experts=count),
            )
        return dx, *found, *(None,) * 7


def check_decodable(x: Tensor) -> None:
    """Raise TypeError unless 4-bit experts can be decoded to x's dtype."""
    if x.dtype not in DTYPES:
        raise TypeError(f"x over packed experts must have one of {DTYPES}, got {x.dtype}")


def quantized_lora_linear(
    x: Tensor,
    weights: ExpertWeights,
    order: ExpertOrder,
    gates: Tensor | None,
    *,
    x_fan: int,
    grouped_out: bool,
    path: str,
    by_name: bool,
) -> Tensor:
    """`grouped_lora_linear` over a record (E, K, N), whose checks have been made.

    x is (T, K), or (R, K) with x_fan 0 in place of k. `by_name` says whether the path of the
    products was asked for; else Triton's gives way to what is faster.
    """
    weight, lora_a, lora_b, bias, scaling = weights.operands()
    chosen, path = pick_strategy(x, weight, order.slots.shape[0], path, by_name)
    leaves, layout = (x, lora_a, lora_b, bias, gates), (scaling, x_fan, grouped_out)
    count = slice_experts(weight, chosen, x.element_size())
    return _QuantizedLora.apply(*leaves, weight, order, *layout, path, count)


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
        options: tuple[str, bool, str, tuple[int, int]],  # activation, interleaved, path, slices
        keeps: bool,
    ) -> Tensor:
        # Not saved tensors: packed bytes are the module's own, and no hook may pin or move them.
        frozen, factors = (biases, weights, scalings), (a1, b1, a2, b2)
        ctx.constants = (frozen, order, options)
        *glu, path, slices = options
        layer = GatedLayer(x, *_projections(factors, *frozen), order, gates, *glu)
        out, *kept = gated_quantized_experts(layer, path, slices, keeps)
        if keeps:
            ctx.save_for_backward(x, *kept, *factors, gates)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, *kept, a1, b1, a2, b2, gates = ctx.saved_tensors
        frozen, order, (*glu, path, slices) = ctx.constants
        layer = GatedLayer(x, *_projections((a1, b1, a2, b2), *frozen), order, gates, *glu)
        needs = ctx.needs_input_grad[:6]
        with without_autocast(grad.device):
            found = gated_quantized_experts_backward(layer, grad, kept, path, slices, needs)
        pairs = zip(found, needs, strict=True)
        return (*(one if need else None for one, need in pairs), *(None,) * 6)


def _projections(
    factors: Sequence[Tensor | None],
    biases: tuple[Tensor | None, Tensor | None],
    weights: tuple[QuantizedWeight, QuantizedWeight],
    scalings: tuple[float, float],
) -> tuple[ExpertWeights, ExpertWeights]:
    parts = zip(weights, (factors[:2], factors[2:]), biases, scalings, strict=True)
    return tuple(ExpertWeights.of(one, *pair, bias, s) for one, pair, bias, s in parts)


def quantized_gated_linear(layer: GatedLayer, path: str, *, by_name: bool) -> Tensor | None:
    """`gated_lora_linear` over records (E, H, 2I) and (E, I, H), whose checks have been made.

    (T, H), or None where a product must run on its own; `by_name` as of `quantized_lora_linear`.
    """
    x, first, second, order = layer.x, layer.first, layer.second, layer.order
    projections = (first, second)
    trains = (one.bias is not None and one.bias.requires_grad for one in projections)
    if torch.is_grad_enabled() and any(trains):
        return None
    weights = (first.weight, second.weight)
    picked = pick_slices(x, weights, order.slots.shape[0], path, by_name)
    if picked is None:
        return None
    leaves = (x, first.a, first.b, second.a, second.b, layer.gates)
    needs = any(leaf is not None and leaf.requires_grad for leaf in leaves)
    return _QuantizedGated.apply(
        *leaves,
        tuple(one.bias for one in projections),
        weights,
        tuple(float(one.scaling) for one in projections),
        order,
        (layer.activation, layer.interleaved, *picked),
        torch.is_grad_enabled() and needs,
    )
