"""square_chain: M_0 = s X, M_j+1 = alpha M_j M_j^T + beta M_i + delta I (i <= j), the last of them.

What a polynomial of high degree in a symmetric matrix is made of. One launch for all squares of a
batch: groups of matrices go through the whole chain while they are in L2, and no multiprocessor is
idle between two products. Bits are those of `symmetric_matmul` product by product.

path      | op                | source                           | taken
compiled  | square_chain      | kernels-src/newton_schulz/*sm90* | capability 9.0, half precision
products  | symmetric_matmul  | kernels/symmetric_matmul.py      | other CUDA >= 8.0
reference | square_chain_auto | reference/square_chain.py        | everything else

The compiled path needs rows that TMA can take. The pick looks at addresses, so it is made inside of
an op, which torch.compile does not look into; `chain` is for callers that are inside of one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op, register_fake

from .._ops import add_op_namespace_prefix, ops
from ..reference import square_chain as reference
from ._operands import DTYPES, kind
from .matmul_add import by_tma
from .symmetric_matmul import AUTO, runs_compiled

# kMostSquares and kMostBuffers of kernels-src/newton_schulz/chain.h, which a test compares.
MOST_SQUARES = 8
MOST_BUFFERS = 6
HALF_PRECISION = (torch.float16, torch.bfloat16)
# Numbers of the compiled op's tiles; AUTO takes the smaller one where tiles are few.
TILES = ("sm90_128x128", "sm90_64x128")

Square = tuple[int, float, float, float]  # i, alpha, beta, delta


@register_fake(add_op_namespace_prefix("square_chain"))
def _fake(buffers, places, operands, alphas, betas, deltas, scale, groups, tile):
    return None


@custom_op(
    add_op_namespace_prefix("square_chain_auto"),
    mutates_args=("buffers",),
    schema="(Tensor(a!)[] buffers, int[] places, int[] operands, float[] alphas, float[] betas, "
    "float[] deltas, Tensor? scale) -> ()",
)
def _auto(
    buffers: Sequence[Tensor],  # (G, m, m) each
    places: Sequence[int],
    operands: Sequence[int],
    alphas: Sequence[float],
    betas: Sequence[float],
    deltas: Sequence[float],
    scale: Tensor | None,  # (G,)
) -> None:
    squares = list(zip(operands, alphas, betas, deltas, strict=True))
    chain(buffers, places, squares, scale)


_auto.register_fake(lambda *_: None)


def chain(
    buffers: Sequence[Tensor],  # (G, m, m) each; the first one is X
    places: Sequence[int],
    squares: Sequence[Square],
    scale: Tensor | None = None,  # (G,) float32
    groups: int = 0,
    tile: int = AUTO,
) -> Tensor:
    """M_j+1 into buffers[places[j]], unchecked; the last one.

    `groups` that the batch is walked in (0: the kernel's choice) and `tile` change no bit.
    """
    if takes_compiled(buffers):
        columns = ([square[k] for square in squares] for k in range(4))
        ops.square_chain(list(buffers), list(places), *columns, scale, groups, tile)
    elif runs_compiled(buffers[0].device, buffers[0].dtype):
        _products(buffers, places, squares, scale)
    else:
        buffers[places[-1]].copy_(reference.square_chain(buffers[0], squares, scale))
    return buffers[places[-1]]


def _products(
    buffers: Sequence[Tensor],
    places: Sequence[int],
    squares: Sequence[Square],
    scale: Tensor | None,
) -> None:
    """The same, product by product."""
    terms = [buffers[0]]
    for j, (operand, alpha, beta, delta) in enumerate(squares):
        out = buffers[places[j]]
        powers = (2 if j == 0 else 0, 1 if operand == 0 else 0)
        A, C = terms[j], terms[operand]
        ops.symmetric_matmul(A, A, C, out, alpha, beta, delta, AUTO, scale, *powers)
        terms.append(out)


def places_of(operands: Sequence[int], overwrite: bool) -> tuple[list[int], int]:
    """Which buffer takes M_j+1, for every j, and how many buffers there are; X lies in buffer 0.

    A buffer is free for product j if products 0 to j - 1 alone read what it holds: of one matrix
    these are done when product j begins (`chain_refusal` of kernels-src/newton_schulz/chain.h). So
    few buffers take turns, and what L2 holds of a group is all that is written. 8 squares need 6.
    """
    held, places = {0: 0}, []  # buffer -> the M in it
    for j in range(len(operands)):
        needed = {j, *operands[j:]}
        free = [b for b, i in held.items() if i not in needed and (overwrite or b > 0)]
        places.append(free[0] if free else len(held))
        held[places[-1]] = j + 1
    return places, len(held)


def buffers_for(x: Tensor, count: int) -> list[Tensor]:
    """x (G, m, m) and count - 1 like it, with half-precision rows on 16 bytes."""
    batch, m, _ = x.shape
    pitch = -(-m // 8) * 8
    return [x, *(x.new_empty((batch, m, pitch))[..., :m] for _ in range(count - 1))]


def runs_chain(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the compiled kernel serves tensors of this dtype, if TMA can take their rows."""
    return dtype in HALF_PRECISION and _serves(device)


@functools.cache
def _serves(device: torch.device) -> bool:
    name = add_op_namespace_prefix("square_chain")
    return (
        device.type == "cuda"
        and torch.version.hip is None
        and torch.cuda.get_device_capability(device) == (9, 0)
        and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA")
    )


def takes_compiled(buffers: Sequence[Tensor]) -> bool:
    """Whether `chain` runs the compiled op."""
    x = buffers[0]
    rows = all(by_tma(buffer) and buffer.stride(-1) == 1 for buffer in buffers)
    return runs_chain(x.device, x.dtype) and min(x.shape) > 0 and rows


def square_chain(
    X: Tensor,
    squares: Sequence[Square],
    scale: Tensor | None = None,
    *,
    overwrite: bool = False,
) -> Tensor:
    """The last M of M_0 = scale X, M_j+1 = alpha M_j M_j^T + beta M_i + delta I, all symmetric.

    Sums are float32 (float64 on the CPU), every M but M_0 is rounded once to X's dtype; M_0 is
    never rounded. A matrix gives the same bits in any batch. Builds no autograd graph.

    Args:
        X: (G, m, m), symmetric, float16, bfloat16 or float32.
        squares: (i, alpha, beta, delta) for each j from 0, 0 <= i <= j; 1 to 8 of them.
        scale: (G,) float32 on X's device; None means 1.
        overwrite: X's memory may be written; it saves a buffer of its size.

    Returns:
        (G, m, m) in X's dtype; with `overwrite` maybe in X's memory.

    Raises:
        TypeError: An argument is of a wrong kind or dtype.
        ValueError: Shapes or devices do not fit, an i is not in 0 .. j, or there are too many
            squares.

    Source: evaluating by squares, Paterson and Stockmeyer, SIAM J. Comput. 2 (1973).
    """
    _check(X, squares, scale)
    columns = [[square[k] for square in squares] for k in range(4)]
    columns[1:] = [[float(value) for value in column] for column in columns[1:]]
    places, count = places_of(columns[0], overwrite)
    buffers = buffers_for(X.detach(), count)
    if X.numel() > 0:
        with torch.no_grad():
            ops.square_chain_auto(buffers, places, *columns, None if scale is None else scale)
    return buffers[places[-1]]


def _check(X: Tensor, squares: Sequence[Square], scale: Tensor | None) -> None:
    if not isinstance(X, Tensor) or X.layout != torch.strided or X.dtype not in DTYPES:
        raise TypeError(f"X must be dense, of {DTYPES}, got {kind(X)}")
    if X.ndim != 3 or X.shape[1] != X.shape[2]:
        raise ValueError(f"X must be (G, m, m), got shape {tuple(X.shape)}")
    if not 1 <= len(squares) <= MOST_SQUARES:
        raise ValueError(f"squares must be 1 to {MOST_SQUARES}, got {len(squares)}")
    for j, square in enumerate(squares):
        if len(square) != 4 or isinstance(square[0], bool) or not isinstance(square[0], int):
            raise TypeError(f"squares[{j}] must be (i, alpha, beta, delta), got {square!r}")
        if any(isinstance(v, bool) or not isinstance(v, (int, float)) for v in square[1:]):
            raise TypeError(f"squares[{j}] must hold numbers, got {square!r}")
        if not 0 <= square[0] <= j:
            raise ValueError(f"squares[{j}] adds M_{square[0]}; there are M_0 to M_{j} before it")
    if scale is None:
        return
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
        raise TypeError(f"scale must be a float32 tensor, got {kind(scale)}")
    if scale.shape != X.shape[:1] or not scale.is_contiguous():
        raise ValueError(
            f"scale must be ({len(X)},), contiguous, one factor per matrix of X, got shape "
            f"{tuple(scale.shape)} with strides {scale.stride()}"
        )
    if scale.device != X.device:
        raise ValueError(f"scale must be on the device of X {X.device}, got {scale.device}")
