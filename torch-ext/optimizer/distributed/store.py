"""Values between ranks that may know nothing of each other, without a collective.

They go through the key-value store that the ranks of the default group found each other by. A rank
that never gives a value makes nobody wait longer than the others are willing to.
"""

from __future__ import annotations

from datetime import timedelta


def exchange(name: str, value: str, patience: timedelta) -> dict[int, str]:
    """Give the other ranks of the default group a value; returns those that count, by rank.

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
    from torch import distributed
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
