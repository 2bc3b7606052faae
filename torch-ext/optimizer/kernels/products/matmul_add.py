"""matmul_add: s (alpha A B + beta C), the dense products of an iteration: Q X and a X + B X.

path     | op         | source                      | taken
compiled | matmul_add | kernels-src/products/*sm90* | capability 9.0, half precision, operands that
         |            |                             | TMA can take, by the caller
torch    | none       | torch's baddbmm or bmm      | everything else, by the caller

Sums are float32, the scalars and C are applied in float32, and the result is rounded once. A matrix
gives the same bits in any batch.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import register_fake

from ... import dispatch
from ..._ops import add_op_namespace_prefix

# Numbers of the compiled op's tiles: the order of kMatmulAddTiles in
# kernels-src/products/tiles_sm90.h, which a test compares.
TILES = ("sm90_128x256", "sm90_256x128", "sm90_128x128")
AUTO = -1
HALF_PRECISION = (torch.float16, torch.bfloat16)


@register_fake(add_op_namespace_prefix("matmul_add"))
def _fake(a, b, c, out, alpha, beta, tile, scale=None, upper=0):
    return None


def runs_compiled(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the compiled kernel serves tensors of this dtype, if TMA can take their strides."""
    return dtype in HALF_PRECISION and dispatch.runs_compiled("matmul_add", device)


def by_tma(x: Tensor) -> bool:
    """Whether TMA can take x (B, rows, cols): `fits_tensor_map` of sm90/problem.h."""
    batch, row, col = x.stride()
    line = row if col == 1 else col
    return (
        1 in (row, col)
        and x.data_ptr() % 16 == 0
        and line % 8 == 0
        and line > 0
        and (x.shape[0] == 1 or (batch % 8 == 0 and batch > 0))
    )
