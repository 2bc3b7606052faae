"""gated_experts: both products of a gated layer, its activation inside of them, with gradients.

out[t] = sum_j gates[t, j] (act(gate) up W2_e + ...) with gate, up of x W1_e + ...: what
grouped_lora_linear, glu and grouped_lora_linear compose, in one op. The activation is computed in
the epilogue of the product that makes its operands, forward and backward. Kept for backward are x,
gate and up (R, 2I) and two (R, r): h is made again by the product that needs its gradient. Without
a backward not even gate and up are stored.
The gradients have no gradients: a second order raises.

path      | source                   | taken
triton    | gated_launch_triton.py   | what `fuses` says; else the three ops
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.library import define, impl, register_autograd, register_fake

from ..._ops import add_op_namespace_prefix, ops
from ..autocast import without_autocast
from ..checks import gradient_like, refuse_forward_mode, untraced
from ..launch.launch_plan import replayed
from .expert_sort import ORDER, ORDER_LENGTH
from .grouped_lora import WEIGHTS, WEIGHTS_LENGTH, GatedLayer, opened
from .rows import ACTIVATIONS


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


# Both projections, gate_up and down, the order and the gates; then what the launches are told.
_FIRST, _SECOND = (WEIGHTS.replace(",", f"{n},") + str(n) for n in (1, 2))
_LAYER = f"{_FIRST}, {_SECOND}, {ORDER}, Tensor gates"
_LAYER_LENGTH = 2 * WEIGHTS_LENGTH + ORDER_LENGTH + 1


def _played(name: str, function: Callable[..., Any], arguments: Sequence[Any]) -> tuple:
    """function(*arguments) of an op, whose tensors are operands of a launch plan."""
    operands = [one if isinstance(one, Tensor) else None for one in arguments]
    plain = (None if isinstance(one, Tensor) else one for one in arguments)
    constants = tuple(tuple(one) if isinstance(one, list) else one for one in plain)

    def run(*both: Any) -> Sequence[Tensor]:
        tensors, plain = both[:-1], both[-1]
        return function(*(p if t is None else t for t, p in zip(tensors, plain, strict=True)))

    return tuple(replayed(name, run, operands, (constants,)))


# Without `custom_op`, whose wrappers take the host as long as what they wrap.
define(
    add_op_namespace_prefix("gated_experts"),
    f"(Tensor x, {_LAYER}, str activation, bool interleaved, bool keeps) -> "
    "(Tensor, Tensor, Tensor, Tensor)",
    tags=torch.Tag.pt2_compliant_tag,
)
define(
    add_op_namespace_prefix("gated_experts_backward"),
    "(Tensor grad, Tensor wide, Tensor xa1, Tensor xa2, Tensor x, "
    f"{_LAYER}, str activation, bool interleaved, bool[] wants) -> ({', '.join(['Tensor'] * 10)})",
    tags=torch.Tag.pt2_compliant_tag,
)


@impl(add_op_namespace_prefix("gated_experts"), "default")
@untraced
def _gated_experts(x: Tensor, *arguments) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from .gated_launch_triton import gated_experts_triton

    def forward(x: Tensor, *arguments) -> Sequence[Tensor]:
        *layer, keeps = opened(arguments, 2)
        return gated_experts_triton(GatedLayer(x, *layer), keeps)

    return _played("gated_experts", forward, (x, *arguments))


@register_fake(add_op_namespace_prefix("gated_experts"))
def _fake(x, *arguments):
    first, second, order, gates, *_, keeps = opened(arguments, 2)
    total = order.slots.shape[0]
    return (
        x.new_empty((gates.shape[0], second.weight.shape[2])),
        x.new_empty((total if keeps else 0, first.weight.shape[2])),
        x.new_empty((total, first.rank)),
        x.new_empty((total, second.rank)),
    )


@impl(add_op_namespace_prefix("gated_experts_backward"), "default")
@untraced
def _gated_experts_backward(
    grad: Tensor, wide: Tensor, xa1: Tensor, xa2: Tensor, x: Tensor, *arguments
) -> tuple[Tensor, ...]:
    from .gated_launch_triton import Wants, gated_experts_backward_triton

    def backward(
        grad: Tensor, wide: Tensor, xa1: Tensor, xa2: Tensor, x: Tensor, *arguments
    ) -> Sequence[Tensor]:
        *layer, wants = opened(arguments, 2)
        kept, wants = (wide, xa1, xa2), Wants(*wants)
        return gated_experts_backward_triton(grad, GatedLayer(x, *layer), kept, wants)

    return _played("gated_experts_backward", backward, (grad, wide, xa1, xa2, x, *arguments))


@register_fake(add_op_namespace_prefix("gated_experts_backward"))
def _fake_backward(grad, wide, xa1, xa2, x, *arguments):
    first, second, _, gates, *_, wants = opened(arguments, 2)
    parameters = (*first.operands()[:4], *second.operands()[:4])
    grads = (
        x.new_empty(0) if parameter is None else gradient_like(parameter, want)
        for parameter, want in zip(parameters, wants[1:9], strict=True)
    )
    dgates = gates.new_empty(gates.shape if wants[9] else 0)
    return x.new_empty(x.shape if wants[0] else 0), *grads, dgates


# Places among the arguments of the forward of what may want a gradient, in the order of `Wants`.
_LEAVES = (0, 1, 2, 3, 4, 6, 7, 8, 9, _LAYER_LENGTH)


def _save(ctx, inputs, output):
    ctx.set_materialize_grads(False)  # what else than the result is nobody's operand
    *ctx.arguments, ctx.keeps = (None if isinstance(one, Tensor) else one for one in inputs)
    ctx.places = [n for n, one in enumerate(inputs) if isinstance(one, Tensor)]
    ctx.save_for_backward(*output[1:], *(inputs[n] for n in ctx.places))


def _backward(ctx, *grads):
    run = once_differentiable(_gradients) if torch.is_grad_enabled() else _gradients
    return run(ctx, *grads)


def _gradients(ctx, grad, *_):
    count = len(ctx.arguments) + 1
    if grad is None:
        return (None,) * count
    if not ctx.keeps:
        raise RuntimeError("gated_experts ran with keeps=False, but its backward was called")
    wide, xa1, xa2, *tensors = ctx.saved_tensors
    arguments = list(ctx.arguments)
    for place, tensor in zip(ctx.places, tensors, strict=True):
        arguments[place] = tensor
    wants = [ctx.needs_input_grad[place] for place in _LEAVES]
    with without_autocast(grad.device):
        found = ops.gated_experts_backward(grad, wide, xa1, xa2, *arguments, wants)
    gradients: list[Tensor | None] = [None] * count
    for place, one, want in zip(_LEAVES, found, wants, strict=True):
        gradients[place] = one if want else None
    return tuple(gradients)


register_autograd(add_op_namespace_prefix("gated_experts"), _backward, setup_context=_save)


def gated_experts(layer: GatedLayer) -> Tensor:
    """A gated layer of experts: (T, H) in x's dtype.

    Its first weight is as `fuses` says, of x's dtype, the second of any strides. Arguments are
    checked by `moe.grouped_linear`.
    """
    projections = (*layer.first.operands(), *layer.second.operands())
    operands = (layer.x, *projections, *layer.order.operands(), layer.gates)
    leaves = [operands[place] for place in (*_LEAVES[:-1], -1)]
    refuse_forward_mode("gated_experts", *leaves)
    needs = any(leaf is not None and leaf.requires_grad for leaf in leaves)
    keeps = torch.is_grad_enabled() and needs
    out, *_ = ops.gated_experts(*operands, layer.activation, layer.interleaved, keeps)
    return out
