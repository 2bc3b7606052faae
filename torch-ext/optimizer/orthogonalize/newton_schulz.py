"""Newton-Schulz: X <- a X + (b A + c A^2) X with A = X X^T, one (a, b, c) per step.

Per step and matrix 4 m^2 n + 2 m^3 FLOP for sides m <= n, 3 m^2 n + m^3 where symmetric products
are computed by halves; three products, each accumulated in float32 (float64 for float64 iterates)
and rounded once, with the scalars inside the accumulation.

Polar Express is the same loop with a schedule that is derived for the step count asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._ops import add_op_namespace_prefix, ops
from .arguments import (
    call,
    check_dtype,
    check_input,
    dtype_for,
    output_for,
    polar_express_schedule,
    schedule,
    serve_vmap,
)
from .coefficients import CoefficientSet, Rows
from .products import apply_gram_side, folded_quadratic, folds_diagonal, gram, quadratic
from .slices import walk


def _newton_schulz(
    x: torch.Tensor,  # (..., r, c)
    out: torch.Tensor,  # (..., r, c)
    coefficients: Sequence[float],  # (3 * steps,)
    prefactor: float,
    dtype: torch.dtype,
) -> None:
    rows = tuple(zip(*[iter(coefficients)] * 3, strict=True))

    def iterate(x: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
        for row in rows[:-1]:
            x = newton_schulz_step(x, row)
        return newton_schulz_step(x, rows[-1], out=last)

    walk(x, out, dtype, prefactor, iterate)


serve_vmap(
    torch.library.custom_op(
        add_op_namespace_prefix("newton_schulz"),
        _newton_schulz,
        mutates_args=("out",),
        schema="(Tensor x, Tensor(a!) out, float[] coefficients, float prefactor, "
        "ScalarType dtype) -> ()",
    )
)


def newton_schulz_step(
    x: torch.Tensor, row: tuple[float, float, float], *, out: torch.Tensor | None = None
) -> torch.Tensor:
    """One step on x (G, R, C), wide or tall; `out` as for `apply_gram_side`."""
    a, b, c = row
    if folds_diagonal(x):
        return apply_gram_side(x, folded_quadratic(gram(x), a, b, c), out=out)
    return apply_gram_side(x, quadratic(gram(x), b, c), x, beta=a, out=out)


@torch.no_grad()
def newton_schulz(
    x: torch.Tensor,
    steps: int = 5,
    coefficients: str | CoefficientSet | Sequence[Sequence[float]] | None = None,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Approximate polar factor U V^T of every matrix U S V^T of x, by a given schedule.

    Builds no autograd graph. A zero matrix gives zeros, an empty tensor an empty one; NaN or inf
    makes its own matrix NaN and no other. A matrix gives the same bits in any batch.

    Args:
        x: (..., m, n), any strides; float16, bfloat16, float32 or float64. Flatten convolution
            filters to (out, in * h * w) first. Never modified.
        steps: Number of iterations; a set that does not define this many raises.
        coefficients: Name in `COEFFICIENT_SETS`, "polar_express", a `CoefficientSet` or one
            (a, b, c) per step (then X is divided by its Frobenius norm alone). None: Keller
            Jordan's.
        dtype: Dtype of the iterates and of the result. None: float64 for float64 input; otherwise
            float16 on CUDA from compute capability 8.0, else float32.
        out: Receives the result in its own floating dtype; must not overlap x.

    Returns:
        (..., m, n) in `dtype`, or `out`.

    Raises:
        TypeError: x, out, steps or coefficients is of a wrong kind or dtype.
        ValueError: A wrong shape, device, number of steps, name or overlap.

    Source: Jordan et al., https://kellerjordan.github.io/posts/muon/.
    """
    check_input(x)
    rows, prefactor = schedule("keller_jordan" if coefficients is None else coefficients, steps)
    return iterate_rows(x, rows, prefactor, dtype, out)


def iterate_rows(
    x: torch.Tensor,
    rows: Rows,
    prefactor: float,
    dtype: torch.dtype | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """Newton-Schulz on a checked x (..., m, n) with a resolved schedule."""
    dtype = dtype_for(x.dtype, x.device) if dtype is None else dtype
    check_dtype(dtype)
    out = output_for(x, out, dtype)
    call(
        ops.newton_schulz,
        _newton_schulz,
        x.detach(),
        out,
        [v for row in rows for v in row],
        prefactor,
        dtype,
    )
    return out


@torch.no_grad()
def polar_express(
    x: torch.Tensor,
    steps: int = 5,
    *,
    lower: float = 1e-3,
    safety: float = 2e-2,
    cushion: float = 0.02,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Approximate polar factor of every matrix of x, by the schedule that is optimal for `steps`.

    Args:
        x: (..., m, n), as for `newton_schulz`.
        steps: Number of iterations, 1 to 100; the schedule is derived for it, never cut.
        lower: Smallest singular value, relative to the Frobenius norm, that is driven to 1.
        safety: Room for rounding errors; X starts at x / ((1 + safety) * ||x||_F).
        cushion: Caps the slope at 0.
        dtype: Dtype of the iterates and the result, as for `newton_schulz`.
        out: Receives the result, as for `newton_schulz`.

    Returns:
        (..., m, n) in `dtype`, or `out`.

    Raises:
        TypeError: As `newton_schulz` and `polar_express_coefficients`.
        ValueError: As `newton_schulz` and `polar_express_coefficients`.

    Source: Amsel et al., arXiv 2505.16932.
    """
    check_input(x)
    rows, prefactor = polar_express_schedule(steps, lower, safety, cushion)
    return iterate_rows(x, rows, prefactor, dtype, out)
