"""Matrices with known singular values, and the float64 answers they are compared with.

Built as U S V^T, so that neither the matrix nor its polar factor needs a float64 SVD.
"""

from dataclasses import dataclass

import torch

METHODS = ("polar_express", "gram_newton_schulz", "newton_schulz")  # any dtype, steps and shape
ALL_METHODS = (*METHODS, "gram_polynomial")

SPECTRA = {
    "linear": lambda k, m: 0.002 + 0.998 * (m - k) / (m - 1),
    **{f"log{d}": lambda k, m, d=d: 10 ** (-d * (k - 1) / (m - 1)) for d in (2, 3, 5, 7, 9)},
    "power_half": lambda k, m: k**-0.5,
    "power_one": lambda k, m: 1 / k,
    "half_zero": lambda k, m: (1 - k / m) * (2 * k <= m),
    "rank_10": lambda k, m: (k <= 10).double(),
    "two_and_1e-3": lambda k, m: torch.where(k <= 2, 1.0, 1e-3),
    "two_and_1e-5": lambda k, m: torch.where(k <= 2, 1.0, 1e-5),
}


@dataclass(frozen=True)
class Known:
    """x = U S V^T (m, n) in float64 with its polar factor U V^T and singular values (m,)."""

    x: torch.Tensor
    polar: torch.Tensor
    values: torch.Tensor


def known_matrix(spectrum: str, m: int, n: int, seed: int = 0) -> Known:
    """An m x n matrix, m <= n, with the named spectrum and random singular vectors."""
    generator = torch.Generator().manual_seed(seed)

    def orthonormal(rows: int) -> torch.Tensor:  # (rows, m)
        normal = torch.randn(rows, m, generator=generator, dtype=torch.float64)
        return torch.linalg.qr(normal).Q

    values = SPECTRA[spectrum](torch.arange(1, m + 1, dtype=torch.float64), m).double()
    u, v = orthonormal(m), orthonormal(n)
    return Known((u * values) @ v.mT, u @ v.mT, values)


def schedule(opt, method: str, steps: int = 5) -> tuple:
    """(rows, prefactor) of a method by its name."""
    if method == "newton_schulz":
        return opt.COEFFICIENT_SETS["keller_jordan"].rows_for(steps), 1.0
    return opt.polar_express_coefficients(steps), 1.02


def exact(opt, module, x: torch.Tensor, method: str) -> torch.Tensor:
    """x (..., m, n) in float64 after the iteration that `method` is for its shape and dtype."""
    m, n = x.shape[-2:]
    choose = module("orthogonalize.choose").choose
    picked = choose(m, n, dtype=x.dtype, device=x.device, method=method)
    slow = module("reference.orthogonalize")
    wide = (x if m <= n else x.mT).double().cpu()
    if picked.method == "gram_polynomial":
        table = module("orthogonalize.polynomials")
        found = slow.gram_polynomial(wide, table.POLYNOMIALS, table.SAFETY)
    else:
        found = slow.newton_schulz(wide, *schedule(opt, picked.method))
    return found if m <= n else found.mT


def matrix(spectrum: str, m: int, n: int, seed: int = 0) -> torch.Tensor:
    """A float64 matrix of a named spectrum, or a "gaussian" one."""
    if spectrum == "gaussian":
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(m, n, generator=generator, dtype=torch.float64)
    return known_matrix(spectrum, m, n, seed).x
