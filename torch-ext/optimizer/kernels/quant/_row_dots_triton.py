"""What follows a compiled product over 4-bit weights whose rows meet others: one pass over them."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..launch.launch_plan import launch

_BLOCK = 1024


@triton.jit
def _gate_and_dot(  # noqa: PLR0913
    out,  # (R, N), contiguous, in slot order if SCATTER
    other,  # rows of N
    gates,  # (R,) in slot order if GATED
    slots,  # (R,)
    offsets,  # (E + 1,)
    dots,  # (R,) in slot order
    width,  # N
    experts,
    other_row,
    other_col,
    FAN: tl.constexpr,  # where row i lies in other: 0 at i, f > 0 at slots[i] // f
    SCATTER: tl.constexpr,
    GATED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    known = row < tl.load(offsets + experts)  # else a sentinel, whose other row may be anything
    source = row if FAN == 0 else slot // FAN
    at_out = out + (slot if SCATTER else row) * width
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        columns = (first + tl.arange(0, BLOCK)).to(tl.int64)
        mask = (columns < width) & known
        value = tl.load(at_out + columns, mask=mask, other=0.0).to(tl.float32)
        at_other = other + source * other_row + columns * other_col
        total += value * tl.load(at_other, mask=mask, other=0.0).to(tl.float32)
        if GATED:
            value *= tl.load(gates + slot).to(tl.float32)
            tl.store(at_out + columns, value.to(out.dtype.element_ty), mask=mask)
    tl.store(dots + slot, tl.sum(total, 0))


def gate_and_dot(
    out: Tensor,  # (R, N), contiguous
    other: Tensor,  # rows of N
    gates: Tensor | None,  # (T, k)
    slots: Tensor,
    offsets: Tensor,
    fan: int,
    scatter: bool,
) -> Tensor:
    """<row of out, row of other> (R,) float32 in slot order, and out times gates, in place."""
    rows, width = out.shape
    dots = torch.empty(rows, dtype=torch.float32, device=out.device)
    if rows == 0:
        return dots
    launch(_gate_and_dot, (rows,))(
        out,
        other,
        out if gates is None else gates.contiguous(),
        slots,
        offsets,
        dots,
        width,
        offsets.shape[0] - 1,
        *other.stride(),
        FAN=fan,
        SCATTER=scatter,
        GATED=gates is not None,
        BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
    )
    return dots
