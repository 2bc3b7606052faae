"""Experts stored in 4 bits: what the kernels need of them, wherever they come from.

`QuantizedWeight` is a record of tensors; `expert_weight` finds one behind an attribute of an
experts module, be it ours or one that bitsandbytes has parametrized. Nothing here ever holds the
whole stack in 16 bits: `decode` makes the experts that are named and no others.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ... import dispatch
from ...kernels.experts.expert_sort import ExpertOrder
from ...kernels.quant.codec import DTYPES
from ...kernels.quant.formats import Format, format_of
from ...kernels.quant.grouped_lora_quantized import active_of
from ...reference.nf4 import NESTED_BLOCKSIZE

STRATEGIES = ("auto", "fused", "chunked", "selective")


@torch.compiler.assume_constant_result
def _report(reason: str) -> None:
    """Once per process, also while a graph is traced."""
    dispatch.say_once("packed experts are decoded to memory, not inside the product: %s", reason)


def check_module(model: Any) -> None:
    """Raise TypeError for a model that is none, such as its name."""
    if not isinstance(model, nn.Module):
        kind = type(model).__name__
        raise TypeError(
            f"model must be a torch.nn.Module, got {kind}; load it with from_pretrained"
        )


def check_strategy(strategy: str, name: str = "strategy") -> None:
    """Raise ValueError unless the argument of that name is one of STRATEGIES."""
    if strategy not in STRATEGIES:
        raise ValueError(f"{name} must be one of {STRATEGIES}, got {strategy!r}")


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A stack of experts (E, N, K) in a packed format.

    Quacks like a frozen weight where `experts_forward` looks: `shape`, `transpose(1, 2)`, `to`.

    Args:
        format: how to read the tensors; of `kernels.quant.formats.format_of`.
        tensors: those of the format by name, in its order.
        stored: (E, N, K) as it lies in memory.
        transposed: seen as (E, K, N).
        strategy: how `grouped_lora_linear` multiplies with it; see `choose_strategy`.
    """

    format: Format
    tensors: dict[str, Tensor]
    stored: tuple[int, int, int]
    transposed: bool = False
    strategy: str = "auto"

    def __post_init__(self) -> None:
        if len(self.stored) != 3 or min(self.stored) < 1:
            raise ValueError(f"a stack of experts has shape (E, N, K), got {tuple(self.stored)}")
        check_strategy(self.strategy)
        self.format.check(self.tensors, self.stored)

    @classmethod
    def unchecked(cls, fields: dict[str, Any]) -> QuantizedWeight:
        """A record whose like was checked before: on the path of every call of a layer."""
        record = object.__new__(cls)
        record.__dict__.update(fields)
        return record

    @property
    def packed(self) -> Tensor:
        """The codes of the elements."""
        return self.tensors["packed"]

    @property
    def shape(self) -> torch.Size:
        """(E, N, K), or (E, K, N) when transposed."""
        experts, n, k = self.stored
        return torch.Size((experts, k, n) if self.transposed else (experts, n, k))

    @property
    def device(self) -> torch.device:
        """Where the packed bytes lie."""
        return self.packed.device

    @property
    def nbytes(self) -> int:
        """Bytes that the stack takes."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def transpose(self, first: int, second: int) -> QuantizedWeight:
        """The stack with N and K exchanged; nothing is moved."""
        if {first % 3, second % 3} != {1, 2}:
            raise ValueError(f"only dimensions 1 and 2 can be exchanged, got {first} and {second}")
        return dataclasses.replace(self, transposed=not self.transposed)

    def to(self, target: torch.device | torch.dtype | str) -> QuantizedWeight:
        """On another device. A dtype changes nothing: decoding takes the dtype it is asked for."""
        if isinstance(target, torch.dtype):
            return self
        return self.map(lambda tensor: tensor.to(target))

    def map(self, function: Any) -> QuantizedWeight:
        """The record with `function` applied to every tensor."""
        changed = {name: function(tensor) for name, tensor in self.tensors.items()}
        return dataclasses.replace(self, tensors=changed)

    @property
    def registers_refusal(self) -> str | None:
        """Why no product decodes the stack in registers; None if one does."""
        return self.format.registers_refusal(self.stored)

    def fusable_over(self, x: Tensor) -> bool:
        """Whether one does; a slower way over rows on a GPU that nobody asked for is reported."""
        reason = self.registers_refusal
        if reason and self.strategy == "auto" and x.is_cuda and x.element_size() == 2:
            _report(reason)
        return reason is None

    def operands(self) -> tuple[list[Tensor], str, list[int], bool]:
        """The stack as the ops take it."""
        return list(self.tensors.values()), self.format.text, list(self.stored), self.transposed

    def decode(self, ids: Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The named experts, each element rounded once.

        Args:
            ids: (n,) int32 or int64, any order; None for all of them.
            dtype: bfloat16, float16 or float32.

        Returns:
            (n, N, K), a view (n, K, N) when transposed.

        Raises:
            ValueError: another dtype, or what the format refuses.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype: packed experts decode to one of {DTYPES}, not to {dtype}")
        if ids is None:
            ids = torch.arange(self.stored[0], device=self.device)
        with torch.no_grad():
            tensors = tuple(self.tensors.values())
            decoded = self.format.decode(tensors, ids, self.stored[1:], dtype)
        return decoded.transpose(1, 2) if self.transposed else decoded


def as_quantized(weight: Any) -> QuantizedWeight | None:
    """The record behind a weight: itself, or that of a `QuantizedExperts`; None for a tensor."""
    if isinstance(weight, QuantizedWeight):
        return weight
    record = getattr(weight, "quantized_weight", None)
    return record() if callable(record) else None


@dataclasses.dataclass(frozen=True)
class ActiveExperts:
    """The experts that have rows, in rising order, on the device and without a wait for it.

    Args:
        ids: (n,) int64 with n = min(E, T k), the static bound. Behind the active experts stand
            inactive ones, so that every id is valid.
        position: (E,) int64, place of every expert among the active ones; -1 if it is inactive.
        offsets: (n + 1,) int64, first row of every id; the inactive ones have none.
    """

    ids: Tensor
    position: Tensor
    offsets: Tensor

    def remap(self, expert_ids: Tensor) -> Tensor:
        """Expert ids of any shape -> places in `ids`; sentinels and inactive experts give -1."""
        known = (expert_ids >= 0) & (expert_ids < self.position.shape[0])
        place = self.position[torch.where(known, expert_ids, 0).long()]
        return torch.where(known, place, -1)


def active_experts(order: ExpertOrder) -> ActiveExperts:
    """Which experts the rows of an order belong to.

    Args:
        order: of `expert_sort`.

    Returns:
        Them, with remapping and compact offsets. Of an empty batch n is 0.

    Raises:
        TypeError: order is no `ExpertOrder`.
    """
    if not isinstance(order, ExpertOrder):
        raise TypeError(f"order must be the result of expert_sort, got {type(order).__name__}")
    ids, position = active_of(order.offsets, order.tokens * order.top_k)
    # An inactive expert's own offset could lie anywhere: it starts where the valid rows end.
    end = order.offsets[-1:]
    starts = torch.where(position[ids] >= 0, order.offsets[ids], end)
    return ActiveExperts(ids, position, torch.cat((starts, end)))


def selective_expert_weights(
    weight: Tensor | QuantizedWeight, active: ActiveExperts, dtype: torch.dtype | None = None
) -> Tensor:
    """The weights of the active experts alone, dense or decoded.

    It saves memory where few experts are active: decode steps and small micro-batches, T up to
    about 32. At training lengths nearly every expert is active and it saves nothing.

    Args:
        weight: (E, ...), dense or in 4 bits.
        active: of `active_experts`.
        dtype: of decoded weights; required for 4 bits, refused for a dense weight.

    Returns:
        (n, ...), in the order of `active.ids`.

    Raises:
        TypeError: weight is neither.
        ValueError: the number of experts or the dtype does not fit.
    """
    if not isinstance(weight, (Tensor, QuantizedWeight)):
        raise TypeError(f"weight must be a Tensor or QuantizedWeight, got {type(weight).__name__}")
    if weight.shape[:1] != active.position.shape:
        raise ValueError(
            f"weight of shape {tuple(weight.shape)} must hold {len(active.position)} experts"
        )
    if isinstance(weight, QuantizedWeight):
        if dtype is None:
            raise ValueError("dtype is needed to decode experts; pass the activations' dtype")
        return weight.decode(active.ids, dtype)
    if dtype not in (None, weight.dtype):
        raise ValueError(f"a dense weight keeps its dtype {weight.dtype}, got dtype={dtype}")
    return weight.index_select(0, active.ids)


def expert_weight(
    module: nn.Module, name: str, shape: Sequence[int] | None = None
) -> Tensor | QuantizedWeight:
    """The weight behind an attribute of an experts module, without decoding it.

    Args:
        module: an experts module.
        name: of the parameter, for example "gate_up_proj".
        shape: (E, N, K), for a state that kept the number of elements alone.

    Returns:
        The tensor itself, or a `QuantizedWeight` of a `QuantizedExperts` or of a parameter that
        bitsandbytes has parametrized (`bitsandbytes.nn.parametrize`).

    Raises:
        ValueError: a format nobody here knows, or one that is incomplete.
    """
    parametrized = module._modules.get("parametrizations", {})
    if name in parametrized:
        return _bitsandbytes_weight(parametrized[name], f"{type(module).__name__}.{name}", shape)
    value = getattr(module, name, None)
    record = as_quantized(value)
    if record is not None:
        return record
    if isinstance(value, Tensor) and value.dtype.is_floating_point and value.element_size() > 1:
        return value
    kind = type(value).__name__
    if isinstance(value, Tensor):
        kind = f"{value.dtype} {tuple(value.shape)}"
    raise ValueError(
        f"name={name!r} of {type(module).__name__} is {kind}: neither a dense weight, nor "
        "QuantizedExperts, nor parametrized by bitsandbytes; quantise it with QuantizedExperts"
    )


def _bitsandbytes_weight(entries: Any, name: str, shape: Sequence[int] | None) -> QuantizedWeight:
    """A parametrization's packed tensor and state, told by their attributes."""
    state = getattr(entries[0], "quant_state", None)
    if len(entries) != 1 or state is None:
        kinds = ", ".join(type(entry).__name__ for entry in entries)
        raise ValueError(
            f"{name} is parametrized by {kinds}; 4-bit experts are known by one parametrization "
            "with a quant_state. Where PEFT has put LoRA on top, call use_in_transformers(model), "
            "which hands PEFT's factors to the experts and leaves their weights alone"
        )
    stored = tuple(state.shape if shape is None else shape)
    if len(stored) != 3 or math.prod(stored) != math.prod(state.shape):
        raise ValueError(
            f"{name} was quantised from shape {tuple(state.shape)}; pass shape=(E, N, K) with as "
            f"many elements, got {shape}"
        )
    tensors = {"absmax": state.absmax.reshape(-1)}
    if state.nested:
        if state.state2.blocksize != NESTED_BLOCKSIZE:
            raise ValueError(
                f"{name} nests absmax in blocks of {state.state2.blocksize}, not {NESTED_BLOCKSIZE}"
            )
        offset = torch.as_tensor(state.offset, dtype=torch.float32, device=state.absmax.device)
        tensors |= {
            "absmax_code": state.state2.code,
            "absmax_scale": state.state2.absmax.reshape(-1),
            "absmax_offset": offset.reshape(1),
        }
    original = entries.original.detach()
    strayed = [key for key, tensor in tensors.items() if tensor.device != original.device]
    if strayed:
        raise ValueError(
            f"{name}: {', '.join(strayed)} on {tensors[strayed[0]].device}, but the packed bytes "
            f"are on {original.device}; move the quant_state with its .to(device)"
        )
    packed = original.reshape(-1).view(torch.uint8)  # FSDP's quant_storage may be any dtype
    options = {"blocksize": state.blocksize, "nested": bool(state.nested)}
    return QuantizedWeight(
        format_of(state.quant_type, **options), {"packed": packed, **tensors}, stored
    )
