"""A gated layer in eager mode on a GPU: one autograd node, one call forward and one back.

The launches are those of `expert_sort` and `gated_experts`, in their order, and so are the bits.
They are recorded at the first call with tensors alike and played again (`kernels.launch`);
arguments are checked while they are recorded, since the checks see what a record is kept for.
LoRA's matrices are read as PEFT stores them, without views that autograd would have to follow.
torch.compile, torch.func and tensor subclasses take the ops, one node each.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from ..kernels.autocast import autocast_dtype
from ..kernels.experts._moe_paths import pick
from ..kernels.experts.expert_sort import check_ids, tile_rows_for
from ..kernels.experts.gated_experts import fuses
from ..kernels.launch.launch_plan import prepare, replayed
from .compile_ahead import compile_for_all_heights
from .gated_linear import check_operands
from .grouped_linear import check_path
from .layout import ExpertsLayout, ExpertsLora, Form
from .lora import gradients_of, leaves_of, views_of, wanted_of
from .quantized.eager_quantized import backward_comes, check_single, quantized_layer
from .sort import ExpertOrder

_PLAIN = (Tensor, nn.Parameter)
_LEAVES = 10  # of `_Layer`'s operands: those that may want a gradient
_X, _W1, _GATES, _IDS = 0, 1, 9, 10  # places among them


def eager_layer(
    hidden_states: Tensor,  # (..., H)
    top_k_index: Tensor,  # (..., k)
    top_k_weights: Tensor,  # (..., k)
    weights: tuple[Any, Any],
    biases: tuple[Tensor | None, Tensor | None],
    layout: ExpertsLayout,
    lora: ExpertsLora,
    backend: str,
) -> Tensor | None:
    """`experts_forward`, or None where its stages must run on their own."""
    if not _is_eager(hidden_states, layout) or not _are_plain(top_k_index, top_k_weights):
        return None
    leading, (x, ids, gates) = hidden_states.shape[:-1], (hidden_states, top_k_index, top_k_weights)
    if ids.shape[:-1] != leading or gates.shape != ids.shape or ids.numel() == 0 or not leading:
        return None
    if len(leading) != 1:
        x, ids, gates = (one.flatten(0, -2) for one in (x, ids, gates))
    dtype = autocast_dtype(x)
    if dtype is not None:
        if any(one is not None and one.dtype != dtype for one in biases):
            return None  # a cast of parameters is a step of its own
        x = x.to(dtype)
    leaves1, kind1 = leaves_of(lora.gate_up)
    leaves2, kind2 = leaves_of(lora.down)
    scalings = tuple(
        1.0 if one is None else float(one.scaling) for one in (lora.gate_up, lora.down)
    )
    form = Form(layout.activation, layout.interleaved, layout.transposed, scalings, (kind1, kind2))
    if not _are_plain(x, *leaves1, *leaves2, *biases):
        return None
    if _are_plain(*weights):
        out = _dense(x, ids, gates, weights, (leaves1, leaves2), biases, form, backend)
    else:
        out = quantized_layer(x, ids, gates, weights, (leaves1, leaves2), biases, form, backend)
    if out is None:
        return None
    return out if out.shape == hidden_states.shape and dtype is None else _as(out, hidden_states)


def _as(out: Tensor, hidden_states: Tensor) -> Tensor:
    return out.to(hidden_states.dtype).reshape(hidden_states.shape)


def _is_eager(x: Any, layout: ExpertsLayout) -> bool:
    """Whether nothing but autograd looks on, at a gated layer of a GPU."""
    return (
        isinstance(x, Tensor)
        and _is_on_gpu(x)
        and layout.gated
        and isinstance(layout.activation, str)
        and not torch.compiler.is_compiling()
        and forward_ad._current_level < 0
        and torch._C._functorch.peek_interpreter_stack() is None
        and torch._C._len_torch_dispatch_stack() == 0
    )


def _is_on_gpu(x: Tensor) -> bool:
    return x.is_cuda


def _are_plain(*tensors: Any) -> bool:
    """Whether all of them are plain tensors, or None."""
    return all(one is None or type(one) in _PLAIN for one in tensors)


def _dense(
    x: Tensor,
    ids: Tensor,
    gates: Tensor,
    weights: tuple[Tensor, Tensor],
    leaves: tuple[tuple, tuple],
    biases: tuple[Tensor | None, Tensor | None],
    form: Form,
    backend: str,
) -> Tensor | None:
    """The layer over weights of x's dtype; None where one path does not serve all of it."""
    w1, w2 = weights
    if w1.ndim != 3 or w1.dtype != x.dtype or w2.dtype != x.dtype:
        return None
    strides = w1.stride() if form.transposed else w1.mT.stride()
    path = pick(x.device, x.dtype, backend, dense=True).name
    if not fuses(path, strides, form.activation, True, form.interleaved):
        return None
    check_path(path, x)
    operands = (x, w1, *leaves[0], biases[0], w2, *leaves[1], biases[1], gates)
    return _Layer.apply(*operands, ids, form, backward_comes(*operands))


class _Layer(torch.autograd.Function):
    """x, gate_up, its two factors and bias, down, its own, gates and ids -> (T, H)."""

    @staticmethod
    def forward(ctx, *arguments):
        *operands, form, keeps = arguments
        wants = ctx.needs_input_grad[:_LEAVES]
        ahead = functools.partial(_compile_ahead, operands, form, keeps, wants)
        out, *kept = replayed("experts", _forward, operands, (form, keeps), ahead)
        if keeps:
            ctx.form = form
            ctx.save_for_backward(*operands[:_LEAVES], *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        check_single(grad)
        wants = ctx.needs_input_grad[:_LEAVES]
        operands = (grad, *ctx.saved_tensors)
        found = iter(replayed("experts_backward", _backward, operands, (ctx.form, wants)))
        return *(next(found) if want else None for want in wants), *(None,) * 3


def _compile_ahead(
    operands: Sequence[Tensor | None], form: Form, keeps: bool, wants: tuple[bool, ...]
) -> None:
    """Begin to compile forward and backward, and both for all other heights of tiles."""

    def both(operands: Sequence[Tensor | None]) -> None:
        found = prepare(_forward, operands, (form, keeps))
        if keeps and found is not None:
            leaves, (out, *kept) = operands[:_LEAVES], found
            prepare(_backward, (out, *leaves, *kept), (form, wants))

    both(operands)
    experts = operands[_W1].shape[0]
    compile_for_all_heights(both, operands, (_X, _GATES, _IDS), experts, (form, keeps, wants))


def _stored(weight: Tensor, form: Form) -> Tensor:
    """(E, in, out) of a stored weight, or the stored order of its gradient."""
    return weight if form.transposed or weight.ndim != 3 else weight.mT


def _forward(
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
    ids: Tensor,
    form: Form,
    keeps: bool,
) -> list[Tensor]:
    """The result; with `keeps` what backward reads: gate and up, xa of both, and the order."""
    from ..kernels.experts.gated_launch_triton import gated_experts_triton
    from ..kernels.experts.rows_triton import expert_sort_triton

    w1, w2 = _stored(w1, form), _stored(w2, form)
    experts, (tokens, top_k) = w1.shape[0], ids.shape
    check_ids(ids, experts)
    tile_rows = tile_rows_for(tokens * top_k, experts)
    a1, b1 = views_of(a1, b1, form.factors[0], experts)
    a2, b2 = views_of(a2, b2, form.factors[1], experts)
    slots, rows, offsets, tiles = expert_sort_triton(ids, experts, tile_rows)
    order = ExpertOrder(slots, offsets, rows, tiles, tokens, top_k, experts, tile_rows)
    check_operands(
        x,
        (w1, a1, b1, form.scalings[0], bias1),
        (w2, a2, b2, form.scalings[1], bias2),
        gates,
        order,
    )
    operands = (x, w1, a1, b1, bias1, w2, a2, b2, bias2, gates, slots, offsets, rows, tiles)
    constants = (tile_rows, top_k, form.scalings, form.activation, form.interleaved, keeps)
    out, *kept = gated_experts_triton(*operands, *constants)
    return [out, *kept, slots, offsets, rows, tiles] if keeps else [out]


def _backward(  # noqa: PLR0913
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
    form: Form,
    wants: tuple[bool, ...],
) -> list[Tensor]:
    """The gradients of those leaves that want one."""
    from ..kernels.experts.gated_launch_triton import gated_experts_backward_triton

    w1, w2 = _stored(w1, form), _stored(w2, form)
    experts = w1.shape[0]
    tile_rows = tile_rows_for(slots.shape[0], experts)
    a1, b1 = views_of(a1, b1, form.factors[0], experts)
    a2, b2 = views_of(a2, b2, form.factors[1], experts)
    first = wanted_of(wants[2:4], form.factors[0])
    second = wanted_of(wants[6:8], form.factors[1])
    flags = (*wants[:2], *first, *wants[4:6], *second, *wants[8:])
    operands = (grad, x, w1, a1, b1, bias1, w2, a2, b2, bias2, gates, wide, xa1, xa2)
    place = (slots, offsets, rows, tiles, tile_rows, gates.shape[1])
    constants = (form.scalings, form.activation, form.interleaved, flags)
    dx, dw1, da1, db1, dbias1, dw2, da2, db2, dbias2, dgates = gated_experts_backward_triton(
        *operands, *place, *constants
    )
    factors1 = gradients_of(da1, db1, form.factors[0])
    factors2 = gradients_of(da2, db2, form.factors[1])
    dw1, dw2 = _stored(dw1, form), _stored(dw2, form)
    found = (dx, dw1, *factors1, dbias1, dw2, *factors2, dbias2, dgates)
    return [one for one, want in zip(found, wants, strict=True) if want]
