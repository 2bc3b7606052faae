"""The LoRA adapters of a whole stack of experts: both projections under one set of names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .layout import ExpertsLayout, ExpertsLora
from .lora import LoraProjection, checked_alpha

PROJECTIONS = ("gate_up", "down")


class ExpertAdapters(nn.ModuleDict):
    """A `LoraProjection` each for "gate_up" and "down", which may hold different adapters.

    Args:
        num_experts: E.
        hidden: H, the input of gate_up and the output of down.
        intermediate: I, the input of down.
        layout: says whether gate_up has 2I columns or I.
    """

    def __init__(
        self, num_experts: int, hidden: int, intermediate: int, layout: ExpertsLayout
    ) -> None:
        width = layout.width(intermediate)
        gate_up = LoraProjection(num_experts, hidden, width)
        super().__init__(
            {"gate_up": gate_up, "down": LoraProjection(num_experts, intermediate, hidden)}
        )
        self.layout = layout

    def add_adapter(
        self,
        name: str = "default",
        *,
        r: int,
        alpha: float,
        targets: Sequence[str] = PROJECTIONS,
        **options: Any,
    ) -> None:
        """Add an adapter to the targets.

        Args:
            name: of the adapter.
            r: rank.
            alpha: the update is scaled by alpha / r (rslora=True: alpha / sqrt(r)).
            targets: "gate_up", "down" or both.
            **options: of `LoraProjection.add_adapter`.

        Raises:
            ValueError: an unknown target, or what `LoraProjection.add_adapter` refuses; no target
                has the adapter then.
        """
        if isinstance(targets, str) or not targets or set(targets) - set(PROJECTIONS):
            raise ValueError(f"targets must be some of {PROJECTIONS}, got {targets!r}")
        targets = tuple(dict.fromkeys(targets))
        for target in targets:
            self[target].check_adapter(name, r, **options)
        checked_alpha(alpha)
        for target in targets:
            self[target].add_adapter(name, r, alpha, **options)

    def set_adapter(self, name: str | None) -> None:
        """Use an adapter wherever a projection has it; None uses none.

        Raises:
            ValueError: no projection has it, several are named, or one is merged.
        """
        having = [p for p in self.values() if name is None or name in p.adapters]
        if not having:
            self["gate_up"].check_known(name)
        for projection in self.values():
            projection.check_separate("set_adapter")
        for projection in self.values():
            projection.set_adapter(name if projection in having else None)

    @contextlib.contextmanager
    def disabled(self) -> Iterator[None]:
        """LoRA is off inside the with block, as for the reference model of DPO."""
        with contextlib.ExitStack() as stack:
            for projection in self.values():
                stack.enter_context(projection.disabled())
            yield

    def factors(self) -> ExpertsLora | None:
        """What the experts must add to their base; None where there is nothing."""
        gate_up, down = (self[target].factors() for target in PROJECTIONS)
        return ExpertsLora(gate_up, down) if gate_up or down else None

    @property
    def merged(self) -> bool:
        """Whether an adapter is part of the weights now."""
        return any(projection.merged for projection in self.values())

    def merge(
        self, weights: Mapping[str, Tensor], *, keep_on: torch.device | str | None = None
    ) -> None:
        """Add the active adapter to the weights in place; copies are kept for `unmerge`.

        Args:
            weights: the weight of each projection, in the layout's order of dimensions.
            keep_on: device of the copies, e.g. "cpu"; None: the weights' own.

        Raises:
            ValueError: no adapter is active, one is merged already, not finite or of another
                shape. Nothing has been written then.
        """
        active = [target for target in PROJECTIONS if self[target].active is not None]
        if not active:
            raise ValueError("no adapter is active; set_adapter(name) first")
        for target in active:
            self[target].check_mergeable(weights[target], self.layout)
        for target in active:
            self[target].merge(weights[target], self.layout, keep_on=keep_on)

    def unmerge(self, weights: Mapping[str, Tensor]) -> None:
        """Put the weights back as they were before `merge`, bit for bit.

        Raises:
            ValueError: nothing is merged.
        """
        if not self.merged:
            raise ValueError("nothing is merged; merge an adapter first")
        for target in PROJECTIONS:
            if self[target].merged:
                self[target].unmerge(weights[target])

    def discard(self) -> None:
        """Drop all adapters and kept copies: what is merged stays in the weights."""
        for projection in self.values():
            projection.discard()
