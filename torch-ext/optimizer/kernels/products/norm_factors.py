"""norm_factors: 1 / (prefactor ||x||_F) of every matrix of a batch, and its square root.

What `normalize` would multiply by, for products that take a scale instead of a scaled operand.

path      | op                     | source                    | taken
compiled  | norm_factors           | kernels-src/products | CUDA >= 8.0, up to float32
reference | norm_factors_reference | reference/normalize.py    | everything else
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.library import custom_op, register_fake

from ..._ops import add_op_namespace_prefix, ops
from ...reference import normalize as reference
from . import operands as _operands
from .normalize import runs_compiled

DTYPES = (*_operands.DTYPES, torch.float64)


@register_fake(add_op_namespace_prefix("norm_factors"))
def _fake(x, factors, roots, prefactor, symmetric=False):
    return None


@custom_op(
    add_op_namespace_prefix("norm_factors_reference"),
    mutates_args=("factors", "roots"),
    schema="(Tensor x, Tensor(a!) factors, Tensor(b!) roots, float prefactor, "
    "bool symmetric=False) -> ()",
)
def _reference(
    x: Tensor,  # (G, r, c)
    factors: Tensor,  # (G,)
    roots: Tensor,  # (G,)
    prefactor: float,
    symmetric: bool = False,
) -> None:
    value = reference.norm_factors(x, prefactor)
    factors.copy_(value)
    roots.copy_(value.sqrt())


_reference.register_fake(lambda *_, **__: None)


def norm_factors(
    x: Tensor, prefactor: float = 1.0, *, symmetric: bool = False
) -> tuple[Tensor, Tensor]:
    """1 / (prefactor ||x||_F) of every matrix, without epsilon, and its square root.

    Sums are double. A matrix gives the same bits in any batch. Builds no autograd graph.

    Args:
        x: (G, r, c), not empty but for G; float16, bfloat16, float32 or float64, any strides.
        prefactor: Positive number.
        symmetric: Promises that every matrix equals its transpose, as a Gram matrix does; what lies
            below the diagonal may then go unread.

    Returns:
        (G,) and (G,), float32: 0 for a zero matrix, NaN for one with an inf or NaN, inf where the
        value exceeds float32.

    Raises:
        TypeError: An argument is of a wrong kind or dtype.
        ValueError: A wrong shape, or prefactor is not positive, or symmetric for r != c.
    """
    if not isinstance(x, Tensor) or x.layout != torch.strided or x.dtype not in DTYPES:
        raise TypeError(f"x must be dense, of {DTYPES}, got {_operands.kind(x)}")
    if x.ndim != 3 or 0 in x.shape[1:]:
        raise ValueError(f"x must be (G, r, c) with r, c > 0, got shape {tuple(x.shape)}")
    if symmetric and x.shape[1] != x.shape[2]:
        raise ValueError(f"a symmetric x must be (G, m, m), got shape {tuple(x.shape)}")
    if isinstance(prefactor, bool) or not isinstance(prefactor, (int, float)):
        raise TypeError(f"prefactor must be a number, got {_operands.kind(prefactor)}")
    if not (prefactor > 0 and math.isfinite(prefactor)):
        raise ValueError(f"prefactor must be positive and finite, got {prefactor}")
    factors, roots = x.new_empty((2, len(x)), dtype=torch.float32)
    compiled = runs_compiled(x.device, x.dtype, x.dtype)
    op = ops.norm_factors if compiled else ops.norm_factors_reference
    with torch.no_grad():
        op(x.detach(), factors, roots, float(prefactor), bool(symmetric))
    return factors, roots
