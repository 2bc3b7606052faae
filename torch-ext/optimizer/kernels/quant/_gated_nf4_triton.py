"""The activation's gradient between two products over 4-bit experts, in one pass.

A program takes a row: the gradient of h comes before its gate, and meets h, made again from gate
and up, for the gate's own gradient.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ..experts.rows_triton import KINDS, _activation, _factor
from ..launch.launch_plan import launch

_BLOCK = 1024


@triton.jit
def _glu_backward_dots(
    d,  # (R, I), contiguous: the gradient of h before its gate
    wide,  # (R, 2I), contiguous: gate and up
    gates,  # (R,) in slot order
    slots,  # (R,)
    out,  # (R, 2I), contiguous, if STORES
    dots,  # (R,) in slot order if DOTS: <d, h>
    width,  # I
    KIND: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    STORES: tl.constexpr,
    DOTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + row)
    gate_of_row = tl.load(gates + slot).to(tl.float32)
    wide += row * 2 * width
    out += row * 2 * width
    total = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, width, BLOCK):
        columns = first + tl.arange(0, BLOCK)
        mask = columns < width
        gate_at = 2 * columns if INTERLEAVED else columns
        up_at = gate_at + 1 if INTERLEAVED else width + columns
        gate = tl.load(wide + gate_at, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(wide + up_at, mask=mask, other=0.0).to(tl.float32)
        dh = tl.load(d + row * width + columns, mask=mask, other=0.0).to(tl.float32)
        value, value_slope = _activation(gate, KIND)
        factor, factor_slope = _factor(up, KIND)
        if DOTS:
            h = (value * factor).to(wide.dtype.element_ty).to(tl.float32)
            total += tl.where(mask, dh * h, 0.0)
        if STORES:
            dh *= gate_of_row
            d_gate = (dh * factor * value_slope).to(out.dtype.element_ty)
            d_up = (dh * value * factor_slope).to(out.dtype.element_ty)
            tl.store(out + gate_at, d_gate, mask=mask)
            tl.store(out + up_at, d_up, mask=mask)
    if DOTS:
        tl.store(dots + slot, tl.sum(total, 0))


def glu_backward_dots(
    d: Tensor,  # (R, I)
    wide: Tensor,  # (R, 2I)
    gates: Tensor,  # (T, k)
    slots: Tensor,  # (R,)
    out: Tensor,  # (R, 2I), or without rows
    dots: Tensor,  # (R,) float32, or empty
    *,
    activation: str,
    interleaved: bool,
) -> None:
    """Fill the gradient of gate and up, and <d, h>; all contiguous, what is empty is not wanted."""
    rows, width = d.shape
    if rows == 0 or (out.numel() == 0 and dots.numel() == 0):
        return
    launch(_glu_backward_dots, (rows,))(
        d,
        wide,
        gates.contiguous(),
        slots,
        out,
        dots,
        width,
        KIND=KINDS[activation],
        INTERLEAVED=interleaved,
        STORES=out.numel() > 0,
        DOTS=dots.numel() > 0,
        BLOCK=min(_BLOCK, triton.next_power_of_2(width)),
    )
