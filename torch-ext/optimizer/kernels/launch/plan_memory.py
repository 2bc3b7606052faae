"""Where the temporary tensors of a launch plan lie: which of them may share memory, and which do.

What an allocator gives to one stream is used in the order of that stream. So two tensors share
memory only where one stream orders their uses, or where both streams have met in between; and a
launch that begins before its predecessor ended counts as beside it (`launch_plan`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

_ALIGNMENT = 512  # bytes, as of torch's allocator
# One piece of memory for all temporary tensors may raise the peak of a call by a factor, or by so
# many bytes: an allocation less takes the host two microseconds less.
_PEAK, _SLACK = 1.01, 4 * 2**20


@dataclasses.dataclass(frozen=True)
class Span:
    """What needs memory for some of the steps.

    What two streams touch, or one of them beside the other, is there before they part and until
    they have met: the allocator knows of a block the current stream alone.

    Args:
        bytes: How much.
        steps: The first and the last step that touch it.
        region: The same, with all steps of the regions of two streams that they lie in.
        stream: The only one that touches it; None if there are several.
    """

    bytes: int
    steps: tuple[int, int]
    region: tuple[int, int]
    stream: int | None

    def meets(self, other: Span) -> bool:
        """Whether the two must not share memory."""
        in_order = self.stream is not None and self.stream == other.stream
        one, two = (self.steps, other.steps) if in_order else (self.region, other.region)
        return one[0] <= two[1] and two[0] <= one[1]


@dataclasses.dataclass(frozen=True)
class Piece:
    """One allocation, and the offset of each span in it."""

    bytes: int
    steps: tuple[int, int]
    offsets: dict[int, int]


def next_place(end: int) -> int:
    """Where the next tensor in a piece may begin."""
    return -(-end // _ALIGNMENT) * _ALIGNMENT


def arranged(
    results: dict[int, tuple[int, int]], spans: dict[int, Span], steps: int
) -> list[Piece]:
    """The allocations of a plan: one for all spans, or as few as do not keep too much.

    Args:
        results: Bytes of each result, and the step from which on it is there.
        spans: Of everything else.
        steps: Of the plan.
    """
    if not spans:
        return []
    together = _piece(spans)
    apart = {index: _piece({index: span}) for index, span in spans.items()}
    most = _peak(results, apart.values(), steps)
    enough = max(_PEAK * most, most + _SLACK)
    if _peak(results, [together], steps) <= enough:
        return [together]
    pieces: list[Piece] = []
    for index in sorted(spans, key=lambda index: -spans[index].bytes):
        own = apart.pop(index)
        for n, piece in enumerate(pieces):
            joined = _piece({one: spans[one] for one in (*piece.offsets, index)})
            others = (*pieces[:n], *pieces[n + 1 :], *apart.values())
            if _peak(results, (joined, *others), steps) <= enough:
                pieces[n] = joined
                break
        else:
            pieces.append(own)
    return pieces


def packed(spans: dict[int, Span]) -> dict[int, int]:
    """The offset of each span in one piece of memory."""
    offsets: dict[int, int] = {}
    for index in sorted(spans, key=lambda index: -spans[index].bytes):
        at = 0
        beside = sorted(
            (offsets[n], offsets[n] + spans[n].bytes)
            for n in offsets
            if spans[n].meets(spans[index])
        )
        for low, high in beside:
            if at + spans[index].bytes <= low:
                break
            at = max(at, next_place(high))
        offsets[index] = at
    return offsets


def _piece(spans: dict[int, Span]) -> Piece:
    offsets = packed(spans)
    regions = [span.region for span in spans.values()]
    life = (min(begin for begin, _ in regions), max(end for _, end in regions))
    return Piece(max(offsets[n] + span.bytes for n, span in spans.items()), life, offsets)


def _peak(results: dict[int, tuple[int, int]], pieces: Iterable[Piece], steps: int) -> int:
    """Most bytes at once."""
    return max(
        sum(size for size, begin in results.values() if begin <= at)
        + sum(one.bytes for one in pieces if one.steps[0] <= at <= one.steps[1])
        for at in range(steps + 1)
    )
