"""Which parameters several ranks work on together, and their matrices in chunks with owners.

A matrix that one rank holds entirely stays there. Every other one is sent to an owner, which
orthogonalizes it for all: the pieces of a sharded one are gathered, and a replicated one is
orthogonalized by one replica instead of by all. A parameter that is a stack of experts, sharded
along them alone, is a local stack and never gets here.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..distributed import (
    ALIGNMENT,
    Box,
    Extra,
    Job,
    Layout,
    Part,
    Route,
    Run,
    Team,
    assign,
    chunked,
    make_route,
)
from .blocks import Blocks, Piece
from .flow import Flow
from .graphs import Graphs
from .parameters import is_dtensor
from .staging import Staging
from .tape import Tape

Cost = Callable[[int, int, torch.dtype, torch.device], float]


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

    @cached_property
    def exponents(self) -> Tensor:
        """Memory for the exponents of all matrices, on the device."""
        return torch.zeros(len(self.members), dtype=torch.int32, device=self.device)

    @cached_property
    def scales(self) -> Tensor:
        """Memory for what this rank scales its part of every matrix with, on the device."""
        return torch.ones(len(self.members), dtype=torch.float32, device=self.device)

    @cached_property
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

    @cached_property
    def jobs_for_others(self) -> Tensor:
        """The job of everything that this rank sends, on the device."""
        return torch.tensor([held.job for held in self.held_for_others]).to(self.device)

    @cached_property
    def jobs_here(self) -> Tensor:
        """The job of everything that is held, on the device."""
        return torch.tensor([held.job for held in self.held]).to(self.device)

    @cached_property
    def places_of_jobs(self) -> Tensor | None:
        """Where each job is among what is held, on the device; None unless there is one of each."""
        jobs = [held.job for held in self.held]
        if sorted(jobs) != [*range(len(self.members))]:
            return None
        return torch.tensor([jobs.index(job) for job in range(len(jobs))]).to(self.device)

    @cached_property
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


@dataclass(frozen=True, eq=False)
class Shared:
    """The part of a plan that ranks share."""

    chunks: list[list[Any]]  # per group; the same on every rank
    home: list[list[SharedChunk]]  # per group; this rank's own, without communication
    teams: list[tuple[Team, list[tuple[str, Tensor]]]]  # parameters that must agree on gradients
    empty: bool  # no parameter is on more ranks than this one
    flow: Flow  # of the chunks
    staging: Staging = field(default_factory=Staging)
    graphs: Graphs = field(default_factory=Graphs)
    tape: Tape = field(default_factory=Tape)

    def of_groups(self) -> list[list[Any]]:
        """All chunks, per group."""
        return [of_all + own for of_all, own in zip(self.chunks, self.home, strict=True)]

    def begin(self, *, on: bool) -> None:
        """Start a step: all memory is free; stages are captured and replayed if `on`."""
        self.staging.begin()
        self.graphs.begin(on=on)

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


def layout_on(param: Tensor, team: Team) -> Layout:
    """How the ranks of a team hold a parameter; a plain one is the same on all of them."""
    shape = tuple(param.shape)
    return team.layout(shape, param.placements) if is_dtensor(param) else team.layout(shape)


def local_blocks(blocks: Blocks, layout: Layout, team: Team) -> Blocks | None:
    """The blocks of this rank's own tensor, if it takes no other rank to update it.

    That is so where it is the whole parameter and no replica can take part of the work, and for a
    stack that is sharded along its experts alone.
    """
    replicas = math.prod(
        size for size, split in zip(layout.mesh, layout.splits, strict=True) if split.dim is None
    )
    sharded = {
        split.dim
        for size, split in zip(layout.mesh, layout.splits, strict=True)
        if split.dim is not None and size > 1
    }
    if replicas > 1 or not sharded <= ({0} if blocks.experts is not None else set()):
        return None
    if not sharded:
        return blocks
    experts = layout.local_shape(team.coordinates[team.rank])[0]
    return replace(blocks, experts=experts)


def matrices_of(
    param: Tensor,
    where: str,
    blocks: Blocks,
    layout: Layout,
    team: Team,
    momentum_dtype: torch.dtype | None,
) -> Iterable[SharedMatrix]:
    """The matrices of a parameter, one by one."""
    dtype = torch.promote_types(momentum_dtype or param.dtype, torch.float32)
    shape = tuple(param.shape)
    stacked = blocks.experts is not None
    held = [layout.runs(coordinate)[0] for coordinate in team.coordinates]
    for piece in blocks.pieces(1):
        region = _region(piece, shape)
        hearers = tuple(range(team.size))
        start, length = piece.statistics
        if stacked:
            expert = piece.experts[0]
            places = [_place(runs, expert) for runs in held]
            hearers = tuple(r for r, place in enumerate(places) if place is not None)
            here = places[team.rank]
            if not blocks.split and here is not None:
                start += (here - expert) * blocks.heads * length
        yield SharedMatrix(
            param=param,
            where=where,
            job=Job(layout, team.coordinates, region),
            matrix=piece.matrix,
            statistics=(start, length),
            hearers=hearers,
            stacked=stacked,
            dtype=dtype,
        )


@dataclass(frozen=True, eq=False)
class SharedGroup:
    """The shared matrices of a parameter group on one team."""

    number: int  # of the group
    team: Team
    matrices: Sequence[SharedMatrix]
    wire: torch.dtype  # in which float32 directions and updates travel
    cost: Cost
    keeps_statistics: bool

    def owners(self) -> list[tuple[int, ...]]:
        """Who may own each matrix. One of a stack stays with ranks that keep its statistics."""
        return [matrix.job.candidates(stay=matrix.stacked) for matrix in self.matrices]


def plan_shared(groups: Sequence[SharedGroup], count: int, empty: bool, flow: Flow) -> Shared:
    """Owners and chunks for the matrices of all groups, the same on every rank of a team.

    Args:
        groups: one per parameter group and team.
        count: how many parameter groups there are.
        empty: as of `Shared`.
        flow: as of `Shared`.
    """
    chunks: list[list[SharedChunk]] = [[] for _ in range(count)]
    home: list[list[SharedChunk]] = [[] for _ in range(count)]
    teams: dict[int, tuple[Team, dict[Tensor, str]]] = {}
    for team in {id(group.team): group.team for group in groups}.values():
        entries = [
            (group, matrix, candidates)
            for group in groups
            if group.team is team
            for matrix, candidates in zip(group.matrices, group.owners(), strict=True)
        ]
        owners = assign(
            [g.cost(*matrix.matrix, matrix.dtype, matrix.param.device) for g, matrix, _ in entries],
            [candidates for _, _, candidates in entries],
            team.size,
        )
        buckets: dict[tuple[Any, ...], list[tuple[SharedMatrix, int]]] = {}
        for (group, matrix, _), owner in zip(entries, owners, strict=True):
            alone_with_it = len(matrix.hearers) == 1 or not group.keeps_statistics
            at_home = alone_with_it and sum(matrix.job.elements()) == matrix.job.elements()[owner]
            if not at_home:
                teams.setdefault(id(team), (team, {}))[1][matrix.param] = matrix.where
            elif owner != team.rank:
                continue
            param = matrix.param
            key = (group.number, at_home, matrix.matrix, param.dtype, param.device)
            buckets.setdefault(key, []).append((matrix, owner))
        wires = {group.number: group for group in groups if group.team is team}
        for (number, at_home, *_), members in buckets.items():
            target = home if at_home else chunks
            target[number] += _chunks(members, wires[number], flow)
    agreeing = [
        (team, [(where, param) for param, where in params.items()])
        for team, params in teams.values()
    ]
    return Shared(chunks, home, agreeing, empty, flow)


def _chunks(
    members: Sequence[tuple[SharedMatrix, int]], group: SharedGroup, flow: Flow
) -> list[SharedChunk]:
    """Chunks of bounded size out of matrices of one shape."""
    first = members[0][0]
    wire = torch.float64 if first.dtype == torch.float64 else group.wire
    m, n = first.matrix
    parts = chunked(
        [owner for _, owner in members],
        [m * n * wire.itemsize] * len(members),
        [[count * wire.itemsize for count in matrix.job.elements()] for matrix, _ in members],
        flow.chunk_bytes,
        flow.most,
    )
    return [_chunk([members[i] for i in part], wire, group) for part in parts]


def _chunk(
    members: Sequence[tuple[SharedMatrix, int]], wire: torch.dtype, group: SharedGroup
) -> SharedChunk:
    matrices = tuple(matrix for matrix, _ in members)
    owners = tuple(owner for _, owner in members)
    first, team = matrices[0], group.team
    m, n = first.matrix
    extras = None
    if group.keeps_statistics:
        size = max(m, n) * torch.promote_types(first.param.dtype, torch.float32).itemsize
        extras = [Extra(size, matrix.hearers) for matrix in matrices]
    jobs = [matrix.job for matrix in matrices]
    planned = make_route(jobs, owners, team.rank, team.size, wire.itemsize, extras)
    return chunk_of(team, matrices, owners, wire, planned)


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


def _region(piece: Piece, shape: tuple[int, ...]) -> tuple[Run, ...]:
    rest = tuple((0, size) for size in shape)
    if piece.experts is None:
        return (piece.rows, *rest[1:])
    return (piece.experts, piece.rows, *rest[2:])


def _place(runs: Sequence[Run], number: int) -> int | None:
    """Where a rank stores an element of a dimension of which it has these runs."""
    at = 0
    for start, length in runs:
        if start <= number < start + length:
            return at + number - start
        at += length
    return None
