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
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._ops import add_op_namespace_prefix, ops
from .arguments import check_dtype, check_input, output_for
from .batch import walk
from .coefficients import CoefficientSet, Rows
from .constants import dtype_for, restarts_for, schedule
from .newton_schulz import newton_schulz_step
from .ops import call, serve_vmap
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
