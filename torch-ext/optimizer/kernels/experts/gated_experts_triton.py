"""Triton path of gated_experts: what is launched, in which order, and when memory is let go.

forward   xa1 | B1 packed | gate_up product and activation | B2 packed | xa2 | down product |
          combine
backward  yb2 | down's dX and the activation's gradient | yb1 | gate_up's dX | combine |
          dA of both projections | dB of both | what else was asked for

A launch of the forward begins beside the one before it where the device can: programs move in as
the ones before leave, and wait before they read what those write; a product waits after its sum
over K. Where memory allows, `_gated_beside_triton` has LoRA's own launches of the backward run
beside the products.
"""

from __future__ import annotations

from torch import Tensor

from ._gated_beside_triton import (
    backward_beside,
    beside_itself,
    copied,
    gradient_of_gates,
    gradient_of_inputs,
    packing,
    room_for_gradients,
    row_sum,
    sums_fit_beside,
)
from ._gated_launch_triton import gated_backward, gated_forward, rooms_of_backward
from ._grouped_launch_triton import grouped_product, low_rank, overlaps, reorder
from ._grouped_sums_triton import RowSum, expert_products
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
    """Launch the forward kernels; arguments and results as in `kernels.experts.gated_experts`."""
    total = slots.shape[0]
    xa1 = x.new_empty((total, 0 if a1 is None else a1.shape[1]))
    own1, own2 = factor1, factor2 = [None if b is None else b.mT for b in (b1, b2)]
    if copied((own1, own2), x) <= room_for_gradients(slots, x):
        factor1, factor2 = (beside_itself(own, x) for own in (own1, own2))
    signals, early = overlaps(x.device) and tiles.shape[0] > 0, False
    if a1 is not None:
        options = {"tile_rows": tile_rows, "scaling": scalings[0], "fan": top_k}
        early = low_rank(x, a1, slots, tiles, xa1, signals=signals, **options)
    if factor1 is not own1:
        reorder(own1, factor1, early=early, signals=signals)
        early = signals
    signals = signals and a2 is not None
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
        early=early,
        signals=signals,
    )
    del factor1
    early = signals
    if factor2 is not own2:
        reorder(own2, factor2, early=early, signals=signals)
    xa2 = x.new_empty((total, 0 if a2 is None else a2.shape[1]))
    if a2 is not None:
        options = {"tile_rows": tile_rows, "scaling": scalings[1], "fan": 0}
        early = low_rank(h, a2, slots, tiles, xa2, early=early, signals=signals, **options)
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
        early=early,
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
    """Launch the backward kernels; arguments and results as in `kernels.experts.gated_experts`."""
    wants_x, wants_w1, wants_a1, wants_b1, wants_bias1 = wants[:5]
    wants_w2, wants_a2, wants_b2, wants_bias2, wants_gates = wants[5:]
    place = {"tile_rows": tile_rows}
    if sums_fit_beside((a1, b1, a2, b2), wants, slots, x, w2.shape[1]):
        operands = (grad, x, w1, a1, b1, w2, a2, b2, bias2, gates, wide, xa1, xa2)
        options = {"activation": activation, "interleaved": interleaved, "wants": wants, **place}
        options |= {"top_k": top_k, "scalings": scalings}
        dx, *lora, dgates = backward_beside(*operands, slots, offsets, rows, tiles, **options)
        (dw1, dbias1), (dw2, dbias2) = (
            _base(*one, (False,) * 2) for one in ((w1, bias1), (w2, bias2))
        )
        return dx, dw1, *lora[:2], dbias1, dw2, *lora[2:], dbias2, dgates
    yb2 = grad.new_empty((slots.shape[0], 0 if b2 is None else b2.shape[2]))
    factor1 = None if b1 is None or not (wants_x or wants_a1) else b1.mT
    with packing((factor1,), slots, x) as (factor1,):
        if b2 is not None:
            low_rank(grad, b2.mT, slots, tiles, yb2, scaling=scalings[1], fan=top_k, **place)
    wanted = (any(wants[:5]), wants_w2 or wants_a2, wants_gates)
    rooms = rooms_of_backward(grad, w2.mT, yb2.shape[1], slots, tile_rows, wanted)
    options = {"fan": top_k, "activation": activation, "interleaved": interleaved, **place}
    gated_backward(grad, w2.mT, yb2, a2, wide, gates, slots, tiles, rooms, **options)
    d_wide, h, dots = rooms
    del rooms
    yb1 = grad.new_empty((slots.shape[0], 0 if b1 is None else b1.shape[2]))
    if factor1 is not None:
        low_rank(d_wide, factor1, slots, tiles, yb1, scaling=scalings[0], fan=0, **place)
    del factor1
    dgates = gates.new_empty(0)
    if wants_gates:
        dgates = gradient_of_gates(dots, grad, bias2, gates, slots, tiles, fan=top_k, **place)
    dx = x.new_empty(x.shape if wants_x else 0)
    if wants_x:
        spread = x.new_empty((slots.shape[0], x.shape[1]))
        product = (d_wide, w1, yb1, a1, slots, offsets, rows, tiles)
        gradient_of_inputs(*product, spread, dx, top_k=top_k, **place)
        del product, spread
    # The sums of both projections share launches where all gradients fit into what dx's rows took;
    # else each operand is let go before the next gradient.
    factors = zip((a1, b1, a2, b2), (wants_a1, wants_b1, wants_a2, wants_b2), strict=True)
    gradients = sum(factor.nbytes for factor, wanted in factors if wanted)
    at_once = gradients <= room_for_gradients(slots, x)

    def run(*sums: RowSum) -> None:
        expert_products(sums, gates, slots, offsets, in_place=not at_once)

    db1, sum_b1 = row_sum(b1, wants_b1, xa1, d_wide, 0, outputs_first=True)
    dw1, dbias1 = _base(w1, bias1, (wants_w1, wants_bias1))
    grouped_lora_dw_triton(x, d_wide, None, slots, offsets, dw1, dbias1, top_k, 0)
    if not at_once:
        run(*sum_b1)
        d_wide, sum_b1 = None, []
    da1, sum_a1 = row_sum(a1, wants_a1, yb1, x, top_k)
    da2, sum_a2 = row_sum(a2, wants_a2, yb2, h, 0, gated=True)
    dw2, dbias2 = _base(w2, bias2, (wants_w2, wants_bias2))
    grouped_lora_dw_triton(h, grad, gates, slots, offsets, dw2, dbias2, 0, top_k)
    if not at_once:
        run(*sum_a1, *sum_a2)
        h, sum_a1, sum_a2 = None, [], []
    db2, sum_b2 = row_sum(b2, wants_b2, xa2, grad, top_k, outputs_first=True, gated=True)
    run(*sum_a1, *sum_a2, *sum_b1, *sum_b2)
    return dx, dw1, da1, db1, dbias1, dw2, da2, db2, dbias2, dgates


def _base(weight: Tensor, bias: Tensor | None, wants: tuple[bool, bool]) -> tuple[Tensor, Tensor]:
    """Room for the gradients of a projection's own parameters."""
    dbias = weight.new_empty(0) if bias is None else gradient_like(bias, wants[1])
    return gradient_like(weight, wants[0]), dbias
