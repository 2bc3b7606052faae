"""Memory in which chunks are on their way: taken and given back in one order at every step.

It stays with the plan, so that a stage finds its messages where they were in the step before.
Blocks of one kind are equally large. Whoever gives one back has queued its last use on the current
stream, and the next one to take it goes on there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, wraps
from numbers import Integral
from typing import Any

import torch
from torch import Tensor

from ...distributed import in_flight
from ..groups.options import plain_number

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
        self._free[block.kind].append(block.whole)

    def held(self, device: torch.device) -> int:
        """Bytes of all blocks on a device."""
        kept = (blocks for (_, where), blocks in self._blocks.items() if where == device)
        return sum(block.numel() for blocks in kept for block in blocks)


# Bytes that a rank sends and receives on the way to the owners, of all chunks that are alive. With
# batches, results, answers and what an iteration works in, two to three times as much by count.
IN_FLIGHT_BYTES = 256 * 2**20
WARMUP = 1  # gathers launched before the first computation
ANY_SIZE = -1


@dataclass(frozen=True)
class Flow:
    """Chunks of matrices: how many are alive, and how large they may be.

    Args:
        warmup_step: gathers that are launched before the first computation.
        chunk_size: matrices in a chunk at most; -1 for as many as bytes allow.
        in_flight_bytes: what any rank sends and receives for the owners of all chunks that are
            alive; a chunk has one matrix of every owner in any case.
        cuda_graphs: whether stages that repeat themselves are replayed.

    Raises:
        ValueError, TypeError: the message names the argument.
    """

    warmup_step: int = WARMUP
    chunk_size: int = ANY_SIZE
    in_flight_bytes: int = IN_FLIGHT_BYTES
    cuda_graphs: bool = True

    def __post_init__(self) -> None:
        for name in ("warmup_step", "chunk_size", "in_flight_bytes"):
            object.__setattr__(self, name, plain_number(getattr(self, name)))
        _check_count("warmup_step", self.warmup_step, "")
        _check_count("in_flight_bytes", self.in_flight_bytes, "")
        if not isinstance(self.cuda_graphs, bool):
            raise TypeError(f"cuda_graphs must be True or False, got {self.cuda_graphs!r}")
        if self.chunk_size != ANY_SIZE:
            _check_count("chunk_size", self.chunk_size, ", or -1 for as many as bytes allow")

    @property
    def most(self) -> int | None:
        """Matrices in a chunk; None for any number."""
        return None if self.chunk_size == ANY_SIZE else self.chunk_size

    @property
    def chunk_bytes(self) -> int:
        """What any rank sends and receives for the owners of one chunk."""
        return max(1, self.in_flight_bytes // in_flight(self.warmup_step))


def _check_count(name: str, value: Any, otherwise: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name} must be an integer, at least 1{otherwise}, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1{otherwise}, got {value!r}")
