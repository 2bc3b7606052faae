"""Two polynomials of high degree in the Gram matrix, instead of five of low degree.

    R = X X^T;  R = R / (safety^2 ||R||_F)                    every eigenvalue is now in [0, 1)
    M_0 = R;  M_j+1 = alpha M_j M_j^T + beta M_i + delta I    five squares: degree 32 in R
    X = M_5 X;  R = X X^T;  the same with other coefficients;  return M_5 X

All ten squares are symmetric. By halves a square matrix costs 16 m^3 FLOP where five quintics cost
20, a wide one 6 m^2 n + 10 m^3 where the Gram form costs 6 m^2 n + 14 m^3.

||R||_F^(1/2) is the Schatten-4 norm of X: at least the largest singular value, at most the
Frobenius norm, and known from the first product. With ||R||_F of the rounded R the bound holds for
the matrix that is squared, whatever rounding did to it.

Matrices whose singular values lie like a Gaussian's take a short cut (`well_conditioned`).
"""

from __future__ import annotations

import functools

import torch

from .._ops import add_op_namespace_prefix, ops
from ..kernels.norm_factors import norm_factors
from ..kernels.normalize import runs_compiled
from .arguments import check_dtype, check_input, output_for
from .batch import walk
from .constants import dtype_for
from .evaluated import evaluated
from .polynomials import POLYNOMIALS, QUARTER_CIRCLE, SAFETY, SQUARES
from .products import (
    apply_gram_side,
    batch_is_free,
    gram,
    matrix_norm,
    runs_chain,
    runs_symmetric,
    stores_upper,
)
from .registered import call, serve_vmap
from .well_conditioned import Zeros, serve, served_alone, short_cut

# Frobenius norm of X before the first product: R then has a trace of 4096, far from float16's
# subnormal numbers and from its largest one.
START_NORM = 64.0


def _gram_polynomial(
    x: torch.Tensor,  # (..., r, c)
    out: torch.Tensor,  # (..., r, c)
    dtype: torch.dtype,
) -> None:
    iterate = functools.partial(iterated, side=min(x.shape[-2:]))
    zeros = zeros_needed if batch_is_free(dtype, x.device) else None
    walk(x, out, dtype, 1 / START_NORM, iterate, zeros)


serve_vmap(
    torch.library.custom_op(
        add_op_namespace_prefix("gram_polynomial"),
        _gram_polynomial,
        mutates_args=("out",),
        schema="(Tensor x, Tensor(a!) out, ScalarType dtype) -> ()",
    )
)


def iterated(
    x: torch.Tensor, last: torch.Tensor | None, zeros: torch.Tensor | None = None, *, side: int
) -> torch.Tensor:
    """Both polynomials of x (G, R, C), whose matrices have the norm START_NORM or are zero.

    `last`: the `out` of the last product, as for `apply_gram_side`. `side`: m without the zeros
    that fill x up. `zeros`: int32, `zeros_needed(G)` of them, where `batch_is_free`.
    """
    first, second = POLYNOMIALS
    chain = runs_chain(x)
    upper = chain and stores_upper(min(x.shape[-2:]))
    R = gram(x, upper_out=upper)  # (G, m, m); its norm is read above the diagonal
    factors = subset = None
    cut, clear = short_cut(x, side), Zeros(zeros)
    if cut is not None and not batch_is_free(x.dtype, x.device):
        served = served_alone(x, R, cut)
        if served is not None:
            return served
    elif cut is not None:
        storage = {"chain": chain, "upper": upper}
        tried, subset, last = serve(x, R, last, SAFETY**2, side, cut, clear, **storage)
        factors = tried.factors, tried.roots
    if factors is None and _scales_by_factors(R):
        factors = norm_factors(R, SAFETY**2, symmetric=True)
    if factors is None:
        # A trace of 4096 keeps the norm above 1 for any m below 10^7; a zero matrix stays zero.
        bound = matrix_norm(R).clamp_min_(1.0).mul_(SAFETY**2)  # (G, 1, 1)
        torch.div(R, bound, out=R)  # in the wider dtype, rounded once
        factors = None, bound.rsqrt_().flatten()
    scale, roots = factors
    each = 1 + len(first) * len(x)
    M = evaluated(R, first, scale, chain, subset=subset, zeros=clear.take(each))
    del R
    x = apply_gram_side(x, M, scale=roots, upper=upper, subset=subset)
    del M
    storage = {"upper_out": upper, "subset": subset}
    M = evaluated(gram(x, **storage), second, None, chain, subset=subset, zeros=clear.take(each))
    return apply_gram_side(x, M, out=last, upper=upper, subset=subset)


def zeros_needed(matrices: int) -> int:
    """Counters that the kernels of a slice begin with: of three chains and two searches."""
    return 5 + (SQUARES + len(QUARTER_CIRCLE) + 2) * matrices


def _scales_by_factors(R: torch.Tensor) -> bool:
    """Whether the squares of R (G, m, m) take a scale of its first use."""
    compiled = runs_compiled(R.device, R.dtype, R.dtype)
    return compiled and runs_symmetric(R.shape[-1], R.dtype, R.device)


@torch.no_grad()
def gram_polynomial(
    x: torch.Tensor,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Approximate polar factor of every matrix of x, by two polynomials of its Gram matrix.

    Closer to the polar factor than five steps of `polar_express`, at less cost. For bfloat16
    iterates the degree is too high: they carry the noise of their rounding through it.

    Args:
        x: (..., m, n), as for `newton_schulz`.
        dtype: Dtype of the iterates and the result: float16, float32 or float64; None as for
            `newton_schulz`.
        out: Receives the result, as for `newton_schulz`.

    Returns:
        (..., m, n) in `dtype`, or `out`.

    Raises:
        TypeError: As `newton_schulz`.
        ValueError: As `newton_schulz`, or dtype is bfloat16.

    Source: evaluating by squares, Paterson and Stockmeyer, SIAM J. Comput. 2 (1973); the criterion,
    Amsel et al., arXiv 2505.16932; the polynomials are our own.
    """
    check_input(x)
    dtype = dtype_for(x.dtype, x.device) if dtype is None else dtype
    check_dtype(dtype)
    if dtype == torch.bfloat16:
        raise ValueError(
            "dtype=torch.bfloat16: the rounding of bfloat16 iterates passes the polynomials of "
            "gram_polynomial amplified; use polar_express, or float16"
        )
    out = output_for(x, out, dtype)
    call(ops.gram_polynomial, _gram_polynomial, x.detach(), out, dtype)
    return out
