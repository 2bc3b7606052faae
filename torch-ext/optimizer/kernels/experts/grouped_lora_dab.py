"""grouped_lora_dab: gradients of the LoRA factors of every expert, from what was kept.

da = (g yb)^T x and db = dy^T (g xa), with xa and yb of grouped_lora_forward and grouped_lora_dx,
already scaled. The gate is put on the r-wide side, so that no scaled copy of dy exists. Each
program owns its part of the result and sums in float32: no atomics, exact zeros for experts
without rows. Results have the strides of the parameters, PEFT's layout included.

path      | source                     | taken
triton    | grouped_lora_dab_triton.py | CUDA and ROCm
reference | reference/moe.py           | everything else
"""

from __future__ import annotations

from torch import Tensor
from torch.library import custom_op

from ..._ops import add_op_namespace_prefix, ops
from ...reference import moe as reference
from ._moe_paths import TRITON_PATHS, gradient_like, on_device_of


@custom_op(add_op_namespace_prefix("grouped_lora_dab"), mutates_args=())
def _dab(  # noqa: PLR0913
    x: Tensor,
    dy: Tensor,
    xa: Tensor,
    yb: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    gates: Tensor | None,
    slots: Tensor,
    offsets: Tensor,
    x_fan: int,
    dy_fan: int,
    wants_a: bool,
    wants_b: bool,
    path: str,
) -> tuple[Tensor, Tensor]:
    da, db = gradient_like(lora_a, wants_a), gradient_like(lora_b, wants_b)
    arguments = (x, dy, xa, yb, gates, slots, offsets, da, db, x_fan, dy_fan)
    if path in TRITON_PATHS:
        from .grouped_lora_dab_triton import grouped_lora_dab_triton

        with on_device_of(x):
            return grouped_lora_dab_triton(*arguments)
    return reference.grouped_lora_dab(*arguments)


def _fake(  # noqa: PLR0913
    x, dy, xa, yb, lora_a, lora_b, gates, slots, offsets, x_fan, dy_fan, wants_a, wants_b, path
):
    return gradient_like(lora_a, wants_a), gradient_like(lora_b, wants_b)


_dab.register_fake(_fake)


def grouped_lora_dab(  # noqa: PLR0913
    x: Tensor,
    dy: Tensor,
    xa: Tensor,
    yb: Tensor,
    lora_a: Tensor,
    lora_b: Tensor,
    gates: Tensor | None,
    slots: Tensor,
    offsets: Tensor,
    *,
    x_fan: int,
    dy_fan: int,
    wants_a: bool,
    wants_b: bool,
    path: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of A and B. Arguments are checked by `moe.grouped_lora_linear`.

    Args:
        x: (T, K) or (R, K), any strides.
        dy: (R, N) or (T, N), any strides.
        xa: (R, r) in expert order, scaled; read for db.
        yb: (R, r) in expert order, scaled; read for da.
        lora_a: (E, r, K): shape, dtype and strides of da.
        lora_b: (E, N, r): shape, dtype and strides of db.
        gates: (T, k) or None.
        slots: (R,) of `expert_sort`.
        offsets: (E + 1,).
        x_fan: Where row i lies in x: 0 at i (expert order), f > 0 at slots[i] // f.
        dy_fan: The same for dy.
        wants_a: Whether da is needed.
        wants_b: Whether db is needed.
        path: "triton" or "reference"; over 4-bit weights also "compiled" or "measured".

    Returns:
        da and db; (0,) for one that is not wanted.
    """
    return ops.grouped_lora_dab(
        x,
        dy,
        xa,
        yb,
        lora_a,
        lora_b,
        gates,
        slots,
        offsets,
        x_fan,
        dy_fan,
        wants_a,
        wants_b,
        path,
    )
