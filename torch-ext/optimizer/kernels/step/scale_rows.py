"""scale_rows: matrices before and after the iteration, in place.

equilibrate_rows gives every row the norm 1 (MuonEq), renormalize every matrix the norm of a
semi-orthogonal one (Muon+). Formulas and sources: reference/update.py.

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
def _fake(x, factors=None):
    return None


def _runs_compiled(x: Tensor) -> bool:
    return x.numel() > 0 and x.dtype in DTYPES and dispatch.runs_compiled("scale_rows", x.device)


def equilibrate_rows(x: Tensor) -> None:
    """x (B, m, n), contiguous, with every row divided by its norm, or by 1e-6 if that is more.

    One rounding; a row has the same bits in any batch. An inf or NaN makes its row NaN.
    """
    if _runs_compiled(x):
        ops.scale_rows(x)
    else:
        reference.scale_rows(x)


def renormalize(x: Tensor) -> None:
    """x (B, m, n), contiguous, with every matrix scaled to the Frobenius norm sqrt(min(m, n)).

    One rounding; a matrix has the same bits in any batch. An inf or NaN makes its matrix NaN.
    """
    if _runs_compiled(x):
        factors, _ = norm_factors(x, 1 / math.sqrt(min(x.shape[-2:])))
        ops.scale_rows(x, factors)
    else:
        reference.scale_rows(x, reference.matrix_factors(x))
