"""The registered operations on matrices: gather and multiply, multiply and scatter.

all_gather_matmul:      a (m, K) of every rank, below each other (dim 0) or beside (dim 1), times bs
matmul_reduce_scatter:  a b summed over the ranks, of which each keeps rows (dim 0) or columns
maximum_over_ranks, gather_rows: small ones, for scales

A compiler sees each as one operation, whichever way it goes; that is decided when it runs. They
build no autograd graph: matmul.py does.

path  | what                               | taken
fused | torch.ops.symm_mem.fused_* or ours | CUDA, one host, where it is right and large enough
plain | a collective and torch's products  | everything else, with the reason (report.py)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.library import custom_op

from .._ops import add_op_namespace_prefix
from . import collectives, fused
from .report import ALONE, FUSED, count, count_plain
from .scaled_matmul import scaled_product

# What a_scale of a gathered product is; "" without scales.
MODES = ("", "tensorwise", "rowwise_sharded", "rowwise_replicated")


@custom_op(
    add_op_namespace_prefix("all_gather_matmul"),
    mutates_args=(),
    schema="(Tensor a, Tensor[] bs, Tensor? a_scale, Tensor[] b_scales, str mode, "
    "ScalarType out_dtype, int dim, str group, str fuse, bool strict, bool keep, "
    "bool fast_accum=False) -> (Tensor, Tensor[])",
)
def all_gather_matmul(
    a: Tensor,  # (m, K), or (M, k) for dim 1
    bs: list[Tensor],  # each (K, N)
    a_scale: Tensor | None,  # (), (m, 1) sharded or (M, 1) replicated
    b_scales: list[Tensor],  # each () or (1, N)
    mode: str,
    out_dtype: torch.dtype,
    dim: int,
    group: str,
    fuse: str,
    strict: bool,
    keep: bool,
    fast_accum: bool = False,
) -> tuple[Tensor, list[Tensor]]:
    """The gathered a, empty unless `keep`, and its products; nothing is checked."""
    name = "all_gather_scaled_matmul" if mode else "all_gather_matmul"
    world = collectives.size_of(group)
    if world == 1:
        count(name, ALONE)
        outs = _products(a, bs, a_scale, b_scales, out_dtype, fast_accum)
        whole = a.clone(memory_format=torch.contiguous_format) if keep else a.new_empty(0)
        return whole, outs
    # Of a and not of bs, whose columns may differ from rank to rank.
    shard = a.numel() * a.element_size()
    rows = a.shape[0] * (world if dim == 0 else 1)
    by_multicast = dim == 0 and not mode and not keep and rows <= fused.MULTICAST_ROWS
    reason = fused.why_not(
        a,
        gathers=world * shard,
        group=group,
        fuse=fuse,
        workspace=shard * (world if by_multicast else 1) + 4 * rows,
        scaled=bool(mode),
        layout=fused.why_not_gathered(a, dim, mode, fuse),
    )
    if reason is None:
        options = (mode, out_dtype, fast_accum, dim, group, keep)
        gathered, outs = fused.gathered_product(a, bs, a_scale, b_scales, *options)
        count(name, FUSED)
        return a.new_empty(0) if gathered is None or not keep else gathered, outs
    count_plain(name, reason, strict=strict)
    gathered = _gathered(a, dim, group)
    if mode == "rowwise_sharded":
        a_scale = collectives.gather_rows(a_scale, group)
    outs = _products(gathered, bs, a_scale, b_scales, out_dtype, fast_accum)
    return gathered if keep else a.new_empty(0), outs


def _gathered(a: Tensor, dim: int, group: str) -> Tensor:
    gathered = collectives.gather_rows(a, group)
    if dim == 0:
        return gathered
    parts = gathered.view(-1, *a.shape)  # (W, M, k)
    return parts.transpose(0, 1).reshape(a.shape[0], -1)


def _products(
    a: Tensor,
    bs: list[Tensor],
    a_scale: Tensor | None,
    b_scales: list[Tensor],
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> list[Tensor]:
    if a_scale is None:
        return [a @ b for b in bs]
    return [
        scaled_product(a, b, a_scale, b_scale, out_dtype, fast_accum)
        for b, b_scale in zip(bs, b_scales, strict=True)
    ]


def _fake_gathered(
    a, bs, a_scale, b_scales, mode, out_dtype, dim, group, fuse, strict, keep, fast_accum=False
):
    world = collectives.size_of(group)
    rows, inner = (a.shape[0] * world, a.shape[1]) if dim == 0 else (a.shape[0], a.shape[1] * world)
    gathered = a.new_empty((rows, inner) if keep else (0,))
    return gathered, [a.new_empty((rows, b.shape[1]), dtype=out_dtype) for b in bs]


@custom_op(
    add_op_namespace_prefix("matmul_reduce_scatter"),
    mutates_args=(),
    schema="(Tensor a, Tensor b, Tensor? a_scale, Tensor? b_scale, ScalarType out_dtype, int dim, "
    "str group, str fuse, bool strict, str reduce_op, bool fast_accum=False) -> Tensor",
)
def matmul_reduce_scatter(
    a: Tensor,  # (M, K)
    b: Tensor,  # (K, N)
    a_scale: Tensor | None,  # () or (M, 1)
    b_scale: Tensor | None,  # () or (1, N)
    out_dtype: torch.dtype,
    dim: int,
    group: str,
    fuse: str,
    strict: bool,
    reduce_op: str,
    fast_accum: bool = False,
) -> Tensor:
    """This rank's rows or columns of the reduced product; nothing is checked."""
    scaled = a_scale is not None
    name = "scaled_matmul_reduce_scatter" if scaled else "matmul_reduce_scatter"
    scales = [] if b_scale is None else [b_scale]
    world = collectives.size_of(group)
    if world == 1:
        count(name, ALONE)
        return _products(a, [b], a_scale, scales, out_dtype, fast_accum)[0]
    # Of the product and not of the inner dimension, which may differ from rank to rank.
    partial = a.shape[0] * b.shape[1] * out_dtype.itemsize
    reason = fused.why_not(
        a,
        scatters=partial,
        group=group,
        fuse=fuse,
        workspace=2 * math.ceil(partial / world),
        scaled=scaled,
        layout=fused.why_not_scattered(a, dim, scaled=scaled),
    )
    if reason is None:
        options = (out_dtype, fast_accum, reduce_op, dim, group)
        out = fused.scattered_product(a, b, a_scale, b_scale, *options)
        count(name, FUSED)
        return out
    count_plain(name, reason, strict=strict)
    partial = _products(a, [b], a_scale, scales, out_dtype, fast_accum)[0]
    if dim == 1:  # the columns of a rank become rows of their own
        parts = partial.view(a.shape[0], world, -1).transpose(0, 1)
        partial = parts.reshape(world * a.shape[0], -1)
    return collectives.reduce_scatter_rows(partial, reduce_op, group)


def _fake_scattered(
    a, b, a_scale, b_scale, out_dtype, dim, group, fuse, strict, reduce_op, fast_accum=False
):
    world = collectives.size_of(group)
    shape = [a.shape[0], b.shape[1]]
    shape[dim] //= world
    return a.new_empty(shape, dtype=out_dtype)


@custom_op(add_op_namespace_prefix("maximum_over_ranks"), mutates_args=())
def maximum_over_ranks(x: Tensor, group: str) -> Tensor:
    """The largest of every rank's x, element by element."""
    return collectives.all_reduce(x, group, "max")


def _fake_maximum(x, group):
    return torch.empty_like(x)


@custom_op(add_op_namespace_prefix("gather_rows"), mutates_args=())
def gather_rows(x: Tensor, group: str) -> Tensor:
    """Every rank's x (r, ...), one below the other."""
    return collectives.gather_rows(x, group)


def _fake_rows(x, group):
    return x.new_empty((collectives.size_of(group) * x.shape[0], *x.shape[1:]))


all_gather_matmul.register_fake(_fake_gathered)
matmul_reduce_scatter.register_fake(_fake_scattered)
maximum_over_ranks.register_fake(_fake_maximum)
gather_rows.register_fake(_fake_rows)
