"""Tensors as the kernels take them: few dimensions, (B, m, n) where rows and columns count.

`Tensor.reshape` gives a view of nearly every parameter. Where strides allow none, as for
channels_last filters whose rows are needed, it gives a contiguous copy, which is written back.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels._lists import MAX_DIMS

__all__ = ["MAX_DIMS", "shaped", "written"]


def shaped(tensors: Sequence[Tensor], shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """The tensors in other shapes: themselves, views or copies."""
    pairs = zip(tensors, shapes, strict=True)
    return [tensor if tensor.shape == shape else tensor.reshape(shape) for tensor, shape in pairs]


def written(tensors: Sequence[Tensor], used: Sequence[Tensor]) -> None:
    """Take over what a kernel wrote to `used`, which `shaped` made of the tensors.

    Compiled ops do not tell autograd what they wrote. Here it learns it, so that a graph which
    saved an old value refuses to run backwards, as after any operation in place.
    """
    for tensor, other in zip(tensors, used, strict=True):
        if other is not tensor and other.data_ptr() != tensor.data_ptr():
            tensor.copy_(other.view(tensor.shape))
    tracked = [tensor for tensor in tensors if not tensor.is_inference()]
    torch.autograd.graph.increment_version(tracked)
