"""`eager_layer` over 4-bit experts: the launches of `expert_sort` and `gated_nf4_experts`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...kernels.experts._moe_paths import pick
from ...kernels.experts.expert_sort import check_ids, tile_rows_for
from ...kernels.launch.launch_plan import prepare, replayed
from ...kernels.quant.gated_nf4_experts import codebook_of, fuses
from ...kernels.quant.grouped_lora_nf4_forward import nested_of
from ..compile_ahead import compile_for_all_heights
from ..gated_linear import check_operands
from ..grouped_linear import check_path
from ..layout import Form
from ..lora import gradients_of, views_of, wanted_of
from ..sort import ExpertOrder
from .expert_weights import QuantizedWeight, as_quantized, fp4_codebook
from .strategy import pick_strategy

_LEAVES = 6  # x, both factors of both projections, gates
_X, _GATES, _IDS = 0, 5, 6  # places among the operands
_PARTS = 6  # tensors of a stack


def backward_comes(*tensors: Tensor | None) -> bool:
    """Whether autograd keeps what it needs of a function of these tensors."""
    return torch.is_grad_enabled() and any(one is not None and one.requires_grad for one in tensors)


def check_single(grad: Tensor) -> None:
    """Raise RuntimeError for a gradient that stands for several, or for none."""
    if type(grad) is not Tensor or not torch._C._has_storage(grad):
        raise RuntimeError(
            f"experts take one plain gradient at a time, got {type(grad).__name__} under vmap, "
            "is_grads_batched or compiled autograd; call torch.autograd.grad once per gradient"
        )


def quantized_layer(
    x: Tensor,
    ids: Tensor,
    gates: Tensor,
    weights: tuple[Any, Any],
    leaves: tuple[tuple, tuple],
    biases: tuple[Tensor | None, Tensor | None],
    form: Form,
    backend: str,
) -> Tensor | None:
    """The layer over two records; None where its products must run on their own.

    Args:
        x: (T, H).
        ids: (T, k).
        gates: (T, k).
        weights: Whatever `as_quantized` knows.
        leaves: LoRA's tensors, as in `leaves_of`.
        biases: Of the projections.
        form: What the tensors do not say.
        backend: Of `grouped_lora_linear`.
    """
    records = tuple(as_quantized(weight) for weight in weights)
    path = pick(x.device, x.dtype, backend).name
    if any(type(record) is not QuantizedWeight for record in records):  # offloaded ones come late
        return None
    if not fuses(path, form.activation, True) or backward_comes(*biases):
        return None
    check_path(path, x)
    ranks = tuple(map(_rank, leaves, form.factors, records))
    seen = (path, backend, ids.numel(), ranks, x.dtype, x.device, x.data_ptr() % 16)
    key = (*seen, x.shape, x.stride(), form.transposed, *map(_described, records))
    if key not in _taken:
        if len(_taken) >= _MOST_TAKEN:
            _taken.clear()
        _taken[key] = _path(x, ids.numel(), records, ranks, form, path, backend)
    if (taken := _taken[key]) is None:
        return None
    shapes = tuple((r.stored, r.blocksize, r.transposed == form.transposed) for r in records)
    operands = (x, *leaves[0], *leaves[1], gates)
    frozen = (*_parts(records[0]), *_parts(records[1]), *biases)
    return _QuantizedLayer.apply(
        *operands, ids, frozen, (form, shapes, taken), backward_comes(*operands)
    )


_taken: dict[tuple, str | None] = {}  # the path of a layer's products, by what decides it
_MOST_TAKEN = 1024


def _rank(leaves: tuple, kind: str | None, record: QuantizedWeight) -> int:
    a = leaves[0]
    return 0 if a is None else a.shape[1] if kind == "stacks" else a.shape[0] // record.stored[0]


def _described(record: QuantizedWeight) -> tuple:
    """All that a strategy may depend on."""
    options = (record.stored, record.blocksize, record.quant_type, record.strategy, record.nested)
    return *options, record.transposed, record.packed.data_ptr() % 16


def _path(
    x: Tensor,
    rows: int,
    records: tuple[QuantizedWeight, QuantizedWeight],
    ranks: tuple[int, ...],
    form: Form,
    path: str,
    backend: str,
) -> str | None:
    """The path of both products; None where one of them does not decode in registers."""
    taken, by_name = path, backend != "auto"
    for record, rank in zip(records, ranks, strict=True):
        seen = record if form.transposed else record.transpose(1, 2)
        strategy, taken = pick_strategy(x, seen, rows, rank, path, by_name)
        if strategy != "fused":
            return None
    return taken


def _parts(record: QuantizedWeight) -> tuple[Tensor | None, ...]:
    device = record.packed.device
    own = fp4_codebook(device) if record.quant_type == "fp4" else None
    nested = (record.absmax_code, record.absmax_scale, record.absmax_offset)
    return record.packed, record.absmax, codebook_of(own, device), *nested


class _QuantizedLayer(torch.autograd.Function):
    """x, both factors of both projections, gates, ids -> (T, H)."""

    @staticmethod
    def forward(ctx, *arguments):
        *operands, frozen, constants, keeps = arguments
        wants = ctx.needs_input_grad[:_LEAVES]
        operands = (*operands, *frozen)
        ahead = functools.partial(_compile_ahead, operands, constants, keeps, wants)
        out, *kept = replayed("quantized experts", _forward, operands, (*constants, keeps), ahead)
        if keeps:
            # Not saved tensors: packed bytes are the module's own; no hook may pin or move them.
            ctx.frozen, ctx.constants = frozen, constants
            ctx.save_for_backward(*operands[:_LEAVES], *kept)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        check_single(grad)
        wants = ctx.needs_input_grad[:_LEAVES]
        operands = (grad, *ctx.saved_tensors, *ctx.frozen)
        found = iter(
            replayed("quantized experts' backward", _backward, operands, (*ctx.constants, wants))
        )
        return *(next(found) if want else None for want in wants), *(None,) * 4


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
    experts = constants[1][0][0][0]
    options = (*constants, keeps, wants)
    compile_for_all_heights(both, operands, (_X, _GATES, _IDS), experts, options)


def _projections(
    leaves: tuple[Tensor | None, ...],
    frozen: tuple[Tensor | None, ...],
    form: Form,
    shapes: tuple[tuple, tuple],
) -> list[tuple]:
    """Both projections as the launches take them: stack, last, a, b, bias, scaling."""
    found = []
    for n, ((stored, blocksize, last), kind) in enumerate(zip(shapes, form.factors, strict=True)):
        packed, absmax, codebook, *nested = frozen[n * _PARTS : (n + 1) * _PARTS]
        stack = (packed, absmax, codebook, nested_of(*nested), tuple(stored), blocksize)
        factors = views_of(*leaves[2 * n : 2 * n + 2], kind, stored[0])
        found.append((stack, last, *factors, frozen[2 * _PARTS + n], form.scalings[n]))
    return found


def _forward(x: Tensor, *arguments) -> list[Tensor]:
    """The result; for backward also gate and up, h, xa of both and the order."""
    from ...kernels.experts.rows_triton import expert_sort_triton
    from ...kernels.quant.gated_nf4_experts_triton import gated_nf4_experts_triton

    *tensors, form, shapes, path, keeps = arguments
    leaves, (gates, ids), frozen = tensors[:4], tensors[4:6], tensors[6:]
    first, second = _projections(leaves, frozen, form, shapes)
    experts, (tokens, top_k) = shapes[0][0][0], ids.shape
    check_ids(ids, experts)
    tile_rows = tile_rows_for(tokens * top_k, experts)
    slots, rows, offsets, tiles = expert_sort_triton(ids, experts, tile_rows)
    order = ExpertOrder(slots, offsets, rows, tiles, tokens, top_k, experts, tile_rows)
    check_operands(x, *map(_checked, (first, second)), gates, order)
    place = (gates, slots, offsets, rows, tiles, tile_rows, top_k)
    options = (form.activation, form.interleaved, path, keeps)
    out, *kept = gated_nf4_experts_triton(x, first, second, *place, *options)
    return [out, *kept, slots, offsets, rows, tiles] if keeps else [out]


def _checked(projection: tuple) -> tuple:
    """A projection as `check_operands` takes it."""
    (packed, absmax, _, nested, stored, blocksize), last, a, b, bias, scaling = projection
    code, scale, offset = nested or (None, None, None)
    record = QuantizedWeight(
        packed,
        absmax,
        stored,
        blocksize,
        absmax_code=code,
        absmax_scale=scale,
        absmax_offset=offset,
        transposed=last,
    )
    return record, a, b, scaling, bias


def _backward(grad: Tensor, x: Tensor, *arguments) -> list[Tensor]:
    """The gradients of those leaves that want one."""
    from ...kernels.quant.gated_nf4_experts_triton import gated_nf4_experts_backward_triton

    *tensors, form, shapes, path, wants = arguments
    leaves, gates = tensors[:4], tensors[4]
    wide, h, xa1, xa2, slots, offsets, rows, tiles, *frozen = tensors[5:]
    first, second = _projections(leaves, frozen, form, shapes)
    tile_rows = tile_rows_for(slots.shape[0], shapes[0][0][0])
    first_pair = wanted_of(wants[1:3], form.factors[0])
    second_pair = wanted_of(wants[3:5], form.factors[1])
    place = (gates, slots, offsets, rows, tiles, tile_rows, gates.shape[1])
    flags = [wants[0], *first_pair, *second_pair, wants[5]]
    options = (form.activation, form.interleaved, path, flags)
    dx, da1, db1, da2, db2, dgates = gated_nf4_experts_backward_triton(
        grad, x, wide, h, xa1, xa2, first, second, *place, *options
    )
    factors1 = gradients_of(da1, db1, form.factors[0])
    factors2 = gradients_of(da2, db2, form.factors[1])
    found = (dx, *factors1, *factors2, dgates)
    return [one for one, want in zip(found, wants, strict=True) if want]
