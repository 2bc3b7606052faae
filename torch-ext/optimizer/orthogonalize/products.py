"""The products of an iteration: which are symmetric, and who computes those.

Half of a symmetric product is redundant. The compiled `symmetric_matmul` skips it and folds the
scalars, b, c and the diagonal a, into the same rounding; elsewhere torch's dense products run.
"""

from __future__ import annotations

import torch

from .._ops import ops
from ..kernels.symmetric_matmul import AUTO, runs_compiled

HALF_PRECISION = (torch.float16, torch.bfloat16)


def runs_symmetric(m: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether m x m polynomials of a Gram matrix are computed by halves on this device."""
    return _pays(m, dtype) and runs_compiled(device, dtype)


def _pays(m: int, dtype: torch.dtype) -> bool:
    """Where the kernel is not slower than cuBLAS on an H200, with k = m or more, one matrix.

    Half precision: 0.87 times its speed at m = 3072, 1.13 at 4096, 1.10 at 8192 for b A + c A^2.
    Between the last two the tiles fill the last round of multiprocessors badly. cuBLAS has the
    faster instructions of Hopper, the kernel those of sm_80; float32 has no such difference: 1.16
    at 2048, 1.52 at 4096.
    """
    if dtype in HALF_PRECISION:
        return m == 4096 or m >= 8192
    return m >= 2048


def gram_runs_symmetric(r: int, c: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether X X^T of r x c matrices is computed by halves.

    X^T X of a tall half-precision X is not: it ran at 0.93 times the speed of cuBLAS for m = 4096.
    """
    return (r <= c or dtype not in HALF_PRECISION) and runs_symmetric(min(r, c), dtype, device)


def folds_diagonal(x: torch.Tensor) -> bool:
    """Whether a X + B X runs as (a I + B) X for x (G, R, C).

    That saves a pass over X, and in half precision it costs no accuracy. In float32 the rounding of
    a I + B is what limits the result: 1.45 times the error on spectra with small singular values.
    """
    return x.dtype in HALF_PRECISION and runs_symmetric(min(x.shape[-2:]), x.dtype, x.device)


def gram(x: torch.Tensor) -> torch.Tensor:
    """X X^T or X^T X of x (G, R, C), whichever is smaller: (G, m, m)."""
    rows = x.mT if x.shape[-2] > x.shape[-1] else x
    if gram_runs_symmetric(x.shape[-2], x.shape[-1], x.dtype, x.device):
        return symmetric(rows, rows)
    return torch.bmm(rows, rows.mT)


def quadratic(A: torch.Tensor, b: float, c: float) -> torch.Tensor:
    """b A + c A^2 of A (G, m, m); a cubic schedule has c = 0 and saves the product."""
    return add_symmetric(A, A, A, beta=b, alpha=c) if c else (in_float32(A) * b).to(A.dtype)


def folded_quadratic(A: torch.Tensor, a: float, b: float, c: float) -> torch.Tensor:
    """a I + b A + c A^2 of A (G, m, m), rounded once."""
    if c:
        return symmetric(A, A, alpha=c, C=A, beta=b, diag=a)
    Z = in_float32(A) * b
    Z.diagonal(dim1=-2, dim2=-1).add_(a)
    return Z.to(A.dtype)


def add_symmetric(
    C: torch.Tensor, A: torch.Tensor, B: torch.Tensor, *, beta: float, alpha: float = 1.0
) -> torch.Tensor:
    """beta C + alpha A B of symmetric C, A, B (G, m, m) that commute but for rounding."""
    if runs_symmetric(A.shape[-1], A.dtype, A.device):
        return symmetric(A, B, alpha=alpha, C=C, beta=beta)
    return torch.baddbmm(C, A, B, beta=beta, alpha=alpha)


def symmetric(
    A: torch.Tensor,
    B: torch.Tensor,
    *,
    alpha: float = 1.0,
    C: torch.Tensor | None = None,
    beta: float = 0.0,
    diag: float = 0.0,
) -> torch.Tensor:
    """alpha A B^T + beta C + diag I of A, B (G, m, k): `kernels.symmetric_matmul`, unchecked."""
    out = A.new_empty((A.shape[0], A.shape[1], A.shape[1]))
    ops.symmetric_matmul(A, B, C, out, alpha, beta, diag, AUTO)
    return out


def square(
    A: torch.Tensor, C: torch.Tensor, *, alpha: float, beta: float, delta: float
) -> torch.Tensor:
    """alpha A A^T + beta C + delta I of symmetric A, C (G, m, m).

    By halves it is rounded once; torch's dense product leaves a second rounding on the diagonal.
    """
    if runs_symmetric(A.shape[-1], A.dtype, A.device):
        return symmetric(A, A, alpha=alpha, C=C, beta=beta, diag=delta)
    out = torch.baddbmm(C, A, A.mT, beta=beta, alpha=alpha)
    diagonal = out.diagonal(dim1=-2, dim2=-1)
    if out.dtype in HALF_PRECISION:
        diagonal.copy_(in_float32(diagonal) + delta)
    else:
        diagonal.add_(delta)
    return out


def matrix_norm(x: torch.Tensor, order: float = 2) -> torch.Tensor:
    """Norm of the elements of each matrix of x (G, R, C) -> (G, 1, 1).

    Rows first: a float32 sum over one row of 10^4 is accurate where one over 10^8 drifts.
    """
    rows = torch.linalg.vector_norm(x, order, dim=-1, keepdim=True)
    return torch.linalg.vector_norm(rows, order, dim=-2, keepdim=True)


def apply_gram_side(
    x: torch.Tensor, B: torch.Tensor, add: torch.Tensor | None = None, *, beta: float = 0.0
) -> torch.Tensor:
    """beta * add + B X, or beta * add + X B for tall x (G, R, C), with B (G, m, m) symmetric."""
    left, right = (x, B) if x.shape[-2] > x.shape[-1] else (B, x)
    if add is None:
        return torch.bmm(left, right)
    return torch.baddbmm(add, left, right, beta=beta)


def in_float32(x: torch.Tensor) -> torch.Tensor:
    """x in float32, float64 as it is: for elementwise arithmetic with a Python scalar.

    The CPU rounds the scalar itself to a half-precision tensor's dtype first. As `a` enters every
    row alike, that triples the error of a float16 Gram iteration (5.2e-3 instead of 1.9e-3).
    """
    return x if x.dtype == torch.float64 else x.float()
