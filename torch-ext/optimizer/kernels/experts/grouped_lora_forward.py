"""grouped_lora_forward: y = x W_e + s (x A_e^T) B_e^T + b_e for the rows of every expert.

Rows are gathered while they are loaded and scattered while they are stored. xa = s x A_e^T is
computed once, rounded to x's dtype and returned: the product adds xa B_e^T in its epilogue, and
the gradient of B reads it again. Sums are float32 (float64 for float64), rounded once.

path      | source                         | taken
triton    | grouped_lora_forward_triton.py | CUDA and ROCm
reference | reference/moe.py               | everything else
"""

from __future__ import annotations

from torch import Tensor
from torch.library import custom_op

from ..._ops import add_op_namespace_prefix, ops
from ...reference import moe as reference
from ._moe_paths import TRITON_PATHS, on_device_of


@custom_op(add_op_namespace_prefix("grouped_lora_forward"), mutates_args=())
def _forward(
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    bias: Tensor | None,
    slots: Tensor,
    offsets: Tensor,
    tiles: Tensor,
    tile_rows: int,
    scaling: float,
    fan: int,
    grouped_out: bool,
    path: str,
) -> tuple[Tensor, Tensor]:
    operands = (x, weight, lora_a, lora_b, bias)
    if path in TRITON_PATHS:
        from .grouped_lora_forward_triton import grouped_lora_forward_triton

        with on_device_of(x):
            return grouped_lora_forward_triton(
                *operands, slots, tiles, tile_rows, scaling, fan, grouped_out
            )
    return reference.grouped_lora_forward(*operands, slots, offsets, scaling, fan, grouped_out)


def _fake(
    x,
    weight,
    lora_a,
    lora_b,
    bias,
    slots,
    offsets,
    tiles,
    tile_rows,
    scaling,
    fan,
    grouped_out,
    path,
):
    rows = slots.shape[0]
    rank = 0 if lora_a is None else lora_a.shape[1]
    return x.new_empty((rows, weight.shape[2])), x.new_empty((rows, rank))


_forward.register_fake(_fake)


def grouped_lora_forward(
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    bias: Tensor | None,
    slots: Tensor,
    offsets: Tensor,
    tiles: Tensor,
    *,
    tile_rows: int,
    scaling: float,
    fan: int,
    grouped_out: bool,
    path: str,
) -> tuple[Tensor, Tensor]:
    """Products of every expert's rows. Arguments are checked by `moe.grouped_lora_linear`.

    Args:
        x: (T, K) or (R, K), any strides.
        weight: (E, K, N) of x's dtype, any strides.
        lora_a: (E, r, K) of any floating dtype and strides, or None.
        lora_b: (E, N, r), with lora_a.
        bias: (E, N) or None.
        slots: (R,) of `expert_sort`, as offsets and tiles.
        offsets: (E + 1,).
        tiles: (bound, 3).
        tile_rows: The rows of a tile that `tiles` was made for.
        scaling: Factor of the LoRA product.
        fan: Where row i lies in x: 0 at i (expert order), f > 0 at slots[i] // f.
        grouped_out: Write y in expert order instead of slot order.
        path: "triton" or "reference"; over 4-bit weights also "compiled" or "measured".

    Returns:
        y (R, N) in x's dtype, zero for sentinels; xa (R, r) in expert order, scaled.
    """
    return ops.grouped_lora_forward(
        x,
        weight,
        lora_a,
        lora_b,
        bias,
        slots,
        offsets,
        tiles,
        tile_rows,
        scaling,
        fan,
        grouped_out,
        path,
    )
