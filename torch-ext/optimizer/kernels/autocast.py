"""Autocast at the border of an op: its tensors are cast before it, or it is left out."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor


def autocast_dtype(x: Tensor) -> torch.dtype | None:
    """The dtype that autocast computes x in, as for `torch.nn.functional.linear`; None without it.

    Outside of autocast nothing is converted: converting a whole stack of experts in every call
    would be a hidden cost.
    """
    if x.dtype == torch.float64 or not is_on(x.device):  # autocast leaves float64 alone
        return None
    return torch.get_autocast_dtype(x.device.type)


def cast(x: Any, dtype: torch.dtype | None) -> Any:
    """x in `dtype` where autocast would cast it: a tensor of floating point but float64.

    Autograd sees the cast. Anything else stays as it is, and so does x if there is no dtype.
    """
    if dtype is None or not isinstance(x, Tensor) or not x.is_floating_point():
        return x
    return x if x.dtype == torch.float64 else x.to(dtype)


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """No autocast on a device, where torch would round the operands of products to its dtype."""
    if not is_on(device):
        return contextlib.nullcontext()
    return torch.autocast(device.type, enabled=False)


def is_on(device: torch.device) -> bool:
    """Whether autocast is enabled for tensors on a device; meta tensors know none."""
    return device.type != "meta" and torch.is_autocast_enabled(device.type)
