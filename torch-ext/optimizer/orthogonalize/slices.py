"""A batch of matrices as a walk over slices of normalized ones: what every iteration shares.

Legend: matrices of r rows and c columns in the caller's orientation; G of them in one slice, stored
as (G, R, C) with R >= r and C >= c.

A matrix gives the same bits in any batch because nothing it meets depends on the batch. Hopper's
compiled products sum alike in any batch. BLAS libraries choose kernels, hence summation orders, by
batch size and by the alignment of operands, so where they serve neither varies: a slice always
holds G matrices (missing ones are zero). Each slice is a fresh buffer of one layout, and on CUDA
rows and columns are filled up with zeros to multiples of 8. Zero rows and columns stay zero and
change no other element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from .._ops import ops
from ..kernels.autocast import without_autocast
from ..kernels.products.normalize import crop_serves, runs_compiled
from .products import batch_is_free, ieee_float32, matrix_norm, may_write

# A slice holds as many matrices as a large GPU iterates in the time that its 30 to 50 launches take
# anyway (about 0.5 ms): missing matrices cost little, and a long batch does not wait for launches.
SLICE_FLOP = 2.5e11
# Elements of X in a slice, unless one matrix has more. An iteration then needs at most 256 MiB of
# workspace in half precision, 512 MiB in float32.
SLICE_ELEMENTS = 16 * 2**20
MAX_SLICE = 64
# Bytes that a slice of any length needs at once: X and five m x m matrices, or X, its successor and
# one of those, and the result where it cannot be written in place. A matrix that needs more is a
# slice of its own.
FREE_SLICE_BYTES = 640 * 2**20
# 8 half-precision elements are 16 bytes, the widest alignment that BLAS kernels distinguish.
CUDA_ALIGNMENT = 8


@dataclass(frozen=True)
class Slice:
    """Shape of the buffer that matrices of one shape are iterated in; independent of the batch.

    `matrices` are so many if it is `full`, at most so many otherwise.
    """

    matrices: int
    rows: int
    columns: int
    full: bool = True

    @property
    def sides(self) -> tuple[int, int]:
        return self.rows, self.columns

    def held(self, pieces: Sequence[torch.Tensor]) -> int:
        """Matrices in the buffer of pieces (b, r, c)."""
        return self.matrices if self.full else sum(map(len, pieces))

    def at_once(self, batch: int) -> int:
        """Matrices of `batch` in each slice but the last: equal shares where they are free."""
        if self.full or batch == 0:
            return self.matrices
        return -(-batch // -(-batch // self.matrices))


def slice_for(
    r: int, c: int, dtype: torch.dtype, device: torch.device, direct: bool = True
) -> Slice:
    """The slice that r x c matrices are iterated in, in `dtype`, on a device.

    `direct`: results are written to where they belong.

    On the CPU it is one matrix: its operands stay in the caches, and launches are cheap.
    """
    if device.type == "cpu":
        return Slice(1, r, c)
    rows, columns = (CUDA_ALIGNMENT * -(-size // CUDA_ALIGNMENT) for size in (r, c))
    m, n = min(rows, columns), max(rows, columns)
    if batch_is_free(dtype, device):
        each = dtype.itemsize * max(m * n + 5 * m * m, (2 if direct else 3) * m * n + m * m)
        return Slice(max(1, FREE_SLICE_BYTES // each), rows, columns, full=False)
    flop = 5 * (4 * m * m * n + 2 * m * m * m)  # five dense steps
    fitting = min(MAX_SLICE, SLICE_ELEMENTS // (m * n), int(SLICE_FLOP // flop))
    return Slice(1 << (max(1, fitting).bit_length() - 1), rows, columns)


def walk(
    x: torch.Tensor,
    out: torch.Tensor,
    dtype: torch.dtype,
    prefactor: float,
    iterate: Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor],
) -> None:
    """Normalizes x (..., r, c) slice by slice, applies `iterate`, writes the result to `out`.

    Neither x nor out is copied as a whole, whatever their strides.

    Args:
        x: Input, not modified.
        out: Receives the result, rounded from `dtype` to its own.
        dtype: Dtype of the iterates.
        prefactor: The iteration starts at x / (prefactor * ||x||_F).
        iterate: (G, R, C) in `dtype` -> (G, R, C) in `dtype`; may overwrite its first argument. The
            second is None, or where the result may lie: then it is what may be returned.
    """

    def run(pieces: Sequence[torch.Tensor], shape: Slice, last: torch.Tensor | None):
        # The start has no name here, nor a place in a tuple: it ends when `iterate` lets it go.
        return iterate(normalized(pieces, shape, dtype, prefactor), last)

    with without_autocast(x.device), ieee_float32(x.device, dtype):
        by_slices(x, out, dtype, run)


def by_slices(
    x: torch.Tensor,
    out: torch.Tensor,
    dtype: torch.dtype,
    run: Callable[[Sequence[torch.Tensor], Slice, torch.Tensor | None], torch.Tensor],
) -> None:
    """Writes to `out` what `run` makes of each slice of x (..., r, c).

    Args:
        x: Input, not modified.
        out: Receives the results, rounded from `dtype` to its own.
        dtype: Dtype of the iterates.
        run: The slice's pieces (b, r, c) of x, its shape, and None or where the result may lie ->
            (G, R, C) in `dtype`.
    """
    if x.numel() == 0:
        return
    r, c = x.shape[-2:]
    direct = out.dtype == dtype and out.ndim <= 3
    shape = slice_for(r, c, dtype, x.device, direct)
    count = shape.at_once(x.shape[:-2].numel())
    targets = _taken(out, count)
    for sources in _taken(x, count):
        places = next(targets)
        last = None if shape.full else _written_directly(places, shape, dtype)
        result = run(sources, shape, last)
        if result is last:
            continue
        first = 0
        for place in places:
            _copy(result[first : first + len(place)], place)
            first += len(place)


def _written_directly(
    places: Sequence[torch.Tensor], shape: Slice, dtype: torch.dtype
) -> torch.Tensor | None:
    """The one place of a slice's result, if the last product can write there."""
    place = places[0]
    fits = len(places) == 1 and place.shape[1:] == shape.sides and place.dtype == dtype
    return place if fits and may_write(place) else None


def _copy(result: torch.Tensor, place: torch.Tensor) -> None:
    """The upper left of result (b, R, C) -> place (b, r, c)."""
    if crop_serves(result, place):
        ops.crop(result, place)
    else:
        r, c = place.shape[1:]
        place.copy_(result[:, :r, :c])


def normalized(
    pieces: Sequence[torch.Tensor],  # each (b, r, c), together at most shape.matrices, G if full
    shape: Slice,
    dtype: torch.dtype,
    prefactor: float,
) -> torch.Tensor:
    """The pieces in a contiguous (G, R, C) buffer of zeros, each matrix of norm 1 / prefactor.

    The maths is float32 (float64 for a float64 input or iterate) and rounds to `dtype` last.
    Dividing by the largest element first keeps the sum of squares in range for any finite input,
    subnormal ones included. max(., tiny) leaves zero matrices zero without biasing any other. An
    inf or NaN makes its whole matrix NaN and no other. On CUDA the compiled op does all of it.
    """
    x, (r, c) = pieces[0], pieces[0].shape[-2:]
    wide = torch.float64 in (x.dtype, dtype)
    given, count = sum(map(len, pieces)), shape.held(pieces)
    if runs_compiled(x.device, x.dtype, dtype):
        out = x.new_empty((count, *shape.sides), dtype=dtype)
        ops.normalize(list(pieces), out, prefactor)
        return out
    filled = given == count and (r, c) == shape.sides
    staged = (x.new_empty if filled else x.new_zeros)(
        (count, *shape.sides), dtype=torch.float64 if wide else torch.float32
    )
    first = 0
    for piece in pieces:
        staged[first : first + len(piece), :r, :c].copy_(piece)
        first += len(piece)
    tiny = torch.finfo(staged.dtype).tiny
    staged.div_(matrix_norm(staged, float("inf")).clamp_min_(tiny))
    staged.div_(matrix_norm(staged).clamp_min_(tiny).mul_(prefactor))
    return staged.to(dtype)


def _taken(x: torch.Tensor, count: int) -> Iterator[list[torch.Tensor]]:
    """Views (b, r, c) that together hold the next `count` matrices of x (..., r, c), to its end."""
    if x.ndim == 3 and x.shape[0] <= count:  # as most batches of a step: no view costs the host
        yield [x]
        return
    taken, free = [], count
    for view in _views(x):
        while len(view):
            taken.append(view[:free])
            view = view[free:]
            free -= len(taken[-1])
            if free == 0:
                yield taken
                taken, free = [], count
    if taken:
        yield taken


def _views(x: torch.Tensor) -> Iterator[torch.Tensor]:
    """Views (b, r, c) of x (..., r, c) in order: one if a single stride walks the batch."""
    if x.ndim == 2:
        yield x.unsqueeze(0)
    elif x.ndim == 3:
        yield x
    elif _walkable(x):
        yield x.view(-1, *x.shape[-2:])
    else:
        for part in x:
            yield from _views(part)


def _walkable(x: torch.Tensor) -> bool:
    """Whether one stride walks the leading dimensions of x (..., r, c)."""
    leading = [(n, s) for n, s in zip(x.shape[:-2], x.stride()[:-2], strict=True) if n > 1]
    return all(outer == n * inner for (_, outer), (n, inner) in pairwise(leading))
