"""The products of an orthogonalization in float64, and a chain of squares, each one rounded."""

from __future__ import annotations

from collections.abc import Sequence

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
    """s (alpha A B + beta C) of A (..., m, k), B (..., k, n), C (..., m, n), scale (...,)."""
    out = alpha * (A.double() @ B.double())
    if C is not None and beta != 0:
        out += beta * C.double()
    return out if scale is None else out * scale.double()[..., None, None]


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
    """s (alpha A B^T + beta C) + diag I of A, B (..., m, k) and C (..., m, m).

    One matrix at a time; the upper triangle counts, so that both are equal.
    """
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


def square_chain(
    x: torch.Tensor,
    squares: Sequence[tuple[int, float, float, float]],
    scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """The last M of M_0 = scale x (G, m, m), M_j+1 = alpha M_j M_j^T + beta M_i + delta I.

    squares: (i, alpha, beta, delta). M_0 is not rounded, every other M once.
    """
    first = x.double()
    if scale is not None:
        first = first * scale.double()[:, None, None]
    terms = [first]
    for i, alpha, beta, delta in squares:
        options = {"alpha": alpha, "C": terms[i], "beta": beta, "diag": delta}
        terms.append(symmetric_matmul(terms[-1], **options).to(x.dtype).double())
    return terms[-1].to(x.dtype)
