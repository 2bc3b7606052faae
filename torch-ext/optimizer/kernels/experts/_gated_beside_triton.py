"""LoRA's own launches of a gated layer beside its products, where memory allows.

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

from ..launch.streams import beside
from ._gated_launch_triton import gated_backward, rooms_of_backward
from ._grouped_launch_triton import (
    grouped_product,
    is_scattered,
    low_rank,
    overlaps,
    reorder,
    sum_parts,
)
from ._grouped_sums_triton import RowSum, expert_products
from ._moe_paths import gradient_like
from .combine_triton import combine_triton

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
