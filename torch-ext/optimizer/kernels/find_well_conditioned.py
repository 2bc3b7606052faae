"""find_well_conditioned: Gram matrices that a short polynomial may serve, as the device knows them.

A subset is (1 + G,) int32: how many matrices of a batch, then which, in growing order. The compiled
products take one (`symmetric_matmul`, `matmul_add`, `square_chain`), work on those matrices and
leave the others as they are, so no host waits for the answer.

path      | op                    | source                    | taken
compiled  | find_well_conditioned | kernels-src/newton_schulz | capability 9.0, float16, m > 128
reference | none                  | reference/subsets.py      | by tests
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import register_fake

from .._ops import add_op_namespace_prefix, ops


@register_fake(add_op_namespace_prefix("find_well_conditioned"))
def _fake(r, prefactor, spread, side, factors, found, subset, zeros):
    return None


class WellConditioned(NamedTuple):
    """What `find_well_conditioned` knows of G matrices.

    `factors`, `roots` (G,): 1 / (prefactor ||R||_F) and its square root, as `norm_factors`;
    `narrow_factors`, `narrow_roots` (G,): 1 / u and its square root, 0 outside of the subset;
    `found` (G,) int32: 1 for matrices of `subset` (1 + G,).
    """

    factors: Tensor
    roots: Tensor
    narrow_factors: Tensor
    narrow_roots: Tensor
    found: Tensor
    subset: Tensor


def find_well_conditioned(
    R: Tensor, prefactor: float, spread: float, side: int, zeros: Tensor | None = None
) -> WellConditioned:
    """Matrices whose eigenvalues deviate from their mean t by at most spread t; unchecked.

    u = t (1 + d)^2, with d t the standard deviation: the largest eigenvalue of X X^T for large X of
    independent elements (Marchenko and Pastur, Math. USSR-Sb. 1 (1967)), and no bound for others.

    R (G, m, m) float16, symmetric, m > 128; what lies below the blocks on the diagonal is not read.
    Rows beyond `side` are zeros that fill it up. `zeros`: (1 + G,) int32, which are used up; None
    makes some.
    """
    factors = R.new_empty((4, len(R)), dtype=torch.float32)
    found, subset = (R.new_empty(n, dtype=torch.int32) for n in (len(R), 1 + len(R)))
    zeros = R.new_zeros(1 + len(R), dtype=torch.int32) if zeros is None else zeros
    ops.find_well_conditioned(R, prefactor, spread, side, factors, found, subset, zeros)
    return WellConditioned(*factors.unbind(), found, subset)
