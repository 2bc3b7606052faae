"""Grouped products over 4-bit experts, decoded as `quantized_strategy` says.

Backward decodes again: packed bytes are all that is kept of the weights, whatever the strategy.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...dispatch import TRITON_PATHS
from ...kernels.autocast import without_autocast
from ...kernels.experts.combine import combine_rows
from ...kernels.experts.expert_sort import ExpertOrder
from ...kernels.experts.grouped_lora import (
    ExpertWeights,
    gradients_of_linear,
    grouped_lora_dx,
    grouped_lora_forward,
)
from ...kernels.quant.grouped_lora_nf4_dx import grouped_lora_nf4_dx
from ...kernels.quant.grouped_lora_nf4_forward import grouped_lora_nf4_forward
from ...kernels.quant.nf4_dequant import DTYPES
from .expert_weights import QuantizedWeight, active_experts
from .strategy import chunk_experts, pick_strategy


@dataclasses.dataclass(frozen=True)
class _Slice:
    """Some experts and the part of the order that is theirs."""

    ids: Tensor | slice  # picks them out of (E, ...) tensors
    experts: Tensor  # (c,) the same as ids
    offsets: Tensor  # (c + 1,)
    tiles: Tensor  # (bound, 3), experts counted within the slice
    mine: Tensor | None  # (R,) rows of the slice, in expert order; None: all of them

    def take(self, tensor: Tensor | None) -> Tensor | None:
        """The slice's part of an (E, ...) tensor."""
        return None if tensor is None else tensor[self.ids]

    def decoded(self, weights: ExpertWeights, dtype: torch.dtype) -> ExpertWeights:
        """The slice's part of all weights, decoded."""
        decoded = weights.weight.decode(self.experts, dtype)
        factors = (self.take(weights.a), self.take(weights.b))
        return ExpertWeights.of(decoded, *factors, self.take(weights.bias), weights.scaling)

    def order(self, order: ExpertOrder) -> ExpertOrder:
        """The order with the slice's experts alone."""
        return ExpertOrder.of(
            order.slots, self.offsets, order.rows, self.tiles, order.tile_rows, order.top_k
        )

    def rows(self, order: ExpertOrder, grouped: bool) -> Tensor:
        """(R, 1): whether a row, or a slot unless `grouped`, belongs to the slice."""
        return (self.mine if grouped else self.mine[order.rows])[:, None]


def _retiled(order: ExpertOrder, local: Tensor) -> Tensor:
    """The order's tiles with experts renamed by local (E + 1,); -1 leaves a tile out."""
    expert = order.tiles[:, 0]
    named = torch.where(expert < 0, -1, local[expert.clamp(min=0)])
    return torch.cat((named[:, None], order.tiles[:, 1:]), 1)


def _slices(
    weight: QuantizedWeight, order: ExpertOrder, strategy: str, size: int
) -> Iterator[_Slice]:
    """The slices of a strategy; the first one also covers the rows of sentinels."""
    experts, device = order.num_experts, order.slots.device
    if strategy == "selective":
        active = active_experts(order)
        bound = active.ids.shape[0]
        local = torch.cat((active.position, torch.full((1,), bound, device=device)))
        yield _Slice(active.ids, active.ids, active.offsets, _retiled(order, local), None)
        return
    count = experts
    if strategy == "chunked":
        count = chunk_experts(experts, weight.stored[1] * weight.stored[2], size)
    row = torch.arange(order.slots.shape[0], device=device)
    every = torch.arange(experts + 1, device=device)
    for first in range(0, experts, count):
        end = min(first + count, experts)
        inside = (every >= first) & (every < end)
        local = torch.where(inside, every - first, -1)
        offsets = order.offsets[first : end + 1]
        mine = (row >= offsets[0]) & (row < offsets[-1])
        if first == 0:
            local[-1:].fill_(end - first)
        yield _Slice(
            slice(first, end),
            every[first:end],
            offsets,
            _retiled(order, local),
            None if first == 0 else mine,
        )


class _QuantizedLora(torch.autograd.Function):
    """`grouped_linear._GroupedLora` over decoded slices; the weight gets no gradient."""

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
        strategy: str,
    ) -> Tensor:
        weights = ExpertWeights.of(weight, lora_a, lora_b, bias, scaling)
        layout = {"fan": x_fan, "grouped_out": grouped_out or gates is not None, "path": path}
        products = _stack_products if _takes_stack(strategy, path) else _sliced_products
        y, xa = products(x, weights, order, strategy, **layout)
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
        ctx.constants = (weight, order, scaling, x_fan, grouped_out, path, strategy)
        return y if gates is None else combine_rows(y, gates, order, path)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, lora_a, lora_b, bias, gates, xa = ctx.saved_tensors
        weight, order, scaling, x_fan, grouped_out, path, strategy = ctx.constants
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
                input_gradients=functools.partial(_input_gradients, strategy),
            )
        return dx, *found, *(None,) * 7


def _takes_stack(strategy: str, path: str) -> bool:
    """Whether one op takes the whole stack and decodes it as it goes."""
    return strategy == "fused" or (path in TRITON_PATHS and strategy in ("chunked", "resident"))


def _slice_experts(weight: QuantizedWeight, strategy: str, size: int) -> int:
    """Experts that an op decodes to memory at a time; 0: none, it decodes in registers."""
    experts, n, k = weight.stored
    if strategy == "chunked":
        return chunk_experts(experts, n * k, size)
    return experts if strategy == "resident" else 0


def _stack_products(
    x: Tensor,
    weights: ExpertWeights,
    order: ExpertOrder,
    strategy: str,
    *,
    fan: int,
    grouped_out: bool,
    path: str,
) -> tuple[Tensor, Tensor]:
    """y and xa, by one op over the stack."""
    operands = (weights.a, weights.b, weights.bias)
    place = (order.slots, order.offsets, order.tiles, order.tile_rows)
    layout = (float(weights.scaling), fan, grouped_out)
    count = _slice_experts(weights.weight, strategy, x.element_size())
    stack = weights.weight.operands()
    return grouped_lora_nf4_forward(x, stack, *operands, *place, *layout, count, path)


def _sliced_products(
    x: Tensor,
    weights: ExpertWeights,
    order: ExpertOrder,
    strategy: str,
    *,
    fan: int,
    grouped_out: bool,
    path: str,
) -> tuple[Tensor, Tensor]:
    """y and xa, slice by slice."""
    y = xa = None
    for part in _slices(weights.weight, order, strategy, x.element_size()):
        mine, low = grouped_lora_forward(
            x,
            part.decoded(weights, x.dtype),
            part.order(order),
            fan=fan,
            grouped_out=grouped_out,
            path=path,
        )
        y = _merged(y, mine, part, order, grouped_out)
        xa = _merged(xa, low, part, order, True)
    return y, xa


def _input_gradients(
    strategy: str,
    dy: Tensor,
    weights: ExpertWeights,
    order: ExpertOrder,
    gates: Tensor | None,
    x: Tensor | None,
    *,
    dy_fan: int,
    x_fan: int,
    grouped_out: bool,
    wants_dx: bool,
    path: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """`grouped_lora_dx`; the weights are decoded again, slice by slice."""
    if _takes_stack(strategy, path):
        operands = (weights.a, weights.b, weights.bias, gates, x)
        place = (order.slots, order.offsets, order.tiles, order.tile_rows)
        layout = (float(weights.scaling), dy_fan, x_fan, grouped_out, wants_dx)
        count = _slice_experts(weights.weight, strategy, dy.element_size())
        stack = weights.weight.operands()
        return grouped_lora_nf4_dx(dy, stack, *operands, *place, *layout, count, path)
    dx = yb = dgates = None
    for part in _slices(weights.weight, order, strategy, dy.element_size()):
        mine, low, dots = grouped_lora_dx(
            dy,
            part.decoded(weights, dy.dtype),
            part.order(order),
            gates,
            x,
            dy_fan=dy_fan,
            x_fan=x_fan,
            grouped_out=grouped_out,
            wants_dx=wants_dx,
            path=path,
        )
        dx = _merged(dx, mine, part, order, grouped_out)
        yb = _merged(yb, low, part, order, True)
        dots = _merged(
            None if dgates is None else dgates[:, None], dots[:, None], part, order, False
        )
        dgates = dots[:, 0]
    return dx, yb, dgates


def _merged(
    whole: Tensor | None, part: Tensor, of: _Slice, order: ExpertOrder, grouped: bool
) -> Tensor:
    """The slice's rows of `part` written over `whole`; a part without rows or columns is none."""
    if whole is None or part.numel() == 0:
        return part
    return torch.where(of.rows(order, grouped), part, whole, out=whole)


def check_decodable(x: Tensor) -> None:
    """Raise TypeError unless 4-bit experts can be decoded to x's dtype."""
    if x.dtype not in DTYPES:
        raise TypeError(f"x over 4-bit experts must have one of {DTYPES}, got {x.dtype}")


def quantized_lora_linear(
    x: Tensor,
    weights: ExpertWeights,
    order: ExpertOrder,
    gates: Tensor | None,
    *,
    x_fan: int,
    grouped_out: bool,
    path: str,
    by_name: bool = True,
    strategy: str | None = None,
) -> Tensor:
    """`grouped_lora_linear` over 4-bit experts (E, K, N), whose checks have been made.

    Args:
        x: (T, K), or (R, K) with x_fan 0; bfloat16, float16 or float32.
        weights: Its weight a record seen as (E, K, N).
        order: of `expert_sort`.
        gates: (T, k) or None.
        x_fan: 0 or k.
        grouped_out: leave the result in expert order.
        path: of the products: "compiled", "triton" or "reference".
        by_name: whether the path was asked for; else Triton's gives way to what is faster.
        strategy: None for the weight's own; see the table above.

    Returns:
        As `grouped_lora_linear`.

    Raises:
        ValueError: unknown strategy.
    """
    weight, lora_a, lora_b, bias, scaling = weights.operands()
    rows = order.slots.shape[0]
    chosen, path = pick_strategy(x, weight, rows, weights.rank, path, by_name, strategy)
    leaves, layout = (x, lora_a, lora_b, bias, gates), (scaling, x_fan, grouped_out)
    return _QuantizedLora.apply(*leaves, weight, order, *layout, path, chosen)
