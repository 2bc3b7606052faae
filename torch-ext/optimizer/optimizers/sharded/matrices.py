"""Matrices that several ranks share, one by one, with their owners and in their chunks.

For gradients that are reduced; for others see `owners.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...distributed import Extra, Job, Layout, Run, Team, assign, chunked, make_route
from ..groups.blocks import Blocks, Piece
from ..groups.options import MuonOptions
from ..groups.parameters import is_dtensor
from .buffers import DistributedConfig
from .chunks import SharedChunk, SharedMatrix, chunk_of

Cost = Callable[[int, int, torch.dtype, torch.device], float]


def layout_on(param: Tensor, team: Team) -> Layout:
    """How the ranks of a team hold a parameter; a plain one is the same on all of them."""
    shape = tuple(param.shape)
    return team.layout(shape, param.placements) if is_dtensor(param) else team.layout(shape)


def stays(layout: Layout, *, stacked: bool) -> bool:
    """Whether no other rank has a part of what this one has, of experts if it is a stack of them"""
    pairs = zip(layout.mesh, layout.splits, strict=True)
    split_along = {split.dim for size, split in pairs if size > 1}  # None: by replicas
    return split_along <= ({0} if stacked else set())


def local_blocks(blocks: Blocks, layout: Layout, team: Team) -> Blocks | None:
    """The blocks of this rank's own tensor, if it takes no other rank to update it.

    That is so where it is the whole parameter and no replica can take part of the work, and for a
    stack that is sharded along its experts alone.
    """
    if not stays(layout, stacked=blocks.experts is not None):
        return None
    if blocks.experts is None:
        return blocks
    experts = layout.local_shape(team.coordinates[team.rank])[0]
    return replace(blocks, experts=experts)


def check_statistics(options: MuonOptions, param: Tensor, where: str) -> None:
    """Raise ValueError if an update would be wider than the directions, in whose dtype it travels.

    One rank alone evens out float32 directions by float64 second moments, in float64.
    """
    narrow = options.momentum_dtype not in (None, torch.float64)
    if options.beta2 is not None and param.dtype == torch.float64 and narrow:
        raise ValueError(
            f"{where}: beta2 with momentum_dtype={options.momentum_dtype} is not supported for "
            "torch.float64 parameters that several ranks share, since their second moments are "
            "float64; leave momentum_dtype at None, or set beta2=None"
        )


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
        keepers = tuple(range(team.size))
        start, length = piece.statistics
        if stacked:
            expert = piece.experts[0]
            places = [_place(runs, expert) for runs in held]
            keepers = tuple(r for r, place in enumerate(places) if place is not None)
            here = places[team.rank]
            if not blocks.split and here is not None:
                start += (here - expert) * blocks.heads * length
        yield SharedMatrix(
            param=param,
            where=where,
            job=Job(layout, team.coordinates, region),
            matrix=piece.matrix,
            statistics=(start, length),
            keepers=keepers,
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


def plan_shared(
    groups: Sequence[SharedGroup], count: int, config: DistributedConfig
) -> tuple[list[list[SharedChunk]], list[list[SharedChunk]]]:
    """Owners and chunks for the matrices of all groups.

    Args:
        groups: one per parameter group and team.
        count: how many parameter groups there are.
        config: how large chunks may be.

    Returns:
        The chunks of every group that ranks work on together, the same on every rank of a team, and
        those of this rank alone.
    """
    chunks: list[list[SharedChunk]] = [[] for _ in range(count)]
    home: list[list[SharedChunk]] = [[] for _ in range(count)]
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
            alone_with_it = len(matrix.keepers) == 1 or not group.keeps_statistics
            at_home = alone_with_it and sum(matrix.job.elements()) == matrix.job.elements()[owner]
            if at_home and owner != team.rank:
                continue
            param = matrix.param
            key = (group.number, at_home, matrix.matrix, param.dtype, param.device)
            buckets.setdefault(key, []).append((matrix, owner))
        wires = {group.number: group for group in groups if group.team is team}
        for (number, at_home, *_), members in buckets.items():
            target = home if at_home else chunks
            target[number] += _chunks(members, wires[number], config)
    return chunks, home


def _chunks(
    members: Sequence[tuple[SharedMatrix, int]], group: SharedGroup, config: DistributedConfig
) -> list[SharedChunk]:
    """Chunks of bounded size out of matrices of one shape."""
    first = members[0][0]
    wire = torch.float64 if first.dtype == torch.float64 else group.wire
    m, n = first.matrix
    parts = chunked(
        [owner for _, owner in members],
        [m * n * wire.itemsize] * len(members),
        [[count * wire.itemsize for count in matrix.job.elements()] for matrix, _ in members],
        config.chunk_bytes,
        config.most,
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
        extras = [Extra(size, matrix.keepers) for matrix in matrices]
    jobs = [matrix.job for matrix in matrices]
    planned = make_route(jobs, owners, team.rank, team.size, wire.itemsize, extras)
    return chunk_of(team, matrices, owners, wire, planned)


def _region(piece: Piece, shape: tuple[int, ...]) -> tuple[Run, ...]:
    rest = tuple((0, size) for size in shape)
    if piece.columns is not None:
        rest = (*rest[:-1], piece.columns)
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
