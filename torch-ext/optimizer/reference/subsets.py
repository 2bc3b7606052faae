"""Which Gram matrices are well-conditioned, and which residuals are small, in float64."""

from __future__ import annotations

import torch


def find_well_conditioned(
    R: torch.Tensor, spread: float, side: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether the eigenvalues of R (G, m, m) deviate from their mean t by at most spread t, and
    1 / (t (1 + d)^2) of those, 0 of others; d t is the deviation. Rows beyond side are zero.
    """
    wide = R.double()
    mean = wide.diagonal(dim1=-2, dim2=-1).sum(-1) / side
    variance = wide.square().sum((-2, -1)) / (side * mean * mean) - 1
    deviation = variance.clamp_min(0).sqrt()  # NaN stays
    found = (deviation <= spread) & (mean > 0)
    return found, torch.where(found, 1 / (mean * (1 + deviation).square()), 0.0)


def find_converged(
    residual: torch.Tensor, bound: float, side: int, tried: torch.Tensor
) -> torch.Tensor:
    """Whether the squares of residual (G, m, m) add up to at most bound side, of tried matrices.

    Rows beyond side hold -1 on the diagonal and are not counted.
    """
    squares = residual.double().square().sum((-2, -1)) - (residual.shape[-1] - side)
    return tried & (squares <= bound * side)
