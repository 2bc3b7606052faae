"""Values between ranks that may know nothing of each other, without a collective.

They go through the key-value store that the ranks of the default group found each other by. A rank
that never gives a value makes nobody wait longer than the others are willing to.
"""

from __future__ import annotations

from datetime import timedelta


def exchange(name: str, value: str, patience: timedelta) -> dict[int, str]:
    """Give the other ranks of the default group a value; returns theirs, by rank, and this one.

    The n-th call of a rank meets the n-th call of every other one with the same `name`.

    Args:
        name: of the exchange.
        value: of this rank.
        patience: how long to wait for ranks that have not given theirs.

    Raises:
        RuntimeError: the store does not answer.
    """
    from torch import distributed
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    if store is None:  # of a group that MPI made
        raise RuntimeError("the default process group has no store")
    store = distributed.PrefixStore(name, store)
    rank, world = distributed.get_rank(), distributed.get_world_size()
    call = store.add(f"calls/{rank}", 1)
    keys = {other: f"{call}/{other}" for other in range(world)}
    store.set(keys[rank], value)
    try:
        store.wait([*keys.values()], patience)
        here = keys
    except RuntimeError:  # in time, or for good: then what follows raises too
        here = {other: key for other, key in keys.items() if store.check([key])}
    values = store.multi_get([*here.values()])
    return {other: found.decode() for other, found in zip(here, values, strict=True)}
