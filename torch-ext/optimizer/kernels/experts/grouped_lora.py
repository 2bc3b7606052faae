"""The grouped LoRA product as ops: forward, its gradients, and all of it with autograd.

path      | source                   | taken
triton    | grouped_launch_triton.py | CUDA
reference | reference/moe.py         | everything else
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from ..._ops import add_op_namespace_prefix, ops
from ...reference import moe as reference
from ..autocast import without_autocast
from ._moe_paths import TRITON_PATHS, gradient_like, on_device_of, refuse_forward_mode
from .combine import combine_rows


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
        from .grouped_launch_triton import grouped_lora_forward_triton

        with on_device_of(x):
            return grouped_lora_forward_triton(
                *operands, slots, tiles, tile_rows, scaling, fan, grouped_out
            )
    return reference.grouped_lora_forward(*operands, slots, offsets, scaling, fan, grouped_out)


def _fake_forward(
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


_forward.register_fake(_fake_forward)


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
        from .grouped_launch_triton import grouped_lora_dx_triton

        with on_device_of(dy):
            return grouped_lora_dx_triton(*operands, tiles, tile_rows, *layout)
    return reference.grouped_lora_dx(*operands, offsets, *layout)


def _fake_dx(  # noqa: PLR0913
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


_dx.register_fake(_fake_dx)


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
        from .grouped_launch_triton import grouped_lora_dab_triton

        with on_device_of(x):
            return grouped_lora_dab_triton(*arguments)
    return reference.grouped_lora_dab(*arguments)


def _fake_dab(  # noqa: PLR0913
    x, dy, xa, yb, lora_a, lora_b, gates, slots, offsets, x_fan, dy_fan, wants_a, wants_b, path
):
    return gradient_like(lora_a, wants_a), gradient_like(lora_b, wants_b)


_dab.register_fake(_fake_dab)


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
        from .grouped_launch_triton import grouped_lora_dw_triton

        with on_device_of(x):
            return grouped_lora_dw_triton(*arguments)
    return reference.grouped_lora_dw(*arguments)


def _fake_dw(
    x, dy, weight, bias, gates, slots, offsets, x_fan, dy_fan, wants_weight, wants_bias, path
):
    return (
        gradient_like(weight, wants_weight),
        gradient_like(weight if bias is None else bias, wants_bias),
    )


_dw.register_fake(_fake_dw)


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


def _fan(top_k: int, in_expert_order: bool) -> int:
    """Where row i lies: 0 at i (expert order), f > 0 at slots[i] // f."""
    return 0 if in_expert_order else top_k


@custom_op(add_op_namespace_prefix("grouped_lora_linear"), mutates_args=())
def _linear(  # noqa: PLR0913
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    bias: Tensor | None,
    gates: Tensor | None,
    slots: Tensor,
    offsets: Tensor,
    rows: Tensor,
    tiles: Tensor,
    tile_rows: int,
    top_k: int,
    scaling: float,
    grouped_in: bool,
    grouped_out: bool,
    path: str,
) -> tuple[Tensor, Tensor]:
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
        fan=_fan(top_k, grouped_in),
        grouped_out=grouped_out or gates is not None,
        path=path,
    )
    return y if gates is None else combine_rows(y, gates, rows, offsets, top_k, path), xa


def _fake_linear(  # noqa: PLR0913
    x,
    weight,
    lora_a,
    lora_b,
    bias,
    gates,
    slots,
    offsets,
    rows,
    tiles,
    tile_rows,
    top_k,
    scaling,
    grouped_in,
    grouped_out,
    path,
):
    results = slots.shape[0] if gates is None else gates.shape[0]
    rank = 0 if lora_a is None else lora_a.shape[1]
    return x.new_empty((results, weight.shape[2])), x.new_empty((slots.shape[0], rank))


def _save(ctx, inputs, output):
    x, weight, lora_a, lora_b, bias, gates, *order = inputs[:10]
    ctx.constants = inputs[10:]
    ctx.set_materialize_grads(False)  # xa is an output of the op, but nobody's operand
    needs = ctx.needs_input_grad
    keeps_x = needs[1] or needs[2] or needs[5]
    xa = output[1] if needs[3] else None
    ctx.save_for_backward(x if keeps_x else None, weight, lora_a, lora_b, bias, gates, xa, *order)


def _backward(ctx, dy, _):
    if dy is None:
        return (None,) * 16
    with without_autocast(dy.device):
        return _gradients(ctx, dy)


def _gradients(ctx, dy):
    needs = ctx.needs_input_grad
    x, weight, lora_a, lora_b, bias, gates, xa, slots, offsets, rows, tiles = ctx.saved_tensors
    tile_rows, top_k, scaling, grouped_in, grouped_out, path = ctx.constants
    x_fan = _fan(top_k, grouped_in)
    dy_fan = top_k if gates is not None else _fan(1, grouped_out)
    dx = yb = dgates = da = db = dw = dbias = None
    if needs[0] or needs[2] or needs[5]:
        dx, yb, dgates = grouped_lora_dx(
            dy,
            weight,
            lora_a,
            lora_b,
            bias,
            gates,
            x if needs[5] else None,
            slots,
            offsets,
            tiles,
            tile_rows=tile_rows,
            scaling=scaling,
            dy_fan=dy_fan,
            x_fan=x_fan,
            grouped_out=x_fan != 1,
            wants_dx=needs[0],
            path=path,
        )
    if needs[0] and x_fan > 1:
        dx = combine_rows(dx, None, rows, offsets, top_k, path)
    sources = {"x_fan": x_fan, "dy_fan": dy_fan, "path": path}
    if needs[2] or needs[3]:
        # What no wanted gradient reads was not kept; another tensor stands in its place.
        da, db = grouped_lora_dab(
            x if needs[2] else dy,
            dy,
            xa if needs[3] else yb,
            yb if needs[2] else xa,
            lora_a,
            lora_b,
            gates,
            slots,
            offsets,
            wants_a=needs[2],
            wants_b=needs[3],
            **sources,
        )
    if needs[1] or needs[4]:
        dw, dbias = grouped_lora_dw(
            x if needs[1] else dy,
            dy,
            weight,
            bias,
            gates,
            slots,
            offsets,
            wants_weight=needs[1],
            wants_bias=needs[4],
            **sources,
        )
    if needs[5]:
        dgates = dgates.view(gates.shape).to(gates.dtype)
    found = (dx, dw, da, db, dbias, dgates)
    return (
        *(grad if need else None for grad, need in zip(found, needs, strict=False)),
        *(None,) * 10,
    )


_linear.register_fake(_fake_linear)
_linear.register_autograd(_backward, setup_context=_save)


def grouped_lora_linear(  # noqa: PLR0913
    x: Tensor,
    weight: Tensor,
    lora_a: Tensor | None,
    lora_b: Tensor | None,
    bias: Tensor | None,
    gates: Tensor | None,
    slots: Tensor,
    offsets: Tensor,
    rows: Tensor,
    tiles: Tensor,
    *,
    tile_rows: int,
    top_k: int,
    scaling: float,
    grouped_in: bool,
    grouped_out: bool,
    path: str,
) -> Tensor:
    """The differentiable product. Arguments are checked by `moe.grouped_lora_linear`.

    Args:
        x: (T, K) in token order, or (R, K) in expert order with `grouped_in`.
        weight: (E, K, N).
        lora_a: (E, r, K) or None.
        lora_b: (E, N, r), with lora_a.
        bias: (E, N) or None.
        gates: (T, k) or None.
        slots: (R,) of `expert_sort`, as offsets, rows and tiles.
        offsets: (E + 1,).
        rows: (R,).
        tiles: (bound, 3).
        tile_rows: The rows of a tile that `tiles` was made for.
        top_k: k.
        scaling: Factor of the LoRA product.
        grouped_in: x is in expert order.
        grouped_out: Leave the result in expert order.
        path: "triton" or "reference".

    Returns:
        (T, N) with gates; else (R, N) in slot order, or in expert order with `grouped_out`.
    """
    refuse_forward_mode("grouped_lora_linear", x, weight, lora_a, lora_b, bias, gates)
    out, _ = ops.grouped_lora_linear(
        x,
        weight,
        lora_a,
        lora_b,
        bias,
        gates,
        slots,
        offsets,
        rows,
        tiles,
        tile_rows,
        top_k,
        scaling,
        grouped_in,
        grouped_out,
        path,
    )
    return out
