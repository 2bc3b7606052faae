"""A step as a list: launches, waits and nothing else, played again while nothing has changed."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .timing import stage

Act = Callable[[], Any]


class Tape:
    """What a step of replayed stages did, in order."""

    def __init__(self) -> None:
        self._acts: list[tuple[str, Act]] = []
        self._touched: dict[int, Tensor] = {}
        self._released: dict[int, Tensor] = {}
        self._key: Any = None
        self._whole = False

    def begin(self) -> None:
        """Record a step from here on."""
        self._acts, self._touched, self._released = [], {}, {}
        self._key, self._whole = None, True

    def note(self, name: str, act: Act, touched: Iterable[Tensor] = ()) -> None:
        """Something was done that can be done again; it wrote to `touched`."""
        self._acts.append((name, act))
        self._touched |= {id(tensor): tensor for tensor in touched}

    def release(self, params: Iterable[Tensor]) -> None:
        """Gradients of these were let go of."""
        self._released |= {id(param): param for param in params}

    def spoil(self) -> None:
        """Something was done that is on no tape."""
        self._whole = False

    def end(self, key: Any) -> None:
        """The step is over; it can be played where the key is the same."""
        self._key = key if self._whole else None
        if not self._whole:
            self._acts, self._touched, self._released = [], {}, {}

    def fits(self, key: Any) -> bool:
        return self._key is not None and self._key == key

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
