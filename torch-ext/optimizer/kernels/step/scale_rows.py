"""scale_rows: matrices before and after the iteration, in place.

equilibrate_rows gives every row the norm 1 (MuonEq), renormalize every matrix the norm of a
semi-orthogonal one (Muon+). Formulas and sources: reference/update.py. Both multiply once and round
once. A matrix has the same bits in any batch; times a power of two it gives the same bits, but for
numbers that leave the normal range.

path     | source                                                | taken
compiled | kernels-src/step/scale_rows.cu, and norm_factors for  | CUDA >= 8.0, up to float32
         | the norms of matrices                                 |
torch    | reference/update.py                                   | everything else
"""

from __future__ import annotations

import math

from torch import Tensor
from torch.library import register_fake

from ... import dispatch
from ..._ops import add_op_namespace_prefix, ops
from ...reference import update as reference
from ..products.normalize import norm_factors
from .tensor_lists import DTYPES


@register_fake(add_op_namespace_prefix("scale_rows"))
def _fake(x, factors, to_norm_one):
    return None


def _runs_compiled(x: Tensor) -> bool:
    return x.numel() > 0 and x.dtype in DTYPES and dispatch.runs_compiled("scale_rows", x.device)


def equilibrate_rows(x: Tensor) -> None:
    """x (B, m, n), contiguous, with every row divided by its norm.

    Norms below 1e-6 |x|_F / sqrt(m) of their matrix count as that. Zeros stay zeros; an inf or NaN
    makes its matrix NaN.
    """
    _scale(x, math.sqrt(x.shape[-2]) / reference.SMALLEST_ROW, to_norm_one=True)


def renormalize(x: Tensor) -> None:
    """x (B, m, n), contiguous, with every matrix scaled to the Frobenius norm sqrt(min(m, n)).

    Zeros stay zeros; an inf or NaN makes its matrix NaN.
    """
    _scale(x, math.sqrt(min(x.shape[-2:])), to_norm_one=False)


def _scale(x: Tensor, norm: float, *, to_norm_one: bool) -> None:
    if _runs_compiled(x):
        factors, _ = norm_factors(x, 1 / norm)
        ops.scale_rows(x, factors, to_norm_one)
    else:
        reference.scale_rows(x, reference.matrix_factors(x, norm), to_norm_one=to_norm_one)
