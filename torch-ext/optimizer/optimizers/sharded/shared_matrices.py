"""Matrices that several ranks work on, in chunks that travel together, and all of a plan's."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...distributed import ALIGNMENT, Box, Job, Part, Route, Run, Team
from .buffers import Staging, made_once
from .cuda_graphs import Graphs
from .limits import Flow
from .tape import Tape


@dataclass(frozen=True, eq=False)
class SharedMatrix:
    """A matrix of a parameter that several ranks work on."""

    param: Tensor
    where: str
    job: Job
    matrix: tuple[int, int]  # (m, n)
    statistics: Run  # (start, length) in what this rank has of the second_momentum_buffer
    hearers: tuple[int, ...]  # ranks that keep these statistics
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
    def params_of_answers(self) -> list[Tensor]:
        """The parameter of every part that this rank hears."""
        return [self.members[part.job].param for part in self.route.scattered.parts]

    def views_of_answers(self, tensors: list[Tensor]) -> list[Tensor]:
        """What this rank hears of, in tensors that are stored as it stores the parameters."""
        if self._answers_whole:
            return tensors
        boxes = [part.box for part in self.route.scattered.parts]
        return [t if b is None else b.view(t) for t, b in zip(tensors, boxes, strict=True)]

    @cached_property
    def _answers_whole(self) -> bool:
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
        return self._counted(self.route.gathered.ranks_by_rows)

    @cached_property
    def hearers(self) -> int | None:
        """How many ranks get an equal run of rows of every owned matrix, if that is all."""
        return self._counted(self.route.answered.ranks_by_rows)

    @cached_property
    def contributors(self) -> int | None:
        """How many ranks send all of every owned matrix, if that is all."""
        return self._counted(self.route.gathered.ranks_with_all)

    @cached_property
    def replicas(self) -> int | None:
        """How many ranks get all of every owned matrix, if that is all."""
        return self._counted(self.route.answered.ranks_with_all)

    def _counted(self, count: Callable[[tuple[int, ...], tuple[int, ...]], int | None]) -> Any:
        owned = self.route.owned
        return count(owned, self.region(owned[0])) if owned else None

    def region(self, job: int) -> tuple[int, ...]:
        """Shape in which the boxes of a job cut its matrix."""
        return tuple(length for _, length in self.members[job].job.region)


def chunk_of(
    team: Team,
    members: Sequence[SharedMatrix],
    owners: Sequence[int],
    wire: torch.dtype,
    planned: Route,
) -> SharedChunk:
    """A chunk of matrices of one shape with its route, and this rank's boxes of them."""
    first = members[0]
    sent = {(part.job, _corner(part.box)): part for part in planned.sent.parts}
    size = first.matrix[0] * first.matrix[1] * wire.itemsize
    parts = planned.gathered.parts
    place = {id(part): number for number, part in enumerate(planned.sent.parts)}
    held = [
        Held(number, box, sent.get((number, _corner(box))))
        for number, member in enumerate(members)
        for box in member.job.held(team.rank)
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


def in_turn(chunks: Sequence[Sequence[Any]]) -> list[tuple[int, Any]]:
    """(number of the group, chunk), group by group."""
    return [(number, chunk) for number, of_group in enumerate(chunks) for chunk in of_group]


OWNERS = "owners, which follow from the kind of GPU"
DIGESTED = ("shapes, dtypes and placements", "clip_config", OWNERS)
# What decides the messages between ranks, beside the options of groups.
LAYOUT = (
    "gradients",
    "reduce_op",
    "wire_dtype",
    "warmup_step",
    "chunk_size",
    "in_flight_bytes",
    "number of groups",
    "number of parameters",
    *DIGESTED,
)


@dataclass(frozen=True, eq=False)
class Common:
    """What the ranks of a team must have in common."""

    team: Team
    labelled: list[tuple[str, Tensor]]  # parameters that have gradients on all ranks or on none
    groups: list[int]  # numbers of theirs
    layout: Mapping[str, str]  # LAYOUT -> as text, or a digest of that
    # Whether the first gradients must be equal on all ranks or must not; None: that cannot be told.
    alike: bool | None


@dataclass(frozen=True, eq=False)
class Shared:
    """The part of a plan that ranks share."""

    chunks: list[list[Any]]  # per group; the same on every rank
    home: list[list[SharedChunk]]  # per group; this rank's own, without communication
    teams: list[Common]
    empty: bool  # no matrix is on more ranks than this one
    flow: Flow  # of the chunks
    order: list[tuple[int, Any]]  # (number of the group, chunk) as a step begins them
    staging: Staging = field(default_factory=Staging)
    graphs: Graphs = field(default_factory=Graphs)

    @cached_property
    def tape(self) -> Tape:
        """Of the last step."""
        return Tape(self.graphs)

    def of_groups(self) -> list[list[Any]]:
        """All chunks, per group."""
        return [of_all + own for of_all, own in zip(self.chunks, self.home, strict=True)]

    def begin(self, *, on: bool) -> None:
        """Start a step: all memory is free; stages are captured and replayed if `on`."""
        self.staging.begin()
        self.graphs.begin(on=on)

    @cached_property
    def asked(self) -> frozenset[torch.device]:
        """Where the parameters are that must agree on their gradients."""
        return frozenset(param.device for common in self.teams for _, param in common.labelled)

    @cached_property
    def devices(self) -> frozenset[torch.device]:
        """Where the chunks are."""
        return self.staging.devices()

    def set_numbers(self, number: int, group: Any) -> None:
        """The rates of a group as they are now, for graphs that read them."""
        for device in self.devices:
            self.graphs.number((number, "lr"), group.lr, device)
            self.graphs.number((number, "decay"), group.weight_decay, device)

    def in_order(self, own: Sequence[Any]) -> list[Any]:
        """All chunks, and other work of this rank, in the order in which a step begins them."""
        of_all, home = ([c for of_group in g for c in of_group] for g in (self.chunks, self.home))
        ahead = self.flow.warmup_step + 1  # that many chunks are open before other work
        gathers = itertools.accumulate(chunk.communicates for chunk in of_all)
        first = next((i for i, count in enumerate(gathers, 1) if count == ahead), len(of_all))
        return [*of_all[:first], *own, *home, *of_all[first:]]
