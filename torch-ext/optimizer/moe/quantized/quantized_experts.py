"""QuantizedExperts: one projection's packed experts, a module in its parameter's place."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...kernels.quant.formats import Format, Layout, format_of
from .expert_weights import QuantizedWeight

FORMAT = "nf4_experts"  # of the description; the name is older than the formats beside NF4


class QuantizedExperts(nn.Module):
    """A frozen stack of experts (E, N, K) in a packed format, 4 bits an element.

    The tensors are parameters without gradient, as in bitsandbytes: DistributedDataParallel
    broadcasts buffers before every forward pass. `.to(device)` moves them; a dtype, `half()` or
    `bfloat16()` leaves them as they are, since their dtypes are the format's. `state_dict` holds
    the tensors and the description (`_extra_state`, JSON as bytes), all of them safetensors can
    store.

    Args:
        shape: (E, N, K) as it is packed.
        quant_type: "nf4", "fp4", "mxfp4" or "fp8".
        strategy: of `grouped_lora_linear`: "auto", "fused", "chunked" or "selective".
        transposed: seen as (E, K, N), which is how a model has it whose published files are packed
            along the other dimension.
        device: of the tensors.
        **options: of the format; for NF4 and FP4 `blocksize`, elements per scale (64), and
            `nested`, whether the scales are quantised too (False); for FP8 `block_rows` and
            `block_columns`, which share a scale (128 each), 0 for the whole side.

    Raises:
        ValueError: a shape or option that the format does not have.
    """

    _checked: Sequence[Any] = ()  # what `quantized_weight` looked at

    def __init__(
        self,
        shape: tuple[int, int, int],
        *,
        quant_type: str = "nf4",
        strategy: str = "auto",
        transposed: bool = False,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.keeper: Any = None  # an `ExpertOffload` that has the tensors in host memory
        if any(side < 0 for side in shape):
            raise ValueError(f"shape must be (E, N, K) without negative sizes, got {tuple(shape)}")
        self.format, self.stored = format_of(quant_type, **options), tuple(shape)
        self.strategy, self.transposed = strategy, transposed
        self._set(_zeros(self.format.layout(self.stored), device))
        self.quantized_weight()  # checks shape and strategy

    @classmethod
    def from_experts(
        cls,
        experts: Iterable[Tensor],
        shape: tuple[int, int, int],
        *,
        device: torch.device | str | None = None,
        quant_type: str = "nf4",
        strategy: str = "auto",
        **options: Any,
    ) -> QuantizedExperts:
        """Quantise a stack expert by expert; no more than two experts are held at a time.

        Args:
            experts: E tensors (N, K) of a floating dtype, each read once.
            shape: (E, N, K).
            device: where experts are quantised and kept; None for that of the first one.
            quant_type: of `QuantizedExperts`, as what follows.
            strategy: of the products.
            **options: of the format.

        Returns:
            The module; the same as quantising the whole stack at once.

        Raises:
            ValueError: the number or the shape of the experts is another one.
        """
        module = cls(shape, quant_type=quant_type, strategy=strategy, device="meta", **options)
        # What stays is allocated before any expert, so that it lies between none of them.
        writer = None if device is None else _Writer(module.format, module.stored, device)
        for expert in experts:
            if writer is None:
                writer = _Writer(module.format, module.stored, expert.device)
            writer.add(expert)
            del expert  # before the next one is read
        if writer is None or writer.count == 0:
            raise ValueError(f"experts is empty, but shape {tuple(shape)} names {shape[0]}")
        module._set(writer.close())
        return module

    @classmethod
    def from_packed(
        cls,
        experts: Iterable[dict[str, Tensor]],
        shape: tuple[int, int, int],
        *,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> QuantizedExperts:
        """Take a stack expert by expert that is packed already; its bits stay what they are.

        Args:
            experts: E times the format's tensors of one expert by name, each read once.
            shape: (E, N, K) as it is packed.
            device: of the tensors.
            **options: of `QuantizedExperts`.

        Returns:
            The module.

        Raises:
            ValueError: another number of experts, or tensors of another size, dtype or name.
        """
        module = cls(shape, device=device, **options)
        count = 0
        for count, expert in enumerate(experts, 1):
            if count > shape[0] or expert.keys() != set(module._names):
                raise ValueError(
                    f"expert {count - 1} holds {sorted(expert)}; expected {shape[0]} experts of "
                    f"{sorted(module._names)}"
                )
            for name, tensor in expert.items():
                whole = getattr(module, name).data
                each, over = divmod(whole.numel(), shape[0])
                if over or tensor.numel() != each or tensor.dtype != whole.dtype:
                    raise ValueError(
                        f"expert {count - 1} has {tensor.numel()} of {tensor.dtype} as {name}; "
                        f"{whole.numel()} of {whole.dtype} are shared by {shape[0]} experts"
                    )
                whole[(count - 1) * each : count * each].copy_(tensor.reshape(-1))
            del expert, tensor  # before the next one is read
        if count != shape[0]:
            raise ValueError(f"experts holds {count} of {shape[0]} experts")
        return module

    @classmethod
    def from_weight(cls, weight: Tensor, **options: Any) -> QuantizedExperts:
        """Quantise a stack (E, N, K) that is in memory; `options` as in `from_experts`."""
        if weight.ndim != 3:
            raise ValueError(f"weight must be (E, N, K), got shape {tuple(weight.shape)}")
        return cls.from_experts(weight.detach().unbind(0), tuple(weight.shape), **options)

    @classmethod
    def from_quantized(cls, weight: QuantizedWeight) -> QuantizedExperts:
        """A module around the tensors of a record, without copying them, seen as the record is."""
        module = cls(
            weight.stored,
            **weight.format.options(),
            strategy=weight.strategy,
            transposed=weight.transposed,
            device="meta",
        )
        module._set(weight.tensors)
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
        module = cls(**described, strategy=strategy, device="meta")
        module.load_state_dict(found, assign=True)
        return module

    def quantized_weight(self) -> QuantizedWeight:
        """The record that layers take, checked where it differs from the last one in that."""
        own = self._parameters  # an attribute of a module is found several times as late
        tensors = {name: own[name] if name in own else getattr(self, name) for name in self._names}
        fields = {
            "format": self.format,
            "tensors": tensors,
            "stored": self.stored,
            "transposed": self.transposed,
            "strategy": self.strategy,
        }
        if torch.compiler.is_compiling():  # under which nothing is written
            record = QuantizedWeight(**fields)
            return record if self.keeper is None else self.keeper.record(self, record)
        seen = [(type(x), x.dtype, x.numel()) for x in tensors.values()]
        seen += (self.format, self.stored, self.transposed, self.strategy)
        if self._checked == seen:
            record = QuantizedWeight.unchecked(fields)
        else:
            record = QuantizedWeight(**fields)
            self._checked = seen
        return record if self.keeper is None else self.keeper.record(self, record)

    @property
    def shape(self) -> torch.Size:
        """(E, N, K), or (E, K, N) when transposed."""
        experts, n, k = self.stored
        return torch.Size((experts, k, n) if self.transposed else (experts, n, k))

    @property
    def dtype(self) -> torch.dtype:
        """Of the packed bytes: no floating dtype, so that LoRA over them chooses its own."""
        return self.packed.dtype

    @property
    def device(self) -> torch.device:
        """Where the products run: where the packed bytes lie, unless they are offloaded."""
        return self.packed.device if self.keeper is None else self.keeper.device

    def transpose(self, first: int, second: int) -> QuantizedWeight:
        """The record with both dimensions exchanged."""
        return self.quantized_weight().transpose(first, second)

    def decode(self, ids: Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """The named experts as `shape` says; see `QuantizedWeight.decode`."""
        return self.quantized_weight().decode(ids, dtype)

    def forward(self) -> Tensor:
        """The whole stack in bfloat16: for inspection, never on the path of a layer."""
        return self.decode()

    def get_extra_state(self) -> Tensor:
        """What the tensors mean, as bytes of JSON."""
        text = json.dumps({"format": FORMAT, **self.options()}, sort_keys=True)
        return torch.tensor(list(text.encode()), dtype=torch.uint8)

    def set_extra_state(self, state: Tensor) -> None:
        """Refuse tensors of another shape or format.

        Raises:
            ValueError: with what was found and what was expected.
        """
        described, expected = _description(state), self.options()
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
        return ", ".join(f"{name}={value}" for name, value in self.options().items())

    def options(self) -> dict[str, Any]:
        """What makes an empty module again; JSON can hold it."""
        turned = {"transposed": True} if self.transposed else {}
        return {"shape": list(self.stored), **turned, **self.format.options()}

    def _set(self, tensors: dict[str, Tensor]) -> None:
        self._names = tuple(tensors)
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.detach(), False))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedExperts:
        """Follow a change of device; every tensor keeps its dtype."""
        if self.keeper is not None:
            return self  # offloaded tensors stay in host memory

        def keep_dtype(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(keep_dtype, recurse)


def _zeros(layout: Layout, device: torch.device | str | None) -> dict[str, Tensor]:
    return {
        name: torch.zeros(size, dtype=dtype, device=device)
        for name, (size, dtype) in layout.items()
    }


class _Writer:
    """Packs experts as they come; a unit that straddles two of them waits for the second."""

    def __init__(
        self, format: Format, stored: tuple[int, int, int], device: torch.device | str
    ) -> None:
        self.format, self.stored, self.device = format, stored, device
        self.tensors = _zeros(format.unfinished(stored), device)
        self.count = 0
        self.written = 0  # elements
        self.waiting: Tensor | None = None  # the last elements, less than a unit

    def add(self, expert: Tensor) -> None:
        experts, *shape = self.stored
        if self.count == experts or list(expert.shape) != shape:
            raise ValueError(
                f"expert {self.count} has shape {tuple(expert.shape)}; expected {experts} experts "
                f"of shape {tuple(shape)}"
            )
        self.count += 1
        flat = expert.detach().to(self.device).reshape(-1)
        if self.waiting is not None:
            flat = torch.cat((self.waiting, flat))
        unit = self.format.unit(self.stored)
        whole = flat.numel() // unit * unit
        self._write(flat[:whole])
        # A slice would keep the expert alive.
        self.waiting = flat[whole:].clone() if whole < flat.numel() else None

    def close(self) -> dict[str, Tensor]:
        if self.count != self.stored[0]:
            raise ValueError(f"experts holds {self.count} of {self.stored[0]} experts")
        if self.waiting is not None:
            self._write(self.waiting)
        return self.format.finish(self.tensors)

    def _write(self, flat: Tensor) -> None:
        with torch.no_grad():
            self.format.write(self.tensors, self.stored, self.written, flat.contiguous())
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
