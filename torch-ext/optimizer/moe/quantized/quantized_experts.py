"""QuantizedExperts: one projection's experts in 4 bits, a module in its parameter's place."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.quant.nf4_dequant import BLOCKSIZES
from ...kernels.quant.nf4_quantize import nf4_quantize
from ...reference.nf4_quantize import NESTED_BLOCKSIZE, nest_absmax
from .expert_weights import QuantizedWeight

FIELDS = ("packed", "absmax", "absmax_code", "absmax_scale", "absmax_offset")
FORMAT = "nf4_experts"


class QuantizedExperts(nn.Module):
    """A frozen stack of experts (E, N, K) in 4 bits.

    The tensors are parameters without gradient, as in bitsandbytes: DistributedDataParallel
    broadcasts buffers before every forward pass. `.to(device)` moves them; a dtype, `half()` or
    `bfloat16()` leaves them as they are, since absmax is float32 by format. `state_dict` holds the
    tensors and the description (`_extra_state`, JSON as bytes), all of them safetensors can store.

    Args:
        shape: (E, N, K).
        blocksize: elements per absmax.
        quant_type: "nf4" or "fp4".
        nested: absmax is quantised too: 4.13 instead of 4.5 bits per element at blocksize 64.
        strategy: of `grouped_lora_linear`: "auto", "resident", "fused", "chunked" or "selective".
        device: of the tensors.

    Raises:
        ValueError: a shape or option that the format does not have.
    """

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        blocksize: int = 64,
        quant_type: str = "nf4",
        nested: bool = False,
        strategy: str = "auto",
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.keeper: Any = None  # an `ExpertOffload` that has the tensors in host memory
        if blocksize not in BLOCKSIZES:
            raise ValueError(f"blocksize must be one of {BLOCKSIZES}, got {blocksize}")
        if any(side < 0 for side in shape):
            raise ValueError(f"shape must be (E, N, K) without negative sizes, got {tuple(shape)}")
        self.stored, self.nested = tuple(shape), nested
        self.blocksize, self.quant_type, self.strategy = blocksize, quant_type, strategy
        elements = math.prod(self.stored)
        blocks = -(-elements // blocksize)
        sizes = {
            "packed": ((elements + 1) // 2, torch.uint8),
            "absmax": (blocks, torch.uint8 if nested else torch.float32),
            "absmax_code": (256, torch.float32),
            "absmax_scale": (-(-blocks // NESTED_BLOCKSIZE), torch.float32),
            "absmax_offset": (1, torch.float32),
        }
        for name, (size, dtype) in sizes.items():
            kept = nested or name in ("packed", "absmax")
            tensor = torch.zeros(size, dtype=dtype, device=device) if kept else None
            self._set({name: tensor})
        self.quantized_weight()  # checks shape, quant_type and strategy

    @classmethod
    def from_experts(
        cls,
        experts: Iterable[Tensor],
        shape: tuple[int, int, int],
        *,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> QuantizedExperts:
        """Quantise a stack expert by expert; no more than two experts are held at a time.

        Args:
            experts: E tensors (N, K) of a floating dtype, each read once.
            shape: (E, N, K).
            device: where experts are quantised and kept; None for that of the first one.
            **options: of `QuantizedExperts`.

        Returns:
            The module; the same as quantising the whole stack at once.

        Raises:
            ValueError: the number or the shape of the experts is another one.
        """
        nested = options.pop("nested", False)
        writer = None
        for expert in experts:
            if writer is None:
                writer = _Writer(cls(shape, device=device or expert.device, **options))
            writer.add(expert)
            del expert  # before the next one is read
        if writer is None:
            raise ValueError(f"experts is empty, but shape {tuple(shape)} names {shape[0]}")
        writer.close()
        if nested:
            writer.module._nest()
        return writer.module

    @classmethod
    def from_weight(cls, weight: Tensor, **options: Any) -> QuantizedExperts:
        """Quantise a stack (E, N, K) that is in memory; `options` as in `from_experts`."""
        if weight.ndim != 3:
            raise ValueError(f"weight must be (E, N, K), got shape {tuple(weight.shape)}")
        return cls.from_experts(weight.detach().unbind(0), tuple(weight.shape), **options)

    @classmethod
    def from_quantized(cls, weight: QuantizedWeight) -> QuantizedExperts:
        """A module around the tensors of a record, without copying them."""
        if weight.transposed:
            weight = weight.transpose(1, 2)
        module = cls(
            weight.stored,
            blocksize=weight.blocksize,
            quant_type=weight.quant_type,
            nested=weight.nested,
            strategy=weight.strategy,
            device="meta",
        )
        module._set({name: getattr(weight, name) for name in FIELDS})
        return module

    @classmethod
    def from_state_dict(
        cls, state: dict[str, Tensor], prefix: str = "", strategy: str = "auto"
    ) -> QuantizedExperts:
        """Build the module that a state dict describes, and load it.

        Raises:
            ValueError: the description is missing or of another format.
        """
        found = {k.removeprefix(prefix): v for k, v in state.items() if k.startswith(prefix)}
        described = _description(found.get("_extra_state"))
        shape = tuple(described.pop("shape"))
        module = cls(shape, **described, strategy=strategy, device="meta")
        module.load_state_dict(found, assign=True)
        return module

    def quantized_weight(self) -> QuantizedWeight:
        """The record that the kernels take."""
        record = QuantizedWeight(
            stored=self.stored,
            blocksize=self.blocksize,
            quant_type=self.quant_type,
            strategy=self.strategy,
            **{name: getattr(self, name) for name in FIELDS},
        )
        return record if self.keeper is None else self.keeper.record(self, record)

    @property
    def shape(self) -> torch.Size:
        """(E, N, K)."""
        return torch.Size(self.stored)

    @property
    def dtype(self) -> torch.dtype:
        """Of the packed bytes: no floating dtype, so that LoRA over them chooses its own."""
        return self.packed.dtype

    @property
    def device(self) -> torch.device:
        """Where the products run: where the packed bytes lie, unless they are offloaded."""
        return self.packed.device if self.keeper is None else self.keeper.device

    def transpose(self, first: int, second: int) -> QuantizedWeight:
        """The record seen as (E, K, N)."""
        return self.quantized_weight().transpose(first, second)

    def decode(self, ids: Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The named experts (n, N, K); see `QuantizedWeight.decode`."""
        return self.quantized_weight().decode(ids, dtype)

    def forward(self) -> Tensor:
        """The whole stack in bfloat16: for inspection, never on the path of a layer."""
        return self.decode()

    def get_extra_state(self) -> Tensor:
        """What the tensors mean, as bytes of JSON."""
        text = json.dumps({"format": FORMAT, **self._options()}, sort_keys=True)
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Refuse tensors of another shape or format.

        Raises:
            ValueError: with what was found and what was expected.
        """
        described, expected = _description(state), self._options()
        if described != expected:
            raise ValueError(f"the state describes experts {described}, this module is {expected}")

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        """Read the description before any tensor is overwritten."""
        if f"{prefix}_extra_state" in state_dict:
            self.set_extra_state(state_dict[f"{prefix}_extra_state"])
        if self.keeper is not None:
            self.keeper.before_loading()
        super()._load_from_state_dict(state_dict, prefix, *others)
        if self.keeper is not None:
            self.keeper.after_loading(self)

    def extra_repr(self) -> str:
        """Shape and format."""
        return ", ".join(f"{name}={value}" for name, value in self._options().items())

    def _options(self) -> dict[str, Any]:
        return {
            "shape": list(self.stored),
            "blocksize": self.blocksize,
            "quant_type": self.quant_type,
            "nested": self.nested,
        }

    def _set(self, tensors: dict[str, Tensor | None]) -> None:
        for name, tensor in tensors.items():
            kept = None if tensor is None else nn.Parameter(tensor.detach(), False)
            self.register_parameter(name, kept)

    def _nest(self) -> None:
        codes, code, scale, offset = nest_absmax(self.absmax.detach())
        self.nested = True
        self._set(
            {
                "absmax": codes,
                "absmax_code": code,
                "absmax_scale": scale,
                "absmax_offset": offset,
            }
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedExperts:
        """Follow a change of device; absmax stays float32 and bytes stay bytes."""
        if self.keeper is not None:
            return self  # offloaded tensors stay in host memory

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)


class _Writer:
    """Quantises experts as they come; a block that straddles two of them waits for the second."""

    def __init__(self, module: QuantizedExperts) -> None:
        self.module = module
        self.count = 0
        self.written = 0  # elements
        self.waiting: Tensor | None = None  # the last elements, less than a block

    def add(self, expert: Tensor) -> None:
        _, n, k = self.module.stored
        if self.count == self.module.stored[0] or tuple(expert.shape) != (n, k):
            raise ValueError(
                f"expert {self.count} has shape {tuple(expert.shape)}; expected "
                f"{self.module.stored[0]} experts of shape {(n, k)}"
            )
        self.count += 1
        flat = expert.detach().to(self.module.device).reshape(-1)
        if self.waiting is not None:
            flat = torch.cat((self.waiting, flat))
        whole = flat.numel() // self.module.blocksize * self.module.blocksize
        self._write(flat[:whole])
        # A slice would keep the expert alive.
        self.waiting = flat[whole:].clone() if whole < flat.numel() else None

    def close(self) -> None:
        if self.count != self.module.stored[0]:
            raise ValueError(f"experts holds {self.count} of {self.module.stored[0]} experts")
        if self.waiting is not None:
            self._write(self.waiting)

    def _write(self, flat: Tensor) -> None:
        module = self.module
        packed, absmax = nf4_quantize(
            flat.contiguous(), module.blocksize, quant_type=module.quant_type
        )
        with torch.no_grad():
            at = self.written // 2  # even: blocks are
            module.packed[at : at + packed.numel()] = packed
            at = self.written // module.blocksize
            module.absmax[at : at + absmax.numel()] = absmax
        self.written += flat.numel()


def _description(state: Tensor | None) -> dict[str, Any]:
    try:
        described = json.loads(bytes(state.cpu().tolist()).decode())
        if described.pop("format") == FORMAT:
            return described
    except (AttributeError, KeyError, UnicodeDecodeError, ValueError):
        pass
    raise ValueError(
        f"no description of 4-bit experts of format {FORMAT!r}: `_extra_state` is missing or "
        "something else; save QuantizedExperts by its state_dict"
    )
