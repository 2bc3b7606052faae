"""What gated_experts launches, in which order, and when memory is let go.

forward   xa1 | B1 packed | gate_up product and activation | B2 packed | xa2 | down product |
          combine
backward  yb2 | down's dX and the activation's gradient | yb1 | gate_up's dX | combine |
          dA of both projections | dB of both | what else was asked for

A launch of the forward begins beside the one before it where the device can: programs move in as
the ones before leave, and wait before they read what those write; a product waits after its sum
over K. Where memory allows, LoRA's own launches of the backward run beside the products:

second  B2 packed | yb2 | down's dX and the activation's gradient | yb1 | dX | combine
first   after yb2: B1 packed, dB2 | after d: the gates' gradient, dA2 and dB1 | after yb1: dA1

A sum of dA or dB waits for memory, a product for tensor cores: the sums fill what the products
leave, at their ends and between launches. They are not launched before the products, whose programs
would find no room beside theirs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ..checks import gradient_like
from ..launch.launch_plan import beside, launch
from . import tile_tables as config
from .expert_sort import ExpertOrder
from .gated_triton import _gated_backward, _gated_forward
from .grouped_launch_triton import (
    RowSum,
    arch,
    column_pieces,
    expert_products,
    grouped_lora_dw_triton,
    grouped_product,
    is_scattered,
    low_rank,
    overlaps,
    packed,
    product_options,
    reorder,
    sum_parts,
    tile_of,
)
from .grouped_lora import ExpertWeights, GatedLayer
from .rows_triton import KINDS, combine_triton


class Wants(NamedTuple):
    """Which operands of a gated layer want a gradient; 1 is the gate_up projection, 2 down."""

    x: bool
    w1: bool
    a1: bool
    b1: bool
    bias1: bool
    w2: bool
    a2: bool
    b2: bool
    bias2: bool
    gates: bool


_ALIGNMENT = 128  # elements


def _packed_columns(
    factor: Tensor | None, interleaved: bool, dtype: torch.dtype, first: int, end: int, packs: bool
) -> tuple[Tensor | None, int, int]:
    """Gate and up of the columns of h from first to end, packed if they are scattered and `packs`.

    Returns:
        the factor (E, r, .), the columns from a gate to its up in it, and the first column in it.
    """
    if factor is None or not packs or not is_scattered(factor):
        return factor, 0 if factor is None else factor.shape[2] // 2, 0
    experts, rank, n = factor.shape
    count = end - first
    target = torch.empty((experts, rank, 2 * count), dtype=dtype, device=factor.device)
    if interleaved:
        return reorder(factor[:, :, 2 * first : 2 * end], target), count, first
    if 2 * count == n:
        return reorder(factor, target), count, first
    for half in (0, 1):
        source = factor[:, :, half * n // 2 + first : half * n // 2 + end]
        reorder(source, target[:, :, half * count : (half + 1) * count])
    return target, count, first


def gated_forward(
    layer: GatedLayer,
    low: Tensor,  # (R, r)
    factor: Tensor | None,  # (E, r, 2I)
    *,
    keeps: bool,
    early: bool,
    signals: bool,
) -> tuple[Tensor, Tensor]:
    """(gate and up (R, 2I), or (0, 2I) unless `keeps`; h (R, I)).

    `early` and `signals` as in `grouped_product` and `low_rank`.
    """
    x, weight, bias, order = layer.x, layer.first.weight, layer.first.bias, layer.order
    experts, k, n = weight.shape
    rows, width = order.slots.shape[0], n // 2
    rank = 0 if factor is None else factor.shape[1]
    tile = tile_of(x, order.tile_rows, k, n, "forward", rank)
    wide, h = x.new_empty((rows if keeps else 0, n)), x.new_empty((rows, width))
    if order.tiles.shape[0] == 0:
        return wide, h
    half = None if factor is None else factor[:, :, :width]
    ranges, packs = column_pieces(half, rows * max(k, width) // 2, tile.columns // 2)
    for first, end in ranges:
        end = end or width
        columns = (first, end, packs)
        here, factor_width, at = _packed_columns(factor, layer.interleaved, x.dtype, *columns)
        count = triton.cdiv(2 * (end - first), tile.columns)
        launch(_gated_forward, (order.tiles.shape[0] * count,))(
            x,
            weight,
            low,
            weight if here is None else here,
            weight if bias is None else bias,
            order.slots,
            order.tiles,
            wide,
            h,
            k,
            width,
            rank,
            experts,
            order.tiles.shape[0],
            count,
            2 * first // tile.columns,
            factor_width,
            at,
            *x.stride(),
            *weight.stride(),
            *((0, 0, 0) if here is None else here.stride()),
            *((0, 0) if bias is None else bias.stride()),
            FAN=order.top_k,
            LORA=here is not None,
            BIAS=bias is not None,
            KEEPS=keeps,
            INTERLEAVED=layer.interleaved,
            KIND=KINDS[layer.activation],
            NEXT=signals,
            **product_options(x, tile, k, n, rank, early=early),
        )
        del here  # before the next one is packed
    return wide, h


def rooms_of_backward(
    grad: Tensor,  # rows of K
    layer: GatedLayer,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """What `gated_backward` fills, the third per tile of columns; without rows if not wanted."""
    (_, width, k), order = layer.second.weight.shape, layer.order
    tile = tile_of(grad, order.tile_rows, k, width, "gated", layer.second.rank)
    d_rows, h_rows, dots_rows = (order.slots.shape[0] if one else 0 for one in wanted)
    parts = (triton.cdiv(width, tile.columns), dots_rows)
    dots = torch.empty(parts, dtype=torch.float32, device=grad.device)
    return grad.new_empty((d_rows, 2 * width)), grad.new_empty((h_rows, width)), dots


def gated_backward(
    grad: Tensor,  # rows of K
    layer: GatedLayer,
    low: Tensor,  # (R, r)
    wide: Tensor,  # (R, 2I)
    rooms: tuple[Tensor, Tensor, Tensor],
    *,
    early: bool = False,
) -> None:
    """Fill gradients of gate and up (R, 2I), h (R, I) and <d, h> (column tiles, R).

    `early` as in `grouped_product`.
    """
    weight, rank, order = layer.second.weight.mT, layer.second.rank, layer.order
    experts, k, width = weight.shape
    d_wide, h, dots = rooms
    tile = tile_of(grad, order.tile_rows, k, width, "gated", rank)
    column_tiles = triton.cdiv(width, tile.columns)
    factor = None if layer.second.lora is None else packed(layer.second.a, grad.dtype)
    wants_wide, wants_h, wants_dots = (room.numel() > 0 for room in rooms)
    count = order.tiles.shape[0]
    if count == 0 or not (wants_wide or wants_h or wants_dots):
        return
    launch(_gated_backward, (count * column_tiles,))(
        grad,
        weight,
        low,
        weight if factor is None else factor,
        wide,
        layer.gates.contiguous(),
        order.slots,
        order.tiles,
        d_wide,
        h,
        dots,
        k,
        width,
        rank,
        experts,
        order.slots.shape[0],
        count,
        column_tiles,
        *grad.stride(),
        *weight.stride(),
        *((0, 0, 0) if factor is None else factor.stride()),
        FAN=order.top_k,
        LORA=factor is not None,
        STORES=wants_wide,
        KEEPS=wants_h,
        DOTS=wants_dots,
        INTERLEAVED=layer.interleaved,
        KIND=KINDS[layer.activation],
        PIECE=config.piece(tile),
        **product_options(grad, tile, k, width, rank, early=early),
        **config.registers(tile, grad.element_size(), arch(grad.device)),
    )


def room_for_gradients(order: ExpertOrder, x: Tensor) -> int:
    """Bytes of the rows of dx."""
    return order.slots.shape[0] * x.shape[1] * x.element_size()


def row_sum(
    factor: Tensor | None,
    wanted: bool,
    left: Tensor,  # (R, r)
    right: Tensor,
    right_fan: int,
    *,
    outputs_first: bool = False,
    gated: bool = False,
) -> tuple[Tensor, list[RowSum]]:
    """Room for the gradient of a factor, (E, N, r) if `outputs_first`, and what fills it."""
    if not wanted:
        return left.new_empty(0), []
    gradient = gradient_like(factor, wanted)
    out = gradient.mT if outputs_first else gradient
    return gradient, [RowSum(left, right, out, 0, right_fan, gated)]


def gradient_of_gates(
    dots: Tensor,  # (column tiles, R)
    grad: Tensor,
    bias2: Tensor | None,
    gates: Tensor,
    order: ExpertOrder,
) -> Tensor:
    """(T, k): <d, h> over all columns, and what came through the bias."""
    found = torch.empty_like(gates, memory_format=torch.contiguous_format)
    if bias2 is None:
        sum_parts(dots, found)
    else:
        through = torch.empty((order.slots.shape[0], 1), dtype=torch.float32, device=grad.device)
        options = {"scaling": 1.0, "fan": order.top_k, "scatter": True}
        low_rank(grad, bias2[:, None], order, through, **options)
        sum_parts(dots, found, more=through)
    return found


def gradient_of_inputs(
    d_wide: Tensor,  # (R, 2I)
    first: ExpertWeights,
    yb1: Tensor,
    order: ExpertOrder,
    spread: Tensor,  # (R, H), which is overwritten
    dx: Tensor,  # (T, H), which is filled
    *,
    early: bool = False,
) -> None:
    """dx: its rows in expert order, and their sums. `early` as in `grouped_product`."""
    product = (d_wide, first.weight.mT, yb1, first.a, order, spread)
    grouped_product(*product, early=early, direction="dx", fan=0, scatter=False)
    combine_triton(spread, None, order.rows, order.offsets, order.top_k, dx)


@contextlib.contextmanager
def packing(
    factor: Tensor | None,  # (E, r, N)
    order: ExpertOrder,
    x: Tensor,
) -> Iterator[Tensor | None]:
    """Yields the factor, copied beside what is launched inside where its elements lie apart.

    Only if the copy takes no more than the rows of y, or of dx, will take after it.
    """
    fits = copied((factor,), x) <= room_for_gradients(order, x)
    found = room_to_pack(factor, x) if fits else factor
    if found is factor:
        yield factor
        return
    with beside(x) as streams:
        with streams.there():
            reorder(factor, found)
        yield found


def room_to_pack(factor: Tensor | None, x: Tensor) -> Tensor | None:
    """Room for a packed copy in x's dtype; the factor where it needs none."""
    if factor is None or not is_scattered(factor):
        return factor
    return torch.empty(factor.shape, dtype=x.dtype, device=x.device)


def pack(
    factor: Tensor | None, room: Tensor | None, early: bool = False, signals: bool = False
) -> bool:
    """Fill what `room_to_pack` gave; whether the next launch may begin early, as in `reorder`."""
    if room is factor:
        return early
    reorder(factor, room, early=early, signals=signals)
    return signals


def copied(factors: Sequence[Tensor | None], x: Tensor) -> int:
    """Bytes of packed copies of those factors whose elements lie apart."""
    apart = [factor for factor in factors if factor is not None and is_scattered(factor)]
    return sum(_aligned(factor) for factor in apart) * x.element_size()


def _aligned(factor: Tensor) -> int:
    """Its elements, so many more that what lies behind them is aligned as memory of its own."""
    return triton.cdiv(factor.numel(), _ALIGNMENT) * _ALIGNMENT


def sums_fit_beside(
    first: ExpertWeights, second: ExpertWeights, wants: Wants, order: ExpertOrder, x: Tensor
) -> bool:
    """Whether `_backward_beside` serves a call: dx and gradients of LoRA, none of the base.

    The gradients must fit into what the rows of dx take, and with the copies that put them in order
    into those rows and h: by as much the layer stays below the memory of its stages on their own.
    """
    factors = (first.a, first.b, second.a, second.b)
    wants_lora = (wants.a1, wants.b1, wants.a2, wants.b2)
    trains_base = wants.w1 or wants.bias1 or wants.w2 or wants.bias2
    apart_inside = any(a is not None and is_scattered(a) for a in (first.a, second.a))
    if not wants.x or not any(wants_lora) or trains_base or apart_inside:
        return False
    wanted = [one for one, want in zip(factors, wants_lora, strict=True) if want]
    gradients = sum(one.nbytes for one in wanted)
    copies = sum(one.nbytes for one in wanted if is_scattered(one.mT))
    room = room_for_gradients(order, x)
    width = second.weight.shape[1]
    h = order.slots.shape[0] * width * x.element_size() if wants.a2 else 0
    packs = copied([None if one.b is None else one.b.mT for one in (first, second)], x)
    return max(gradients, packs) <= room and gradients + copies <= room + h


def _places(factors: Sequence[Tensor | None], spread: Tensor) -> list[Tensor | None]:
    """Where packed copies go: into memory that is written after their last use."""
    found, flat, at = [], spread.view(-1), 0
    for factor in factors:
        if factor is not None and is_scattered(factor):
            found.append(flat[at : at + factor.numel()].view(factor.shape))
            at += _aligned(factor)
        else:
            found.append(factor)
    return found


def gated_experts_triton(layer: GatedLayer, keeps: bool) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Launch the forward kernels; the results are those of `kernels.experts.gated_experts`."""
    x, first, second, order = layer.x, layer.first, layer.second, layer.order
    total = order.slots.shape[0]
    xa1 = x.new_empty((total, first.rank))
    own1, own2 = factor1, factor2 = [None if one.b is None else one.b.mT for one in (first, second)]
    if copied((own1, own2), x) <= room_for_gradients(order, x):
        factor1, factor2 = (room_to_pack(own, x) for own in (own1, own2))
    signals, early = overlaps(x.device) and order.tiles.shape[0] > 0, False
    if first.lora is not None:
        options = {"scaling": first.scaling, "fan": order.top_k}
        early = low_rank(x, first.a, order, xa1, signals=signals, **options)
    early = pack(own1, factor1, early, signals)
    signals = signals and second.lora is not None
    wide, h = gated_forward(layer, xa1, factor1, keeps=keeps, early=early, signals=signals)
    del factor1
    early = pack(own2, factor2, signals, signals)
    xa2 = x.new_empty((total, second.rank))
    if second.lora is not None:
        options = {"scaling": second.scaling, "fan": 0}
        early = low_rank(h, second.a, order, xa2, early=early, signals=signals, **options)
    y = x.new_empty((total, second.weight.shape[2]))
    options = {"direction": "forward", "fan": 0, "scatter": False, "bias": second.bias}
    grouped_product(h, second.weight, xa2, factor2, order, y, early=early, **options)
    del h, factor2
    out = combine_triton(y, layer.gates, order.rows, order.offsets, order.top_k)
    return out, wide, xa1, xa2


def gated_experts_backward_triton(
    grad: Tensor, layer: GatedLayer, kept: Sequence[Tensor], wants: Wants
) -> tuple[Tensor, ...]:
    """Launch the backward kernels.

    Args:
        grad: (T, H), of the result.
        layer: As in the forward.
        kept: gate and up, xa1 and xa2 of the forward.
        wants: Which gradients.

    Returns:
        Gradients in the order of `Wants`, (0,) where one is not wanted.
    """
    first, second = layer.first, layer.second
    fits = sums_fit_beside(first, second, wants, layer.order, layer.x)
    return (_backward_beside if fits else _backward_in_turn)(grad, layer, kept, wants)


def _backward_in_turn(
    grad: Tensor, layer: GatedLayer, kept: Sequence[Tensor], wants: Wants
) -> tuple[Tensor, ...]:
    """One launch after the other; operands are let go as soon as nothing reads them."""
    x, first, second, order, gates = layer.x, layer.first, layer.second, layer.order, layer.gates
    wide, xa1, xa2 = kept
    top_k = order.top_k
    yb2 = grad.new_empty((order.slots.shape[0], second.rank))
    factor1 = None if first.b is None or not (wants.x or wants.a1) else first.b.mT
    with packing(factor1, order, x) as factor1:
        if second.lora is not None:
            low_rank(grad, second.b.mT, order, yb2, scaling=second.scaling, fan=top_k)
    through = wants.x or wants.w1 or wants.a1 or wants.b1 or wants.bias1
    wanted = (through, wants.w2 or wants.a2, wants.gates)
    rooms = rooms_of_backward(grad, layer, wanted)
    gated_backward(grad, layer, yb2, wide, rooms)
    d_wide, h, dots = rooms
    del rooms
    yb1 = grad.new_empty((order.slots.shape[0], first.rank))
    if factor1 is not None:
        low_rank(d_wide, factor1, order, yb1, scaling=first.scaling, fan=0)
    del factor1
    dgates = gates.new_empty(0)
    if wants.gates:
        dgates = gradient_of_gates(dots, grad, second.bias, gates, order)
    dx = x.new_empty(x.shape if wants.x else 0)
    if wants.x:
        spread = x.new_empty((order.slots.shape[0], x.shape[1]))
        gradient_of_inputs(d_wide, first, yb1, order, spread, dx)
        del spread
    # The sums of both projections share launches where all gradients fit into what dx's rows took;
    # else each operand is let go before the next gradient.
    factors = zip(
        (first.a, first.b, second.a, second.b),
        (wants.a1, wants.b1, wants.a2, wants.b2),
        strict=True,
    )
    gradients = sum(factor.nbytes for factor, wanted in factors if wanted)
    at_once = gradients <= room_for_gradients(order, x)

    def run(*sums: RowSum) -> None:
        expert_products(sums, gates, order, in_place=not at_once)

    db1, sum_b1 = row_sum(first.b, wants.b1, xa1, d_wide, 0, outputs_first=True)
    dw1, dbias1 = _base(first, wants.w1, wants.bias1)
    grouped_lora_dw_triton(x, d_wide, None, order, dw1, dbias1, top_k, 0)
    if not at_once:
        run(*sum_b1)
        d_wide, sum_b1 = None, []
    da1, sum_a1 = row_sum(first.a, wants.a1, yb1, x, top_k)
    da2, sum_a2 = row_sum(second.a, wants.a2, yb2, h, 0, gated=True)
    dw2, dbias2 = _base(second, wants.w2, wants.bias2)
    grouped_lora_dw_triton(h, grad, gates, order, dw2, dbias2, 0, top_k)
    if not at_once:
        run(*sum_a1, *sum_a2)
        h, sum_a1, sum_a2 = None, [], []
    db2, sum_b2 = row_sum(second.b, wants.b2, xa2, grad, top_k, outputs_first=True, gated=True)
    run(*sum_a1, *sum_a2, *sum_b1, *sum_b2)
    return dx, dw1, da1, db1, dbias1, dw2, da2, db2, dbias2, dgates


def _backward_beside(
    grad: Tensor, layer: GatedLayer, kept: Sequence[Tensor], wants: Wants
) -> tuple[Tensor, ...]:
    """LoRA's own launches beside the products, where `sums_fit_beside`."""
    x, first, second, order, gates = layer.x, layer.first, layer.second, layer.order, layer.gates
    wide, xa1, xa2 = kept
    total, top_k = order.slots.shape[0], order.top_k
    dx, spread = x.new_empty(x.shape), x.new_empty((total, x.shape[1]))
    own = [None if one.b is None else one.b.mT for one in (first, second)]
    factors = _places(own, spread)
    yb1, yb2 = (grad.new_empty((total, one.rank)) for one in (first, second))
    wanted = (True, wants.a2, wants.gates)
    rooms = rooms_of_backward(grad, layer, wanted)
    d_wide, h, dots = rooms

    def run(*sums: RowSum) -> None:
        if sums:
            expert_products(sums, gates, order, in_place=False)

    signals = overlaps(grad.device) and order.tiles.shape[0] > 0
    with beside(grad) as streams:
        with streams.there():
            early = pack(own[1], factors[1], signals=signals)
            if second.lora is not None:
                options = {"fan": top_k, "signals": signals, "early": early}
                early = low_rank(grad, factors[1], order, yb2, scaling=second.scaling, **options)
        streams.here_waits()
        with streams.there():
            gated_backward(grad, layer, yb2, wide, rooms, early=early)
        if factors[0] is not own[0]:
            reorder(own[0], factors[0])
            streams.there_waits()
        db2, sums = row_sum(second.b, wants.b2, xa2, grad, top_k, outputs_first=True, gated=True)
        run(*sums)
        streams.here_waits()
        early = False
        with streams.there():
            if first.lora is not None:
                options = {"fan": 0, "signals": signals}
                early = low_rank(d_wide, factors[0], order, yb1, scaling=first.scaling, **options)
        dgates = gates.new_empty(0)
        if wants.gates:
            dgates = gradient_of_gates(dots, grad, second.bias, gates, order)
        da2, sums = row_sum(second.a, wants.a2, yb2, h, 0, gated=True)
        db1, more = row_sum(first.b, wants.b1, xa1, d_wide, 0, outputs_first=True)
        run(*sums, *more)
        streams.here_waits()
        with streams.there():
            gradient_of_inputs(d_wide, first, yb1, order, spread, dx, early=early)
        da1, sums = row_sum(first.a, wants.a1, yb1, x, top_k)
        run(*sums)
    (dw1, dbias1), (dw2, dbias2) = (_base(one, False, False) for one in (first, second))
    return dx, dw1, da1, db1, dbias1, dw2, da2, db2, dbias2, dgates


def _base(weights: ExpertWeights, wants_weight: bool, wants_bias: bool) -> tuple[Tensor, Tensor]:
    """Room for the gradients of a projection's own parameters."""
    weight, bias = weights.weight, weights.bias
    dbias = weight.new_empty(0) if bias is None else gradient_like(bias, wants_bias)
    return gradient_like(weight, wants_weight), dbias
