"""Launches of gated_quantized_experts, and which of them run beside each other.

forward   xa1 | gate_up product | activation | xa2 | down product | combine
          urgent: B1 packed, beside xa1 | B2 packed, beside what comes
backward  urgent: B2 packed | yb2 | down's dX | the activation's gradient | yb1 | dX | combine
          beside: B1 packed, dB2 | after yb2: dA2 | after the activation's: dB1 | after yb1: dA1

A product is one launch, or two for every slice of experts that is decoded to memory.

A compiled product fills every multiprocessor's registers: the sums run where it ends, and beside
the launches that wait for memory or for each other. A launch that is urgent is served first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..experts.gated_launch_triton import gradient_of_gates, room_to_pack, row_sum
from ..experts.grouped_launch_triton import RowSum, expert_products, is_scattered, low_rank, reorder
from ..experts.grouped_lora import ExpertWeights, GatedLayer
from ..experts.rows_triton import KINDS, _activation, _factor, combine_triton, glu_triton
from ..launch.launch_plan import Streams, beside, launch
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
    own = [None if one.b is None else one.b.mT for one in (first, second)]
    factors = [room_to_pack(factor, x) for factor in own]

    def low(rows_in: Tensor, one: ExpertWeights, fan: int) -> Tensor:
        xa = x.new_empty((order.slots.shape[0], one.rank))
        if one.a is not None:
            low_rank(rows_in, one.a, order, xa, scaling=one.scaling, fan=fan)
        return xa

    def product(rows_in: Tensor, one: int, xa: Tensor, factor: Tensor | None, fan: int) -> Tensor:
        weights = (first, second)[one]
        stack: Stack = weights.weight
        y = x.new_empty((order.slots.shape[0], stack.shape[2]))
        place = (order.slots, order.offsets, order.tiles)
        operands = (rows_in, stack, stack.transposed, xa, factor, *place, y)
        options = {"scatter": False, "bias": weights.bias, "fan": fan}
        options |= {"tile_rows": order.tile_rows}
        product_of_stack(operands, slice_experts[one], "forward", options, path)
        return y

    packs = any(room is not factor for room, factor in zip(factors, own, strict=True))
    with beside(x, urgent=True) if packs else contextlib.nullcontext(Streams()) as streams:
        with streams.there():
            _pack(own[0], factors[0])
        xa1 = low(x, first, order.top_k)
        streams.here_waits()
        with streams.there():
            _pack(own[1], factors[1])
        wide = product(x, 0, xa1, factors[0], order.top_k)
    h = glu_triton(wide, layer.activation, layer.interleaved)
    if not keeps:
        wide = wide.new_empty((0, wide.shape[1]))
    xa2 = low(h, second, 0)
    y = product(h, 1, xa2, factors[1], 0)
    if not keeps:
        h = h.new_empty((0, h.shape[1]))
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

    def product(urgent_rows: Tensor, one: int, low: tuple, out: Tensor, fan: int) -> None:
        stack: Stack = (first, second)[one].weight
        place = (order.slots, order.offsets, order.tiles)
        operands = (urgent_rows, stack, not stack.transposed, *low, *place, out)
        options = {"scatter": False, "fan": fan, "tile_rows": order.tile_rows}
        product_of_stack(operands, slice_experts[one], "dx", options, path)

    def run(sums: list[RowSum]) -> None:
        if sums:
            copied = sum(one.out.nbytes for one in sums if is_scattered(one.out))
            expert_products(sums, gates, order, in_place=copied > spread.nbytes)

    with beside(grad, urgent=True) as streams:
        with streams.there():
            _pack(own[1], factors[1])
        _pack(own[0], factors[0])
        streams.there_waits()
        with streams.there():
            if b2 is not None:
                low_rank(grad, factors[1], order, yb2, scaling=second.scaling, fan=top_k)
        db2, sums = row_sum(b2, wants_b2, xa2, grad, top_k, outputs_first=True, gated=True)
        run(sums)
        streams.here_waits()
        with streams.there():
            if through or wants_gates:
                product(grad, 1, (yb2, a2), dh, top_k)
                glu = {"activation": layer.activation, "interleaved": layer.interleaved}
                glu_backward_dots(dh, wide, gates, order.slots, d_wide, dots, **glu)
        da2, sums = row_sum(a2, wants_a2, yb2, h, 0, gated=True)
        run(sums)
        streams.here_waits()
        with streams.there():
            if b1 is not None and (wants_x or wants_a1):
                low_rank(d_wide, factors[0], order, yb1, scaling=first.scaling, fan=0)
        db1, sums = row_sum(b1, wants_b1, xa1, d_wide, 0, outputs_first=True)
        run(sums)
        streams.here_waits()
        with streams.there():
            if wants_x:
                product(d_wide, 0, (yb1, a1), spread, 0)
                combine_triton(spread, None, order.rows, order.offsets, top_k, dx)
        da1, sums = row_sum(a1, wants_a1, yb1, x, top_k)
        run(sums)
        dgates = gates.new_empty(0)
        if wants_gates:
            dgates = gradient_of_gates(dots[None], grad, second.bias, gates, order)
    return dx, da1, db1, da2, db2, dgates


def _in_one_place(x: Tensor, rows: int, *widths: int) -> list[Tensor]:
    """(rows, width) of x's dtype for each width, of which one is written after the others' use."""
    flat = x.new_empty(rows * max(widths))
    return [flat[: rows * width].view(rows, width) for width in widths]


def _pack(factor: Tensor | None, room: Tensor | None) -> None:
    """Fill what `room_to_pack` gave."""
    if room is not factor:
        reorder(factor, room)


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
