"""The only place of the step that communicates.

A transport moves the messages of a route and returns futures. All ranks of a team make the same
calls in one order. `AllToAll` serves NCCL and gloo, `Identity` a rank alone; another transport
needs the same methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .messages import Message


@dataclass(frozen=True, eq=False)
class Future:
    """A tensor that a collective writes, or one that is here already."""

    tensor: Tensor
    work: Any = None  # the collective
    read: Tensor | None = None  # what it reads, which stays alive with it

    def wait(self) -> Tensor:
        """The tensor; on CUDA the current stream waits for it, the host does not."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


class Identity:
    """The transport of a single rank: what is sent has arrived."""

    def exchange(self, going: Message, outbox: Tensor, coming: Message, inbox: Tensor) -> Future:
        return Future(outbox)

    def maximum(self, values: Tensor) -> Future:
        return Future(values)

    def sum(self, values: Tensor) -> Future:
        return Future(values)

    def collect(self, values: Tensor, found: Tensor) -> Future:
        return Future(found.copy_(values.unsqueeze(0)))


class AllToAll:
    """One `all_to_all_single` each way, over NCCL or gloo, with nothing padded but to 16 bytes."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def exchange(self, going: Message, outbox: Tensor, coming: Message, inbox: Tensor) -> Future:
        """What this rank sends to all others and receives from them: a gather or a scatter."""
        from torch import distributed

        sizes = [*coming.counts], [*going.counts]
        work = distributed.all_to_all_single(inbox, outbox, *sizes, group=self.group, async_op=True)
        return Future(inbox, work, outbox)

    def maximum(self, values: Tensor) -> Future:
        """The largest of every rank's values, element by element, in place."""
        from torch.distributed import ReduceOp

        return self._reduce(values, ReduceOp.MAX)

    def sum(self, values: Tensor) -> Future:
        """The sum of every rank's values, element by element, in place; equal on all ranks."""
        from torch.distributed import ReduceOp

        return self._reduce(values, ReduceOp.SUM)

    def collect(self, values: Tensor, found: Tensor) -> Future:
        """Every rank's values, in the order of the ranks, in `found` (ranks, ...)."""
        from torch import distributed

        # The older of two names: torch 2.11 has no other.
        gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
        work = gather(found.view(-1), values.view(-1), group=self.group, async_op=True)
        return Future(found, work, values)

    def _reduce(self, values: Tensor, op: Any) -> Future:
        from torch import distributed

        work = distributed.all_reduce(values, op, group=self.group, async_op=True)
        return Future(values, work)


Transport = AllToAll | Identity


def extremes(transport: Transport, values: Tensor) -> Tensor:
    """The largest and the smallest of every rank's integers, (2, n), in one all-reduce."""
    both = transport.maximum(torch.stack((values, -values))).wait()
    both[1].neg_()
    return both


def whole(tensor: Any) -> Tensor:
    """All of a DTensor, from all ranks of its mesh, which must all ask."""
    return tensor.full_tensor()
