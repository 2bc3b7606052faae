"""The grouped linears of the layer: their arguments are checked here, and a path is chosen.

    y[i] = x[source of row i] W_e + s (x A_e^T) B_e^T + b_e          e: expert of row i
    out[t] = sum_j gates[t, j] y[row of slot t k + j]                with gates

`grouped_lora_linear` is one of them, `gated_lora_linear` both with the activation in between, in
one op, where one path computes them all. The ops are `kernels.experts` and `kernels.quant`.
"""

from __future__ import annotations

import dataclasses
import numbers

import torch
from torch import Tensor

from ..dispatch import TRITON_PATHS, experts_path_name
from ..kernels.autocast import autocast_dtype, cast, without_autocast
from ..kernels.checks import DTYPES, check_device, check_shape, check_tensor
from ..kernels.experts.expert_sort import ExpertOrder
from ..kernels.experts.gated_experts import fuses, gated_experts
from ..kernels.experts.grouped_lora import ExpertWeights, GatedLayer, LoraFactors
from ..kernels.experts.grouped_lora import grouped_lora_linear as _op
from ..kernels.quant.gated_quantized_experts import fuses as fuses_quantized
from .layout import ExpertsLayout
from .quantized.expert_weights import QuantizedWeight, as_quantized
from .quantized.quantized_linear import (
    check_decodable,
    quantized_gated_linear,
    quantized_lora_linear,
)


def grouped_lora_linear(
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    order: ExpertOrder,
    lora_a: Tensor | None = None,
    lora_b: Tensor | None = None,
    *,
    scaling: float = 1.0,
    bias: Tensor | None = None,
    gates: Tensor | None = None,
    grouped_in: bool = False,
    grouped_out: bool = False,
    backend: str = "auto",
) -> Tensor:
    """Multiply the rows of every expert with W_e + s A_e^T B_e^T, without forming that sum.

    Differentiable once in x, weight, lora_a, lora_b, bias and gates; gradients are summed in
    float32, written once in the parameter's dtype and strides, and repeat bit for bit. A weight
    that needs no gradient gets no buffer.

    Under autocast x, weight and bias are cast to its dtype, as by `torch.nn.functional.linear`, and
    get gradients in their own.

    Args:
        x: (T, K) in token order, or (T k, K) in expert order with `grouped_in`; float16, bfloat16,
            float32 or float64, any strides.
        weight: (E, K, N) of x's dtype, any strides; transformers' (E, N, K) is passed as
            `weight.transpose(1, 2)`. 4-bit experts (`QuantizedExperts`) likewise; they stay frozen.
        order: Of `expert_sort`.
        lora_a: (E, r, K) of any floating dtype and strides; None for the experts alone.
        lora_b: (E, N, r), together with lora_a. PEFT's (N, r E) is passed as
            `B.view(N, r, E).permute(2, 0, 1)`; it is read in place, and so is its gradient written.
        scaling: s, for example alpha / r.
        bias: (E, N) of any floating dtype.
        gates: (T, k) of any floating dtype; the result is combined to (T, N).
        grouped_in: x is in expert order.
        grouped_out: Leave the result in expert order.
        backend: "auto", "triton", "reference", or over 4-bit experts "compiled"; `explain` says
            what "auto" takes.

    Returns:
        In x's dtype, or autocast's: (T, N) with gates; else (T k, N), in expert order with
        `grouped_out` and in slot order without. Rows of sentinels are zero.

    Raises:
        TypeError: An argument is of a wrong kind or dtype.
        ValueError: Shapes, devices or options do not fit; the message names the argument.
    """
    lora = None
    if lora_a is not None or lora_b is not None:
        lora = LoraFactors(lora_a, lora_b, scaling)
    _check_scaling(scaling)
    weights = ExpertWeights(weight, lora, bias)
    return expert_linear(x, weights, order, gates, grouped_in, grouped_out, backend=backend)


def expert_linear(
    x: Tensor,
    weights: ExpertWeights,
    order: ExpertOrder,
    gates: Tensor | None = None,
    grouped_in: bool = False,
    grouped_out: bool = False,
    *,
    backend: str = "auto",
) -> Tensor:
    """`grouped_lora_linear` of one projection's record."""
    quantized = as_quantized(weights.weight)
    if quantized is not None:
        weights = dataclasses.replace(weights, weight=quantized)
    check_rows(x, order, grouped_in)
    dtype = autocast_dtype(x)
    x = cast(x, dtype)
    weights = ExpertWeights(cast(weights.weight, dtype), weights.lora, cast(weights.bias, dtype))
    check_projection(x, weights, order, x.shape[1])
    if gates is not None:
        check_gates(gates, x, order)
        if grouped_out:
            raise ValueError("grouped_out=True leaves rows in expert order, but gates combine them")
    dense = quantized is None
    path = experts_path_name("grouped_lora_linear", x.device, x.dtype, backend, dense=dense)
    check_path(path, x)
    options = {"grouped_out": grouped_out, "path": path}
    with without_autocast(x.device):
        if dense:
            return _op(x, weights, order, gates, grouped_in=grouped_in, **options)
        x_fan, by_name = 0 if grouped_in else order.top_k, backend != "auto"
        return quantized_lora_linear(
            x, weights, order, gates, x_fan=x_fan, by_name=by_name, **options
        )


def gated_lora_linear(
    x: Tensor,
    first: ExpertWeights,
    second: ExpertWeights,
    order: ExpertOrder,
    gates: Tensor,
    layout: ExpertsLayout,
    *,
    backend: str = "auto",
) -> Tensor | None:
    """Both projections, the activation between them and the sum over a token's experts.

        h[i] = act(gate) up of (x W1_e + s (x A_e^T) B_e^T + b_e)          e: expert of row i
        out[t] = sum_j gates[t, j] (h W2_e + ...)[row of slot t k + j]

    Args:
        x: (T, H), any strides.
        first: Weight (E, H, 2I), dense or 4-bit experts seen so; its factors and bias.
        second: The same, (E, I, H).
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
    quantized = tuple(as_quantized(one.weight) for one in (first, second))
    dense, packed = quantized == (None, None), None not in quantized
    if packed:
        first, second = (
            dataclasses.replace(one, weight=weight)
            for one, weight in zip((first, second), quantized, strict=True)
        )
    check_rows(x, order, grouped_in=False)
    path = experts_path_name("grouped_lora_linear", x.device, x.dtype, backend, dense=dense)
    kind = (layout.activation, layout.gated)
    if packed:
        fusable = fuses_quantized(path, *kind)
    else:
        fusable = dense and fuses(path, first.weight.stride(), *kind, layout.interleaved)
    if not fusable:
        return None
    check_path(path, x)
    check_layer(x, first, second, order, gates)
    layer = GatedLayer(x, first, second, order, gates, layout.activation, layout.interleaved)
    if packed:
        return quantized_gated_linear(layer, path, by_name=backend != "auto")
    return gated_experts(layer)


def check_layer(
    x: Tensor, first: ExpertWeights, second: ExpertWeights, order: ExpertOrder, gates: Tensor
) -> None:
    """Both projections of a gated layer and the gates fit to x and the order."""
    check_projection(x, first, order, x.shape[1])
    check_projection(x, second, order, first.weight.shape[2] // 2)
    check_gates(gates, x, order)


def check_rows(x: Tensor, order: ExpertOrder, grouped_in: bool) -> None:
    """`x` is a matrix with the rows that the order speaks of."""
    if not isinstance(order, ExpertOrder):
        raise TypeError(f"order must be the result of expert_sort, got {type(order).__name__}")
    check_tensor("x", x, 2, DTYPES)
    rows, name = (order.tokens, "T")
    if grouped_in:
        rows, name = order.tokens * order.top_k, "T k"
    if x.shape[0] != rows:
        raise ValueError(
            f"x must have {name} = {rows} rows for grouped_in={grouped_in}, got {tuple(x.shape)}"
        )
    check_device("order", order.slots, x, "x")


def check_projection(x: Tensor, weights: ExpertWeights, order: ExpertOrder, inputs: int) -> None:
    """Weight, factors and bias fit to each other, to K = `inputs` and to the dtype of x."""
    weight, bias = weights.weight, weights.bias
    if isinstance(weight, QuantizedWeight):
        check_decodable(x)
    else:
        check_tensor("weight", weight, 3, (x.dtype,))
    if weight.shape[0] != order.num_experts or weight.shape[1] != inputs:
        raise ValueError(
            f"weight must be (E, K, N) with E = {order.num_experts} and K = {inputs}, got "
            f"{tuple(weight.shape)}; a weight (E, N, K) is passed as weight.transpose(1, 2)"
        )
    if 0 in weight.shape:
        raise ValueError(f"weight must have positive sizes, got {tuple(weight.shape)}")
    check_device("weight", weight, x, "x")
    if weights.lora is not None:
        _check_lora(x, weight, weights.lora)
    if bias is not None:
        check_tensor("bias", bias, 2, DTYPES)
        check_shape("bias", bias, (weight.shape[0], weight.shape[2]), "(E, N)")
        check_device("bias", bias, x, "x")


def check_gates(gates: Tensor, x: Tensor, order: ExpertOrder) -> None:
    """`gates` belong to the order's slots."""
    check_tensor("gates", gates, 2, DTYPES)
    check_shape("gates", gates, (order.tokens, order.top_k), "(T, k)")
    check_device("gates", gates, x, "x")


def check_path(path: str, x: Tensor) -> None:
    """The path computes x's dtype."""
    if path in TRITON_PATHS and x.dtype == torch.float64:
        raise ValueError(f'backend="{path}" computes no float64; use "auto" or "reference"')


def _check_scaling(scaling: float) -> None:
    if isinstance(scaling, bool) or not isinstance(scaling, (numbers.Real, torch.SymFloat)):
        raise TypeError(f"scaling must be a number, got {type(scaling).__name__}")


def _check_lora(x: Tensor, weight: Tensor, lora: LoraFactors) -> None:
    lora_a, lora_b = lora.a, lora.b
    _check_scaling(lora.scaling)
    if lora_a is None or lora_b is None:
        raise ValueError("lora_a and lora_b are the two factors of one delta: give both or none")
    check_tensor("lora_a", lora_a, 3, DTYPES)
    check_tensor("lora_b", lora_b, 3, DTYPES)
    experts, k, n = weight.shape
    rank = lora_a.shape[1]
    if rank < 1:
        raise ValueError(f"lora_a must be (E, r, K) with r >= 1, got {tuple(lora_a.shape)}")
    check_shape("lora_a", lora_a, (experts, rank, k), "(E, r, K)")
    check_shape("lora_b", lora_b, (experts, n, rank), "(E, N, r)")
    for name, factor in (("lora_a", lora_a), ("lora_b", lora_b)):
        check_device(name, factor, x, "x")
        if factor.dtype == torch.float64 and x.dtype != torch.float64:
            raise TypeError(f"{name} is float64 over x of {x.dtype}; use float32 or x's dtype")
