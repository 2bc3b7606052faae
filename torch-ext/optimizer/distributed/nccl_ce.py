"""NCCL's all-to-all on copy engines: equal splits between registered windows, no multiprocessor.

NCCL takes copy engines for an all-to-all without split lists whose buffers are registered in
symmetric windows, by a communicator with the CTA policy "zero" (2.28 and later). So every part of
a message gets as many bytes as the largest part that any rank sends in the same exchange. Where all
parts are equal, as those of equal matrices with as many on every rank are, nothing is padded.

It has not run yet: it needs several GPUs of one host. See docs/concepts/communication.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, distributed

from .arena import HIGH, Done, why_not_shared
from .choose_transport import Planned, Sizes
from .message_layout import Message

LEAST_TORCH = (2, 11)
LEAST_NCCL = (2, 28, 0)
POLICY = "NCCL_CTA_POLICY_ZERO"


@dataclass(frozen=True)
class Split:
    """One exchange in equal splits."""

    bytes: int  # of every part
    going: tuple[int, ...]  # of them, what this rank sends to each
    coming: tuple[int, ...]

    def places(self, counts: Sequence[int]) -> list[tuple[slice, slice]]:
        """(in the message, in the window) of every part that is not empty."""
        ends = itertools.accumulate(counts)
        return [
            (slice(end - size, end), slice(rank * self.bytes, rank * self.bytes + size))
            for rank, (size, end) in enumerate(zip(counts, ends, strict=True))
            if size
        ]


def split_of(sizes: Sizes, number: int, rank: int) -> Split:
    """The splits of an exchange: as large on all ranks as its largest part."""
    going, coming = sizes.going[number], sizes.coming[number]
    largest = max(itertools.chain.from_iterable(going), default=0)
    return Split(largest, tuple(going[rank]), tuple(coming[rank]))


def windows(splits: Sequence[Split], ranks: int) -> int:
    """Bytes of the window that sends, and of the one that receives: as large on all ranks."""
    return ranks * max((split.bytes for split in splits), default=0)


def why_not_copy_engines(facts: Sequence[Mapping[str, Any]]) -> str | None:
    """Why NCCL cannot move data on copy engines; None where it can. The same on every rank."""
    if (reason := why_not_shared(facts)) is not None:
        return reason
    said = ((rank, one["copy_engines"]) for rank, one in enumerate(facts))
    return next((f"rank {rank}: {reason}" for rank, reason in said if reason), None)


def why_not_here() -> str | None:
    """What this process has not got for it; None where nothing is missing."""
    if not torch.cuda.is_available() or not distributed.is_nccl_available():
        return "NCCL is not there"
    if _version(torch.__version__) < LEAST_TORCH:
        return f"torch too old: {torch.__version__}; nccl_ce needs 2.11"
    if torch.cuda.nccl.version()[:3] < LEAST_NCCL:
        return f"NCCL too old: {torch.cuda.nccl.version()}; nccl_ce needs 2.28"
    backend = distributed.ProcessGroupNCCL
    if not hasattr(backend, POLICY):
        return f"CTA policy not zero: ProcessGroupNCCL has no {POLICY}"
    if not hasattr(backend, "register_mem_pool"):
        return "window not registered: ProcessGroupNCCL has no register_mem_pool"
    return None


def group_options(backend: Any) -> Any:
    """Options of a process group whose collectives take no multiprocessor.

    Args:
        backend: torch.distributed.ProcessGroupNCCL.
    """
    options = backend.Options()
    options.config.cta_policy = getattr(backend, POLICY)
    return options


def _version(text: str) -> tuple[int, int]:
    major, minor = text.split(".")[:2]
    return int(major), int(minor)


class CopyEngineCollectives:
    """Exchanges of a plan by equal splits, over a communicator of its own.

    It has windows once it is made, and exchanges after `connect`.

    Raises:
        RuntimeError: no room for the windows, or NCCL refuses the policy.
    """

    name = "nccl_ce"
    alive: Tensor | None = None  # NCCL ends a process whose ranks are late

    def __init__(
        self, group: Any, device: torch.device, exchanges: Sequence[Planned], sizes: Sizes
    ) -> None:
        ranks = distributed.get_process_group_ranks(group)
        rank = distributed.get_rank(group)
        self._splits = {id(one.coming): split_of(sizes, k, rank) for k, one in enumerate(exchanges)}
        self._group = distributed.new_group(
            ranks,
            backend="nccl",
            pg_options=group_options(distributed.ProcessGroupNCCL),
            use_local_synchronization=True,
        )
        self._device, self._ranks, self._registered = device, len(ranks), False
        try:
            self._allocate(windows([*self._splits.values()], len(ranks)))
        except Exception:
            self.close()
            raise

    def _allocate(self, size: int) -> None:
        self._pool = torch.cuda.MemPool(self._backend.mem_allocator)
        with torch.cuda.use_mem_pool(self._pool):
            self._leaving = torch.empty(size, dtype=torch.uint8, device=self._device)
            self._arriving = torch.empty(size, dtype=torch.uint8, device=self._device)
        self._stream = torch.cuda.Stream(self._device, priority=HIGH)

    @property
    def _backend(self) -> Any:
        return self._group._get_backend(self._device)

    def connect(self) -> None:
        """Register the windows, which every rank must have.

        Raises:
            RuntimeError: of NCCL, which refuses a window.
        """
        self._backend.eager_connect_single_device(self._device)
        self._backend.register_mem_pool(self._pool, symm=True)
        self._registered = True

    def close(self) -> None:
        """Let go of windows and communicator, after what was launched; all ranks do."""
        torch.cuda.synchronize(self._device)
        if self._registered:
            self._backend.deregister_mem_pool(self._pool)
        self._leaving = self._arriving = self._pool = None
        distributed.destroy_process_group(self._group)

    def follow(self, renamed: Mapping[int, int]) -> None:
        """As of `PeerToPeer`."""
        self._splits = {renamed[key]: split for key, split in self._splits.items()}

    def moves(self, coming: Message) -> bool:
        """Whether a message that comes here goes this way."""
        return id(coming) in self._splits

    def takes(self, coming: Message, inbox: Tensor) -> bool:
        """Whether it exchanges what comes into an inbox."""
        return self.moves(coming)

    def why_not(self, coming: Message) -> str | None:
        """A window is always there."""

    def how(self, coming: Message) -> str:
        return ""

    def milliseconds(self, coming: Message) -> float | None:
        return None

    def inbox(self, coming: Message) -> None:
        """Messages are taken out of the window into any memory."""

    def begin(self, *, early: bool) -> None:
        """Nothing is kept from step to step."""

    def check(self) -> None:
        """NCCL's own watchdog does."""

    def exchange(self, going: Message, outbox: Tensor, coming: Message, inbox: Tensor) -> Done:
        """Into the window, to all ranks, out of the window."""
        split = self._splits[id(coming)]
        size = self._ranks * split.bytes
        leaving, arriving = self._leaving[:size], self._arriving[:size]
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            for here, there in split.places(split.going):
                leaving[there].copy_(outbox[here], non_blocking=True)
            both = arriving, leaving
            distributed.all_to_all_single(*both, group=self._group, async_op=True).wait()
            for here, there in split.places(split.coming):
                inbox[here].copy_(arriving[there], non_blocking=True)
        return Done.on(self._stream)
