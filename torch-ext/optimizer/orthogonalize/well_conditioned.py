"""A short cut for wide matrices whose singular values lie close together, checked matrix by matrix.

    R = X X^T;  u = t (1 + d)^2, with t the mean of R's eigenvalues and d t their standard deviation
    tried where d <= SPREAD:  M = q(R / u), two squares;  P = M R / u;  E = P M - I
    served where ||E||_F^2 <= RESIDUAL m:  return u^(-1/2) M X
    every other matrix goes the way of `gram_polynomial`, from R

For independent elements u is the largest eigenvalue, and d^2 = m / n. Nothing says so of others,
hence the check: with s the singular values of the result, ||E||_F^2 = sum (s^2 - 1)^2, which is at
least sum (s - 1)^2, the squared distance from the polar factor. E is computed from R as rounded.

Served: 3 m^2 n + 4 m^3 FLOP by halves instead of 6 m^2 n + 10 m^3. Tried in vain: 4 m^3 more, on
GPUs; not tried: a few launches that find nothing to do. The host never waits for the answers.
"""

from __future__ import annotations

import torch

from ..kernels.find_converged import find_converged
from ..kernels.find_well_conditioned import find_well_conditioned
from .evaluated import evaluated
from .polynomials import RESIDUAL, SPREAD, WELL_CONDITIONED
from .products import apply_gram_side, batch_is_free, in_float32, matrix_norm, symmetric

# Smaller matrices are bound by the number of operations, narrower ones spread too far: d^2 is
# hardly ever below m / n, and 0.65^2 is 1 / 2.37.
SIDE = 256
ASPECT = 2


def may_be_well_conditioned(x: torch.Tensor, side: int) -> bool:
    """Whether matrices of the shape of x (G, R, C) are tried here; the batch has no say.

    On the device by subsets, where `batch_is_free`; on the CPU by asking, as a slice is one matrix.
    `side`: m without the zeros that fill x up on GPUs.
    """
    n = max(x.shape[-2:])
    able = x.device.type == "cpu" or batch_is_free(x.dtype, x.device)
    return able and side >= SIDE and n >= ASPECT * side


def serve(
    x: torch.Tensor,  # (G, R, C)
    R: torch.Tensor,  # (G, m, m), kept as it is
    out: torch.Tensor,  # (G, R, C)
    prefactor: float,
    side: int,
    *,
    chain: bool,
    upper: bool,
) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Writes the matrices that are served to out; returns factors and roots, and who is left.

    `chain`, `upper`: as `runs_chain` and `stores_upper` say of x. `prefactor`: of the factors and
    their roots, which are those of `norm_factors`; the subset that is left will need them.
    """
    tried = find_well_conditioned(R, prefactor, SPREAD, side)
    scale, subset = tried.narrow_factors, tried.subset
    M = evaluated(R, WELL_CONDITIONED, scale, chain, keep=True, subset=subset)
    storage = {"upper": upper, "upper_out": upper, "subset": subset}
    P = symmetric(M, R, scale=scale, **storage)
    rest = find_converged(symmetric(P, M, diag=-1.0, **storage), RESIDUAL, side, tried)
    apply_gram_side(x, M, scale=tried.narrow_roots, out=out, upper=upper, subset=subset)
    return (tried.factors, tried.roots), rest


def served_alone(
    x: torch.Tensor,  # (1, R, C)
    R: torch.Tensor,  # (1, m, m), kept as it is
) -> torch.Tensor | None:
    """The result for one matrix on the CPU, or None if it is not served."""
    m = R.shape[-1]
    mean = in_float32(R).diagonal(dim1=-2, dim2=-1).mean()
    variance = matrix_norm(R).square().sum() / (m * mean * mean) - 1
    spread = variance.clamp_min(0).sqrt()
    if not (mean > 0 and spread <= SPREAD):
        return None
    narrow = 1 / (mean * (1 + spread).square())
    scaled = (in_float32(R) * narrow).to(R.dtype)
    M = evaluated(scaled, WELL_CONDITIONED, keep=True)
    P = torch.bmm(M, scaled)
    E = in_float32(torch.bmm(P, M))
    E.diagonal(dim1=-2, dim2=-1).sub_(1)
    if not matrix_norm(E).square().sum() <= RESIDUAL * m:
        return None
    return apply_gram_side(x, M, scale=narrow.sqrt().reshape(1))
