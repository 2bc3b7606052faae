"""What "orthogonalized" means: the polar factor, and the polynomials that approximate it.

Plain float64 PyTorch on (..., m, n), and the products that they consist of; in a chain of squares
each one is rounded.
"""

from __future__ import annotations

from collections.abc import Sequence

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
