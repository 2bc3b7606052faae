"""x / (prefactor ||x||_F) in float64, one norm per matrix; and the crop of a result's frame."""

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


def norm_factors(x: torch.Tensor, prefactor: float = 1.0) -> torch.Tensor:
    """1 / (prefactor ||x||_F) of each matrix of x (G, r, c), in float64; 0 for a zero matrix."""
    x = x.double()
    largest = x.abs().amax((-2, -1))
    tiny = torch.finfo(torch.float64).tiny
    scaled = x / largest.clamp_min(tiny)[:, None, None]
    norm = torch.linalg.matrix_norm(scaled) * largest
    value = torch.where(largest == 0, 0.0, 1 / (prefactor * norm))
    return torch.where(largest.isfinite(), value, torch.nan)


def crop(x: torch.Tensor, r: int, c: int) -> torch.Tensor:
    """The upper left r x c of every matrix of x (G, R, C)."""
    return x[:, :r, :c]
