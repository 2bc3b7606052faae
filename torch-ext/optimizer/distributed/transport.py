"""The only place of the step that communicates.

A transport moves the messages of a route and returns futures. All ranks of a team make the same
calls in one order. `AllToAll` serves NCCL and gloo, `Identity` a rank alone. `GroupTransport` is
that of a team: collectives, or what `settle` has chosen for the exchanges of a plan.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, distributed

from .arena import Arena, SymmetricMemory, arena_bytes, digest, no_peers, why_not_shared
from .choose_transport import (
    Planned,
    Row,
    Sizes,
    Traffic,
    TransportOptions,
    predicted_ms,
    refuse,
    why_not_auto,
)
from .message_layout import Message
from .nccl_ce import CopyEngineCollectives, why_not_copy_engines, why_not_here
from .p2p import Lease, PeerToPeer


@dataclass(frozen=True, eq=False)
class Future:
    """A tensor that a collective writes, or one that is here already."""

    tensor: Tensor
    work: Any = None  # the collective
    read: Tensor | Sequence[Tensor] | None = None  # what it reads, which stays alive with it

    def wait(self) -> Tensor:
        """The tensor; on CUDA the current stream waits for it, the host does not."""
        if self.work is not None:
            self.work.wait()
        return self.tensor


class Identity:
    """The transport of a single rank: what is sent has arrived."""

    alive: Tensor | None = None

    def settle(self, traffic: Traffic, options: TransportOptions, *, together: bool) -> None:
        """Nothing travels."""

    def begin(self, *, early: bool = False) -> None:
        """Start a step."""

    def inbox(self, coming: Message) -> Lease | None:
        return None

    def check(self) -> None:
        """Nobody is waited for."""

    def report(self) -> list[Row]:
        return []

    def pushes(self, coming: Message) -> bool:
        return False

    def exchange(self, going: Message, outbox: Any, coming: Message, inbox: Tensor) -> Future:
        return Future(outbox)

    def maximum(self, values: Tensor) -> Future:
        return Future(values)

    def sum(self, values: Tensor) -> Future:
        return Future(values)

    def collect(self, values: Tensor, found: Tensor) -> Future:
        return Future(found.copy_(values.unsqueeze(0)))


class AllToAll:
    """One `all_to_all_single` each way, over NCCL or gloo, with nothing padded but to 16 bytes."""

    def __init__(self, group: Any) -> None:
        self.group = group

    def exchange(self, going: Message, outbox: Tensor, coming: Message, inbox: Tensor) -> Future:
        """What this rank sends to all others and receives from them: a gather or a scatter."""
        sizes = [*coming.counts], [*going.counts]
        work = distributed.all_to_all_single(inbox, outbox, *sizes, group=self.group, async_op=True)
        return Future(inbox, work, outbox)

    def maximum(self, values: Tensor) -> Future:
        """The largest of every rank's values, element by element, in place."""
        return self._reduce(values, distributed.ReduceOp.MAX)

    def sum(self, values: Tensor) -> Future:
        """The sum of every rank's values, element by element, in place; equal on all ranks."""
        return self._reduce(values, distributed.ReduceOp.SUM)

    def collect(self, values: Tensor, found: Tensor) -> Future:
        """Every rank's values, in the order of the ranks, in `found` (ranks, ...)."""
        # The older of two names: torch 2.11 has no other.
        gather = getattr(distributed, "all_gather_single", distributed.all_gather_into_tensor)
        work = gather(found.view(-1), values.view(-1), group=self.group, async_op=True)
        return Future(found, work, values)

    def _reduce(self, values: Tensor, op: Any) -> Future:
        work = distributed.all_reduce(values, op, group=self.group, async_op=True)
        return Future(values, work)


class GroupTransport(AllToAll):
    """The transport of a process group: collectives, and what was chosen beside them."""

    memory = SymmetricMemory  # where arenas live

    def __init__(self, group: Any) -> None:
        super().__init__(group)
        self._direct: PeerToPeer | CopyEngineCollectives | None = None
        self._arena: Arena | None = None
        self._traffic: Traffic | None = None
        self._device = torch.device("cpu")  # of the messages
        self._options = TransportOptions()  # as all ranks understand them
        self._reasons: dict[int, str] = {}  # of the exchanges of a plan, why they go as they do
        self._setup_ms = 0.0

    # What a step does.

    def pushes(self, coming: Message) -> bool:
        """Whether the parts of a message may be sent from where they are, without an outbox."""
        return isinstance(self._direct, PeerToPeer) and self._direct.moves(coming)

    def exchange(
        self, going: Message, outbox: Tensor | Sequence[Tensor], coming: Message, inbox: Tensor
    ) -> Future:
        """What this rank sends to all others and receives from them: a gather or a scatter.

        `outbox`: the message, or where this transport `pushes`, its parts in their order, none of
        them for this rank itself; without any the exchange takes place, and nothing is sent.
        """
        direct = self._direct
        if direct is None or not direct.takes(coming, inbox):
            message = outbox if isinstance(outbox, Tensor) else packed(going, outbox, inbox)
            return super().exchange(going, message, coming, inbox)
        return Future(inbox, direct.exchange(going, outbox, coming, inbox), outbox)

    def inbox(self, coming: Message) -> Lease | None:
        """Memory for a message that comes here; None where any will do.

        Raises:
            CommUnavailable: no slot is free, and `strict`; on all ranks, whose slots are alike.
        """
        if self._direct is None:
            return None
        lease = self._direct.inbox(coming)
        if lease is None and (reason := self._direct.why_not(coming)) is not None:
            refuse(reason, self._options, self.collectives)
        return lease

    @property
    def alive(self) -> Tensor | None:
        """1 on the device as long as every exchange arrived, else 0; None where that is raised."""
        return None if self._direct is None else self._direct.alive

    def begin(self, *, early: bool = False) -> None:
        """Start a step: all memory is free.

        `early`: in backward. Then the next `check` is of what was launched before, since it would
        wait for the backward passes of other ranks.
        """
        if self._direct is not None:
            self._direct.begin(early=early)

    def check(self) -> None:
        """Raise RuntimeError if a rank was late in what was launched before; waits for that."""
        if self._direct is not None:
            self._direct.check()

    def begin_early(self, coming: Message) -> None:
        """A message is exchanged in backward."""
        assert isinstance(self._direct, PeerToPeer)
        self._direct.begin_early(coming)

    # What is chosen for a plan.

    @torch.inference_mode(False)  # what it makes is written in any mode
    def settle(self, traffic: Traffic, options: TransportOptions, *, together: bool) -> None:
        """Choose the way of every exchange of a new plan.

        Args:
            traffic: of the plan.
            options: of the user.
            together: every rank of the group is here, with a new plan. Otherwise others go on with
                the plan that they have, as if one rank loads state, and so does what was chosen.

        Raises:
            CommUnavailable: what was asked for cannot be had, and `options.strict` of any rank.
            RuntimeError: not `together`, and what was chosen does not serve the new plan.
        """
        asked, alone = options.transport, None
        if asked == "nccl":
            alone = "asked for"
        elif asked == "auto" and traffic.device.type != self.memory.device_type:
            alone = no_peers(traffic.device)
        if alone is None and not together:
            return self._go_on(traffic)
        self._traffic, self._device, self._setup_ms = traffic, traffic.device, 0.0
        self._leave()
        if alone is not None:  # every rank says so, without a word from the others
            return self._collectives_because(alone)
        start = time.perf_counter()
        mine = _attempt(lambda: self._facts(traffic, asked))
        said = self._said((options.strict, options.timeout_ms, mine))
        options = self._options = replace(
            options,
            strict=any(strict for strict, *_ in said),
            timeout_ms=max(timeout for _, timeout, _ in said),
        )
        facts, reason = _facts_of([one for *_, one in said])
        if reason is None:
            sizes = Sizes.of([one["counts"] for one in facts])
            if asked == "auto" and (choice := _why_not_tried(facts, sizes, options)) is not None:
                return self._collectives_because(choice)
            if asked == "nccl_ce":
                reason = self._set_up_copy_engines(facts, sizes)
            else:
                reason = self._set_up_peers(facts, sizes)
        self._setup_ms = 1e3 * (time.perf_counter() - start)
        if reason is not None:
            self._collectives_because(reason)
            refuse(reason, options, self.collectives)

    def _go_on(self, traffic: Traffic) -> None:
        """Send the messages of another plan as those of the one before, which had the same."""
        known, arena = self._traffic, self._arena
        if known is not None and self._direct is None:  # on all ranks
            self._traffic = traffic
            return self._collectives_because(self._reasons[0])
        late = arena is not None and arena.late_rank() is not None
        if known is None or known.counts != traffic.counts or late:
            raise RuntimeError(
                "this rank has a new plan for its messages, and other ranks go on with the plan "
                "that they have: load a state_dict, construct the optimizer or change its groups "
                "on all ranks of the group, not on one"
            )
        assert self._direct is not None
        pairs = zip(known.exchanges, traffic.exchanges, strict=True)
        self._direct.follow({id(old.coming): id(new.coming) for old, new in pairs})
        self._traffic = traffic

    def arena_for(
        self, device: torch.device, slots: int, slot_bytes: int, timeout_ms: int
    ) -> Arena | str:
        """An arena for other uses, which all ranks make together; or why there is none."""
        self._device = device
        said = self._said(((slots, slot_bytes), _attempt(lambda: dict(self.memory.facts(device)))))
        sizes = [size for size, _ in said]
        if len({*sizes}) > 1:
            return f"ranks ask for different sizes: {sizes}"
        facts, reason = _facts_of([one for _, one in said])
        if (reason := reason or why_not_shared(facts)) is not None:
            return reason
        plan = digest(repr((slots, slot_bytes)))
        reason = self._make_arena(device, slots, slot_bytes, timeout_ms, plan)
        return reason if self._arena is None or reason is not None else self._arena

    @property
    def collectives(self) -> str:
        """Which library moves what nothing better moves: "nccl" or "gloo"."""
        return distributed.get_backend(self.group)

    def report(self) -> list[Row]:
        """Which way the exchanges of the last plan go, and why; see `comm_report`."""
        traffic, direct = self._traffic, self._direct
        if traffic is None:
            return []
        alike: dict[tuple[Any, ...], list[tuple[int, float | None]]] = {}
        for number, one in enumerate(traffic.exchanges):
            name, reason, ms = self.collectives, self._reasons[number], None
            if direct is not None and direct.moves(one.coming):
                missed = direct.why_not(one.coming)
                if missed is None:
                    name, ms = direct.name, direct.milliseconds(one.coming)
                    reason += direct.how(one.coming)
                reason = missed or reason
            size = max(one.going.size, one.coming.size)
            alike.setdefault((one.what, name, reason), []).append((size, ms))
        ranks = distributed.get_world_size(self.group)
        sent = sum(
            one.going.size - one.going.counts[distributed.get_rank(self.group)]
            for one in traffic.exchanges
        )
        duty = predicted_ms(sent) / traffic.computing_ms if traffic.computing_ms else None
        return [
            Row(
                ranks=ranks,
                what=what,
                count=len(found),
                transport=name,
                reason=reason,
                bytes=max(size for size, _ in found),
                duty=duty,
                arena_bytes=0 if self._arena is None else self._arena.bytes,
                setup_ms=self._setup_ms,
                ms=max((ms for _, ms in found if ms is not None), default=None),
            )
            for (what, name, reason), found in alike.items()
        ]

    def _collectives_because(self, reason: str) -> None:
        assert self._traffic is not None
        self._close()
        self._reasons = dict.fromkeys(range(len(self._traffic.exchanges)), reason)

    def _facts(self, traffic: Traffic, asked: str) -> dict[str, Any]:
        """What this rank tells the others about itself."""
        arena = self._arena
        facts = dict(self.memory.facts(traffic.device, sets_backend=asked != "auto"))
        facts["counts"] = traffic.counts
        facts["computing_ms"] = traffic.computing_ms
        facts["copy_engines"] = why_not_here() if asked == "nccl_ce" else None
        facts["arena"] = None
        if arena is not None and arena.late_rank() is None:
            facts["arena"] = (arena.slots, arena.slot_bytes, arena.launched)
        return facts

    def _set_up_peers(self, facts: list[dict[str, Any]], sizes: Sizes) -> str | None:
        """Exchange by p2p from here on; why not, if not. Ranks agree after every part of it."""
        traffic, options = self._traffic, self._options
        assert traffic is not None
        if (reason := why_not_shared(facts) or self._mismatch(facts, sizes)) is not None:
            return reason
        taken = sizes.of_least(options.min_bytes)
        if not taken:
            return _small(options)
        # Of the two messages of a chunk one arrives or is read.
        slots, slot_bytes = options.slots or traffic.alive // 2 + 1, sizes.slot(taken)
        if slots < (least := min(traffic.alive // 2, len(taken))):
            return (
                f"slots={slots} are fewer than the {least} messages that arrive or are read at "
                f"once; give {least + 1}, a smaller prefetch or no slots"
            )
        known = facts[0]["arena"]
        same = known is not None and all(one["arena"] == known for one in facts)
        if not same or known[0] != slots or known[1] < slot_bytes:
            plan = digest(repr((sizes, slots, slot_bytes)))
            reason = self._make_arena(traffic.device, slots, slot_bytes, options.timeout_ms, plan)
            if reason is not None:
                return reason
        assert self._arena is not None
        self._arena.timeout_ms = options.timeout_ms
        exchanges, rank = traffic.exchanges, self._arena.rank
        offsets = {id(exchanges[k].coming): sizes.offsets(k, rank) for k in taken}
        self._direct = PeerToPeer(self._arena, offsets)
        why, is_faster = "asked for", True
        if options.transport == "auto":
            largest = exchanges[max(taken, key=sizes.largest)]
            room, error = _attempt(lambda: self._room_for(largest))
            if (reason := self._first(error, "no room to calibrate")) is not None:
                return reason
            is_faster, why = self._calibrated(largest, *room)
        if not is_faster:
            self._collectives_because(why)
            return None
        numbers = range(len(exchanges))
        self._reasons = {k: why if k in taken else "below min_bytes" for k in numbers}
        return None

    def _mismatch(self, facts: list[dict[str, Any]], sizes: Sizes) -> str | None:
        counts = [len(one["counts"]) for one in facts]
        if len({*counts}) > 1:
            return f"ranks have different plans, of {counts} exchanges"
        return sizes.mismatch()

    def _make_arena(
        self, device: torch.device, slots: int, slot_bytes: int, timeout_ms: int, plan: bytes
    ) -> str | None:
        """An arena in which every rank has been seen by every rank; why there is none, if so."""
        self._close()
        rank, ranks = distributed.get_rank(self.group), distributed.get_world_size(self.group)
        size = arena_bytes(ranks, slots, slot_bytes)
        memory, error = _attempt(lambda: self.memory.allocate(size, device))
        room = f"no room for {size} bytes to share: smaller messages (in_flight_bytes) take less"
        if (reason := self._first(error, room)) is not None:
            return reason

        def mapped() -> Arena:
            memories, keep = self.memory.mapped(memory, self.group)
            return Arena(rank, memories, slots, slot_bytes, timeout_ms, keep)

        made, error = _attempt(mapped)
        if (reason := self._first(error, "rendezvous failed")) is not None:
            return reason
        self._arena = made
        wrong, error = _attempt(lambda: made.handshake(plan))
        seen = "handshake mismatch: look at the other ranks, or give timeout_ms more"
        return self._first(error or wrong, seen)

    def _room_for(self, one: Planned) -> list[Tensor]:
        """The two messages of an exchange, of zeros, in memory that is not shared."""
        device = self._device
        sizes = one.going.size, one.coming.size
        return [torch.zeros(size, dtype=torch.uint8, device=device) for size in sizes]

    def _calibrated(self, one: Planned, outbox: Tensor, inbox: Tensor) -> tuple[bool, str]:
        """Time an exchange both ways: whether p2p is faster by rank 0's clock."""
        assert self._direct is not None
        device = self._device
        lease = self._direct.inbox(one.coming)
        assert lease is not None
        best = []
        for place in (lease.bytes, inbox):
            times = []
            for _ in range(4):  # the first warms up
                self.sum(torch.zeros(1, device=device)).wait()
                _finish(device)
                start = time.perf_counter()
                self.exchange(one.going, outbox, one.coming, place).wait()
                _finish(device)
                times.append(1e3 * (time.perf_counter() - start))
            best.append(min(times[1:]))
        lease.give()
        direct, collective = self._said(best)[0]
        taken = f"{direct:.3g} ms by p2p, {collective:.3g} ms by {self.collectives}"
        return direct <= collective, f"calibration: {taken}"

    def _set_up_copy_engines(self, facts: list[dict[str, Any]], sizes: Sizes) -> str | None:
        if (reason := self._mismatch(facts, sizes) or why_not_copy_engines(facts)) is not None:
            return reason
        traffic = self._traffic
        assert traffic is not None
        self._close()
        made, error = _attempt(
            lambda: CopyEngineCollectives(self.group, traffic.device, traffic.exchanges, sizes)
        )
        # What needs all ranks begins where all have what it needs.
        if (reason := self._first(error, "no room for windows: set in_flight_bytes lower")) is None:
            _, error = _attempt(made.connect)
            reason = self._first(error, "window not registered")
        if reason is None:
            self._direct = made
            self._reasons = dict.fromkeys(range(len(traffic.exchanges)), "asked for")
        elif made is not None:
            made.close()
        return reason

    def _leave(self) -> None:
        """End what exchanges; an arena stays for the next plan."""
        if self._direct is not None:
            self._direct.close()
            self._direct = None

    def _close(self) -> None:
        self._leave()
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _first(self, error: str | None, what: str) -> str | None:
        """The first error of any rank, which all ranks learn."""
        return _named(self._said(error), what)

    def _said(self, value: Any) -> list[Any]:
        """What every rank says, in the order of the ranks."""
        said: list[Any] = [None] * distributed.get_world_size(self.group)
        # NCCL sends objects from the current device, which may be another rank's.
        on = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        with on:
            distributed.all_gather_object(said, value, group=self.group)
        return said


def packed(going: Message, pieces: Sequence[Tensor], like: Tensor) -> Tensor:
    """The message of some parts."""
    message = like.new_zeros(going.size)
    for part, piece in zip(going.parts, pieces, strict=True):
        message[part.start : part.stop].view(piece.dtype).view(piece.shape).copy_(piece)
    return message


def _small(options: TransportOptions) -> str:
    return f"below min_bytes: no message has {options.min_bytes} bytes"


def _why_not_tried(
    facts: list[dict[str, Any]], sizes: Sizes, options: TransportOptions
) -> str | None:
    """Why "auto" does not try p2p: what it needs is not here, or it would not pay."""
    taken = sizes.of_least(options.min_bytes)
    if (reason := why_not_shared(facts)) is not None or not taken:
        return reason or _small(options)
    return why_not_auto(sizes, max(one["computing_ms"] for one in facts), len(taken))


def _attempt(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """What a call returns, or what it raised."""
    try:
        return call(), None
    except Exception as error:
        return None, f"{type(error).__name__}: {error}".splitlines()[0]


def _named(errors: Sequence[str | None], what: str) -> str | None:
    """The first error of any rank."""
    said = enumerate(errors)
    return next((f"{what} (rank {rank}: {text})" for rank, text in said if text), None)


def _facts_of(said: Sequence[tuple[Any, str | None]]) -> tuple[list[Any], str | None]:
    """What all ranks say of themselves, and which of them cannot."""
    what = "a rank cannot say what its device can do"
    return [facts for facts, _ in said], _named([error for _, error in said], what)


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


Transport = GroupTransport | Identity


def extremes(transport: Transport, values: Tensor) -> Tensor:
    """The largest and the smallest of every rank's integers, (2, n), in one all-reduce."""
    both = transport.maximum(torch.stack((values, -values))).wait()
    both[1].neg_()
    return both


def whole(tensor: Any) -> Tensor:
    """All of a DTensor, from all ranks of its mesh, which must all ask."""
    return tensor.full_tensor()
