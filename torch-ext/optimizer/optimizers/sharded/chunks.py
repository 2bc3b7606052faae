"""Matrices and rows that several ranks work on, in chunks that travel together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...distributed import ALIGNMENT, Box, Job, Message, Part, Route, Run, Team, make_route
from .buffers import made_once


@dataclass(frozen=True, eq=False)
class SharedMatrix:
    """A matrix of a parameter that several ranks work on."""

    param: Tensor
    job: Job
    matrix: tuple[int, int]  # (m, n)
    statistics: Run  # (start, length) in what this rank has of the second_momentum_buffer
    keepers: tuple[int, ...]  # ranks that keep these statistics
    stacked: bool  # it is one of a stack
    dtype: torch.dtype  # of its direction


@dataclass(frozen=True, eq=False)
class Held:
    """A box of a matrix that this rank has, and its place in the message to the owner."""

    job: int
    box: Box
    part: Part | None  # None where another replica sends it

    def view(self, tensor: Tensor) -> Tensor:
        """The box of a tensor that is stored as this rank stores it."""
        return self.box.view(tensor)


@dataclass(frozen=True, eq=False)
class SharedChunk:
    """Matrices of one shape, dtype and device that travel together."""

    team: Team
    members: tuple[SharedMatrix, ...]
    owners: tuple[int, ...]
    matrix: tuple[int, int]  # (m, n)
    dtype: torch.dtype  # of the directions
    wire: torch.dtype
    device: torch.device
    route: Route
    held: tuple[Held, ...]  # all that this rank has of the matrices; first, in order, what it sends
    fits: bool  # what the owner receives is the batch itself

    @cached_property
    def params(self) -> frozenset[Tensor]:
        return frozenset(member.param for member in self.members)

    @property
    def statistics_dtype(self) -> torch.dtype:
        return torch.promote_types(self.members[0].param.dtype, torch.float32)

    @cached_property
    def sends_all_alike(self) -> bool:
        """Whether everything that is held is sent, in parts of one shape with nothing between."""
        sent = self.route.sent
        return len(self.held) == len(sent.parts) and sent.even is not None

    @cached_property
    def wide_places(self) -> dict[Held, int]:
        """Where directions are, that are not written to the message at once: their first byte."""
        found, at = {}, 0
        for held in self.held:
            if held.part is None or self.wire != self.dtype:
                found[held] = at
                at += -(-held.box.numel * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT
        return found

    @cached_property
    def wide_bytes(self) -> int:
        """Memory for those directions."""
        last = max(self.wide_places.items(), key=lambda place: place[1], default=None)
        if last is None:
            return 0
        return last[1] + -(-last[0].box.numel * self.dtype.itemsize // ALIGNMENT) * ALIGNMENT

    @made_once
    def exponents(self) -> Tensor:
        """Memory for the exponents of all matrices, on the device."""
        return torch.zeros(len(self.members), dtype=torch.int32, device=self.device)

    @made_once
    def scales(self) -> Tensor:
        """Memory for what this rank scales its part of every matrix with, on the device."""
        return torch.ones(len(self.members), dtype=torch.float32, device=self.device)

    @made_once
    def all_scales(self) -> Tensor:
        """Memory for the scales of all ranks: (ranks, matrices)."""
        return self.scales.new_ones((self.team.size, len(self.members)))

    @property
    def communicates(self) -> bool:
        return self.route.gathers or self.route.scatters

    def params_of(self, here: Sequence[Held]) -> list[Tensor]:
        """The parameter of everything that is held, or of some of it."""
        if len(here) == len(self.held):
            return self._params_held
        return [self.members[held.job].param for held in here]

    def views(self, here: Sequence[Held], tensors: list[Tensor]) -> list[Tensor]:
        """The boxes of tensors that are stored as this rank stores the parameters."""
        if self._held_whole:
            return tensors
        return [held.view(tensor) for held, tensor in zip(here, tensors, strict=True)]

    @cached_property
    def _params_held(self) -> list[Tensor]:
        return [self.members[held.job].param for held in self.held]

    @cached_property
    def _held_whole(self) -> bool:
        return all(held.box.whole for held in self.held)

    @cached_property
    def params_of_updates(self) -> list[Tensor]:
        """The parameter of every part that this rank receives."""
        return [self.members[part.job].param for part in self.route.scattered.parts]

    def views_of_updates(self, tensors: list[Tensor]) -> list[Tensor]:
        """What this rank receives, in tensors that are stored as it stores the parameters."""
        if self._updates_whole:
            return tensors
        boxes = [part.box for part in self.route.scattered.parts]
        return [t if b is None else b.view(t) for t, b in zip(tensors, boxes, strict=True)]

    @cached_property
    def _updates_whole(self) -> bool:
        return all(p.box is not None and p.box.whole for p in self.route.scattered.parts)

    @cached_property
    def boxes(self) -> dict[int, Box]:
        """What this rank holds of every job, where that is one box."""
        return {held.job: held.box for held in self.held}

    @cached_property
    def held_for_others(self) -> tuple[Held, ...]:
        """What this rank sends, in order."""
        return tuple(held for held in self.held if held.part is not None)

    @made_once
    def jobs_for_others(self) -> Tensor:
        """The job of everything that this rank sends, on the device."""
        return torch.tensor([held.job for held in self.held_for_others]).to(self.device)

    @made_once
    def jobs_here(self) -> Tensor:
        """The job of everything that is held, on the device."""
        return torch.tensor([held.job for held in self.held]).to(self.device)

    @made_once
    def places_of_jobs(self) -> Tensor | None:
        """Where each job is among what is held, on the device; None unless there is one of each."""
        jobs = [held.job for held in self.held]
        if sorted(jobs) != [*range(len(self.members))]:
            return None
        return torch.tensor([jobs.index(job) for job in range(len(jobs))]).to(self.device)

    @made_once
    def owned_here(self) -> Tensor:
        """The jobs of this rank, on the device."""
        return torch.tensor(self.route.owned).to(self.device)

    @cached_property
    def sources(self) -> int | None:
        """How many ranks send an equal run of rows of every owned matrix, if that is all."""
        return self._ranks_with(self.route.gathered, all_of_it=False)

    @cached_property
    def receivers(self) -> int | None:
        """How many ranks get an equal run of rows of every owned matrix, if that is all."""
        return self._ranks_with(self.route.answered, all_of_it=False)

    @cached_property
    def contributors(self) -> int | None:
        """How many ranks send all of every owned matrix, if that is all."""
        return self._ranks_with(self.route.gathered, all_of_it=True)

    @cached_property
    def replicas(self) -> int | None:
        """How many ranks get all of every owned matrix, if that is all."""
        return self._ranks_with(self.route.answered, all_of_it=True)

    def _ranks_with(self, message: Message, *, all_of_it: bool) -> int | None:
        owned = self.route.owned
        return (
            message.ranks_with(owned, self.region(owned[0]), all_of_it=all_of_it) if owned else None
        )

    def region(self, job: int) -> tuple[int, ...]:
        """Shape in which the boxes of a job cut its matrix."""
        return tuple(length for _, length in self.members[job].job.region)


def chunk_of(
    team: Team,
    members: Sequence[SharedMatrix],
    owners: Sequence[int],
    wire: torch.dtype,
    **route: Any,
) -> SharedChunk:
    """A chunk of matrices of one shape, with the `make_route` of it and this rank's boxes."""
    first, jobs = members[0], [member.job for member in members]
    planned = make_route(jobs, owners, team.rank, team.size, wire.itemsize, **route)
    sent = {(part.job, _corner(part.box)): part for part in planned.sent.parts}
    size = first.matrix[0] * first.matrix[1] * wire.itemsize
    parts = planned.gathered.parts
    place = {id(part): number for number, part in enumerate(planned.sent.parts)}
    held = [
        Held(number, box, sent.get((number, _corner(box))))
        for number, job in enumerate(jobs)
        for box in job.held(team.rank)
    ]
    fits = len(parts) == len(planned.owned) and all(
        part.start == slot * size and part.stop == (slot + 1) * size
        for slot, part in enumerate(parts)
    )
    return SharedChunk(
        team=team,
        members=tuple(members),
        owners=tuple(owners),
        matrix=first.matrix,
        dtype=first.dtype,
        wire=wire,
        device=first.param.device,
        route=planned,
        held=tuple(sorted(held, key=lambda one: place.get(id(one.part), len(place)))),
        fits=fits,
    )


def _corner(box: Box) -> tuple[int, ...]:
    return tuple(cut.start for cut in box.local)


@dataclass(frozen=True, eq=False)
class Bands:
    """Matrices of one shape, orthogonalized together, which travel in one chunk or several."""

    whole: SharedChunk
    parts: tuple[SharedChunk, ...]  # `whole` itself, some of its matrices, or rows of all of them
    first: tuple[int, ...]  # number of each part's first matrix among those of their owner
    rows: tuple[Run, ...]  # (start, length) of each part in a matrix


@dataclass(frozen=True, eq=False)
class SliceChunk:
    """Rows of a parameter for AdamW: a run for every rank, which owns and updates it."""

    chunk: SharedChunk  # its members are the runs
    last: bool  # of the parameter


@dataclass(frozen=True, eq=False)
class SmallChunk:
    """Parameters for AdamW that every rank updates, of one dtype and device."""

    params: tuple[tuple[int, Tensor], ...]  # (number of the group, parameter)
    dtype: torch.dtype
    device: torch.device

    @made_once
    def flat(self) -> Tensor:
        """Memory for all gradients."""
        sizes = sum(param.numel() for _, param in self.params)
        return torch.zeros(sizes, dtype=self.dtype, device=self.device)

    @made_once
    def places(self) -> list[Tensor]:
        """Where each of them is."""
        parts = self.flat.split([param.numel() for _, param in self.params])
        return [part.view(p.shape) for part, (_, p) in zip(parts, self.params, strict=True)]


def parts_of(chunk: Any) -> tuple[SharedChunk, ...]:
    """What of the chunks of a plan travels, one by one."""
    if isinstance(chunk, SmallChunk):
        return ()
    if isinstance(chunk, Bands):
        return chunk.parts
    return (chunk.chunk if isinstance(chunk, SliceChunk) else chunk,)
