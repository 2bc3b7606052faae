"""Triton path of grouped_lora_dw: dw by tiles, dbias by columns, each summed over an expert's rows.

No atomics. Not measured yet.
"""

from __future__ import annotations

from torch import Tensor

from ._grouped_sums_triton import RowSum, expert_products, expert_sum


def grouped_lora_dw_triton(
    x: Tensor,
    dy: Tensor,
    gates: Tensor | None,
    slots: Tensor,
    offsets: Tensor,
    dw: Tensor,
    dbias: Tensor,
    x_fan: int,
    dy_fan: int,
) -> tuple[Tensor, Tensor]:
    """Launch the kernels for each gradient that has room; arguments as in the reference."""
    if dw.numel() > 0:
        one = RowSum(x, dy, dw, x_fan, dy_fan, gates is not None)
        expert_products([one], gates, slots, offsets)
    if dbias.numel() > 0:
        expert_sum(dy, gates, slots, offsets, dbias, fan=dy_fan)
    return dw, dbias
