"""A gated layer in eager mode on a GPU: one autograd node, one call forward and one back.

The launches are those of `expert_sort` and of `gated_experts`, or of `gated_quantized_experts` over
packed experts (`LayerLaunches` says which), in their order, and so are the bits.
They are recorded at the first call with tensors alike and played again (`kernels.launch`);
arguments are checked while they are recorded, since the checks see what a record is kept for.
LoRA's matrices are read as PEFT stores them, without views that autograd would have to follow.
torch.compile, torch.func and tensor subclasses take the ops, one node each.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable

from ..dispatch import experts_path
from ..kernels.autocast import autocast_dtype
from ..kernels.experts.expert_sort import (
    LARGEST_TILE_ROWS,
    TILE_ROWS,
    ExpertOrder,
    check_ids,
    tile_rows_for,
)
from ..kernels.experts.gated_experts import fuses
from ..kernels.experts.grouped_lora import ExpertWeights, GatedLayer
from ..kernels.launch.launch_plan import apart, prepare, replayed, stand_in
from ..kernels.launch.triton_compile import compiles, in_background
from .grouped_linear import check_layer, check_path, check_rows
from .layout import ExpertsLayout, ExpertsLora, Form, LayerLaunches
from .lora import gradients_of, leaves_of, views_of, wanted_of
from .quantized.eager_quantized import quantized_launches

_PLAIN = frozenset((Tensor, nn.Parameter, type(None)))
_LEAVES = 10  # of `_Layer`'s operands: those that may want a gradient
_W1 = 1  # its place among them
_OF_TOKENS = (0, 9, 10)  # places of x, gates and ids, whose first dimension is the tokens
# Mean rows per expert at which a layer launches other kernels: of each height, and few.
_MEANS = (2, 4, *(mean for mean, _ in TILE_ROWS), 64, LARGEST_TILE_ROWS)

_begun: set[tuple] = set()
_kept: dict[tuple, list[tuple]] = {}  # what forwards keep, by `_kind_of`
_MOST_BEGUN = _MOST_KEPT = 1024


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
    if not all(map(torch._C._has_storage, (hidden_states, top_k_index, top_k_weights))):
        return None  # what a transform of torch.func left behind
    leading, (x, ids, gates) = hidden_states.shape[:-1], (hidden_states, top_k_index, top_k_weights)
    if ids.shape[:-1] != leading or gates.shape != ids.shape or ids.numel() == 0 or not leading:
        return None
    if len(leading) != 1:
        x, ids, gates = (one.flatten(0, -2) for one in (x, ids, gates))
    ids, gates = ids.contiguous(), gates.contiguous()  # a recording makes no copies
    dtype = autocast_dtype(x) if torch._C._is_any_autocast_enabled() else None
    if dtype is not None:
        if any(one is not None and one.dtype != dtype for one in biases):
            return None  # a cast of parameters is a step of its own
        x = x.to(dtype)
    leaves1, kind1, scaling1 = leaves_of(lora.gate_up)
    leaves2, kind2, scaling2 = leaves_of(lora.down)
    lies = (layout.activation, layout.interleaved, layout.transposed)
    form = Form(*lies, (scaling1, scaling2), (kind1, kind2))
    if not _are_plain(x, *leaves1, *leaves2, *biases):
        return None
    parameters = [one for one in (*leaves1, *leaves2, *biases) if one is not None]
    if not all(map(torch._C._has_storage, parameters)):
        return None
    frozen: tuple[Tensor | None, ...] = ()
    if _are_plain(*weights):
        launches, (w1, w2) = _dense(x, weights, form, backend), weights
    else:
        trains = torch.is_grad_enabled() and any(
            one is not None and one.requires_grad for one in biases
        )
        found = quantized_launches(x, ids.numel(), weights, trains, form, backend)
        (launches, frozen), w1, w2 = found, None, None
    if launches is None:
        return None
    operands = (x, w1, *leaves1, biases[0], w2, *leaves2, biases[1], gates)
    if torch.is_grad_enabled():
        out = _apply(*operands, (ids, frozen, launches, form))
    else:  # a node that records nothing takes the host a quarter of such a call
        (out,) = _run((*operands, ids, *frozen), (launches, form), False, ())
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
    return _PLAIN.issuperset(map(type, tensors))


@dataclasses.dataclass(frozen=True)
class DenseLayer:
    """`LayerLaunches` over weights of x's dtype, which are (E, in, out) if `transposed`."""

    transposed: bool
    frozen: ClassVar[int] = 0

    def num_experts(self, gate_up: Tensor) -> int:
        """E."""
        return gate_up.shape[0]

    def weights(
        self, stored: tuple[Tensor, Tensor], frozen: Sequence[Tensor | None]
    ) -> tuple[Tensor, Tensor]:
        """(E, in, out) of both."""
        return stored if self.transposed else tuple(one.mT for one in stored)

    def checked(self, weights: ExpertWeights) -> ExpertWeights:
        """The same."""
        return weights

    def forward(self, layer: GatedLayer, keeps: bool) -> Sequence[Tensor]:
        """The result; gate and up, and xa of both."""
        from ..kernels.experts.gated_launch_triton import gated_experts_triton

        return gated_experts_triton(layer, keeps)

    def backward(
        self, grad: Tensor, layer: GatedLayer, kept: Sequence[Tensor], wants: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Gradients in the order of `Wants`, those of the weights in the stored order."""
        from ..kernels.experts.gated_launch_triton import Wants, gated_experts_backward_triton

        dx, dw1, da1, db1, dbias1, dw2, *rest = gated_experts_backward_triton(
            grad, layer, kept, Wants(*wants)
        )
        if not self.transposed:
            dw1, dw2 = (one.mT if one.ndim == 3 else one for one in (dw1, dw2))
        return dx, dw1, da1, db1, dbias1, dw2, *rest


_DENSE = DenseLayer(transposed=False), DenseLayer(transposed=True)


def _dense(
    x: Tensor, weights: tuple[Tensor, Tensor], form: Form, backend: str
) -> DenseLayer | None:
    """The launches over weights of x's dtype; None where one path does not serve all of it."""
    w1, w2 = weights
    if w1.ndim != 3 or w1.dtype != x.dtype or w2.dtype != x.dtype:
        return None
    strides = w1.stride()
    strides = strides if form.transposed else (strides[0], strides[2], strides[1])
    path = experts_path(x.device, x.dtype, backend, dense=True).name
    if not fuses(path, strides, form.activation, True, form.interleaved):
        return None
    check_path(path, x)
    return _DENSE[form.transposed]


class _Layer(torch.autograd.Function):
    """x, gate_up, its two factors and bias, down, its own, gates; what wants none -> (T, H)."""

    @staticmethod
    def forward(ctx, *arguments):
        *leaves, (ids, frozen, launches, form) = arguments
        wants, constants = ctx.needs_input_grad[:_LEAVES], (launches, form)
        keeps = True in wants
        out, *kept = _run((*leaves, ids, *frozen), constants, keeps, wants)
        if keeps:
            # Not saved tensors: packed bytes are the module's own; no hook may pin or move them.
            ctx.frozen, ctx.constants = frozen, constants
            ctx.save_for_backward(*leaves, *kept)
        return out

    @staticmethod
    def backward(ctx, grad):
        # Its wrapper takes longer than a lookup of the plan; it is for create_graph alone.
        run = once_differentiable(_gradients) if torch.is_grad_enabled() else _gradients
        return run(ctx, grad)


# Its Python wrapper looks for torch.func, which `_is_eager` refuses, and takes the host longer than
# the checks of a call.
_apply = super(torch.autograd.Function, _Layer).apply


def _run(
    operands: Sequence[Tensor | None], constants: tuple, keeps: bool, wants: tuple[bool, ...]
) -> Sequence[Tensor]:
    """What `_forward` gives, in one tensor what backward reads, if played; (launches, form)."""
    ahead = functools.partial(_compile_ahead, operands, constants, keeps, wants)
    return replayed("experts", _forward, operands, (*constants, keeps), ahead, keeps)


def _gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    """Of all arguments of `_Layer`."""
    check_single(grad)
    wants = ctx.needs_input_grad[:_LEAVES]
    operands = (grad, *ctx.saved_tensors, *ctx.frozen)
    found = iter(replayed("experts_backward", _backward, operands, (*ctx.constants, wants)))
    return *[next(found) if want else None for want in wants], None


def check_single(grad: Tensor) -> None:
    """Raise RuntimeError for a gradient that stands for several, or for none."""
    if type(grad) is not Tensor or not torch._C._has_storage(grad):
        raise RuntimeError(
            f"experts take one plain gradient at a time, got {type(grad).__name__} under vmap, "
            "is_grads_batched or compiled autograd; call torch.autograd.grad once per gradient"
        )


def _layer_of(
    leaves: Sequence[Tensor | None],
    frozen: Sequence[Tensor | None],
    order: ExpertOrder,
    launches: LayerLaunches,
    form: Form,
) -> GatedLayer:
    """What the launches read."""
    x, w1, a1, b1, bias1, w2, a2, b2, bias2, gates = leaves
    experts = launches.num_experts(w1)
    w1, w2 = launches.weights((w1, w2), frozen)
    kinds, scalings = form.factors, form.scalings
    first = ExpertWeights.of(w1, *views_of(a1, b1, kinds[0], experts), bias1, scalings[0])
    second = ExpertWeights.of(w2, *views_of(a2, b2, kinds[1], experts), bias2, scalings[1])
    return GatedLayer(x, first, second, order, gates, form.activation, form.interleaved)


def _forward(*arguments: Any) -> list[Tensor]:
    """The result; with `keeps` what backward reads, and the order."""
    from ..kernels.experts.rows_triton import expert_sort_triton

    *operands, launches, form, keeps = arguments
    leaves, ids, frozen = operands[:_LEAVES], operands[_LEAVES], operands[_LEAVES + 1 :]
    experts, (tokens, top_k) = launches.num_experts(leaves[_W1]), ids.shape
    check_ids(ids, experts)
    tile_rows = tile_rows_for(tokens * top_k, experts)
    slots, rows, offsets, tiles = expert_sort_triton(ids, experts, tile_rows)
    order = ExpertOrder(slots, offsets, rows, tiles, tokens, top_k, experts, tile_rows)
    layer = _layer_of(leaves, frozen, order, launches, form)
    check_rows(layer.x, order, grouped_in=False)
    projections = map(launches.checked, (layer.first, layer.second))
    check_layer(layer.x, *projections, order, layer.gates)
    out, *kept = launches.forward(layer, keeps)
    if not keeps:
        return [out]
    kept += [slots, offsets, rows, tiles]
    if len(_kept) >= _MOST_KEPT:
        _kept.clear()
    _kept[_kind_of(leaves, launches, form)] = _described(kept)
    return [out, *kept]


def _described(tensors: Sequence[Tensor]) -> list[tuple]:
    return [(one.shape, one.stride(), one.dtype) for one in tensors]


def _kind_of(leaves: Sequence[Tensor | None], *constants: Any) -> tuple:
    """By what the shapes and dtypes differ that a forward keeps."""
    return *constants, *(None if one is None else (one.shape, one.dtype) for one in leaves)


def _kept_by(
    leaves: Sequence[Tensor | None],
    frozen: Sequence[Tensor | None],
    launches: LayerLaunches,
    form: Form,
) -> list[tuple]:
    """Shape, strides and dtype of all that a forward over these leaves keeps.

    Raises:
        RuntimeError: they were forgotten since the forward, and cannot be found again.
    """
    kind, gates = _kind_of(leaves, launches, form), leaves[-1]
    found = _kept.get(kind)
    if found is None:  # forgotten since
        ids = stand_in(gates.shape, (gates.shape[1], 1), torch.int64, gates.device)
        made = prepare(_forward, (*leaves, ids, *frozen), (launches, form, True))
        if made is None:
            raise RuntimeError(
                f"how the forward keeps its tensors was forgotten after {_MOST_KEPT} others, and "
                "its launches cannot be recorded any more; run the forward again"
            )
        _, *kept = made
        found = _described(kept)
    return found


def _backward(grad: Tensor, *arguments: Any) -> list[Tensor]:
    """The gradients of those leaves that want one."""
    *operands, launches, form, wants = arguments
    end = len(operands) - launches.frozen
    leaves, kept, frozen = operands[:_LEAVES], operands[_LEAVES:end], operands[end:]
    if len(kept) == 1:
        kept = apart(*kept, _kept_by(leaves, frozen, launches, form))
    *kept, slots, offsets, rows, tiles = kept
    tile_rows = tile_rows_for(slots.shape[0], launches.num_experts(leaves[_W1]))
    order = ExpertOrder.of(slots, offsets, rows, tiles, tile_rows, leaves[-1].shape[1])
    layer = _layer_of(leaves, frozen, order, launches, form)
    first_pair = wanted_of(wants[2:4], form.factors[0])
    second_pair = wanted_of(wants[6:8], form.factors[1])
    flags = (*wants[:2], *first_pair, *wants[4:6], *second_pair, *wants[8:])
    dx, dw1, da1, db1, dbias1, dw2, da2, db2, *rest = launches.backward(grad, layer, kept, flags)
    factors1 = gradients_of(da1, db1, form.factors[0])
    factors2 = gradients_of(da2, db2, form.factors[1])
    found = (dx, dw1, *factors1, dbias1, dw2, *factors2, *rest)
    return [one for one, want in zip(found, wants, strict=True) if want]


def _compile_ahead(
    operands: Sequence[Tensor | None], constants: tuple, keeps: bool, wants: tuple[bool, ...]
) -> None:
    """Begin to compile forward and backward, and both for all other heights of tiles."""

    def both(operands: Sequence[Tensor | None]) -> None:
        found = prepare(_forward, operands, (*constants, keeps))
        if keeps and found is not None:
            leaves, frozen, (out, *kept) = operands[:_LEAVES], operands[_LEAVES + 1 :], found
            prepare(_backward, (out, *leaves, *kept, *frozen), (*constants, wants))

    both(operands)
    if not compiles():  # what came with the package serves all heights
        return
    experts = constants[0].num_experts(operands[_W1])
    _compile_for_all_heights(both, operands, experts, (*constants, keeps, wants))


def _compile_for_all_heights(
    compile_one: Callable[[Sequence[Tensor | None]], None],
    operands: Sequence[Tensor | None],
    experts: int,
    constants: tuple[Any, ...],
) -> None:
    """Call `compile_one` in another thread, for each height of tiles, unless that was begun before.

    The number of tokens decides the height of tiles (`tile_rows_for`), and kernels are compiled for
    one height. So a first call begins to compile for all: a later one finds its kernels there.

    Args:
        compile_one: Takes operands and computes nothing.
        operands: Of the call that comes.
        experts: How many there are.
        constants: Whatever else decides what is compiled.
    """
    rest = [x for place, x in enumerate(operands) if place not in _OF_TOKENS and x is not None]
    first = [operands[place] for place in _OF_TOKENS]
    described = ((x.shape, x.stride(), x.dtype, x.device) for x in rest)
    key = (constants, experts, *described, *((x.shape[1:], x.dtype) for x in first))
    if key in _begun:
        return
    if len(_begun) >= _MOST_BEGUN:
        _begun.clear()
    _begun.add(key)
    top_k = first[-1].shape[1]
    # What waits for its turn must keep neither activations nor weights alive.
    standing = [
        None if x is None else stand_in(x.shape, x.stride(), x.dtype, x.device) for x in operands
    ]
    for mean in _MEANS:
        tokens = max(mean * experts // top_k, 1)
        for place in _OF_TOKENS:
            x = operands[place]
            standing[place] = stand_in((tokens, x.shape[1]), (x.shape[1], 1), x.dtype, x.device)
        in_background(compile_one, tuple(standing))
