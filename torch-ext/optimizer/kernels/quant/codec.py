"""What quantisers and decoders of all formats share: which op decodes, and where parts lie."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ... import dispatch
from ..._ops import ops

DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # of weights before and after packing
# Elements that the portable paths quantise at a time: their temporaries stay near 60 MiB. A
# multiple of every block's.
CHUNK = 1 << 20


def dequant_op(name: str, device: torch.device, dtype: torch.dtype) -> Callable[..., Tensor]:
    """The registered op that decodes on a device; Triton's are imported with their first use.

    Raises:
        ValueError: No format decodes to dtype.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {DTYPES}, got {dtype}; cast the result instead")
    path = dispatch.path_name(name, device)
    if path == "triton":
        from . import dequant_triton  # noqa: F401
    return getattr(ops, name if path == "compiled" else f"{name}_{path}")


def write_parts(
    tensors: Iterable[Tensor], parts: Iterable[Tensor], first: int, elements: int
) -> None:
    """Put the codes and scales of a run of elements where they lie in those of the whole.

    Args:
        tensors: Flat, written in place: a whole number of elements, or less, per item.
        parts: Of the run, in the same order.
        first: Element where the run begins, where a byte and a block do, too.
        elements: Of the whole.
    """
    for whole, part in zip(tensors, parts, strict=True):
        begin = first * whole.numel() // elements
        whole[begin : begin + part.numel()] = part.view(whole.dtype).view(-1)


def quantize_in_chunks(
    flat: Tensor, tensors: Iterable[Tensor], quantize: Callable[..., Any], *options: Any
) -> None:
    """Fill codes and scales with what `quantize` makes of CHUNK elements at a time."""
    tensors = tuple(tensor.view(-1) for tensor in tensors)
    for begin in range(0, flat.numel(), CHUNK):
        parts = quantize(flat[begin : begin + CHUNK], *options)
        write_parts(tensors, parts, begin, flat.numel())
