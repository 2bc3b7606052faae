"""Optimizer state that lives in host memory and visits the device for the batch that needs it.

    stream "in"        host -> slot       for the next batches, as far as slots are free
    current stream     momentum, orthogonalization, update of the present batch, on its slot
    stream "out"       slot -> host       of the batches before

A chunk of matrices that ranks share has its momentum here for its first stage, before its gather.
Three slots per device, as large as the batches that take turns in them, stand in a fixed place:
only streams wait for each other, never the host, so that memory stays bounded however far the host
runs ahead. State in host memory is row-major, in pinned memory for CUDA devices, so that every
piece of a parameter is a few contiguous runs. On other devices all copies are made at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ..base import GroupedOptimizer
from ..groups.parameters import local
from ..plan import BATCH_BYTES, AdamWWork, Chunk, Member, State
from ..sharded.chunks import Held, SharedChunk
from .slots import RESIDUAL, host_zeros, travels

SLOTS = 3  # one arriving, one in use, one leaving
ALIGNMENT = 256  # of the pieces in a slot, in bytes


@dataclass(frozen=True, eq=False)
class Rows:
    """A run of rows of a parameter that AdamW updates: a large table travels in parts."""

    param: Tensor
    rows: tuple[int, int] | None = None  # (start, length); None: all
    last: bool = True

    @property
    def device(self) -> torch.device:
        return self.param.device

    @property
    def first(self) -> int:
        """Number of the first element in the parameter, row-major."""
        return 0 if self.rows is None else self.rows[0] * self.param[0].numel()

    def view(self, tensor: Tensor) -> Tensor:
        return tensor if self.rows is None else tensor.narrow(0, *self.rows)


@dataclass(eq=False)
class Part:
    """A run of state in host memory, and its place in the slot."""

    param: Tensor
    key: str
    piece: Any  # chunks.Piece, Rows or Held
    host: Tensor  # a view
    place: Tensor  # row-major, of the same shape

    def copy(self, *, to_host: bool) -> None:
        target, source = (self.host, self.place) if to_host else (self.place, self.host)
        for one, other in zip(_runs(target, self.host), _runs(source, self.host), strict=True):
            one.copy_(other, non_blocking=True)


def _runs(tensor: Tensor, host: Tensor) -> Iterator[Tensor]:
    """The tensor, cut where the view of host memory is not contiguous: only such copies overlap."""
    if host.is_contiguous():
        yield tensor
    else:
        for part, of_host in zip(tensor.unbind(), host.unbind(), strict=True):
            yield from _runs(part, of_host)


@dataclass(eq=False)
class Work:
    """A batch: a chunk of matrices, or what AdamW steps together."""

    params: tuple[Tensor, ...]
    pieces: tuple[Any, ...]  # parallel: chunks.Piece, Rows or Held
    slot: int
    parts: list[Part] = field(default_factory=list)

    def sizes(self, state: Mapping[Tensor, dict[str, Tensor]]) -> list[tuple[int, str, Tensor]]:
        """(index, key, view of host memory) of all state that travels."""
        found = []
        for index, (param, piece) in enumerate(zip(self.params, self.pieces, strict=True)):
            for key, value in state[param].items():
                # Ranks that share a matrix need its residual when the answer is there, much later.
                if travels(param, key, value) and (key != RESIDUAL or type(piece) is not Held):
                    found.append((index, key, piece.view(local(value))))
        return found


class Slot:
    """A buffer on the device, and who is in it."""

    def __init__(self) -> None:
        self.buffer: Tensor | None = None
        self.active: list[Part] | None = None  # None: free
        self.arrived: Any = None  # events
        self.left: Any = None


class Lane:
    """The traffic of one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.slots = [Slot() for _ in range(SLOTS)]
        self.waiting: list[Work] = []  # batches of this step that have not started to arrive
        self.cuda = device.type == "cuda"
        if self.cuda:
            self.inward, self.outward = torch.cuda.Stream(device), torch.cuda.Stream(device)

    def allocate(self, sizes: Sequence[int]) -> None:
        """Make the slots as large as their largest batch."""
        self.wait()
        for slot, size in zip(self.slots, sizes, strict=True):
            slot.buffer = None
            slot.buffer = torch.empty(size, dtype=torch.uint8, device=self.device)
        if self.cuda:  # the memory may still be in use by kernels that were launched before
            self.inward.wait_stream(torch.cuda.current_stream(self.device))

    def begin(self, works: list[Work]) -> None:
        """Forget what a step left behind that was refused, and let the first batches arrive."""
        if self.cuda:
            self.inward.wait_stream(self.outward)  # of the last step: the same host memory
            if any(slot.active is not None for slot in self.slots):
                self.inward.wait_stream(torch.cuda.current_stream(self.device))
        for slot in self.slots:
            slot.active = None
        self.waiting = works
        self._fetch()

    def _fetch(self) -> None:
        """Start the transfers of the next batches, in their order, while slots are free."""
        while self.waiting and self.slots[self.waiting[0].slot].active is None:
            work = self.waiting.pop(0)
            slot = self.slots[work.slot]
            slot.active = [part for part in work.parts if part.param.grad is not None]
            if not self.cuda:
                for part in slot.active:
                    part.copy(to_host=False)
                continue
            with torch.cuda.stream(self.inward):
                if slot.left is not None:
                    self.inward.wait_event(slot.left)
                for part in slot.active:
                    part.copy(to_host=False)
                slot.arrived = self.inward.record_event()

    def enter(self, work: Work) -> None:
        """Let the current stream wait for the batch."""
        assert self.slots[work.slot].active is not None and work not in self.waiting
        if self.cuda:
            torch.cuda.current_stream(self.device).wait_event(self.slots[work.slot].arrived)

    def leave(self, work: Work) -> None:
        """Start to write the batch back, and the transfers that its slot was waited for."""
        slot = self.slots[work.slot]
        assert slot.active is not None
        if self.cuda:
            self.outward.wait_stream(torch.cuda.current_stream(self.device))
            with torch.cuda.stream(self.outward):
                for part in slot.active:
                    part.copy(to_host=True)
                slot.left = self.outward.record_event()
        else:
            for part in slot.active:
                part.copy(to_host=True)
        slot.active = None
        self._fetch()

    def wait(self) -> None:
        """Let the host wait until everything is in host memory."""
        if self.cuda:
            self.inward.synchronize()
            self.outward.synchronize()


class InHostMemory:
    """The `OnDevice` of state in host memory."""

    def __init__(self) -> None:
        self._state: State = {}
        self._plan: Any = None
        self._lanes: dict[torch.device, Lane] = {}
        self._works: dict[Any, tuple[Lane, Work]] = {}  # by identity of the batch
        self._groups: list[list[tuple[Rows, ...]]] = []  # AdamW batches per group
        self._hosted: list[Tensor] = []
        self._here: dict[tuple[Tensor, str, Any], Tensor] = {}

    def begin(self, plan: Any, adamw: Sequence[Sequence[Tensor]], state: State) -> InHostMemory:
        """Start a step, which takes the chunks of the plan in order; `adamw`: per group its share.

        Raises:
            RuntimeError: a CUDA graph is being captured.
        """
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a step whose state is in host memory cannot be captured in a CUDA graph; call "
                "turn_off_cpu_offload() before the capture"
            )
        hosted = [
            value
            for group in plan.labelled
            for _, param in group
            for key, value in state[param].items()
            if travels(param, key, value)
        ]
        moved = len(hosted) != len(self._hosted) or any(
            one is not other for one, other in zip(hosted, self._hosted, strict=True)
        )
        if plan is not self._plan or moved or state is not self._state:
            self._state, self._plan, self._hosted = state, None, hosted
            self._arrange(plan, adamw)
            self._plan = plan  # if there is memory for all of it
        for device, lane in self._lanes.items():
            works = [work for of, work in self._works.values() if of.device == device]
            lane.begin([work for work in works if any(p.grad is not None for p in work.params)])
        return self

    @torch.inference_mode(False)  # later steps, outside of it, write to these views
    @torch.no_grad()
    def _arrange(self, plan: Any, adamw: Sequence[Sequence[Tensor]]) -> None:
        """Batches in the order of the step, their slots, and the place of every piece in these."""
        self.wait()
        self._works, self._here, self._lanes = {}, {}, {}
        self._groups = [self._batched(params) for params in adamw]
        own = [
            batch
            for batches, chunks in zip(self._groups, plan.chunks, strict=True)
            for batch in (*batches, *chunks)
        ]
        for batch in plan.shared.in_order(own):
            self._add(batch)
        for lane in self._lanes.values():
            works = [work for of, work in self._works.values() if of is lane]
            layouts = [_layout(work.sizes(self._state)) for work in works]
            sizes = [0] * SLOTS
            for work, (_, size) in zip(works, layouts, strict=True):
                sizes[work.slot] = max(sizes[work.slot], size)
            lane.allocate(sizes)
            for work, (places, _) in zip(works, layouts, strict=True):
                self._place(work, lane.slots[work.slot].buffer, places)

    def _add(self, batch: Any) -> None:
        if isinstance(batch, SharedChunk):
            pairs = [(batch.members[held.job].param, held) for held in batch.held]
        elif isinstance(batch, Chunk):
            pairs = [(member.param, member.piece) for member in batch.members]
        else:
            pairs = [(part.param, part) for part in batch]
        device = batch[0].device if isinstance(batch, tuple) else batch.device
        params, pieces = ([pair[i] for pair in pairs] for i in range(2))
        if device not in self._lanes:
            self._lanes[device] = Lane(device)
        lane = self._lanes[device]
        number = sum(1 for of, _ in self._works.values() if of is lane)
        self._works[id(batch)] = lane, Work(tuple(params), tuple(pieces), slot=number % SLOTS)

    def _place(self, work: Work, buffer: Tensor, places: Sequence[tuple[Any, int]]) -> None:
        for (index, key, host), offset in places:
            size = host.numel() * host.element_size()
            place = buffer[offset : offset + size].view(host.dtype).view(host.shape)
            param, piece = work.params[index], work.pieces[index]
            work.parts.append(Part(param, key, piece, host, place))
            self._here[param, key, piece] = place

    def _batched(self, params: Sequence[Tensor]) -> list[tuple[Rows, ...]]:
        """Parameters of one device, or rows of them, in batches of at most BATCH_BYTES of state."""
        batches: list[list[Rows]] = []
        room: dict[torch.device, int] = {}
        latest: dict[torch.device, list[Rows]] = {}
        for param in params:
            held = [v for key, v in self._state[param].items() if travels(param, key, v)]
            size = sum(local(value).numel() * value.element_size() for value in held)
            parts = _in_rows(param, size)
            for part in parts:
                if size // len(parts) > room.get(param.device, -1):
                    latest[param.device], room[param.device] = [], BATCH_BYTES
                    batches.append(latest[param.device])
                latest[param.device].append(part)
                room[param.device] -= size // len(parts)
        return [tuple(batch) for batch in batches]

    def batches(self, number: int) -> list[Any]:
        batches = self._groups[number]
        return [b for b in batches if any(part.param.grad is not None for part in b)]

    def device_of(self, batch: Sequence[Rows]) -> torch.device:
        return batch[0].device

    def enter(self, work: Any) -> None:
        lane, of_lane = self._works[id(work)]
        lane.enter(of_lane)

    def leave(self, work: Any) -> None:
        lane, of_lane = self._works[id(work)]
        lane.leave(of_lane)

    def piece(self, member: Member, key: str) -> Tensor:
        return self._here[member.param, key, member.piece]

    def pieces(self, chunk: Chunk, key: str) -> list[Tensor]:
        return [self.piece(member, key) for member in chunk.members]

    def boxes(self, chunk: SharedChunk, here: Sequence[Held], key: str) -> list[Tensor]:
        pairs = zip(chunk.params_of(here), here, strict=True)
        return [self._here[param, key, held] for param, held in pairs]

    def adamw(self, batch: Sequence[Rows], *, usual: bool) -> AdamWWork:
        parts = [part for part in batch if part.param.grad is not None]
        return AdamWWork(
            params=[part.param for part in parts],
            tensors=[part.view(local(part.param)) for part in parts],
            grads=[part.view(local(part.param.grad)) for part in parts],
            states=[self._state_of(part) for part in parts],
            first=[part.first for part in parts],
        )

    def _state_of(self, part: Rows) -> dict[str, Tensor]:
        state = self._state[part.param]
        here = {key: self._here.get((part.param, key, part)) for key in state}
        found = {key: local(state[key]) if v is None else v for key, v in here.items()}
        if not part.last:  # every part counts from the same step, the last one for all
            found["step"] = found["step"].clone()
        return found

    def wait(self) -> None:
        """Let the host wait until all state is in host memory."""
        for device, lane in self._lanes.items():
            if lane.cuda:  # on whose current stream residuals of shared matrices travel
                torch.cuda.current_stream(device).synchronize()
            lane.wait()


def _in_rows(param: Tensor, size: int) -> list[Rows]:
    """A parameter in parts of at most BATCH_BYTES of state, by sixteens of rows.

    Sixteen rows are a multiple of 16 bytes in every dtype, so that all parts stay aligned.
    """
    rows = local(param).shape[0] if param.ndim else 1
    if size <= BATCH_BYTES or rows <= 16:
        return [Rows(param)]
    step = max(BATCH_BYTES * rows // size // 16 * 16, 16)
    starts = range(0, rows, step)
    return [
        Rows(param, (start, min(step, rows - start)), last=start == starts[-1]) for start in starts
    ]


def _layout(sizes: Sequence[tuple[int, str, Tensor]]) -> tuple[list[tuple[Any, int]], int]:
    """The offset of every piece in its slot, and their sum, in bytes."""
    places, offset = [], 0
    for entry in sizes:
        places.append((entry, offset))
        offset += -(-entry[2].numel() * entry[2].element_size() // ALIGNMENT) * ALIGNMENT
    return places, offset


class OffloadingOptimizer(GroupedOptimizer):
    """Groups whose state is beside the parameters or, all of it, in host memory."""

    _host: InHostMemory | None = None

    @property
    def offloaded(self) -> bool:
        """Whether the state is in host memory."""
        return self._host is not None

    def check_offload(self) -> None:
        """Raise ValueError if this state cannot be in host memory."""

    def turn_on_cpu_offload(self) -> None:
        """Move the state to host memory at once, and keep it there between the steps.

        A step brings the state of a batch to the device while the batch before it is computed, and
        takes it back while the next one is: no bit of a run changes. What is small, step counts and
        factored second moments, stays on the device. `state` then holds host tensors (pinned, for
        CUDA), which `state_dict` gives out and `load_state_dict` fills, without a way round by the
        device. Calling it again changes nothing. It waits for the device once.

        Raises:
            ValueError: the ranks keep a part of the state each; nothing has changed.
        """
        if self._host is not None:
            return
        self.check_offload()
        self._move(host_zeros)
        self._host = InHostMemory()

    def turn_off_cpu_offload(self) -> None:
        """Bring the state back beside the parameters. Calling it again changes nothing.

        It waits for the device once. If its memory does not suffice, everything stays as it was.
        """
        if self._host is None:
            return
        self._host.wait()
        self._move(lambda param, dtype: torch.zeros_like(param, dtype=dtype, requires_grad=False))
        self._host = None

    def state_dict(self) -> dict[str, Any]:
        """As without offload; tensors that are offloaded are given out as they are, on the host."""
        if self._host is not None:
            self._host.wait()
        return super().state_dict()

    def __getstate__(self) -> dict[str, Any]:
        if self._host is not None:
            self._host.wait()
        return {**super().__getstate__(), "in_host_memory": self.offloaded}

    def __setstate__(self, state: dict[str, Any]) -> None:
        offloaded = state.pop("in_host_memory", None)  # absent where a state_dict is loaded
        super().__setstate__(state)
        if offloaded is not None:
            self._host = InHostMemory() if offloaded else None
        if offloaded:  # a copy has pageable tensors, with which transfers would not overlap
            self._move(host_zeros)

    @torch.no_grad()
    def _move(self, place: Callable[[Tensor, torch.dtype], Tensor]) -> None:
        """Copy all state that offload moves to new tensors, made of a parameter and a dtype."""
        moved = {}
        for group in self.param_groups:
            for param in group["params"]:
                for key, value in self.state.get(param, {}).items():
                    if travels(param, key, value):
                        moved[param, key] = place(param, value.dtype)
                        local(moved[param, key]).copy_(local(value), non_blocking=True)
        _wait_for({param.device for param, _ in moved})
        for (param, key), value in moved.items():
            self.state[param][key] = value


def _wait_for(devices: set[torch.device]) -> None:
    for device in devices:
        if device.type == "cuda":
            torch.cuda.synchronize(device)
