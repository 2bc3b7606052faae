"""Stages 2 to 4 of the layer in one op, where one path computes them all.

    h[i] = act(gate) up of (x W1_e + s (x A_e^T) B_e^T + b_e)          e: expert of row i
    out[t] = sum_j gates[t, j] (h W2_e + ...)[row of slot t k + j]

The op and its gradients are `kernels.experts.gated_experts`; here its arguments are checked. What
it does not take, `moe.experts` composes of `grouped_lora_linear` and the activation.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..kernels.experts._moe_paths import pick_name
from ..kernels.experts.gated_experts import fuses, gated_experts
from ..kernels.quant.gated_nf4_experts import fuses as fuses_nf4
from .grouped_linear import check_gates, check_path, check_projection, check_rows
from .layout import ExpertsLayout
from .quantized.expert_weights import as_quantized
from .quantized.quantized_gated import quantized_gated_linear
from .sort import ExpertOrder


def gated_lora_linear(
    x: Tensor,  # (T, H)
    first: dict[str, Any],
    second: dict[str, Any],
    order: ExpertOrder,
    gates: Tensor,  # (T, k)
    layout: ExpertsLayout,
    *,
    backend: str = "auto",
) -> Tensor | None:
    """Both projections, the activation between them and the sum over a token's experts.

    Args:
        x: (T, H), any strides.
        first: weight (E, H, 2I) and, as for `grouped_lora_linear`, bias, lora_a, lora_b, scaling.
        second: The same with weight (E, I, H).
        order: Of `expert_sort`.
        gates: (T, k) of any floating dtype.
        layout: Says where gate and up lie in 2I, and names the activation.
        backend: Of `grouped_lora_linear`.

    Returns:
        (T, H) in x's dtype; None where the stages must run on their own.

    Raises:
        TypeError: An argument is of a wrong kind or dtype.
        ValueError: Shapes, devices or options do not fit; the message names the argument.
    """
    quantized = tuple(as_quantized(one["weight"]) for one in (first, second))
    packed = None not in quantized
    if packed:
        first, second = (
            {**one, "weight": weight}
            for one, weight in zip((first, second), quantized, strict=True)
        )
    check_rows(x, order, grouped_in=False)
    dense = quantized == (None, None)
    path = pick_name("grouped_lora_linear", x.device, x.dtype, backend, dense=dense)
    kind = (layout.activation, layout.gated)
    if packed:
        fusable = fuses_nf4(path, *kind)
    else:
        fusable = dense and fuses(path, first["weight"].stride(), *kind, layout.interleaved)
    if not fusable:
        return None
    check_path(path, x)
    for inputs, one in ((x.shape[1], first), (first["weight"].shape[2] // 2, second)):
        _check(x, order, inputs, **one)
    check_gates(gates, x, order)
    if packed:
        by_name = backend != "auto"
        return quantized_gated_linear(
            x, first, second, order, gates, layout, path=path, by_name=by_name
        )
    operands = (one.get(name) for one in (first, second) for name in _NAMES)
    return gated_experts(
        x,
        *operands,
        gates,
        order.slots,
        order.offsets,
        order.rows,
        order.tiles,
        tile_rows=order.tile_rows,
        top_k=order.top_k,
        scalings=tuple(float(one.get("scaling", 1.0)) for one in (first, second)),
        activation=layout.activation,
        interleaved=layout.interleaved,
    )


_NAMES = ("weight", "lora_a", "lora_b", "bias")


def check_operands(
    x: Tensor, first: tuple, second: tuple, gates: Tensor, order: ExpertOrder
) -> None:
    """Rows, both projections (weight, lora_a, lora_b, scaling, bias) and gates fit together."""
    check_rows(x, order, grouped_in=False)
    _check(x, order, x.shape[1], *first)
    _check(x, order, first[0].shape[2] // 2, *second)
    check_gates(gates, x, order)


def _check(
    x: Tensor,
    order: ExpertOrder,
    inputs: int,
    weight: Tensor,
    lora_a: Tensor | None = None,
    lora_b: Tensor | None = None,
    scaling: float = 1.0,
    bias: Tensor | None = None,
) -> None:
    check_projection(x, weight, order, inputs, lora_a, lora_b, scaling, bias)
