"""crop: out = x[:, :r, :c], at the rate of memory whatever the alignment of out's rows.

How an iteration's result leaves its frame of zeros. Words of 16 bytes of out are put together from
two of x; torch's copy of such rows goes element by element.

path      | op   | source                    | taken
compiled  | crop | kernels-src/products | CUDA >= 8.0, float16 and bfloat16
copy_     | none | torch                     | everything else, by the caller
reference | none | reference/crop.py         | by tests
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import register_fake

from ..._ops import add_op_namespace_prefix
from .normalize import runs_compiled

LANES = 8  # elements in 16 bytes


@register_fake(add_op_namespace_prefix("crop"))
def _fake(x, out):
    return None


def serves(x: Tensor, out: Tensor) -> bool:
    """Whether the kernel takes x (G, R, C) and out (G, r, c), which fits into it."""
    return (
        x.dtype == out.dtype
        and x.dtype in (torch.float16, torch.bfloat16)
        and runs_compiled(x.device, x.dtype, out.dtype)
        and x.is_contiguous()
        and x.shape[-1] % LANES == 0
        and x.storage_offset() % LANES == 0
        and out.stride(-1) == 1
    )
