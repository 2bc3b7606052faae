"""Stage 1: gradients and momentum buffers -> the directions to orthogonalize, as one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..reference import update as reference
from .options import MOMENTUM_FORMS, check_choice


def momentum(
    grads: Sequence[Tensor],  # pieces, any shape of B_i * m * n elements
    buffers: Sequence[Tensor],  # the same pieces of momentum_buffer, advanced in place
    matrix: tuple[int, int],  # (m, n)
    *,
    mu: float,
    nesterov: bool,
    form: str,
) -> Tensor:
    """Advance the buffers and return the directions (sum of B_i, m, n), float32 or float64.

    The result is new memory: neither a gradient nor a buffer is ever handed to the iteration.
    """
    check_choice("momentum_form", form, MOMENTUM_FORMS, "momentum")
    directions = [
        reference.momentum(grad, buffer, mu, nesterov=nesterov, ema=form == "ema")
        for grad, buffer in zip(grads, buffers, strict=True)
    ]
    batches = [direction.reshape(-1, *matrix) for direction in directions]
    return batches[0] if len(batches) == 1 else torch.cat(batches)
