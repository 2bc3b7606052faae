"""x / (prefactor ||x||_F) in float64, one norm per matrix."""

from __future__ import annotations

import torch


def normalize(x: torch.Tensor, prefactor: float = 1.0) -> torch.Tensor:
    """Each matrix of x (..., m, n) with Frobenius norm 1 / prefactor, in float64.

    Zero matrices stay zero; an inf or NaN makes its whole matrix NaN. Dividing by the largest
    element first keeps the sum of squares of float64 matrices in range.
    """
    x = x.double()
    if 0 in x.shape[-2:]:
        return x
    largest = x.abs().amax((-2, -1), keepdim=True)
    tiny = torch.finfo(torch.float64).tiny
    scaled = x / largest.clamp_min(tiny)
    norm = torch.linalg.matrix_norm(scaled, keepdim=True)
    scaled = scaled / (prefactor * norm.clamp_min(tiny))
    return torch.where(largest.isfinite(), scaled, torch.nan)
