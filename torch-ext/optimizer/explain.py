"""`explain`: which path an operation takes, and why, without running it."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from .kernels.experts import _moe_paths
from .kernels.products.matmul_add import explain_matmul_add
from .kernels.products.normalize import explain_normalize
from .kernels.products.symmetric_matmul import explain_symmetric_matmul
from .kernels.quant.nf4_dequant import explain_nf4_dequant
from .kernels.quant.nf4_quantize import explain_nf4_quantize
from .kernels.step import tensor_lists as _lists
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
    "symmetric_matmul": explain_symmetric_matmul,
    "matmul_add": explain_matmul_add,
    "nf4_dequant": explain_nf4_dequant,
    "nf4_quantize": explain_nf4_quantize,
    "normalize": explain_normalize,
    **dict.fromkeys(("expert_sort", "grouped_lora_linear", "combine", "glu"), _moe_paths.explain),
    **{op: functools.partial(_lists.explain, op) for op in ("momentum", "apply_update", "adamw")},
}


def explain(op: str, **problem: Any) -> str:
    """Say in words what `op` would run for a problem.

    Args:
        op: "orthogonalize", "symmetric_matmul", "matmul_add", "nf4_dequant", "nf4_quantize",
            "normalize", "momentum", "apply_update", "adamw", or of the experts "expert_sort",
            "grouped_lora_linear", "combine", "glu".
        **problem: orthogonalize: `shape` (..., m, n), `dtype` and `device` of the input, optionally
            `steps`, `method` and `iterate_dtype`; the others: `device`, those of the experts also
            `dtype` and `backend`.

    Returns:
        The pick and its reason.

    Raises:
        ValueError: unknown op or unusable shape.
        TypeError: an argument is missing or not one of the op's.
    """
    if op not in EXPLAINERS:
        raise ValueError(f"op={op!r} is unknown; explain one of {', '.join(sorted(EXPLAINERS))}")
    return EXPLAINERS[op](**problem)
