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

import torch
import triton
from torch import Tensor

from ..launch.launch_plan import beside, launch
from . import tiles as config
from ._moe_paths import gradient_like
from .gated_triton import _gated_backward, _gated_forward
from .grouped_launch_triton import (
    RowSum,
    arch,
    as_early,
    column_pieces,
    expert_products,
    first_programs,
    grouped_lora_dw_triton,
    grouped_product,
    is_scattered,
    low_rank,
    overlaps,
    packed,
    reorder,
    sum_parts,
    tile_of,
    widens,
)
from .rows_triton import KINDS, combine_triton


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


def gated_forward(  # noqa: PLR0913
    x: Tensor,  # rows of K
    weight: Tensor,  # (E, K, 2I)
    low: Tensor,  # (R, r)
    factor: Tensor | None,  # (E, r, 2I)
    bias: Tensor | None,  # (E, 2I)
    slots: Tensor,
    tiles: Tensor,
    *,
    tile_rows: int,
    fan: int,
    activation: str,
    interleaved: bool,
    keeps: bool,
    early: bool = False,
    signals: bool = False,
) -> tuple[Tensor, Tensor]:
    """(gate and up (R, 2I), or (0, 2I) unless `keeps`; h (R, I)).

    `early` and `signals` as in `grouped_product` and `low_rank`.
    """
    experts, k, n = weight.shape
    rows, width = slots.shape[0], n // 2
    rank = 0 if factor is None else factor.shape[1]
    tile = tile_of(x, tile_rows, k, n, "forward", rank)
    wide, h = x.new_empty((rows if keeps else 0, n)), x.new_empty((rows, width))
    if tiles.shape[0] == 0:
        return wide, h
    half = None if factor is None else factor[:, :, :width]
    ranges, packs = column_pieces(half, rows * max(k, width) // 2, tile.columns // 2)
    for first, end in ranges:
        end = end or width
        columns = (first, end, packs)
        here, factor_width, at = _packed_columns(factor, interleaved, x.dtype, *columns)
        count = triton.cdiv(2 * (end - first), tile.columns)
        launch(_gated_forward, (tiles.shape[0] * count,))(
            x,
            weight,
            low,
            weight if here is None else here,
            weight if bias is None else bias,
            slots,
            tiles,
            wide,
            h,
            k,
            width,
            rank,
            experts,
            rows,
            tiles.shape[0],
            count,
            2 * first // tile.columns,
            factor_width,
            at,
            *x.stride(),
            *weight.stride(),
            *((0, 0, 0) if here is None else here.stride()),
            *((0, 0) if bias is None else bias.stride()),
            FAN=fan,
            LORA=here is not None,
            AHEAD=config.ahead(rank),
            BIAS=bias is not None,
            KEEPS=keeps,
            INTERLEAVED=interleaved,
            KIND=KINDS[activation],
            WIDEN=widens(x),
            EVEN_K=k % tile.depth == 0,
            EVEN_N=n % tile.columns == 0,
            EARLY=first_programs(tile, x) if early else 0,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.depth,
            BLOCK_R=config.block_rank(max(rank, 1)),
            GROUP=config.GROUP,
            NEXT=signals,
            num_warps=tile.warps,
            num_stages=tile.stages,
            **as_early(early),
        )
        del here  # before the next one is packed
    return wide, h


def rooms_of_backward(
    dy: Tensor,  # rows of K
    weight: Tensor,  # (E, K, I)
    rank: int,
    slots: Tensor,
    tile_rows: int,
    wanted: tuple[bool, bool, bool],
) -> tuple[Tensor, Tensor, Tensor]:
    """What `gated_backward` fills, the third per tile of columns; without rows if not wanted."""
    _, k, width = weight.shape
    tile = tile_of(dy, tile_rows, k, width, "gated", rank)
    d_rows, h_rows, dots_rows = (slots.shape[0] if one else 0 for one in wanted)
    parts = (triton.cdiv(width, tile.columns), dots_rows)
    dots = torch.empty(parts, dtype=torch.float32, device=dy.device)
    return dy.new_empty((d_rows, 2 * width)), dy.new_empty((h_rows, width)), dots


def gated_backward(  # noqa: PLR0913
    dy: Tensor,  # rows of K
    weight: Tensor,  # (E, K, I)
    low: Tensor,  # (R, r)
    factor: Tensor | None,  # (E, r, I)
    wide: Tensor,  # (R, 2I)
    gates: Tensor,  # (T, k)
    slots: Tensor,
    tiles: Tensor,
    rooms: tuple[Tensor, Tensor, Tensor],
    *,
    tile_rows: int,
    fan: int,
    activation: str,
    interleaved: bool,
    early: bool = False,
) -> None:
    """Fill gradients of gate and up (R, 2I), h (R, I) and <d, h> (column tiles, R).

    `early` as in `grouped_product`.
    """
    experts, k, width = weight.shape
    d_wide, h, dots = rooms
    rows, rank = slots.shape[0], 0 if factor is None else factor.shape[1]
    tile = tile_of(dy, tile_rows, k, width, "gated", rank)
    column_tiles = triton.cdiv(width, tile.columns)
    factor = None if factor is None else packed(factor, dy.dtype)
    wants_wide, wants_h, wants_dots = (room.numel() > 0 for room in rooms)
    if tiles.shape[0] == 0 or not (wants_wide or wants_h or wants_dots):
        return
    launch(_gated_backward, (tiles.shape[0] * column_tiles,))(
        dy,
        weight,
        low,
        weight if factor is None else factor,
        wide,
        gates.contiguous(),
        slots,
        tiles,
        d_wide,
        h,
        dots,
        k,
        width,
        rank,
        experts,
        rows,
        tiles.shape[0],
        column_tiles,
        *dy.stride(),
        *weight.stride(),
        *((0, 0, 0) if factor is None else factor.stride()),
        FAN=fan,
        LORA=factor is not None,
        AHEAD=config.ahead(rank),
        STORES=wants_wide,
        KEEPS=wants_h,
        DOTS=wants_dots,
        INTERLEAVED=interleaved,
        KIND=KINDS[activation],
        WIDEN=widens(dy),
        EVEN_K=k % tile.depth == 0,
        EVEN_N=width % tile.columns == 0,
        EARLY=first_programs(tile, dy) if early else 0,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        BLOCK_R=config.block_rank(max(rank, 1)),
        PIECE=config.piece(tile),
        GROUP=config.GROUP,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **as_early(early),
        **config.registers(tile, dy.element_size(), arch(dy.device)),
    )


_ALIGNMENT = 128  # elements


def room_for_gradients(slots: Tensor, x: Tensor) -> int:
    """Bytes of the rows of dx."""
    return slots.shape[0] * x.shape[1] * x.element_size()


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
    slots: Tensor,
    tiles: Tensor,
    *,
    tile_rows: int,
    fan: int,
) -> Tensor:
    """(T, k): <d, h> over all columns, and what came through the bias."""
    found = torch.empty_like(gates, memory_format=torch.contiguous_format)
    if bias2 is None:
        sum_parts(dots, found)
    else:
        through = torch.empty((slots.shape[0], 1), dtype=torch.float32, device=grad.device)
        options = {"tile_rows": tile_rows, "scaling": 1.0, "fan": fan, "scatter": True}
        low_rank(grad, bias2[:, None], slots, tiles, through, **options)
        sum_parts(dots, found, more=through)
    return found


def gradient_of_inputs(
    d_wide: Tensor,  # (R, 2I)
    w1: Tensor,
    yb1: Tensor,
    a1: Tensor | None,
    slots: Tensor,
    offsets: Tensor,
    rows: Tensor,
    tiles: Tensor,
    spread: Tensor,  # (R, H), which is overwritten
    dx: Tensor,  # (T, H), which is filled
    *,
    tile_rows: int,
    top_k: int,
    early: bool = False,
) -> None:
    """dx: its rows in expert order, and their sums. `early` as in `grouped_product`."""
    product = (d_wide, w1.mT, yb1, a1, slots, tiles, spread)
    options = {"direction": "dx", "tile_rows": tile_rows, "fan": 0, "scatter": False}
    grouped_product(*product, early=early, **options)
    combine_triton(spread, None, rows, offsets, top_k, dx)


@contextlib.contextmanager
def packing(
    factors: Sequence[Tensor | None],  # (E, r, N)
    slots: Tensor,
    x: Tensor,
) -> Iterator[list[Tensor | None]]:
    """Yields the factors, those whose elements lie apart copied beside what is launched inside.

    Only if the copies take no more than the rows of y, or of dx, will take after them.
    """
    found = list(factors)
    if copied(factors, x) <= room_for_gradients(slots, x):
        found = [beside_itself(factor, x) for factor in factors]
    apart = [(f, target) for f, target in zip(factors, found, strict=True) if target is not f]
    if not apart:
        yield found
        return
    with beside(x) as streams:
        with streams.there():
            for factor, target in apart:
                reorder(factor, target)
        yield found


def beside_itself(factor: Tensor | None, x: Tensor) -> Tensor | None:
    """Room for a packed copy in x's dtype; the factor where it needs none."""
    if factor is None or not is_scattered(factor):
        return factor
    return torch.empty(factor.shape, dtype=x.dtype, device=x.device)


def copied(factors: Sequence[Tensor | None], x: Tensor) -> int:
    """Bytes of packed copies of those factors whose elements lie apart."""
    apart = [factor for factor in factors if factor is not None and is_scattered(factor)]
    return sum(_aligned(factor) for factor in apart) * x.element_size()


def _aligned(factor: Tensor) -> int:
    """Its elements, so many more that what lies behind them is aligned as memory of its own."""
    return triton.cdiv(factor.numel(), _ALIGNMENT) * _ALIGNMENT


def sums_fit_beside(
    factors: Sequence[Tensor | None],  # a1, b1, a2, b2
    wants: Sequence[bool],
    slots: Tensor,
    x: Tensor,
    width: int,
) -> bool:
    """Whether `backward_beside` serves a call: dx and gradients of LoRA, none of the base.

    The gradients must fit into what the rows of dx take, and with the copies that put them in order
    into those rows and h: by as much the layer stays below the memory of its stages on their own.
    """
    a1, b1, a2, b2 = factors
    wants_lora = (wants[2], wants[3], wants[6], wants[7])
    trains_base = any((wants[1], wants[4], wants[5], wants[8]))
    apart_inside = any(a is not None and is_scattered(a) for a in (a1, a2))
    if not wants[0] or not any(wants_lora) or trains_base or apart_inside:
        return False
    wanted = [one for one, want in zip(factors, wants_lora, strict=True) if want]
    gradients = sum(one.nbytes for one in wanted)
    copies = sum(one.nbytes for one in wanted if is_scattered(one.mT))
    room = room_for_gradients(slots, x)
    h = slots.shape[0] * width * x.element_size() if wants[6] else 0
    packs = copied([None if b is None else b.mT for b in (b1, b2)], x)
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


def backward_beside(  # noqa: PLR0913
    grad: Tensor,
    x: Tensor,
    w1: Tensor,
    a1: Tensor | None,
    b1: Tensor | None,
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
    *,
    tile_rows: int,
    top_k: int,
    scalings: tuple[float, float],
    activation: str,
    interleaved: bool,
    wants: tuple[bool, ...],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, a1, b1, a2, b2 and the gates, where `sums_fit_beside`."""
    place, order = {"tile_rows": tile_rows}, (slots, tiles)
    dx, spread = x.new_empty(x.shape), x.new_empty((slots.shape[0], x.shape[1]))
    own = [None if b is None else b.mT for b in (b1, b2)]
    factors = _places(own, spread)
    yb1, yb2 = (grad.new_empty((slots.shape[0], 0 if b is None else b.shape[1])) for b in own)
    wanted = (True, wants[6], wants[9])
    rooms = rooms_of_backward(grad, w2.mT, yb2.shape[1], slots, tile_rows, wanted)
    d_wide, h, dots = rooms

    def run(*sums: RowSum) -> None:
        if sums:
            expert_products(sums, gates, slots, offsets, in_place=False)

    signals = overlaps(grad.device) and tiles.shape[0] > 0
    with beside(grad) as streams:
        early = False
        with streams.there():
            if factors[1] is not own[1]:
                reorder(own[1], factors[1], signals=signals)
                early = signals
            if b2 is not None:
                options = {"fan": top_k, "signals": signals, "early": early, **place}
                early = low_rank(grad, factors[1], *order, yb2, scaling=scalings[1], **options)
        streams.here_waits()
        with streams.there():
            options = {"fan": top_k, "activation": activation, "interleaved": interleaved, **place}
            options["early"] = early
            gated_backward(grad, w2.mT, yb2, a2, wide, gates, *order, rooms, **options)
        if factors[0] is not own[0]:
            reorder(own[0], factors[0])
            streams.there_waits()
        db2, sums = row_sum(b2, wants[7], xa2, grad, top_k, outputs_first=True, gated=True)
        run(*sums)
        streams.here_waits()
        early = False
        with streams.there():
            if b1 is not None:
                options = {"fan": 0, "signals": signals, **place}
                early = low_rank(d_wide, factors[0], *order, yb1, scaling=scalings[0], **options)
        dgates = gates.new_empty(0)
        if wants[9]:
            dgates = gradient_of_gates(dots, grad, bias2, gates, *order, fan=top_k, **place)
        da2, sums = row_sum(a2, wants[6], yb2, h, 0, gated=True)
        db1, more = row_sum(b1, wants[3], xa1, d_wide, 0, outputs_first=True)
        run(*sums, *more)
        streams.here_waits()
        with streams.there():
            product = (d_wide, w1, yb1, a1, slots, offsets, rows, tiles)
            gradient_of_inputs(*product, spread, dx, top_k=top_k, early=early, **place)
        da1, sums = row_sum(a1, wants[2], yb1, x, top_k)
        run(*sums)
    return dx, da1, db1, da2, db2, dgates


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
