"""find_converged: which matrices a short polynomial did serve, known to the device alone.

path      | op             | source                    | taken
compiled  | find_converged | kernels-src/newton_schulz | capability 9.0, float16, m > 128
reference | none           | reference/subsets.py      | by tests
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import register_fake

from .._ops import add_op_namespace_prefix, ops
from .find_well_conditioned import WellConditioned


@register_fake(add_op_namespace_prefix("find_converged"))
def _fake(residual, bound, side, found, subset, rest, zeros):
    return None


def find_converged(
    residual: Tensor, bound: float, side: int, tried: WellConditioned, zeros: Tensor | None = None
) -> Tensor:
    """The subset of all matrices that are not converged; `tried.subset` keeps the converged ones.

    Converged: the squares of residual (G, m, m), as R of `find_well_conditioned`, of a matrix that
    was tried, add up to at most bound side. NaN is not. Rows beyond `side` hold -1 on the diagonal.
    `zeros`: (1 + G,) int32, which are used up; None makes some.
    """
    rest = torch.empty_like(tried.subset)
    zeros = torch.zeros_like(tried.subset) if zeros is None else zeros
    ops.find_converged(residual, bound, side, tried.found, tried.subset, rest, zeros)
    return rest
