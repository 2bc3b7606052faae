"""Launches of the grouped kernels: tiles by `_grouped_config`, arguments as they come.

LoRA factors in PEFT's layout, whose experts are fastest, would be read two bytes per sector: a copy
in which N (or the rank) is fastest is made first.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from ..launch.launch_plan import launch
from . import _grouped_config as config
from ._grouped_triton import _grouped_product
from ._low_rank_triton import _low_rank, _reorder, _sum_parts

_REORDER = 64  # a side of the tile that is reordered: 128 bytes of bfloat16 either way
_SUM = 1024
PACKED_PER_RESULT = 1.5  # elements of a packed factor per element of the product that reads it
PIECE = 256  # columns: what a factor packed in pieces is cut into multiples of
MOST_PIECES = 3  # more launches than theirs take longer than reading a factor where it lies


@functools.cache
def arch(device: torch.device) -> str:
    """ "sm90" for an H100 or H200; "hip" for AMD; the interpreter counts as "sm90"."""
    if device.type != "cuda":
        return "sm90"
    if torch.version.hip is not None:
        return "hip"
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
    return torch.version.hip is None and torch.cuda.get_device_capability(device) >= (9, 0)


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
    slots: Tensor,
    tiles: Tensor,
    out: Tensor,  # (R, r), contiguous
    *,
    tile_rows: int,
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
    tile = tile_of(x, tile_rows, k, rank, "low_rank", rank)
    if tiles.shape[0] == 0:
        return False
    own, factor = factor, packed(factor, x.dtype)
    span = config.span(k, tile)
    parts, target = triton.cdiv(k, span), out
    signals = signals and factor is own
    if parts > 1:
        target = torch.empty((parts, *out.shape), dtype=torch.float32, device=x.device)
    share = triton.cdiv(tile_rows, tile.rows)
    launch(_low_rank, (tiles.shape[0] * share, triton.cdiv(rank, tile.columns), parts))(
        x,
        factor,
        slots,
        tiles,
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
    slots: Tensor,
    tiles: Tensor,
    out: Tensor | None,  # (R, N), contiguous
    *,
    direction: str,
    tile_rows: int,
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
    tile = tile_of(x, tile_rows, k, n, direction if other is None else "dots", rank)
    common = {"tile": tile, "fan": fan, "scatter": scatter, "gates": gates, "early": early}
    if other is not None:
        dots = torch.empty(
            (triton.cdiv(n, tile.columns), slots.shape[0]), dtype=torch.float32, device=x.device
        )
        factor = None if factor is None else packed(factor, x.dtype)
        operands = (x, weight, low, factor, bias, other, slots, tiles, out, dots)
        _launch_product(*operands, other_fan=other_fan, **common)
        return dots.sum(0)
    ranges, packs = column_pieces(factor, 0 if out is None else out.numel())
    for first, end in ranges:
        columns = slice(first, end if factor is not None else n)
        here = None if factor is None else factor[:, :, columns]
        _launch_product(
            x,
            weight[:, :, columns],
            low,
            packed(here, x.dtype) if factor is not None and packs else here,
            None if bias is None else bias[:, columns],
            None,
            slots,
            tiles,
            None if out is None else out[:, columns],
            None,
            other_fan=0,
            **common,
        )
    return None


def _launch_product(  # noqa: PLR0913
    x: Tensor,
    weight: Tensor,
    low: Tensor,
    factor: Tensor | None,
    bias: Tensor | None,
    other: Tensor | None,
    slots: Tensor,
    tiles: Tensor,
    out: Tensor | None,
    dots: Tensor | None,
    *,
    tile: config.Tile,
    fan: int,
    other_fan: int,
    scatter: bool,
    gates: Tensor | None,
    early: bool = False,
) -> None:
    experts, k, n = weight.shape
    rank = 0 if factor is None else factor.shape[1]
    column_tiles = triton.cdiv(n, tile.columns)
    if tiles.shape[0] == 0:
        return
    launch(_grouped_product, (tiles.shape[0] * column_tiles,))(
        x,
        weight,
        low,
        weight if factor is None else factor,
        weight if bias is None else bias,
        weight if gates is None else gates.contiguous(),
        weight if other is None else other,
        slots,
        tiles,
        weight if out is None else out,
        weight if dots is None else dots,
        k,
        n,
        rank,
        experts,
        slots.shape[0],
        tiles.shape[0],
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
        AHEAD=config.ahead(rank),
        BIAS=bias is not None,
        GATED=gates is not None,
        DOTS=other is not None,
        STORES=out is not None,
        WIDEN=widens(x),
        EVEN_K=k % tile.depth == 0,
        EVEN_N=n % tile.columns == 0,
        EARLY=first_programs(tile, x) if early else 0,
        BLOCK_M=tile.rows,
        BLOCK_N=tile.columns,
        BLOCK_K=tile.depth,
        BLOCK_R=config.block_rank(max(rank, 1)),
        GROUP=config.GROUP,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **as_early(early),
    )
