"""Triton path of combine: out[t] = sum_j gates[t, j] y[rows[t k + j]] over valid rows.

Grid: one program per (token, block of columns); y is read once and out written once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..launch.launch_plan import launch

_BLOCK = 1024


@triton.jit
def _combine(  # noqa: PLR0913
    y,  # (R, N)
    gates,  # (T, k) if GATED
    rows,  # (R,)
    offsets,  # (E + 1,)
    out,  # (T, N), contiguous
    N,
    top_k,
    experts,
    y_row,
    y_col,
    gates_token,
    gates_choice,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    columns = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    valid_rows = tl.load(offsets + experts)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(top_k):
        row = tl.load(rows + token * top_k + j)
        valid = row < valid_rows
        mask = (columns < N) & valid
        value = tl.load(y + row * y_row + columns * y_col, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            at = gates + token * gates_token + j * gates_choice
            value *= tl.load(at, mask=valid, other=0.0).to(tl.float32)
        total += value
    tl.store(out + token * N + columns, total.to(out.dtype.element_ty), mask=columns < N)


def combine_triton(
    y: Tensor,
    gates: Tensor | None,
    rows: Tensor,
    offsets: Tensor,
    top_k: int,
    out: Tensor | None = None,
) -> Tensor:
    """Launch `_combine`; arguments as in `combine`, and where the result (T, N) goes."""
    tokens, n = rows.shape[0] // top_k, y.shape[1]
    out = y.new_empty((tokens, n)) if out is None else out
    if tokens == 0:
        return out
    block = min(_BLOCK, triton.next_power_of_2(n))
    launch(_combine, (tokens, triton.cdiv(n, block)))(
        y,
        y if gates is None else gates,
        rows,
        offsets,
        out,
        n,
        top_k,
        offsets.shape[0] - 1,
        *y.stride(),
        *((0, 0) if gates is None else gates.stride()),
        GATED=gates is not None,
        BLOCK=block,
    )
    return out
