"""Stage 2 and 4 of the layer: products of the experts' rows with W + s A^T B^T, with autograd.

    y[i] = x[source of row i] W_e + s (x A_e^T) B_e^T + b_e          e: expert of row i
    out[t] = sum_j gates[t, j] y[row of slot t k + j]                with gates

Backward keeps x, the parameters and xa = s x A^T (R, r); the expanded result is not stored, since
the gradient of the gates follows from the input's (SonicMoE, arXiv:2512.14080, does the same).
"""

from __future__ import annotations

import numbers

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels._moe_paths import DTYPES, check_device, check_shape, check_tensor, pick_name
from ..kernels.combine import combine
from ..kernels.grouped_lora_dab import grouped_lora_dab
from ..kernels.grouped_lora_dw import grouped_lora_dw
from ..kernels.grouped_lora_dx import grouped_lora_dx
from ..kernels.grouped_lora_forward import grouped_lora_forward
from .expert_weights import QuantizedWeight, as_quantized
from .quantized_linear import check_decodable, quantized_lora_linear
from .sort import ExpertOrder


class _GroupedLora(torch.autograd.Function):
    """The products, and the combination if there are gates; every gradient that is asked for."""

    @staticmethod
    def forward(  # noqa: PLR0913
        ctx,
        x: Tensor,  # (T, K) or (R, K)
        weight: Tensor,  # (E, K, N)
        lora_a: Tensor | None,  # (E, r, K)
        lora_b: Tensor | None,  # (E, N, r)
        bias: Tensor | None,  # (E, N)
        gates: Tensor | None,  # (T, k)
        slots: Tensor,
        offsets: Tensor,
        rows: Tensor,
        tiles: Tensor,
        tile_rows: int,
        top_k: int,
        scaling: float,
        x_fan: int,
        grouped_out: bool,
        path: str,
    ) -> Tensor:
        y, xa = grouped_lora_forward(
            x,
            weight,
            lora_a,
            lora_b,
            bias,
            slots,
            offsets,
            tiles,
            tile_rows=tile_rows,
            scaling=scaling,
            fan=x_fan,
            grouped_out=grouped_out or gates is not None,
            path=path,
        )
        needs = ctx.needs_input_grad
        ctx.save_for_backward(
            x if needs[1] or needs[2] or needs[5] else None,
            weight,
            lora_a,
            lora_b,
            bias,
            gates,
            xa if needs[3] else None,
            slots,
            offsets,
            rows,
            tiles,
        )
        ctx.constants = (tile_rows, top_k, scaling, x_fan, grouped_out, path)
        if gates is None:
            return y
        return combine(y, gates, rows, offsets, top_k, backend=path)

    @staticmethod
    @once_differentiable
    def backward(ctx, dy: Tensor):
        x, weight, lora_a, lora_b, bias, gates, xa, slots, offsets, rows, tiles = ctx.saved_tensors
        tile_rows, top_k, scaling, x_fan, grouped_out, path = ctx.constants
        needs_x, needs_weight, needs_a, needs_b, needs_bias, needs_gates = ctx.needs_input_grad[:6]
        dy_fan = top_k if gates is not None else 0 if grouped_out else 1
        dx = yb = dgates = da = db = dw = dbias = None
        if needs_x or needs_a or needs_gates:
            dx, yb, dgates = grouped_lora_dx(
                dy,
                weight,
                lora_a,
                lora_b,
                bias,
                gates,
                x if needs_gates else None,
                slots,
                offsets,
                tiles,
                tile_rows=tile_rows,
                scaling=scaling,
                dy_fan=dy_fan,
                x_fan=x_fan,
                grouped_out=x_fan != 1,
                wants_dx=needs_x,
                path=path,
            )
        if needs_x and x_fan > 1:
            dx = combine(dx, None, rows, offsets, top_k, backend=path)
        sources = {"x_fan": x_fan, "dy_fan": dy_fan, "path": path}
        if needs_a or needs_b:
            # Only what a wanted gradient reads is kept; the other place is not looked at.
            da, db = grouped_lora_dab(
                x if needs_a else dy,
                dy,
                xa if needs_b else yb,
                yb if needs_a else xa,
                lora_a,
                lora_b,
                gates,
                slots,
                offsets,
                wants_a=needs_a,
                wants_b=needs_b,
                **sources,
            )
        if needs_weight or needs_bias:
            dw, dbias = grouped_lora_dw(
                x if needs_weight else dy,
                dy,
                weight,
                bias,
                gates,
                slots,
                offsets,
                wants_weight=needs_weight,
                wants_bias=needs_bias,
                **sources,
            )
        return (
            dx if needs_x else None,
            dw if needs_weight else None,
            da if needs_a else None,
            db if needs_b else None,
            dbias if needs_bias else None,
            dgates.view(gates.shape).to(gates.dtype) if needs_gates else None,
            *(None,) * 10,
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
        backend: "auto", "triton", "grouped_mm" or "reference"; `explain` says what "auto" takes.

    Returns:
        In x's dtype: (T, N) with gates; else (T k, N), in expert order with `grouped_out` and in
        slot order without. Rows of sentinels are zero.

    Raises:
        TypeError: An argument is of a wrong kind or dtype.
        ValueError: Shapes, devices or options do not fit; the message names the argument.
    """
    quantized = as_quantized(weight)
    weight = weight if quantized is None else quantized
    _check_order(order)
    _check_operands(x, weight, order, grouped_in)
    _check_lora(x, weight, lora_a, lora_b, scaling)
    if bias is not None:
        check_tensor("bias", bias, 2, DTYPES)
        check_shape("bias", bias, (weight.shape[0], weight.shape[2]), "(E, N)")
        check_device("bias", bias, x, "x")
    if gates is not None:
        check_tensor("gates", gates, 2, DTYPES)
        check_shape("gates", gates, (order.tokens, order.top_k), "(T, k)")
        check_device("gates", gates, x, "x")
        if grouped_out:
            raise ValueError("grouped_out=True leaves rows in expert order, but gates combine them")
    if quantized is not None:
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
            backend=backend,
        )
    path = pick_name("grouped_lora_linear", x.device, x.dtype, backend)
    return _GroupedLora.apply(
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
        order.tile_rows,
        order.top_k,
        float(scaling),
        0 if grouped_in else order.top_k,
        grouped_out,
        path,
    )


def _check_order(order: ExpertOrder) -> None:
    if not isinstance(order, ExpertOrder):
        raise TypeError(f"order must be the result of expert_sort, got {type(order).__name__}")


def _check_operands(x: Tensor, weight: Tensor, order: ExpertOrder, grouped_in: bool) -> None:
    check_tensor("x", x, 2, DTYPES)
    if isinstance(weight, QuantizedWeight):
        check_decodable(x)
    else:
        check_tensor("weight", weight, 3, (x.dtype,))
    rows, name = (order.tokens, "T")
    if grouped_in:
        rows, name = order.tokens * order.top_k, "T k"
    if x.shape[0] != rows:
        raise ValueError(
            f"x must have {name} = {rows} rows for grouped_in={grouped_in}, got {tuple(x.shape)}"
        )
    if weight.shape[0] != order.num_experts or weight.shape[1] != x.shape[1]:
        raise ValueError(
            f"weight must be (E, K, N) with E = {order.num_experts} and K = {x.shape[1]}, got "
            f"{tuple(weight.shape)}; a weight (E, N, K) is passed as weight.transpose(1, 2)"
        )
    if 0 in weight.shape:
        raise ValueError(f"weight must have positive sizes, got {tuple(weight.shape)}")
    check_device("weight", weight, x, "x")
    check_device("order", order.slots, x, "x")


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
