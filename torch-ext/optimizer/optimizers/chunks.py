"""Same-shape matrices of a group in batches of bounded size: the unit of work of the step."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from ..orthogonalize.arguments import default_dtype
from ..orthogonalize.batch import slice_for
from .groups.blocks import Blocks, Piece, equal_share
from .groups.parameters import is_plain, local

# Upper bound of one batch of directions. At 256 MiB a 4096 x 14336 float32 matrix is alone, and
# 2048 x 2048 ones come sixteen at a time.
BATCH_BYTES = 256 * 2**20
# Upper bound of what a step needs at once beyond the state, unless one matrix needs more: a batch,
# the same orthogonalized, and what the iteration works in.
STEP_BYTES = 768 * 2**20


@dataclass(frozen=True, eq=False)
class Member:
    """A piece of a parameter in a chunk. Its tensors are looked up anew at every step."""

    param: Tensor
    number: int  # of the parameter in the optimizer
    piece: Piece
    state: Mapping[str, Tensor]  # of the parameter

    def view(self, tensor: Tensor) -> Tensor:
        """The piece of a tensor that is shaped and placed like the parameter."""
        return self.piece.view(local(tensor))


@dataclass(frozen=True, eq=False)
class Chunk:
    """A batch of matrices of one shape, dtype and device."""

    members: tuple[Member, ...]
    matrix: tuple[int, int]  # (m, n)
    finished: frozenset[Tensor]  # parameters of which no later chunk has a piece
    whole: bool  # every member is a whole plain matrix: nothing to cut, nothing to reshape

    @cached_property
    def device(self) -> torch.device:
        return self.members[0].param.device

    @cached_property
    def params(self) -> list[Tensor]:
        """The parameter of every member."""
        return [member.param for member in self.members]

    @property
    def matrices(self) -> int:
        return sum(member.piece.matrices for member in self.members)

    def with_gradients(self) -> Chunk:
        """The chunk without the members that have no gradient."""
        present = tuple(member for member in self.members if member.param.grad is not None)
        return replace(self, members=present)

    def views(self, tensors: list[Tensor]) -> list[Tensor]:
        """The pieces of tensors that are shaped and placed like the parameters of the members."""
        if self.whole:
            return tensors
        return [member.view(tensor) for member, tensor in zip(self.members, tensors, strict=True)]

    def statistics(self, key: str) -> list[Tensor]:
        """The pieces' parts of a factored second moment; those of whole matrices as they are."""
        if self.whole:
            return [member.state[key] for member in self.members]
        return [member.piece.statistics_view(local(member.state[key])) for member in self.members]


def plan_chunks(
    parameters: Iterable[tuple[int, Tensor, Blocks]],
    state: Mapping[Tensor, Mapping[str, Tensor]],
    *,
    contiguous: bool,
) -> list[Chunk]:
    """Bucket the blocks of all parameters by shape and fill equal batches, in order.

    Args:
        parameters: number in the optimizer, parameter, and the matrices it is cut into.
        state: of the optimizer.
        contiguous: as of `Blocks.pieces`.
    """
    buckets: dict[tuple, list[Member]] = {}
    for number, param, blocks in parameters:
        if param.numel() == 0:
            continue
        dtype = torch.promote_types(param.dtype, torch.float32)
        limit = min(m * n * matrices_at_once(m, n, dtype, param.device) for m, n in blocks.shapes())
        for piece in blocks.pieces(limit, contiguous=contiguous):
            key = (piece.matrix, dtype, param.device)
            buckets.setdefault(key, []).append(Member(param, number, piece, state[param]))
    batches = [
        (matrix, batch)
        for (matrix, dtype, device), members in buckets.items()
        for batch in _batches(members, matrices_at_once(*matrix, dtype, device))
    ]
    last = {member.param: i for i, (_, batch) in enumerate(batches) for member in batch}
    return [
        Chunk(
            members=tuple(batch),
            matrix=matrix,
            finished=frozenset(m.param for m in batch if last[m.param] == i),
            whole=all(
                is_plain(m.param) and m.piece.uncut and m.param.shape == matrix for m in batch
            ),
        )
        for i, (matrix, batch) in enumerate(batches)
    ]


def matrices_at_once(m: int, n: int, dtype: torch.dtype, device: torch.device) -> int:
    """How many m x n directions a batch may have, by BATCH_BYTES and STEP_BYTES.

    Where slices have any length (`orthogonalize/batch.py`), a matrix of one needs up to X and five
    m x m matrices, or X, its successor and one of those. Elsewhere slices are short.
    """
    most = max(1, BATCH_BYTES // max(1, m * n * dtype.itemsize))
    iterate = default_dtype(dtype, device)
    shape = slice_for(m, n, iterate, device)
    if shape.full:
        return most
    side, area = min(m, n), m * n
    each = iterate.itemsize * max(area + 5 * side * side, 2 * area + side * side)
    kept = area * (dtype.itemsize + iterate.itemsize)
    if kept * most + each * shape.at_once(most) <= STEP_BYTES:
        return most
    for slices in range(-(-most // shape.matrices), 0, -1):
        fitting = slices * (STEP_BYTES // (kept * slices + each))
        if (slices - 1) * shape.matrices < fitting:
            return min(fitting, most)
    return 1


def _batches(members: list[Member], most: int) -> list[list[Member]]:
    """Members in batches of at most `most` matrices: as few as in order, equal if that is so few.

    A last batch of a few matrices would take nearly as long as a whole one.
    """
    few = _filled(members, most)
    equal = _filled(members, equal_share(sum(m.piece.matrices for m in members), most))
    return min(equal, few, key=len)


def _filled(members: list[Member], most: int) -> list[list[Member]]:
    batches: list[list[Member]] = []
    room = -1
    for member in members:
        size = member.piece.matrices
        if size > room:
            batches.append([])
            room = most
        batches[-1].append(member)
        room -= size
    return batches
