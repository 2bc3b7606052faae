"""s (alpha A B + beta C) in float64."""

from __future__ import annotations

import torch


def matmul_add(
    A: torch.Tensor,
    B: torch.Tensor,
    *,
    alpha: float = 1.0,
    C: torch.Tensor | None = None,
    beta: float = 0.0,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """(..., m, n) in float64 of A (..., m, k), B (..., k, n), C (..., m, n), scale (...,)."""
    out = alpha * (A.double() @ B.double())
    if C is not None and beta != 0:
        out += beta * C.double()
    return out if scale is None else out * scale.double()[..., None, None]
