"""progress_matmul: a B while the rows of a still arrive, chunk after chunk.

path      | op              | source                                   | taken
compiled  | progress_matmul | kernels-src/communication/progress*sm90* | capability 9.0, float16 and
          |                 |                                          | bfloat16 that TMA can take
reference | none            | wait_signals, then torch.matmul          | everything else, said once

A persistent kernel begins with chunk `pivot`, which is there when it starts, and goes on with
pivot + 1 and so forth, round the end. Before it loads the first rows of a chunk it waits for the
chunk's signal. So copy engines or peers fill a while the tensor cores work, and nobody launches a
product per chunk. Whoever fills a chunk copies its rows, then sets its signal to the epoch.

Sums are float32 and rounded once; no bit depends on the chunks, their order or the grid.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import register_fake

from ... import dispatch
from ..._ops import add_op_namespace_prefix, ops
from ..checks import check_dense, check_device, check_shape, check_tensor
from ..products.matmul_add import HALF_PRECISION
from ..products.operands import overlap
from .signals import check_epoch, check_signals, check_status, wait_signals

AUTO = -1  # columns of narrow tiles, by predicted time
# kLargestSide of kernels-src/sm90/problem.h, and kMostChunks of communication/progress_schedule.h
LARGEST_SIDE, LARGEST_DEPTH, MOST_CHUNKS = 1 << 20, 1 << 30, 1024


@register_fake(add_op_namespace_prefix("progress_matmul"))
def _fake(
    a, b, out, signals, chunks, pivot, epoch, epochs, timeout_ms, status, blocks=0, narrow=-1
):
    return None


def progress_matmul(
    a: Tensor,
    b: Tensor,
    chunk_signals: Tensor,
    pivot: int,
    *,
    epoch: int | Tensor = 1,
    timeout_ms: int = 30_000,
    status: Tensor | None = None,
    out: Tensor | None = None,
    blocks: int | None = None,
) -> Tensor:
    """Multiply a by b, each chunk of a's rows as soon as its signal says that it has arrived.

    Half-precision operands that the kernel cannot take, such as those of K = 7 or of more than 2^20
    rows or columns, are multiplied by torch after all chunks, and a warning says so once. Under
    torch.compile sizes and strides decide as they do without it, but no address is known: a, b and
    out must start on 16 bytes there, as whole tensors do, or the kernel raises RuntimeError.

    Args:
        a: (M, K), float16 or bfloat16 for the kernel, rows contiguous; the W chunks are rows
            [c M / W, (c + 1) M / W). It may be written while this runs, each chunk before its
            signal.
        b: (K, N) of a's dtype: contiguous, or the transpose of a linear layer's weight.
        chunk_signals: (W,) uint32 on a's device; W divides M.
        pivot: the chunk to begin with, such as this rank's own.
        epoch: what a signal must have reached, in [0, 2^32), modulo 2^32 as `wait_signals` says; or
            (1,) uint32 on a's device, read when the kernel begins, for CUDA graphs.
        timeout_ms: how long to wait for each chunk, in milliseconds.
        status: (1,) int32 on a's device or in pinned memory; gets 1 + the number of a late chunk,
            one of several if several were late, and the result is worthless then. With None the
            host waits for the product and raises.
        out: (M, N) of a's dtype, overwritten; rows contiguous.
        blocks: multiprocessors to use at most; None means all of them. A grid that waits must leave
            some to kernels that write a or signals; copy engines and memsets need none.

    Returns:
        (M, N) of a's dtype; `out` if it was given.

    Raises:
        TypeError: a tensor has another dtype, or a number is no integer.
        ValueError: a shape, device or number does not fit, or an operand requires a gradient.
        TimeoutError: a chunk was late, and there is no `status`.
    """
    chunks = _check(a, b, chunk_signals, pivot, blocks)
    number, epochs = check_epoch("epoch", epoch, chunk_signals)
    given, out = out, _checked_out(a, b, out)
    own = status is None
    if own:
        if a.is_cuda and torch.cuda.is_current_stream_capturing():
            raise ValueError("status must be given where a CUDA graph is captured; nobody waits")
        status = torch.zeros(1, dtype=torch.int32, device=a.device)
    check_status(status, chunk_signals, timeout_ms)
    if _runs_compiled(a, b, out, chunks):
        ops.progress_matmul(
            *(a, b, out, chunk_signals, chunks, pivot, number, epochs, timeout_ms, status),
            0 if blocks is None else blocks,
        )
        if given is not None and not torch.compiler.is_compiling():
            torch.autograd.graph.increment_version(out)  # autograd is not told what an op wrote
    else:
        wait_signals(chunk_signals, epoch, timeout_ms, status)
        torch.matmul(a, b, out=out)
    if own and a.device.type != "meta" and (late := status.item()):
        raise TimeoutError(
            f"chunk {late - 1} of {chunks} did not reach its epoch within {timeout_ms} ms; look at "
            "the rank that sends it, or give timeout_ms more"
        )
    return out


def _runs_compiled(a: Tensor, b: Tensor, out: Tensor, chunks: int) -> bool:
    if a.device.type == "meta":
        return False
    if dispatch.path_name("progress_matmul", a.device) != "compiled":
        return False
    small = max(out.shape) <= LARGEST_SIDE and len(b) <= LARGEST_DEPTH and chunks <= MOST_CHUNKS
    rows = a.stride(1) == 1 and out.stride(1) == 1
    if a.dtype in HALF_PRECISION and small and rows and all(map(_by_tma, (a, b, out))):
        return True
    _report_slow(a.dtype)
    return False


def _by_tma(x: Tensor) -> bool:
    """Whether TMA takes x (rows, cols), by its strides, and by its address where that is known."""
    row, col = x.stride()
    line = row if col == 1 else col
    if x.numel() == 0 or 1 not in (row, col) or line <= 0 or line % 8:
        return False
    return torch.compiler.is_compiling() or x.data_ptr() % 16 == 0


@torch.compiler.assume_constant_result
def _report_slow(dtype: torch.dtype) -> None:
    takes = "half precision in rows that start on 16 bytes, sides up to 2^20, 1024 chunks"
    dispatch.report_slow("progress_matmul", f"the kernel takes {takes}; not these of {dtype}")


def _check(a: object, b: object, signals: object, pivot: object, blocks: object) -> int:
    a, b = check_dense("a", a), check_dense("b", b)
    for name, x in (("a", a), ("b", b)):
        check_tensor(name, x, 2, (a.dtype,))
        if x.requires_grad and torch.is_grad_enabled():
            raise ValueError(
                f"{name} requires a gradient, but progress_matmul has none of its own; call it in "
                f"a torch.autograd.Function or under torch.no_grad(), or pass {name}.detach()"
            )
    check_device("b", b, a, "a")
    if a.shape[1] != b.shape[0]:
        raise ValueError(f"a {tuple(a.shape)} and b {tuple(b.shape)} share no K")
    chunks = len(check_signals("chunk_signals", signals))
    check_device("chunk_signals", signals, a, "a")
    if chunks == 0 or len(a) % chunks:
        raise ValueError(
            f"a has {len(a)} rows, chunk_signals {chunks} entries; pad the rows to a multiple"
        )
    for name, number in (("pivot", pivot), ("blocks", 1 if blocks is None else blocks)):
        if not isinstance(number, int) or isinstance(number, bool):
            raise TypeError(f"{name} must be an integer, got {number!r}")
    if not 0 <= pivot < chunks:
        raise ValueError(f"pivot must be one of the {chunks} chunks, got {pivot}")
    if blocks is not None and blocks < 1:
        raise ValueError(f"blocks must be positive or None, got {blocks}")
    return chunks


def _checked_out(a: Tensor, b: Tensor, out: Tensor | None) -> Tensor:
    shape = (len(a), b.shape[1])
    if out is None:
        return a.new_empty(shape)
    check_tensor("out", out, 2, (a.dtype,))
    check_shape("out", out, shape, "(M, N)")
    check_device("out", out, a, "a")
    if overlap(out, a) or overlap(out, b):
        raise ValueError("out overlaps a or b in memory; pass another tensor")
    return out
