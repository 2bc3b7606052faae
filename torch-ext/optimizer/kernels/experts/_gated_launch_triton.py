"""Launches of the two gated kernels: tiles by `_grouped_config`, factors packed in pairs."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from ..launch.launch_plan import launch
from . import _grouped_config as config
from ._gated_triton import _gated_backward, _gated_forward
from ._grouped_launch_triton import (
    arch,
    as_early,
    column_pieces,
    first_programs,
    is_scattered,
    packed,
    reorder,
    tile_of,
    widens,
)
from .glu_triton import KINDS


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
