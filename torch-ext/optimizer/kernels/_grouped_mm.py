"""The grouped products by torch.nn.functional.grouped_mm, which users know from transformers.

LoRA is two more small products and a sum, so xa, the LoRA part and y are each rounded to x's dtype,
as in eager torch; gathers and gates are passes of their own. Nothing waits for the device. Strides
must be multiples of 16 bytes: the rank is padded, K and N are refused by `problem_of`. On CUDA
torch takes bfloat16 only.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

_ALIGNMENT = 16  # bytes


def problem_of(x: Tensor, weight: Tensor) -> str | None:
    """Why grouped_mm cannot take this product; None if it can."""
    if not hasattr(F, "grouped_mm"):
        return f"torch {torch.__version__} has no torch.nn.functional.grouped_mm"
    if x.dtype == torch.float64 or (x.is_cuda and x.dtype != torch.bfloat16):
        return f"grouped_mm takes bfloat16 on CUDA and no float64, got {x.dtype} on {x.device}"
    for name, size in (("K", weight.shape[1]), ("N", weight.shape[2])):
        if size * x.element_size() % _ALIGNMENT:
            return f"{name} = {size} of {x.dtype} is no multiple of {_ALIGNMENT} bytes"
    return None


def _padded(x: Tensor, dim: int) -> Tensor:
    """x with zeros behind `dim`, so that a row of it is a multiple of 16 bytes; contiguous."""
    unit = _ALIGNMENT // x.element_size()
    missing = -x.shape[dim] % unit
    pad = [0, 0] * (x.ndim - 1 - dim % x.ndim) + [0, missing]
    return F.pad(x, pad).contiguous()


def _gather(x: Tensor, slots: Tensor, fan: int) -> Tensor:
    return x.contiguous() if fan == 0 else x[slots // fan]


def _product(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """x_e weight_e of every expert's rows; rows of sentinels are zero."""
    ends = offsets[1:].int()
    if weight.stride(2) != 1 and weight.stride(1) != 1:
        weight = weight.contiguous()
    y = F.grouped_mm(x, weight, offs=ends)
    row = torch.arange(x.shape[0], device=x.device)
    return torch.where((row < ends[-1])[:, None], y, 0)


def _low_rank(x: Tensor, factor: Tensor, offsets: Tensor, scaling: float) -> Tensor:
    """scaling x factor_e^T (R, r) of factor (E, r, K)."""
    wide = _padded(factor.to(x.dtype), 1)
    return (_product(x, wide.transpose(1, 2), offsets) * scaling)[:, : factor.shape[1]]


def _scattered(y: Tensor, slots: Tensor, grouped: bool) -> Tensor:
    if grouped:
        return y
    return torch.empty_like(y).index_copy_(0, slots, y)


def _with_lora(
    x: Tensor, weight: Tensor, low: Tensor, factor: Tensor | None, offsets: Tensor
) -> Tensor:
    """x weight_e + low factor_e of factor (E, r, N)."""
    y = _product(x, weight, offsets)
    if factor is None:
        return y
    return y + _product(_padded(low, 1), _padded(factor.to(x.dtype), 1), offsets)


def _per_row(values: Tensor, slots: Tensor, offsets: Tensor) -> Tensor:
    """(E, ...) -> one entry per row; sentinels take the last expert's, masked by the caller."""
    row = torch.arange(slots.shape[0], device=slots.device)
    expert = torch.searchsorted(offsets, row, right=True) - 1
    return values[expert.clamp(max=values.shape[0] - 1)]


def _valid(slots: Tensor, offsets: Tensor) -> Tensor:
    return (torch.arange(slots.shape[0], device=slots.device) < offsets[-1])[:, None]


def forward(
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    bias: Tensor | None,
    slots: Tensor,
    offsets: Tensor,
    scaling: float,
    fan: int,
    grouped_out: bool,
) -> tuple[Tensor, Tensor]:
    """As `reference.moe.grouped_lora_forward`."""
    source = _gather(x, slots, fan)
    xa, factor = x.new_empty((slots.shape[0], 0)), None
    if lora_a is not None:
        xa = _low_rank(source, lora_a, offsets, scaling).contiguous()
        factor = lora_b.transpose(1, 2)
    y = _with_lora(source, weight, xa, factor, offsets)
    if bias is not None:
        y = torch.where(_valid(slots, offsets), y + _per_row(bias, slots, offsets), 0).to(x.dtype)
    return _scattered(y, slots, grouped_out), xa


def dx(  # noqa: PLR0913
    dy: Tensor,
    weight: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    bias: Tensor | None,
    gates: Tensor | None,
    x: Tensor | None,
    slots: Tensor,
    offsets: Tensor,
    scaling: float,
    dy_fan: int,
    x_fan: int,
    grouped_out: bool,
    wants_dx: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """As `reference.moe.grouped_lora_dx`."""
    grad = _gather(dy, slots, dy_fan)
    yb = dy.new_empty((slots.shape[0], 0))
    out = dy.new_empty((0, weight.shape[1]))
    dgates = dy.new_empty((0,), dtype=torch.float32)
    if lora_b is not None:
        yb = _low_rank(grad, lora_b.transpose(1, 2), offsets, scaling).contiguous()
    if not wants_dx and x is None:
        return out, yb, dgates
    value = _with_lora(grad, weight.transpose(1, 2), yb, lora_a, offsets)
    if x is not None:
        dots = (value.float() * _gather(x, slots, x_fan)).sum(1)
        if bias is not None:
            dots = dots + (grad.float() * _per_row(bias, slots, offsets)).sum(1)
        dots = torch.where(_valid(slots, offsets)[:, 0], dots, 0)
        dgates = torch.empty_like(dots).index_copy_(0, slots, dots)
    if not wants_dx:
        return out, yb, dgates
    if gates is not None:
        value = (value * gates.reshape(-1)[slots, None]).to(dy.dtype)
    return _scattered(value, slots, grouped_out), yb, dgates


def _expert_products(
    left: Tensor,  # (R, a) in expert order
    right: Tensor,  # (R, b) in expert order
    gates: Tensor | None,
    slots: Tensor,
    offsets: Tensor,
    out: Tensor,  # (E, a, b)
) -> None:
    """out[e] = sum over the expert's rows of g left^T right; 0 for experts without rows."""
    if slots.shape[0] == 0:
        out.zero_()
        return
    if gates is not None:
        left = (left * gates.reshape(-1)[slots, None]).to(right.dtype)
    product = F.grouped_mm(_padded(left, 1).t(), right, offs=offsets[1:].int())
    empty = (offsets.diff() == 0)[:, None, None]
    out.copy_(torch.where(empty, 0, product[:, : out.shape[1]]))


def dab(
    x: Tensor,
    dy: Tensor,
    xa: Tensor,
    yb: Tensor,
    gates: Tensor | None,
    slots: Tensor,
    offsets: Tensor,
    da: Tensor,
    db: Tensor,
    x_fan: int,
    dy_fan: int,
) -> tuple[Tensor, Tensor]:
    """As `reference.moe.grouped_lora_dab`."""
    if da.numel() > 0:
        _expert_products(yb, _gather(x, slots, x_fan), gates, slots, offsets, da)
    if db.numel() > 0:
        grad = _gather(dy, slots, dy_fan)
        _expert_products(xa, grad, gates, slots, offsets, db.transpose(1, 2))
    return da, db


def dw(
    x: Tensor,
    dy: Tensor,
    gates: Tensor | None,
    slots: Tensor,
    offsets: Tensor,
    dw: Tensor,
    dbias: Tensor,
    x_fan: int,
    dy_fan: int,
) -> tuple[Tensor, Tensor]:
    """As `reference.moe.grouped_lora_dw`."""
    grad = _gather(dy, slots, dy_fan)
    if dw.numel() > 0:
        _expert_products(_gather(x, slots, x_fan), grad, gates, slots, offsets, dw)
    if dbias.numel() > 0:
        ones = dy.new_ones((slots.shape[0], 1))
        _expert_products(ones, grad, gates, slots, offsets, dbias[:, None])
    return dw, dbias
