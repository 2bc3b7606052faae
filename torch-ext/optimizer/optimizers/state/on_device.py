"""Optimizer state beside its parameters, and what a batch of a step asks of it."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...kernels.step.tensor_lists import MAX_DIMS
from ..groups.parameters import local, locals_of
from ..plan import Chunk, Member
from ..sharded.chunks import Held, SharedChunk

State = MutableMapping[Tensor, dict[str, Tensor]]


@dataclass(frozen=True, eq=False)
class AdamWWork:
    """What AdamW steps together, of one tensor per entry; state may be that of a DTensor."""

    params: list[Tensor]  # of the optimizer
    tensors: list[Tensor]  # what is here of them, or rows of that
    grads: list[Tensor]
    states: list[Mapping[str, Tensor]]
    first: list[int]  # number of each tensor's first element in its parameter
    uniform: bool = False  # plain, of few dimensions, on one device, all or none float64

    def part(self, members: Sequence[int]) -> AdamWWork:
        """The entries with these numbers."""
        lists = (self.params, self.tensors, self.grads, self.states, self.first)
        return AdamWWork(*([entries[k] for k in members] for entries in lists))


@dataclass(frozen=True, eq=False)
class Together:
    """Parameters of a group on one device, all or none float64: one call unless some are odd."""

    params: list[Tensor]
    states: list[Mapping[str, Tensor]]
    flat: bool  # none has more dimensions than a kernel takes


class OnDevice:
    """State beside its parameters: a batch finds it there. Made for a plan, and kept with it.

    It remembers the dict of every parameter, and no tensor: these are looked up at every step.
    """

    def __init__(self, state: State, adamw: Sequence[Sequence[Tensor]]) -> None:
        """For the parameters that AdamW steps, per group."""
        self._state = state
        self._together = [_together(params, state) for params in adamw]

    def batches(self, number: int) -> list[Any]:
        """What AdamW steps together of group `number`."""
        return self._together[number]

    def device_of(self, batch: Together) -> torch.device:
        return batch.params[0].device

    def enter(self, work: Any) -> None:
        """Before the first use of a batch's state."""

    def leave(self, work: Any) -> None:
        """After its last use."""

    def piece(self, member: Member, key: str) -> Tensor:
        """The part of a state tensor that belongs to a piece of its parameter."""
        return member.view(member.state[key])

    def pieces(self, chunk: Chunk, key: str) -> list[Tensor]:
        """`piece` of every member."""
        return chunk.views([member.state[key] for member in chunk.members])

    def boxes(self, chunk: SharedChunk, here: Sequence[Held], key: str) -> list[Tensor]:
        """What this rank has of matrices, in state tensors that are placed like the parameters."""
        params = chunk.params_of(here)
        return chunk.views(here, locals_of([self._state[param][key] for param in params]))

    def adamw(self, batch: Together, *, usual: bool) -> AdamWWork:
        """The parameters of a batch that have a gradient: `usual`, if all have one of their form"""
        if usual and batch.flat:
            params = batch.params
            grads = [param.grad for param in params]
            return AdamWWork(params, params, grads, batch.states, [0] * len(params), uniform=True)
        params = [param for param in batch.params if param.grad is not None]
        return AdamWWork(
            params=params,
            tensors=[local(param) for param in params],
            grads=[local(param.grad) for param in params],
            states=[self._state[param] for param in params],
            first=[0] * len(params),
        )

    def finished(self, batch: Together) -> Sequence[Tensor]:
        """Parameters of which no later batch has a part."""
        return batch.params


def _together(params: Sequence[Tensor], state: State) -> list[Together]:
    parts: dict[tuple[torch.device, bool], list[Tensor]] = {}
    for param in params:
        parts.setdefault((param.device, param.dtype is torch.float64), []).append(param)
    return [
        Together(
            params=part,
            states=[state[param] for param in part],
            flat=all(param.ndim <= MAX_DIMS for param in part),
        )
        for part in parts.values()
    ]
