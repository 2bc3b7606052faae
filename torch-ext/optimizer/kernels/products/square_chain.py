"""square_chain: M_0 = s X, M_j+1 = alpha M_j M_j^T + beta M_i + delta I (i <= j), the last of them.

What a polynomial of high degree in a symmetric matrix is made of. One launch for all squares of a
batch: groups of matrices go through the whole chain while they are in L2, and no multiprocessor is
idle between two products. Bits are those of `symmetric_matmul` product by product.

path      | op               | source                       | taken
compiled  | square_chain     | kernels-src/products/*sm90*  | capability 9.0, float16
products  | symmetric_matmul | products/symmetric_matmul.py | everything else, by the caller
reference | none             | reference/orthogonalize.py   | by tests

Sums are float32, every M but M_0 is rounded once to float16; M_0 is never rounded. A matrix gives
the same bits in any batch. Evaluating by squares: Paterson and Stockmeyer, SIAM J. Comput. 2, 1973.

Every matrix is in upper storage: blocks of 128 x 128 below the diagonal are neither read nor
written (10 of 16 are left for m = 512, 36 of 64 for m = 1024).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch.library import register_fake

from ... import dispatch
from ..._ops import add_op_namespace_prefix

# kMostSquares and kMostBuffers of kernels-src/products/chain.h, which a test compares.
MOST_SQUARES = 8
MOST_BUFFERS = 6
SIDE = 128  # of a tile, and of a block of upper storage

Square = tuple[int, float, float, float]  # i, alpha, beta, delta


@register_fake(add_op_namespace_prefix("square_chain"))
def _fake(buffers, places, operands, alphas, betas, deltas, scale, groups, zeros=None):
    return None


def places_of(operands: Sequence[int]) -> tuple[list[int], int]:
    """Which buffer takes M_j+1, for every j, and how many buffers there are; X lies in buffer 0.

    A buffer is free for product j if products 0 to j - 1 alone read what it holds: of one matrix
    these are done when product j begins (`chain_refusal` of kernels-src/products/chain.h). So
    few buffers take turns, and what L2 holds of a group is all that is written. 8 squares need 6.
    """
    held, places = {0: 0}, []  # buffer -> the M in it
    for j in range(len(operands)):
        needed = {j, *operands[j:]}
        free = [b for b, i in held.items() if i not in needed]
        places.append(free[0] if free else len(held))
        held[places[-1]] = j + 1
    return places, len(held)


def serves(batch: int, m: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether the kernel is there for (batch, m, m), m in eights, and not the slower way.

    It is where a product has a tile for every second multiprocessor; of fewer, smaller tiles are
    faster, which `symmetric_matmul` has. The bits are the same, so this may look at the batch.
    """
    if dtype != torch.float16 or not dispatch.runs_compiled("square_chain", device):
        return False
    return 2 * batch * tiles(m) >= _processors(device)


@functools.cache
def _processors(device: torch.device) -> int:
    """Multiprocessors; torch takes the host 5 us to look a device up."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def tiles(m: int) -> int:
    """Tiles on and above the diagonal of an m x m matrix."""
    side = -(-m // SIDE)
    return side * (side + 1) // 2
