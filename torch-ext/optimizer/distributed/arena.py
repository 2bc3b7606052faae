"""Memory that all ranks of a group can write into, and the signals that say what was written.

It is torch's symmetric memory, for which no other file asks. What may keep ranks from sharing it is
found before any is allocated: a rank that fails in the middle would leave the others waiting.

One allocation per rank holds a flag per sender, a word per rank that says whether it lives, a
record per sender from the handshake, and slots for messages. A sender copies into a slot of the
receiver and then, on the same stream, copies its epoch into its flag there. The receiver's stream
waits for the flags of all senders. Such a wait ends after its time: it sets a status on the device,
which stays. A rank with a status no longer advances its epoch, so nobody takes for good what it
sends from then on.

Its copies of the step go on, into slots that a late rank may yet read: no copy engine can be told
on the device to copy nothing. So the wait that gives up clears the rank's word at all others, ahead
of those copies, and `alive` and `zeros_unless_alive` look at the words behind, or right before, the
last use of what came.
"""

from __future__ import annotations

import hashlib
import os
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..kernels.communication import push, wait_signals

MAGIC = 0x4F50_5449_4D41_5245
RECORD = struct.Struct("<QQQ8s")  # magic, rank, bytes of the arena, digest of the plan
WORD = 4
PAGE = 512  # slots begin at multiples
HIGH = -1  # priority of the stream: a wait is one block, which a full device must let in
BACKEND = "CUDA"  # of torch's symmetric memory
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"

Facts = Mapping[str, Any]


def header_bytes(ranks: int) -> int:
    """Bytes before the first slot."""
    return _rounded(ranks * (2 * WORD + RECORD.size))


def arena_bytes(ranks: int, slots: int, slot_bytes: int) -> int:
    """Bytes of one rank's arena."""
    return header_bytes(ranks) + slots * _rounded(slot_bytes)


def digest(text: str) -> bytes:
    """Eight bytes that stand for a plan."""
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def check_not_captured() -> None:
    """Raise RuntimeError if the caller captures a CUDA graph.

    All replays of it would wait for the signals of one exchange.
    """
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            "an exchange through symmetric memory cannot be captured in a CUDA graph, since each "
            "waits for signals of its own number; capture what is before and behind it, and call "
            "it between the replays"
        )


def _rounded(size: int) -> int:
    return -(-size // PAGE) * PAGE


@dataclass(frozen=True, eq=False)
class Done:
    """The end of an exchange on the stream of its arena."""

    event: Any = None  # None on the CPU, where it is over
    device: torch.device | None = None

    @classmethod
    def on(cls, stream: torch.cuda.Stream) -> Done:
        """What was launched on a stream so far."""
        event = torch.cuda.Event()
        event.record(stream)
        return cls(event, stream.device)

    def wait(self) -> None:
        """Let the current stream wait."""
        if self.event is not None:
            torch.cuda.current_stream(self.device).wait_event(self.event)


class Arena:
    """The arenas of all ranks of a group, as one rank sees them.

    Args:
        rank: this one, in the group.
        memories: the arena of every rank, uint8 of equal lengths, mapped here.
        slots: for messages.
        slot_bytes: of each.
        timeout_ms: how long a wait for the other ranks may take.
        keep: what the memory lives in.
    """

    def __init__(
        self,
        rank: int,
        memories: Sequence[Tensor],
        slots: int,
        slot_bytes: int,
        timeout_ms: int,
        keep: Any = None,
    ) -> None:
        self.rank, self.ranks = rank, (ranks := len(memories))
        self.slots, self.slot_bytes, self.timeout_ms = slots, slot_bytes, timeout_ms
        self.bytes = memories[rank].numel()
        self.launched = 0  # exchanges
        self._memories, self._keep = list(memories), keep
        device = memories[rank].device
        self._own = memories[rank][: self.ranks * WORD]
        self._flags = self._own.view(torch.uint32)
        self._flag_of_me = [m[rank * WORD : (rank + 1) * WORD] for m in memories]
        self._epoch = torch.ones(1, dtype=torch.int32, device=device).view(torch.uint32)
        self._word = self._epoch.view(torch.uint8)  # the next epoch, as long as all went well
        self._status = torch.zeros(1, dtype=torch.int32, device=device)
        first, mine = ranks * WORD, (ranks + rank) * WORD
        self.living = memories[rank][first : first + ranks * WORD].view(torch.uint32)
        self.living.view(torch.int32).fill_(1)  # 0: the rank has given up
        self.word_at_all = [memory[mine : mine + WORD] for memory in memories]
        self._alive = torch.ones((), dtype=torch.float32, device=device)
        self._alive_bytes = self._alive.view(1).view(torch.uint8)
        self._stream, self._seen = None, self._status
        self._noted: torch.cuda.Event | None = None  # behind the last copy of the status
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=HIGH)
            self._seen = torch.zeros(1, dtype=torch.int32, pin_memory=True)  # of the status

    def slot(self, rank: int, number: int) -> Tensor:
        """A slot of a rank: uint8."""
        first = header_bytes(self.ranks) + number * _rounded(self.slot_bytes)
        return self._memories[rank][first : first + self.slot_bytes]

    def others(self) -> list[int]:
        """The other ranks, beginning behind this one, so that not all write to the same."""
        return [(self.rank + step) % self.ranks for step in range(1, self.ranks)]

    def exchange(
        self,
        targets: Sequence[Tensor],  # of other ranks
        sources: Sequence[Tensor],
        own: tuple[Tensor, Tensor] | None,  # what stays here: target, source
        arriving: Tensor,  # zeros if this exchange fails
        timed: Any = None,
    ) -> Done:
        """Write to other ranks, tell them, and wait for all of them.

        Every rank must come to the same exchanges in the same order.

        Raises:
            RuntimeError: the caller captures a CUDA graph.
        """
        stream, on = self._stream, nullcontext()
        if stream is not None:
            check_not_captured()
            stream.wait_stream(torch.cuda.current_stream(stream.device))
            on = torch.cuda.stream(stream)
        self.launched += 1
        flags = [self._flag_of_me[rank] for rank in (*self.others(), self.rank)]
        written, read = [*targets, *flags], [*sources, *[self._word] * len(flags)]
        if own is not None:  # behind what others wait for
            written.append(own[0])
            read.append(own[1])
        epoch, cleared = self.launched % 2**32, [arriving, *self.word_at_all]
        with on:
            if timed is not None:
                timed.note(0)
            push(written, read, blocks=0)  # what others compute meanwhile keeps its multiprocessors
            wait_signals(
                self._flags, epoch, self.timeout_ms, self._status, next=self._epoch, clear=cleared
            )
            if timed is not None:
                timed.note(1)
        return Done() if stream is None else Done.on(stream)

    def alive(self) -> Tensor:
        """1 as long as all ranks live, else 0, when the current stream gets there: 0-D float32.

        What a step multiplies its rates by.
        """
        self.zeros_unless_alive(self._alive_bytes)
        return self._alive

    def zeros_unless_alive(self, made: Tensor) -> None:
        """Clear what was made of a message, if a rank has given up by now: uint8."""
        wait_signals(self.living, 1, 0, self._status, clear=[made, *self.word_at_all])

    def order(self) -> None:
        """Let the current stream wait for everything that was launched here."""
        if self._stream is not None:
            torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)

    def late_rank(self) -> int | None:
        """The rank that an exchange gave up waiting for; waits for what was launched.

        Not for what was launched behind a `note_status` that nobody has read yet.
        """
        if self._noted is None:
            self.note_status()
        if self._noted is not None:
            self._noted.synchronize()
            self._noted = None
        return self.noted_late_rank()

    def note_status(self) -> None:
        """Let the host learn the status of what was launched, without a wait."""
        if self._stream is not None:
            # On its own stream: what the current one has to do may take long.
            with torch.cuda.stream(self._stream):
                self._seen.copy_(self._status, non_blocking=True)
            self._noted = self._stream.record_event()

    def noted_late_rank(self) -> int | None:
        """As `late_rank`, of those exchanges whose status has come to the host."""
        seen = int(self._seen)
        return seen - 1 if seen else None

    def handshake(self, plan: bytes) -> str | None:
        """Show every rank to every rank: the first exchange. Returns what is wrong, or None.

        Args:
            plan: digest of what this rank is going to send and expects.
        """
        first = 2 * self.ranks * WORD
        record = torch.frombuffer(
            bytearray(RECORD.pack(MAGIC, self.rank, self.bytes, plan)), dtype=torch.uint8
        ).to(self._status.device)
        at = first + self.rank * RECORD.size
        places = [memory[at : at + RECORD.size] for memory in self._memories]
        targets = [places[rank] for rank in self.others()]
        nothing = record[:0]
        self.exchange(targets, [record] * len(targets), (places[self.rank], record), nothing)
        late = self.late_rank()
        if late is not None:
            return f"rank {late} wrote nothing within {self.timeout_ms} ms"
        found = self._memories[self.rank][first : first + self.ranks * RECORD.size].cpu()
        for rank in range(self.ranks):
            text = found[rank * RECORD.size : (rank + 1) * RECORD.size].tolist()
            magic, wrote, size, its_plan = RECORD.unpack(bytes(text))
            if (magic, wrote, size) != (MAGIC, rank, self.bytes):
                return f"rank {self.rank} finds no arena of rank {rank} where it should be"
            if its_plan != plan:
                return f"ranks {self.rank} and {rank} have different plans"
        return None

    def close(self) -> None:
        """Let go of the memory of all ranks, after what was launched here. A second call is none.

        The memory stays as long as any rank maps it.
        """
        if self._stream is not None:
            self._stream.synchronize()
        self._memories, self._keep, self._stream = [], None, None
        self._own = self._flags = torch.empty(0)
        self._flag_of_me = self.word_at_all = []
        self.living = self._flags


class SymmetricMemory:
    """Allocates and maps it."""

    device_type = "cuda"

    @staticmethod
    def facts(device: torch.device, *, sets_backend: bool = True) -> Facts:
        """What decides whether this rank can share memory of a device with others.

        `sets_backend`: torch's symmetric memory may be set to the backend that this needs.
        """
        found: dict[str, Any] = {"host": _host(), "device": None, "reached": (), "missing": ""}
        found["overlap"] = os.environ.get(OVERLAPPING) == "1"
        if device.type != "cuda":
            return {**found, "missing": no_peers(device)}
        number = torch.cuda.current_device() if device.index is None else device.index
        uuids = [_uuid(k) for k in range(torch.cuda.device_count())]
        reached = [
            uuid
            for k, uuid in enumerate(uuids)
            if k == number or torch.cuda.can_device_access_peer(number, k)
        ]
        found |= {"device": uuids[number], "seen": uuids, "reached": reached}
        return {**found, "missing": _missing(torch.device("cuda", number), sets_backend)}

    @staticmethod
    def allocate(size: int, device: torch.device) -> Tensor:
        """Memory that others can map: uint8, zeros.

        Not from torch's pool for it, in which what is reused may belong to another rendezvous
        (pytorch #190977).
        """
        from torch._C._distributed_c10d import _SymmetricMemory

        memory = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
        memory.zero_()
        torch.cuda.synchronize(device)
        return memory

    @staticmethod
    def mapped(memory: Tensor, group: Any) -> tuple[list[Tensor], Any]:
        """The memory of every rank of a group, and what keeps it mapped; every rank calls it."""
        from torch.distributed import _symmetric_memory

        handle = _symmetric_memory.rendezvous(memory, group.group_name)
        size = (memory.numel(),)
        buffers = [handle.get_buffer(rank, size, torch.uint8) for rank in range(handle.world_size)]
        return buffers, (handle, memory)


def no_peers(device: torch.device) -> str:
    """Why no rank can share memory of a device that is none of CUDA's."""
    return f"no CUDA peers: the parameters are on {device.type}"


def why_not_shared(facts: Sequence[Facts]) -> str | None:
    """Why ranks cannot write into each other's memory, by what all of them said; None if they can.

    The same on every rank.
    """
    if len(facts) == 1:
        return "single rank: nothing is sent"
    for rank, one in enumerate(facts):
        if one["missing"]:
            return f"rank {rank}: {one['missing']}"
    if len({one["host"] for one in facts}) > 1:
        return "multi-node: the ranks are on several hosts, and p2p needs one"
    devices = [one["device"] for one in facts]
    if len({*devices}) < len(devices) and not all(one["overlap"] for one in facts):
        return f"overlapping devices: two ranks use one GPU; {OVERLAPPING}=1 allows it, for tests"
    for rank, one in enumerate(facts):
        for other, device in enumerate(devices):
            if device in one["seen"] and device not in one["reached"]:
                return f"no peer access: the GPU of rank {rank} cannot reach that of rank {other}"
    return None


def _host() -> str:
    """The same on ranks of one host and boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.is_file() else ''}"


def _uuid(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)


def _missing(device: torch.device, sets_backend: bool) -> str:
    """What of torch's symmetric memory is missing on a device; empty if nothing is."""
    try:
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory
    except ImportError:
        return f"torch too old: {torch.__version__} has no symmetric memory"
    if not hasattr(_SymmetricMemory, "empty_strided_p2p") or not hasattr(
        _symmetric_memory, "rendezvous"
    ):
        return f"torch too old: the symmetric memory of {torch.__version__} has no rendezvous"
    backend = _symmetric_memory.get_backend(device)
    if backend not in (None, BACKEND):
        if not sets_backend:
            return f"another backend: symmetric memory of this process is {backend}'s"
        try:
            _symmetric_memory.set_backend(BACKEND)
        except RuntimeError:
            return (
                f"backend frozen: symmetric memory of this process is {backend}'s; p2p needs "
                f"{BACKEND}'s, chosen before anything is allocated"
            )
    return ""
