"""Launches on a second stream of a device, beside those of the current one.

Both begin after what was launched before, and what is launched afterwards waits for both; a CUDA
graph captures it so. A second stream belongs to one first stream, so that two of those never meet.
Memory must be allocated outside: the allocator gives it back to the stream that asked for it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

_URGENT = -1  # CUDA: lower numbers are served first


@functools.cache
def _second(first: torch.cuda.Stream, urgent: bool) -> torch.cuda.Stream:
    return torch.cuda.Stream(first.device, priority=_URGENT if urgent else 0)


@contextlib.contextmanager
def beside(x: Tensor, *, urgent: bool = False) -> Iterator[contextlib.AbstractContextManager[Any]]:
    """Yields a context whose launches run beside those outside of it, until the end of this one.

    Args:
        x: Where it lies, the launches run. Away from a GPU nothing runs beside anything.
        urgent: Blocks of the launches inside go before those of the others where both wait.
    """
    if not x.is_cuda:
        yield contextlib.nullcontext()
        return
    first = torch.cuda.current_stream(x.device)
    second = _second(first, urgent)
    second.wait_stream(first)
    try:
        yield torch.cuda.stream(second)
    finally:
        first.wait_stream(second)
