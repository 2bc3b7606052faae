"""Triton path of grouped_lora_dab: each program sums one part of one expert's factor over its rows.

No atomics: a part is written once, in the parameter's dtype and strides.
"""

from __future__ import annotations

from torch import Tensor

from ._grouped_launch_triton import expert_product


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
    """Launch `_expert_product` for each gradient that has room; arguments as in the reference."""
    if da.numel() > 0:
        expert_product(yb, x, gates, slots, offsets, da, left_fan=0, right_fan=x_fan)
    if db.numel() > 0:
        expert_product(
            xa, dy, gates, slots, offsets, db.transpose(1, 2), left_fan=0, right_fan=dy_fan
        )
    return da, db
