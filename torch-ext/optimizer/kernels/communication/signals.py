"""Signals: uint32 words by which one stream tells another, or another GPU, that data are there.

path     | op                                           | taken
compiled | stream_write_value32, memset32, wait_signals | CUDA, kernels-src/communication
torch    | none                                         | everything else; the host waits

A writer copies, then writes an epoch; a reader waits for that epoch, then reads. Epochs only grow,
and begin again at 0 behind 2^32 - 1: a word has reached an epoch if it is at most 2^31 - 1 past it.
No wait traps or hangs: it gives up after its time and says in `status` which word was late.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import register_fake

from ... import dispatch
from ..._ops import add_op_namespace_prefix, ops
from ...reference import communication as reference
from ..checks import check_dense, check_device, check_tensor

WORDS = 1 << 32
LONGEST_MS = 1 << 40  # nanoseconds_of of kernels-src/communication/status.h
MOST_CLEARED = 64  # kMostCleared of kernels-src/communication/wait_signals.cu


@register_fake(add_op_namespace_prefix("stream_write_value32"))
def _fake_write(x, offset, value):
    return None


@register_fake(add_op_namespace_prefix("memset32"))
def _fake_memset(x, offset, value, count):
    return None


@register_fake(add_op_namespace_prefix("wait_signals"))
def _fake_wait(flags, value, epoch, timeout_ms, status, next, clear):
    return None


def stream_write_value32(t: Tensor, offset: int, value: int) -> None:
    """Set t[offset] to a value on the current stream, behind all that the stream did before.

    On CUDA the stream itself writes the word (cuStreamWriteValue32) behind a fence of the system,
    so that whoever sees it, a peer included, sees copies before it. No kernel runs. A CUDA graph
    captures a fence and a memset in its place.

    Args:
        t: (n,) uint32, contiguous.
        offset: which word.
        value: in [0, 2^32).

    Raises:
        TypeError: t is no uint32 tensor, or a number is no integer.
        ValueError: t is not flat and contiguous, or offset or value is out of range.
    """
    _check_words(t, offset, value, 1)
    if dispatch.runs_compiled("stream_write_value32", t.device):
        ops.stream_write_value32(t, offset, value)
    else:
        reference.stream_write_value32(t, offset, value)


def memset32(t: Tensor, offset: int, value: int, count: int) -> None:
    """Set t[offset : offset + count] to a value on the current stream.

    On CUDA a fence of the system and a memset, which a grid that waits for the words does not hold
    up, and which a CUDA graph captures.

    Args:
        t: (n,) uint32, contiguous.
        offset: the first word.
        value: in [0, 2^32).
        count: how many words; 0 writes none.

    Raises:
        TypeError: t is no uint32 tensor, or a number is no integer.
        ValueError: t is not flat and contiguous, or offset, count or value is out of range.
    """
    _check_words(t, offset, value, count)
    if dispatch.runs_compiled("memset32", t.device):
        ops.memset32(t, offset, value, count)
    else:
        reference.memset32(t, offset, value, count)


def wait_signals(
    flags: Tensor,
    value: int | Tensor,
    timeout_ms: int,
    status: Tensor,
    next: Tensor | None = None,
    clear: Sequence[Tensor] = (),
) -> None:
    """Let the current stream wait until every word has reached a value.

    On CUDA one warp waits; the host does not, and a CUDA graph can capture it. Elsewhere the host
    waits. What the writers did before they wrote their words is seen by what follows on the stream.
    A wait whose status is set gives up at once, so that of many waits in a row only the first costs
    its time; the caller reads the status, raises, and sets it to 0 before it waits again.

    Args:
        flags: (n,) uint32, contiguous; a peer's memory is allowed.
        value: the epoch, in [0, 2^32); or (1,) uint32 on the device of the flags, read when the
            wait begins, so that every replay of a graph can wait for another one.
        timeout_ms: how long, in milliseconds.
        status: (1,) int32 on the device of the flags, or in pinned memory, where the host reads it
            without a copy. Gets 1 + the index of the first late word; untouched if none is late.
        next: (1,) uint32 on the device of the flags, may be `value`; gets value + 1, modulo 2^32,
            once all words are there, so that what is sent on is a good signal then and only then.
        clear: at most 64 tensors, uint8, contiguous, on the device of the flags; peers' memory is
            allowed. They become zeros if the wait gives up, ahead of what follows on the stream:
            nothing computes with what has half arrived, and peers can be told.

    Raises:
        TypeError: a tensor has another dtype, or a number is no integer.
        ValueError: a shape, device or number does not fit.
    """
    check_signals("flags", flags)
    check_status(status, flags, timeout_ms)
    number, epoch = check_epoch("value", value, flags)
    if next is not None:
        check_epoch("next", next, flags)
    if dispatch.runs_compiled("wait_signals", flags.device):
        try:
            ops.wait_signals(flags, number, epoch, timeout_ms, status, next, [*clear])
        except RuntimeError:
            _check_cleared(clear, flags)  # says in full what the op refused
            raise
        return
    _check_cleared(clear, flags)
    if flags.device.type != "meta":
        number = number if epoch is None else epoch.item()
        reference.wait_signals(flags, number, timeout_ms, status, next, clear)


def _check_cleared(clear: Sequence[Tensor], flags: Tensor) -> None:
    if len(clear) > MOST_CLEARED:
        raise ValueError(f"clear may have at most {MOST_CLEARED} tensors, got {len(clear)}")
    for k, one in enumerate(clear):
        check_dense(f"clear[{k}]", one)
        if one.dtype != torch.uint8 or not one.is_contiguous():
            raise ValueError(
                f"clear[{k}] must be contiguous uint8, got {one.dtype} with stride "
                f"{one.stride()}; pass x.view(torch.uint8)"
            )
        check_device(f"clear[{k}]", one, flags, "flags")


def check_signals(name: str, flags: object) -> Tensor:
    """Flat contiguous words."""
    flags = check_tensor(name, flags, 1, (torch.uint32,))
    if not flags.is_contiguous():
        raise ValueError(f"{name} must be contiguous, got stride {flags.stride()}")
    return flags


def check_epoch(name: str, value: object, signals: Tensor) -> tuple[int, Tensor | None]:
    """(number, None), or (0, word) for one word on the device of the signals."""
    if not isinstance(value, Tensor):
        check_word(name, value)
        return value, None
    check_tensor(name, value, 1, (torch.uint32,))
    if value.shape != (1,):
        raise ValueError(f"{name} must have shape (1,), got {tuple(value.shape)}")
    check_device(name, value, signals, "the signals")
    return 0, value


def check_word(name: str, value: object) -> None:
    """An integer that fits 32 bits without a sign."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be an integer, got {value!r}")
    if not 0 <= value < WORDS:
        raise ValueError(f"{name} must be in [0, 2^32), got {value}; take it modulo 2^32")


def check_status(status: object, signals: Tensor, timeout_ms: object) -> None:
    """Where a wait reports, and how long it may take."""
    status = check_tensor("status", status, 1, (torch.int32,))
    if status.shape != (1,):
        raise ValueError(f"status must have shape (1,), got {tuple(status.shape)}")
    if status.device != signals.device and not status.is_pinned():
        raise ValueError(
            f"status must be on {signals.device}, with the signals, or in pinned memory, got "
            f"{status.device}"
        )
    if not isinstance(timeout_ms, int) or isinstance(timeout_ms, bool):
        raise TypeError(f"timeout_ms must be an integer of milliseconds, got {timeout_ms!r}")
    if not 0 <= timeout_ms <= LONGEST_MS:
        raise ValueError(f"timeout_ms must be in [0, 2^40], got {timeout_ms}")


def _check_words(t: object, offset: object, value: object, count: object) -> None:
    t = check_signals("t", t)
    check_word("value", value)
    for name, number in (("offset", offset), ("count", count)):
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"{name} must be an integer, got {number!r}")
    if offset < 0 or count < 0 or offset + count > len(t):
        raise ValueError(f"words {offset} to {offset + count} lie outside of t, which has {len(t)}")
