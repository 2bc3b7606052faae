"""Two polynomials of high degree in the Gram matrix, instead of five of low degree.

    R = X X^T;  R = R / (safety^2 ||R||_F)                    every eigenvalue is now in [0, 1)
    M_0 = R;  M_j+1 = alpha M_j M_j^T + beta M_i + delta I    five squares: degree 32 in R
    X = M_5 X;  R = X X^T;  the same with other coefficients;  return M_5 X

All ten squares are symmetric. By halves a square matrix costs 16 m^3 FLOP where five quintics cost
20, a wide one 6 m^2 n + 10 m^3 where the Gram form costs 6 m^2 n + 14 m^3.

||R||_F^(1/2) is the Schatten-4 norm of X: at least the largest singular value, at most the
Frobenius norm, and known from the first product. With ||R||_F of the rounded R the bound holds for
the matrix that is squared, whatever rounding did to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .._ops import add_op_namespace_prefix, ops
from ..kernels.products import gram_polynomial_slice
from ..kernels.products.gram_polynomial_slice import Polynomials
from ..kernels.products.normalize import norm_factors, runs_compiled
from .arguments import call, check_dtype, check_input, dtype_for, output_for, serve_vmap
from .polynomials import POLYNOMIALS, SAFETY, Square
from .products import (
    apply_gram_side,
    batch_is_free,
    chain_serves,
    gram,
    matrix_norm,
    runs_symmetric,
    square,
)
from .slices import Slice, by_slices, walk

# Frobenius norm of X before the first product: R then has a trace of 4096, far from float16's
# subnormal numbers and from its largest one.
START_NORM = 64.0


def _gram_polynomial(
    x: torch.Tensor,  # (..., r, c)
    out: torch.Tensor,  # (..., r, c)
    dtype: torch.dtype,
) -> None:
    if _runs_compiled(x.dtype, dtype, x.device):
        by_slices(x, out, dtype, _compiled)
    else:
        walk(x, out, dtype, 1 / START_NORM, iterated)


serve_vmap(
    torch.library.custom_op(
        add_op_namespace_prefix("gram_polynomial"),
        _gram_polynomial,
        mutates_args=("out",),
        schema="(Tensor x, Tensor(a!) out, ScalarType dtype) -> ()",
    )
)


_BOTH = Polynomials(POLYNOMIALS, START_NORM, SAFETY**2)


def _runs_compiled(source: torch.dtype, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether one compiled call does all of a slice: float16 iterates on Hopper."""
    return batch_is_free(dtype, device) and gram_polynomial_slice.serves(source, dtype, device)


def _compiled(
    pieces: Sequence[torch.Tensor], shape: Slice, last: torch.Tensor | None
) -> torch.Tensor:
    """Both polynomials of a slice, as `by_slices` calls it, with the bits of `iterated`."""
    out = last
    if out is None:
        sides = (shape.held(pieces), *shape.sides)
        out = pieces[0].new_empty(sides, dtype=torch.float16)
    chain = chain_serves(len(out), min(shape.sides), out.dtype, out.device)
    gram_polynomial_slice.gram_polynomial_slice(pieces, out, _BOTH, chain=chain)
    return out


def iterated(x: torch.Tensor, last: torch.Tensor | None) -> torch.Tensor:
    """Both polynomials of x (G, R, C), whose matrices have the norm START_NORM or are zero.

    `last`: the `out` of the last product, as for `apply_gram_side`.
    """
    first, second = POLYNOMIALS
    R = gram(x)  # (G, m, m)
    scale = None
    if _scales_by_factors(R):
        scale, roots = norm_factors(R, SAFETY**2, symmetric=True)
    else:
        # A trace of 4096 keeps the norm above 1 for any m below 10^7; a zero matrix stays zero.
        bound = matrix_norm(R).clamp_min_(1.0).mul_(SAFETY**2)  # (G, 1, 1)
        torch.div(R, bound, out=R)  # in the wider dtype, rounded once
        roots = bound.rsqrt_().flatten()
    M = _evaluated(R, first, scale)
    del R
    x = apply_gram_side(x, M, scale=roots)
    del M
    return apply_gram_side(x, _evaluated(gram(x), second), out=last)


def _evaluated(
    R: torch.Tensor,  # (G, m, m)
    squares: Sequence[Square],
    factors: torch.Tensor | None = None,  # (G,): M_0 is R times these
) -> torch.Tensor:
    """The last M of R. An M that is not needed any more is let go."""
    terms: dict[int, torch.Tensor] = {0: R}
    del R
    for j, (operand, alpha, beta, delta) in enumerate(squares):
        scale = factors if j == 0 or operand == 0 else None
        powers = (2 if j == 0 else 0, 1 if operand == 0 else 0)
        options = {} if scale is None else {"scale": scale, "powers": powers}
        M = square(terms[j], terms[operand], alpha=alpha, beta=beta, delta=delta, **options)
        needed = {later.operand for later in squares[j + 1 :]}
        terms = {i: term for i, term in terms.items() if i in needed} | {j + 1: M}
    return M


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
