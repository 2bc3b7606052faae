"""Grouped products over 4-bit experts that are decoded to memory, some experts at a time.

Every slice of experts writes its own rows of one result. Slices take turns over two streams, each
with a buffer of its own: while one multiplies, the other decodes, and what a product of few tiles
leaves idle at its end is filled by the next. What does not depend on the weights (low-rank factors,
tiles per slice, block sizes) is made once, so that a slice costs the host two launches.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable

import torch
import triton
from torch import Tensor

from ...dispatch import path_name
from ..experts.expert_sort import ExpertOrder
from ..experts.grouped_launch_triton import launch_product, tile_of
from ..experts.grouped_launch_triton import packed as packed_factor
from .nf4_dequant import _op


def tiles_of_slices(tiles: Tensor, experts: int, count: int) -> Tensor:
    """(slices, bound, 3): a slice's tiles first, experts counted within it, then tiles of -1.

    Tiles of sentinels belong to the last slice, where they follow its experts.
    """
    starts = torch.arange(0, experts, count, device=tiles.device)[:, None]
    expert = tiles[:, 0]
    # Tiles are sorted by expert and unused ones (-1) come last, so that a slice's are neighbours.
    before = ((expert >= 0) & (expert < starts)).sum(1, keepdim=True)
    place = before + torch.arange(tiles.shape[0], device=tiles.device)
    found = tiles[place % tiles.shape[0]]
    local = found[:, :, 0] - starts
    ends = torch.full_like(starts, count)
    ends[-1] = experts - starts[-1] + 1
    mine = (found[:, :, 0] >= 0) & (local >= 0) & (local < ends)
    found[:, :, 0] = torch.where(mine, local, -1)
    return found


def decoder(stack: tuple, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """ids -> decoded experts: the op that `nf4_dequant` takes, its arguments checked before."""
    packed, absmax, codebook, nested, (_, *shape), blocksize = stack
    op = _op(path_name("nf4_dequant", packed.device))
    options = (shape, blocksize, dtype, codebook, *(nested or (None, None, None)))
    return lambda ids: op(packed, absmax, ids, *options)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class _Turns:
    """Two streams that slices take turns over: the current one and another, joined at the end.

    A slice is allocated on the stream that uses it, so that its memory is free for the next slice
    of that stream without waiting; the other stream's memory pool keeps one slice.
    """

    def __init__(self, device: torch.device, slices: int) -> None:
        self.main = self.side = None
        if device.type == "cuda" and slices > 1:
            self.main, self.side = torch.cuda.current_stream(device), _side_stream(device)
            self.side.wait_stream(self.main)

    def turn(self, number: int) -> contextlib.AbstractContextManager:
        """The stream of a slice."""
        if self.side is None or number % 2 == 0:
            return contextlib.nullcontext()
        return torch.cuda.stream(self.side)

    def join(self) -> None:
        """Make what follows on the current stream wait for both."""
        if self.side is not None:
            self.main.wait_stream(self.side)


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
    experts, n, k = stack[4]
    depth, columns = (k, n) if last else (n, k)
    if factor is not None:
        factor = packed_factor(factor, x.dtype)
    rank = 0 if factor is None else factor.shape[1]
    kind = direction if other is None else "dots"
    tile = tile_of(x, tile_rows, depth, columns, kind, rank)
    dots = None
    if other is not None:  # every slice writes its own rows
        shape = (triton.cdiv(columns, tile.columns), slots.shape[0])
        dots = torch.empty(shape, dtype=torch.float32, device=x.device)
    decode, every = decoder(stack, x.dtype), torch.arange(experts, device=x.device)
    parts = tiles_of_slices(tiles, experts, count).unbind(0) if tiles.shape[0] else ()
    turns = _Turns(x.device, len(parts))
    for number, part in enumerate(parts):
        mine = slice(number * count, min(number * count + count, experts))
        with turns.turn(number):
            weight = decode(every[mine])
            launch_product(
                x,
                weight.transpose(1, 2) if last else weight,
                low,
                None if factor is None else factor[mine],
                ExpertOrder.of(slots, offsets, slots, part, tile_rows, 1),
                out,
                tile=tile,
                fan=fan,
                scatter=scatter,
                bias=None if bias is None else bias[mine],
                gates=gates,
                other=other,
                other_fan=other_fan,
                dots=dots,
            )
            del weight  # before the next slice of the stream is decoded
    turns.join()
    return None if dots is None else dots.sum(0)
