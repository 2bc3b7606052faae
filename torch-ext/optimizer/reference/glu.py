"""Gated linear units of (M, 2I) -> (M, I): act(gate) * up, and gpt-oss's clamped form."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# gpt-oss's model code (Apache-2.0): slope of the sigmoid, and the bound of both halves.
GPT_OSS_ALPHA = 1.702
GPT_OSS_LIMIT = 7.0

ELEMENTWISE = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
}


def _halves(gate_up: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gate and up (M, I), widened to float32 (float64 stays)."""
    wide = gate_up.to(torch.float64 if gate_up.dtype == torch.float64 else torch.float32)
    if interleaved:
        return wide[:, ::2], wide[:, 1::2]
    return wide.chunk(2, dim=1)


def glu(gate_up: Tensor, activation: str, interleaved: bool) -> Tensor:
    """act(gate) * up, rounded once.

    "gpt_oss": gate sigmoid(1.702 gate) (up + 1) with gate <= 7 and -7 <= up <= 7.
    """
    gate, up = _halves(gate_up, interleaved)
    if activation == "gpt_oss":
        gate = gate.clamp(max=GPT_OSS_LIMIT)
        up = up.clamp(min=-GPT_OSS_LIMIT, max=GPT_OSS_LIMIT)
        value = gate * torch.sigmoid(gate * GPT_OSS_ALPHA) * (up + 1)
    else:
        value = ELEMENTWISE[activation](gate) * up
    return value.to(gate_up.dtype)


def _slope(gate: Tensor, activation: str) -> Tensor:
    """The derivative of the activation."""
    if activation == "silu":
        cdf = torch.sigmoid(gate)
        return cdf + gate * cdf * (1 - cdf)
    if activation == "gelu":
        density = torch.exp(-0.5 * gate * gate) / math.sqrt(2 * math.pi)
        return 0.5 * (1 + torch.erf(gate / math.sqrt(2))) + gate * density
    if activation == "gelu_tanh":  # gelu_tanh(x) = x sigmoid(2 inner)
        inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
        cdf = torch.sigmoid(2 * inner)
        inner_slope = math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * gate**2)
        return cdf + gate * cdf * (1 - cdf) * 2 * inner_slope
    if activation == "relu":
        return (gate > 0).to(gate.dtype)
    return 2 * F.relu(gate)  # relu2


def glu_backward(grad: Tensor, gate_up: Tensor, activation: str, interleaved: bool) -> Tensor:
    """Gradient of `glu` with respect to gate_up (M, 2I)."""
    gate, up = _halves(gate_up, interleaved)
    dy = grad.to(gate.dtype)
    if activation == "gpt_oss":
        gate_inside, up_inside = gate <= GPT_OSS_LIMIT, up.abs() <= GPT_OSS_LIMIT
        gate, up = gate.clamp(max=GPT_OSS_LIMIT), up.clamp(-GPT_OSS_LIMIT, GPT_OSS_LIMIT)
        cdf = torch.sigmoid(gate * GPT_OSS_ALPHA)
        slope = cdf + gate * cdf * (1 - cdf) * GPT_OSS_ALPHA
        d_gate = dy * (up + 1) * torch.where(gate_inside, slope, 0)
        d_up = torch.where(up_inside, dy * gate * cdf, 0)
    else:
        d_gate = dy * up * _slope(gate, activation)
        d_up = dy * ELEMENTWISE[activation](gate)
    parts = (d_gate, d_up)
    found = torch.stack(parts, 2).flatten(1) if interleaved else torch.cat(parts, 1)
    return found.to(gate_up.dtype)
