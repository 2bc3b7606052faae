"""`explain`: which path an operation takes, and why, without running it."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any

import torch

from . import dispatch
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
    batch = math.prod(shape[:-2])
    return explain_orthogonalize(
        shape[-2], shape[-1], dtype=dtype, device=device, batch=batch, **options
    )


EXPLAINERS = {
    "orthogonalize": _orthogonalize,
    **dict.fromkeys(dispatch.EXPERTS_OPS, dispatch.explain_experts),
    **{op: functools.partial(dispatch.explain, op) for op in dispatch.TABLE},
}


def explain(op: str, **problem: Any) -> str:
    """Say in words what `op` would run for a problem.

    Args:
        op: "orthogonalize", "symmetric_matmul", "matmul_add", "square_chain", "normalize",
            "momentum", "apply_update", "adamw", "scale_rows", "nf4_dequant", "nf4_quantize",
            "nf4_product", "mxfp4_dequant", "fp8_dequant", or of the experts "expert_sort",
            "grouped_lora_linear", "combine", "glu".
        **problem: orthogonalize: `shape` (..., m, n), `dtype` and `device` of the input, optionally
            `steps`, `method` and `iterate_dtype`; the others: `device`, those of the experts also
            `dtype` and `backend`.

    Returns:
        The pick and its reason; of a CUDA device that is not there, that it is not.

    Raises:
        ValueError: unknown op or unusable shape.
        TypeError: an argument is missing or not one of the op's.
    """
    if op not in EXPLAINERS:
        raise ValueError(f"op={op!r} is unknown; explain one of {', '.join(sorted(EXPLAINERS))}")
    try:
        inspect.signature(EXPLAINERS[op]).bind(**problem)
    except TypeError as error:
        raise TypeError(f"explain({op!r}): {error}") from None
    if isinstance(problem.get("device"), int):  # torch.device(0) raises where there is no GPU
        problem["device"] = f"cuda:{problem['device']}"
    try:
        return EXPLAINERS[op](**problem)
    except (AssertionError, RuntimeError) as error:
        device = torch.device(problem["device"])
        there = torch.cuda.is_available() and (device.index or 0) < torch.cuda.device_count()
        if device.type != "cuda" or there:
            raise
        what = str(error).splitlines()[0]
        return f"{device} is not there ({what}), and what runs depends on it; ask for device='cpu'"
