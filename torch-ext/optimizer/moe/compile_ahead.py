"""Kernels of a layer for other numbers of tokens, compiled beside the first call.

The number of tokens decides the height of tiles (`tile_rows_for`), and kernels are compiled for one
height. So a first call begins to compile for all heights: a later one finds its kernels there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from ..kernels.experts.expert_sort import LARGEST_TILE_ROWS, TILE_ROWS
from ..kernels.launch.launch_plan import stand_in
from ..kernels.launch.triton_compile import in_background

# Mean rows per expert at which a layer launches other kernels: of each height, and few.
_MEANS = (2, 4, *(mean for mean, _ in TILE_ROWS), 64, LARGEST_TILE_ROWS)

_begun: set[tuple] = set()
_MOST_BEGUN = 1024


def compile_for_all_heights(
    compile_one: Callable[[Sequence[Tensor | None]], None],
    operands: Sequence[Tensor | None],
    of_tokens: Sequence[int],
    experts: int,
    constants: tuple[Any, ...],
) -> None:
    """Call `compile_one` in another thread, for each height of tiles, unless that was begun before.

    Args:
        compile_one: Takes operands and computes nothing.
        operands: Of the call that comes.
        of_tokens: Places of those whose first dimension is the number of tokens; the last are ids.
        experts: How many there are.
        constants: Whatever else decides what is compiled.
    """
    rest = [x for place, x in enumerate(operands) if place not in of_tokens and x is not None]
    first = [operands[place] for place in of_tokens]
    described = ((x.shape, x.stride(), x.dtype, x.device) for x in rest)
    key = (constants, experts, *described, *((x.shape[1:], x.dtype) for x in first))
    if key in _begun:
        return
    if len(_begun) >= _MOST_BEGUN:
        _begun.clear()
    _begun.add(key)
    top_k = first[-1].shape[1]
    # What waits for its turn must keep neither activations nor weights alive.
    standing = [
        None if x is None else stand_in(x.shape, x.stride(), x.dtype, x.device) for x in operands
    ]
    for mean in _MEANS:
        tokens = max(mean * experts // top_k, 1)
        for place in of_tokens:
            x = operands[place]
            standing[place] = stand_in((tokens, x.shape[1]), (x.shape[1], 1), x.dtype, x.device)
        in_background(compile_one, tuple(standing))
