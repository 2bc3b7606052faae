"""Triton path of glu: one program per (row, block of columns), forward and backward.

tanh(x) = 2 sigmoid(2 x) - 1, so that the interpreter and every backend compute the same.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...reference.glu import ELEMENTWISE, GPT_OSS_ALPHA, GPT_OSS_LIMIT
from ..launch.launch_plan import launch

KINDS = {name: kind for kind, name in enumerate((*ELEMENTWISE, "gpt_oss"))}
_SILU = tl.constexpr(KINDS["silu"])
_GELU = tl.constexpr(KINDS["gelu"])
_GELU_TANH = tl.constexpr(KINDS["gelu_tanh"])
_RELU = tl.constexpr(KINDS["relu"])
_RELU2 = tl.constexpr(KINDS["relu2"])
_GPT_OSS = tl.constexpr(KINDS["gpt_oss"])
_ALPHA = tl.constexpr(GPT_OSS_ALPHA)
_LIMIT = tl.constexpr(GPT_OSS_LIMIT)
_BLOCK = 1024


@triton.jit
def _activation(gate, KIND: tl.constexpr):
    """(act(gate), its derivative) in float32."""
    if KIND == _RELU:
        return tl.maximum(gate, 0.0), tl.where(gate > 0, 1.0, 0.0)
    if KIND == _RELU2:
        positive = tl.maximum(gate, 0.0)
        return positive * positive, 2.0 * positive
    if KIND == _GELU:
        cdf = 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476))  # 1 / sqrt(2)
        density = 0.3989422804014327 * tl.exp(-0.5 * gate * gate)  # 1 / sqrt(2 pi)
        return gate * cdf, cdf + gate * density
    if KIND == _GELU_TANH:  # gate * sigmoid(2 sqrt(2 / pi) (gate + 0.044715 gate^3))
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        slope = 1.5957691216057308 * (1.0 + 0.134145 * gate * gate)
        cdf = tl.sigmoid(inner)
        return gate * cdf, cdf + gate * cdf * (1.0 - cdf) * slope
    if KIND == _GPT_OSS:
        clamped = tl.minimum(gate, _LIMIT)
        cdf = tl.sigmoid(clamped * _ALPHA)
        slope = cdf + clamped * cdf * (1.0 - cdf) * _ALPHA
        return clamped * cdf, tl.where(gate <= _LIMIT, slope, 0.0)
    cdf = tl.sigmoid(gate)
    return gate * cdf, cdf + gate * cdf * (1.0 - cdf)


@triton.jit
def _factor(up, KIND: tl.constexpr):
    """(what the activation is multiplied with, its derivative) in float32."""
    if KIND == _GPT_OSS:
        inside = (up >= -_LIMIT) & (up <= _LIMIT)
        clamped = tl.minimum(tl.maximum(up, -_LIMIT), _LIMIT)
        return clamped + 1.0, tl.where(inside, 1.0, 0.0)
    return up, tl.full(up.shape, 1.0, tl.float32)


@triton.jit
def _glu(
    gate_up,  # (M, 2I)
    grad,  # (M, I) if BACKWARD
    out,  # (M, I), or (M, 2I) if BACKWARD; contiguous
    width,  # I
    row_stride,
    col_stride,
    grad_row,
    grad_col,
    KIND: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    BACKWARD: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = (tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)).to(tl.int64)
    mask = columns < width
    gate_at = 2 * columns if INTERLEAVED else columns
    up_at = gate_at + 1 if INTERLEAVED else width + columns
    base = gate_up + row * row_stride
    gate = tl.load(base + gate_at * col_stride, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(base + up_at * col_stride, mask=mask, other=0.0).to(tl.float32)
    value, value_slope = _activation(gate, KIND)
    factor, factor_slope = _factor(up, KIND)
    if BACKWARD:
        at = grad + row * grad_row + columns * grad_col
        dy = tl.load(at, mask=mask, other=0.0).to(tl.float32)
        target = out + row * 2 * width
        d_gate = (dy * factor * value_slope).to(out.dtype.element_ty)
        d_up = (dy * value * factor_slope).to(out.dtype.element_ty)
        tl.store(target + gate_at, d_gate, mask=mask)
        tl.store(target + up_at, d_up, mask=mask)
    else:
        result = (value * factor).to(out.dtype.element_ty)
        tl.store(out + row * width + columns, result, mask=mask)


def _launch(
    gate_up: Tensor, grad: Tensor | None, out: Tensor, activation: str, interleaved: bool
) -> Tensor:
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    if rows == 0:
        return out
    block = min(_BLOCK, triton.next_power_of_2(width))
    launch(_glu, (rows, triton.cdiv(width, block)))(
        gate_up,
        gate_up if grad is None else grad,
        out,
        width,
        *gate_up.stride(),
        *((0, 0) if grad is None else grad.stride()),
        KIND=KINDS[activation],
        INTERLEAVED=interleaved,
        BACKWARD=grad is not None,
        BLOCK=block,
    )
    return out


def glu_triton(gate_up: Tensor, activation: str, interleaved: bool) -> Tensor:
    """Launch the forward kernel; arguments as in `kernels.experts.glu`."""
    out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
    return _launch(gate_up, None, out, activation, interleaved)


def glu_backward_triton(
    grad: Tensor, gate_up: Tensor, activation: str, interleaved: bool
) -> Tensor:
    """Launch the backward kernel: the gradient of gate_up (M, 2I)."""
    out = gate_up.new_empty(gate_up.shape)
    return _launch(gate_up, grad, out, activation, interleaved)
