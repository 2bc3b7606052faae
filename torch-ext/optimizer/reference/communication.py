"""What the copies and signals between GPUs do, by plain torch on any device.

Words are uint32, and epochs only grow: they begin again at 0 behind 2^32 - 1.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

PAUSE = 1e-4  # seconds between two looks of the host at a signal


def push(dsts: Sequence[Tensor], srcs: Sequence[Tensor]) -> None:
    """Copy every source into the destination of its place."""
    for dst, src in zip(dsts, srcs, strict=True):
        dst.detach().copy_(src)


def memset32(x: Tensor, offset: int, value: int, count: int) -> None:
    """Words offset to offset + count of x become the value."""
    x[offset : offset + count].fill_(value)


def stream_write_value32(x: Tensor, offset: int, value: int) -> None:
    """One word becomes the value."""
    memset32(x, offset, value, 1)


def has_reached(word: int, epoch: int) -> bool:
    """Whether a word is at an epoch or at one of the 2^31 - 1 behind it."""
    return (word - epoch) % (1 << 32) < 1 << 31


def late(flags: Tensor, value: int) -> int:
    """The index of the first word that has not reached the value; -1 if there is none."""
    words = flags.tolist()
    return next((i for i, word in enumerate(words) if not has_reached(word, value)), -1)


def wait_signals(
    flags: Tensor,
    value: int,
    timeout_ms: int,
    status: Tensor,
    next: Tensor | None = None,
    clear: Sequence[Tensor] = (),
) -> None:
    """Wait until every word has reached the value; else 1 + the index of the first late one."""
    end = time.monotonic() + timeout_ms / 1000
    while status.item() == 0 and (missing := late(flags, value)) >= 0:
        if time.monotonic() > end:
            status.fill_(missing + 1)
        else:
            time.sleep(PAUSE)
    if status.item() == 0:
        if next is not None:
            next.fill_((value + 1) % (1 << 32))
    else:
        for one in clear:
            one.zero_()


def progress_matmul(
    a: Tensor, b: Tensor, signals: Tensor, epoch: int, timeout_ms: int, status: Tensor
) -> Tensor:
    """(M, K) times (K, N) once the rows of a have arrived in one chunk per signal."""
    wait_signals(signals, epoch, timeout_ms, status)
    return a @ b
