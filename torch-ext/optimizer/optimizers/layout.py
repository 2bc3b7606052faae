"""Tensors as the kernels take them: few dimensions, (B, m, n) where rows and columns count.

`Tensor.reshape` gives a view of nearly every parameter. Where strides allow none, as for
channels_last filters whose rows are needed, it gives a contiguous copy, which is written back.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..kernels.step.tensor_lists import MAX_DIMS

__all__ = ["MAX_DIMS", "shaped", "written"]


def shaped(tensors: Sequence[Tensor | None], shapes: Sequence[Sequence[int]]) -> list[Any]:
    """The tensors in other shapes: themselves, views or copies. None stays None."""
    return [
        tensor if tensor is None or tensor.shape == shape else tensor.reshape(shape)
        for tensor, shape in zip(tensors, shapes, strict=True)
    ]


def written(tensors: Sequence[Tensor], used: Sequence[Tensor]) -> None:
    """Take over what a kernel wrote to `used`: `shaped` made it of the tensors, or it is they.

    Compiled ops do not tell autograd what they wrote. Here it learns it, so that a graph which
    saved an old value refuses to run backwards, as after any operation in place.
    """
    pairs = () if used is tensors else zip(tensors, used, strict=True)
    for tensor, other in pairs:
        if other is not tensor and other.data_ptr() != tensor.data_ptr():
            tensor.copy_(other.view(tensor.shape))
    torch.autograd.graph.increment_version(tensors)  # which passes over inference tensors
