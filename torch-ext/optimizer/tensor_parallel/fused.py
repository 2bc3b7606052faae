"""torch's pipelined products over symmetric memory: when they serve, and how they are called.

Each call hands them matrices alone, scaled ones gathered or scattered along the first dimension:
there they are right in every version from 2.11 on. Their own handling of more dimensions is not (a
scaled product that is scattered along the third of four dimensions cuts the wrong one), and they
guess the kind of scales from shapes; here it is said.
"""

from __future__ import annotations

import contextlib
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed import _symmetric_memory as symmetric_memory

from ..distributed.arena import SymmetricMemory, why_not_shared
from ..kernels.checks import on_device_of
from .collectives import resolved
from .report import (
    ASKED,
    FIRST_IN_CAPTURE,
    NARROW,
    NO_FP8,
    ON_CPU,
    SCALE_ALIGNMENT,
    SCALED_COLUMNS,
    SCALED_MULTIPLE,
    SCALED_TRANSPOSE,
    SMALL,
    WORKSPACE,
)
from .scaled_matmul import MULTIPLE, has_float8_products, scaled_product

# Below these bytes of all ranks the launches and barriers of the parts cost more than they hide: a
# gather of 2048 x 8192 before 3584 columns (34 MB) took 356 us in a graph against 301, one of 4096
# rows (67 MB) 390 against 538 (pytorch PR 139227, and our own measurement). The limits are those of
# 0.3 ms of product with 3584 columns, and with an inner size of 8192 for a scatter. Every rank
# knows these bytes; how many columns or rows the matrices of another rank have it does not.
LEAST_GATHERED = 56e6
LEAST_SCATTERED = 24e6
MULTICAST_ROWS = 2048  # of all ranks; torch gathers so few whole, by multicast
LEAST_COLUMNS = 1024  # of a shard gathered along the last dimension; torch's own pass has it, too
SCALE_ROWS = 4  # float32 scales in 16 bytes
FIRST_BYTES = 2**20  # of a group's workspace, before anything is known of its calls

_prepared: weakref.WeakKeyDictionary[Any, str | None] = weakref.WeakKeyDictionary()
# Workspaces that CUDA graphs of a group read; torch forgets one for a larger one.
_captured: weakref.WeakKeyDictionary[Any, list[Tensor]] = weakref.WeakKeyDictionary()


def why_not(
    a: Tensor,  # (M, K)
    *,
    gathers: int = 0,
    scatters: int = 0,
    group: str,
    fuse: str,
    workspace: int,
    scaled: bool,
    layout: str | None,
) -> str | None:
    """The reason for which a product with a cannot be fused here, or None.

    All ranks come to the same answer: it depends on what they have in common. The first call of a
    group on CUDA makes them prepare it together, and one that needs a larger workspace than those
    before makes them enlarge it together.

    Args:
        a: Left operand, as this rank has it.
        gathers: Bytes of the tensor that is gathered, of all ranks.
        scatters: Bytes of the product that is scattered.
        group: Name of the group.
        fuse: As for `all_gather_matmul`.
        workspace: Bytes of symmetric memory that the fused form needs.
        scaled: Of float8 operands.
        layout: What `why_not_gathered` or `why_not_scattered` says.
    """
    if fuse == "never":
        return ASKED
    if not a.is_cuda:
        return ON_CPU
    if scaled and not has_float8_products(a.device):
        return NO_FP8
    if layout is not None:
        return layout
    if fuse == "auto" and gathers < LEAST_GATHERED and scatters < LEAST_SCATTERED:
        return SMALL
    process_group = resolved(group)
    with on_device_of(a):
        capturing = torch.cuda.is_current_stream_capturing()
        if process_group not in _prepared:
            if capturing:
                return FIRST_IN_CAPTURE
            _prepared[process_group] = _prepare(process_group, a.device)
        if _prepared[process_group] is not None:
            return _prepared[process_group]
        if workspace > _workspace_bytes(process_group.group_name):
            if capturing:
                return WORKSPACE
            _prepared[process_group] = _enlarged(process_group, workspace, a.device)
        return _prepared[process_group]


def why_not_gathered(a: Tensor, dim: int, mode: str, fuse: str) -> str | None:
    """The reason why a shard (M, K) gathered along `dim` is not for a fused product."""
    if dim == 1 and a.shape[1] < LEAST_COLUMNS:
        return NARROW
    if dim == 1 and mode:
        if a.shape[1] % MULTIPLE:
            return SCALED_MULTIPLE
        return SCALED_COLUMNS if fuse == "auto" else None
    if mode.startswith("rowwise") and a.shape[0] % SCALE_ROWS:
        return SCALE_ALIGNMENT
    return None


def why_not_scattered(a: Tensor, dim: int, *, scaled: bool) -> str | None:
    """The reason why a product with a (M, K) scattered along `dim` is not for torch's fused one."""
    if dim == 1 and scaled and a.shape[0] % MULTIPLE:
        return SCALED_TRANSPOSE
    return None


def _prepare(group: Any, device: torch.device) -> str | None:
    """Make the symmetric workspace of a group, all ranks together; or the reason why not.

    Every rank learns what every other one found, so that they agree and none waits for another.
    """
    facts: list[Any] = [None] * group.size()
    distributed.all_gather_object(facts, SymmetricMemory.facts(device), group=group)
    reason = why_not_shared(facts)
    if reason is not None:
        return reason
    return _enlarged(group, FIRST_BYTES, device)


def _enlarged(group: Any, size: int, device: torch.device) -> str | None:
    """Give a group a workspace of so many bytes, all ranks together; or the reason why not.

    torch's own growth allocates and joins in one go, in which a rank that finds no memory leaves
    the others waiting. After a failure the group stays with plain products: its ranks no longer
    have workspaces of one size.
    """
    name, workspaces = group.group_name, symmetric_memory._group_name_to_workspace_tensor

    def allocate() -> Tensor:
        _enable(name)
        allocator = symmetric_memory._SymmetricMemory
        return allocator.empty_strided_p2p((size,), [1], torch.uint8, device, name)

    workspace, reason = _together(group, allocate)
    if reason is None:
        workspaces[name] = workspace
        _, reason = _together(group, lambda: symmetric_memory.get_symm_mem_workspace(name, size))
    return reason


def _together(group: Any, step: Callable[[], Any]) -> tuple[Any, str | None]:
    """What a step of all ranks returned here, and the first reason for which it failed on one."""
    made = failure = None
    try:
        made = step()
    except Exception as error:  # whatever it is, the other ranks have to hear of it
        failure = f"{type(error).__name__}: {error}".splitlines()[0]
    failures: list[str | None] = [None] * group.size()
    distributed.all_gather_object(failures, failure, group=group)
    for rank, text in enumerate(failures):
        if text is not None:
            reason = f"symmetric memory could not be joined on rank {rank} of the group: {text}"
            return None, reason
    return made, None


def _enable(group: str) -> None:
    """Let torch 2.11 know the group; newer versions find it themselves and warn of the call."""
    enable = getattr(symmetric_memory, "enable_symm_mem_for_group", None)
    if enable is not None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            enable(group)


def _workspace_bytes(group: str) -> int:
    workspace = symmetric_memory._group_name_to_workspace_tensor.get(group)
    return 0 if workspace is None else workspace.numel() * workspace.element_size()


@contextlib.contextmanager
def _running(a: Tensor, group: str) -> Iterator[None]:
    """On the device of a, whose current stream torch takes; a capture keeps the workspace."""
    with on_device_of(a):
        if torch.cuda.is_current_stream_capturing():
            process_group = resolved(group)
            kept = _captured.setdefault(process_group, [])
            name = process_group.group_name
            workspace = symmetric_memory._group_name_to_workspace_tensor[name]
            if all(workspace is not other for other in kept):
                kept.append(workspace)
        yield


def gathered_product(
    a: Tensor,  # (m, K) of this rank, or (M, k) for dim 1
    bs: list[Tensor],
    a_scale: Tensor | None,
    b_scales: list[Tensor],
    mode: str,
    out_dtype: torch.dtype,
    fast_accum: bool,
    dim: int,
    group: str,
    keep: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    """The gathered a, if kept, and its products, by torch's fused operation or the one below."""
    with _running(a, group):
        a = a.contiguous()
        if mode and dim == 1:
            options = (out_dtype, fast_accum, group, keep)
            return _scaled_by_columns(a, bs, a_scale, b_scales, *options)
        if not mode:
            return torch.ops.symm_mem.fused_all_gather_matmul(a, bs, dim, group, return_A=keep)
        # With () for one number torch cannot take it for the scale of a single row.
        scale = a_scale.reshape(()) if mode == "tensorwise" else a_scale.contiguous()
        none = [None] * len(bs)
        return torch.ops.symm_mem.fused_all_gather_scaled_matmul(
            a,
            bs,
            scale,
            [b_scale.contiguous() for b_scale in b_scales],
            dim,
            group,
            none,
            none,
            [out_dtype] * len(bs),
            [fast_accum] * len(bs),
        )


def _scaled_by_columns(
    a: Tensor,  # (M, k) float8
    bs: list[Tensor],  # each (W k, N)
    a_scale: Tensor,  # () or (M, 1)
    b_scales: list[Tensor],
    out_dtype: torch.dtype,
    fast_accum: bool,
    group: str,
    keep: bool,
) -> tuple[Tensor | None, list[Tensor]]:
    """Products of every rank's columns as they arrive, and their sums in float32.

    torch's operation leaves the scales out here; what brings the columns is its own. Rowwise
    products of float8 are in bfloat16 alone; others stay in float32 until they are added, since a
    part can be above what float16 holds where the whole is not.
    """
    world = resolved(group).size()
    part_dtype = out_dtype if a_scale.ndim else torch.float32
    # Rowwise products take packed operands: (W, N, k), of which a transpose has packed columns.
    weights = [b.t().reshape(b.shape[1], world, -1).transpose(0, 1).contiguous() for b in bs]
    gathered = a.new_empty((world * a.shape[0], a.shape[1]))
    totals = [a.new_zeros((a.shape[0], b.shape[1]), dtype=torch.float32) for b in bs]
    added = torch.cuda.Event()

    def add(part: Tensor, rank: int) -> None:  # on two streams by turns
        products = [
            scaled_product(part, weight[rank].t(), a_scale, b_scale, part_dtype, fast_accum)
            for weight, b_scale in zip(weights, b_scales, strict=True)
        ]
        added.wait()
        for total, product in zip(totals, products, strict=True):
            total.add_(product)
        added.record()

    gather = symmetric_memory._pipelined_all_gather_and_consume_last_dim
    gather(a, add, gathered, group, keep)
    outs = [total.to(out_dtype) for total in totals]
    parts = gathered.view(world, *a.shape)
    return parts.transpose(0, 1).reshape(a.shape[0], -1) if keep else None, outs


def scattered_product(
    a: Tensor,  # (M, K)
    b: Tensor,  # (K, N)
    a_scale: Tensor | None,
    b_scale: Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
    reduce_op: str,
    dim: int,
    group: str,
) -> Tensor:
    """This rank's part of the reduced product, by torch's fused operation."""
    if a_scale is not None and dim == 1:
        # torch has no scaled form along the last dimension: the first one of the transpose.
        scales = (b_scale.t(), a_scale.t()) if b_scale.ndim else (b_scale, a_scale)
        options = (out_dtype, fast_accum, reduce_op, 0, group)
        return scattered_product(b.t(), a.t(), *scales, *options).t().contiguous()
    with _running(a, group):
        if a_scale is None:
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, reduce_op, dim, group)
        return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
            a,
            b,
            a_scale.contiguous(),
            b_scale.contiguous(),
            reduce_op,
            0,
            0,
            group,
            [a.shape[0], b.shape[1]],
            out_dtype=out_dtype,
            use_fast_accum=fast_accum,
        )
