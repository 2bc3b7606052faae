"""What the eager layer launches over 4-bit experts: `gated_nf4_experts`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from torch import Tensor

from ...dispatch import experts_path
from ...kernels.experts.expert_sort import ExpertOrder
from ...kernels.experts.grouped_lora import ExpertWeights
from ...kernels.quant.gated_nf4_experts import codebook_of, fuses
from ...kernels.quant.grouped_lora_nf4_forward import nested_of
from ..grouped_linear import check_path
from ..layout import Form
from .expert_weights import QuantizedWeight, as_quantized, fp4_codebook
from .strategy import pick_strategy

_PARTS = 6  # tensors of a stack


@dataclasses.dataclass(frozen=True)
class QuantizedLayer:
    """`LayerLaunches` over two records whose products decode in registers.

    Args:
        shapes: Of both stacks the stored shape, the blocksize, and whether the forward's sum runs
            along stored rows.
        path: Of the products.
    """

    shapes: tuple[tuple, tuple]
    path: str
    frozen: ClassVar[int] = 2 * _PARTS

    def num_experts(self, gate_up: None) -> int:
        """E."""
        return self.shapes[0][0][0]

    def weights(
        self, stored: tuple[None, None], frozen: Sequence[Tensor | None], form: Form
    ) -> tuple[tuple, tuple]:
        """Of both (stack, whether the forward's sum runs along stored rows)."""
        found = []
        for n, (sizes, blocksize, last) in enumerate(self.shapes):
            packed, absmax, codebook, *nested = frozen[n * _PARTS : (n + 1) * _PARTS]
            stack = (packed, absmax, codebook, nested_of(*nested), tuple(sizes), blocksize)
            found.append((stack, last))
        return tuple(found)

    def checked(self, weights: ExpertWeights) -> ExpertWeights:
        """With the record instead of the stack."""
        (packed, absmax, _, nested, stored, blocksize), last = weights.weight
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
        return dataclasses.replace(weights, weight=record)

    def forward(
        self,
        x: Tensor,
        first: ExpertWeights,
        second: ExpertWeights,
        order: ExpertOrder,
        gates: Tensor,
        form: Form,
        keeps: bool,
    ) -> Sequence[Tensor]:
        """The result; gate and up, h, and xa of both."""
        from ...kernels.quant.gated_nf4_experts_triton import gated_nf4_experts_triton

        projections = map(_projection, (first, second))
        options = (form.activation, form.interleaved, self.path, keeps)
        return gated_nf4_experts_triton(x, *projections, order, gates, *options)

    def backward(
        self,
        grad: Tensor,
        x: Tensor,
        first: ExpertWeights,
        second: ExpertWeights,
        order: ExpertOrder,
        gates: Tensor,
        kept: Sequence[Tensor],
        form: Form,
        wants: Sequence[bool],
    ) -> Sequence[Tensor | None]:
        """Gradients of x, both A and B, and the gates; packed weights and biases have none."""
        from ...kernels.quant.gated_nf4_experts_triton import gated_nf4_experts_backward_triton

        wants_x, _, wants_a1, wants_b1, _, _, wants_a2, wants_b2, _, wants_gates = wants
        flags = [wants_x, wants_a1, wants_b1, wants_a2, wants_b2, wants_gates]
        projections = map(_projection, (first, second))
        options = (form.activation, form.interleaved, self.path, flags)
        dx, da1, db1, da2, db2, dgates = gated_nf4_experts_backward_triton(
            grad, x, *kept, *projections, order, gates, *options
        )
        return dx, None, da1, db1, None, None, da2, db2, None, dgates


def _projection(weights: ExpertWeights) -> tuple:
    """A projection as the launches take it."""
    return *weights.weight, weights.a, weights.b, weights.bias, weights.scaling


def quantized_launches(
    x: Tensor,
    rows: int,
    weights: tuple[Any, Any],
    leaves: tuple[tuple, tuple],
    trains_biases: bool,
    form: Form,
    backend: str,
) -> tuple[QuantizedLayer | None, tuple[Tensor | None, ...]]:
    """The launches of the layer over two records, None where its products must run on their own.

    Args:
        x: (T, H).
        rows: T k.
        weights: Whatever `as_quantized` knows.
        leaves: LoRA's tensors, as in `leaves_of`.
        trains_biases: Whether a bias wants a gradient.
        form: What the tensors do not say.
        backend: Of `grouped_lora_linear`.

    Returns:
        the launches, and the tensors of both records.
    """
    records = tuple(as_quantized(weight) for weight in weights)
    path = experts_path(x.device, x.dtype, backend).name
    if any(type(record) is not QuantizedWeight for record in records):  # offloaded ones come late
        return None, ()
    if not fuses(path, form.activation, True) or trains_biases:
        return None, ()
    check_path(path, x)
    ranks = tuple(map(_rank, leaves, form.factors, records))
    seen = (path, backend, rows, ranks, x.dtype, x.device, x.data_ptr() % 16)
    key = (*seen, x.shape, x.stride(), form.transposed, *map(_described, records))
    if key not in _taken:
        if len(_taken) >= _MOST_TAKEN:
            _taken.clear()
        taken = _path(x, rows, records, ranks, form, path, backend)
        shapes = tuple((r.stored, r.blocksize, r.transposed == form.transposed) for r in records)
        _taken[key] = None if taken is None else QuantizedLayer(shapes, taken)
    if (launches := _taken[key]) is None:
        return None, ()
    return launches, (*_parts(records[0]), *_parts(records[1]))


_taken: dict[tuple, QuantizedLayer | None] = {}  # by what decides them
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
