"""Tensors beside a parameter that several ranks hold: made, and filled from saved ones."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ...distributed import Layout, boxes, splits_of, whole
from ..groups.parameters import is_dtensor, local


def sharded_dims(param: Tensor) -> set[int]:
    """The dimensions of a parameter that ranks share out; none of a plain tensor."""
    if not is_dtensor(param):
        return set()
    splits = splits_of(param.placements, param.ndim)
    sizes = param.device_mesh.mesh.shape
    return {
        split.dim
        for split, size in zip(splits, sizes, strict=True)
        if split.dim is not None and size > 1
    }


def rows_here(param: Tensor) -> Tensor | None:
    """The numbers of the rows of a parameter that this rank holds; None for all of them."""
    if 0 not in sharded_dims(param):
        return None
    mesh = param.device_mesh
    runs = _layout(tuple(param.shape), param.placements, mesh).runs(mesh.get_coordinate())[0]
    numbers = [torch.arange(start, start + length) for start, length in runs]
    return torch.cat([torch.empty(0, dtype=torch.int64), *numbers]).to(param.device)


def zeros_beside(
    param: Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, stacked: bool
) -> Tensor:
    """Zeros of another shape on the ranks of a DTensor: sharded as a stack is, else on all."""
    from torch.distributed.tensor import DTensor, Replicate

    splits = splits_of(param.placements, param.ndim)
    placements = [
        placement if stacked and split.dim == 0 else Replicate()
        for placement, split in zip(param.placements, splits, strict=True)
    ]
    layout = _layout(shape, placements, param.device_mesh)
    here = layout.local_shape(param.device_mesh.get_coordinate())
    strides = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(
        torch.zeros(here, dtype=dtype, device=param.device),
        param.device_mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=strides,
    )


def fill(target: Tensor, saved: Tensor, what: str) -> None:
    """Copy a saved tensor into one of the same global shape, however the two are placed.

    Raises:
        ValueError: the saved one is sharded in another way, so that other ranks have parts of it.
    """
    if not is_dtensor(saved):
        if not is_dtensor(target):
            target.copy_(saved)
            return
        for here, region in pieces(target):
            here.copy_(saved[region])
        return
    everywhere = all(placement.is_replicate() for placement in saved.placements)
    if everywhere:
        fill(target, local(saved), what)
        return
    if not is_dtensor(target) or target.placements != saved.placements:
        raise ValueError(
            f"{what} has placements {tuple(saved.placements)}, this optimizer's "
            f"{tuple(target.placements) if is_dtensor(target) else 'is on one rank'}; load it with "
            "torch.distributed.checkpoint, which reshards"
        )
    local(target).copy_(local(saved))


def pieces(tensor: Tensor) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """What this rank holds of a tensor, and which elements of the whole they are."""
    if not is_dtensor(tensor):
        yield tensor, tuple(slice(0, size) for size in tensor.shape)
        return
    mesh = tensor.device_mesh
    layout = _layout(tuple(tensor.shape), tensor.placements, mesh)
    region = [(0, size) for size in tensor.shape]
    for box in boxes(layout.runs(mesh.get_coordinate()), region):
        yield box.view(local(tensor)), box.region


def gathered(tensor: Tensor) -> Tensor:
    """All of a tensor; of a DTensor all ranks of its mesh must ask."""
    return whole(tensor) if is_dtensor(tensor) else tensor


def _layout(shape: tuple[int, ...], placements: Any, mesh: Any) -> Layout:
    return Layout(shape, tuple(mesh.mesh.shape), splits_of(placements, max(len(shape), 1)))
