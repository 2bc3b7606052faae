"""grouped_lora_nf4_forward: grouped_lora_forward on 4-bit experts.

With slice_experts = 0 the weight is never written to memory: a tile is decoded in registers on its
way to the tensor cores. It requires blocks that do not leave their row, K % blocksize == 0. Else so
many experts at a time are decoded to memory and multiplied.

path      | source                  | taken
compiled  | nf4_product.py          | slice_experts = 0, capability 9.0: by name what it can
          |                         | take, on path "measured" what it is faster at
triton    | _nf4_product_triton.py  | slice_experts = 0
triton    | _nf4_slices_triton.py   | slice_experts > 0
reference | reference/nf4_moe.py    | CPU and the rest: decodes the whole stack
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from ..._ops import add_op_namespace_prefix, ops
from ...dispatch import MEASURED, TRITON_PATHS
from ...reference import nf4_moe as reference
from ..checks import on_device_of
from ..experts.expert_sort import ExpertOrder
from .nf4_product import compiled_is_faster, prefer_compiled


def nested_of(
    code: Tensor | None, scale: Tensor | None, offset: Tensor | None
) -> tuple[Tensor, Tensor, Tensor] | None:
    """The three tensors of nested absmax, or None."""
    return None if code is None else (code, scale, offset)


def decodes_in_registers(x: Tensor) -> bool:
    """Whether the fused product is fast for x: half precision on an NVIDIA GPU."""
    return x.is_cuda and torch.version.hip is None and x.element_size() == 2


@custom_op(
    add_op_namespace_prefix("grouped_lora_nf4_forward"),
    mutates_args=(),
    schema="(Tensor x, Tensor packed, Tensor absmax, Tensor? codebook, Tensor? absmax_code, "
    "Tensor? absmax_scale, Tensor? absmax_offset, int[] stored, int blocksize, bool transposed, "
    "Tensor? lora_a, Tensor? lora_b, Tensor? bias, Tensor slots, Tensor offsets, Tensor tiles, "
    "int tile_rows, float scaling, int fan, bool grouped_out, int slice_experts, str path) -> "
    "(Tensor, Tensor)",
)
def _forward(  # noqa: PLR0913
    x: Tensor,
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
    slots: Tensor,
    offsets: Tensor,
    tiles: Tensor,
    tile_rows: int,
    scaling: float,
    fan: int,
    grouped_out: bool,
    slice_experts: int,
    path: str,
) -> tuple[Tensor, Tensor]:
    nested = nested_of(absmax_code, absmax_scale, absmax_offset)
    if path not in TRITON_PATHS:
        weight = (packed, absmax, codebook, nested, tuple(stored), blocksize, transposed)
        return reference.grouped_lora_nf4_forward(
            x, weight, lora_a, lora_b, bias, slots, offsets, scaling, fan, grouped_out
        )
    from ..experts.grouped_launch_triton import low_rank

    stack = (packed, absmax, codebook, nested, tuple(stored), blocksize)
    with on_device_of(x):
        rows = slots.shape[0]
        xa = x.new_empty((rows, 0 if lora_a is None else lora_a.shape[1]))
        y = x.new_empty((rows, stored[1] if transposed else stored[2]))
        if lora_a is not None:
            order = ExpertOrder.of(slots, offsets, slots, tiles, tile_rows, 1)
            low_rank(x, lora_a, order, xa, scaling=scaling, fan=fan)
        factor = None if lora_b is None else lora_b.transpose(1, 2)
        operands = (x, stack, transposed, xa, factor, slots, offsets, tiles, y)
        options = {"tile_rows": tile_rows, "fan": fan, "scatter": not grouped_out, "bias": bias}
        product_of_stack(operands, slice_experts, "forward", options, path)
    return y, xa


def product_of_stack(
    operands: tuple, slice_experts: int, direction: str, options: dict[str, Any], path: str
) -> Tensor | None:
    """One launch that decodes in registers, or slices of experts; see `nf4_product`.

    Path "compiled" takes CUDA's product where it can, "measured" where it is faster as well.
    """
    if slice_experts:
        from ._nf4_slices_triton import sliced_product

        return sliced_product(*operands, count=slice_experts, direction=direction, **options)
    if path == "compiled" or (path == MEASURED and compiled_is_faster(operands)):
        return prefer_compiled(*operands, **options)
    from ._nf4_product_triton import nf4_product

    return nf4_product(*operands, **options)


def _fake(x, packed, absmax, codebook, code, scale, offset, stored, blocksize, transposed, *others):
    lora_a, slots = others[0], others[3]
    columns = stored[1] if transposed else stored[2]
    rank = 0 if lora_a is None else lora_a.shape[1]
    return x.new_empty((slots.shape[0], columns)), x.new_empty((slots.shape[0], rank))


_forward.register_fake(_fake)


def grouped_lora_nf4_forward(x: Tensor, weight: tuple, *arguments) -> tuple[Tensor, Tensor]:
    """Products of every expert's rows; arguments are checked by `moe.grouped_lora_linear`.

    Args:
        x: (T, K) or (R, K), any strides; bfloat16, float16 or float32.
        weight: packed, absmax, codebook, absmax_code, absmax_scale, absmax_offset, stored shape
            (E, N, K), blocksize, and whether the stack is seen as (E, K, N).
        *arguments: lora_a, lora_b, bias, slots, offsets, tiles, tile_rows, scaling, fan and
            grouped_out, as in `grouped_lora_forward`; slice_experts; path.

    Returns:
        y (R, N) in x's dtype, zero for sentinels; xa (R, r) in expert order, scaled.
    """
    return ops.grouped_lora_nf4_forward(x, *weight, *arguments)
