"""What "orthogonalized" means: the polar factor, and the polynomials that approximate it.

Plain float64 PyTorch on (..., m, n).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .normalize import normalize


def newton_schulz(
    x: torch.Tensor, rows: Sequence[tuple[float, float, float]], prefactor: float = 1.0
) -> torch.Tensor:
    """X <- a X + (b A + c A^2) X with A = X X^T, for each row (a, b, c); x is (..., m, n)."""
    x = normalize(x, prefactor)
    for a, b, c in rows:
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


def gram_newton_schulz(
    x: torch.Tensor,
    rows: Sequence[tuple[float, float, float]],
    prefactor: float = 1.0,
    restarts: Sequence[int] = (),
) -> torch.Tensor:
    """The same polynomials through R = X X^T; equal to `newton_schulz` in exact arithmetic."""
    x = normalize(x, prefactor)
    identity = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device)
    q, r = identity, x @ x.mT
    for i, (a, b, c) in enumerate(rows):
        if i in restarts:
            x = q @ x
            q, r = identity, x @ x.mT
        p = a * identity + b * r + c * r @ r
        q, r = p @ q, p @ r @ p
    return q @ x


def gram_polynomial(
    x: torch.Tensor,
    polynomials: Sequence[Sequence[tuple[int, float, float, float]]],
    safety: float,
) -> torch.Tensor:
    """X <- M X for each polynomial: M_0 = X X^T, M_j+1 = alpha M_j^2 + beta M_i + delta I.

    X starts at x / (safety ||x x^T||_F^(1/2)); each square is (i, alpha, beta, delta).
    """
    x = normalize(x)
    bound = torch.linalg.matrix_norm(x @ x.mT, keepdim=True).sqrt()
    x = torch.where(bound > 0, x / (safety * bound), x)
    identity = torch.eye(x.shape[-2], dtype=x.dtype, device=x.device)
    for squares in polynomials:
        m = [x @ x.mT]
        for i, alpha, beta, delta in squares:
            m.append(alpha * m[-1] @ m[-1] + beta * m[i] + delta * identity)
        x = m[-1] @ x
    return x


def schedule_on_values(
    sigma: torch.Tensor, rows: Sequence[tuple[float, float, float]]
) -> torch.Tensor:
    """What the schedule does to normalized singular values: p_T(... p_1(sigma)), elementwise."""
    sigma = sigma.double()
    for a, b, c in rows:
        sigma = a * sigma + b * sigma**3 + c * sigma**5
    return sigma
