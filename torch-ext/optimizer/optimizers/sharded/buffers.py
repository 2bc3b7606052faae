"""How much is on its way between ranks at once, and the memory that it is in.

Memory is taken and given back in one order at every step.

It stays with the plan, so that a stage finds its messages where they were in the step before.
Blocks of one kind are equally large. Whoever gives one back has queued its last use on the current
stream, and the next one to take it goes on there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import torch
from torch import Tensor

from ...distributed import TRANSPORTS, Lease, TransportOptions, in_flight
from ..groups.options import check_choice, check_count, check_switch, plain_number

Kind = tuple[str, torch.device]


def lasting() -> torch.inference_mode:
    """A context for tensors that outlive a step: one that runs in inference mode makes no others.

    Outside of it nothing could be written to them.
    """
    return torch.inference_mode(False)


def made_once(make: Callable[[Any], Any]) -> cached_property[Any]:
    """A property whose tensors are made when they are first asked for, and stay."""

    @wraps(make)
    def made(owner: Any) -> Any:
        with lasting():
            return make(owner)

    return cached_property(made)


@dataclass(frozen=True, eq=False)
class Block:
    """Memory of a chunk."""

    kind: Kind
    whole: Tensor  # all that is reserved: uint8
    bytes: Tensor  # the part that was asked for
    lease: Lease | None = None  # where it belongs to a transport

    def of(self, dtype: torch.dtype, shape: Iterable[int]) -> Tensor:
        """The block as a tensor, which must have its size."""
        return self.bytes.view(dtype).view(tuple(shape))


class Staging:
    """The blocks of a plan."""

    def __init__(self) -> None:
        self._sizes: dict[Kind, int] = {}
        self._blocks: dict[Kind, list[Tensor]] = {}
        self._free: dict[Kind, list[Tensor]] = {}
        self._views: dict[tuple[int, int], Tensor] = {}

    def reserve(self, name: str, device: torch.device, size: int) -> None:
        """Make the blocks of a kind so large at least; before the first is taken."""
        kind = (name, device)
        self._sizes[kind] = max(size, self._sizes.get(kind, 0))

    def devices(self) -> frozenset[torch.device]:
        """Of all kinds."""
        return frozenset(device for _, device in self._sizes)

    def begin(self) -> None:
        """Start a step: whatever one that failed still had is free."""
        self._free = {kind: [*blocks] for kind, blocks in self._blocks.items()}

    def take(self, name: str, device: torch.device, size: int) -> Block:
        """Memory of a kind that nobody else has: the block that was given back last."""
        kind = (name, device)
        if size > self._sizes.get(kind, 0):
            raise RuntimeError(
                f"{size} bytes of {name} are asked for, {self._sizes.get(kind, 0)} were reserved"
            )
        free = self._free.setdefault(kind, [])
        if not free:
            with lasting():
                fresh = torch.empty(self._sizes[kind], dtype=torch.uint8, device=device)
            self._blocks.setdefault(kind, []).append(fresh)
            free.append(fresh)
        whole = free.pop()
        view = self._views.get((id(whole), size))
        if view is None:
            view = self._views[id(whole), size] = whole[:size]
        return Block(kind, whole, view)

    def give(self, block: Block) -> None:
        """Give it back."""
        if block.lease is not None:
            block.lease.give()
            return
        self._free[block.kind].append(block.whole)

    def held(self, device: torch.device) -> int:
        """Bytes of all blocks on a device."""
        kept = (blocks for (_, where), blocks in self._blocks.items() if where == device)
        return sum(block.numel() for blocks in kept for block in blocks)


# Bytes that a rank sends and receives on the way to the owners, of all chunks that are alive. With
# batches, results, answers and what an iteration works in, two to three times as much by count.
IN_FLIGHT_BYTES = 256 * 2**20
ANY_SIZE = -1
LONGEST_TIMEOUT = 86400  # of a day a store still keeps count
WIRE_DTYPES = (None, torch.float32, torch.float16)
# Field -> least, most, and what else is valid, with its meaning.
_COUNTS: dict[str, tuple[int, float, tuple[int | None, str] | None]] = {
    "prefetch": (1, math.inf, None),
    "chunk_size": (1, math.inf, (ANY_SIZE, "for as many as bytes allow")),
    "in_flight_bytes": (1, math.inf, None),
    "slots": (2, math.inf, (None, "for what a step needs")),
    "min_bytes": (0, math.inf, None),
    "reduce_in_backward": (0, math.inf, None),
    "timeout_ms": (1, 1000 * LONGEST_TIMEOUT, None),
}


@dataclass(frozen=True)
class DistributedConfig:
    """How the ranks that share the work of an optimizer exchange it. Equal on all of them.

    Only `wire_dtype` changes bits.

    Args:
        wire_dtype: torch.float32 or torch.float16, in which directions go to the rank that
            orthogonalizes them, and updates come back; float16 has one power of two as scale per
            matrix. None: float16 where the iteration is in half precision, else float32. Given as
            float16, one rank rounds to it too, so that the bits do not depend on how many there
            are. With unreduced gradients, in which contributions to those of matrices and large
            parameters are sent and updates of matrices come back, float32 if None; the
            contributions are added up in float32 in any case.
        prefetch: chunks of matrices whose gathers are launched before the first is computed, at
            least 1. With unreduced gradients also chunks of rows of large parameters.
        chunk_size: matrices in a chunk at most; -1 for as many as fit.
        in_flight_bytes: what any rank sends and receives for the owners of the chunks that are
            under way; a chunk has one matrix of every owner in any case.
        cuda_graphs: replay stages of matrices that ranks share as CUDA graphs, from the second step
            on that finds gradients and everything else in the same place. Nothing of a step that
            is itself captured. False: every step is queued kernel by kernel and keeps no pool for
            graphs, but the memory of messages stays.
        timeout: seconds that the first step of a `MuonAdamW` without `gradients` waits for other
            ranks, whose gradients it compares with its own. Longer than one is behind another that
            trains with it, and bearable for one that trains alone, which waits once and in vain.
        transport: what messages to owners and back go by. "nccl" is an all-to-all of the process
            group, whatever its backend. "p2p" writes into the memory of the receiver by copy
            engines, on GPUs of one host. "nccl_ce" is NCCL's all-to-all on copy engines. "auto"
            takes "p2p" where it is predicted to hide under the computation and rank 0 measures it
            to be faster, else "nccl"; `comm_report()` says what that was and why.
        strict: raise `CommUnavailable` where the transport that was asked for cannot be taken, on
            all ranks if any is strict. False: the process group's all-to-all runs, and a warning
            says so once per reason.
        slots: messages that every rank has memory for with "p2p", at least 2; None for as many as
            arrive or are read at once. With fewer "p2p" cannot be taken.
        min_bytes: with "p2p", exchanges whose largest message has fewer bytes go by the all-to-all.
        timeout_ms: how long an exchange of "p2p" waits for other ranks. Then the step changes no
            parameter any more, and the next one, or whatever saves state, raises.
        reduce_in_backward: with unreduced gradients and "p2p", how many backward passes there are
            before each step, 1 without accumulation; 0 for none that sends anything. In the last of
            them contributions leave as soon as gradients are whole, as many as `prefetch` and
            `in_flight_bytes` let a step have under way. Gradients are not to be changed behind
            that: the step would raise. `timeout_ms` is then how far a rank may be behind another in
            backward, too. Where nothing can leave, that is said once; see `strict`. It cannot in
            float16, of a chunk with a frozen parameter and those behind it, and from the first
            backward pass on that is captured in a CUDA graph.

    Raises:
        ValueError, TypeError: the message names the field.
    """

    wire_dtype: torch.dtype | None = None
    prefetch: int = 1
    chunk_size: int = ANY_SIZE
    in_flight_bytes: int = IN_FLIGHT_BYTES
    cuda_graphs: bool = True
    timeout: float = 30.0
    transport: str = "auto"
    strict: bool = False
    slots: int | None = None
    min_bytes: int = 0
    timeout_ms: int = 30000
    reduce_in_backward: int = 0

    def __post_init__(self) -> None:
        where = type(self).__name__
        check_choice("wire_dtype", self.wire_dtype, WIRE_DTYPES, where)
        check_choice("transport", self.transport, TRANSPORTS, where)
        for name in (*_COUNTS, "timeout"):
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        for name, (least, most, otherwise) in _COUNTS.items():
            value = getattr(self, name)
            if otherwise is None or value != otherwise[0]:
                or_else = "" if otherwise is None else f", or {otherwise[0]} {otherwise[1]}"
                check_count(name, value, where, most, least=least, otherwise=or_else)
        for name in ("cuda_graphs", "strict"):
            check_switch(name, getattr(self, name), where)
        if isinstance(self.timeout, bool) or not isinstance(self.timeout, (int, float)):
            raise TypeError(f"{where}: timeout must be a number of seconds, got {self.timeout!r}")
        if not 0 < self.timeout < LONGEST_TIMEOUT:
            raise ValueError(
                f"{where}: timeout must be above 0 and below {LONGEST_TIMEOUT} seconds, got "
                f"{self.timeout!r}"
            )

    @property
    def transport_options(self) -> TransportOptions:
        """The fields that choose a transport."""
        names = TransportOptions.__dataclass_fields__
        return TransportOptions(**{name: getattr(self, name) for name in names})

    @property
    def most(self) -> int | None:
        """Matrices in a chunk; None for any number."""
        return None if self.chunk_size == ANY_SIZE else self.chunk_size

    @property
    def chunk_bytes(self) -> int:
        """What any rank sends and receives for the owners of one chunk."""
        return max(1, self.in_flight_bytes // in_flight(self.prefetch))


def config_of(
    distributed: DistributedConfig | None,
    *,
    warmup_step: int | None = None,
    chunk_size: int | None = None,
) -> DistributedConfig:
    """The record of an optimizer's arguments; None is what was not given.

    `warmup_step` is `prefetch` by the name that it has in Motif's optimizer.
    """
    if distributed is not None and not isinstance(distributed, DistributedConfig):
        raise TypeError(f"distributed must be a DistributedConfig or None, got {distributed!r}")
    if warmup_step is not None:
        check_count("warmup_step", plain_number(warmup_step), "Muon")
    both = {"prefetch": warmup_step, "chunk_size": chunk_size}
    given = {name: value for name, value in both.items() if value is not None}
    if given and distributed is not None:
        raise ValueError(
            f"give {' and '.join(given)} in distributed, where the rest is, and not as a keyword"
        )
    return DistributedConfig(**given) if distributed is None else distributed
