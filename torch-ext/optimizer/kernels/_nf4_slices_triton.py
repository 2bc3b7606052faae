"""Grouped products over 4-bit experts that are decoded to memory, some experts at a time.

Every slice of experts writes its own rows of one result. What does not depend on the weights (the
low-rank factors, tiles per slice) is computed once for all slices, so that a slice costs the host
two launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._grouped_launch_triton import grouped_product
from ._grouped_launch_triton import packed as packed_factor
from .nf4_dequant import nf4_dequant


def tiles_of_slices(tiles: Tensor, experts: int, count: int) -> Tensor:
    """(slices, bound, 3): tiles with experts counted within their slice, -1 in all other slices.

    Tiles of sentinels belong to the first slice, where they follow its experts.
    """
    starts = torch.arange(0, experts, count, device=tiles.device)[:, None]
    expert = tiles[:, 0]
    local = expert - starts
    mine = (local >= 0) & (local < count) & (expert < experts)
    found = tiles.repeat(starts.shape[0], 1, 1)
    found[:, :, 0] = torch.where(mine, local, -1)
    first = min(count, experts)
    found[0, :, 0] = torch.where(expert == experts, first, found[0, :, 0])
    return found


def sliced_product(  # noqa: PLR0913
    x: Tensor,  # rows of the summed dimension
    stack: tuple,  # packed, absmax, codebook, nested, (E, N, K), blocksize
    last: bool,  # the sum runs along K
    low: Tensor,  # (R, r)
    factor: Tensor | None,  # (E, r, columns)
    slots: Tensor,
    offsets: Tensor,
    tiles: Tensor,
    out: Tensor | None,
    *,
    count: int,  # experts per slice
    tile_rows: int,
    fan: int,
    scatter: bool,
    direction: str,
    bias: Tensor | None = None,
    gates: Tensor | None = None,
    other: Tensor | None = None,
    other_fan: int = 0,
) -> Tensor | None:
    """out = (x W_e + low factor_e + bias_e) gates; returns <row before its gate, other>."""
    packed, absmax, codebook, nested, (experts, *shape), blocksize = stack
    if factor is not None:
        factor = packed_factor(factor, x.dtype)
    every = torch.arange(experts, device=x.device)
    row = torch.arange(slots.shape[0], device=x.device)
    dots = None
    for number, part in enumerate(tiles_of_slices(tiles, experts, count).unbind(0)):
        first, end = number * count, min(number * count + count, experts)
        weight = nf4_dequant(
            packed,
            absmax,
            every[first:end],
            shape,
            blocksize,
            x.dtype,
            codebook,
            *(nested or (None, None, None)),
        )
        mine = grouped_product(
            x,
            weight.transpose(1, 2) if last else weight,
            low,
            None if factor is None else factor[first:end],
            slots,
            part,
            out,
            direction=direction,
            tile_rows=tile_rows,
            fan=fan,
            scatter=scatter,
            bias=None if bias is None else bias[first:end],
            gates=gates,
            other=other,
            other_fan=other_fan,
        )
        del weight  # before the next slice is decoded
        if mine is None:
            continue
        if dots is None:
            dots = mine
            continue
        inside = (row >= offsets[first]) & (row < offsets[end])  # in expert order
        dots[slots] = torch.where(inside, mine[slots], dots[slots])
    return dots
