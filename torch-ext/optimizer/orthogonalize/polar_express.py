"""Polar Express: the Newton-Schulz loop with a schedule derived for the step count asked for."""

from __future__ import annotations

import torch

from .arguments import check_input
from .constants import polar_express_schedule
from .newton_schulz import iterate_rows


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
