"""Which path each call took, why it was not the fused one, and the error of `strict`.

Calls are counted when they run: one call of a compiled graph counts as an eager one does, a replay
of a CUDA graph does not count at all, because no Python runs then.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from .. import dispatch
from ..distributed import CommUnavailable

FUSED, PLAIN, ALONE = "fused", "plain", "alone"
FUSE = ("auto", "always", "never")

ASKED = 'fuse="never" was asked for'
ON_CPU = "symmetric memory is CUDA's, and the tensors are not on a CUDA device"
FIRST_IN_CAPTURE = (
    "the first call of a group was captured in a CUDA graph; ranks prepare their symmetric memory "
    "together in a call before"
)
WORKSPACE = (
    "the group's symmetric workspace would have to grow while a CUDA graph is captured; make a "
    "call of the largest size before"
)
SMALL = (
    "what travels is too small to be hidden in parts; the limit is for ranks of about an H200's "
    'speed, and fuse="always" ignores it'
)
NARROW = "gathered along the last dimension, shards of fewer than 1024 columns are slower fused"
SCALED_COLUMNS = (
    "gathered along the last dimension, a scaled product in parts adds them up in memory, which is "
    'not known to be faster; fuse="always" takes it'
)
SCALED_MULTIPLE = (
    "gathered along the last dimension, a rank's columns are not a multiple of 16, which float8 "
    "products take"
)
SCALE_ALIGNMENT = (
    "rows of scales cannot be cut into parts of 16 bytes: a rank's rows are not a multiple of 4"
)
SCALED_TRANSPOSE = (
    "scattered along the last dimension, the scaled product is computed transposed, which takes "
    "rows in multiples of 16"
)
NO_FP8 = "float8 products of the tensor cores start at compute capability 8.9"


@dataclass(frozen=True)
class CommRecord:
    """How often an operation took a path.

    Attributes:
        op: Name of the operation.
        path: "fused", "plain" (collectives beside a product) or "alone" (a group of one rank).
        reason: Why it was not fused; None where it was, or where there was nothing to fuse.
        calls: How often, since the start of the process or `reset_comm_report`.
    """

    op: str
    path: str
    reason: str | None
    calls: int


_calls: Counter[tuple[str, str, str | None]] = Counter()


def comm_report() -> tuple[CommRecord, ...]:
    """Every operation of this process, the path it took and why, in the order of the first calls.

    Returns:
        One `CommRecord` for each operation, path and reason that occurred on this rank.
    """
    return tuple(CommRecord(*key, calls) for key, calls in _calls.items())


def reset_comm_report() -> None:
    """Forget what `comm_report` has counted."""
    _calls.clear()


def count(op: str, path: str, reason: str | None = None) -> None:
    """Count a call."""
    _calls[op, path, reason] += 1


def count_plain(op: str, reason: str, *, strict: bool) -> None:
    """Count a call that is not fused; `strict` raises, otherwise each reason is logged once.

    Raises:
        CommUnavailable: strict, and nobody asked for the plain path.
    """
    if reason == ASKED:
        count(op, PLAIN, reason)
        return
    if strict:
        raise CommUnavailable(f"{op} is not fused: {reason}")
    count(op, PLAIN, reason)
    dispatch.say_once("%s is not fused: %s", op, reason)
