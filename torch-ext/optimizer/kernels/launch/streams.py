"""Launches on a second stream of a device, beside those of the current one.

Both begin after what was launched before, and what is launched afterwards waits for both; a CUDA
graph captures it so. A first stream keeps its second one. torch hands streams out from a pool of
32 per device, so with many first streams two may share a second one: their launches
there then follow one another, which takes time and changes nothing else.
What both touch must be allocated before the second begins and let go after they have met: the
allocator knows of a block the stream that asked for it alone.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .launch_plan import begins_beside, ends_beside, waits

_URGENT = -1  # the lower the number, the higher the priority


@dataclasses.dataclass(frozen=True)
class Streams:
    """The current stream and the second one; away from a GPU neither, and all runs in order."""

    first: torch.cuda.Stream | None = None
    second: torch.cuda.Stream | None = None

    def there(self) -> contextlib.AbstractContextManager[Any]:
        """A context whose launches go to the second stream."""
        return contextlib.nullcontext() if self.second is None else torch.cuda.stream(self.second)

    def there_waits(self) -> None:
        """The second stream goes on after what was launched on the first so far."""
        if self.second is not None:
            waits(self.second, self.first)

    def here_waits(self) -> None:
        """The first stream goes on after what was launched on the second so far."""
        if self.first is not None:
            waits(self.first, self.second)


@functools.cache
def _second(first: torch.cuda.Stream, urgent: bool) -> torch.cuda.Stream:
    return torch.cuda.Stream(first.device, priority=_URGENT if urgent else 0)


@contextlib.contextmanager
def beside(x: Tensor, *, urgent: bool = False) -> Iterator[Streams]:
    """Yields two streams of x's device, which meet at the end of the context.

    Args:
        x: Where it lies, the launches run. Away from a GPU nothing runs beside anything.
        urgent: Blocks of the second stream go before those of the first where both wait.
    """
    streams = Streams()
    if x.is_cuda:
        first = torch.cuda.current_stream(x.device)
        streams = Streams(first, _second(first, urgent))
        begins_beside(first, streams.second)
    streams.there_waits()
    try:
        yield streams
    finally:
        streams.here_waits()
        if x.is_cuda:
            ends_beside()
