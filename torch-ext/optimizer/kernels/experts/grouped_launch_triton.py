"""Launches of the grouped kernels: tiles by `tiles`, arguments as they come.

From below: the product, its low-rank side and the sums over an expert's rows, then the paths of
grouped_lora_forward, grouped_lora_dx, grouped_lora_dab and grouped_lora_dw. They take bfloat16,
float16 and float32 (whose products are exact float32, no TF32), of any strides.

LoRA factors in PEFT's layout, whose experts are fastest, would be read two bytes per sector: a copy
in which N (or the rank) is fastest is made first. Gradients in that layout are written in one go.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from ..launch.launch_plan import launch
from . import tile_tables as config
from .expert_sort import ExpertOrder
from .grouped_lora import ExpertWeights
from .grouped_triton import (
    _expert_products,
    _expert_sum,
    _grouped_product,
    _low_rank,
    _reorder,
    _sum_parts,
)

_REORDER = 64  # a side of the tile that is reordered: 128 bytes of bfloat16 either way
_SUM = 1024
PACKED_PER_RESULT = 1.5  # elements of a packed factor per element of the product that reads it
PIECE = 256  # columns: what a factor packed in pieces is cut into multiples of
MOST_PIECES = 3  # more launches than theirs take longer than reading a factor where it lies


@functools.cache
def arch(device: torch.device) -> str:
    """ "sm90" for an H100 or H200; the interpreter counts as one."""
    if device.type != "cuda":
        return "sm90"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def widens(x: Tensor) -> bool:
    """Whether the interpreter must widen: it multiplies the bits of bfloat16 operands."""
    return x.dtype == torch.bfloat16 and not isinstance(_grouped_product, JITFunction)


def tile_of(
    x: Tensor, rows: int, depth: int, columns: int, direction: str, rank: int = 0
) -> config.Tile:
    """The tile of rows of x by `rows` per tile; the other arguments as in `config.Shape`."""
    shape = config.Shape(arch(x.device), rows, depth, columns, x.element_size(), direction, rank)
    return config.choose(shape)


def is_scattered(factor: Tensor) -> bool:
    """Whether neighbours in both inner dimensions of (E, r, N) lie apart, as in PEFT's B."""
    _, rank, n = factor.shape
    return n > 1 and factor.stride(2) != 1 and (rank == 1 or factor.stride(1) != 1)


@functools.cache
def overlaps(device: torch.device) -> bool:
    """Whether a launch can begin before its predecessor ended, and wait for it within."""
    if not isinstance(_grouped_product, JITFunction) or device.type != "cuda":
        return False
    return torch.cuda.get_device_capability(device) >= (9, 0)


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


def first_programs(tile: config.Tile, x: Tensor) -> int:
    """How many programs of a product begin at once."""
    per_block = max(tile.shared_memory(x.element_size()), 1)
    return _multiprocessors(x.device) * max(config.SHARED_MEMORY["sm90"] // per_block, 1)


def as_early(early: bool) -> dict[str, bool]:
    """Triton's option of a launch that begins before its predecessor ended."""
    return {"launch_pdl": True} if early else {}


def product_options(
    x: Tensor, tile: config.Tile, k: int, n: int, rank: int, *, early: bool
) -> dict[str, Any]:
    """What every product of rows of K with (E, K, N) is compiled for."""
    return {
        "AHEAD": config.ahead(rank),
        "WIDEN": widens(x),
        "EVEN_K": k % tile.depth == 0,
        "EVEN_N": n % tile.columns == 0,
        "EARLY": first_programs(tile, x) if early else 0,
        "BLOCK_M": tile.rows,
        "BLOCK_N": tile.columns,
        "BLOCK_K": tile.depth,
        "BLOCK_R": config.block_rank(max(rank, 1)),
        "GROUP": config.GROUP,
        "num_warps": tile.warps,
        "num_stages": tile.stages,
        **as_early(early),
    }


def reorder(
    source: Tensor, target: Tensor, *, early: bool = False, signals: bool = False
) -> Tensor:
    """Copy (E, r, N) between strides, near the speed of a copy where either is PEFT's; target.

    `early`: it begins beside its predecessor, and ends after it; `signals`: and so may the next.
    """
    experts, rank, n = target.shape
    sides = (source.stride(), target.stride())
    launch(_reorder, (triton.cdiv(n, _REORDER), triton.cdiv(rank * experts, _REORDER)))(
        source,
        target,
        n,
        rank * experts,
        experts,
        *source.stride(),
        *target.stride(),
        **{
            name: by_rank == experts * by_expert
            for name, (by_expert, by_rank, _) in zip(
                ("SOURCE_FLAT", "TARGET_FLAT"), sides, strict=True
            )
        },
        EARLY=early,
        BLOCK_N=_REORDER,
        BLOCK_C=_REORDER,
        NEXT=signals,
        num_warps=4,
        **as_early(early),
    )
    return target


def packed(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """factor (E, r, N), or a contiguous copy in dtype where its elements lie apart."""
    if not is_scattered(factor):
        return factor
    return reorder(factor, torch.empty(factor.shape, dtype=dtype, device=factor.device))


def low_rank(
    x: Tensor,  # rows of K
    factor: Tensor,  # (E, r, K)
    order: ExpertOrder,
    out: Tensor,  # (R, r), contiguous
    *,
    scaling: float,
    fan: int,
    scatter: bool = False,
    early: bool = False,
    signals: bool = False,
) -> bool:
    """out = scaling x factor_e^T, in expert order or scattered to slots.

    `early`: its programs begin beside the predecessor's, and wait for them. `signals`: the next
    launch may begin so.

    Returns:
        whether it may, which it may not beside a copy that is let go.
    """
    experts, rank, k = factor.shape
    tile = tile_of(x, order.tile_rows, k, rank, "low_rank", rank)
    if order.tiles.shape[0] == 0:
        return False
    own, factor = factor, packed(factor, x.dtype)
    span = config.span(k, tile)
    parts, target = triton.cdiv(k, span), out
    signals = signals and factor is own
    if parts > 1:
        target = torch.empty((parts, *out.shape), dtype=torch.float32, device=x.device)
    share = triton.cdiv(order.tile_rows, tile.rows)
    launch(_low_rank, (order.tiles.shape[0] * share, triton.cdiv(rank, tile.columns), parts))(
        x,
        factor,
        order.slots,
        order.tiles,
        target,
        k,
        rank,
        experts,
        out.shape[0],
        span,
        *x.stride(),
        *factor.stride(),
        scaling if parts == 1 else 1.0,
        FAN=fan,
        SCATTER=scatter,
        WIDEN=widens(x),
        EVEN=k % tile.depth == 0,
        SHARE=share,
        EARLY=early,
        BLOCK_M=tile.rows,
        BLOCK_R=tile.columns,
        BLOCK_K=tile.depth,
        NEXT=signals and parts == 1,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **as_early(early),
    )
    if parts > 1:
        sum_parts(target, out, scaling, signals=signals)
    return signals


def sum_parts(
    parts: Tensor,  # (parts, ...) float32, contiguous
    out: Tensor,  # (...), contiguous
    scaling: float = 1.0,
    *,
    more: Tensor | None = None,  # (...) float32, contiguous
    signals: bool = False,
) -> None:
    """out = scaling (sum over the parts, in order) + more; `signals` as in `low_rank`."""
    size = out.numel()
    grid = (triton.cdiv(size, _SUM),)
    options = {"MORE": more is not None, "BLOCK": _SUM, "NEXT": signals, "num_warps": 4}
    added = parts if more is None else more
    launch(_sum_parts, grid)(parts, added, out, size, parts.shape[0], scaling, **options)


def column_pieces(
    factor: Tensor | None, results: int, piece: int | None = None
) -> tuple[list[tuple[int, int]], bool]:
    """Ranges of columns, so that packing the factor takes a bounded copy beside so many results.

    Where there would be many, an expert has few rows: it reads little twice, two bytes per sector.

    Args:
        factor: (E, r, N) or None.
        results: Elements that are there at the same time, or soon after.
        piece: What ranges are multiples of; `PIECE` by default.

    Returns:
        the ranges, and whether the factor is packed; if not, it is read in place.
    """
    if factor is None or results == 0 or not is_scattered(factor):
        return [(0, 0 if factor is None else factor.shape[2])], True
    n, piece = factor.shape[2], piece or PIECE
    pieces = math.ceil(factor.numel() / (PACKED_PER_RESULT * results))
    if pieces > MOST_PIECES:
        return [(0, n)], False
    size = triton.cdiv(triton.cdiv(n, pieces), piece) * piece
    return [(at, min(at + size, n)) for at in range(0, n, size)], True


def grouped_product(  # noqa: PLR0913
    x: Tensor,  # rows of K
    weight: Tensor,  # (E, K, N)
    low: Tensor,  # (R, r)
    factor: Tensor | None,  # (E, r, N)
    order: ExpertOrder,
    out: Tensor | None,  # (R, N), contiguous
    *,
    direction: str,
    fan: int,
    scatter: bool,
    bias: Tensor | None = None,  # (E, N)
    gates: Tensor | None = None,  # (T, k)
    other: Tensor | None = None,  # rows of N
    other_fan: int = 0,
    early: bool = False,
) -> Tensor | None:
    """out = (x weight_e + low factor_e + bias_e) gates; returns <row before its gate, other>.

    `early`: it begins beside its predecessor, and waits for it before it reads low and factor.
    """
    _, k, n = weight.shape
    rank = 0 if factor is None else factor.shape[1]
    tile = tile_of(x, order.tile_rows, k, n, direction if other is None else "dots", rank)
    ranges, packs, dots = [(0, n)], True, None
    if other is None:
        ranges, packs = column_pieces(factor, 0 if out is None else out.numel())
    else:
        shape = (triton.cdiv(n, tile.columns), order.slots.shape[0])
        dots = torch.empty(shape, dtype=torch.float32, device=x.device)
    for first, end in ranges:
        columns = slice(first, end if factor is not None else n)
        here = None if factor is None else factor[:, :, columns]
        launch_product(
            x,
            weight[:, :, columns],
            low,
            packed(here, x.dtype) if factor is not None and packs else here,
            order,
            None if out is None else out[:, columns],
            tile=tile,
            fan=fan,
            scatter=scatter,
            bias=None if bias is None else bias[:, columns],
            gates=gates,
            other=other,
            other_fan=0 if other is None else other_fan,  # which a kernel is compiled for
            dots=dots,
            early=early,
        )
    return None if dots is None else dots.sum(0)


def launch_product(  # noqa: PLR0913
    x: Tensor,
    weight: Tensor,
    low: Tensor,
    factor: Tensor | None,
    order: ExpertOrder,
    out: Tensor | None,
    *,
    tile: config.Tile,
    fan: int,
    scatter: bool,
    bias: Tensor | None = None,
    gates: Tensor | None = None,
    other: Tensor | None = None,
    other_fan: int = 0,
    dots: Tensor | None = None,  # (column tiles, R)
    early: bool = False,
) -> None:
    """One launch of `grouped_product`, which chose the tile."""
    experts, k, n = weight.shape
    rank = 0 if factor is None else factor.shape[1]
    column_tiles = triton.cdiv(n, tile.columns)
    count = order.tiles.shape[0]
    if count == 0:
        return
    launch(_grouped_product, (count * column_tiles,))(
        x,
        weight,
        low,
        weight if factor is None else factor,
        weight if bias is None else bias,
        weight if gates is None else gates.contiguous(),
        weight if other is None else other,
        order.slots,
        order.tiles,
        weight if out is None else out,
        weight if dots is None else dots,
        k,
        n,
        rank,
        experts,
        order.slots.shape[0],
        count,
        column_tiles,
        *x.stride(),
        *weight.stride(),
        *((0, 0, 0) if factor is None else factor.stride()),
        *((0, 0) if bias is None else bias.stride()),
        *((0, 0) if other is None else other.stride()),
        0 if out is None else out.stride(0),
        FAN=fan,
        OTHER_FAN=other_fan,
        SCATTER=scatter,
        LORA=factor is not None,
        BIAS=bias is not None,
        GATED=gates is not None,
        DOTS=other is not None,
        STORES=out is not None,
        **product_options(x, tile, k, n, rank, early=early),
    )


@dataclasses.dataclass(frozen=True)
class RowSum:
    """One product of `expert_products`: out[e] = sum over the expert's rows of left^T right."""

    left: Tensor  # rows of A
    right: Tensor  # rows of B
    out: Tensor  # (E, A, B), any strides
    left_fan: int
    right_fan: int
    gated: bool = False  # each row times its gate

    def sizes(self) -> tuple[int, ...]:
        """The arguments of the kernel from A on."""
        strides = (*self.left.stride(), *self.right.stride(), *self.out.stride())
        return (*self.out.shape[1:], *strides)


def expert_products(
    sums: Sequence[RowSum],
    gates: Tensor | None,
    order: ExpertOrder,
    *,
    in_place: bool = True,
    later: list[tuple[Tensor, Tensor]] | None = None,
) -> None:
    """Sums over every expert's rows, two in a launch where their results lie alike.

    Where experts are fastest in a result, `in_place` shares its tiles between neighbours; else it
    is computed apart and reordered, which takes as much memory again. `later` takes such copies and
    where they go, for `reorder`, which is launched here without it.
    """
    scattered = [one for one in sums if is_scattered(one.out)]
    plain = [one for one in sums if not is_scattered(one.out)]
    if in_place:
        for at in range(0, len(scattered), 2):
            _launch_expert_products(scattered[at : at + 2], gates, order, True)
    else:
        for one in scattered:
            out = torch.empty(one.out.shape, dtype=one.out.dtype, device=one.out.device)
            plain.append(dataclasses.replace(one, out=out))
    for at in range(0, len(plain), 2):
        _launch_expert_products(plain[at : at + 2], gates, order, False)
    if not in_place:
        for one, apart in zip(scattered, plain[len(plain) - len(scattered) :], strict=True):
            if later is None:
                reorder(apart.out, one.out)
            else:
                later.append((apart.out, one.out))


def _launch_expert_products(
    sums: Sequence[RowSum], gates: Tensor | None, order: ExpertOrder, together: bool
) -> None:
    first, second = sums[0], sums[-1]
    experts = order.offsets.shape[0] - 1
    tallest, widest = (max(one.out.shape[side] for one in sums) for side in (1, 2))
    direction = "neighbours" if together else "product"
    tile = tile_of(first.left, tallest, order.slots.shape[0], widest, direction)
    neighbours = config.NEIGHBOURS if together else 1
    block_a = config.lanes(tile, tallest) if together else tile.rows

    def programs(one: RowSum) -> int:
        _, a, b = one.out.shape
        groups = triton.cdiv(experts, neighbours)
        return groups * triton.cdiv(a, block_a) * triton.cdiv(b, tile.columns)

    grid = (sum(programs(one) for one in sums),)
    launch(_expert_products, grid)(
        first.left,
        first.right,
        first.out,
        second.left,
        second.right,
        second.out,
        first.left if gates is None else gates.contiguous(),
        order.slots,
        order.offsets,
        experts,
        programs(first),
        *first.sizes(),
        *second.sizes(),
        LEFT_FAN=first.left_fan,
        RIGHT_FAN=first.right_fan,
        GATED=first.gated,
        OTHER_LEFT_FAN=second.left_fan,
        OTHER_RIGHT_FAN=second.right_fan,
        OTHER_GATED=second.gated,
        TWO=len(sums) > 1,
        WIDEN=widens(first.right),
        EXPERTS=neighbours,
        EXPERTS_LAST=together,
        BLOCK_A=block_a,
        BLOCK_B=tile.columns,
        BLOCK_M=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def expert_sum(
    right: Tensor,  # rows of B
    gates: Tensor | None,  # (T, k)
    order: ExpertOrder,
    out: Tensor,  # (E, B)
    *,
    fan: int,
) -> None:
    """out[e] = sum over the expert's rows of gates right."""
    experts, b = out.shape
    launch(_expert_sum, (experts, triton.cdiv(b, 128)))(
        right,
        right if gates is None else gates.contiguous(),
        order.slots,
        order.offsets,
        out,
        b,
        *right.stride(),
        *out.stride(),
        FAN=fan,
        GATED=gates is not None,
        BLOCK_B=128,
        BLOCK_M=32,
        num_warps=4,
    )


def grouped_lora_forward_triton(
    x: Tensor,
    weights: ExpertWeights,
    order: ExpertOrder,
    fan: int,
    grouped_out: bool,
    product: Callable[..., Tensor | None] | None = None,
) -> tuple[Tensor, Tensor]:
    """xa first, then the product with xa B_e^T in its epilogue; see `grouped_lora_forward`.

    `product` takes what `grouped_product` takes, over weights of another kind.
    """
    rows = order.slots.shape[0]
    xa = x.new_empty((rows, weights.rank))
    y = x.new_empty((rows, weights.weight.shape[2]))
    if weights.lora is not None:
        low_rank(x, weights.a, order, xa, scaling=weights.scaling, fan=fan)
    (product or grouped_product)(
        x,
        weights.weight,
        xa,
        None if weights.lora is None else weights.b.transpose(1, 2),
        order,
        y,
        direction="forward",
        fan=fan,
        scatter=not grouped_out,
        bias=weights.bias,
    )
    return y, xa


def grouped_lora_dx_triton(
    dy: Tensor,
    weights: ExpertWeights,
    order: ExpertOrder,
    gates: Tensor | None,
    x: Tensor | None,
    dy_fan: int,
    x_fan: int,
    grouped_out: bool,
    wants_dx: bool,
    product: Callable[..., Tensor | None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The forward kernels with W, A and B read transposed; see `grouped_lora_dx`.

    The gradient of the gates is the product's row before its gate, multiplied with x in the
    epilogue: one partial sum per tile of columns, added in order.
    """
    rows = order.slots.shape[0]
    yb = dy.new_empty((rows, weights.rank))
    dx = dy.new_empty((rows if wants_dx else 0, weights.weight.shape[1]))
    dgates = dy.new_empty((0,), dtype=torch.float32)
    if weights.lora is not None:
        low_rank(dy, weights.b.transpose(1, 2), order, yb, scaling=weights.scaling, fan=dy_fan)
    if wants_dx or x is not None:
        dots = (product or grouped_product)(
            dy,
            weights.weight.mT,
            yb,
            weights.a,
            order,
            dx if wants_dx else None,
            direction="dx",
            fan=dy_fan,
            scatter=not grouped_out,
            gates=gates,
            other=x,
            other_fan=x_fan,
        )
        dgates = dgates if dots is None else dots
    if x is not None and weights.bias is not None:
        through_bias = torch.empty((rows, 1), dtype=torch.float32, device=dy.device)
        options = {"scaling": 1.0, "fan": dy_fan, "scatter": True}
        low_rank(dy, weights.bias[:, None], order, through_bias, **options)
        dgates = dgates + through_bias[:, 0]
    return dx, yb, dgates


def grouped_lora_dab_triton(
    x: Tensor,
    dy: Tensor,
    xa: Tensor,
    yb: Tensor,
    gates: Tensor | None,
    order: ExpertOrder,
    da: Tensor,
    db: Tensor,
    x_fan: int,
    dy_fan: int,
) -> tuple[Tensor, Tensor]:
    """Fill each gradient that has room; see `grouped_lora_dab`.

    A part is written once, in the parameter's dtype. A gradient in PEFT's layout is reordered from
    a copy no larger than the rows of dy, or written so by neighbouring experts at once.
    """
    sums, gated = [], gates is not None
    if da.numel() > 0:
        sums.append(RowSum(yb, x, da, 0, x_fan, gated))
    if db.numel() > 0:
        sums.append(RowSum(xa, dy, db.transpose(1, 2), 0, dy_fan, gated))
    copies = db.nbytes <= order.slots.shape[0] * dy.shape[1] * dy.element_size()
    expert_products(sums, gates, order, in_place=not copies)
    return da, db


def grouped_lora_dw_triton(
    x: Tensor,
    dy: Tensor,
    gates: Tensor | None,
    order: ExpertOrder,
    dw: Tensor,
    dbias: Tensor,
    x_fan: int,
    dy_fan: int,
) -> tuple[Tensor, Tensor]:
    """Fill each gradient that has room: dw by tiles, dbias by columns; not measured yet."""
    if dw.numel() > 0:
        expert_products([RowSum(x, dy, dw, x_fan, dy_fan, gates is not None)], gates, order)
    if dbias.numel() > 0:
        expert_sum(dy, gates, order, dbias, fan=dy_fan)
    return dw, dbias
