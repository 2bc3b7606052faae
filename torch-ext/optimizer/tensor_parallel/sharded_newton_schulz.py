"""Newton-Schulz on one matrix whose rows lie on several ranks.

X is tall or square, n its columns; rank r has the rows X_r. With A = X^T X = sum X_r^T X_r every
method of `orthogonalize` is X <- X p(A), of which each rank computes its rows. What is shared out
beside that is p(A):

gram_ar  every rank has A and computes p(A): an all-reduce of n^2 for each A
rs_ag    rank r has rows of A and of every power of it: a reduce-scatter, and an all-gather for each
         power, but none of the work is done twice

Partial Gram matrices travel in the dtype of the iterates and are added in float32, for both
schedules: an exchange, a sum, one rounding. A wide or square matrix is exchanged for the rows of
its transpose, and back. A square one needs it for its bits alone: an owner takes X X^T of it, and
in half precision two results by different Gram matrices are as far apart as independent ones.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import dispatch
from .._ops import ops
from ..kernels.autocast import without_autocast
from ..kernels.products.matmul_add import by_tma
from ..orthogonalize import orthogonalize, polar_express_coefficients
from ..orthogonalize.arguments import check_dtype, dtype_for
from ..orthogonalize.arguments import schedule as coefficients_for
from ..orthogonalize.choose import H200_RATE, chosen_method
from ..orthogonalize.coefficients import Rows, checked_steps, rescaled
from ..orthogonalize.gram_newton_schulz import accumulated, restart_positions
from ..orthogonalize.gram_polynomial import START_NORM
from ..orthogonalize.polynomials import POLYNOMIALS, SAFETY, Square
from ..orthogonalize.products import (
    HALF_PRECISION,
    batch_is_free,
    ieee_float32,
    in_float32,
    runs_symmetric,
    square,
    square_diagonal,
    symmetric,
)
from . import collectives

SCHEDULES = ("auto", "rs_ag", "gram_ar")
AUTO_TILE = -1
# Bytes per second that a rank sends in an all-to-all or an all-gather of 64 to 256 MiB on 8 H200 of
# one host, and the time that a small collective takes anyway; both measured, in round numbers.
WIRE = 300e9
LATENCY = 40e-6
EFFICIENCY = 0.85  # of the rate of dense products, on blocks of rows
ALIGNMENT = 8  # elements of a row that the compiled products ask for


class Ranks(Protocol):
    """What an iteration needs of the others; `Collectives` has it of a process group."""

    rank: int
    world: int

    def total(self, value: Tensor) -> Tensor:
        """The sum of every rank's value."""

    def reduced_rows(self, partial: Tensor) -> Tensor:
        """This rank's rows (n / W, n) of the sum of every rank's (n, n), in float32 or wider."""

    def gathered(self, rows: Tensor) -> Tensor:
        """Every rank's rows (n / W, n), one below the other."""

    def exchanged(self, going: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Elements for every rank in its turn, for those of every rank; how many, each way."""


@dataclass(frozen=True)
class Collectives:
    """`Ranks` of a process group."""

    group: str
    rank: int
    world: int

    def total(self, value: Tensor) -> Tensor:
        return collectives.all_reduce(value, self.group)

    def reduced_rows(self, partial: Tensor) -> Tensor:
        wide = torch.promote_types(partial.dtype, torch.float32)
        return collectives.summed(collectives.exchange_rows(partial, self.group), dtype=wide)

    def gathered(self, rows: Tensor) -> Tensor:
        return collectives.gather_rows(rows, self.group)

    def exchanged(self, going: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        return collectives.exchange_uneven(going, sent, received, self.group)


@torch.no_grad()
def sharded_newton_schulz(
    x_shard: Tensor,
    group: Any = None,
    schedule: str = "auto",
    *,
    method: str = "auto",
    steps: int = 5,
    dtype: torch.dtype | None = None,
    rows: Sequence[int] | None = None,
) -> Tensor:
    """Approximate polar factor of one matrix whose rows lie on the ranks of a group.

    For a matrix too large for one owner, or one that tensor parallelism has cut anyway; an owner of
    whole matrices, with others for the other ranks, has more throughput. Every rank must call it.
    The same polynomials as `orthogonalize` on the whole matrix, in another order of rounding.

    Args:
        x_shard: (m_r, n), this rank's rows in the order of the ranks; never modified.
        group: ProcessGroup, its name, or None for all ranks.
        schedule: "gram_ar" computes the polynomial of the Gram matrix on every rank, "rs_ag" shares
            it out and communicates more; "auto" takes what a model of 8 H200 says is faster.
        method: As for `orthogonalize`. "rs_ag" has no Gram form of Polar Express and takes the
            direct one.
        steps: As for `orthogonalize`.
        dtype: Dtype of the iterates and of the result, as for `orthogonalize`.
        rows: Rows of every rank, given on all ranks or on none. None asks them, which waits for
            the device: pass them where that costs, and in CUDA graphs.

    Returns:
        (m_r, n) in `dtype`: this rank's rows of U V^T.

    Raises:
        TypeError: x_shard, steps or group is of a wrong kind.
        ValueError: Shapes, options or `rows` do not fit, or the ranks' columns differ.
    """
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule must be one of {SCHEDULES}, got {schedule!r}")
    if not isinstance(x_shard, Tensor) or not x_shard.is_floating_point():
        raise TypeError(f"x_shard must be a floating-point tensor, got {type(x_shard).__name__}")
    if x_shard.ndim != 2:
        raise ValueError(
            f"x_shard must be rows of one matrix (m_r, n), got shape {tuple(x_shard.shape)}"
        )
    dtype = dtype_for(x_shard.dtype, x_shard.device) if dtype is None else dtype
    check_dtype(dtype)
    checked_steps(steps)
    name = collectives.name_of(group)
    process_group = collectives.resolved(name)
    ranks = Collectives(name, process_group.rank(), process_group.size())
    rows = _checked_rows(rows, x_shard, ranks)
    if ranks.world == 1:
        return orthogonalize(x_shard, method, steps, dtype)
    m, n = sum(rows), x_shard.shape[1]
    if m == 0 or n == 0:
        return x_shard.new_empty(x_shard.shape, dtype=dtype)
    picked = chosen_method(m, n, dtype, x_shard.device, steps, method)
    with without_autocast(x_shard.device), ieee_float32(x_shard.device, dtype):
        return of_rows(x_shard, rows, picked, steps, schedule, dtype, ranks)


def of_rows(
    x: Tensor,  # (m_r, n), not normalized
    rows: Sequence[int],  # of every rank
    method: str,
    steps: int,
    schedule: str,
    dtype: torch.dtype,
    ranks: Ranks,
) -> Tensor:
    """`sharded_newton_schulz` of arguments that are decided."""
    m, n = sum(rows), x.shape[1]
    if schedule == "auto":
        schedule = faster(method, m, n, ranks.world, dtype)
    x = normalized(x, dtype, ranks)
    if m > n:
        return iterated(x, method, steps, schedule, ranks).contiguous()
    columns = [len(part) for part in torch.arange(n).tensor_split(ranks.world)]
    x = _columns_for_rows(x, rows, columns, ranks)
    x = iterated(x.t(), method, steps, schedule, ranks)
    return _rows_for_columns(x.t(), rows, columns, ranks)


def _columns_for_rows(
    x: Tensor, rows: Sequence[int], columns: Sequence[int], ranks: Ranks
) -> Tensor:
    """This rank's columns of X, (m, `columns` of it), of every rank's rows x."""
    m, mine = sum(rows), columns[ranks.rank]
    sent, received = [x.shape[0] * c for c in columns], [r * mine for r in rows]
    going = x.new_empty(x.numel())
    widths = Counter(columns)  # two at most, and ranks of the same one lie side by side
    ends = [width * count for width, count in widths.items()]
    places, parts = going.split([x.shape[0] * end for end in ends]), x.split(ends, dim=1)
    for place, part, (width, count) in zip(places, parts, widths.items(), strict=True):
        blocks = part.unflatten(1, (count, width)).transpose(0, 1)
        place.view(blocks.shape).copy_(blocks)
    return ranks.exchanged(going, sent, received).view(m, mine)


def _rows_for_columns(
    x: Tensor, rows: Sequence[int], columns: Sequence[int], ranks: Ranks
) -> Tensor:
    """This rank's rows of X, (`rows` of it, n), of every rank's columns x."""
    mine = rows[ranks.rank]
    sent, received = [r * x.shape[1] for r in rows], [mine * c for c in columns]
    coming = ranks.exchanged(x.reshape(-1), sent, received).split(received)
    parts = zip(coming, columns, strict=True)
    return torch.cat([part.view(mine, c) for part, c in parts], dim=1)


def _checked_rows(rows: Sequence[int] | None, x: Tensor, ranks: Collectives) -> list[int]:
    """Rows of every rank, which all of them know: they decide which collectives follow."""
    if rows is None and ranks.world > 1:
        if x.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError(
                "rows is None, which asks all ranks for theirs, and that cannot be captured in a "
                "CUDA graph; pass rows, the number of every rank"
            )
        mine = torch.tensor([[*x.shape]], device=x.device)
        shapes = collectives.gather_rows(mine, ranks.group).tolist()
        columns = [n for _, n in shapes]
        if any(n != columns[0] for n in columns):
            raise ValueError(
                f"x_shard must have one number of columns on all ranks, got {columns}; shards are "
                "rows of one matrix"
            )
        return [m for m, _ in shapes]
    if rows is None:
        return [x.shape[0]]
    if not isinstance(rows, Sequence):
        raise TypeError(f"rows must be a sequence of integers or None, got {rows!r}")
    if len(rows) != ranks.world or rows[ranks.rank] != x.shape[0]:
        raise ValueError(
            f"rows must have one entry per rank, {ranks.world}, with {x.shape[0]} for this one "
            f"({ranks.rank}), got {list(rows)}"
        )
    return [*rows]


def normalized(x: Tensor, dtype: torch.dtype, ranks: Ranks) -> Tensor:
    """The rows of X, scaled so that X has the norm START_NORM, or is zero; NaN stays NaN."""
    norm = ranks.total(_sum_of_squares(x)).sqrt()
    wide = torch.float64 if torch.float64 in (x.dtype, dtype) else torch.float32
    # Twice its root: the factor of subnormal numbers is beyond float32.
    root = torch.where(norm == 0, norm, START_NORM / norm).sqrt().to(wide)
    scaled = x.to(wide) * root
    return torch.mul(scaled, root, out=torch.empty_like(scaled, dtype=dtype))


def _sum_of_squares(x: Tensor) -> Tensor:
    """Of all elements, in float64: squares of float32 are beyond its range."""
    if _by_triton(x.device):
        from .squares_triton import sum_of_squares

        return sum_of_squares(x)
    return torch.linalg.vector_norm(x, dtype=torch.float64).square()


@functools.cache
def _by_triton(device: torch.device) -> bool:
    """Whether sums of squares on a device are Triton's, played without a C compiler."""
    compiled = device.type == "cuda" and dispatch.has_compiled("launch_plan", "CUDA")
    return compiled and dispatch.has_triton()


def iterated(
    x: Tensor,  # (m_r, n) of norm START_NORM
    method: str,
    steps: int,
    schedule: str,
    ranks: Ranks,
) -> Tensor:
    """The rows of a method's result, of rows of a tall or square X (m, n)."""
    n = x.shape[1]
    # Blocks of rows of n x n matrices are equal, and rows such as compiled products take. Zero
    # columns stay zero.
    unit = ranks.world * (ALIGNMENT if x.is_cuda else 1)
    empty = int(len(x) == 0)  # gets a row of zeros, which change no sum
    padding = (0, -n % unit, 0, empty)
    padded = (torch.nn.functional.pad(x, padding) if any(padding) else x).unsqueeze(
        0
    )  # (1, m_r, N)
    if not by_tma(padded):
        padded = padded.clone(memory_format=torch.contiguous_format)
    powers = (_Replicated if schedule == "gram_ar" else _RowBlocks)(ranks)
    if method == "gram_polynomial":
        out = _polynomials(padded, powers)
    elif method == "gram_newton_schulz" and schedule == "gram_ar":
        out = _gram_newton_schulz(padded, steps, powers)
    else:
        out = _direct(padded, *_rows_of(method, steps), powers)
    return out[0, : len(x), :n]


def _rows_of(method: str, steps: int) -> tuple[Rows, float]:
    name = "keller_jordan" if method == "newton_schulz" else "polar_express"
    return coefficients_for(name, steps)


def _first_rescaled(rows: Rows, prefactor: float) -> Rows:
    """The schedule for an X of norm START_NORM.

    A start of norm 1 would leave partial Gram matrices of float16 among its subnormal numbers.
    """
    return rescaled(rows[:1], START_NORM * prefactor) + rows[1:]


def _direct(x: Tensor, rows: Rows, prefactor: float, powers: _Powers) -> Tensor:
    """X <- a X + X (b A + c A^2), one (a, b, c) per step."""
    for a, b, c in _first_rescaled(rows, prefactor):
        A = powers.gram(x)
        P = powers.square(A, A, Square(0, c, b, 0.0)) if c else powers.scaled(A, b)
        x = _product(x, powers.whole(P), x, beta=a)
    return x


def _gram_newton_schulz(x: Tensor, steps: int, powers: _Replicated) -> Tensor:
    """Runs of steps on the Gram matrix alone; X is multiplied where a run ends."""
    rows, prefactor = coefficients_for("polar_express", steps)
    restarts = restart_positions(polar_express_coefficients(steps), x.dtype)
    rows, ends = _first_rescaled(rows, prefactor), [*restarts, steps]
    for first, end in zip([0, *restarts], ends, strict=True):
        x = _product(x, accumulated(powers.gram(x), rows[first:end], tall=True))
    return x


def _polynomials(x: Tensor, powers: _Powers) -> Tensor:
    """The two polynomials of `gram_polynomial`, as squares."""
    for number, squares in enumerate(POLYNOMIALS):
        if number == 0:
            R, scale = powers.bounded_gram(x, SAFETY**2)
        else:
            R = powers.gram(x)
        terms = {0: R}
        for j, step in enumerate(squares):
            terms[j + 1] = powers.square(terms[j], terms[step.operand], step)
            needed = {later.operand for later in squares[j + 1 :]}
            terms = {i: term for i, term in terms.items() if i in needed or i == j + 1}
        M = powers.whole(terms[len(squares)])
        # The first M is of R / bound: X has to be divided by the root of that, too.
        x = _product(x, M, scale=scale if number == 0 else None)
    return x


class _Powers:
    """Polynomials of a Gram matrix: what both schedules share, its reduction."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks

    def gram(self, x: Tensor) -> Any:
        """X^T X of all rows x (1, m_r, n), rounded once."""
        return self.of_rows(self._gram_rows(x).to(x.dtype))

    def bounded_gram(self, x: Tensor, safety: float) -> tuple[Any, Tensor]:
        """X^T X / bound and bound^-1/2; bound, safety times its norm, is above all eigenvalues."""
        rows = self._gram_rows(x)
        norm = self.ranks.total(_sum_of_squares(rows))
        # A trace of START_NORM^2 keeps the norm above 1 for any n below 10^7; zeros stay zero.
        bound = norm.sqrt().clamp_min(1.0).mul(safety).to(rows.dtype)
        divided = torch.div(rows, bound, out=torch.empty_like(rows, dtype=x.dtype))
        return self.of_rows(divided), bound.rsqrt()

    def _gram_rows(self, x: Tensor) -> Tensor:
        """This rank's rows (1, n / W, n) of X^T X, in float32 or wider."""
        return self.ranks.reduced_rows(partial_gram(x)[0]).unsqueeze(0)

    def of_rows(self, rows: Tensor) -> Any:
        """A matrix, of this rank's rows of it."""
        raise NotImplementedError

    def square(self, M: Any, C: Any, step: Square) -> Any:
        """alpha M M + beta C + delta I."""
        raise NotImplementedError

    def scaled(self, M: Any, factor: float) -> Any:
        """factor M."""
        raise NotImplementedError

    def whole(self, M: Any) -> Tensor:
        """All of a matrix, (1, n, n)."""
        raise NotImplementedError


class _Replicated(_Powers):
    """Every rank has every matrix, (1, n, n); products by halves where those are faster."""

    def of_rows(self, rows: Tensor) -> Tensor:
        return self.ranks.gathered(rows[0]).unsqueeze(0)

    def square(self, M: Tensor, C: Tensor, step: Square) -> Tensor:
        return square(M, C, alpha=step.alpha, beta=step.beta, delta=step.delta)

    def scaled(self, M: Tensor, factor: float) -> Tensor:
        return (in_float32(M) * factor).to(M.dtype)

    def whole(self, M: Tensor) -> Tensor:
        return M


class _RowBlocks(_Powers):
    """Every rank has its rows (1, n / W, n) of every matrix, and gathers those it multiplies by."""

    def of_rows(self, rows: Tensor) -> Tensor:
        return rows

    def square(self, M: Tensor, C: Tensor, step: Square) -> Tensor:
        out = _product(M, self.whole(M), C, alpha=step.alpha, beta=step.beta)
        if step.delta:
            write = square_diagonal
            if out.dtype in HALF_PRECISION and _by_triton(out.device):
                from .squares_triton import square_diagonal as write
            factors = {"alpha": step.alpha, "beta": step.beta, "delta": step.delta}
            write(M[0], self._diagonal(C), self._diagonal(out), **factors)
        return out

    def _diagonal(self, M: Tensor) -> Tensor:
        """What this rank's rows (1, n / W, n) have of it, a view."""
        return M[0].diagonal(offset=self.ranks.rank * M.shape[1])

    def scaled(self, M: Tensor, factor: float) -> Tensor:
        return (in_float32(M) * factor).to(M.dtype)

    def whole(self, M: Tensor) -> Tensor:
        return self.ranks.gathered(M[0]).unsqueeze(0)


def partial_gram(x: Tensor) -> Tensor:
    """X_r^T X_r of this rank's rows (1, m_r, n), by halves where that is faster: (1, n, n)."""
    n, half = x.shape[-1], x.dtype in HALF_PRECISION
    if batch_is_free(x.dtype, x.device) or (not half and runs_symmetric(n, x.dtype, x.device)):
        return symmetric(x.mT, x.mT)
    return torch.bmm(x.mT, x)


def _product(
    A: Tensor,
    B: Tensor,
    C: Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    scale: Tensor | None = None,
) -> Tensor:
    """scale (alpha A B + beta C) of A and C (1, m, k), B (1, k, k) and one number.

    The compiled kernel rounds once and writes in the order of A, which is that of C; torch's rounds
    before the scale, too.
    """
    if batch_is_free(A.dtype, A.device):
        out = torch.empty_like(A)
        factor = None if scale is None else scale.reshape(1)
        ops.matmul_add(A, B, C, out, alpha, beta, AUTO_TILE, factor)
        return out
    out = torch.bmm(A, B) if C is None else torch.baddbmm(C, A, B, beta=beta, alpha=alpha)
    return out if scale is None else (in_float32(out) * scale).to(out.dtype)


def faster(method: str, m: int, n: int, world: int, dtype: torch.dtype) -> str:
    """The schedule with the smaller `predicted_s`; gram_ar where they are equal."""
    return min(("gram_ar", "rs_ag"), key=lambda s: predicted_s(s, method, m, n, world, dtype))


def predicted_s(
    schedule: str, method: str, m: int, n: int, world: int, dtype: torch.dtype
) -> float:
    """Seconds of five steps on so many H200 of one host, without overlap: products and bytes.

    The same number on every rank. Half-precision rates; in other dtypes it compares well enough.
    """
    turns = 0.0
    if m <= n:
        turns = 2 * (m * n * dtype.itemsize * (world - 1) / world**2 / WIRE + LATENCY)
        m, n = n, m
    grams, squares = {"gram_polynomial": (2, 10), "gram_newton_schulz": (2, 12)}.get(method, (5, 5))
    if method == "gram_newton_schulz" and schedule == "rs_ag":
        grams, squares = 5, 5
    share = grams * 3 * m * n * n / world  # a Gram matrix by halves, and X times a polynomial
    piece = n * n * dtype.itemsize * (world - 1) / world / WIRE + LATENCY
    if schedule == "gram_ar":
        flop, pieces = share + squares * n**3, 2 * grams
    else:
        flop, pieces = share + squares * 2 * n**3 / world, 2 * grams + squares
    return flop / (EFFICIENCY * H200_RATE) + pieces * piece + turns
