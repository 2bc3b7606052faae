"""ExpertOffload: 4-bit experts that live in host memory and visit the device, two layers at a time.

    stream "copy"      host -> slot       the layer that comes next
    current stream     the layer in use, on the other slot

Nothing is hooked. A product over offloaded experts asks for them when it is launched, forward,
backward or recomputed under gradient checkpointing alike; the first one of a layer also starts the
copy of the layer that is expected next. Two slots, as large as the largest layer, stand in a fixed
place, and streams wait for each other, never the host. What follows what is learned from the last
time: forward goes up, backward down, evaluation starts again at the first layer. A wrong guess
costs the time of one copy and nothing else.
"""

from __future__ import annotations

import dataclasses
import math
import threading
from typing import Any

import torch
from torch import Tensor, nn

from .expert_weights import QuantizedWeight, check_module
from .quantized_experts import QuantizedExperts

ALIGNMENT = 256  # of the tensors in a slot, in bytes
SLOTS = 2  # one in use, one arriving


@dataclasses.dataclass(frozen=True, eq=False)
class OffloadedWeight(QuantizedWeight):
    """A `QuantizedWeight` whose tensors lie in host memory; its products use the device's copy.

    Autograd keeps it for backward: it pins no slot, and fetches the experts again.
    """

    module: QuantizedExperts | None = None

    @property
    def device(self) -> torch.device:
        """Where the products run."""
        return self.module.device

    def here(self) -> QuantizedWeight:
        """The stack on the device, to be used by what is launched next."""
        keeper = self.module.keeper
        stack = self.module.quantized_weight() if keeper is None else keeper.fetch(self.module)
        return dataclasses.replace(stack, transposed=self.transposed)

    def to(self, target: torch.device | torch.dtype | str) -> QuantizedWeight:
        """On another device than the one of the products, from host memory."""
        if isinstance(target, torch.dtype) or torch.device(target) == self.device:
            return self
        fields = {name: value for name, value in vars(self).items() if name != "module"}
        return QuantizedWeight(**fields).to(target)

    def operands(self) -> tuple:
        """As `QuantizedWeight.operands`, on the device."""
        return self.here().operands()

    def decode(self, ids: Tensor | None = None, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """As `QuantizedWeight.decode`, on the device."""
        return self.here().decode(ids, dtype)


@dataclasses.dataclass(eq=False)
class _Layer:
    """The stacks of one experts module, one after the other in one piece of host memory."""

    name: str
    modules: list[QuantizedExperts]
    host: Tensor | None = None  # (bytes,) uint8
    places: list[dict[str, tuple[int, Tensor]]] = dataclasses.field(default_factory=list)

    def lay_out(self) -> int:
        """Where every tensor starts; bytes of the layer."""
        offset, self.places = 0, []
        for module in self.modules:
            places = {}
            for field, tensor in module.named_parameters():
                places[field] = (offset, torch.empty_like(tensor, device="meta"))
                offset += math.ceil(tensor.nbytes / ALIGNMENT) * ALIGNMENT
            self.places.append(places)
        return offset

    def views(self, number: int, buffer: Tensor) -> dict[str, Tensor]:
        """The tensors of a module within a buffer that is laid out like the layer."""
        return {
            field: buffer[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
            for field, (offset, like) in self.places[number].items()
        }


@dataclasses.dataclass(eq=False)
class _Slot:
    """Device memory for one layer."""

    buffer: Tensor  # (bytes,) uint8
    layer: int | None = None
    ready: Any = None  # event: the copy is there
    users: set[Any] = dataclasses.field(default_factory=set)  # streams that wait for `ready`


class ExpertOffload:
    """Keep a model's 4-bit experts in host memory; at most two layers of them are on the device.

    Everything else of the model stays where it is. Results are the same to the bit. While it is on,
    `state_dict` shows the experts in host memory (so saving works), `load_state_dict` loads them
    there, and `model.to(...)` leaves them alone.

    Args:
        model: has `QuantizedExperts`, such as a model of `load_quantized` or after
            `quantize_experts`; a layer is a module that holds some of them.
        device: where they are used; None for where they are. A model that lies in host memory,
            because the device cannot hold its experts, needs it: `device="cuda"`; the rest of the
            model follows with `model.to("cuda")`, which leaves the experts alone.

    Attributes:
        device: the same.
        transfers: layers that were copied to the device so far.
        waits: how many of them were not there when they were needed.

    Raises:
        TypeError: model is no module.
        ValueError: the model has no `QuantizedExperts`, or they are offloaded already, or they lie
            on several devices, on the meta device, or, without `device`, in host memory beside a
            GPU.
    """

    def __init__(self, model: nn.Module, device: torch.device | str | None = None) -> None:
        check_module(model)
        layers: dict[str, _Layer] = {}
        for name, module in model.named_modules():
            if isinstance(module, QuantizedExperts):
                parent = name.rpartition(".")[0]
                layers.setdefault(parent, _Layer(parent, [])).modules.append(module)
        self._layers = list(layers.values())
        self._where = {
            m: (i, j) for i, part in enumerate(self._layers) for j, m in enumerate(part.modules)
        }
        if not self._where:
            raise ValueError(
                f"{type(model).__name__} has no QuantizedExperts to offload; load it with "
                "load_quantized, call quantize_experts, or make them of those of bitsandbytes by "
                "QuantizedExperts.from_quantized(expert_weight(module, name))"
            )
        found = {module.device for module in self._where}
        if device is None and len(found) > 1:
            raise ValueError(f"the experts lie on {sorted(map(str, found))}; pass device=")
        self.device = torch.device(device) if device is not None else found.pop()
        if device is None and self.device.type == "cpu" and torch.cuda.is_available():
            raise ValueError(
                'the experts lie in host memory; pass device="cuda" for products on the GPU, which '
                'gets the rest of the model by model.to("cuda"), or device="cpu" to stay here'
            )
        if self.device.type == "cuda" and self.device.index is None:
            self.device = torch.device("cuda", torch.cuda.current_device())
        self.transfers = self.waits = 0
        self._slots: list[_Slot] = []
        self._copies: Any = None  # stream
        self._lock = threading.RLock()  # backward runs in a thread of autograd's
        self.turn_on()

    @property
    def is_on(self) -> bool:
        """Whether the experts are in host memory."""
        return bool(self._slots)

    @property
    def resident(self) -> tuple[str, ...]:
        """Names of the layers whose experts are on the device or on their way to it."""
        return tuple(self._layers[s.layer].name for s in self._slots if s.layer is not None)

    def turn_on(self) -> None:
        """Move the experts to host memory, layer by layer; does nothing if they are there.

        Raises:
            ValueError: as for the class.
        """
        if self.is_on:
            return
        for module in self._where:
            if module.keeper is not None:
                raise ValueError("these experts are offloaded already; turn the other one off")
            if module.packed.is_meta:
                raise ValueError("the experts are on the meta device; load them first")
        home = {module: module.packed.device for module in self._where}
        try:
            self._to_host()
        except BaseException:  # memory ran out: the model is left as it was
            self._from_host(home)
            raise

    def turn_off(self) -> None:
        """Move the experts to the device; does nothing if they are there.

        Where the device has no room for them, this raises and they stay offloaded.
        """
        if not self.is_on:
            return
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # nothing copies or uses the slots any more
        self._slots, self._copies = [], None  # first: their room may be needed
        try:
            self._from_host(dict.fromkeys(self._where, self.device))
        except BaseException:
            self._to_host()
            raise

    def _to_host(self) -> None:
        """Move the experts layer by layer, then make the slots: the device need not hold both."""
        pinned = self.device.type == "cuda"
        sizes = [layer.lay_out() for layer in self._layers]
        for layer, size in zip(self._layers, sizes, strict=True):
            if layer.host is None:
                layer.host = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
            for number, module in enumerate(layer.modules):
                self._keep(module, layer.views(number, layer.host))
                module.keeper = self
        count = min(SLOTS, len(self._layers))
        self._slots = [
            _Slot(torch.empty(max(sizes), dtype=torch.uint8, device=self.device))
            for _ in range(count)
        ]
        self._copies = torch.cuda.Stream(self.device) if pinned else None
        self._before: int | None = None  # the layer that was in use before the present one
        self._now: int | None = None
        self._next: dict[tuple[int | None, int], int] = {}
        if pinned:
            self._copies.wait_stream(torch.cuda.current_stream(self.device))

    def _from_host(self, home: dict[QuantizedExperts, torch.device]) -> None:
        """Give the experts back to the devices named; host memory is kept where that fails."""
        for module, device in home.items():
            module.keeper = None
            module.to(device)
        for layer in self._layers:
            layer.host = None

    @torch.compiler.disable  # which slot holds a layer changes: no graph may be told of one
    def record(self, module: QuantizedExperts, host: QuantizedWeight) -> OffloadedWeight:
        """What `module.quantized_weight()` gives while it is on."""
        return OffloadedWeight(**vars(host), module=module)

    @torch.compiler.disable
    def fetch(self, module: QuantizedExperts) -> QuantizedWeight:
        """The stack on the device, for what the caller launches next on the current stream."""
        index, number = self._where[module]
        with self._lock:
            if self._copies is not None and torch.cuda.is_current_stream_capturing():
                raise RuntimeError(
                    "offloaded experts cannot be captured in a CUDA graph; call turn_off() first"
                )
            slot = self._use(index)
            if self._copies is not None:
                stream = torch.cuda.current_stream(self.device)
                if stream not in slot.users:
                    stream.wait_event(slot.ready)
                    slot.users.add(stream)
            tensors = self._layers[index].views(number, slot.buffer)
            return QuantizedWeight(
                module.format, tensors, module.stored, module.transposed, module.strategy
            )

    def before_loading(self) -> None:
        """Called by `QuantizedExperts` before a state dict is written to host memory."""
        if self._copies is not None:
            self._copies.synchronize()

    def after_loading(self, module: QuantizedExperts) -> None:
        """Called by `QuantizedExperts` with new values: what is on the device is out of date."""
        index, number = self._where[module]
        self._keep(module, self._layers[index].views(number, self._layers[index].host))
        for slot in self._slots:
            slot.layer = None if slot.layer == index else slot.layer

    def __reduce__(self) -> Any:
        raise RuntimeError(
            "offloaded experts are neither copied nor pickled: save its state_dict, or turn_off()"
        )

    def _use(self, index: int) -> _Slot:
        """The slot of a layer that is needed now; the next one sets out."""
        slot = self._slot_of(index)
        if index == self._now and slot is not None:
            return slot
        if slot is None:
            self.waits += 1
            slot = self._copy(index, spare=self._now)
        if index != self._now:
            if self._now is not None:
                self._next[self._before, self._now] = index
            self._before, self._now = self._now, index
        following = self._expected()
        if following is not None and self._slot_of(following) is None and len(self._slots) > 1:
            self._copy(following, spare=index)
        return slot

    def _expected(self) -> int | None:
        """The layer that followed the last two the last time; before that, the next one."""
        known = self._next.get((self._before, self._now))
        if known is not None:
            return known
        step = -1 if self._before is not None and self._before > self._now else 1
        following = self._now + step
        return following if 0 <= following < len(self._layers) else None

    def _slot_of(self, index: int) -> _Slot | None:
        return next((slot for slot in self._slots if slot.layer == index), None)

    def _copy(self, index: int, spare: int | None) -> _Slot:
        """Start the copy of a layer to a slot, but not over the layer `spare`."""
        slot = next((s for s in self._slots if s.layer is None), None)
        if slot is None:
            slot = next((s for s in self._slots if s.layer != spare), self._slots[0])
        host = self._layers[index].host
        target = slot.buffer[: host.numel()]
        self.transfers += 1
        slot.layer = index
        if self._copies is None:
            target.copy_(host)
            return slot
        for user in slot.users:  # what they have been given so far reads the old layer
            self._copies.wait_event(user.record_event())
        slot.users.clear()
        with torch.cuda.stream(self._copies):
            target.copy_(host, non_blocking=True)
        slot.ready = self._copies.record_event()
        return slot

    def _keep(self, module: QuantizedExperts, places: dict[str, Tensor]) -> None:
        """Make the module's parameters views of host memory, with their values."""
        for field, place in places.items():
            value = getattr(module, field)
            if value.data_ptr() != place.data_ptr():
                place.copy_(value.detach())
                module.register_parameter(field, nn.Parameter(place, False))
