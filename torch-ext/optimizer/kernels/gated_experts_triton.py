"""Triton path of gated_experts: what is launched, in which order, and when memory is let go.

forward   xa1 | gate_up product and activation | xa2 | down product | combine
backward  yb2 | down's dX and the activation's gradient | yb1 | gate_up's dX | combine |
          dA of both projections | dB of both | what else was asked for

Where memory allows, PEFT's B of both projections are packed beside xa1 and beside yb2, and the
sums of dA and dB, which wait for memory, run beside gate_up's dX, which waits for tensor cores.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ._beside import beside
from ._gated_launch_triton import gated_backward, gated_forward
from ._grouped_launch_triton import (
    RowSum,
    expert_products,
    grouped_product,
    is_scattered,
    low_rank,
    reorder,
)
from ._moe_paths import gradient_like
from .combine_triton import combine_triton
from .grouped_lora_dw_triton import grouped_lora_dw_triton


def gated_experts_triton(  # noqa: PLR0913
    x: Tensor,
    w1: Tensor,
    a1: Tensor | None,
    b1: Tensor | None,
    bias1: Tensor | None,
    w2: Tensor,
    a2: Tensor | None,
    b2: Tensor | None,
    bias2: Tensor | None,
    gates: Tensor,
    slots: Tensor,
    offsets: Tensor,
    rows: Tensor,
    tiles: Tensor,
    tile_rows: int,
    top_k: int,
    scalings: tuple[float, float],
    activation: str,
    interleaved: bool,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the forward kernels; arguments and results as in `kernels.gated_experts`."""
    total = slots.shape[0]
    xa1 = x.new_empty((total, 0 if a1 is None else a1.shape[1]))
    factor1, factor2 = (None if b is None else b.mT for b in (b1, b2))
    with _packing((factor1, factor2), slots, x) as (factor1, factor2):
        if a1 is not None:
            low_rank(x, a1, slots, tiles, xa1, tile_rows=tile_rows, scaling=scalings[0], fan=top_k)
    wide, h = gated_forward(
        x,
        w1,
        xa1,
        factor1,
        bias1,
        slots,
        tiles,
        tile_rows=tile_rows,
        fan=top_k,
        activation=activation,
        interleaved=interleaved,
        keeps=keeps,
    )
    del factor1
    xa2 = x.new_empty((total, 0 if a2 is None else a2.shape[1]))
    if a2 is not None:
        low_rank(h, a2, slots, tiles, xa2, tile_rows=tile_rows, scaling=scalings[1], fan=0)
    y = x.new_empty((total, w2.shape[2]))
    grouped_product(
        h,
        w2,
        xa2,
        factor2,
        slots,
        tiles,
        y,
        direction="forward",
        tile_rows=tile_rows,
        fan=0,
        scatter=False,
        bias=bias2,
    )
    del h, factor2
    return combine_triton(y, gates, rows, offsets, top_k), wide, xa1, xa2


def gated_experts_backward_triton(  # noqa: PLR0913
    grad: Tensor,
    x: Tensor,
    w1: Tensor,
    a1: Tensor | None,
    b1: Tensor | None,
    bias1: Tensor | None,
    w2: Tensor,
    a2: Tensor | None,
    b2: Tensor | None,
    bias2: Tensor | None,
    gates: Tensor,
    wide: Tensor,
    xa1: Tensor,
    xa2: Tensor,
    slots: Tensor,
    offsets: Tensor,
    rows: Tensor,
    tiles: Tensor,
    tile_rows: int,
    top_k: int,
    scalings: tuple[float, float],
    activation: str,
    interleaved: bool,
    wants: tuple[bool, ...],
) -> tuple[Tensor, ...]:
    """Launch the backward kernels; arguments and results as in `kernels.gated_experts`."""
    wants_x, wants_w1, wants_a1, wants_b1, wants_bias1 = wants[:5]
    wants_w2, wants_a2, wants_b2, wants_bias2, wants_gates = wants[5:]
    place = {"tile_rows": tile_rows}
    yb2 = grad.new_empty((slots.shape[0], 0 if b2 is None else b2.shape[2]))
    factor1 = None if b1 is None or not (wants_x or wants_a1) else b1.mT
    with _packing((factor1,), slots, x) as (factor1,):
        if b2 is not None:
            low_rank(grad, b2.mT, slots, tiles, yb2, scaling=scalings[1], fan=top_k, **place)
    d_wide, h, dots = gated_backward(
        grad,
        w2.mT,
        yb2,
        a2,
        wide,
        gates,
        slots,
        tiles,
        fan=top_k,
        activation=activation,
        interleaved=interleaved,
        wants_wide=any(wants[:5]),
        wants_h=wants_w2 or wants_a2,
        wants_dots=wants_gates,
        **place,
    )
    yb1 = grad.new_empty((slots.shape[0], 0 if b1 is None else b1.shape[2]))
    if factor1 is not None:
        low_rank(d_wide, factor1, slots, tiles, yb1, scaling=scalings[0], fan=0, **place)
    del factor1
    dgates = gates.new_empty(0)
    if wants_gates:
        if bias2 is not None:
            through = torch.empty((slots.shape[0], 1), dtype=torch.float32, device=grad.device)
            options = {"scaling": 1.0, "fan": top_k, "scatter": True, **place}
            low_rank(grad, bias2[:, None], slots, tiles, through, **options)
            dots = dots + through[:, 0]
        dgates = dots.view(gates.shape).to(gates.dtype)
    factors = (a1, b1, a2, b2)
    factors = [f for f, wanted in zip(factors, (*wants[2:4], *wants[6:8]), strict=True) if wanted]
    room = room_for_gradients(slots, x)
    at_once = sum(factor.nbytes for factor in factors) <= room
    aside = wants_x and at_once and _beside_dx(factors, a1, wants, room + h.nbytes)
    nothing: Any = contextlib.nullcontext(contextlib.nullcontext())
    dx = x.new_empty(x.shape if wants_x else 0)
    spread = x.new_empty((slots.shape[0] if wants_x else 0, x.shape[1]))
    with beside(grad, urgent=True) if aside else nothing as urgent:
        if wants_x:
            product = (d_wide, w1.mT, yb1, a1, slots, tiles, spread)
            with urgent:
                grouped_product(*product, direction="dx", fan=0, scatter=False, **place)
                combine_triton(spread, None, rows, offsets, top_k, dx)
            del product
            if not aside:
                del spread
        # The sums of both projections share launches where all gradients fit into what dx's rows
        # take; else each operand is let go before the next gradient.

        def run(*sums: RowSum | None) -> None:
            found = [one for one in sums if one is not None]
            expert_products(found, gates, slots, offsets, in_place=not at_once)

        db1, sum_b1 = _row_sum(b1, wants_b1, xa1, d_wide, 0, outputs_first=True)
        dw1, dbias1 = _base(w1, bias1, (wants_w1, wants_bias1))
        grouped_lora_dw_triton(x, d_wide, None, slots, offsets, dw1, dbias1, top_k, 0)
        if not at_once:
            run(sum_b1)
            d_wide = sum_b1 = None
        da1, sum_a1 = _row_sum(a1, wants_a1, yb1, x, top_k)
        da2, sum_a2 = _row_sum(a2, wants_a2, yb2, h, 0, gated=True)
        dw2, dbias2 = _base(w2, bias2, (wants_w2, wants_bias2))
        grouped_lora_dw_triton(h, grad, gates, slots, offsets, dw2, dbias2, 0, top_k)
        if not at_once:
            run(sum_a1, sum_a2)
            h = sum_a1 = sum_a2 = None
        db2, sum_b2 = _row_sum(b2, wants_b2, xa2, grad, top_k, outputs_first=True, gated=True)
        run(sum_a1, sum_a2, sum_b1, sum_b2)
    return dx, dw1, da1, db1, dbias1, dw2, da2, db2, dbias2, dgates


@contextlib.contextmanager
def _packing(
    factors: Sequence[Tensor | None],  # (E, r, N)
    slots: Tensor,
    x: Tensor,
) -> Iterator[list[Tensor | None]]:
    """Yields the factors, those whose elements lie apart copied beside what is launched inside.

    Only if the copies take no more than the rows of y, or of dx, will take after them.
    """
    apart = [factor is not None and is_scattered(factor) for factor in factors]
    copied = sum(factor.numel() for factor, copies in zip(factors, apart, strict=True) if copies)
    if copied == 0 or copied * x.element_size() > room_for_gradients(slots, x):
        yield list(factors)
        return
    found = [
        torch.empty(factor.shape, dtype=x.dtype, device=x.device) if copies else factor
        for factor, copies in zip(factors, apart, strict=True)
    ]
    with beside(x) as aside:
        with aside:
            for factor, target, copies in zip(factors, found, apart, strict=True):
                if copies:
                    reorder(factor, target)
        yield found


def _beside_dx(
    factors: Sequence[Tensor], a1: Tensor | None, wants: Sequence[bool], room: int
) -> bool:
    """Whether the gradients of these factors are summed beside dx, whose rows are there then.

    They and the copies that put them in order must fit into `room`: what the rows and h take, by
    which the layer stays below the memory of its stages on their own.
    """
    trains_base = any((wants[1], wants[4], wants[5], wants[8]))
    if not factors or trains_base or (a1 is not None and is_scattered(a1)):
        return False
    copies = sum(factor.nbytes for factor in factors if is_scattered(factor.mT))
    return sum(factor.nbytes for factor in factors) + copies <= room


def room_for_gradients(slots: Tensor, x: Tensor) -> int:
    """Bytes that backward took for the rows of dx and gave back."""
    return slots.shape[0] * x.shape[1] * x.element_size()


def _row_sum(
    factor: Tensor | None,
    wanted: bool,
    left: Tensor,  # (R, r)
    right: Tensor,
    right_fan: int,
    *,
    outputs_first: bool = False,
    gated: bool = False,
) -> tuple[Tensor, RowSum | None]:
    """Room for the gradient of a factor, (E, N, r) if `outputs_first`, and what fills it."""
    if not wanted:
        return left.new_empty(0), None
    gradient = gradient_like(factor, wanted)
    out = gradient.mT if outputs_first else gradient
    return gradient, RowSum(left, right, out, 0, right_fan, gated)


def _base(weight: Tensor, bias: Tensor | None, wants: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """Room for the gradients of a projection's own parameters."""
    dbias = weight.new_empty(0) if bias is None else gradient_like(bias, wants[1])
    return gradient_like(weight, wants[0]), dbias
