"""What the chunks of one step share: state, memory on the way, and graphs of their stages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...distributed import Future
from ..groups.options import AdamWOptions, MuonOptions
from ..groups.parameters import locals_of
from ..stages.update import Rate
from ..state.device_state import OnDevice
from ..state.host_state import InHostMemory
from .buffers import Block, Staging
from .cuda_graphs import BESIDE, Body, Graphs, places, places_of_numbers
from .shared_matrices import SharedChunk
from .tape import Tape

State = Mapping[Tensor, Mapping[str, Tensor]]


@dataclass(frozen=True, eq=False)
class StepRun:
    """One step."""

    state: State  # of the optimizer
    kept: OnDevice | InHostMemory  # where the step finds it
    # Per parameter of groups with none_grad the chunks that still need its gradient; counted down.
    remaining: Counter[Tensor]
    staging: Staging
    graphs: Graphs
    tape: Tape

    def take(self, chunk: SharedChunk, name: str, size: int) -> Block:
        return self.staging.take(name, chunk.device, size)

    def give(self, *blocks: Block | None) -> None:
        for block in blocks:
            if block is not None:
                self.staging.give(block)

    def stage(
        self,
        name: str,
        chunk: SharedChunk,
        key: Callable[[], Any] | None,
        body: Body,
        touched: Sequence[Tensor] = (),
    ) -> None:
        """`Graphs.run` for a chunk. float64 learning rates do not fit the numbers of a graph.

        `touched`: what the body writes, and tells autograd of.
        """
        key = None if chunk.dtype == torch.float64 else key
        if self.tape.joins and key is not None:
            self.tape.join(name, chunk.device, body, touched)
            return
        self.tape.run_waiting()
        if not self.graphs.run((id(chunk), name), chunk.device, key, body):
            self.tape.spoil()
        elif touched:
            torch.autograd.graph.increment_version(touched)

    def stage_beside(
        self, name: str, chunk: SharedChunk, key: Callable[[], Any], body: Body
    ) -> Callable[[], None]:
        """`stage`, but a graph runs beside what follows.

        Launched one by one, kernels are not so many at once that it would help.

        Returns:
            What to call before its results are used, and before memory is that it uses.
        """
        known = None if chunk.dtype == torch.float64 else key
        joined = self.tape.joins and known is not None
        if joined:
            graph = self.graphs.captured(chunk.device, body, BESIDE)
        else:
            graph = self.graphs.of_stage((id(chunk), name), chunk.device, known, body, BESIDE)
        if graph is None:
            self.tape.spoil()
            self.tape.run_waiting()
            body()
            return _nothing
        going = self.graphs.beside(chunk.device, graph)
        self.tape.do(f"muon::{name}", going.start)
        return lambda: self.tape.do(f"muon::wait_{name}", going.wait)

    def launch(self, name: str, start: Callable[[], Future]) -> Future:
        """Start a transfer between memory that stays where it is."""
        going = _Going(name, start, self.tape)
        self.tape.do(f"muon::{name}", going.start)
        return going

    def release(self, chunk: SharedChunk) -> None:
        """Let go of the gradients that no later chunk needs."""
        self.tape.release(chunk.params)
        for param in chunk.params:
            self.remaining[param] -= 1
            if not self.remaining[param]:
                param.grad = None

    def rate(self, number: int, rate: Rate, chunk: SharedChunk) -> Rate:
        """The rate of a group with its numbers where graphs read them."""
        if rate.decay is not None or chunk.dtype == torch.float64:
            return rate
        return replace(
            rate,
            lr=self.graphs.number((number, "lr"), rate.lr, chunk.device),
            weight_decay=self.graphs.number((number, "decay"), rate.weight_decay, chunk.device),
        )

    def rate_of_adamw(self, number: int, options: AdamWOptions, chunk: SharedChunk) -> AdamWOptions:
        """Options of a group with its rate where graphs read it."""
        if chunk.dtype == torch.float64:
            return options
        return replace(
            options,
            lr=self.graphs.number((number, "lr"), options.lr, chunk.device),
            weight_decay=self.graphs.number((number, "decay"), options.weight_decay, chunk.device),
        )


def _nothing() -> None:
    """What ran in order is over."""


@dataclass(eq=False)
class _Going:
    """A transfer that a tape may start again."""

    name: str
    launch: Callable[[], Future]
    tape: Tape
    future: Future | None = None

    def start(self) -> None:
        self.future = self.launch()

    def arrive(self) -> Tensor:
        assert self.future is not None
        found, self.future = self.future.wait(), None
        return found

    def wait(self) -> Tensor:
        name = f"muon::wait_{self.name.removeprefix('launch_')}"
        return self.tape.do(name, self.arrive)


def key_of_step(
    options: Sequence[MuonOptions | AdamWOptions],
    params_of_groups: Sequence[Sequence[Tensor]],
    state: Any,
) -> Any:
    """All that a step of replayed stages depends on, but numbers that graphs read.

    None if there is more than can be told by looking.
    """
    rules = []
    for group in options:
        if isinstance(group, MuonOptions) and callable(group.adjust_lr_fn):
            return None
        plain = [
            type(value) if name in ("lr", "weight_decay") else value
            for name, value in vars(group).items()
        ]
        rules.append((plain, places_of_numbers(group)))
    params = [param for of_group in params_of_groups for param in of_group]
    grads = [param.grad for param in params]
    missing = [k for k, grad in enumerate(grads) if grad is None]
    kept = [
        value
        for of_param in state.values()
        for value in of_param.values()
        if isinstance(value, Tensor)
    ]
    tensors = [*params, *(grad for grad in grads if grad is not None), *kept]
    return rules, missing, places(locals_of(tensors))
