"""Triton path of grouped_lora_forward: xa first, then the product with xa B_e^T in its epilogue.

bfloat16, float16 and float32 (whose products are exact float32, no TF32); any strides.
"""

from __future__ import annotations

from torch import Tensor

from ._grouped_launch_triton import grouped_product, low_rank


def grouped_lora_forward_triton(
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    bias: Tensor | None,
    slots: Tensor,
    tiles: Tensor,
    tile_rows: int,
    scaling: float,
    fan: int,
    grouped_out: bool,
) -> tuple[Tensor, Tensor]:
    """Launch the kernels; arguments as in `kernels.experts.grouped_lora_forward`."""
    rows = slots.shape[0]
    xa = x.new_empty((rows, 0 if lora_a is None else lora_a.shape[1]))
    y = x.new_empty((rows, weight.shape[2]))
    if lora_a is not None:
        low_rank(x, lora_a, slots, tiles, xa, tile_rows=tile_rows, scaling=scaling, fan=fan)
    grouped_product(
        x,
        weight,
        xa,
        None if lora_b is None else lora_b.transpose(1, 2),
        slots,
        tiles,
        y,
        direction="forward",
        tile_rows=tile_rows,
        fan=fan,
        scatter=not grouped_out,
        bias=bias,
    )
    return y, xa
