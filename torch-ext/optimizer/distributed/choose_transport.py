"""Which way the exchanges of a plan go, and why: what is asked for, what can be had, what pays.

All of it follows from what all ranks said, so that all decide alike.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .message_layout import Message

logger = logging.getLogger(__name__)

TRANSPORTS = ("auto", "p2p", "nccl_ce", "nccl")
# Bytes per second that a GPU sends over NVLink in an all-to-all of 256 MiB (8 x H200: 304 GB/s),
# and the share of the computation from which on transfers do not hide under it.
LINK_RATE = 304e9
CROSSOVER = 0.8


class CommUnavailable(RuntimeError):  # noqa: N818
    """What `strict` raises where a slower transport, or a product beside it, would have run.

    Attributes:
        reason: Why, in a sentence; equal reasons are equal strings.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason

    def __reduce__(self) -> tuple:
        return type(self), (self.reason,)


@dataclass(frozen=True)
class TransportOptions:
    """What a user asks for; equal on all ranks, or as said here. See `DistributedConfig`."""

    transport: str = "auto"
    strict: bool = False  # on any rank
    slots: int | None = None
    min_bytes: int = 0
    timeout_ms: int = 30000  # the largest of any rank


@dataclass(frozen=True, eq=False)
class Planned:
    """An exchange of a plan, as one rank takes part in it."""

    what: str  # for reports
    going: Message
    coming: Message


@dataclass(frozen=True, eq=False)
class Traffic:
    """All exchanges of a plan over one group, in the order of a step."""

    exchanges: tuple[Planned, ...]
    device: torch.device
    computing_ms: float  # predicted, of this rank, in one step
    alive: int  # messages of the chunks that are alive at once, at most: two of each

    @property
    def counts(self) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
        """Bytes per rank that every exchange sends and receives here."""
        return [(one.going.counts, one.coming.counts) for one in self.exchanges]


@dataclass(frozen=True, eq=False)
class Sizes:
    """How large the messages of a plan are on every rank."""

    going: tuple[tuple[tuple[int, ...], ...], ...]  # exchange, rank, its receiver
    coming: tuple[tuple[tuple[int, ...], ...], ...]  # exchange, rank, its sender

    @classmethod
    def of(cls, tables: Sequence[Sequence[tuple[Sequence[int], Sequence[int]]]]) -> Sizes:
        """Of what each rank says of its exchanges."""
        exchanges = range(min(map(len, tables)))
        return cls(
            tuple(tuple(tuple(table[k][0]) for table in tables) for k in exchanges),
            tuple(tuple(tuple(table[k][1]) for table in tables) for k in exchanges),
        )

    def mismatch(self) -> str | None:
        """Two ranks that do not send what the other expects."""
        for number, (going, coming) in enumerate(zip(self.going, self.coming, strict=True)):
            for sender, counts in enumerate(going):
                for receiver, size in enumerate(counts):
                    if coming[receiver][sender] != size:
                        return (
                            f"ranks {sender} and {receiver} have different plans: in exchange "
                            f"{number} one sends {size} bytes, the other expects "
                            f"{coming[receiver][sender]}"
                        )
        return None

    def largest(self, number: int) -> int:
        """Bytes of the largest message of an exchange on any rank."""
        return max(map(sum, (*self.going[number], *self.coming[number])))

    def of_least(self, size: int) -> list[int]:
        """The exchanges whose largest message has so many bytes, and any at all."""
        return [k for k in range(len(self.going)) if self.largest(k) >= max(1, size)]

    def slot(self, numbers: Sequence[int]) -> int:
        """Bytes of the largest message that arrives in some exchanges on any rank."""
        return max((sum(counts) for k in numbers for counts in self.coming[k]), default=0)

    def offsets(self, number: int, sender: int) -> list[int]:
        """Where in the message of each rank begins what a sender sends."""
        return [sum(counts[:sender]) for counts in self.coming[number]]

    def sent(self) -> int:
        """Bytes that the busiest rank sends to others in a step."""
        ranks = range(len(self.going[0])) if self.going else ()
        return max(
            (sum(sum(of_all[r]) - of_all[r][r] for of_all in self.going) for r in ranks),
            default=0,
        )


def predicted_ms(size: int) -> float:
    """Milliseconds that a GPU takes to send so many bytes to others over NVLink."""
    return 1e3 * size / LINK_RATE


def why_not_auto(sizes: Sizes, computing_ms: float, exchanges: int) -> str | None:
    """Why collectives are predicted to be at least as fast as p2p; None where p2p is."""
    if exchanges < 3:
        return "nothing to overlap: a step has one gather and one scatter"
    duty = predicted_ms(sizes.sent()) / computing_ms if computing_ms else float("inf")
    if duty > CROSSOVER:
        return f"duty above crossover: transfers are predicted at {duty:.2f} of the computation"
    return None


def refuse(reason: str, options: TransportOptions, instead: str) -> None:
    """Say once that another way is taken than was asked for, or raise.

    Raises:
        CommUnavailable: under `strict`.
    """
    if options.strict:
        raise CommUnavailable(f"transport={options.transport!r} cannot be taken: {reason}")
    _say_once(options.transport, reason, instead)


@functools.cache
def _say_once(transport: str, reason: str, instead: str) -> None:
    logger.warning(
        "%s moves messages between ranks instead of transport=%r: %s. strict=True raises",
        instead,
        transport,
        reason,
    )


@dataclass(frozen=True)
class Row:
    """What is said of exchanges that are alike."""

    ranks: int
    what: str
    count: int
    transport: str
    reason: str
    bytes: int  # of the largest message that this rank sends or receives in one of them
    duty: float | None  # transfers of the step, predicted, in units of its computation
    ms: float | None  # of the last one that ended, where it was measured
    arena_bytes: int  # of this rank
    setup_ms: float  # of choosing and of setting up what was chosen

    def as_dict(self) -> Mapping[str, Any]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}
