"""Short cuts for matrices whose singular values lie like a Gaussian's, checked matrix by matrix.

    R = X X^T;  u = t (1 + d)^2, with t the mean of R's eigenvalues and d t their standard deviation
    tried where d is small:                   M = q(R / u), a few squares
    wide:    P = M R / u;  E = P M - I;       served where ||E||_F^2 is small:  Y = u^(-1/2) M X
    others:  Y = u^(-1/2) M X;                served where ||E||_F^2 is small:  E = Y Y^T - I
    every other matrix goes the way of `gram_polynomial`, from R

For independent elements u is the largest eigenvalue, and d^2 = m / n. Nothing says so of others,
hence the check: with s the singular values of the result, ||E||_F^2 = sum (s^2 - 1)^2, which is at
least sum (s - 1)^2, the squared distance from the polar factor.

FLOP by halves, where the long way costs 6 m^2 n + 10 m^3: wide 3 m^2 n + 4 m^3, others 4 m^2 n +
6 m^3, 10 instead of 16 m^3 for square matrices. Tried in vain, so much more, on GPUs; not tried, a
few launches that find nothing to do. The host never waits for the answers.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from ..kernels.find_converged import find_converged
from ..kernels.find_well_conditioned import WellConditioned, find_well_conditioned
from .evaluated import evaluated
from .polynomials import QUARTER_CIRCLE, RESIDUAL, SPREAD, WELL_CONDITIONED, Square
from .products import apply_gram_side, batch_is_free, gram, in_float32, matrix_norm, symmetric

# The compiled search takes sides above 128. Of Gaussians of 136 rows all but a few are served, at
# 0.40 times the distance of five float64 steps of Polar Express or less.
SIDE = 129
# From this aspect on Gaussians are wide: well-conditioned enough for two squares.
WIDE = 2.5
# Below this aspect the smallest singular values reach towards 0, which five steps of Polar Express
# lift the more the smaller m is: on square Gaussians of m = 384 they come as close as
# QUARTER_CIRCLE, within the scatter of such matrices.
NEARLY_SQUARE, NEARLY_SQUARE_SIDE = 1.25, 512
# Of the others than wide ones those are tried whose d is at most so many times a Gaussian's.
SPREAD_OF_GAUSSIANS = 1.05
# As RESIDUAL. QUARTER_CIRCLE leaves 0.0045 of Gaussians with n = 1.25 m and less of wider ones,
# 0.0245 of square ones.
RESIDUAL_BETWEEN, RESIDUAL_NEARLY_SQUARE = 0.006, 0.028


class ShortCut(NamedTuple):
    """The squares of q, the largest d, the largest mean of (s^2 - 1)^2, and what E is made of."""

    squares: tuple[Square, ...]
    spread: float
    residual: float
    wide: bool


class Zeros:
    """int32 zeros, cleared at once for several kernels that each use some up; or none."""

    def __init__(self, left: torch.Tensor | None) -> None:
        self.left = left

    def take(self, count: int) -> torch.Tensor | None:
        if self.left is None:
            return None
        taken, self.left = self.left[:count], self.left[count:]
        return taken


def short_cut(x: torch.Tensor, side: int) -> ShortCut | None:
    """What matrices of the shape of x (G, R, C) are tried with, if at all; the batch has no say.

    On the device by subsets, where `batch_is_free`; on the CPU by asking, as a slice is one matrix.
    `side`: m without the zeros that fill x up on GPUs.
    """
    return cut_for(side, max(x.shape[-2:]), x.dtype, x.device)


def cut_for(side: int, n: int, dtype: torch.dtype, device: torch.device) -> ShortCut | None:
    """The short cut of matrices of the sides `side <= n`, iterated in `dtype`."""
    able = device.type == "cpu" or batch_is_free(dtype, device)
    if not able or side < SIDE:
        return None
    if n >= WIDE * side:
        return ShortCut(WELL_CONDITIONED, SPREAD, RESIDUAL, wide=True)
    spread = SPREAD_OF_GAUSSIANS * math.sqrt(side / n)
    if n >= NEARLY_SQUARE * side:
        return ShortCut(QUARTER_CIRCLE, spread, RESIDUAL_BETWEEN, wide=False)
    if side >= NEARLY_SQUARE_SIDE:
        return ShortCut(QUARTER_CIRCLE, spread, RESIDUAL_NEARLY_SQUARE, wide=False)
    return None


def serve(
    x: torch.Tensor,  # (G, R, C)
    R: torch.Tensor,  # (G, m, m), kept as it is
    out: torch.Tensor | None,  # (G, R, C)
    prefactor: float,
    side: int,
    cut: ShortCut,
    zeros: Zeros,
    *,
    chain: bool,
    upper: bool,
) -> tuple[WellConditioned, torch.Tensor, torch.Tensor]:
    """Writes the matrices that are served to out; returns the factors of all, who is left, and out.

    `chain`, `upper`: as `runs_chain` and `stores_upper` say of x. `prefactor`: of the factors and
    their roots, which are those of `norm_factors`; the subset that is left will need them. `zeros`:
    for two searches and a chain.
    """
    find = 1 + len(R)
    tried = find_well_conditioned(R, prefactor, cut.spread, side, zeros.take(find))
    scale, subset = tried.narrow_factors, tried.subset
    counters = zeros.take(1 + len(cut.squares) * len(R))
    M = evaluated(R, cut.squares, scale, chain, keep=True, subset=subset, zeros=counters)
    storage = {"upper_out": upper, "subset": subset}
    if cut.wide:
        P = symmetric(M, R, scale=scale, upper=upper, **storage)
        E = symmetric(P, M, diag=-1.0, upper=upper, **storage)
        del P
        # From here on `subset` is of served matrices alone.
        rest = find_converged(E, cut.residual, side, tried, zeros.take(find))
        del E
    out = torch.empty_like(x) if out is None else out
    apply_gram_side(x, M, scale=tried.narrow_roots, out=out, upper=upper, subset=subset)
    del M
    if not cut.wide:
        E = gram(out, diag=-1.0, **storage)
        rest = find_converged(E, cut.residual, side, tried, zeros.take(find))
    return tried, rest, out


def served_alone(
    x: torch.Tensor,  # (1, R, C)
    R: torch.Tensor,  # (1, m, m), kept as it is
    cut: ShortCut,
) -> torch.Tensor | None:
    """The result for one matrix on the CPU, or None if it is not served."""
    m = R.shape[-1]
    mean = in_float32(R).diagonal(dim1=-2, dim2=-1).mean()
    variance = matrix_norm(R).square().sum() / (m * mean * mean) - 1
    spread = variance.clamp_min(0).sqrt()
    if not (mean > 0 and spread <= cut.spread):
        return None
    narrow = 1 / (mean * (1 + spread).square())
    scaled = (in_float32(R) * narrow).to(R.dtype)
    M = evaluated(scaled, cut.squares, keep=True)
    result = None
    if cut.wide:
        square = torch.bmm(torch.bmm(M, scaled), M)
    else:
        result = apply_gram_side(x, M, scale=narrow.sqrt().reshape(1))
        square = gram(result)
    E = in_float32(square)
    E.diagonal(dim1=-2, dim2=-1).sub_(1)
    if not matrix_norm(E).square().sum() <= cut.residual * m:
        return None
    return apply_gram_side(x, M, scale=narrow.sqrt().reshape(1)) if result is None else result
