"""Launches of gated_quantized_experts, and which of them run beside each other.

forward   xa1, beside it B1 packed, B2 packed | gate_up product | activation, where not in it |
          xa2 | down product | combine
backward  second stream: B2 packed | yb2 | down's dX | the activation's gradient | yb1 | dX |
          combine
          first stream: B1 packed | after yb2: dB2, dA2 | after the activation's: the gates', dB1 |
          after yb1: dA1

A product is one launch, or two for every slice of experts that is decoded to memory.

A compiled product fills every multiprocessor's registers: the sums run where it ends, and beside
the launches that wait for memory or for each other. They are launched behind the product that is
to begin first: a second stream of higher priority made every gap between launches longer, by 1.5 us
on an H200. What is before a product lets it begin: it makes its tables meanwhile, and waits.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..experts.expert_sort import ExpertOrder
from ..experts.gated_launch_triton import gradient_of_gates, pack, room_to_pack, row_sum
from ..experts.grouped_launch_triton import (
    expert_products,
    is_scattered,
    low_rank,
    overlaps,
    reorder,
)
from ..experts.grouped_lora import ExpertWeights, GatedLayer
from ..experts.rows_triton import KINDS, _activation, _factor, combine_triton, glu_triton
from ..launch.launch_plan import beside, launch
from .formats import Stack
from .grouped_lora_quantized import product_of_stack

_BLOCK = 1024  # columns of a program of `_glu_backward_dots`


def gated_quantized_experts_triton(
    layer: GatedLayer,  # whose weights are Stacks
    path: str,
    slice_experts: tuple[int, int],
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the forward; options and results as in `gated_quantized_experts`."""
    x, first, second, order = layer.x, layer.first, layer.second, layer.order
    rows, width = order.slots.shape[0], second.weight.shape[1]
    own = [None if one.b is None else one.b.mT for one in (first, second)]
    factors = [room_to_pack(factor, x) for factor in own]
    signals = overlaps(x.device) and order.tiles.shape[0] > 0

    def low(rows_in: Tensor, one: ExpertWeights, fan: int, early: bool) -> tuple[Tensor, bool]:
        """x Aᵀ, and whether the next launch may begin early."""
        xa = x.new_empty((rows, one.rank))
        if one.a is None:
            return xa, early
        options = {"scaling": one.scaling, "fan": fan, "early": early, "signals": signals}
        return xa, low_rank(rows_in, one.a, order, xa, **options)

    def product(rows_in: Tensor, one: int, xa: Tensor, y: Tensor, **options: Any) -> None:
        weights = (first, second)[one]
        operands = (rows_in, weights.weight, xa, factors[one], order, y)
        options |= {"slice_experts": slice_experts[one], "path": path, "bias": weights.bias}
        product_of_stack(*operands, direction="forward", scatter=False, **options)

    with contextlib.ExitStack() as region:
        if any(room is not factor for room, factor in zip(factors, own, strict=True)):
            with region.enter_context(beside(x)).there():
                pack(own[0], factors[0])
                pack(own[1], factors[1])
        xa1, early = low(x, first, order.top_k, False)
    glu = (layer.activation, layer.interleaved)
    stack: Stack = first.weight
    options: dict[str, Any] = {"fan": order.top_k, "early": early}
    activates = slice_experts[0] == 0 and stack.format.activates(path, x, stack, rows, *glu)
    wide = x.new_empty((rows if keeps or not activates else 0, 2 * width))
    if activates:
        h = x.new_empty((rows, width))
        product(x, 0, xa1, wide, activated=h, **options)
    else:
        product(x, 0, xa1, wide, **options)
    if not activates:
        h = glu_triton(wide, *glu)
        wide = wide if keeps else wide.new_empty((0, wide.shape[1]))
    xa2, early = low(h, second, 0, activates and signals)
    y = x.new_empty((rows, x.shape[1]))
    product(h, 1, xa2, y, fan=0, early=early)
    if not keeps:
        h = h.new_empty((0, width))
    out = combine_triton(y, layer.gates, order.rows, order.offsets, order.top_k)
    return out, wide, h, xa1, xa2


def gated_quantized_experts_backward_triton(
    layer: GatedLayer,
    grad: Tensor,
    wide: Tensor,
    h: Tensor,
    xa1: Tensor,
    xa2: Tensor,
    path: str,
    slice_experts: tuple[int, int],
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Launch the backward; options and results as in `gated_quantized_experts_backward`."""
    x, first, second, order, gates = layer.x, layer.first, layer.second, layer.order, layer.gates
    a1, b1, a2, b2 = first.a, first.b, second.a, second.b
    wants_x, wants_a1, wants_b1, wants_a2, wants_b2, wants_gates = wants
    through = wants_x or wants_a1 or wants_b1  # the activation
    total, top_k = order.slots.shape[0], order.top_k
    # What both streams touch is made before they part, and let go after they have met.
    dh, spread = _in_one_place(x, total, h.shape[1], x.shape[1])
    d_wide = x.new_empty((total if through else 0, wide.shape[1]))
    dots = torch.empty(total if wants_gates else 0, dtype=torch.float32, device=x.device)
    dx = x.new_empty(x.shape if wants_x else 0)
    own = [None if b is None else b.mT for b in (b1, b2)]
    factors = [room_to_pack(factor, x) for factor in own]
    yb1, yb2 = (grad.new_empty((total, 0 if b is None else b.shape[1])) for b in own)

    def product(rows_in: Tensor, one: int, low: tuple, out: Tensor, fan: int, early: bool) -> None:
        operands = (rows_in, (first, second)[one].weight.mT, *low, order, out)
        options = {"slice_experts": slice_experts[one], "path": path, "fan": fan, "early": early}
        product_of_stack(*operands, direction="dx", scatter=False, **options)

    summed = _Sums(gates, order, spread.nbytes)
    signals = overlaps(grad.device) and order.tiles.shape[0] > 0
    with beside(grad) as streams:
        pack(own[0], factors[0])
        with streams.there():
            early = pack(own[1], factors[1], signals=signals)
            if b2 is not None:
                options = {"fan": top_k, "early": early, "signals": signals}
                early = low_rank(grad, factors[1], order, yb2, scaling=second.scaling, **options)
        streams.here_waits()
        with streams.there():
            if through or wants_gates:
                product(grad, 1, (yb2, a2), dh, top_k, early)
                glu = {"activation": layer.activation, "interleaved": layer.interleaved}
                glu_backward_dots(dh, wide, gates, order.slots, d_wide, dots, **glu)
            streams.there_waits()  # for B1
        db2 = summed(b2, wants_b2, xa2, grad, top_k, outputs_first=True, gated=True)
        da2 = summed(a2, wants_a2, yb2, h, 0, gated=True)
        summed.put_in_order()
        streams.here_waits()
        early = False
        with streams.there():
            if b1 is not None and (wants_x or wants_a1):
                options = {"fan": 0, "signals": signals}
                early = low_rank(d_wide, factors[0], order, yb1, scaling=first.scaling, **options)
        dgates = gates.new_empty(0)
        if wants_gates:
            dgates = gradient_of_gates(dots[None], grad, second.bias, gates, order)
        db1 = summed(b1, wants_b1, xa1, d_wide, 0, outputs_first=True)
        streams.here_waits()
        with streams.there():
            if wants_x:
                product(d_wide, 0, (yb1, a1), spread, 0, early)
                combine_triton(spread, None, order.rows, order.offsets, top_k, dx)
        da1 = summed(a1, wants_a1, yb1, x, top_k)
        summed.put_in_order()
    return dx, da1, db1, da2, db2, dgates


class _Sums:
    """Gradients of factors. A copy that puts one in order may wait for what comes first.

    Args:
        gates: (T, k).
        order: Of `expert_sort`.
        room: Bytes that such a copy may take.
    """

    def __init__(self, gates: Tensor, order: ExpertOrder, room: int) -> None:
        self._gates, self._order, self._room = gates, order, room
        self._copies: list[tuple[Tensor, Tensor]] = []

    def __call__(self, factor: Tensor | None, wanted: bool, *rows: Any, **options: bool) -> Tensor:
        """The gradient, launched; arguments as of `row_sum`."""
        gradient, sums = row_sum(factor, wanted, *rows, **options)
        if sums:
            in_place = is_scattered(sums[0].out) and gradient.nbytes > self._room
            expert_products(sums, self._gates, self._order, in_place=in_place, later=self._copies)
        return gradient

    def put_in_order(self) -> None:
        """Launch the copies."""
        for copy, gradient in self._copies:
            reorder(copy, gradient)
        self._copies.clear()


def _in_one_place(x: Tensor, rows: int, *widths: int) -> list[Tensor]:
    """(rows, width) of x's dtype for each width, of which one is written after the others' use."""
    flat = x.new_empty(rows * max(widths))
    return [flat[: rows * width].view(rows, width) for width in widths]


@triton.jit
def _glu_backward_dots(
    d,  # (R, I), contiguous: the gradient of h before its gate
    wide,  # (R, 2I), contiguous: gate and up
    gates,  # (R,) in slot order
    slots,  # (R,)
    out,  # (R, 2I), contiguous, if STORES
    dots,  # (R,) in slot order if DOTS: <d, h>
    width,  # I
    KIND: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STORES: tl.constexpr,
    DOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    gate_of_row = tl.load(gates + slot).to(tl.float32)
    wide += row * 2 * width
    out += row * 2 * width
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < width
        gate_at = 2 * columns if INTERLEAVED else columns
        up_at = gate_at + 1 if INTERLEAVED else width + columns
        gate = tl.load(wide + gate_at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(wide + up_at, mask=mask, other=0.0).to(tl.float32)
        dh = tl.load(d + row * width + columns, mask=mask, other=0.0).to(tl.float32)
        value, value_slope = _activation(gate, KIND)
        factor, factor_slope = _factor(up, KIND)
        if DOTS:
            h = (value * factor).to(wide.dtype.element_ty).to(tl.float32)
            total += tl.where(mask, dh * h, 0.0)
        if STORES:
            dh *= gate_of_row
            d_gate = (dh * factor * value_slope).to(out.dtype.element_ty)
            d_up = (dh * value * factor_slope).to(out.dtype.element_ty)
            tl.store(out + gate_at, d_gate, mask=mask)
            tl.store(out + up_at, d_up, mask=mask)
    if DOTS:
        tl.store(dots + slot, tl.sum(total, 0))


def glu_backward_dots(
    d: Tensor,  # (R, I)
    wide: Tensor,  # (R, 2I)
    gates: Tensor,  # (T, k)
    slots: Tensor,  # (R,)
    out: Tensor,  # (R, 2I), or without rows
    dots: Tensor,  # (R,) float32, or empty
    *,
    activation: str,
    interleaved: bool,
) -> None:
    """Fill the gradient of gate and up, and <d, h>; all contiguous, what is empty is not wanted."""
    rows, width = d.shape
    if rows == 0 or (out.numel() == 0 and dots.numel() == 0):
        return
    launch(_glu_backward_dots, (rows,))(
        d,
        wide,
        gates.contiguous(),
        slots,
        out,
        dots,
        width,
        KIND=KINDS[activation],
        INTERLEAVED=interleaved,
        STORES=out.numel() > 0,
        DOTS=dots.numel() > 0,
        BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
    )
