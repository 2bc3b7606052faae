"""Several processes in one measurement: their group, and the time of what they do together."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

# Long enough for the first step of the largest set; a rank that fails must not hold up the others.
TIMEOUT = timedelta(seconds=120)


@dataclass(frozen=True)
class Ranks:
    """This process among those of torchrun; alone without it."""

    count: int
    rank: int
    device: Any  # torch.device of this rank

    @property
    def first(self) -> bool:
        return self.rank == 0

    def largest(self, value: float) -> float:
        """The largest of every rank's values."""
        import torch
        from torch import distributed

        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        distributed.all_reduce(found, distributed.ReduceOp.MAX)
        return found.item()

    def milliseconds(self, call: Callable[[], object]) -> float:
        """Of a call that all ranks begin together, on the rank that takes longest."""
        from torch import distributed

        distributed.barrier()
        return self.largest(_device_time(call) if self.device.type == "cuda" else _time(call))

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize()

    def held_mb(self) -> float:
        """Device memory of this rank's tensors, and what its CUDA graphs keep; 0 on CPUs."""
        import gc

        import torch

        if self.device.type != "cuda":
            return 0.0
        gc.collect()
        torch.cuda.synchronize()
        kept = kept_by_graphs(torch.cuda.memory_snapshot())
        return (torch.cuda.memory_allocated() + kept) / 1e6


def kept_by_graphs(segments: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of the pools of CUDA graphs in which no tensor is: nobody else can have them."""
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in segments
        if tuple(segment["segment_pool_id"]) != (0, 0)
    )


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """The ranks of torchrun in a group, NCCL on GPUs and gloo on CPUs, for as long as it lasts.

    A group that is there already stays as it is.
    """
    import torch
    from torch import distributed

    here, arguments = torch.device("cpu"), {}
    if device == "cuda":
        here = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(here)
        arguments = {"device_id": here}
    started = distributed.is_initialized()
    if not started:
        backend = "nccl" if device == "cuda" else "gloo"
        distributed.init_process_group(backend, timeout=TIMEOUT, **arguments)
    try:
        yield Ranks(distributed.get_world_size(), distributed.get_rank(), here)
    finally:
        if not started:
            distributed.destroy_process_group()


def _time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _device_time(call: Callable[[], object]) -> float:
    """Between two events on an idle device, so that the host's share counts as in training."""
    import torch

    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)
