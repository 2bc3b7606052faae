"""How long each batch of a step takes: by CUDA events, which nobody waits for, or the clock.

And the ranges of its stages in a trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.autograd import profiler

Timed = Callable[[Hashable, torch.device], AbstractContextManager[None]]
_NOTHING = nullcontext()


def stage(name: str) -> AbstractContextManager[Any]:
    """A range of a trace, which costs 8 us and is made only while a profiler of torch runs."""
    # torch's own flag "for fast python checks"; a torch without it pays for every range.
    if getattr(profiler, "_is_profiler_enabled", True):
        return profiler.record_function(name)
    return _NOTHING


@dataclass(eq=False)
class Span:
    """A stretch of time: two events of CUDA, or two times of the host in seconds."""

    start: Any
    end: Any = None

    def over(self) -> bool:
        return self.end is not None and (isinstance(self.end, float) or self.end.query())

    def milliseconds(self) -> float:
        if isinstance(self.end, float):
            return 1e3 * (self.end - self.start)
        return self.start.elapsed_time(self.end)


def untimed(key: Hashable, device: torch.device) -> AbstractContextManager[None]:
    """`StepTimer.of` where nothing is measured."""
    return _NOTHING


class StepTimer:
    """The batches of the last two steps: that which is running, and the one before."""

    def __init__(self) -> None:
        self._steps: list[dict[Hashable, list[Span]]] = []

    def begin(self) -> Timed:
        """Start a step; returns what each of its batches is run under."""
        self._steps = [*self._steps[-1:], {}]
        return self._of

    @contextmanager
    def _of(self, key: Hashable, device: torch.device) -> Iterator[None]:
        cuda = device.type == "cuda"
        if cuda and torch.cuda.is_current_stream_capturing():
            yield  # events in a graph say nothing about its replays
            return
        span = Span(_now(device))
        self._steps[-1].setdefault(key, []).append(span)
        yield
        span.end = _now(device)

    def milliseconds(self) -> dict[Hashable, float]:
        """Key -> time in the last step that the device has finished; empty if there is none."""
        for step in reversed(self._steps):
            spans = [span for of_key in step.values() for span in of_key]
            if spans and all(span.over() for span in spans):
                return {key: sum(s.milliseconds() for s in found) for key, found in step.items()}
        return {}


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    stream = torch.cuda.current_stream(device)
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
