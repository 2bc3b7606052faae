"""normalize, norm_factors, crop: into the frame of zeros that an iteration runs in, and out of it.

normalize: out = x / (prefactor ||x||_F) for every matrix of a batch. Squares are added in double,
the factor is computed in double, an element is multiplied by it in float32 and rounded once to
out's dtype. The op reads x once, as far as shared memory holds what waits for its factor, and again
what it had no room for; it writes out. One persistent kernel behind a short one that clears its
flags; no copy of x.

norm_factors: 1 / (prefactor ||x||_F) of every matrix and its square root, for products that take a
scale instead of a scaled operand.

crop: out = x[:, :r, :c], at the rate of memory whatever the alignment of out's rows. Words of 16
bytes of out are put together from two of x; torch's copy of such rows goes element by element.

path      | ops                           | source                          | taken
compiled  | normalize, norm_factors, crop | kernels-src/products/normalize/ | CUDA >= 8.0, up to
          |                               |                                 | float32; crop: 16 bits
torch     | none                          | orthogonalize/slices.py          | everything else
reference | none                          | reference/orthogonalize.py      | by tests
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import register_fake

from ... import dispatch
from ..._ops import add_op_namespace_prefix, ops
from .operands import DTYPES

LANES = 8  # elements in 16 bytes


@register_fake(add_op_namespace_prefix("normalize"))
def _fake_normalize(pieces, out, prefactor, zeros=None):
    return None


@register_fake(add_op_namespace_prefix("norm_factors"))
def _fake_norm_factors(x, factors, roots, prefactor, symmetric=False):
    return None


@register_fake(add_op_namespace_prefix("crop"))
def _fake_crop(x, out):
    return None


def runs_compiled(device: torch.device, source: torch.dtype, target: torch.dtype) -> bool:
    """Whether the kernels take matrices of one dtype to another on this device."""
    return source in DTYPES and target in DTYPES and dispatch.runs_compiled("normalize", device)


def norm_factors(
    x: Tensor,  # (G, r, c), not empty but for G
    prefactor: float = 1.0,
    *,
    symmetric: bool = False,
) -> tuple[Tensor, Tensor]:
    """1 / (prefactor ||x||_F) of every matrix and its square root; unchecked, where compiled.

    Sums are double. A matrix gives the same bits in any batch. `symmetric` promises that every
    matrix equals its transpose; what lies below the diagonal may then go unread.

    Returns:
        (G,) and (G,), float32: 0 for a zero matrix, NaN for one with an inf or NaN, inf where the
        value exceeds float32.
    """
    factors, roots = x.new_empty((2, len(x)), dtype=torch.float32)
    ops.norm_factors(x, factors, roots, prefactor, symmetric)
    return factors, roots


def crop_serves(x: Tensor, out: Tensor) -> bool:
    """Whether crop takes x (G, R, C) and out (G, r, c), which fits into it."""
    return (
        x.dtype == out.dtype
        and x.dtype in (torch.float16, torch.bfloat16)
        and runs_compiled(x.device, x.dtype, out.dtype)
        and x.is_contiguous()
        and x.shape[-1] % LANES == 0
        and x.storage_offset() % LANES == 0
        and out.stride(-1) == 1
    )
