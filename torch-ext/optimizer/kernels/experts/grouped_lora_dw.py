"""grouped_lora_dw: gradients of the expert weights and biases, where experts are trained.

dw = x^T (g dy) and dbias = sum g dy over the rows of every expert, in float32 and without atomics;
exact zeros for experts without rows. A frozen weight never gets here: it costs no buffer.

path      | source                    | taken
triton    | grouped_lora_dw_triton.py | CUDA and ROCm (not measured yet)
reference | reference/moe.py          | everything else
"""

from __future__ import annotations

from torch import Tensor
from torch.library import custom_op

from ..._ops import add_op_namespace_prefix, ops
from ...reference import moe as reference
from ._moe_paths import TRITON_PATHS, gradient_like, on_device_of


@custom_op(add_op_namespace_prefix("grouped_lora_dw"), mutates_args=())
def _dw(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor | None,
    slots: Tensor,
    offsets: Tensor,
    x_fan: int,
    dy_fan: int,
    wants_weight: bool,
    wants_bias: bool,
    path: str,
) -> tuple[Tensor, Tensor]:
    dw = gradient_like(weight, wants_weight)
    dbias = gradient_like(weight if bias is None else bias, wants_bias)
    arguments = (x, dy, gates, slots, offsets, dw, dbias, x_fan, dy_fan)
    if path in TRITON_PATHS:
        from .grouped_lora_dw_triton import grouped_lora_dw_triton

        with on_device_of(x):
            return grouped_lora_dw_triton(*arguments)
    return reference.grouped_lora_dw(*arguments)


def _fake(
    x, dy, weight, bias, gates, slots, offsets, x_fan, dy_fan, wants_weight, wants_bias, path
):
    return (
        gradient_like(weight, wants_weight),
        gradient_like(weight if bias is None else bias, wants_bias),
    )


_dw.register_fake(_fake)


def grouped_lora_dw(
    x: Tensor,
    dy: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gates: Tensor | None,
    slots: Tensor,
    offsets: Tensor,
    *,
    x_fan: int,
    dy_fan: int,
    wants_weight: bool,
    wants_bias: bool,
    path: str,
) -> tuple[Tensor, Tensor]:
    """Gradients of W and b. Arguments are checked by `moe.grouped_lora_linear`.

    Args:
        x: (T, K) or (R, K), any strides.
        dy: (R, N) or (T, N), any strides.
        weight: (E, K, N): shape, dtype and strides of dw.
        bias: (E, N): shape, dtype and strides of dbias; or None.
        gates: (T, k) or None.
        slots: (R,) of `expert_sort`.
        offsets: (E + 1,).
        x_fan: Where row i lies in x: 0 at i (expert order), f > 0 at slots[i] // f.
        dy_fan: The same for dy.
        wants_weight: Whether dw is needed.
        wants_bias: Whether dbias is needed.
        path: "triton" or "reference"; over 4-bit weights also "compiled" or "measured".

    Returns:
        dw and dbias; (0,) for one that is not wanted.
    """
    return ops.grouped_lora_dw(
        x,
        dy,
        weight,
        bias,
        gates,
        slots,
        offsets,
        x_fan,
        dy_fan,
        wants_weight,
        wants_bias,
        path,
    )
