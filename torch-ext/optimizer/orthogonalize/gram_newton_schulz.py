"""Gram-Newton-Schulz: the same polynomials iterated on R = X X^T, X touched only at restarts.

    R = X X^T;  Q = none
    each step:  at a restart  X = Q X,  R = X X^T,  Q = none
                Z = b R + c R^2
                Q = Z + a I                      (first of a run)    or    Q = a Q + Z Q
                R <- (Z + a I) R (Z + a I)       (if a step without restart follows)
    return Q X

R, Z and Q are polynomials of one symmetric matrix and commute, but only until they are rounded.
Q must therefore grow on the left, Z Q and not Q Z, in full and not mirrored from a triangle: then
Q X is exactly what the direct iteration with these rounded Z would give, and R follows it. The
published order Q Z loses a factor of 3 to 6 (float16, spectra with small singular values). For a
tall X, which is multiplied from the right, it is the other way round. R, Z and R Z may be mirrored:
that changes the error by less than a tenth, while a mirrored Q doubles it.

With one restart of five steps 8 m^2 n + 28 m^3 FLOP for sides m <= n, against 20 m^2 n + 10 m^3.

Restarts. Rounding makes the small eigenvalues of R = X X^T slightly negative, and the update
r <- r (a + b r + c r^2)^2 drives a negative eigenvalue away from 0 by a^2 per step. A restart
applies the accumulated Q to X and recomputes R, which resets them. The criterion: shift every
eigenvalue down by what rounding to the iterate dtype does, and take the worst condition number
that Q has after any step.

Source: the shift and the search over sets follow the restart analysis of
https://github.com/Dao-AILab/gram-newton-schulz; the score here is cond(Q), not max |Q|.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache

import torch

from .._ops import add_op_namespace_prefix, ops
from .arguments import call, check_dtype, check_input, dtype_for, output_for, schedule, serve_vmap
from .coefficients import CoefficientSet, Row, Rows
from .newton_schulz import newton_schulz_step
from .products import (
    add_symmetric,
    apply_gram_side,
    dense,
    folded_quadratic,
    folds_diagonal,
    gram,
    in_float32,
    quadratic,
    symmetric,
)
from .slices import walk

# Most negative eigenvalue of a rounded Gram matrix, in units of the dtype's epsilon: measured as
# -4e-4 in float16 and -3.2e-3 in bfloat16 on matrices of Frobenius norm 1.
NEGATIVE_EIGENVALUE_EPS = 0.4096
# Rounding errors of size eps grow by up to cond(Q). The default set keeps eps * cond(Q) below this:
# float16 errs by 0.3 to 3 % at cond 119 and by 20 to 30 % at cond 679 (log spectra to 1e-5).
AMPLIFIED_EPS = 0.2
# Wider dtypes could do without restarts; one costs little and keeps them near the direct iteration.
MAX_CONDITION = 200.0
# 1000 points per decade give every published condition number to its printed digits; below 1e-5
# the squares vanish beside any shift and Q is constant.
SINGULAR_VALUES = tuple(10 ** (-k / 1000) for k in range(5 * 1000 + 1))


def _gram_newton_schulz(
    x: torch.Tensor,  # (..., r, c)
    out: torch.Tensor,  # (..., r, c)
    coefficients: Sequence[float],  # (3 * steps,)
    prefactor: float,
    restarts: Sequence[int],
    dtype: torch.dtype,
) -> None:
    rows = tuple(zip(*[iter(coefficients)] * 3, strict=True))
    ends = [*restarts, len(rows)]
    runs = [rows[first:end] for first, end in zip([0, *restarts], ends, strict=True)]

    def iterate(x: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
        for run in runs:
            into = last if run is runs[-1] else None
            # A run of one step has nothing to accumulate; as a direct step it rounds less.
            if len(run) == 1:
                x = newton_schulz_step(x, run[0], out=into)
            else:
                tall = x.shape[-2] > x.shape[-1]
                x = apply_gram_side(x, accumulated(gram(x), run, tall=tall), out=into)
        return x

    walk(x, out, dtype, prefactor, iterate)


serve_vmap(
    torch.library.custom_op(
        add_op_namespace_prefix("gram_newton_schulz"),
        _gram_newton_schulz,
        mutates_args=("out",),
        schema="(Tensor x, Tensor(a!) out, float[] coefficients, float prefactor, int[] restarts, "
        "ScalarType dtype) -> ()",
    )
)


def accumulated(R: torch.Tensor, rows: Rows, *, tall: bool) -> torch.Tensor:
    """Q (G, m, m) from the Gram matrix R of X: `rows` take X to Q X, a tall X to X Q."""
    if folds_diagonal(R):
        return _accumulated_folded(R, rows, tall=tall)
    Q = None
    for i, (a, b, c) in enumerate(rows):
        Z = quadratic(R, b, c)
        if i < len(rows) - 1:
            RZ = add_symmetric(R, R, Z, beta=a)
            R = add_symmetric(RZ, Z, RZ, beta=a)
        if Q is None:
            Q = Z
            diagonal = Q.diagonal(dim1=-2, dim2=-1)
            diagonal.copy_(in_float32(diagonal) + a)
        else:
            Q = dense(*((Q, Z) if tall else (Z, Q)), Q, beta=a)
    return Q


def _accumulated_folded(R: torch.Tensor, rows: Rows, *, tall: bool) -> torch.Tensor:
    """`accumulated` with Z = a I + b R + c R^2; all but the products with Q are symmetric."""
    Q = None
    for i, (a, b, c) in enumerate(rows):
        Z = folded_quadratic(R, a, b, c)
        if i < len(rows) - 1:
            R = symmetric(Z, symmetric(R, Z))
        Q = Z if Q is None else dense(*((Q, Z) if tall else (Z, Q)))
    return Q


@torch.no_grad()
def gram_newton_schulz(
    x: torch.Tensor,
    steps: int = 5,
    coefficients: str | CoefficientSet | Sequence[Sequence[float]] | None = None,
    restarts: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Approximate polar factor of every matrix of x, iterating on its Gram matrix.

    Cheaper than `newton_schulz` with the same rows from an aspect ratio of 1.5, and up to twice its
    error: rounding in the Gram matrix is amplified until the next restart.

    Args:
        x: (..., m, n), as for `newton_schulz`.
        steps: Number of iterations.
        coefficients: As for `newton_schulz`; None: the Polar Express schedule derived for `steps`.
        restarts: Step indices, each in 1 .. steps - 1, before which the Gram matrix is rebuilt
            from X. None: the best positions for these coefficients and dtype, found once.
        dtype: Dtype of the iterates and the result, as for `newton_schulz`.
        out: Receives the result, as for `newton_schulz`.

    Returns:
        (..., m, n) in `dtype`, or `out`.

    Raises:
        TypeError: As `newton_schulz`, or restarts is not a sequence of integers.
        ValueError: As `newton_schulz`, or a restart outside the schedule.

    Source: Dao-AILab, https://github.com/Dao-AILab/gram-newton-schulz.
    """
    check_input(x)
    rows, prefactor = schedule("polar_express" if coefficients is None else coefficients, steps)
    dtype = dtype_for(x.dtype, x.device) if dtype is None else dtype
    check_dtype(dtype)
    positions = restarts_for(rows, dtype, restarts)
    out = output_for(x, out, dtype)
    flat = [v for row in rows for v in row]
    call(
        ops.gram_newton_schulz,
        _gram_newton_schulz,
        x.detach(),
        out,
        flat,
        prefactor,
        positions,
        dtype,
    )
    return out


@torch.compiler.assume_constant_result
def restarts_for(
    rows: Rows, dtype: torch.dtype, restarts: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The given restart positions, checked, or the best ones for these rows in this dtype."""
    if restarts is None:
        return restart_positions(rows, dtype)
    return checked_positions(restarts, len(rows))


@lru_cache(maxsize=256, typed=True)
def restart_positions(
    coefficients: Rows, dtype: torch.dtype, restarts: int | None = None
) -> tuple[int, ...]:
    """The steps before which the Gram matrix is rebuilt, for a schedule in a dtype.

    Args:
        coefficients: The schedule, a tuple of rows (a, b, c).
        dtype: Dtype of the iterates.
        restarts: How many; None takes the fewest whose best set keeps cond(Q) small enough for the
            dtype, or every position if none does (bfloat16, as a rule).

    Returns:
        Increasing step indices in 1 .. len(coefficients) - 1; the set of the smallest
        `worst_condition`.

    Raises:
        ValueError: restarts is negative, exceeds len(coefficients) - 1, or is too small for any
            set to stay finite.
    """
    most = len(coefficients) - 1
    shift = _eigenvalue_shift(dtype)
    if restarts is None:
        limit = min(MAX_CONDITION, AMPLIFIED_EPS / torch.finfo(dtype).eps)
        for count in range(most):
            found = _best_positions(coefficients, shift, count, limit)
            if found is not None:
                return found
        return tuple(range(1, most + 1))
    if isinstance(restarts, bool) or not isinstance(restarts, int) or not 0 <= restarts <= most:
        raise ValueError(
            f"restarts={restarts!r}: a schedule of {len(coefficients)} steps has {most} positions "
            f"to restart at; pass a number in 0 .. {most} or None"
        )
    found = () if restarts == 0 else _best_positions(coefficients, shift, restarts, math.inf)
    if found is None:
        raise ValueError(
            f"restarts={restarts} leaves every choice of positions unstable in {dtype}; pass more"
        )
    return found


def worst_condition(coefficients: Rows, dtype: torch.dtype, positions: Sequence[int]) -> float:
    """Largest cond(Q) after any step when every eigenvalue of a rounded Gram is too small."""
    shift = _eigenvalue_shift(dtype)
    sigma = list(SINGULAR_VALUES)
    q, r = _fresh(sigma, shift)
    worst = 0.0
    for i, row in enumerate(coefficients):
        if i in positions and i > 0:
            sigma = [s * v for s, v in zip(sigma, q, strict=True)]
            q, r = _fresh(sigma, shift)
        q, r = _gram_step(q, r, row)
        worst = max(worst, _condition(q))
    return worst


def checked_positions(restarts: Sequence[int], steps: int) -> tuple[int, ...]:
    """Increasing restart positions; TypeError or ValueError unless they lie in 1 .. steps - 1."""
    if isinstance(restarts, (str, bytes)) or not isinstance(restarts, Iterable):
        raise TypeError(
            f"restarts must be a sequence of step indices or None, got {restarts!r}; "
            f"pass (2,) to restart before the third step"
        )
    positions = tuple(restarts)
    if any(isinstance(p, bool) or not isinstance(p, int) for p in positions):
        raise TypeError(f"restarts must hold integers, got {positions!r}")
    if any(not 1 <= p < steps for p in positions) or len(set(positions)) < len(positions):
        raise ValueError(
            f"restarts={positions!r} must be distinct step indices in 1 .. {steps - 1} "
            f"for a schedule of {steps} steps"
        )
    return tuple(sorted(positions))


def _best_positions(rows: Rows, shift: float, count: int, limit: float) -> tuple[int, ...] | None:
    """The `count` positions of the smallest worst condition at or below `limit`, if any.

    Branch and bound over the first restart, then the next: a run of steps is abandoned as soon as
    its Q is worse than the best complete set. Exact, and a few dozen steps even for 30 rows.
    """
    best: tuple[float, tuple[int, ...] | None] = (math.nextafter(limit, math.inf), None)

    def extend(sigma: list[float], worst: float, positions: tuple[int, ...]) -> None:
        nonlocal best
        q, r = _fresh(sigma, shift)
        left = count - len(positions)
        for i in range(positions[-1] if positions else 0, len(rows)):
            q, r = _gram_step(q, r, rows[i])
            worst = max(worst, _condition(q))
            if worst >= best[0]:
                return
            if left and i + left < len(rows):
                after = [s * v for s, v in zip(sigma, q, strict=True)]
                extend(after, worst, (*positions, i + 1))
        if not left:
            best = worst, positions

    extend(list(SINGULAR_VALUES), 0.0, ())
    return best[1]


def _fresh(sigma: list[float], shift: float) -> tuple[list[float], list[float]]:
    """(Q, R) at the start and after a restart: the identity, and the rounded Gram matrix of X."""
    return [1.0] * len(sigma), [s * s + shift for s in sigma]


def _gram_step(q: list[float], r: list[float], row: Row) -> tuple[list[float], list[float]]:
    """(Q, R) after one step, on eigenvalues."""
    a, b, c = row
    z = [a + (b + c * v) * v for v in r]
    return [u * v for u, v in zip(q, z, strict=True)], [
        u * v * v for u, v in zip(r, z, strict=True)
    ]


def _condition(q: list[float]) -> float:
    """max |q| / min |q|; inf where a value is 0, infinite or NaN."""
    low, high = math.inf, 0.0
    for v in q:
        size = abs(v)
        if not size < 1e150:  # beyond saving; the next squares would overflow
            return math.inf
        low, high = min(low, size), max(high, size)
    return high / low if low > 0 else math.inf


def _eigenvalue_shift(dtype: torch.dtype) -> float:
    return -NEGATIVE_EIGENVALUE_EPS * torch.finfo(dtype).eps
