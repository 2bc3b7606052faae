"""What a step works through, and what it was made for; looked at in every step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .chunks import Chunk
from .sharded.layouts import Forms, same_objects
from .sharded.shared_matrices import Shared
from .stages.qk_clip import Batch
from .state.device_state import OnDevice


@dataclass(frozen=True, eq=False)
class Plan:
    """The work of a step, per group where it is a list, and the groups and the state it is for."""

    layouts: list[tuple[Any, ...]]  # options that decide what is cut how
    forms: list[Forms]
    keys: list[Any]  # of the optimizer's state
    states: list[Any]
    filled: list[Mapping[str, Tensor]]  # those of parameters
    sizes: list[int]  # entries of each of these
    numbers: dict[Tensor, int]  # of every parameter in the optimizer, over all groups
    chunks: list[list[Chunk]]  # none for AdamW
    empty: list[
        list[Tensor]
    ]  # parameters without elements, whose gradients are let go all the same
    clips: list[Batch]  # what QK-clip scales
    rows: dict[Tensor, Tensor | None]  # of each of its parameters, those that are here
    shared: Shared  # what several ranks work on
    on_device: OnDevice

    @property
    def labelled(self) -> list[list[tuple[str, Tensor]]]:
        """(name for messages, parameter), per group."""
        return [forms.named for forms in self.forms]

    def fits(
        self,
        layouts: list[tuple[Any, ...]],
        params: Sequence[Sequence[Tensor]],
        state: Mapping[Any, Any],
    ) -> bool:
        """Whether groups, parameters, the options of their layout and the state are the same."""
        return (
            layouts == self.layouts
            and same_objects([*state.values()], self.states)
            and same_objects([*state], self.keys)
            and self.finds_all_state()
            and all(
                forms.hold(of_group) for forms, of_group in zip(self.forms, params, strict=True)
            )
        )

    def finds_all_state(self) -> bool:
        """Whether no entry of a parameter's state was taken away."""
        return [*map(len, self.filled)] == self.sizes
