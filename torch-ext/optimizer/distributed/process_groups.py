"""The ranks that share the work on some tensors, and the process group they talk over.

Also values between ranks that may know nothing of each other, without a collective: they go through
the key-value store that the ranks of the default group found each other by.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from .shards import Layout, Split, splits_of
from .transport import GroupTransport, Identity, Transport


@dataclass(frozen=True, eq=False)
class Team:
    """Ranks in the order of their group, and where each stands on the mesh."""

    transport: Transport
    rank: int  # of this process in the group
    coordinates: tuple[tuple[int, ...], ...]  # per rank of the group
    mesh: tuple[int, ...]  # sizes of the mesh dimensions

    @property
    def size(self) -> int:
        return len(self.coordinates)

    def layout(self, shape: tuple[int, ...], placements: Any = None) -> Layout:
        """A tensor with placements on this mesh; without any, every rank holds all of it."""
        splits = (Split(None),) * len(self.mesh)
        if placements is not None:
            splits = splits_of(placements, len(shape))
        return Layout(shape, self.mesh, splits)


def alone() -> Team:
    """A team of this process only."""
    return Team(Identity(), 0, ((0,),), (1,))


class Teams:
    """The teams of an optimizer, one per set of ranks, made when first asked for.

    Making one for a mesh of several dimensions creates a process group of its ranks, unless they
    are all ranks; every one of them must ask, in the same order.
    """

    def __init__(self, others: Teams | None = None) -> None:
        """`others`: of an optimizer that this one is a copy of, whose process groups it shares."""
        self._groups: dict[tuple[int, ...], Any] = {} if others is None else others._groups
        self._of_mesh: dict[Any, Team] = {}

    def of_mesh(self, mesh: Any) -> Team:
        """The ranks of a DeviceMesh.

        Raises:
            ValueError: this process is not on the mesh.
        """
        if mesh not in self._of_mesh:
            if mesh.get_coordinate() is None:
                raise ValueError(
                    f"this rank is not on the mesh {mesh}; give its parameters only to the "
                    "optimizers of the ranks that hold them"
                )
            shape = tuple(mesh.mesh.shape)
            positions = itertools.product(*map(range, shape))
            places = {int(mesh.mesh[position]): position for position in positions}
            ranks = tuple(sorted(places))
            self._of_mesh[mesh] = self._team(
                mesh.get_group() if mesh.ndim == 1 else self._group(ranks, mesh.device_type),
                places,
                shape,
            )
        return self._of_mesh[mesh]

    def of_group(self, group: Any) -> Team:
        """The ranks of a process group, in a row."""
        ranks = distributed.get_process_group_ranks(group)
        return self._team(group, {rank: (i,) for i, rank in enumerate(ranks)}, (len(ranks),))

    def _group(self, ranks: tuple[int, ...], device: str) -> Any:
        if len(ranks) == distributed.get_world_size():
            return distributed.group.WORLD
        if ranks not in self._groups:
            self._groups[ranks] = distributed.new_group(
                list(ranks), timeout=_timeout(device), use_local_synchronization=True
            )
        return self._groups[ranks]

    def _team(self, group: Any, places: dict[int, tuple[int, ...]], mesh: tuple[int, ...]) -> Team:
        ranks = distributed.get_process_group_ranks(group)
        coordinates = tuple(places[rank] for rank in ranks)
        if len(ranks) == 1:
            return Team(Identity(), 0, coordinates, mesh)
        return Team(GroupTransport(group), distributed.get_rank(group), coordinates, mesh)


def exchange(name: str, value: str, patience: timedelta) -> dict[int, str]:
    """Give the other ranks of the default group a value; returns those that count, by rank.

    A rank that never gives a value makes nobody wait longer than the others are willing to.
    The n-th call of a rank meets the n-th call of every other one with the same `name`. Which ranks
    count is decided once, for all of them: by the first that has the values of all ranks, or waits
    no longer. Ranks that come later get the same values, without their own.

    Args:
        name: of the exchange.
        value: of this rank.
        patience: how long to wait for ranks that have not given theirs.

    Raises:
        RuntimeError: the store does not answer.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    if store is None:  # of a group that MPI made
        raise RuntimeError("the default process group has no store")
    store = distributed.PrefixStore(name, store)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    call = store.add(f"calls/{rank}", 1)
    keys = {other: f"{call}/{other}" for other in range(world)}
    decided = f"{call}/counted"
    store.set(keys[rank], value)
    here = [*keys]
    if not store.check([decided]):
        try:
            store.wait([*keys.values()], patience)
        except RuntimeError:  # in time, or for good: then what follows raises too
            here = [other for other, key in keys.items() if store.check([key])]
    first = store.compare_set(decided, "", " ".join(map(str, here))).decode()
    counted = [int(other) for other in first.split()]
    values = store.multi_get([keys[other] for other in counted])
    return {other: found.decode() for other, found in zip(counted, values, strict=True)}


def _timeout(device: str) -> timedelta | None:
    """How long a collective of all ranks may take, which new groups do not take over; or None."""
    backend = distributed.group.WORLD._get_backend(torch.device(device))
    return getattr(getattr(backend, "options", None), "_timeout", None)
