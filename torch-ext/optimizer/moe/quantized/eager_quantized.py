"""What the eager layer launches over packed experts: `gated_quantized_experts`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ...dispatch import experts_path
from ...kernels.experts.grouped_lora import ExpertWeights, GatedLayer
from ...kernels.quant.formats import Format, Stack
from ...kernels.quant.gated_quantized_experts import fuses
from ..grouped_linear import check_path
from ..layout import Form
from .expert_weights import QuantizedWeight, as_quantized
from .strategy import pick_slices


@dataclasses.dataclass(frozen=True)
class QuantizedLayer:
    """`LayerLaunches` over two records.

    Args:
        stacks: Of both the format, the stored shape, whether the forward's sum runs along the
            stored rows, the number of its tensors, and the places of its constants among all.
        path: Of the products.
        slice_experts: Of each product, as in `gated_quantized_experts`.
    """

    stacks: tuple[tuple[Format, tuple[int, int, int], bool, int, tuple[int, ...]], ...]
    path: str
    slice_experts: tuple[int, int]

    def __post_init__(self) -> None:
        fields = (self.stacks, self.path, self.slice_experts)
        object.__setattr__(self, "_hash", hash(fields))

    def __hash__(self) -> int:
        """Known: every call looks its plan up by the launches, forward and backward."""
        return self._hash

    @property
    def frozen(self) -> int:
        """Tensors of both stacks, and the constants that they share."""
        return sum(count for *_, count, _ in self.stacks) + len(
            {place for *_, places in self.stacks for place in places}
        )

    def num_experts(self, gate_up: None) -> int:
        """E."""
        return self.stacks[0][1][0]

    def weights(
        self, stored: tuple[None, None], frozen: Sequence[Tensor | None]
    ) -> tuple[Stack, Stack]:
        """Both stacks."""
        tensors = iter(frozen)
        own = [tuple(itertools.islice(tensors, count)) for *_, count, _ in self.stacks]
        constants = tuple(tensors)
        return tuple(
            Stack(kind, (*mine, *(constants[place] for place in places)), sizes, last)
            for mine, (kind, sizes, last, _, places) in zip(own, self.stacks, strict=True)
        )

    def checked(self, weights: ExpertWeights) -> ExpertWeights:
        """With the record instead of the stack."""
        stack: Stack = weights.weight
        record = QuantizedWeight(stack.format, stack.own_tensors, stack.stored, stack.transposed)
        return dataclasses.replace(weights, weight=record)

    def forward(self, layer: GatedLayer, keeps: bool) -> Sequence[Tensor]:
        """The result; gate and up, h, and xa of both."""
        from ...kernels.quant.gated_quantized_experts_triton import gated_quantized_experts_triton

        return gated_quantized_experts_triton(layer, self.path, self.slice_experts, keeps)

    def backward(
        self, grad: Tensor, layer: GatedLayer, kept: Sequence[Tensor], wants: Sequence[bool]
    ) -> Sequence[Tensor | None]:
        """Gradients of x, both A and B, and the gates; packed weights and biases have none."""
        from ...kernels.quant.gated_quantized_experts_triton import (
            gated_quantized_experts_backward_triton,
        )

        wants_x, _, wants_a1, wants_b1, _, _, wants_a2, wants_b2, _, wants_gates = wants
        flags = [wants_x, wants_a1, wants_b1, wants_a2, wants_b2, wants_gates]
        dx, da1, db1, da2, db2, dgates = gated_quantized_experts_backward_triton(
            layer, grad, *kept, self.path, self.slice_experts, flags
        )
        return dx, None, da1, db1, None, None, da2, db2, None, dgates


def quantized_launches(
    x: Tensor,
    rows: int,
    weights: tuple[Any, Any],
    trains_biases: bool,
    form: Form,
    backend: str,
) -> tuple[QuantizedLayer | None, tuple[Tensor | None, ...]]:
    """The launches of the layer over two records, None where its products must run on their own.

    x is (T, H), `rows` T k, and the weights are whatever `as_quantized` knows. Behind the launches
    come the tensors of both records and the constants of their formats.
    """
    first, second = as_quantized(weights[0]), as_quantized(weights[1])
    path = experts_path(x.device, x.dtype, backend).name
    # Offloaded ones come late.
    if type(first) is not QuantizedWeight or type(second) is not QuantizedWeight:
        return None, ()
    if not fuses(path, form.activation, True) or trains_biases:
        return None, ()
    seen = (path, backend, rows, x.dtype, x.device, x.data_ptr() % 16)
    key = (*seen, x.shape, x.stride(), form.transposed, *_described(first), *_described(second))
    found = _taken.get(key)
    if found is None:
        check_path(path, x)
        if len(_taken) >= _MOST_TAKEN:
            _taken.clear()
        found = _taken[key] = _chosen(x, rows, (first, second), form, path, backend)
    launches, constants = found
    if launches is None:
        return None, ()
    return launches, (*first.tensors.values(), *second.tensors.values(), *constants)


def _chosen(
    x: Tensor,
    rows: int,
    records: tuple[QuantizedWeight, QuantizedWeight],
    form: Form,
    path: str,
    backend: str,
) -> tuple[QuantizedLayer | None, tuple[Tensor, ...]]:
    """The launches, and what products read beside the tensors of both records, each tensor once.

    A plan tells tensors that it is given twice from others in every call, and reads both.
    """
    turned = tuple(r if form.transposed else r.transpose(1, 2) for r in records)
    taken = pick_slices(x, turned, rows, path, backend != "auto")
    own = [r.format.constants(r.packed.device) for r in records]
    constants = {id(one): one for mine in own for one in mine}
    places = {number: place for place, number in enumerate(constants)}
    stacks = tuple(
        (
            *(r.format, tuple(r.stored), r.transposed == form.transposed, len(r.tensors)),
            tuple(places[id(one)] for one in mine),
        )
        for r, mine in zip(records, own, strict=True)
    )
    return None if taken is None else QuantizedLayer(stacks, *taken), tuple(constants.values())


# By what decides them the launches, and the constants.
_taken: dict[tuple, tuple[QuantizedLayer | None, tuple[Tensor, ...]]] = {}
_MOST_TAKEN = 1024


def _described(record: QuantizedWeight) -> tuple:
    """All that a strategy may depend on."""
    packed = record.tensors["packed"]
    options = (record.format.text, tuple(record.stored), record.strategy, record.transposed)
    return *options, packed.data_ptr() % 16, packed.device
