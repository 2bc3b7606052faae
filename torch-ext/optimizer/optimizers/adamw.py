"""AdamW for what is not a matrix: embeddings, heads, norms, biases."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ..reference import update as reference
from .options import AdamWOptions


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[dict[str, Tensor]],  # exp_avg, exp_avg_sq, step
    options: AdamWOptions,
) -> None:
    """One step for any number of tensors of any shapes; gradients are only read."""
    for param, grad, state in zip(params, grads, states, strict=True):
        reference.adamw(
            param,
            grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            state["step"],
            lr=options.lr,
            betas=options.betas,
            eps=options.eps,
            weight_decay=options.weight_decay,
        )
