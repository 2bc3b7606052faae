"""`explain`: which path an operation takes, and why, without running it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .kernels.nf4_dequant import explain_nf4_dequant
from .orthogonalize.choose import explain as explain_orthogonalize


def _orthogonalize(
    *,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | str,
    **options: Any,
) -> str:
    if len(shape) < 2:
        raise ValueError(f"shape must be (..., m, n), got {tuple(shape)}")
    return explain_orthogonalize(shape[-2], shape[-1], dtype=dtype, device=device, **options)


EXPLAINERS = {"orthogonalize": _orthogonalize, "nf4_dequant": explain_nf4_dequant}


def explain(op: str, **problem: Any) -> str:
    """Say in words what `op` would run for a problem.

    Args:
        op: "orthogonalize" or "nf4_dequant".
        **problem: orthogonalize: `shape` (..., m, n), `dtype` and `device` of the input, optionally
            `steps`, `method` and `iterate_dtype`; nf4_dequant: `device`.

    Returns:
        The pick and its reason.

    Raises:
        ValueError: unknown op or unusable shape.
        TypeError: an argument is missing or not one of the op's.
    """
    if op not in EXPLAINERS:
        raise ValueError(f"op={op!r} is unknown; explain one of {', '.join(sorted(EXPLAINERS))}")
    return EXPLAINERS[op](**problem)
