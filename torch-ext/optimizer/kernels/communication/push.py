"""push: copies between pairs of tensors, on copy engines where they lie on different GPUs.

path     | op   | source                                             | taken
compiled | push | kernels-src/communication/{push.cu, copy_rows.cuh} | CUDA
torch    | none | copy_, pair by pair                                | everything else

A tensor of a peer's memory, such as a view of torch's symmetric memory (`get_buffer`), is a tensor
of this device to every op. So `momentum` (step/momentum.py) with such a view as `out` is momentum,
Nesterov, the cast and the store to the owner in one launch, and no push follows it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import register_fake

from ... import dispatch
from ..._ops import add_op_namespace_prefix, ops
from ...reference import communication as reference
from ..checks import check_dense

AUTO = -1  # kUsualBlocks of kernels-src/communication/push.cu
MOST_BLOCKS = 1 << 16  # kMostBlocks


@register_fake(add_op_namespace_prefix("push"))
def _fake(dsts, srcs, blocks=-1):
    return None


def push(dsts: Sequence[Tensor], srcs: Sequence[Tensor], *, blocks: int | None = None) -> None:
    """Copy srcs[k] into dsts[k] for every k, on the current stream.

    On CUDA a pair is one cudaMemcpyAsync or cudaMemcpy2DAsync, and rows 2 GiB or more apart are one
    copy each: nothing is launched, nothing is packed, and a CUDA graph can capture it. Rows within
    one GPU are a kernel's, if they are of 1 MiB or more together and their addresses, lengths and
    distances multiples of 16 bytes: the driver copies them at half the rate, though it costs a
    product beside it 5 % of its time, and a kernel costs more. Pairs are copied in their order, and
    all are checked before the first copy. The caller keeps sources and destinations alive, and the
    sources unchanged, until the copies have run.

    Args:
        dsts: K tensors that are written, on the device of the sources; a peer's memory counts as
            that. Any shapes and dtypes.
        srcs: K tensors of the same shapes and dtypes, all on one device. On CUDA a pair must be one
            run of bytes, or rows of bytes at equal distances in each tensor, such as a slice of
            columns; which dimension is a row may differ from pair to pair.
        blocks: multiprocessors that the kernel may take, at most 65536; None means 64, which is the
            rate of a contiguous copy on an H200. 0 leaves all to the driver, as is right behind a
            grid that waits for what is copied: it may leave the kernel no multiprocessor, and the
            kernel's first launch, which loads its code, waits for all that runs.

    Raises:
        TypeError: an entry is no dense tensor, or the dtypes of a pair differ, or blocks is no
            integer.
        ValueError: the lists differ in length, or a pair in shape or device, or the strides of a
            pair need more than rows, or blocks is out of range. Nothing has been copied then.
    """
    if blocks is not None:
        _check_blocks(blocks)
    if len(dsts) == 0 or len(srcs) == 0:
        _check(dsts, srcs)
        return
    if not isinstance(srcs[0], Tensor) or not dispatch.runs_compiled("push", srcs[0].device):
        _check(dsts, srcs)
        if srcs[0].device.type != "meta":
            reference.push(dsts, srcs)
        return
    number = AUTO if blocks is None else blocks
    if torch.compiler.is_compiling():
        _check(dsts, srcs)
        ops.push(dsts, srcs, number)
        return
    try:
        ops.push(dsts, srcs, number)
    except RuntimeError:
        _check(dsts, srcs)  # says in full what the op refused
        raise
    torch.autograd.graph.increment_version(dsts)  # autograd is not told what a compiled op wrote


def _check_blocks(blocks: object) -> None:
    if not isinstance(blocks, int) or isinstance(blocks, bool):
        raise TypeError(f"blocks must be an integer or None, got {blocks!r}")
    if not 0 <= blocks <= MOST_BLOCKS:
        raise ValueError(f"blocks must be in [0, {MOST_BLOCKS}] or None, got {blocks}")


def _check(dsts: Sequence[Tensor], srcs: Sequence[Tensor]) -> None:
    if len(dsts) != len(srcs):
        raise ValueError(f"dsts has {len(dsts)} entries and srcs {len(srcs)}; give one per copy")
    for k, (dst, src) in enumerate(zip(dsts, srcs, strict=True)):
        check_dense(f"dsts[{k}]", dst)
        check_dense(f"srcs[{k}]", src)
        if dst.dtype != src.dtype:
            raise TypeError(
                f"dsts[{k}] is {dst.dtype}, srcs[{k}] {src.dtype}; a copy converts nothing, so "
                "convert the source first"
            )
        if dst.shape != src.shape:
            raise ValueError(
                f"dsts[{k}] has shape {tuple(dst.shape)}, srcs[{k}] {tuple(src.shape)}; they must "
                "be equal"
            )
        if not dst.device == src.device == srcs[0].device:
            raise ValueError(
                f"dsts[{k}] is on {dst.device}, srcs[{k}] on {src.device}, srcs[0] on "
                f"{srcs[0].device}; all must be on one, a peer's memory as a tensor of this device"
            )
        if not _is_rows(dst, src):
            raise ValueError(
                f"dsts[{k}] with strides {dst.stride()} and srcs[{k}] with strides {src.stride()}, "
                f"of shape {tuple(dst.shape)}, are no rows at equal distances; make them contiguous"
            )


def _is_rows(dst: Tensor, src: Tensor) -> bool:
    """`merged_sides` of kernels-src/communication/push.cu finds one side or two."""
    sides = sorted(
        (to, size, source)
        for size, to, source in zip(dst.shape, dst.stride(), src.stride(), strict=True)
        if size != 1
    )
    merged = [(1, 1, 1)]
    for to, size, source in sides:
        last_to, last_size, last_source = merged[-1]
        if (to, source) == (last_to * last_size, last_source * last_size):
            merged[-1] = (last_to, last_size * size, last_source)
        else:
            merged.append((to, size, source))
    if dst.numel() == 0 or len(merged) == 1:
        return True
    return len(merged) == 2 and min(merged[1][0], merged[1][2]) >= merged[0][1]
