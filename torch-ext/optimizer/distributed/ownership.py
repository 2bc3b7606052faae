"""Which rank does which piece of work, so that all finish at about the same time."""

from __future__ import annotations

from collections.abc import Sequence


def assign(
    costs: Sequence[float], candidates: Sequence[Sequence[int]], ranks: int
) -> tuple[int, ...]:
    """An owner for every piece of work, by longest processing time first.

    Work that only one rank can do is counted first; the rest goes, from the most expensive piece
    to the cheapest, to the candidate that has the least to do so far. Without restrictions the
    busiest rank has at most 4/3 - 1/(3 ranks) times the least possible load (Graham, Bounds on
    multiprocessing timing anomalies, 1969). Ties go to the earlier piece and the lower rank, so
    that every rank that computes it gets the same answer.

    Args:
        costs: predicted time of each piece, in any unit.
        candidates: the ranks that may do it, at least one each.
        ranks: how many there are.

    Returns:
        One rank per piece.

    Raises:
        ValueError: a piece without candidates, or a candidate that is no rank.
    """
    for number, allowed in enumerate(candidates):
        if not allowed or not all(0 <= rank < ranks for rank in allowed):
            raise ValueError(
                f"piece {number} has candidates {tuple(allowed)}; give at least one of the ranks "
                f"0 to {ranks - 1}"
            )
    order = sorted(range(len(costs)), key=lambda i: (len(candidates[i]) > 1, -costs[i], i))
    load = [0.0] * ranks
    owners = [0] * len(costs)
    for number in order:
        owner = min(candidates[number], key=lambda rank: (load[rank], rank))
        owners[number] = owner
        load[owner] += costs[number]
    return tuple(owners)


def chunked(
    owners: Sequence[int],
    owned: Sequence[int],
    held: Sequence[Sequence[int]],
    limit: int,
    most: int | None = None,
) -> list[tuple[int, ...]]:
    """Pieces of work in chunks that hold at most `limit` bytes on every rank, or a single piece.

    Each owner's pieces are taken in turn, so that every chunk has work for all owners.

    Args:
        owners: owner of each piece.
        owned: bytes of each piece on its owner.
        held: per piece, bytes of it on every rank before and after the work.
        limit: bytes.
        most: pieces in a chunk; None for any number.

    Returns:
        Numbers of pieces, each in one chunk.
    """
    queues: dict[int, list[int]] = {}
    for number, owner in enumerate(owners):
        queues.setdefault(owner, []).append(number)
    turns = max(map(len, queues.values()), default=0)
    order = [
        queues[o][turn] for turn in range(turns) for o in sorted(queues) if turn < len(queues[o])
    ]
    chunks: list[tuple[int, ...]] = []
    current: list[int] = []
    load: list[int] = []
    for number in order:
        added = list(held[number])
        added[owners[number]] += owned[number]
        total = [a + b for a, b in zip(load, added, strict=True)] if current else added
        if current and (max(total) > limit or len(current) == most):
            chunks.append(tuple(current))
            current, total = [], added
        current.append(number)
        load = total
    return [*chunks, tuple(current)] if current else chunks
