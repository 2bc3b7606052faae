"""Stage 5: learning-rate rule, variance reduction, decay and the write to the parameter."""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Real

from torch import Tensor

from ..reference import update as reference
from .options import LR_RULES, MuonOptions


def shaped_lr(lr: float | Tensor, rule: object, rows: int, columns: int) -> float | Tensor:
    """The learning rate of a (rows, columns) matrix.

    match_rms_adamw: lr 0.2 sqrt(max(rows, columns)), so that the update's root mean square is
    0.2 lr as AdamW's typically is (arXiv 2502.16982). original: lr sqrt(max(1, rows / columns)), of
    Keller Jordan's Muon. spectral: lr sqrt(rows / columns) (arXiv 2310.17813). None: lr. A callable
    gets (lr, rows, columns) and returns the rate; lr may be a Tensor, which it must not read.
    """
    if rule is None:
        return lr
    if callable(rule):
        rate = rule(lr, rows, columns)
        if not isinstance(rate, (Real, Tensor)):
            raise TypeError(f"adjust_lr_fn returned {rate!r}, not a number or a Tensor")
        return rate
    if rule == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    ratio = rows / columns
    if rule == "original":
        return lr * math.sqrt(max(1.0, ratio))
    if rule == "spectral":
        return lr * math.sqrt(ratio)
    raise ValueError(f"adjust_lr_fn must be one of {', '.join(LR_RULES)}, got {rule!r}")


def update(
    params: Sequence[Tensor],  # pieces of B_i * m * n elements, written in place
    orthogonal: Tensor,  # (sum of B_i, m, n)
    second_moments: Sequence[Tensor] | None,  # (B_i, m, 1) or (B_i, 1, n), advanced in place
    lr: float | Tensor,  # after adjust_lr_fn
    options: MuonOptions,
) -> None:
    """p <- p - decay p - lr u for every piece, with one rounding each."""
    rows, columns = orthogonal.shape[-2:]
    decay = (lr if options.shaped_decay else options.lr) * options.weight_decay
    sizes = [param.numel() // (rows * columns) for param in params]
    for index, (param, part) in enumerate(zip(params, orthogonal.split(sizes), strict=True)):
        if second_moments is not None:
            assert options.beta2 is not None
            part = reference.variance_reduction(part, second_moments[index], options.beta2)
        part = part.reshape(param.shape)
        reference.apply_update(param, part, lr=lr, decay=decay, cautious=options.cautious)
