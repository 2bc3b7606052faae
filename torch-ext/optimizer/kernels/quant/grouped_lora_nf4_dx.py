"""grouped_lora_nf4_dx: grouped_lora_dx on 4-bit experts.

It is the product of `grouped_lora_nf4_forward` with the stack read the other way round, from the
same bytes, by the same paths.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op

from ..._ops import add_op_namespace_prefix, ops
from ...dispatch import TRITON_PATHS
from ...reference import nf4_moe as reference
from ..checks import on_device_of
from ..experts.expert_sort import ExpertOrder
from .grouped_lora_nf4_forward import nested_of, product_of_stack


@custom_op(
    add_op_namespace_prefix("grouped_lora_nf4_dx"),
    mutates_args=(),
    schema="(Tensor dy, Tensor packed, Tensor absmax, Tensor? codebook, Tensor? absmax_code, "
    "Tensor? absmax_scale, Tensor? absmax_offset, int[] stored, int blocksize, bool transposed, "
    "Tensor? lora_a, Tensor? lora_b, Tensor? bias, Tensor? gates, Tensor? x, Tensor slots, "
    "Tensor offsets, Tensor tiles, int tile_rows, float scaling, int dy_fan, int x_fan, "
    "bool grouped_out, bool wants_dx, int slice_experts, str path) -> (Tensor, Tensor, Tensor)",
)
def _dx(  # noqa: PLR0913
    dy: Tensor,
    packed: Tensor,
    absmax: Tensor,
    codebook: Tensor | None,
    absmax_code: Tensor | None,
    absmax_scale: Tensor | None,
    absmax_offset: Tensor | None,
    stored: Sequence[int],
    blocksize: int,
    transposed: bool,
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
    slice_experts: int,
    path: str,
) -> tuple[Tensor, Tensor, Tensor]:
    nested = nested_of(absmax_code, absmax_scale, absmax_offset)
    stack = (packed, absmax, codebook, nested, tuple(stored), blocksize)
    if path not in TRITON_PATHS:
        operands = (lora_a, lora_b, bias, gates, x, slots, offsets)
        layout = (scaling, dy_fan, x_fan, grouped_out, wants_dx)
        return reference.grouped_lora_nf4_dx(dy, (*stack, transposed), *operands, *layout)
    from ..experts.grouped_launch_triton import low_rank

    with on_device_of(dy):
        rows = slots.shape[0]
        gather = {"tile_rows": tile_rows, "fan": dy_fan}
        order = ExpertOrder.of(slots, offsets, slots, tiles, tile_rows, 1)
        yb = dy.new_empty((rows, 0 if lora_b is None else lora_b.shape[2]))
        dx = dy.new_empty((rows if wants_dx else 0, stored[2] if transposed else stored[1]))
        dgates = dy.new_empty((0,), dtype=torch.float32)
        if lora_b is not None:
            low_rank(dy, lora_b.transpose(1, 2), order, yb, scaling=scaling, fan=dy_fan)
        if wants_dx or x is not None:
            operands = (dy, stack, not transposed, yb, lora_a, slots, offsets, tiles)
            options = {
                **gather,
                "scatter": not grouped_out,
                "gates": gates,
                "other": x,
                "other_fan": x_fan,
            }
            target = dx if wants_dx else None
            dots = product_of_stack((*operands, target), slice_experts, "dx", options, path)
            dgates = dgates if dots is None else dots
        if x is not None and bias is not None:
            through_bias = torch.empty((rows, 1), dtype=torch.float32, device=dy.device)
            options = {"scaling": 1.0, "scatter": True, "fan": dy_fan}
            low_rank(dy, bias[:, None], order, through_bias, **options)
            dgates = dgates + through_bias[:, 0]
    return dx, yb, dgates


def _fake(
    dy, packed, absmax, codebook, code, scale, offset, stored, blocksize, transposed, *others
):
    lora_b, x, slots, wants_dx = others[1], others[4], others[5], others[13]
    rows = slots.shape[0]
    rank = 0 if lora_b is None else lora_b.shape[2]
    return (
        dy.new_empty((rows if wants_dx else 0, stored[2] if transposed else stored[1])),
        dy.new_empty((rows, rank)),
        dy.new_empty((0 if x is None else rows,), dtype=torch.float32),
    )


_dx.register_fake(_fake)


def grouped_lora_nf4_dx(dy: Tensor, weight: tuple, *arguments) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient rows of the input; arguments are checked by `moe.grouped_lora_linear`.

    Args:
        dy: (R, N) or (T, N), any strides; bfloat16, float16 or float32.
        weight: as in `grouped_lora_nf4_forward`.
        *arguments: lora_a, lora_b, bias, gates, x, slots, offsets, tiles, tile_rows, scaling,
            dy_fan, x_fan, grouped_out and wants_dx, as in `grouped_lora_dx`; slice_experts; path.

    Returns:
        dx (R, K), or (0, K) unless wants_dx, zero for sentinels; yb (R, r) in expert order, scaled;
        dgates (R,) float32 in slot order, or (0,) without x.
    """
    return ops.grouped_lora_nf4_dx(dy, *weight, *arguments)
