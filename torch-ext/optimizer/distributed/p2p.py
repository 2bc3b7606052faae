"""The transport that writes messages straight into the memory of their receivers.

It has the bits of an all-to-all and takes no multiprocessor: copy engines move the parts of a
message into the slot that the receiver reads its batch from. All ranks of a group take and free
slots in the same order, so each knows where the others receive.
"""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .arena import Arena, Done
from .message_layout import Message


class Slots:
    """The slots of every rank of a group.

    One may be written again once its owner has read it. The owner says so with the signal of its
    next exchange, which everyone waits for anyway: no message travels for it. `launched` is how
    many exchanges the arena has begun.
    """

    def __init__(self, count: int, launched: int = 0) -> None:
        self.count = count
        self._free: deque[int] = deque(range(count))
        self._freed = [launched] * count  # per slot, how many were launched when it was freed

    def begin(self, launched: int) -> None:
        """Start a step, which takes the slots in the order of the step before: all are free."""
        for slot in set(range(self.count)) - set(self._free):  # of a step that failed
            self._freed[slot] = launched
        self._free = deque(range(self.count))

    def take(self) -> int | None:
        """A slot that nobody has here; None if there is none."""
        return self._free.popleft() if self._free else None

    def is_read(self, slot: int, launched: int) -> bool:
        """Whether the next exchange may write the slot on every rank.

        Its owner freed it after exchange c, as the signal of its exchange c + 1 says. Whoever
        launches exchange n has waited for the signals of exchange n - 1.
        """
        return self._freed[slot] < launched

    def free(self, slot: int, launched: int) -> None:
        """All reads of a slot are queued here."""
        self._freed[slot] = launched
        self._free.append(slot)


@dataclass(frozen=True, eq=False)
class Lease:
    """A slot of this rank while a message is in it."""

    slot: int
    bytes: Tensor  # the message: uint8
    owner: PeerToPeer

    def give(self) -> None:
        """What is in it has been used."""
        self.owner.give(self.slot)


@dataclass(eq=False)
class _Kept:
    """What is kept of a message that comes here, and of what this rank sends with it."""

    offsets: Sequence[int]  # as of `PeerToPeer`
    copies: dict[tuple[int, int], tuple[Any, ...]] = field(default_factory=dict)  # slot, outbox
    places: dict[int, tuple[list[int], list[Tensor]]] = field(default_factory=dict)  # by slot
    time: _Time | None = None  # of the last exchange
    without: bool = False  # no slot was free
    in_place: bool = False  # this rank sent parts from where they are
    early: bool = False  # exchanged in backward


class PeerToPeer:
    """Exchanges over an arena.

    Args:
        arena: after its handshake.
        offsets: id of a message that comes here -> per rank where in its message of the same
            exchange begins what this rank sends. Of those exchanges that go this way.
    """

    name = "p2p"

    def __init__(self, arena: Arena, offsets: Mapping[int, Sequence[int]]) -> None:
        self.arena = arena
        self._kept = {message: _Kept(of_message) for message, of_message in offsets.items()}
        used = arena.launched if arena.launched > 1 else 0  # by more than its handshake
        self.slots = Slots(arena.slots, used)
        self._views: dict[tuple[int, int], Tensor] = {}
        self._slot_of: dict[int, int] = {}  # id of a view
        self.barriers = 0  # exchanges that only said that a slot was read

    def follow(self, renamed: Mapping[int, int]) -> None:
        """Take other messages in the place of those before, whose ids are given with the new."""
        self._kept = {renamed[key]: _Kept(found.offsets) for key, found in self._kept.items()}

    def inbox(self, coming: Message) -> Lease | None:
        """A slot for a message; None if it goes another way, or none is free."""
        if not self.moves(coming):
            return None
        slot = self.slots.take()
        if slot is None:
            self._kept[id(coming)].without = True
            return None
        view = self._views.get((slot, coming.size))
        if view is None:
            view = self.arena.slot(self.arena.rank, slot)[: coming.size]
            self._views[slot, coming.size] = view
            self._slot_of[id(view)] = slot
        return Lease(slot, view, self)

    @property
    def alive(self) -> Tensor:
        return self.arena.alive()

    def moves(self, coming: Message) -> bool:
        """Whether a message that comes here goes this way."""
        return id(coming) in self._kept

    def why_not(self, coming: Message) -> str | None:
        """Why a message that moves this way did not; None if it did."""
        if self._kept[id(coming)].without:
            return f"no slot was free: slots={self.slots.count} are fewer than a step needs"
        return None

    def how(self, coming: Message) -> str:
        """What a report adds of a message: how this rank sent it."""
        kept = self._kept[id(coming)]
        place = "; pushed from where it lies" if kept.in_place else ""
        return place + ("; begun in backward" if kept.early else "")

    def milliseconds(self, coming: Message) -> float | None:
        """How long its last exchange took, if it has ended."""
        time = self._kept[id(coming)].time
        return None if time is None else time.milliseconds()

    def takes(self, coming: Message, inbox: Tensor) -> bool:
        """Whether it exchanges what comes into an inbox: one of its slots."""
        return id(inbox) in self._slot_of

    def give(self, slot: int) -> None:
        self.slots.free(slot, self.arena.launched)

    def begin(self, *, early: bool) -> None:
        """Start a step: all slots are free, and nothing of one that failed is still read."""
        if early:
            self.arena.note_status()
        self.slots.begin(self.arena.launched)
        self.arena.order()

    def begin_early(self, coming: Message) -> None:
        """A message is exchanged in backward."""
        self._kept[id(coming)].early = True

    def exchange(
        self, going: Message, outbox: Tensor | Sequence[Tensor], coming: Message, inbox: Tensor
    ) -> Done:
        """Push what this rank sends, and wait for what it receives. See `GroupTransport`."""
        slot, kept = self._slot_of[id(inbox)], self._kept[id(coming)]
        if not self.slots.is_read(slot, self.arena.launched):
            self.barriers += 1
            self.arena.exchange([], [], None, inbox[:0])
        if isinstance(outbox, Tensor):
            key = slot, outbox.data_ptr()
            if key not in kept.copies:
                kept.copies[key] = self._copies_of(going, outbox, kept.offsets, slot)
            copies = kept.copies[key]
        else:
            copies = self._pushes_of(going, outbox, kept, slot)
        if kept.time is None:
            kept.time = _Time(inbox.device)
        return self.arena.exchange(*copies, inbox, kept.time)

    def _pushes_of(
        self, going: Message, parts: Sequence[Tensor], kept: _Kept, slot: int
    ) -> tuple[list[Tensor], list[Tensor], None]:
        """Targets and sources of the parts of a message, from where they are."""
        if not parts:
            return [], [], None
        kept.in_place = True
        if slot not in kept.places:
            arena, ends = self.arena, going.ranks()
            first = [0, *itertools.accumulate(going.counts)]
            shift = [kept.offsets[rank] - first[rank] for rank in range(arena.ranks)]
            turn = {rank: number for number, rank in enumerate(arena.others())}
            order = sorted(range(len(ends)), key=lambda k: turn[ends[k]])
            targets = []
            for k in order:
                part, rank = going.parts[k], ends[k]
                place = slice(part.start + shift[rank], part.stop + shift[rank])
                flat = arena.slot(rank, slot)[place].view(parts[k].dtype)
                targets.append(flat.view(parts[k].shape))
            kept.places[slot] = order, targets
        order, targets = kept.places[slot]
        return targets, [parts[k] for k in order], None

    def _copies_of(
        self, going: Message, outbox: Tensor, there: Sequence[int], slot: int
    ) -> tuple[Any, ...]:
        """Targets and sources of other ranks, and the pair that stays."""
        arena = self.arena
        first = [0, *itertools.accumulate(going.counts)]

        def pair(rank: int) -> tuple[Tensor, Tensor]:
            size, source = going.counts[rank], outbox[first[rank] : first[rank + 1]]
            if going.matrices is None:
                return arena.slot(rank, slot)[there[rank] : there[rank] + size], source
            # Rows of this rank in the batch of the owner: (B, bytes), every matrix at a distance.
            source = source.view(going.matrices[rank], -1)
            batch = arena.slot(rank, slot)[: size * arena.ranks]
            return batch.view(len(source), arena.ranks, -1)[:, arena.rank], source

        pairs = [pair(rank) for rank in arena.others() if going.counts[rank]]
        own = pair(arena.rank) if going.counts[arena.rank] else None
        return [target for target, _ in pairs], [source for _, source in pairs], own

    def close(self) -> None:
        """The arena stays, which may serve the next plan."""

    def check(self) -> None:
        """Raise RuntimeError if an exchange gave up waiting; waits for what was launched."""
        late = self.arena.late_rank()
        if late is not None:
            raise RuntimeError(
                f"rank {late} of the group did not arrive at an exchange within "
                f"{self.arena.timeout_ms} ms (timeout_ms of DistributedConfig), or had given up "
                "itself. Parameters are as they were before or after this step; load a state_dict "
                "before going on"
            )


class _Time:
    """How long the last exchange of a message took."""

    def __init__(self, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if cuda else None
        self._seconds = [0.0, 0.0]

    def note(self, end: int) -> None:
        if self._events is None:
            self._seconds[end] = time.perf_counter()
        else:
            self._events[end].record()

    def milliseconds(self) -> float | None:
        """None where it has not ended yet."""
        if self._events is None:
            return 1e3 * (self._seconds[1] - self._seconds[0])
        start, end = self._events
        return start.elapsed_time(end) if end.query() else None
