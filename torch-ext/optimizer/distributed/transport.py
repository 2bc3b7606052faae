"""The only place of the step that communicates.

A transport moves the messages of a route and returns futures. `AllToAll` serves NCCL and gloo;
another transport needs the same methods.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .messages import Message


class Future(Protocol):
    """A tensor that is on its way."""

    def wait(self) -> Tensor:
        """The tensor; on CUDA the current stream waits for it, the host does not."""
        ...


class Transport(Protocol):
    """Moves messages between the ranks of a team, all of which make the same calls in one order."""

    def exchange(self, going: Message, outbox: Tensor, coming: Message, inbox: Tensor) -> Future:
        """What this rank sends to all others and receives from them: a gather or a scatter."""
        ...

    def maximum(self, values: Tensor) -> Future:
        """The largest of every rank's values, element by element, in place."""
        ...

    def sum(self, values: Tensor) -> Future:
        """The sum of every rank's values, element by element, in place; equal on all ranks."""
        ...

    def collect(self, values: Tensor, found: Tensor) -> Future:
        """Every rank's values, in the order of the ranks, in `found` (ranks, ...)."""
        ...


@dataclass(frozen=True, eq=False)
class Ready:
    """A tensor that is here already."""

    tensor: Tensor

    def wait(self) -> Tensor:
        return self.tensor


@dataclass(frozen=True, eq=False)
class Travelling:
    """A tensor that a collective writes; what the collective reads stays alive with it."""

    work: Any
    tensor: Tensor
    read: Tensor

    def wait(self) -> Tensor:
        self.work.wait()
        return self.tensor


class Identity:
    """The transport of a single rank: what is sent has arrived."""

    def exchange(self, going: Message, outbox: Tensor, coming: Message, inbox: Tensor) -> Future:
        return Ready(outbox)

    def maximum(self, values: Tensor) -> Future:
        return Ready(values)

    def sum(self, values: Tensor) -> Future:
        return Ready(values)

    def collect(self, values: Tensor, found: Tensor) -> Future:
        return Ready(found.copy_(values.unsqueeze(0)))


class AllToAll:
    """One `all_to_all_single` each way, over NCCL or gloo, with nothing padded but to 16 bytes."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def maximum(self, values: Tensor) -> Future:
        from torch.distributed import ReduceOp

        return self._reduce(values, ReduceOp.MAX)

    def sum(self, values: Tensor) -> Future:
        from torch.distributed import ReduceOp

        return self._reduce(values, ReduceOp.SUM)

    def collect(self, values: Tensor, found: Tensor) -> Future:
        from torch import distributed

        # The older of two names: torch 2.11 has no other.
        gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
        work = gather(found.view(-1), values.view(-1), group=self.group, async_op=True)
        return Travelling(work, found, values)

    def _reduce(self, values: Tensor, op: Any) -> Future:
        from torch import distributed

        work = distributed.all_reduce(values, op, group=self.group, async_op=True)
        return Travelling(work, values, values)

    def exchange(self, going: Message, outbox: Tensor, coming: Message, inbox: Tensor) -> Future:
        from torch import distributed

        work = distributed.all_to_all_single(
            inbox,
            outbox,
            list(coming.counts),
            list(going.counts),
            group=self.group,
            async_op=True,
        )
        return Travelling(work, inbox, outbox)


def whole(tensor: Any) -> Tensor:
    """All of a DTensor, from all ranks of its mesh, which must all ask."""
    return tensor.full_tensor()


def extremes(transport: Transport, values: Tensor) -> Future:
    """The largest and the smallest of every rank's integers, (2, n), in one all-reduce."""
    return _Extremes(transport.maximum(torch.stack((values, -values))))


@dataclass(frozen=True, eq=False)
class _Extremes:
    largest: Future

    def wait(self) -> Tensor:
        both = self.largest.wait()
        both[1].neg_()
        return both
