"""Triton path of grouped_lora_dx: the forward kernels with W, A and B read transposed.

The gradient of the gates is the product's row before its gate, multiplied with x in the epilogue:
one partial sum per tile of columns, added in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ._grouped_launch_triton import grouped_product, low_rank


def grouped_lora_dx_triton(  # noqa: PLR0913
    dy: Tensor,
    weight: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    bias: Tensor | None,
    gates: Tensor | None,
    x: Tensor | None,
    slots: Tensor,
    tiles: Tensor,
    tile_rows: int,
    scaling: float,
    dy_fan: int,
    x_fan: int,
    grouped_out: bool,
    wants_dx: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Launch the kernels; arguments as in `kernels.experts.grouped_lora_dx`."""
    rows = slots.shape[0]
    gather = {"tile_rows": tile_rows, "fan": dy_fan}
    yb = dy.new_empty((rows, 0 if lora_b is None else lora_b.shape[2]))
    dx = dy.new_empty((rows if wants_dx else 0, weight.shape[1]))
    dgates = dy.new_empty((0,), dtype=torch.float32)
    if lora_b is not None:
        low_rank(dy, lora_b.transpose(1, 2), slots, tiles, yb, scaling=scaling, **gather)
    if wants_dx or x is not None:
        dots = grouped_product(
            dy,
            weight.transpose(1, 2),
            yb,
            lora_a,
            slots,
            tiles,
            dx if wants_dx else None,
            direction="dx",
            scatter=not grouped_out,
            gates=gates,
            other=x,
            other_fan=x_fan,
            **gather,
        )
        dgates = dgates if dots is None else dots
    if x is not None and bias is not None:
        through_bias = torch.empty((rows, 1), dtype=torch.float32, device=dy.device)
        low_rank(dy, bias[:, None], slots, tiles, through_bias, scaling=1.0, scatter=True, **gather)
        dgates = dgates + through_bias[:, 0]
    return dx, yb, dgates
