"""s (alpha A B^T + beta C) + diag I in float64, one matrix at a time, both triangles equal."""

from __future__ import annotations

import torch


def symmetric_matmul(
    A: torch.Tensor,
    B: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    C: torch.Tensor | None = None,
    beta: float = 0.0,
    diag: float = 0.0,
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """(..., m, m) in float64 of A, B (..., m, k) and C (..., m, m); the upper triangle counts."""
    m, k = A.shape[-2:]
    B = A if B is None else B
    out = torch.empty((*A.shape[:-1], m), dtype=torch.float64, device=A.device)
    flat = out.view(out.shape[:-2].numel(), m, m)
    left, right = (x.reshape(flat.shape[0], m, k) for x in (A, B))
    upper = torch.ones(m, m, dtype=torch.bool, device=A.device).triu()
    for i, target in enumerate(flat):
        # Fresh contiguous operands: the summation order of a BLAS may depend on the layout.
        product = alpha * (left[i].double().contiguous() @ right[i].double().contiguous().mT)
        if C is not None and beta != 0:
            product += beta * C.reshape(flat.shape)[i].double()
        if scale is not None:
            product *= scale.reshape(-1)[i].double()
        product.diagonal().add_(diag)
        target.copy_(torch.where(upper, product, product.mT))
    return out
