"""Profile exactly some steps of a training loop: a Chrome trace and the history of memory.

trace-rank000-steps10-12.json     for chrome://tracing or Perfetto
memory-rank000-steps10-12.json    every allocation with its size, the sum and its stack
memory-rank000-steps10-12.pickle  with CUDA: the allocator's snapshot, for pytorch.org/memory_viz
"""

from __future__ import annotations

import atexit
import json
import logging
import os
from collections.abc import Callable
from numbers import Integral
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerAction, ProfilerActivity

logger = logging.getLogger(__name__)

MAX_ENTRIES = 1_000_000  # of the allocator's history


class profile_steps:  # noqa: N801 - used as a function: `with profile_steps(...) as profile`
    """Record the steps start, ..., start + count - 1 of a loop, and write them when they are over.

        with profile_steps(start=10, count=3, out="traces") as profile:
            for batch in batches:
                train(batch)
                profile.step()

    The step before the first serves to warm the profiler up; before and after nothing is recorded.
    If the loop ends or fails in between, what was recorded until then is written under the numbers
    of these steps. Files of several ranks lie side by side.

    Args:
        start: number of the first recorded step, from 0.
        count: how many steps are recorded, at least 1.
        out: folder of the files, made if it does not exist.

    Raises:
        TypeError: start or count is no integer, or out no path.
        ValueError: start is negative or count less than 1.
    """

    def __init__(self, start: int, count: int, out: str | os.PathLike[str]) -> None:
        for name, value, least in (("start", start, 0), ("count", count, 1)):
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TypeError(f"{name} must be an integer, got {value!r}")
            if value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if not isinstance(out, (str, os.PathLike)):
            raise TypeError(f"out must be a path, got {out!r}")
        self.start, self.count, self.out = int(start), int(count), Path(out)
        self.done = 0  # steps
        self.files: list[Path] = []
        self._failed = False
        self._profile: torch.profiler.profile | None = None

    def __enter__(self) -> profile_steps:
        if self._profile is not None:
            raise RuntimeError("this profile_steps is in use; make another one")
        self.done, self.files, self._failed = 0, [], False
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        profile = torch.profiler.profile(
            activities=activities,
            schedule=self._action,
            on_trace_ready=self._write,
            record_shapes=True,
            profile_memory=True,
            with_stack=True,
        )
        profile.start()
        self._profile = profile
        self._record_history()
        return self

    def step(self) -> None:
        """Call it at the end of every step."""
        if self._profile is None:
            raise RuntimeError("step() was called outside of the `with` block of profile_steps")
        self._synchronize()
        self.done += 1
        self._record_history()
        self._profile.step()

    def __exit__(self, *error: object) -> None:
        self.close(failed=error[0] is not None)

    def close(self, *, failed: bool = False) -> None:
        """End the recording and write it. Calling it again changes nothing.

        Args:
            failed: an error is on its way: another one here is logged and does not replace it.
        """
        profile, self._profile, self._failed = self._profile, None, failed
        if profile is None:
            return
        try:
            if not failed:
                self._synchronize()
            profile.stop()
        except Exception:
            if not failed:
                raise
            logger.exception("the profile could not be written")
        finally:
            if torch.cuda.is_available():
                torch.cuda.memory._record_memory_history(enabled=None)
        if not self.files:
            logger.warning(
                "nothing was profiled: %d steps were made, the first to record was %d",
                self.done,
                self.start,
            )

    def _action(self, step: int) -> ProfilerAction:
        last = self.start + self.count - 1
        if step == last:
            return ProfilerAction.RECORD_AND_SAVE
        if self.start <= step < last:
            return ProfilerAction.RECORD
        return ProfilerAction.WARMUP if step == self.start - 1 else ProfilerAction.NONE

    def _record_history(self) -> None:
        """Let the allocator of CUDA keep its history, with stacks, from the first step on."""
        if self.done == self.start and torch.cuda.is_available():
            torch.cuda.memory._record_memory_history(max_entries=MAX_ENTRIES, stacks="python")

    def _synchronize(self) -> None:
        """Kernels that a recorded step launched belong to it."""
        if self.start - 1 <= self.done <= self.start + self.count and torch.cuda.is_available():
            torch.cuda.synchronize()

    def _write(self, profile: torch.profiler.profile) -> None:
        # A step that failed is recorded as far as it came; one that only began has nothing in it.
        last = self.done if self._failed else self.done - 1
        last = min(max(last, self.start), self.start + self.count - 1)
        name = f"rank{_rank():03d}-steps{self.start}-{last}"
        self.out.mkdir(parents=True, exist_ok=True)
        trace = self.out / f"trace-{name}.json"
        profile.export_chrome_trace(str(trace))
        memory = self.out / f"memory-{name}.json"
        memory.write_text(json.dumps(_allocations(profile)))
        self.files += [trace, memory]
        if torch.cuda.is_available():
            snapshot = self.out / f"memory-{name}.pickle"
            torch.cuda.memory._dump_snapshot(str(snapshot))
            torch.cuda.memory._record_memory_history(enabled=None)
            self.files.append(snapshot)


class ProfileCallback:
    """`profile_steps` for Hugging Face's Trainer: `Trainer(..., callbacks=[ProfileCallback(...)])`.

    It has the methods of a TrainerCallback without being one, so that transformers need not be
    there. Steps are the optimizer's, counted from the beginning of this run of `train()`. The
    Trainer tells its callbacks nothing of an exception: what was recorded until then is written
    when the process ends, at the next `train()`, or by `close()`.

    Args:
        start: as for `profile_steps`.
        count: as for `profile_steps`.
        out: as for `profile_steps`.
    """

    def __init__(self, start: int, count: int, out: str | os.PathLike[str]) -> None:
        self._session = profile_steps(start, count, out)

    @property
    def files(self) -> list[Path]:
        """What was written."""
        return self._session.files

    def __getattr__(self, name: str) -> Callable[..., None]:
        if name.startswith("on_"):  # the other events
            return _ignore
        raise AttributeError(name)

    def on_train_begin(self, *arguments: Any, **named: Any) -> None:
        self.close()
        self._session.__enter__()
        atexit.register(self.close)

    def on_step_end(self, *arguments: Any, **named: Any) -> None:
        if self._session._profile is not None:
            self._session.step()

    def on_train_end(self, *arguments: Any, **named: Any) -> None:
        self.close()

    def close(self) -> None:
        """End the recording and write it."""
        atexit.unregister(self.close)
        self._session.close()


def _ignore(*arguments: Any, **named: Any) -> None:
    return None


def _rank() -> int:
    from torch import distributed

    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def _allocations(profile: torch.profiler.profile) -> list[dict[str, Any]]:
    """Every allocation (bytes > 0) and release (bytes < 0) with what called it, innermost first."""
    found, waiting = [], list(profile.profiler.kineto_results.experimental_event_tree())
    while waiting:
        event = waiting.pop()
        waiting += event.children
        if event.tag != torch._C._profiler._EventType.Allocation:
            continue
        stack, parent = [], event.parent
        while parent is not None:
            stack.append(parent.name)
            parent = parent.parent
        fields = event.extra_fields
        found.append(
            {
                "nanoseconds": event.start_time_ns,
                "bytes": fields.alloc_size,
                "device": str(fields.device),
                "total": fields.total_allocated,
                "stack": stack,
            }
        )
    return sorted(found, key=lambda entry: entry["nanoseconds"])
