"""Stage 1: gradients and momentum buffers -> the directions to orthogonalize, as one batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...kernels import momentum as momentum_kernel
from ..groups.parameters import MAX_DIMS, shaped, written


def momentum(
    grads: Sequence[Tensor],  # pieces, any shape of B_i * m * n elements
    buffers: Sequence[Tensor],  # the same pieces of momentum_buffer, advanced in place
    matrix: tuple[int, int],  # (m, n)
    *,
    mu: float,
    nesterov: bool,
    form: str,
    whole: bool = False,  # every piece is known to be one matrix (m, n)
) -> Tensor:
    """Advance the buffers and return the directions (sum of B_i, m, n), float32 or float64.

    The result is new memory: neither a gradient nor a buffer is ever handed to the iteration. Every
    direction is written to its place in it.
    """
    sizes = [] if whole else [grad.numel() for grad in grads]
    batch = torch.empty(
        (len(grads) if whole else sum(sizes) // (matrix[0] * matrix[1]), *matrix),
        dtype=torch.promote_types(buffers[0].dtype, torch.float32),
        device=buffers[0].device,
    )
    used, read = buffers, grads
    if not whole:
        shapes = [
            (size,) if g.ndim > MAX_DIMS else g.shape for g, size in zip(grads, sizes, strict=True)
        ]
        used, read = shaped(buffers, shapes), shaped(grads, shapes)
    momentum_kernel(read, used, batch, mu=float(mu), nesterov=nesterov, form=form)
    written(buffers, used)
    return batch
