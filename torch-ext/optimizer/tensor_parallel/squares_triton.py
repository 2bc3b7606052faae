"""Sums of squares by Triton: those of a norm, and of the diagonal of a matrix's square.

Launches are recorded and played (`kernels.launch`), so that none needs a C compiler.

sum_of_squares   one program per block of elements, in float64, and torch's sum of theirs. torch's
                 norm in float64 first writes its operand in that dtype.
square_diagonal  one program per row: alpha ||row||^2 + beta C + delta in float32, rounded once. Two
                 of the three launches of torch's step through memory by whole rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.launch.launch_plan import launch, replayed

_BLOCK = 8192  # elements: with 4 warps 8 loads of 16 bytes per thread in half precision


@triton.jit
def _squares(x, sums, total, BLOCK: tl.constexpr):
    block = tl.program_id(0).to(tl.int64)
    at = block * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < total, other=0.0).to(tl.float64)
    tl.store(sums + block, tl.sum(value * value, 0))


def sum_of_squares(x: Tensor) -> Tensor:
    """The sum of the squares of all elements of x, a number in float64."""
    (sums,) = replayed("sum_of_squares", _sums, (x.contiguous(),), ())
    return sums.sum()


def _sums(x: Tensor) -> list[Tensor]:
    sums = x.new_empty(triton.cdiv(x.numel(), _BLOCK), dtype=torch.float64)
    launch(_squares, (len(sums),))(x, sums, x.numel(), BLOCK=_BLOCK)
    return [sums]


@triton.jit
def _diagonal(
    M,  # (r, n), contiguous
    added,  # (r,)
    out,  # (r,)
    n,
    added_step,
    out_step,
    alpha,
    beta,
    delta,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    term = beta * tl.load(added + row * added_step).to(tl.float32) + delta
    total = 0.0
    for start in range(0, n, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(M + row * n + column, mask=column < n, other=0.0).to(tl.float32)
        total += tl.sum(value * value, 0)
    tl.store(out + row * out_step, (alpha * total + term).to(out.dtype.element_ty))


def square_diagonal(
    M: Tensor, C: Tensor, out: Tensor, *, alpha: float, beta: float, delta: float
) -> None:
    """`orthogonalize.products.square_diagonal` of contiguous rows M (r, n), in one launch."""
    replayed("square_diagonal", _write_diagonal, (M, C, out), (alpha, beta, delta))


def _write_diagonal(M: Tensor, C: Tensor, out: Tensor, *scalars: float) -> list[Tensor]:
    steps = (C.stride(0), out.stride(0))
    launch(_diagonal, (len(M),))(M, C, out, M.shape[1], *steps, *scalars, BLOCK=_BLOCK)
    return [M.new_empty(0)]  # what is played has a result
