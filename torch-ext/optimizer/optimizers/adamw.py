"""AdamW for what is not a matrix: embeddings, heads, norms, biases."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..kernels import adamw as adamw_kernel
from .layout import MAX_DIMS, written
from .options import AdamWOptions


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],  # exp_avg, exp_avg_sq, step
    options: AdamWOptions,
) -> None:
    """One step for any number of tensors of any shapes; gradients are only read.

    One call per device; float64, for which there is no kernel, has one of its own.
    """
    calls: dict[tuple[torch.device, bool], list[int]] = {}
    for k, (param, grad) in enumerate(zip(params, grads, strict=True)):
        wide = torch.float64 in (param.dtype, grad.dtype)
        calls.setdefault((param.device, wide), []).append(k)
    for members in calls.values():
        tensors = [
            (params[k], states[k]["exp_avg"], states[k]["exp_avg_sq"], grads[k]) for k in members
        ]
        shaped = [
            [tensor.reshape(-1) for tensor in of_one] if of_one[0].ndim > MAX_DIMS else of_one
            for of_one in tensors
        ]
        param, exp_avg, exp_avg_sq, grad = (list(column) for column in zip(*shaped, strict=True))
        adamw_kernel(
            param,
            grad,
            exp_avg,
            exp_avg_sq,
            [states[k]["step"] for k in members],
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
        )
        for before, after in zip(tensors, shaped, strict=True):
            written(before[:3], after[:3])
