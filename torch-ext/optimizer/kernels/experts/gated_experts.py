"""gated_experts: both products of a gated layer, its activation inside of them, with gradients.

out[t] = sum_j gates[t, j] (act(gate) up W2_e + ...) with gate, up of x W1_e + ...: what
grouped_lora_linear, glu and grouped_lora_linear compose, in one op. The activation is computed in
the epilogue of the product that makes its operands, forward and backward. Kept for backward are x,
gate and up (R, 2I) and two (R, r): h is made again by the product that needs its gradient. Without
a backward not even gate and up are stored.
The gradients have no gradients: a second order raises.

path      | source                   | taken
triton    | gated_experts_triton.py  | what `fuses` says; else the three ops
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from ..._ops import add_op_namespace_prefix, ops
from ..autocast import without_autocast
from ..launch.launch_plan import replayed
from ._moe_paths import gradient_like, on_device_of, refuse_forward_mode
from .glu import ACTIVATIONS


def fuses(
    path: str, strides: tuple[int, ...], activation: object, gated: bool, interleaved: bool
) -> bool:
    """Whether gate and up can be neighbours in a product without a copy of the weight.

    `strides` are those of (E, H, 2I). Where the columns of the halves lie together, apart from each
    other, an interleaved read would be one element at a time.
    """
    readable = interleaved or strides[1] == 1 or strides[2] != 1
    named = isinstance(activation, str) and activation in ACTIVATIONS
    return path == "triton" and gated and named and readable


@custom_op(add_op_namespace_prefix("gated_experts"), mutates_args=())
def _gated_experts(  # noqa: PLR0913
    x: Tensor,
    w1: Tensor,
    a1: Tensor | None,
    b1: Tensor | None,
    bias1: Tensor | None,
    w2: Tensor,
    a2: Tensor | None,
    b2: Tensor | None,
    bias2: Tensor | None,
    gates: Tensor,
    slots: Tensor,
    offsets: Tensor,
    rows: Tensor,
    tiles: Tensor,
    tile_rows: int,
    top_k: int,
    scaling1: float,
    scaling2: float,
    activation: str,
    interleaved: bool,
    keeps: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from .gated_launch_triton import gated_experts_triton

    operands = (x, w1, a1, b1, bias1, w2, a2, b2, bias2, gates, slots, offsets, rows, tiles)
    constants = (tile_rows, top_k, (scaling1, scaling2), activation, interleaved, keeps)
    with on_device_of(x):
        return tuple(replayed("gated_experts", gated_experts_triton, operands, constants))


def _fake(  # noqa: PLR0913
    x,
    w1,
    a1,
    b1,
    bias1,
    w2,
    a2,
    b2,
    bias2,
    gates,
    slots,
    offsets,
    rows,
    tiles,
    tile_rows,
    top_k,
    scaling1,
    scaling2,
    activation,
    interleaved,
    keeps,
):
    total = slots.shape[0]
    return (
        x.new_empty((gates.shape[0], w2.shape[2])),
        x.new_empty((total if keeps else 0, w1.shape[2])),
        x.new_empty((total, 0 if a1 is None else a1.shape[1])),
        x.new_empty((total, 0 if a2 is None else a2.shape[1])),
    )


@custom_op(add_op_namespace_prefix("gated_experts_backward"), mutates_args=())
def _gated_experts_backward(  # noqa: PLR0913
    grad: Tensor,
    x: Tensor,
    w1: Tensor,
    a1: Tensor | None,
    b1: Tensor | None,
    bias1: Tensor | None,
    w2: Tensor,
    a2: Tensor | None,
    b2: Tensor | None,
    bias2: Tensor | None,
    gates: Tensor,
    wide: Tensor,
    xa1: Tensor,
    xa2: Tensor,
    slots: Tensor,
    offsets: Tensor,
    rows: Tensor,
    tiles: Tensor,
    tile_rows: int,
    top_k: int,
    scaling1: float,
    scaling2: float,
    activation: str,
    interleaved: bool,
    wants: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from .gated_launch_triton import gated_experts_backward_triton

    parameters = (w1, a1, b1, bias1, w2, a2, b2, bias2)
    operands = (grad, x, *parameters, gates, wide, xa1, xa2, slots, offsets, rows, tiles)
    scalings = (scaling1, scaling2)
    constants = (tile_rows, top_k, scalings, activation, interleaved, _flags(wants))
    function = gated_experts_backward_triton
    with on_device_of(grad):
        return tuple(replayed("gated_experts_backward", function, operands, constants))


def _flags(wants: int) -> tuple[bool, ...]:
    """Which of the ten operands want a gradient: bit n for the n-th."""
    return tuple(bool(wants >> bit & 1) for bit in range(10))


def _fake_backward(  # noqa: PLR0913
    grad,
    x,
    w1,
    a1,
    b1,
    bias1,
    w2,
    a2,
    b2,
    bias2,
    gates,
    wide,
    xa1,
    xa2,
    slots,
    offsets,
    rows,
    tiles,
    tile_rows,
    top_k,
    scaling1,
    scaling2,
    activation,
    interleaved,
    wants,
):
    flags = _flags(wants)
    dx = x.new_empty(x.shape if flags[0] else 0)
    dgates = gates.new_empty(gates.shape if flags[9] else 0)
    parameters = (w1, a1, b1, bias1, w2, a2, b2, bias2)
    grads = (
        x.new_empty(0) if parameter is None else gradient_like(parameter, want)
        for parameter, want in zip(parameters, flags[1:9], strict=True)
    )
    return dx, *grads, dgates


def _save(ctx, inputs, output):
    *operands, ctx.tile_rows, ctx.top_k, scaling1, scaling2, activation, interleaved, keeps = inputs
    ctx.set_materialize_grads(False)  # what else than the result is nobody's operand
    ctx.constants = (scaling1, scaling2, activation, interleaved)
    ctx.keeps = keeps
    ctx.save_for_backward(*operands[:10], *output[1:], *operands[10:])


def _backward(ctx, grad, *_):
    if grad is None:
        return (None,) * 21
    if not ctx.keeps:
        raise RuntimeError("gated_experts ran with keeps=False, but its backward was called")
    needs = ctx.needs_input_grad[:10]
    wants = sum(bool(need) << bit for bit, need in enumerate(needs))
    with without_autocast(grad.device):
        found = ops.gated_experts_backward(
            grad, *ctx.saved_tensors, ctx.tile_rows, ctx.top_k, *ctx.constants, wants
        )
    return (*(one if want else None for one, want in zip(found, needs, strict=True)), *(None,) * 11)


_gated_experts.register_fake(_fake)
_gated_experts_backward.register_fake(_fake_backward)
_gated_experts.register_autograd(_backward, setup_context=_save)


def gated_experts(  # noqa: PLR0913
    x: Tensor,
    w1: Tensor,
    a1: Tensor | None,
    b1: Tensor | None,
    bias1: Tensor | None,
    w2: Tensor,
    a2: Tensor | None,
    b2: Tensor | None,
    bias2: Tensor | None,
    gates: Tensor,
    slots: Tensor,
    offsets: Tensor,
    rows: Tensor,
    tiles: Tensor,
    *,
    tile_rows: int,
    top_k: int,
    scalings: tuple[float, float],
    activation: str,
    interleaved: bool,
) -> Tensor:
    """A gated layer of experts. Arguments are checked by `moe.gated_linear`.

    Args:
        x: (T, H), any strides.
        w1: (E, H, 2I) of x's dtype; see `fuses`.
        a1: (E, r, H) or None, as b1.
        b1: (E, 2I, r).
        bias1: (E, 2I) or None.
        w2: (E, I, H) of x's dtype, any strides.
        a2: (E, r', I) or None, as b2.
        b2: (E, H, r').
        bias2: (E, H) or None.
        gates: (T, k).
        slots: (R,) of `expert_sort`, as offsets, rows and tiles.
        offsets: (E + 1,).
        rows: (R,).
        tiles: (bound, 3).
        tile_rows: The rows of a tile that `tiles` was made for.
        top_k: k.
        scalings: Factors of the two LoRA products.
        activation: One of `kernels.experts.glu.ACTIVATIONS`.
        interleaved: Gate and up columns alternate; else all gates come first.

    Returns:
        (T, H) in x's dtype.
    """
    leaves = (x, w1, a1, b1, bias1, w2, a2, b2, bias2, gates)
    refuse_forward_mode("gated_experts", *leaves)
    needs = any(leaf is not None and leaf.requires_grad for leaf in leaves)
    out, *_ = ops.gated_experts(
        *leaves,
        slots,
        offsets,
        rows,
        tiles,
        tile_rows,
        top_k,
        *scalings,
        activation,
        interleaved,
        torch.is_grad_enabled() and needs,
    )
    return out
