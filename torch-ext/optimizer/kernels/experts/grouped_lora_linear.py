"""grouped_lora_linear: the grouped product, combined by gates if there are any, with its gradients.

Composes grouped_lora_forward and combine, and for backward grouped_lora_dx, grouped_lora_dab and
grouped_lora_dw. Kept for backward are x, the parameters and xa = s x A^T (R, r); the expanded
result is not, since the gradient of the gates follows from the input's (as in SonicMoE,
arXiv:2512.14080). Only what `needs_input_grad` asks for is computed, and nothing kept is written
to. The gradients have no gradients: a second order raises.
"""

from __future__ import annotations

from torch import Tensor
from torch.library import custom_op

from ..._ops import add_op_namespace_prefix, ops
from ..autocast import without_autocast
from ._moe_paths import refuse_forward_mode
from .combine import combine_rows
from .grouped_lora_dab import grouped_lora_dab
from .grouped_lora_dw import grouped_lora_dw
from .grouped_lora_dx import grouped_lora_dx
from .grouped_lora_forward import grouped_lora_forward


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


def _fake(  # noqa: PLR0913
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


_linear.register_fake(_fake)
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
