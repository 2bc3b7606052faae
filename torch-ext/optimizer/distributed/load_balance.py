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
    """Equal pieces of work in chunks that hold at most `limit` bytes on every rank.

    A turn takes one piece of every owner that has any left; a chunk has whole turns, so that every
    chunk has work for all owners, and at least one. All chunks but the last have as many.

    Args:
        owners: owner of each piece.
        owned: bytes of each piece on its owner.
        held: per piece, bytes of it on every rank before and after the work.
        limit: bytes.
        most: pieces in a chunk, of fewer owners if need be; None for any number.

    Returns:
        Numbers of pieces, each in one chunk.
    """
    queues: dict[int, list[int]] = {}
    for number, owner in enumerate(owners):
        queues.setdefault(owner, []).append(number)
    count = max(map(len, queues.values()), default=0)
    turns = [
        [queues[o][turn] for o in sorted(queues) if turn < len(queues[o])] for turn in range(count)
    ]
    if most is not None:
        turns = [turn[i : i + most] for turn in turns for i in range(0, len(turn), most)]

    def load(turn: list[int]) -> list[int]:
        ranks = range(len(held[turn[0]]))
        return [sum(held[i][r] + owned[i] * (owners[i] == r) for i in turn) for r in ranks]

    loads = [load(turn) for turn in turns]

    def joined(longest: int) -> list[list[int]]:
        """Turns in chunks of at most so many, within the limits."""
        chunks: list[list[int]] = []
        total: list[int] = []
        taken = 0
        for turn, added in zip(turns, loads, strict=True):
            total = [a + b for a, b in zip(total, added, strict=True)] if taken else added
            size = len(turn) + (len(chunks[-1]) if taken else 0)
            over = max(total) > limit or (most is not None and size > most)
            if not taken or taken == longest or over:
                chunks.append([])
                total, taken = added, 0
            chunks[-1] += turn
            taken += 1
        return chunks

    fewest = joined(len(turns))
    equal = joined(-(-len(turns) // max(1, len(fewest))))
    return [tuple(chunk) for chunk in min(equal, fewest, key=len)]
