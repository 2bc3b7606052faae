"""gram_polynomial_slice: both polynomials of a slice of matrices, in one call of the host.

The kernels are those of normalize, symmetric_matmul, norm_factors, square_chain and matmul_add, in
the order of orthogonalize/gram_polynomial.py, and so are the bits. What is saved is the host's part
of eight to eighteen calls: allocations, the dispatcher and Python.

path     | op                    | source                           | taken
compiled | gram_polynomial_slice | kernels-src/products/*sm90* | capability 9.0, float16
python   | none                  | orthogonalize/gram_polynomial.py | everything else, by the caller
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import register_fake

from ..._ops import add_op_namespace_prefix, ops
from .normalize import runs_compiled
from .square_chain import Square, places_of


@register_fake(add_op_namespace_prefix("gram_polynomial_slice"))
def _fake(pieces, out, places, operands, coefficients, start_norm, prefactor, chain):
    return None


class Polynomials:
    """Two polynomials as the op takes them.

    Args:
        polynomials: each a sequence of squares (i, alpha, beta, delta), M_j+1 = alpha M_j M_j^T +
            beta M_i + delta I; as many of them, with the same i, in both.
        start_norm: Frobenius norm of a matrix before the first product.
        prefactor: The Gram matrix R is divided by prefactor ||R||_F before the first polynomial.

    Raises:
        ValueError: the polynomials differ in more than their coefficients.
    """

    def __init__(
        self, polynomials: Sequence[Sequence[Square]], start_norm: float, prefactor: float
    ) -> None:
        operands = {tuple(square[0] for square in squares) for squares in polynomials}
        if len(polynomials) != 2 or len(operands) != 1:
            raise ValueError(f"there must be two polynomials of one form, got {polynomials!r}")
        (of_both,) = operands
        self.operands = list(of_both)
        self.places, _ = places_of(of_both)
        self.coefficients = [v for squares in polynomials for square in squares for v in square[1:]]
        self.start_norm, self.prefactor = start_norm, prefactor


def serves(source: torch.dtype, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether matrices of dtype `source` are taken to results in `dtype`.

    Asked only where the compiled products serve `dtype` and the device.
    """
    return dtype == torch.float16 and runs_compiled(device, source, dtype)


def gram_polynomial_slice(
    pieces: Sequence[Tensor],  # (b, r, c) each
    out: Tensor,  # (G, R, C) float16, strides that TMA can take, G, R and C as for `normalize`
    polynomials: Polynomials,
    *,
    chain: bool,  # the squares of a polynomial in one launch (`square_chain.serves`)
) -> None:
    """Write the result of every matrix of the pieces to out; unchecked, where the op `serves`."""
    p = polynomials
    table = (p.places, p.operands, p.coefficients, p.start_norm, p.prefactor)
    ops.gram_polynomial_slice(list(pieces), out, *table, chain)
