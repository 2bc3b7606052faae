"""Who owns which matrix, in which chunks they travel, and who keeps which state.

Gradients that are reduced: the pieces of a sharded matrix are gathered by an owner, and one replica
orthogonalizes a replicated one for all (`plan_shared`).

Gradients that nobody has reduced yet (`Owners`): every rank has all parameters and its own
contribution to their gradients. A matrix parameter has one owner, which adds up the contributions,
keeps the momentum and sends the update to all. Of a large parameter for AdamW every rank owns a
slice of the rows, with its state, and sends the new rows to all. Small parameters are added up on
all ranks in one all-reduce and stepped by each.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ...distributed import (
    Extra,
    Job,
    Layout,
    Run,
    Split,
    Team,
    Teams,
    assign,
    chunked,
)
from ..groups.blocks import Blocks, Piece, equal_share
from ..groups.options import MuonOptions
from ..groups.parameters import is_dtensor
from ..state.slots import sharded_zeros
from .buffers import DistributedConfig
from .chunks import Bands, SharedChunk, SharedMatrix, SliceChunk, chunk_of, parts_of

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
    """Owners and chunks for the matrices of `count` parameter groups.

    Returns per group the chunks that ranks work on together, the same on every rank of a team, and
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
    return chunk_of(team, matrices, owners, wire, extras=extras)


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


REDUCE_OPS = ("avg", "sum")
# Bytes of directions that an owner orthogonalizes at once, unless one matrix has more: fewer leave
# multiprocessors idle, and more take longer than the transfers that are on their way meanwhile.
OWNED_BYTES = 64 * 2**20
# Rows of a band are a multiple, so that every part of a message begins where the one before ends.
EVEN_ROWS = 8
SMALL = 1024  # elements below which a parameter for AdamW is stepped by every rank


class Owners:
    """The owners of an optimizer's parameters. A parameter keeps its owner while it is there."""

    def __init__(self, group: Any, reduce_op: str) -> None:
        self.group = group
        self.reduce_op = reduce_op
        self.team: Team = Teams().of_group(group)
        self._owners: dict[Tensor, int] = {}
        self._load = [0.0] * self.team.size
        self._mesh: dict[str, Any] = {}

    def __deepcopy__(self, memo: Any) -> Owners:
        copied = Owners(self.group, self.reduce_op)  # it talks over the same group
        copied._owners = {copy.deepcopy(param, memo): o for param, o in self._owners.items()}
        copied._load = list(self._load)
        return copied

    @property
    def factor(self) -> float:
        """By which the sum of the contributions is multiplied."""
        return 1 / self.team.size if self.reduce_op == "avg" else 1.0

    def adopt(self, params: Sequence[Tensor], costs: Sequence[float]) -> None:
        """Give owners to matrix parameters that have none, the expensive ones first."""
        new = [(cost, p) for p, cost in zip(params, costs, strict=True) if p not in self._owners]
        ranks = range(self.team.size)
        # What was given out before is work that only its owner can do.
        owners = assign(
            [*self._load, *(cost for cost, _ in new)],
            [*((rank,) for rank in ranks), *(tuple(ranks) for _ in new)],
            self.team.size,
        )
        for (cost, param), owner in zip(new, owners[self.team.size :], strict=True):
            self._owners[param] = owner
            self._load[owner] += cost

    def owner(self, param: Tensor) -> int:
        return self._owners[param]

    def owns(self, param: Tensor) -> bool:
        """Whether this rank keeps the state of a matrix parameter."""
        return self._owners[param] == self.team.rank

    def sliced(self, param: Tensor) -> bool:
        """Whether the ranks share the rows of a parameter for AdamW."""
        return param.ndim > 0 and param.numel() >= SMALL

    def zeros_of_slice(self, param: Tensor, dtype: torch.dtype) -> Tensor:
        """State for this rank's rows: a DTensor, which knows its place in the whole."""
        from torch.distributed.tensor import Shard

        mesh = self._mesh_on(param.device)
        return sharded_zeros(param, tuple(param.shape), dtype, mesh, [Shard(0)])

    def matrix_chunks(
        self, matrices: Iterable[SharedMatrix], wire: torch.dtype, config: DistributedConfig
    ) -> list[Bands]:
        """The matrices of a group in chunks of one shape and bounded size."""
        buckets: dict[tuple[Any, ...], list[SharedMatrix]] = {}
        for matrix in matrices:
            key = (matrix.matrix, matrix.param.dtype, matrix.param.device)
            buckets.setdefault(key, []).append(matrix)
        chunks = []
        for ((m, n), *_), members in buckets.items():
            travels = torch.float64 if members[0].dtype == torch.float64 else wire
            # A rank sends to all other owners, and receives from all others.
            of_turn = 2 * m * n * travels.itemsize * max(1, self.team.size - 1)
            size = min(
                OWNED_BYTES // (m * n * members[0].dtype.itemsize),
                config.chunk_bytes * max(m, EVEN_ROWS) // (EVEN_ROWS * of_turn),
                (config.most or len(members)) // self.team.size,
            )
            queues: list[list[SharedMatrix]] = [[] for _ in range(self.team.size)]
            for member in members:
                queues[self.owner(member.param)].append(member)
            turns = max(map(len, queues))
            size = equal_share(turns, max(1, size))
            for start in range(0, turns, size):
                taken = [queue[start : start + size] for queue in queues]
                chunks.append(self._banded(taken, travels, of_turn, config.chunk_bytes))
        return chunks

    def _banded(
        self,
        queues: Sequence[Sequence[SharedMatrix]],  # of every owner
        wire: torch.dtype,
        of_turn: int,
        chunk_bytes: int,
    ) -> Bands:
        """Matrices in equal bands: of whole ones, which take no views, or else of their rows."""
        members = [member for queue in queues for member in queue]
        whole = self._chunk(members, wire)
        (m, _), turns = whole.matrix, max(map(len, queues))
        if turns * of_turn <= chunk_bytes:
            return Bands(whole, (whole,), (0,), ((0, m),))
        if of_turn <= chunk_bytes:
            each = equal_share(turns, chunk_bytes // of_turn)
            first = range(0, turns, each)
            bands = [[member for q in queues for member in q[at : at + each]] for at in first]
            parts = tuple(self._chunk(band, wire) for band in bands)
            return Bands(whole, parts, tuple(first), ((0, m),) * len(parts))
        count = -(-turns * of_turn // chunk_bytes)
        step = -(-m // (count * EVEN_ROWS)) * EVEN_ROWS
        rows = [(at, min(step, m - at)) for at in range(0, m, step)]
        if len(rows) == 1:
            return Bands(whole, (whole,), (0,), (rows[0],))
        parts = tuple(self._chunk([_band(member, run) for member in members], wire) for run in rows)
        return Bands(whole, parts, (0,) * len(parts), tuple(rows))

    def slice_chunks(
        self, param: Tensor, wire: torch.dtype, config: DistributedConfig
    ) -> list[SliceChunk]:
        """The rows of a parameter in chunks of bounded size."""
        wide = torch.promote_types(param.dtype, torch.float32)
        travels = torch.float64 if wide == torch.float64 else wire
        shape = tuple(param.shape)
        runs = [self._rows(shape).runs((rank,))[0] for rank in range(self.team.size)]
        rows = max(sum(length for _, length in run) for run in runs)
        # Contributions go in the dtype of the wire, new rows come back in that of the parameter.
        widest = max(travels.itemsize, param.dtype.itemsize)
        row_bytes = math.prod(shape[1:]) * widest * max(1, self.team.size - 1)
        step = max(1, config.chunk_bytes // (2 * row_bytes))  # sent, and received from others
        step = equal_share(rows, step)
        chunks = []
        for start in range(0, rows, step):
            members, owners = [], []
            for rank, run in enumerate(runs):
                for first, length in run:
                    taken = min(step, length - start)
                    if taken > 0:
                        members.append(self._run(param, (first + start, taken)))
                        owners.append(rank)
            chunk = self._chunk(members, travels, owners, param.dtype.itemsize)
            chunks.append(SliceChunk(chunk, last=start + step >= rows))
        return chunks

    def _chunk(
        self,
        members: Sequence[SharedMatrix],
        wire: torch.dtype,
        owners: Sequence[int] | None = None,
        answer_itemsize: int | None = None,
    ) -> SharedChunk:
        if owners is None:
            owners = [self.owner(member.param) for member in members]
        options = {"from_all": True, "answer_itemsize": answer_itemsize}
        return chunk_of(self.team, members, owners, wire, **options)

    def _run(self, param: Tensor, rows: Run) -> SharedMatrix:
        shape = tuple(param.shape)
        region = (rows, *((0, size) for size in shape[1:]))
        return SharedMatrix(
            param=param,
            job=Job(self.team.layout(shape), self.team.coordinates, region),
            matrix=(rows[1], math.prod(shape[1:])),
            statistics=(0, 0),
            keepers=(),
            stacked=False,
            dtype=torch.promote_types(param.dtype, torch.float32),
        )

    def _rows(self, shape: tuple[int, ...]) -> Layout:
        return Layout(shape, (self.team.size,), (Split(0),))

    def _mesh_on(self, device: torch.device) -> Any:
        from torch.distributed.device_mesh import DeviceMesh

        if device.type not in self._mesh:
            self._mesh[device.type] = DeviceMesh.from_group(self.group, device.type)
        return self._mesh[device.type]


def _band(member: SharedMatrix, rows: Run) -> SharedMatrix:
    """Some rows of a matrix."""
    first, length = rows
    along = 1 if member.stacked else 0
    region = list(member.job.region)
    region[along] = (region[along][0] + first, length)
    return replace(
        member,
        job=replace(member.job, region=tuple(region)),
        matrix=(length, member.matrix[1]),
    )


def spread(chunks: Sequence[Sequence[Any]]) -> list[tuple[int, Any]]:
    """(group, chunk) of all groups, in the order of a step.

    Bands keep the multiprocessors busy and everything else the wire: each kind is spread evenly
    over the step, so that the one runs under the other.
    """
    kinds: dict[bool, list[tuple[int, Any]]] = {True: [], False: []}
    for number, of_group in enumerate(chunks):
        for chunk in of_group:
            kinds[isinstance(chunk, Bands)].append((number, chunk))
    placed = []
    for entries in kinds.values():
        # A chunk without parts, the small parameters, counts as one.
        sizes = [max(1, len(parts_of(chunk))) for _, chunk in entries]
        middles = [at - size / 2 for at, size in zip(accumulate(sizes), sizes, strict=True)]
        placed += [(m / sum(sizes), entry) for m, entry in zip(middles, entries, strict=True)]
    return [entry for _, entry in sorted(placed, key=lambda one: one[0])]
