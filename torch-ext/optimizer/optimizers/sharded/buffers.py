"""Memory in which chunks are on their way: taken and given back in one order at every step.

It stays with the plan, so that a stage finds its messages where they were in the step before.
Blocks of one kind are equally large. Whoever gives one back has queued its last use on the current
stream, and the next one to take it goes on there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property, wraps
from typing import Any

import torch
from torch import Tensor

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
