"""Where the pieces of matrices go: from the ranks that hold them to an owner each, and back.

A message is one buffer of bytes per pair of ranks. Its layout follows from the plan alone and never
from which gradients exist. Every part starts at a multiple of 16 bytes, the widest access of the
kernels that write and read it in place.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from .shards import Box, Layout, Run, boxes

ALIGNMENT = 16


@dataclass(frozen=True)
class Job:
    """One matrix of a tensor: what its owner must be given, and who must get the answer."""

    layout: Layout
    coordinates: tuple[tuple[int, ...], ...]  # of every rank on the layout's mesh
    region: tuple[Run, ...]  # of the whole tensor

    def held(self, rank: int) -> list[Box]:
        """What a rank holds of the matrix."""
        return boxes(self.layout.runs(self.coordinates[rank]), self.region)

    def elements(self) -> tuple[int, ...]:
        """How many elements of the matrix every rank holds."""
        return tuple(sum(box.numel for box in self.held(r)) for r in range(len(self.coordinates)))

    def candidates(self, *, stay: bool) -> tuple[int, ...]:
        """The ranks that may own it: those that hold all of it already, if there are any.

        Otherwise everyone; with `stay` only ranks that hold a part of it.
        """
        held = self.elements()
        size = math.prod(length for _, length in self.region)
        whole = tuple(rank for rank, count in enumerate(held) if count == size)
        if whole or not stay:
            return whole or tuple(range(len(held)))
        return tuple(rank for rank, count in enumerate(held) if count)

    def feeds(self, rank: int, owner: int) -> bool:
        """Whether the owner takes this rank's part: that of its own replica."""
        replica = self.layout.replica
        return replica(self.coordinates[rank]) == replica(self.coordinates[owner])


@dataclass(frozen=True)
class Part:
    """A box of a matrix at its place in a message."""

    job: int  # number of the job in the chunk
    box: Box | None  # None: the whole extra of the job
    start: int  # byte
    stop: int

    def of(self, message: Tensor, dtype: torch.dtype) -> Tensor:
        """The part of a message (bytes,) in the shape of its box; flat if it is an extra."""
        flat = message[self.start : self.stop].view(dtype)
        return flat if self.box is None else flat.view(self.box.shape)


@dataclass(frozen=True)
class Extra:
    """Bytes that an owner sends along with its answer."""

    size: int
    ranks: tuple[int, ...]  # who gets them


@dataclass(frozen=True)
class Message:
    """What one rank sends to all, or receives from all, in one exchange."""

    parts: tuple[Part, ...]
    counts: tuple[int, ...]  # bytes per rank
    # Of each rank, if every rank sends an equal run of rows of all of them: a transport that writes
    # into memory of the receiver may put the matrices together there.
    matrices: tuple[int, ...] | None = None

    @cached_property
    def size(self) -> int:
        return sum(self.counts)

    def ranks(self) -> list[int]:
        """The other end of every part."""
        ends = list(itertools.accumulate(self.counts))
        return [bisect.bisect_right(ends, part.start) for part in self.parts]

    @cached_property
    def even(self) -> tuple[int, ...] | None:
        """Shape of every part, if they are boxes of one shape with nothing between them."""
        shapes = {None if part.box is None else part.box.shape for part in self.parts}
        if len(shapes) != 1 or None in shapes:
            return None
        first = self.parts[0]
        gapless = self.size == (first.stop - first.start) * len(self.parts)
        return first.box.shape if first.box is not None and gapless else None

    def stacked(self, message: Tensor, dtype: torch.dtype) -> Tensor | None:
        """All parts of an even message as one tensor (parts, *even), which takes no view each."""
        return None if self.even is None else message.view(dtype).view(-1, *self.even)

    def ranks_with(
        self, jobs: Sequence[int], region: tuple[int, ...], *, all_of_it: bool
    ) -> int | None:
        """How many ranks there are, if each has as much of every job, in the order of the ranks.

        Args:
            jobs: their numbers.
            region: shape of each.
            all_of_it: each has all of a job; otherwise an equal run of its rows.
        """
        if self.even is None or not jobs or self.even[1:] != region[1:]:
            return None
        ranks, rows = len(self.parts) // len(jobs), self.even[0]
        if rows * (1 if all_of_it else ranks) != region[0]:
            return None
        step = 0 if all_of_it else rows
        expected = [(job, rank * step) for rank in range(ranks) for job in jobs]
        found = [(p.job, p.box.region[0].start) for p in self.parts if p.box is not None]
        return ranks if found == expected else None


@dataclass(frozen=True)
class Route:
    """The messages of one rank for a chunk of jobs."""

    owned: tuple[int, ...]  # jobs of this rank, in the order of their slots
    sent: Message  # gather: what this rank holds, to the owners
    gathered: Message  # gather: everything of the jobs that this rank owns
    answered: Message  # scatter: the answers of the owned jobs, to all that hold them
    scattered: Message  # scatter: the answers for what this rank holds
    gathers: bool  # whether any part crosses ranks on its way to an owner; equal on all ranks
    scatters: bool  # the same for the way back


def make_route(
    jobs: Sequence[Job],
    owners: Sequence[int],
    rank: int,
    ranks: int,
    itemsize: int,
    extras: Sequence[Extra | None] | None = None,
    *,
    from_all: bool = False,
    answer_itemsize: int | None = None,
) -> Route:
    """The messages of one rank.

    Args:
        jobs: the matrices of a chunk.
        owners: rank of each.
        rank: this one.
        ranks: how many there are.
        itemsize: bytes of an element on the wire.
        extras: what goes with the answer of each job.
        from_all: every replica sends its part, as contributions that the owner adds up. What the
            owner itself has, and gets, stays out of the messages.
        answer_itemsize: bytes of an element of an answer, if they differ.
    """
    back = answer_itemsize or itemsize
    numbers = range(len(jobs))
    extras = extras or [None] * len(jobs)
    held = [[job.held(r) for r in range(ranks)] for job in jobs]

    def feeds(job: int, source: int, owner: int) -> bool:
        return source != owner if from_all else jobs[job].feeds(source, owner)

    def parts_to_owner(source: int, owner: int) -> Iterator[tuple[int, Box | None, int]]:
        for j in numbers:
            if owners[j] == owner and feeds(j, source, owner):
                for box in held[j][source]:
                    yield j, box, box.numel * itemsize

    def parts_of_answer(owner: int, target: int) -> Iterator[tuple[int, Box | None, int]]:
        if from_all and owner == target:
            return
        for j in numbers:
            if owners[j] == owner:
                for box in held[j][target]:
                    yield j, box, box.numel * back
                extra = extras[j]
                if extra is not None and target in extra.ranks:
                    yield j, None, extra.size

    matrices = None
    if not from_all and all(_in_equal_rows(job, held[j], itemsize) for j, job in enumerate(jobs)):
        matrices = tuple(map([*owners].count, range(ranks)))
    sent = _message(ranks, lambda other: parts_to_owner(rank, other))
    return Route(
        owned=tuple(j for j in numbers if owners[j] == rank),
        sent=replace(sent, matrices=matrices),
        gathered=_message(ranks, lambda other: parts_to_owner(other, rank)),
        answered=_message(ranks, lambda other: parts_of_answer(rank, other)),
        scattered=_message(ranks, lambda other: parts_of_answer(other, rank)),
        gathers=any(
            held[j][source] and source != owners[j] and feeds(j, source, owners[j])
            for j in numbers
            for source in range(ranks)
        ),
        scatters=any(
            target != owners[j]
            and (held[j][target] or (extras[j] is not None and target in extras[j].ranks))
            for j in numbers
            for target in range(ranks)
        ),
    )


def _in_equal_rows(job: Job, held: Sequence[Sequence[Box]], itemsize: int) -> bool:
    """Whether the ranks have, in their order, equal runs of rows of a matrix, in whole units."""
    rows, *rest = (length for _, length in job.region)
    each, left = divmod(rows, len(held))
    if left or each * math.prod(rest) * itemsize % ALIGNMENT:
        return False
    runs = [(number * each, (each, *rest)) for number in range(len(held))]
    return runs == [(of[0].region[0].start, of[0].shape) for of in held if len(of) == 1]


def _message(
    ranks: int, parts_with: Callable[[int], Iterator[tuple[int, Box | None, int]]]
) -> Message:
    parts, counts, at = [], [], 0
    for other in range(ranks):
        begin = at
        for job, box, size in parts_with(other):
            parts.append(Part(job, box, at, at + size))
            at += -(-size // ALIGNMENT) * ALIGNMENT
        counts.append(at - begin)
    return Message(tuple(parts), tuple(counts))
