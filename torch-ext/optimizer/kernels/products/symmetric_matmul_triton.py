"""Triton twin of symmetric_matmul, for GPUs that the compiled kernel does not cover.

out = scale (alpha A B^T + beta C) + diag I. Grid: one program per tile on or above the diagonal of
every matrix; each is stored twice, the second time transposed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton
from triton.runtime.jit import JITFunction

from ..._ops import add_op_namespace_prefix

_SIDE = 64
_DEPTH = 32


@triton.jit
def _triangle_root(t):
    """Largest j with j (j + 1) / 2 <= t; the float root is off by one at most."""
    j = ((tl.sqrt(8.0 * t.to(tl.float64) + 1.0) - 1.0) * 0.5).to(tl.int64)
    j = tl.where(j * (j + 1) // 2 > t, j - 1, j)
    return tl.where((j + 1) * (j + 2) // 2 <= t, j + 1, j)


@triton.jit
def _symmetric_matmul(  # noqa: PLR0913
    a,  # (B, m, k)
    b,  # (B, m, k)
    c,  # (B, m, m) if READS_C
    out,  # (B, m, m)
    m,
    k,
    tiles,  # per matrix
    a_batch,
    a_row,
    a_col,
    b_batch,
    b_row,
    b_col,
    c_batch,
    c_row,
    c_col,
    out_batch,
    out_row,
    out_col,
    alpha,
    beta,
    diag,
    scale,  # (B,) if SCALED
    READS_C: tl.constexpr,
    SCALED: tl.constexpr,
    WIDEN: tl.constexpr,
    SIDE: tl.constexpr,
    DEPTH: tl.constexpr,
):
    program = tl.program_id(0).to(tl.int64)
    matrix = program // tiles
    t = program % tiles
    j = _triangle_root(t)
    i = t - j * (j + 1) // 2
    rows = i * SIDE + tl.arange(0, SIDE).to(tl.int64)
    cols = j * SIDE + tl.arange(0, SIDE).to(tl.int64)
    depth = tl.arange(0, DEPTH).to(tl.int64)
    total = tl.zeros((SIDE, SIDE), tl.float32)
    for start in range(0, k, DEPTH):
        at = start + depth
        x_mask = (rows[:, None] < m) & (at[None, :] < k)
        y_mask = (cols[None, :] < m) & (at[:, None] < k)
        x_at = matrix * a_batch + rows[:, None] * a_row + at[None, :] * a_col
        y_at = matrix * b_batch + cols[None, :] * b_row + at[:, None] * b_col
        x = tl.load(a + x_at, mask=x_mask, other=0.0)
        y = tl.load(b + y_at, mask=y_mask, other=0.0)
        if WIDEN:  # the interpreter multiplies the bits of bfloat16 operands
            x, y = x.to(tl.float32), y.to(tl.float32)
        total = tl.dot(x, y, total, input_precision="ieee")
    inside = (rows[:, None] <= cols[None, :]) & (cols[None, :] < m)
    value = alpha * total
    if READS_C:
        at = matrix * c_batch + rows[:, None] * c_row + cols[None, :] * c_col
        value += beta * tl.load(c + at, mask=inside, other=0.0).to(tl.float32)
    if SCALED:
        value *= tl.load(scale + matrix)
    value = tl.where(rows[:, None] == cols[None, :], value + diag, value)
    value = value.to(out.dtype.element_ty)
    base = out + matrix * out_batch
    tl.store(base + rows[:, None] * out_row + cols[None, :] * out_col, value, mask=inside)
    above = inside & (rows[:, None] < cols[None, :])
    tl.store(base + cols[None, :] * out_row + rows[:, None] * out_col, value, mask=above)


@triton_op(
    add_op_namespace_prefix("symmetric_matmul_triton"),
    mutates_args=("out",),
    schema="(Tensor a, Tensor b, Tensor? c, Tensor(a!) out, float alpha, float beta, float diag, "
    "Tensor? scale=None) -> ()",
)
def symmetric_matmul_triton(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    out: Tensor,
    alpha: float,
    beta: float,
    diag: float,
    scale: Tensor | None = None,
) -> None:
    """Launch `_symmetric_matmul`; the arguments were checked by `symmetric_matmul`."""
    batch, m, k = a.shape
    side = triton.cdiv(m, _SIDE)
    tiles = side * (side + 1) // 2
    if batch * tiles == 0:
        return
    # wrap_triton takes compiled kernels only; TRITON_INTERPRET=1 makes interpreted ones.
    compiled = isinstance(_symmetric_matmul, JITFunction)
    kernel = wrap_triton(_symmetric_matmul) if compiled else _symmetric_matmul
    added = out if c is None else c
    kernel[(batch * tiles,)](
        a,
        b,
        added,
        out,
        m,
        k,
        tiles,
        *a.stride(),
        *b.stride(),
        *added.stride(),
        *out.stride(),
        alpha,
        beta,
        diag,
        out if scale is None else scale,
        READS_C=c is not None,
        SCALED=scale is not None,
        WIDEN=not compiled and a.dtype == torch.bfloat16,
        SIDE=_SIDE,
        DEPTH=_DEPTH,
    )
