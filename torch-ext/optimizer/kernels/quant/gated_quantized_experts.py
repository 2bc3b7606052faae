"""gated_quantized_experts: gated_experts on packed experts.

A product decodes in registers, or slices of experts to memory, as in grouped_lora_quantized.

Between the products of a layer stand the activation and LoRA's own work, which here run beside each
other where neither needs the other's result. Kept for backward are x, gate and up (R, 2I), h (R, I)
and two (R, r). Packed bytes are operands of both ops, and neither saves them: who calls says where
they are when backward comes.

path      | source                             | taken
triton    | gated_quantized_experts_triton.py  | half precision and float32; products as in
          |                                    | grouped_lora_quantized.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.library import custom_op

from ..._ops import add_op_namespace_prefix, ops
from ...dispatch import TRITON_PATHS
from ..checks import gradient_like, on_device_of
from ..experts.expert_sort import ORDER, ORDER_LENGTH, ExpertOrder
from ..experts.grouped_lora import ExpertWeights, GatedLayer
from ..experts.rows import ACTIVATIONS
from ..launch.launch_plan import replayed
from .formats import Format, Stack, shape_of
from .grouped_lora_quantized import QUANTIZED, QUANTIZED_LENGTH, opened_weights, quantized_operands


def fuses(path: str, activation: object, gated: bool) -> bool:
    """Whether the op takes a layer with this path and activation."""
    return path in TRITON_PATHS and gated and activation in ACTIVATIONS


_BOTH = ", ".join(", ".join(f"{one}{number}" for one in QUANTIZED.split(", ")) for number in (1, 2))
_OPERANDS = (
    f"{_BOTH}, Tensor gates, {ORDER}, str activation, bool interleaved, str path, "
    "int[] slice_experts"
)


def _split(arguments: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
    """Those of both projections, and what stands behind them."""
    end = 2 * QUANTIZED_LENGTH
    return arguments[:QUANTIZED_LENGTH], arguments[QUANTIZED_LENGTH:end], arguments[end:]


def _played(
    name: str, function: Callable, tensors: Sequence[Tensor], arguments: Sequence[Any]
) -> tuple[Tensor, ...]:
    """`function` of a layer of tensors[0], the other tensors and the options, by a launch plan."""
    *pair, (gates, *rest) = _split(arguments)
    *order, tile_rows, top_k = rest[:ORDER_LENGTH]
    options = (tuple(x) if isinstance(x, list) else x for x in rest[ORDER_LENGTH:])
    operands, shapes = [*tensors, gates, *order], []
    for weights in map(opened_weights, pair):
        stack: Stack = weights.weight
        operands += [weights.a, weights.b, weights.bias, *stack.tensors]
        sizes = (stack.format, stack.stored, stack.transposed, len(stack.tensors))
        shapes.append((*sizes, weights.scaling))

    def run(*given: Any) -> Sequence[Tensor]:
        *given, shapes, tile_rows, top_k, options = given
        given = iter(given)
        x, *others = itertools.islice(given, len(tensors))
        gates, *place = itertools.islice(given, 1 + len(order))
        both = [_next(given, *shape) for shape in shapes]
        place = ExpertOrder.of(*place, tile_rows, top_k)
        activation, interleaved, *options = options
        layer = GatedLayer(x, *both, place, gates, activation, interleaved)
        return function(layer, *others, *options)

    constants = (tuple(shapes), tile_rows, top_k, tuple(options))
    return tuple(replayed(name, run, operands, constants))


def _next(
    given: Iterator[Tensor | None],
    format: Format,
    stored: tuple[int, int, int],
    transposed: bool,
    count: int,
    scaling: float,
) -> ExpertWeights:
    """A projection from its operands, which are the next ones, and from what they do not say."""
    a, b, bias, *tensors = itertools.islice(given, 3 + count)
    stack = Stack(format, tuple(tensors), stored, transposed)
    return ExpertWeights.of(stack, a, b, bias, scaling)


@custom_op(
    add_op_namespace_prefix("gated_quantized_experts"),
    mutates_args=(),
    schema=f"(Tensor x, {_OPERANDS}, bool keeps) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from .gated_quantized_experts_triton import gated_quantized_experts_triton

    with on_device_of(x):
        return _played("gated_quantized_experts", gated_quantized_experts_triton, [x], arguments)


def _fake_forward(x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    first, second, (gates, slots, *_, keeps) = _split(arguments)
    rows = slots.shape[0]
    kept = rows if keeps else 0
    width, columns = (shape_of(one[2], one[3])[2] for one in (first, second))
    ranks = (0 if one[4] is None else one[4].shape[1] for one in (first, second))
    return (
        x.new_empty((gates.shape[0], columns)),
        x.new_empty((kept, width)),
        x.new_empty((kept, width // 2)),
        *(x.new_empty((rows, rank)) for rank in ranks),
    )


@custom_op(
    add_op_namespace_prefix("gated_quantized_experts_backward"),
    mutates_args=(),
    schema=f"(Tensor grad, Tensor x, Tensor wide, Tensor h, Tensor xa1, Tensor xa2, {_OPERANDS}, "
    "bool[] wants) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    grad: Tensor, x: Tensor, wide: Tensor, h: Tensor, xa1: Tensor, xa2: Tensor, *arguments: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from .gated_quantized_experts_triton import gated_quantized_experts_backward_triton as function

    tensors = [x, grad, wide, h, xa1, xa2]
    with on_device_of(grad):
        return _played("gated_quantized_experts_backward", function, tensors, arguments)


def _fake_backward(
    grad: Tensor, x: Tensor, wide: Tensor, h: Tensor, xa1: Tensor, xa2: Tensor, *arguments: Any
) -> tuple[Tensor, ...]:
    first, second, (gates, *_, wants) = _split(arguments)
    factors = (*first[4:6], *second[4:6])
    return (
        x.new_empty(x.shape if wants[0] else 0),
        *(
            x.new_empty(0) if factor is None else gradient_like(factor, want)
            for factor, want in zip(factors, wants[1:5], strict=True)
        ),
        gates.new_empty(gates.shape if wants[5] else 0),
    )


_forward.register_fake(_fake_forward)
_backward.register_fake(_fake_backward)


def gated_quantized_experts(
    layer: GatedLayer, path: str, slice_experts: tuple[int, int], keeps: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A gated layer of packed experts; arguments are checked by `moe.grouped_linear`.

    Args:
        layer: Its weights `QuantizedWeight`s, seen as (E, H, 2I) and (E, I, H).
        path: Of the products.
        slice_experts: Of each product, as in `grouped_lora_quantized_forward`, not ACTIVE.
        keeps: Whether backward will come.

    Returns:
        (T, H) in x's dtype, and for backward, else without rows: gate and up (R, 2I), h (R, I);
        xa of both projections (R, r).
    """
    return ops.gated_quantized_experts(layer.x, *_operands(layer, path, slice_experts), keeps)


def gated_quantized_experts_backward(
    layer: GatedLayer,
    grad: Tensor,
    kept: Sequence[Tensor],
    path: str,
    slice_experts: tuple[int, int],
    wants: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, both A and B, and the gates; what is not wanted is empty.

    Args:
        layer: As in the forward.
        grad: (T, H), any strides.
        kept: Results of the forward behind the first.
        path: As in the forward.
        slice_experts: As in the forward.
        wants: For each of the six whether it is wanted.
    """
    options = (*_operands(layer, path, slice_experts), [bool(one) for one in wants])
    return ops.gated_quantized_experts_backward(grad, layer.x, *kept, *options)


def _operands(layer: GatedLayer, path: str, slice_experts: tuple[int, int]) -> tuple[Any, ...]:
    """`_OPERANDS`."""
    both = (*quantized_operands(layer.first), *quantized_operands(layer.second))
    place = (layer.gates, *layer.order.operands())
    return *both, *place, layer.activation, layer.interleaved, path, list(slice_experts)
