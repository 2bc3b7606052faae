"""grouped_lora_quantized_forward and _dx: grouped_lora_forward and _dx over packed experts.

The ops take a stack of experts as its tensors and the text of their format. With slice_experts = 0
the weight is never written to memory: the format's own product decodes a tile in registers on its
way to the tensor cores, as far as `Format.registers_refusal` has nothing against it. Else so many
experts at a time are decoded to memory and multiplied; ACTIVE decodes those that have rows, all at
once. dX is the same product with the stack read the other way round, from the same bytes.

path      | source                            | taken
compiled  | packed_product.py                 | slice_experts = 0, capability 9.0: by name what it
          |                                   | can take, on path "measured" what it is faster at
triton    | packed_product_triton.py          | slice_experts = 0
triton    | sliced_product_triton.py          | slice_experts != 0
reference | reference/moe.py                  | CPU and the rest: decodes expert after expert
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from ..._ops import add_op_namespace_prefix, ops
from ...dispatch import TRITON_PATHS
from ...reference import moe as reference
from ..checks import on_device_of
from ..experts.expert_sort import ORDER, ORDER_LENGTH, ExpertOrder
from ..experts.grouped_lora import ExpertWeights
from .formats import STACK, STACK_LENGTH, Stack, shape_of

ACTIVE = -1  # slice_experts: one slice, of the experts that have rows


def decodes_in_registers(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product in registers is fast: half precision on an NVIDIA GPU."""
    return device.type == "cuda" and torch.version.hip is None and dtype.itemsize == 2


# Of a projection among the arguments of an op, and how many they are.
QUANTIZED = f"{STACK}, Tensor? lora_a, Tensor? lora_b, Tensor? bias, float scaling"
QUANTIZED_LENGTH = STACK_LENGTH + 4


def quantized_operands(weights: ExpertWeights) -> tuple[Any, ...]:
    """What an op takes of a projection whose weight is a `QuantizedWeight` of `moe`."""
    _, *others = weights.operands()
    return *weights.weight.operands(), *others


def opened_weights(arguments: Sequence[Any]) -> ExpertWeights:
    """The projection of `QUANTIZED`, with a `Stack` as its weight."""
    stack, others = arguments[:STACK_LENGTH], arguments[STACK_LENGTH:]
    return ExpertWeights.of(Stack.of(*stack), *others)


def _opened(arguments: Sequence[Any]) -> tuple[Any, ...]:
    """The weights, the order, and what follows them."""
    weights, rest = arguments[:QUANTIZED_LENGTH], arguments[QUANTIZED_LENGTH:]
    order, rest = rest[:ORDER_LENGTH], rest[ORDER_LENGTH:]
    return opened_weights(weights), ExpertOrder.of(*order), *rest


@custom_op(
    add_op_namespace_prefix("grouped_lora_quantized_forward"),
    mutates_args=(),
    schema=f"(Tensor x, {QUANTIZED}, {ORDER}, int fan, bool grouped_out, int slice_experts, "
    "str path) -> (Tensor, Tensor)",
)
def _forward(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    weights, order, fan, grouped_out, slice_experts, path = _opened(arguments)
    if path not in TRITON_PATHS:
        decoded = _OneByOne(weights.weight, x.dtype)
        operands = (weights.a, weights.b, weights.bias, order.slots, order.offsets)
        layout = (weights.scaling, fan, grouped_out)
        return reference.grouped_lora_forward(x, decoded, *operands, *layout)
    from ..experts.grouped_launch_triton import grouped_lora_forward_triton

    product = functools.partial(product_of_stack, slice_experts=slice_experts, path=path)
    with on_device_of(x):
        return grouped_lora_forward_triton(x, weights, order, fan, grouped_out, product)


def _fake_forward(x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    _, _, stored, transposed, lora_a = arguments[: STACK_LENGTH + 1]
    rows = arguments[QUANTIZED_LENGTH].shape[0]
    y = x.new_empty((rows, shape_of(stored, transposed)[2]))
    return y, x.new_empty((rows, 0 if lora_a is None else lora_a.shape[1]))


@custom_op(
    add_op_namespace_prefix("grouped_lora_quantized_dx"),
    mutates_args=(),
    schema=f"(Tensor dy, {QUANTIZED}, {ORDER}, Tensor? gates, Tensor? x, int dy_fan, int x_fan, "
    "bool grouped_out, bool wants_dx, int slice_experts, str path) -> (Tensor, Tensor, Tensor)",
)
def _dx(dy: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    weights, order, gates, x, *layout, slice_experts, path = _opened(arguments)
    if path not in TRITON_PATHS:
        decoded = _OneByOne(weights.weight, dy.dtype)
        factors = (weights.a, weights.b, weights.bias)
        operands = (*factors, gates, x, order.slots, order.offsets, weights.scaling)
        return reference.grouped_lora_dx(dy, decoded, *operands, *layout)
    from ..experts.grouped_launch_triton import grouped_lora_dx_triton

    product = functools.partial(product_of_stack, slice_experts=slice_experts, path=path)
    with on_device_of(dy):
        return grouped_lora_dx_triton(dy, weights, order, gates, x, *layout, product)


def _fake_dx(dy: Tensor, *arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    _, _, stored, transposed, lora_a = arguments[: STACK_LENGTH + 1]
    rows = arguments[QUANTIZED_LENGTH].shape[0]
    _, x, _, _, _, wants_dx, _, _ = arguments[QUANTIZED_LENGTH + ORDER_LENGTH :]
    return (
        dy.new_empty((rows if wants_dx else 0, shape_of(stored, transposed)[1])),
        dy.new_empty((rows, 0 if lora_a is None else lora_a.shape[1])),
        dy.new_empty((0 if x is None else rows,), dtype=torch.float32),
    )


_forward.register_fake(_fake_forward)
_dx.register_fake(_fake_dx)


def grouped_lora_quantized_forward(
    x: Tensor,
    weights: ExpertWeights,
    order: ExpertOrder,
    *,
    fan: int,
    grouped_out: bool,
    slice_experts: int,
    path: str,
) -> tuple[Tensor, Tensor]:
    """Products of every expert's rows; arguments are checked by `moe.grouped_lora_linear`.

    Args:
        x: (T, K) or (R, K), any strides; bfloat16, float16 or float32.
        weights: Its weight a `QuantizedWeight` seen as (E, K, N).
        order: Of `expert_sort`.
        fan: As in `grouped_lora_forward`.
        grouped_out: Likewise.
        slice_experts: Experts that are decoded to memory at a time, 0 for none, or ACTIVE.
        path: Of the table above.

    Returns:
        y (R, N) in x's dtype, zero for sentinels; xa (R, r) in expert order, scaled.
    """
    operands = (*quantized_operands(weights), *order.operands())
    options = (fan, grouped_out, slice_experts, path)
    return ops.grouped_lora_quantized_forward(x, *operands, *options)


def grouped_lora_quantized_dx(
    dy: Tensor,
    weights: ExpertWeights,
    order: ExpertOrder,
    gates: Tensor | None,
    x: Tensor | None,
    *,
    dy_fan: int,
    x_fan: int,
    grouped_out: bool,
    wants_dx: bool,
    slice_experts: int,
    path: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient rows of the input; arguments are checked by `moe.grouped_lora_linear`.

    Args:
        dy: (R, N) or (T, N), any strides; bfloat16, float16 or float32.
        weights: As in the forward.
        order: Of `expert_sort`.
        gates: As in `grouped_lora_dx`, and so are x to wants_dx.
        x: (T, K) or (R, K), if the gradient of the gates is wanted.
        dy_fan: Where row i lies in dy.
        x_fan: Where it lies in x.
        grouped_out: Write in expert order.
        wants_dx: Whether dx is wanted.
        slice_experts: As in the forward.
        path: As in the forward.

    Returns:
        dx (R, K), or (0, K) unless wants_dx, zero for sentinels; yb (R, r) in expert order, scaled;
        dgates (R,) float32 in slot order, or (0,) without x.
    """
    operands = (*quantized_operands(weights), *order.operands(), gates, x)
    options = (dy_fan, x_fan, grouped_out, wants_dx, slice_experts, path)
    return ops.grouped_lora_quantized_dx(dy, *operands, *options)


class _OneByOne:
    """A stack as the reference reads it: an expert is decoded when it is asked for."""

    def __init__(self, stack: Stack, dtype: torch.dtype) -> None:
        self.shape = stack.shape
        self._transposed, self._device = stack.transposed, stack.tensors[0].device
        self._decode = stack.decoder(dtype)

    def __getitem__(self, expert: int) -> Tensor:
        weight = self._decode(torch.tensor([expert], device=self._device))[0]
        return weight.mT if self._transposed else weight


def product_of_stack(
    *operands: Any,
    direction: str,
    slice_experts: int,
    path: str,
    **options: Any,
) -> Tensor | None:
    """`grouped_product` over a `Stack`: one that decodes in registers, or slices of experts.

    Args:
        *operands: x, the Stack, low, factor, the order and out.
        direction: "forward" or "dx", which chooses the tiles of slices.
        slice_experts: 0 for registers.
        path: See `Format.product`.
        **options: Those of `grouped_product`, and `activated` of `Format.product`.
    """
    if slice_experts:
        from .sliced_product_triton import sliced_product

        options.pop("early", None)
        return sliced_product(*operands, count=slice_experts, direction=direction, **options)
    return operands[1].format.product(path, *operands, **options)


def active_of(offsets: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The experts that have rows, without a wait for the device.

    Args:
        offsets: (E + 1,) of `expert_sort`.
        rows: T k.

    Returns:
        ids (n,) int64 with n = min(E, T k): the active ones in rising order, then inactive ones;
        position (E,) int64, the place of an expert among the active ones, -1 for an inactive one.
    """
    active = offsets.diff() > 0  # (E,)
    bound = min(active.shape[0], rows)
    ids = torch.sort((~active).to(torch.uint8), stable=True).indices[:bound]
    return ids, torch.where(active, active.long().cumsum(0) - 1, -1)
