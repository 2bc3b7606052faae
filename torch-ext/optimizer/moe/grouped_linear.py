"""Stage 2 and 4 of the layer: products of the experts' rows with W + s A^T B^T, with autograd.

    y[i] = x[source of row i] W_e + s (x A_e^T) B_e^T + b_e          e: expert of row i
    out[t] = sum_j gates[t, j] y[row of slot t k + j]                with gates

The op and its gradients are `kernels.experts.grouped_lora_linear`; here its arguments are checked.
"""

from __future__ import annotations

import numbers

import torch
from torch import Tensor

from ..kernels.autocast import autocast_dtype, cast, without_autocast
from ..kernels.experts._moe_paths import (
    DTYPES,
    TRITON_PATHS,
    check_device,
    check_shape,
    check_tensor,
    pick_name,
)
from ..kernels.experts.grouped_lora import grouped_lora_linear as _op
from .quantized.expert_weights import QuantizedWeight, as_quantized
from .quantized.quantized_linear import check_decodable, quantized_lora_linear
from .sort import ExpertOrder


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
    quantized = as_quantized(weight)
    weight = weight if quantized is None else quantized
    check_rows(x, order, grouped_in)
    dtype = autocast_dtype(x)
    x, weight, bias = (cast(one, dtype) for one in (x, weight, bias))
    check_projection(x, weight, order, x.shape[1], lora_a, lora_b, scaling, bias)
    if gates is not None:
        check_gates(gates, x, order)
        if grouped_out:
            raise ValueError("grouped_out=True leaves rows in expert order, but gates combine them")
    dense = quantized is None
    path = pick_name("grouped_lora_linear", x.device, x.dtype, backend, dense=dense)
    check_path(path, x)
    with without_autocast(x.device):
        if not dense:
            return quantized_lora_linear(
                x,
                quantized,
                order,
                lora_a,
                lora_b,
                scaling=float(scaling),
                bias=bias,
                gates=gates,
                x_fan=0 if grouped_in else order.top_k,
                grouped_out=grouped_out,
                path=path,
                by_name=backend != "auto",
            )
        return _op(
            x,
            weight,
            lora_a,
            lora_b,
            bias,
            gates,
            order.slots,
            order.offsets,
            order.rows,
            order.tiles,
            tile_rows=order.tile_rows,
            top_k=order.top_k,
            scaling=float(scaling),
            grouped_in=grouped_in,
            grouped_out=grouped_out,
            path=path,
        )


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


def check_projection(
    x: Tensor,
    weight: Tensor | QuantizedWeight,
    order: ExpertOrder,
    inputs: int,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    scaling: float,
    bias: Tensor | None,
) -> None:
    """Weight, factors and bias fit to each other, to K = `inputs` and to the dtype of x."""
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
    _check_lora(x, weight, lora_a, lora_b, scaling)
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


def _check_lora(
    x: Tensor, weight: Tensor, lora_a: Tensor | None, lora_b: Tensor | None, scaling: float
) -> None:
    if isinstance(scaling, bool) or not isinstance(scaling, (numbers.Real, torch.SymFloat)):
        raise TypeError(f"scaling must be a number, got {type(scaling).__name__}")
    if lora_a is None and lora_b is None:
        return
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
