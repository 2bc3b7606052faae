"""A chain of symmetric squares, each one rounded to the operand's dtype."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .symmetric_matmul import symmetric_matmul


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
