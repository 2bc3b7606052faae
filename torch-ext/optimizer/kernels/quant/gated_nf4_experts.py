"""gated_nf4_experts: gated_experts on 4-bit experts, whose products decode in registers.

Between the products of a layer stand the activation and LoRA's own work, which here run beside each
other where neither needs the other's result. Kept for backward are x, gate and up (R, 2I), h (R, I)
and two (R, r). Packed bytes are operands of both ops, and neither saves them: who calls says where
they are when backward comes.

path      | source                       | taken
triton    | gated_nf4_experts_triton.py  | half precision and float32; products as in
          |                              | grouped_lora_nf4_forward.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from ..._ops import add_op_namespace_prefix, ops
from ...dispatch import TRITON_PATHS
from ..checks import gradient_like, on_device_of
from ..experts.expert_sort import ORDER_LENGTH, ExpertOrder
from ..experts.glu import ACTIVATIONS
from ..launch.launch_plan import replayed
from .grouped_lora_nf4_forward import nested_of


def fuses(path: str, activation: object, gated: bool) -> bool:
    """Whether the op takes a layer with this path and activation."""
    return path in TRITON_PATHS and gated and activation in ACTIVATIONS


_STACK = (
    "Tensor packed{0}, Tensor absmax{0}, Tensor? codebook{0}, Tensor? absmax_code{0}, "
    "Tensor? absmax_scale{0}, Tensor? absmax_offset{0}, int[] stored{0}, int blocksize{0}, "
    "bool transposed{0}, Tensor? lora_a{0}, Tensor? lora_b{0}, Tensor? bias{0}, float scaling{0}"
)
_STACKS = f"{_STACK.format(1)}, {_STACK.format(2)}"
_ORDER = (
    "Tensor gates, Tensor slots, Tensor offsets, Tensor rows, Tensor tiles, int tile_rows, "
    "int top_k, str activation, bool interleaved, str path"
)
_COUNT = 13  # of _STACK
_CODEBOOK = 2  # its place in _STACK


def _projection(arguments: tuple) -> tuple:
    """stack, whether the forward's sum runs along stored rows, a, b, bias, scaling."""
    *stack, code, scale, offset, stored, blocksize, last, a, b, bias, scaling = arguments
    stack = (*stack, nested_of(code, scale, offset), tuple(stored), blocksize)
    return stack, last, a, b, bias, scaling


def _split(arguments: tuple) -> tuple[tuple, tuple, tuple]:
    """Both projections, and what stands behind them."""
    parts = (arguments[:_COUNT], arguments[_COUNT : 2 * _COUNT])
    return *map(_projection, parts), arguments[2 * _COUNT :]


def _width(projection: tuple) -> int:
    """Columns of a projection's result."""
    stack, last, *_ = projection
    return stack[4][1] if last else stack[4][2]


def _rank(factor: Tensor | None) -> int:
    return 0 if factor is None else factor.shape[1]


def codebook_of(codebook: Tensor | None, device: torch.device) -> Tensor:
    """The values of a stack's codes, NF4's unless told: an operand of every launch."""
    from ._nf4_product_triton import nf4_codebook

    return nf4_codebook(device) if codebook is None else codebook


def _played(name: str, function: Callable, tensors: list[Tensor], arguments: tuple) -> tuple:
    """`function` of tensors and the arguments of an op, which a launch plan holds."""
    given = list(arguments)
    for at in (_CODEBOOK, _COUNT + _CODEBOOK):
        given[at] = codebook_of(given[at], tensors[0].device)
    operands = [one if isinstance(one, Tensor) else None for one in given]
    constants = tuple(
        tuple(one) if isinstance(one, list) else None if isinstance(one, Tensor) else one
        for one in given
    )

    def run(*both: Any) -> Sequence[Tensor]:
        own, (found, plain) = both[: len(tensors)], (both[len(tensors) : -1], both[-1])
        merged = (p if t is None else t for t, p in zip(found, plain, strict=True))
        first, second, (gates, *rest) = _split(tuple(merged))
        order, rest = ExpertOrder.of(*rest[:ORDER_LENGTH]), rest[ORDER_LENGTH:]
        return function(*own, first, second, order, gates, *rest)

    return tuple(replayed(name, run, (*tensors, *operands), (constants,)))


@custom_op(
    add_op_namespace_prefix("gated_nf4_experts"),
    mutates_args=(),
    schema=f"(Tensor x, {_STACKS}, {_ORDER}, bool keeps) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _forward(x: Tensor, *arguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    from .gated_nf4_experts_triton import gated_nf4_experts_triton

    with on_device_of(x):
        return _played("gated_nf4_experts", gated_nf4_experts_triton, [x], arguments)


def _fake_forward(x, *arguments):
    first, second, (gates, slots, *_, keeps) = _split(arguments)
    rows = slots.shape[0]
    kept = rows if keeps else 0
    return (
        x.new_empty((gates.shape[0], _width(second))),
        x.new_empty((kept, _width(first))),
        x.new_empty((kept, _width(first) // 2)),
        x.new_empty((rows, _rank(first[2]))),
        x.new_empty((rows, _rank(second[2]))),
    )


@custom_op(
    add_op_namespace_prefix("gated_nf4_experts_backward"),
    mutates_args=(),
    schema=f"(Tensor grad, Tensor x, Tensor wide, Tensor h, Tensor xa1, Tensor xa2, {_STACKS}, "
    f"{_ORDER}, bool[] wants) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _backward(
    grad: Tensor, x: Tensor, wide: Tensor, h: Tensor, xa1: Tensor, xa2: Tensor, *arguments
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    from .gated_nf4_experts_triton import gated_nf4_experts_backward_triton

    function, tensors = gated_nf4_experts_backward_triton, [grad, x, wide, h, xa1, xa2]
    with on_device_of(grad):
        return _played("gated_nf4_experts_backward", function, tensors, arguments)


def _fake_backward(grad, x, wide, h, xa1, xa2, *arguments):
    first, second, (gates, *_, wants) = _split(arguments)
    factors = itertools.chain(first[2:4], second[2:4])
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


def gated_nf4_experts(x: Tensor, *arguments) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """A gated layer of 4-bit experts; arguments are checked by `moe.gated_linear`.

    Args:
        x: (T, H), any strides.
        *arguments: Of both projections the weight as in `grouped_lora_nf4_forward`, lora_a, lora_b,
            bias and scaling; gates (T, k); slots, offsets, rows and tiles of `expert_sort`;
            tile_rows, top_k, activation, interleaved, path; and whether backward will come.

    Returns:
        (T, H) in x's dtype, and for backward, else without rows: gate and up (R, 2I), h (R, I);
        xa of both projections (R, r).
    """
    return ops.gated_nf4_experts(x, *arguments)


def gated_nf4_experts_backward(
    grad: Tensor, x: Tensor, wide: Tensor, h: Tensor, xa1: Tensor, xa2: Tensor, *arguments
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, both A and B, and the gates; what is not wanted is empty.

    Args:
        grad: (T, H), any strides.
        x: As in the forward.
        wide: Of its results, as h, xa1 and xa2.
        h: (R, I).
        xa1: (R, r).
        xa2: (R, r').
        *arguments: As in the forward, with six wishes instead of the last.
    """
    return ops.gated_nf4_experts_backward(grad, x, wide, h, xa1, xa2, *arguments)
