"""grouped_lora_dx: the input's gradient of a grouped LoRA product, and the gradient of its gates.

dx = g (dy W_e^T + yb A_e) with yb = s dy B_e, which is computed once and returned: the gradient of
A reads it again. It is the forward product with W, A and B read transposed. The gradient of a gate
is <dy W_eff^T, x> + <dy, b_e>, taken from dx before the gate scales it, so that nothing of the
forward result is stored (W_eff = W + s A^T B^T is linear).

path      | source                    | taken
triton    | grouped_lora_dx_triton.py | CUDA and ROCm
reference | reference/moe.py          | everything else
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from ..._ops import add_op_namespace_prefix, ops
from ...reference import moe as reference
from ._moe_paths import TRITON_PATHS, on_device_of


@custom_op(add_op_namespace_prefix("grouped_lora_dx"), mutates_args=())
def _dx(  # noqa: PLR0913
    dy: Tensor,
    weight: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    bias: Tensor | None,
    gates: Tensor | None,
    x: Tensor | None,
    slots: Tensor,
    offsets: Tensor,
    tiles: Tensor,
    tile_rows: int,
    scaling: float,
    dy_fan: int,
    x_fan: int,
    grouped_out: bool,
    wants_dx: bool,
    path: str,
) -> tuple[Tensor, Tensor, Tensor]:
    operands = (dy, weight, lora_a, lora_b, bias, gates, x, slots)
    layout = (scaling, dy_fan, x_fan, grouped_out, wants_dx)
    if path in TRITON_PATHS:
        from .grouped_lora_dx_triton import grouped_lora_dx_triton

        with on_device_of(dy):
            return grouped_lora_dx_triton(*operands, tiles, tile_rows, *layout)
    return reference.grouped_lora_dx(*operands, offsets, *layout)


def _fake(  # noqa: PLR0913
    dy,
    weight,
    lora_a,
    lora_b,
    bias,
    gates,
    x,
    slots,
    offsets,
    tiles,
    tile_rows,
    scaling,
    dy_fan,
    x_fan,
    grouped_out,
    wants_dx,
    path,
):
    rows = slots.shape[0]
    rank = 0 if lora_b is None else lora_b.shape[2]
    wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
    return (
        dy.new_empty((rows if wants_dx else 0, weight.shape[1])),
        dy.new_empty((rows, rank)),
        dy.new_empty((0 if x is None else rows,), dtype=wide),
    )


_dx.register_fake(_fake)


def grouped_lora_dx(  # noqa: PLR0913
    dy: Tensor,
    weight: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    bias: Tensor | None,
    gates: Tensor | None,
    x: Tensor | None,
    slots: Tensor,
    offsets: Tensor,
    tiles: Tensor,
    *,
    tile_rows: int,
    scaling: float,
    dy_fan: int,
    x_fan: int,
    grouped_out: bool,
    wants_dx: bool,
    path: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient rows of the input. Arguments are checked by `moe.grouped_lora_linear`.

    Args:
        dy: (R, N) or (T, N), any strides.
        weight: (E, K, N) of dy's dtype, any strides.
        lora_a: (E, r, K) or None.
        lora_b: (E, N, r), with lora_a.
        bias: (E, N) or None; read for the gradient of the gates only.
        gates: (T, k) or None; scales the rows of dx.
        x: (T, K) or (R, K); given, the gradient of the gates is computed.
        slots: (R,) of `expert_sort`, as offsets and tiles.
        offsets: (E + 1,).
        tiles: (bound, 3).
        tile_rows: The rows of a tile that `tiles` was made for.
        scaling: Factor of the LoRA product.
        dy_fan: Where row i lies in dy: 0 at i (expert order), f > 0 at slots[i] // f.
        x_fan: The same for x.
        grouped_out: Write dx in expert order instead of slot order.
        wants_dx: Whether dx is needed; yb and dgates may be without it.
        path: "triton" or "reference"; over 4-bit weights also "compiled" or "measured".

    Returns:
        dx (R, K), or (0, K) unless wants_dx, zero for sentinels; yb (R, r) in expert order, scaled;
        dgates (R,) float32 in slot order, or (0,) without x.
    """
    return ops.grouped_lora_dx(
        dy,
        weight,
        lora_a,
        lora_b,
        bias,
        gates,
        x,
        slots,
        offsets,
        tiles,
        tile_rows,
        scaling,
        dy_fan,
        x_fan,
        grouped_out,
        wants_dx,
        path,
    )
