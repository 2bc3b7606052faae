"""A step as a list: launches, waits and nothing else, played again while nothing has changed.

Between two exchanges there is one launch: what several stages do there is one graph. Beside it, on
the other stream, may go another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..timing import stage
from .cuda_graphs import Body, Graphs

Act = Callable[[], Any]


class Tape:
    """What a step did, in order.

    After a step in which every stage was replayed comes one, if nothing but rates changed, whose
    stages are captured again, those between two exchanges together. It is what later steps play.
    """

    def __init__(self, graphs: Graphs) -> None:
        self._graphs = graphs
        self._acts: list[tuple[str, Act]] = []
        self._waiting: list[tuple[str, Body]] = []
        self._device: torch.device | None = None
        self._touched: dict[int, Tensor] = {}
        self._released: dict[int, Tensor] = {}
        self._key: Any = None  # of the last step, if all of it can be replayed
        self._this_key: Any = None
        self._whole = False
        self._recorded = False
        self.joins = False  # whether the stages of this step are captured together

    def begin(self, key: Any) -> None:
        """Start a step that is not played. `key`: all that it depends on; None if unknown."""
        self.joins = key is not None and key == self._key
        self._key, self._this_key = None, key
        self._whole, self._recorded = key is not None, False
        self._acts, self._waiting, self._touched, self._released = [], [], {}, {}

    def join(self, name: str, device: torch.device, body: Body, touched: Iterable[Tensor]) -> None:
        """Run a stage with those around it. It writes to `touched`."""
        if device != self._device:
            self.run_waiting()
        self._device = device
        self._waiting.append((name, body))
        self._touched |= {id(tensor): tensor for tensor in touched}

    def do(self, name: str, act: Act) -> Any:
        """Do what can be done again, after the stages that wait."""
        self.run_waiting()
        if self.joins:
            self._acts.append((name, act))
        return act()

    def release(self, params: Iterable[Tensor]) -> None:
        """Gradients of these were let go of."""
        if self.joins:
            self._released |= {id(param): param for param in params}

    def spoil(self) -> None:
        """Something was done that cannot be played."""
        self._whole = False

    def end(self) -> None:
        """The step is over."""
        self.run_waiting()
        self._key = self._this_key if self._whole else None
        self._recorded = self.joins and self._whole
        self.joins = False
        if not self._recorded:
            self._acts, self._touched, self._released = [], {}, {}

    def run_waiting(self) -> None:
        """Capture the stages that wait as one graph, and replay it."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        assert self._device is not None

        def body() -> None:
            for _, part in waiting:
                part()

        graph = self._graphs.captured(self._device, body)
        if graph is None:
            self.spoil()
            body()
            return
        names = dict.fromkeys(name for name, _ in waiting)
        self._acts.append((f"muon::{'+'.join(names)}", graph.replay))
        graph.replay()

    def fits(self, key: Any) -> bool:
        """Whether the step of this key can be played."""
        return self._recorded and self._key == key

    def play(self, meanwhile: Act) -> None:
        """The step again, with other work where it was."""
        for name, act in self._acts:
            with stage(name):
                (meanwhile if act is under_the_first_gathers else act)()
        if self._touched:
            torch.autograd.graph.increment_version([*self._touched.values()])
        for param in self._released.values():
            param.grad = None


def under_the_first_gathers() -> None:
    """Stands on a tape for work that every step brings anew."""
