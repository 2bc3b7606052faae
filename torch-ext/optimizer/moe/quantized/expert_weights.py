"""Experts stored in 4 bits: what the kernels need of them, wherever they come from.

`QuantizedWeight` is a record of tensors; `expert_weight` finds one behind an attribute of an
experts module, be it ours or one that bitsandbytes has parametrized. Nothing here ever holds the
whole stack in 16 bits: `decode` makes the experts that are named and no others.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ... import dispatch
from ...kernels.checks import check_dense
from ...kernels.experts.expert_sort import ExpertOrder
from ...kernels.quant.nf4_dequant import DTYPES, nf4_dequant
from ...kernels.quant.nf4_quantize import QUANT_TYPES
from ...reference.nf4_quantize import FP4_TABLE, NESTED_BLOCKSIZE

STRATEGIES = ("auto", "resident", "fused", "chunked", "selective")


@torch.compiler.assume_constant_result
def _report_straddling(inputs: int, blocksize: int) -> None:
    """Once per process, also while a graph is traced."""
    dispatch.say_once(
        "4-bit experts of %d inputs are decoded to memory, not inside the product: blocks of %d "
        "leave their row; quantise them with a blocksize that divides the inputs",
        inputs,
        blocksize,
    )


@functools.cache
def fp4_codebook(device: torch.device) -> Tensor:
    """FP4's values on a device, copied there once."""
    return torch.tensor(FP4_TABLE, dtype=torch.float32, device=device)


@dataclasses.dataclass(frozen=True, eq=False)
class QuantizedWeight:
    """A stack of experts (E, N, K) in bitsandbytes' 4-bit format, blocks over the whole stack.

    Quacks like a frozen weight where `experts_forward` looks: `shape`, `transpose(1, 2)`, `to`.

    Args:
        packed: (ceil(E N K / 2),) uint8.
        absmax: (blocks,) float32, or uint8 codes when nested.
        stored: (E, N, K) as it lies in memory.
        blocksize: elements per absmax.
        quant_type: "nf4" or "fp4".
        absmax_code: (256,) float32, nested only.
        absmax_scale: one float32 per 256 blocks, nested only.
        absmax_offset: (1,) float32, nested only.
        transposed: seen as (E, K, N).
        strategy: how `grouped_lora_linear` multiplies with it; see `quantized_strategy`.
    """

    packed: Tensor
    absmax: Tensor
    stored: tuple[int, int, int]
    blocksize: int = 64
    quant_type: str = "nf4"
    absmax_code: Tensor | None = None
    absmax_scale: Tensor | None = None
    absmax_offset: Tensor | None = None
    transposed: bool = False
    strategy: str = "auto"

    def __post_init__(self) -> None:
        if len(self.stored) != 3 or min(self.stored) < 1:
            raise ValueError(f"a stack of experts has shape (E, N, K), got {tuple(self.stored)}")
        if self.quant_type not in QUANT_TYPES:
            raise ValueError(f"quant_type must be one of {QUANT_TYPES}, got {self.quant_type!r}")
        if self.strategy not in STRATEGIES:
            raise ValueError(f"strategy must be one of {STRATEGIES}, got {self.strategy!r}")
        elements = math.prod(self.stored)
        for name in ("packed", "absmax"):
            check_dense(name, getattr(self, name))
        if self.packed.dtype != torch.uint8 or self.packed.numel() != (elements + 1) // 2:
            raise ValueError(
                f"packed must be {(elements + 1) // 2} bytes of uint8 for shape {self.stored}, got "
                f"{self.packed.numel()} of {self.packed.dtype}"
            )

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
    def nested(self) -> bool:
        """Whether absmax is itself quantised."""
        return self.absmax_code is not None

    @property
    def nbytes(self) -> int:
        """Bytes that the stack takes."""
        tensors = (self.packed, self.absmax, self.absmax_code, self.absmax_scale)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

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
        changed = {
            field.name: function(value)
            for field in dataclasses.fields(self)
            if isinstance(value := getattr(self, field.name), Tensor)
        }
        return dataclasses.replace(self, **changed)

    @property
    def fusable(self) -> bool:
        """Whether a block never leaves its row, which decoding inside the product relies on."""
        return self.stored[2] % self.blocksize == 0

    def fusable_over(self, x: Tensor) -> bool:
        """`fusable`; a slower way over rows on a GPU that nobody asked for is reported once."""
        if not self.fusable and self.strategy == "auto" and x.is_cuda and x.element_size() == 2:
            _report_straddling(self.stored[2], self.blocksize)
        return self.fusable

    def operands(self) -> tuple:
        """The stack as the fused ops take it."""
        return (
            self.packed,
            self.absmax,
            None if self.quant_type == "nf4" else fp4_codebook(self.device),
            self.absmax_code,
            self.absmax_scale,
            self.absmax_offset,
            list(self.stored),
            self.blocksize,
            self.transposed,
        )

    def decode(self, ids: Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The named experts, each element rounded once.

        Args:
            ids: (n,) int32 or int64, any order; None for all of them.
            dtype: bfloat16, float16 or float32.

        Returns:
            (n, N, K), a view (n, K, N) when transposed.

        Raises:
            ValueError: another dtype, or what `nf4_dequant` refuses.
        """
        if dtype not in DTYPES:
            raise ValueError(f"dtype: 4-bit experts are decoded to one of {DTYPES}, not to {dtype}")
        if ids is None:
            ids = torch.arange(self.stored[0], device=self.device)
        with torch.no_grad():
            decoded = nf4_dequant(
                self.packed,
                self.absmax,
                ids,
                self.stored[1:],
                self.blocksize,
                dtype,
                None if self.quant_type == "nf4" else fp4_codebook(self.device),
                self.absmax_code,
                self.absmax_scale,
                self.absmax_offset,
            )
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
    bound = min(order.num_experts, order.tokens * order.top_k)
    active = order.offsets.diff() > 0  # (E,)
    ids = torch.sort((~active).to(torch.uint8), stable=True).indices[:bound]
    position = torch.where(active, active.long().cumsum(0) - 1, -1)
    # An inactive expert's own offset could lie anywhere: it starts where the valid rows end.
    end = order.offsets[-1:]
    starts = torch.where(active[ids], order.offsets[ids], end)
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
    if weight.shape[0] != active.position.shape[0]:
        raise ValueError(
            f"weight holds {weight.shape[0]} experts, the order was made for "
            f"{active.position.shape[0]}"
        )
    if isinstance(weight, QuantizedWeight):
        if dtype is None:
            raise ValueError("dtype is needed to decode 4-bit experts; pass the activations' dtype")
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
    parametrized = getattr(module, "parametrizations", {})
    if name in parametrized:
        return _bitsandbytes_weight(parametrized[name], f"{type(module).__name__}.{name}", shape)
    value = getattr(module, name, None)
    record = as_quantized(value)
    if record is not None:
        return record
    if isinstance(value, Tensor) and value.dtype.is_floating_point and value.element_size() > 1:
        return value
    raise ValueError(
        f"name={name!r} of {type(module).__name__} is {_described(value)}: neither a dense weight, "
        "nor QuantizedExperts, nor parametrized by bitsandbytes; quantise it with QuantizedExperts"
    )


def _described(value: object) -> str:
    return (
        f"{value.dtype} {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
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
                f"{name} nests absmax in blocks of {state.state2.blocksize}; only "
                f"{NESTED_BLOCKSIZE} is known"
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
    return QuantizedWeight(
        packed=original.reshape(-1).view(torch.uint8),  # FSDP's quant_storage may be any dtype
        stored=stored,
        blocksize=state.blocksize,
        quant_type=state.quant_type,
        **tensors,
    )
