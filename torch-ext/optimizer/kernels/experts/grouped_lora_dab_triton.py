"""Triton path of grouped_lora_dab: each program sums one part of one expert's factor over its rows.

No atomics: a part is written once, in the parameter's dtype. A gradient in PEFT's layout is
reordered from a copy no larger than the rows of dy, or written so by neighbouring experts at once.
"""

from __future__ import annotations

from torch import Tensor

from ._grouped_sums_triton import RowSum, expert_products


def grouped_lora_dab_triton(
    x: Tensor,
    dy: Tensor,
    xa: Tensor,
    yb: Tensor,
    gates: Tensor | None,
    slots: Tensor,
    offsets: Tensor,
    da: Tensor,
    db: Tensor,
    x_fan: int,
    dy_fan: int,
) -> tuple[Tensor, Tensor]:
    """Launch `_expert_products` for each gradient that has room; arguments as in the reference."""
    sums, gated = [], gates is not None
    if da.numel() > 0:
        sums.append(RowSum(yb, x, da, 0, x_fan, gated))
    if db.numel() > 0:
        sums.append(RowSum(xa, dy, db.transpose(1, 2), 0, dy_fan, gated))
    copies = db.nbytes <= slots.shape[0] * dy.shape[1] * dy.element_size()
    expert_products(sums, gates, slots, offsets, in_place=not copies)
    return da, db
