"""Which elements of a tensor a rank holds: functions of shape, placements, mesh and coordinate.

A run is (start, length), in numbers of the whole tensor, listed in the order in which the rank
stores them. Every dimension is sharded on its own, so that a rank holds the product of its runs
along all dimensions. `Shard(k)` gives at most one run, `_StridedShard` several.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Run = tuple[int, int]


@dataclass(frozen=True)
class Split:
    """What one mesh dimension does to a tensor."""

    dim: int | None  # the dimension that it shards; None: every rank along it holds the same
    factor: int = 1  # of a _StridedShard: how many parts are cut first, each of which it shards


@dataclass(frozen=True)
class Layout:
    """A tensor on a mesh of ranks, as `DTensor` distributes it."""

    shape: tuple[int, ...]
    mesh: tuple[int, ...]  # sizes of the mesh dimensions
    splits: tuple[Split, ...]  # one per mesh dimension, applied from the first to the last

    def runs(self, coordinate: Sequence[int]) -> tuple[tuple[Run, ...], ...]:
        """Per dimension of the tensor what the rank at a coordinate of the mesh holds."""
        held: list[tuple[Run, ...]] = [((0, size),) if size else () for size in self.shape]
        for split, ranks, position in zip(self.splits, self.mesh, coordinate, strict=True):
            if split.dim is not None:
                parts = _chunks(held[split.dim], split.factor)
                mine = [_chunks(part, ranks)[position] for part in parts]
                held[split.dim] = _joined(itertools.chain.from_iterable(mine))
        return tuple(held)

    def local_shape(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Shape of the tensor that the rank at a coordinate stores."""
        return tuple(sum(length for _, length in runs) for runs in self.runs(coordinate))

    def replica(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """The coordinate along the mesh dimensions that do not shard; equal within one replica."""
        pairs = zip(self.splits, coordinate, strict=True)
        return tuple(place for split, place in pairs if split.dim is None)


@dataclass(frozen=True)
class Box:
    """Elements of a region that lie together in a rank's tensor: slices of the two."""

    local: tuple[slice, ...]  # of the tensor that the rank stores
    region: tuple[slice, ...]  # of the region, which starts at 0
    shape: tuple[int, ...]
    whole: bool  # it is all that the rank stores
    rows: Run | None  # (start, length) of the rank's tensor, if nothing but rows is cut

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def view(self, tensor: Tensor) -> Tensor:
        """The box of a tensor that is stored as the rank stores it."""
        if self.whole:
            return tensor
        # Indexing by slices takes the host three times as long.
        return tensor[self.local] if self.rows is None else tensor.narrow(0, *self.rows)


def boxes(runs: Sequence[Sequence[Run]], region: Sequence[Run]) -> list[Box]:
    """What a rank with these runs holds of a region, given as one run per dimension.

    Their union is the intersection of the two; each element is in one box. Empty: an empty list.
    """
    sizes = [sum(length for _, length in of_dim) for of_dim in runs]
    per_dim = [list(_overlaps(*pair)) for pair in zip(runs, region, strict=True)]
    found = []
    for combination in itertools.product(*per_dim):
        shape = tuple(length for _, _, length in combination)
        rows = (combination[0][0], shape[0]) if shape else None  # a number has no rows
        found.append(
            Box(
                local=tuple(slice(at, at + length) for at, _, length in combination),
                region=tuple(slice(at, at + length) for _, at, length in combination),
                shape=shape,
                whole=shape == tuple(sizes),
                rows=rows if shape[1:] == tuple(sizes[1:]) else None,
            )
        )
    return found


def splits_of(placements: Iterable[Any], ndim: int) -> tuple[Split, ...]:
    """The placements of a DTensor as records.

    Raises:
        TypeError: a placement that neither shards nor replicates, such as `Partial`.
    """
    splits = []
    for placement in placements:
        if placement.is_replicate():
            splits.append(Split(None))
        elif hasattr(placement, "dim") and not placement.is_partial():
            splits.append(Split(placement.dim % ndim, int(getattr(placement, "split_factor", 1))))
        else:
            raise TypeError(f"a tensor with placement {placement!r} has no shards")
    return tuple(splits)


def _chunks(runs: Sequence[Run], parts: int) -> list[tuple[Run, ...]]:
    """As `torch.chunk` with `parts` parts, the last ones perhaps empty."""
    total = sum(length for _, length in runs)
    size = max(1, -(-total // parts))
    return [tuple(_cut(runs, i * size, size)) for i in range(parts)]


def _cut(runs: Sequence[Run], first: int, count: int) -> Iterator[Run]:
    """`count` elements from number `first` on."""
    at = 0
    for start, length in runs:
        low, high = max(first, at), min(first + count, at + length)
        if low < high:
            yield start + low - at, high - low
        at += length


def _joined(runs: Iterable[Run]) -> tuple[Run, ...]:
    """Runs that continue each other as one."""
    joined: list[Run] = []
    for start, length in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return tuple(joined)


def _overlaps(runs: Sequence[Run], region: Run) -> Iterator[tuple[int, int, int]]:
    """(start in the rank's tensor, start in the region, length) of what runs and a region share."""
    at = 0
    for start, length in runs:
        low, high = max(start, region[0]), min(start + length, sum(region))
        if low < high:
            yield at + low - start, low - region[0], high - low
        at += length
