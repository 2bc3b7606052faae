"""What the ranks of a team must have in common, as texts that every rank writes alike."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from ...distributed import Team
from ..groups.parameters import is_dtensor
from .digest import word
from .shared_matrices import DIGESTED, OWNERS, Common
from .unreduced import SmallChunk, parts_of


@dataclass(frozen=True, eq=False)
class _Members:
    team: Team
    labelled: list[tuple[str, Tensor]] = field(default_factory=list)
    groups: dict[int, None] = field(default_factory=dict)


class Members:
    """The shared parameters of a plan, by team, as they are found."""

    def __init__(self) -> None:
        self._teams: dict[int, _Members] = {}

    def add(self, team: Team, number: int, where: str, param: Tensor) -> None:
        """A parameter of group `number`, which must have a gradient on all ranks or on none."""
        members = self._teams.setdefault(id(team), _Members(team))
        members.labelled.append((where, param))
        members.groups[number] = None

    def commons(
        self,
        chunks: Sequence[Sequence[Any]],
        settings: Mapping[str, Any],
        alike: Mapping[int, bool],
    ) -> list[Common]:
        """Per team what its ranks must agree on.

        Args:
            chunks: of the plan, per group.
            settings: of the optimizer, of the names in LAYOUT.
            alike: id of a team -> as of `Common`.
        """
        found = []
        for members in self._teams.values():
            groups = sorted(members.groups)
            found_here = {
                **settings,
                "number of groups": len(groups),
                "number of parameters": len(members.labelled),
                "shapes, dtypes and placements": [_form(param) for _, param in members.labelled],
                OWNERS: [*_owners(members.team, chunks)],
            }
            layout = {
                name: str(word(str(value)) if name in DIGESTED else value)
                for name, value in found_here.items()
            }
            found.append(
                Common(members.team, members.labelled, groups, layout, alike.get(id(members.team)))
            )
        return found


def _form(param: Tensor) -> tuple[Any, ...]:
    placing: tuple[Any, ...] = ()
    if is_dtensor(param):
        placing = tuple(param.placements), tuple(param.device_mesh.shape)
    return tuple(param.shape), param.dtype, param.device.type, *placing


def _owners(team: Team, chunks: Sequence[Sequence[Any]]) -> Iterable[tuple[Any, ...]]:
    """What travels in every chunk of a team: matrices, owners, dtype."""
    for chunk in itertools.chain.from_iterable(chunks):
        if isinstance(chunk, SmallChunk):
            yield len(chunk.params), chunk.dtype
        for part in parts_of(chunk):
            if part.team is team:
                yield part.matrix, part.owners, part.wire
