"""The grouped LoRA product as ops: forward, its gradients, and all of it with autograd.

    y[i] = x[source of row i] W_e + s (x A_e^T) B_e^T + b_e          e: expert of row i

grouped_lora_forward  y, and xa = s x A^T rounded to x's dtype: the product adds xa B^T in its
                      epilogue, and the gradient of B reads it again
grouped_lora_dx       dx = g (dy W^T + yb A) with yb = s dy B: the forward product with W, A and B
                      read transposed. The gradient of a gate is <dy W_eff^T, x> + <dy, b>, taken
                      from dx before the gate scales it, so that nothing of the forward result is
                      stored (W_eff = W + s A^T B^T is linear; as in SonicMoE, arXiv:2512.14080)
grouped_lora_dab      da = (g yb)^T x and db = dy^T (g xa): the gate is put on the r-wide side, so
                      that no scaled copy of dy exists
grouped_lora_dw       dw = x^T (g dy) and dbias = sum g dy, where experts are trained; a frozen
                      weight never gets here and costs no buffer
grouped_lora_linear   forward, combined by gates if there are any, with its gradients

Rows are gathered while they are loaded and scattered while they are stored: a fan says where row i
lies, 0 at i (expert order), f > 0 at slots[i] // f. Sums are float32 (float64 for float64), rounded
once; each program owns its part of a result: no atomics, exact zeros for experts without rows.
Gradients have the strides of the parameters, PEFT's layout included. Arguments are checked by
`moe.grouped_lora_linear`. The gradients have no gradients: a second order raises.

path      | source                   | taken
triton    | grouped_launch_triton.py | CUDA; for 4-bit weights also "compiled", "measured"
reference | reference/moe.py         | everything else
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from ..._ops import add_op_namespace_prefix, ops
from ...dispatch import TRITON_PATHS
from ...reference import moe as reference
from ..autocast import without_autocast
from ..checks import gradient_like, on_device_of, refuse_forward_mode
from .expert_sort import ORDER, ORDER_LENGTH, ExpertOrder
from .rows import combine_rows


@dataclasses.dataclass(frozen=True)
class LoraFactors:
    """The factors of one projection: W_e + scaling * (b_e a_e), views of any strides."""

    a: Tensor  # (E, r, in)
    b: Tensor  # (E, out, r)
    scaling: float = 1.0


@dataclasses.dataclass(frozen=True)
class ExpertWeights:
    """One projection of all experts.

    Args:
        weight: (E, K, N) of x's dtype, any strides; or 4-bit experts seen so.
        lora: Factors (E, r, K) and (E, N, r) of any floating dtype and strides, or None.
        bias: (E, N) or None.
    """

    weight: Any
    lora: LoraFactors | None = None
    bias: Tensor | None = None

    @classmethod
    def of(
        cls,
        weight: Any,
        lora_a: Tensor | None,
        lora_b: Tensor | None,
        bias: Tensor | None,
        scaling: float,
    ) -> ExpertWeights:
        """The weights of `operands`, the form in which an op takes them (`WEIGHTS`)."""
        lora = None if lora_a is None else LoraFactors(lora_a, lora_b, scaling)
        return cls(weight, lora, bias)

    def operands(self) -> tuple[Any, Tensor | None, Tensor | None, Tensor | None, float]:
        """What an op takes."""
        return self.weight, self.a, self.b, self.bias, float(self.scaling)

    @property
    def a(self) -> Tensor | None:
        """(E, r, K)."""
        return None if self.lora is None else self.lora.a

    @property
    def b(self) -> Tensor | None:
        """(E, N, r)."""
        return None if self.lora is None else self.lora.b

    @property
    def scaling(self) -> float:
        """s."""
        return 1.0 if self.lora is None else self.lora.scaling

    @property
    def rank(self) -> int:
        """r, 0 without LoRA."""
        return 0 if self.lora is None else self.lora.a.shape[1]


@dataclasses.dataclass(frozen=True)
class GatedLayer:
    """What the kernels of a gated layer read; 1 is its gate_up projection, 2 its down projection.

    Args:
        x: (T, H), any strides.
        first: Weight (E, H, 2I), its factors and bias.
        second: Weight (E, I, H), likewise.
        order: Of `expert_sort`.
        gates: (T, k).
        activation: One of `kernels.experts.rows.ACTIVATIONS`.
        interleaved: Gate and up columns alternate; else all gates come first.
    """

    x: Tensor
    first: ExpertWeights
    second: ExpertWeights
    order: ExpertOrder
    gates: Tensor
    activation: str
    interleaved: bool


# Of a projection among the arguments of an op, and how many they are.
WEIGHTS = "Tensor weight, Tensor? lora_a, Tensor? lora_b, Tensor? bias, float scaling"
WEIGHTS_LENGTH = 5


def opened(arguments: Sequence[Any], projections: int = 1) -> tuple[Any, ...]:
    """The weights of so many projections, the order, and what follows them."""
    at = projections * WEIGHTS_LENGTH
    weights = (arguments[n : n + WEIGHTS_LENGTH] for n in range(0, at, WEIGHTS_LENGTH))
    order, rest = arguments[at : at + ORDER_LENGTH], arguments[at + ORDER_LENGTH :]
    return *(ExpertWeights.of(*one) for one in weights), ExpertOrder.of(*order), *rest


@custom_op(
    add_op_namespace_prefix("grouped_lora_forward"),
    mutates_args=(),
    schema=f"(Tensor x, {WEIGHTS}, {ORDER}, SymInt fan, bool grouped_out, str path) -> "
    "(Tensor, Tensor)",
)
def _forward(x: Tensor, *arguments) -> tuple[Tensor, Tensor]:
    weights, order, fan, grouped_out, path = opened(arguments)
    if path in TRITON_PATHS:
        from .grouped_launch_triton import grouped_lora_forward_triton

        with on_device_of(x):
            return grouped_lora_forward_triton(x, weights, order, fan, grouped_out)
    *operands, scaling = weights.operands()
    layout = (order.slots, order.offsets, scaling, fan, grouped_out)
    return reference.grouped_lora_forward(x, *operands, *layout)


def _fake_forward(x, *arguments):
    weights, order, *_ = opened(arguments)
    rows = order.slots.shape[0]
    return x.new_empty((rows, weights.weight.shape[2])), x.new_empty((rows, weights.rank))


_forward.register_fake(_fake_forward)


def grouped_lora_forward(
    x: Tensor,  # (T, K) or (R, K), any strides
    weights: ExpertWeights,
    order: ExpertOrder,
    *,
    fan: int,  # where row i lies in x
    grouped_out: bool,  # y in expert order instead of slot order
    path: str,
) -> tuple[Tensor, Tensor]:
    """y (R, N) in x's dtype, zero for sentinels; xa (R, r) in expert order, scaled."""
    operands = (*weights.operands(), *order.operands())
    return ops.grouped_lora_forward(x, *operands, fan, grouped_out, path)


@custom_op(
    add_op_namespace_prefix("grouped_lora_dx"),
    mutates_args=(),
    schema=f"(Tensor dy, {WEIGHTS}, {ORDER}, Tensor? gates, Tensor? x, SymInt dy_fan, "
    "SymInt x_fan, bool grouped_out, bool wants_dx, str path) -> (Tensor, Tensor, Tensor)",
)
def _dx(dy: Tensor, *arguments) -> tuple[Tensor, Tensor, Tensor]:
    weights, order, gates, x, *layout, path = opened(arguments)
    if path in TRITON_PATHS:
        from .grouped_launch_triton import grouped_lora_dx_triton

        with on_device_of(dy):
            return grouped_lora_dx_triton(dy, weights, order, gates, x, *layout)
    *operands, scaling = weights.operands()
    place = (order.slots, order.offsets, scaling)
    return reference.grouped_lora_dx(dy, *operands, gates, x, *place, *layout)


def _fake_dx(dy, *arguments):
    weights, order, _, x, _, _, _, wants_dx, _ = opened(arguments)
    rows = order.slots.shape[0]
    wide = torch.float64 if dy.dtype == torch.float64 else torch.float32
    return (
        dy.new_empty((rows if wants_dx else 0, weights.weight.shape[1])),
        dy.new_empty((rows, weights.rank)),
        dy.new_empty((0 if x is None else rows,), dtype=wide),
    )


_dx.register_fake(_fake_dx)


def grouped_lora_dx(
    dy: Tensor,  # (R, N) or (T, N), any strides
    weights: ExpertWeights,  # the bias is read for the gradient of the gates only
    order: ExpertOrder,
    gates: Tensor | None,  # (T, k): scales the rows of dx
    x: Tensor | None,  # (T, K) or (R, K): given, the gradient of the gates is computed
    *,
    dy_fan: int,  # where row i lies in dy
    x_fan: int,  # and in x
    grouped_out: bool,  # dx in expert order instead of slot order
    wants_dx: bool,  # yb and dgates may be needed without it
    path: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradient rows of the input.

    Returns:
        dx (R, K), or (0, K) unless wants_dx, zero for sentinels; yb (R, r) in expert order, scaled;
        dgates (R,) float32 in slot order, or (0,) without x.
    """
    operands = (*weights.operands(), *order.operands(), gates, x)
    return ops.grouped_lora_dx(dy, *operands, dy_fan, x_fan, grouped_out, wants_dx, path)


@custom_op(
    add_op_namespace_prefix("grouped_lora_dab"),
    mutates_args=(),
    schema="(Tensor x, Tensor dy, Tensor xa, Tensor yb, Tensor lora_a, Tensor lora_b, "
    f"{ORDER}, Tensor? gates, SymInt x_fan, SymInt dy_fan, bool wants_a, bool wants_b, str path) "
    "-> (Tensor, Tensor)",
)
def _dab(
    x: Tensor, dy: Tensor, xa: Tensor, yb: Tensor, lora_a: Tensor, lora_b: Tensor, *arguments
) -> tuple[Tensor, Tensor]:
    order = ExpertOrder.of(*arguments[:ORDER_LENGTH])
    gates, x_fan, dy_fan, wants_a, wants_b, path = arguments[ORDER_LENGTH:]
    da, db = gradient_like(lora_a, wants_a), gradient_like(lora_b, wants_b)
    if path in TRITON_PATHS:
        from .grouped_launch_triton import grouped_lora_dab_triton

        with on_device_of(x):
            return grouped_lora_dab_triton(x, dy, xa, yb, gates, order, da, db, x_fan, dy_fan)
    place = (gates, order.slots, order.offsets)
    return reference.grouped_lora_dab(x, dy, xa, yb, *place, da, db, x_fan, dy_fan)


def _fake_dab(x, dy, xa, yb, lora_a, lora_b, *arguments):
    *_, wants_a, wants_b, _ = arguments
    return gradient_like(lora_a, wants_a), gradient_like(lora_b, wants_b)


_dab.register_fake(_fake_dab)


def grouped_lora_dab(
    x: Tensor,  # (T, K) or (R, K), any strides
    dy: Tensor,  # (R, N) or (T, N), any strides
    xa: Tensor,  # (R, r) in expert order, scaled; read for db
    yb: Tensor,  # the same, read for da
    lora: LoraFactors,  # shapes, dtypes and strides of da (E, r, K) and db (E, N, r)
    order: ExpertOrder,
    gates: Tensor | None,  # (T, k)
    *,
    x_fan: int,  # where row i lies in x
    dy_fan: int,  # and in dy
    wants_a: bool,
    wants_b: bool,
    path: str,
) -> tuple[Tensor, Tensor]:
    """da and db of every expert, from what was kept; (0,) for one that is not wanted."""
    operands = (x, dy, xa, yb, lora.a, lora.b, *order.operands(), gates)
    return ops.grouped_lora_dab(*operands, x_fan, dy_fan, wants_a, wants_b, path)


@custom_op(
    add_op_namespace_prefix("grouped_lora_dw"),
    mutates_args=(),
    schema=f"(Tensor x, Tensor dy, Tensor weight, Tensor? bias, {ORDER}, Tensor? gates, "
    "SymInt x_fan, SymInt dy_fan, bool wants_weight, bool wants_bias, str path) -> "
    "(Tensor, Tensor)",
)
def _dw(
    x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor | None, *arguments
) -> tuple[Tensor, Tensor]:
    order = ExpertOrder.of(*arguments[:ORDER_LENGTH])
    gates, x_fan, dy_fan, wants_weight, wants_bias, path = arguments[ORDER_LENGTH:]
    dw = gradient_like(weight, wants_weight)
    dbias = gradient_like(weight if bias is None else bias, wants_bias)
    if path in TRITON_PATHS:
        from .grouped_launch_triton import grouped_lora_dw_triton

        with on_device_of(x):
            return grouped_lora_dw_triton(x, dy, gates, order, dw, dbias, x_fan, dy_fan)
    place = (gates, order.slots, order.offsets)
    return reference.grouped_lora_dw(x, dy, *place, dw, dbias, x_fan, dy_fan)


def _fake_dw(x, dy, weight, bias, *arguments):
    *_, wants_weight, wants_bias, _ = arguments
    return (
        gradient_like(weight, wants_weight),
        gradient_like(weight if bias is None else bias, wants_bias),
    )


_dw.register_fake(_fake_dw)


def grouped_lora_dw(
    x: Tensor,  # (T, K) or (R, K), any strides
    dy: Tensor,  # (R, N) or (T, N), any strides
    weight: Tensor,  # (E, K, N): shape, dtype and strides of dw
    bias: Tensor | None,  # (E, N): those of dbias
    order: ExpertOrder,
    gates: Tensor | None,  # (T, k)
    *,
    x_fan: int,  # where row i lies in x
    dy_fan: int,  # and in dy
    wants_weight: bool,
    wants_bias: bool,
    path: str,
) -> tuple[Tensor, Tensor]:
    """dw and dbias; (0,) for one that is not wanted."""
    operands = (x, dy, weight, bias, *order.operands(), gates)
    return ops.grouped_lora_dw(*operands, x_fan, dy_fan, wants_weight, wants_bias, path)


@custom_op(
    add_op_namespace_prefix("grouped_lora_linear"),
    mutates_args=(),
    schema=f"(Tensor x, {WEIGHTS}, {ORDER}, Tensor? gates, bool grouped_in, bool grouped_out, "
    "str path) -> (Tensor, Tensor)",
)
def _linear(x: Tensor, *arguments) -> tuple[Tensor, Tensor]:
    weights, order, gates, grouped_in, grouped_out, path = opened(arguments)
    fan = 0 if grouped_in else order.top_k
    grouped = grouped_out or gates is not None
    y, xa = grouped_lora_forward(x, weights, order, fan=fan, grouped_out=grouped, path=path)
    return y if gates is None else combine_rows(y, gates, order, path), xa


def _fake_linear(x, *arguments):
    weights, order, gates, *_ = opened(arguments)
    rows = order.slots.shape[0]
    results = rows if gates is None else gates.shape[0]
    return x.new_empty((results, weights.weight.shape[2])), x.new_empty((rows, weights.rank))


def _save(ctx, inputs, output):
    """x, the parameters and xa are kept; the expanded result is not."""
    x, weight, lora_a, lora_b, bias, scaling, slots, offsets, rows, tiles, *sizes = inputs[:12]
    gates, *layout = inputs[12:]
    ctx.constants = (scaling, *sizes, *layout)
    ctx.set_materialize_grads(False)  # xa is an output of the op, but nobody's operand
    _, needs_weight, needs_a, needs_b, *_, needs_gates = ctx.needs_input_grad[:13]
    x = x if needs_weight or needs_a or needs_gates else None
    xa = output[1] if needs_b else None
    order = (slots, offsets, rows, tiles)
    ctx.save_for_backward(x, weight, lora_a, lora_b, bias, gates, xa, *order)


def _backward(ctx, dy, _):
    if dy is None:
        return (None,) * 16
    x, weight, lora_a, lora_b, bias, gates, xa, *order = ctx.saved_tensors
    scaling, tile_rows, top_k, grouped_in, grouped_out, path = ctx.constants
    weights = ExpertWeights.of(weight, lora_a, lora_b, bias, scaling)
    order = ExpertOrder.of(*order, tile_rows, top_k)
    needs = (*ctx.needs_input_grad[:5], ctx.needs_input_grad[12])
    with without_autocast(dy.device):
        *found, dgates = gradients_of_linear(
            dy,
            x,
            xa,
            weights,
            order,
            gates,
            needs,
            x_fan=0 if grouped_in else top_k,
            grouped_out=grouped_out,
            path=path,
        )
    return *found, *(None,) * 7, dgates, *(None,) * 3


_linear.register_fake(_fake_linear)
_linear.register_autograd(_backward, setup_context=_save)


def gradients_of_linear(
    dy: Tensor,  # of the result of `grouped_lora_linear`
    x: Tensor | None,  # None where no needed gradient reads it
    xa: Tensor | None,  # of the forward, likewise
    weights: ExpertWeights,
    order: ExpertOrder,
    gates: Tensor | None,  # (T, k)
    needs: Sequence[bool],  # of x, weight, lora_a, lora_b, bias and gates
    *,
    x_fan: int,  # where row i lies in x
    grouped_out: bool,  # of the forward
    path: str,
    input_gradients: Callable[..., tuple[Tensor, Tensor, Tensor]] = grouped_lora_dx,
) -> tuple[Tensor | None, ...]:
    """The gradients that are needed, else None; another `input_gradients` is of other weights."""
    needs_x, needs_weight, needs_a, needs_b, needs_bias, needs_gates = needs
    dy_fan = order.top_k if gates is not None else 0 if grouped_out else 1
    dx = yb = dgates = da = db = dw = dbias = None
    if needs_x or needs_a or needs_gates:
        dx, yb, dgates = input_gradients(
            dy,
            weights,
            order,
            gates,
            x if needs_gates else None,
            dy_fan=dy_fan,
            x_fan=x_fan,
            grouped_out=x_fan != 1,
            wants_dx=needs_x,
            path=path,
        )
    if needs_x and x_fan > 1:
        dx = combine_rows(dx, None, order, path)
    fans = {"x_fan": x_fan, "dy_fan": dy_fan, "path": path}
    if needs_a or needs_b:
        # What no wanted gradient reads was not kept; another tensor stands in its place.
        rows = (x if needs_a else dy, dy, xa if needs_b else yb, yb if needs_a else xa)
        wants = {"wants_a": needs_a, "wants_b": needs_b}
        da, db = grouped_lora_dab(*rows, weights.lora, order, gates, **wants, **fans)
    if needs_weight or needs_bias:
        parameters = (weights.weight if needs_weight else weights.bias, weights.bias)
        wants = {"wants_weight": needs_weight, "wants_bias": needs_bias}
        rows = (x if needs_weight else dy, dy)
        dw, dbias = grouped_lora_dw(*rows, *parameters, order, gates, **wants, **fans)
    if needs_gates:
        dgates = dgates.view(gates.shape).to(gates.dtype)
    found = (dx, dw, da, db, dbias, dgates)
    return tuple(one if need else None for one, need in zip(found, needs, strict=True))


def grouped_lora_linear(
    x: Tensor,  # (T, K) in token order, or (R, K) in expert order with `grouped_in`
    weights: ExpertWeights,
    order: ExpertOrder,
    gates: Tensor | None,  # (T, k)
    *,
    grouped_in: bool,
    grouped_out: bool,
    path: str,
) -> Tensor:
    """(T, N) with gates; else (R, N) in slot order, or in expert order with `grouped_out`."""
    *tensors, scaling = weights.operands()
    refuse_forward_mode("grouped_lora_linear", x, *tensors, gates)
    operands = (*tensors, scaling, *order.operands(), gates)
    out, _ = ops.grouped_lora_linear(x, *operands, grouped_in, grouped_out, path)
    return out
