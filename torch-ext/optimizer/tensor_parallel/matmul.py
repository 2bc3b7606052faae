"""Products that communicate, differentiable: the two halves of a layer under tensor parallelism.

    y = all_gather_matmul(x, [w], dim, group)            dx = matmul_reduce_scatter(dy, w^T, dim)
    y = matmul_reduce_scatter(x, w, "sum", dim, group)   dx = all_gather_matmul(dy, [w^T], dim)

Each is the other's backward. The gathered x is kept for the gradient of w, as is the gathered dy
within backward, so that neither travels twice.

Here tensors have any number of dimensions; the one that is gathered or scattered is brought to the
front and the others are flattened, so that the operations below see matrices (ops.py). The last
dimension is the second of theirs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..kernels.autocast import autocast_dtype, cast, without_autocast
from . import collectives, ops
from .report import FUSE
from .scaled_matmul import (
    check_inner,
    check_multiples,
    check_product,
    check_scaled,
    flat_scales,
    largest,
    quantized,
    quantized_right,
    scale_for,
)

SCALINGS = (None, "tensorwise", "rowwise_sharded", "rowwise_replicated")


class _How(NamedTuple):
    """Over which group, along which dimension of the matrix, and by what."""

    dim: int
    group: str
    fuse: str
    strict: bool


def all_gather_matmul(
    a_shard: Tensor,
    bs: Sequence[Tensor],
    gather_dim: int,
    group: Any = None,
    *,
    scaling: str | None = None,
    fuse: str = "auto",
    strict: bool = False,
) -> list[Tensor]:
    """Gather a tensor that is sharded over the ranks of a group, and multiply it by matrices.

    Differentiable once. Every rank must call it, and for one group on one stream: the fused form
    has one workspace per group.

    Args:
        a_shard: (..., K), this rank's part of a, of one shape on all ranks; autocast converts it.
        bs: Matrices (K, N) that share the gathered a, such as those of queries, keys and values. N
            may differ from rank to rank.
        gather_dim: The dimension along which the parts of a lie side by side; the last one too, and
            then K is that of all ranks.
        group: ProcessGroup, its name, or None for all ranks.
        scaling: None multiplies in a's dtype. Otherwise both operands become float8_e4m3fn, with
            one scale each ("tensorwise", common to all ranks), or one per row of a and column of a
            matrix, which travel with the fused product ("rowwise_sharded") or ahead of it
            ("rowwise_replicated"). Gradients of a are float8 products too, those of bs are not. On
            CUDA K and N are then multiples of 16.
        fuse: "auto" fuses where that is faster, "always" small products too, "never" none.
        strict: Raise where the product cannot be fused although `fuse` lets it be.

    Returns:
        One (..., N) for each matrix, with a's dtype and the gathered dimension whole.

    Raises:
        TypeError: An argument is of a wrong kind or dtype.
        ValueError: Shapes, devices or options do not fit.
        CommUnavailable: strict, with the reason.
    """
    bs = _matrices(bs)
    a_shard, *bs = _autocast(a_shard, *bs)
    how, layout, rows = _gathering(a_shard, gather_dim, group, fuse, strict)
    for b in bs:
        check_product(a_shard, b)
        _check_dtypes(a_shard, b, scaling)
        check_inner(rows.shape[1] * (collectives.size_of(how.group) if how.dim else 1), b)
    keep = torch.is_grad_enabled() and any(b.requires_grad for b in bs)
    with without_autocast(a_shard.device):
        outs = _AllGatherMatmul.apply(rows, how, keep, scaling, *bs)
    return [layout.restored(out) for out in outs]


def matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    reduce_op: str,
    scatter_dim: int,
    group: Any = None,
    *,
    scaling: str | None = None,
    fuse: str = "auto",
    strict: bool = False,
) -> Tensor:
    """Multiply, add up what every rank of a group has, and keep this rank's part of the result.

    Differentiable once. Every rank must call it, and for one group on one stream.

    Args:
        a: (..., K), this rank's part of the inner dimension, of any size; autocast converts it.
        b: (K, N), likewise.
        reduce_op: "sum" or "avg"; partial results have a's dtype when they are added.
        scatter_dim: The dimension of the product (..., N) that is cut into one part per rank.
        group: ProcessGroup, its name, or None for all ranks.
        scaling: As for `all_gather_matmul`; the kinds of rowwise scales differ in backward alone.
        fuse: As for `all_gather_matmul`.
        strict: As for `all_gather_matmul`.

    Returns:
        (..., N) with the scattered dimension divided by the number of ranks, in a's dtype.

    Raises:
        TypeError: An argument is of a wrong kind or dtype.
        ValueError: Shapes, devices or options do not fit, or the ranks do not divide the dimension.
        CommUnavailable: strict, with the reason.
    """
    a, b = _autocast(a, b)
    check_product(a, b)
    _check_dtypes(a, b, scaling)
    check_inner(a.shape[-1], b)
    how, layout, rows = _scattering(a, b, reduce_op, scatter_dim, group, fuse, strict)
    with without_autocast(a.device):
        out = _MatmulReduceScatter.apply(rows, b, how, reduce_op, scaling)
    return layout.restored(out)


def all_gather_scaled_matmul(
    a_shard: Tensor,
    bs: Sequence[Tensor],
    a_scale: Tensor,
    b_scales: Sequence[Tensor],
    gather_dim: int,
    group: Any = None,
    *,
    scale_mode: str,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    fuse: str = "auto",
    strict: bool = False,
) -> list[Tensor]:
    """`all_gather_matmul` of float8 operands with their scales. Builds no autograd graph.

    Args:
        a_shard: (..., K) float8, this rank's part of a.
        bs: Matrices (K, N) in float8 with contiguous columns.
        a_scale: float32: one number, the same on all ranks; (..., 1) with the leading dimensions of
            a_shard, or of the gathered a.
        b_scales: One number or (1, N) for each matrix, in float32.
        gather_dim: As for `all_gather_matmul`; along the last one no scales can be sharded.
        group: As for `all_gather_matmul`.
        scale_mode: "tensorwise", "rowwise_sharded" or "rowwise_replicated": which of these a_scale
            is. It is said and not guessed, because of a single row they look alike.
        out_dtype: Dtype of the results.
        use_fast_accum: Let the tensor cores add in less than float32.
        fuse: As for `all_gather_matmul`.
        strict: As for `all_gather_matmul`.

    Returns:
        One (..., N) for each matrix in out_dtype.

    Raises:
        TypeError: An argument is of a wrong kind or dtype.
        ValueError: Shapes, strides, devices, scales or options do not fit.
        CommUnavailable: strict, with the reason.
    """
    bs = _matrices(bs)
    if not isinstance(b_scales, Sequence):
        kind = type(b_scales).__name__
        raise TypeError(f"b_scales must be a sequence of tensors, one per matrix, got {kind}")
    if scale_mode not in SCALINGS[1:]:
        raise ValueError(f"scale_mode must be one of {SCALINGS[1:]}, got {scale_mode!r}")
    if len(b_scales) != len(bs):
        raise ValueError(f"b_scales must be one per matrix, {len(bs)}, got {len(b_scales)}")
    how, layout, rows = _gathering(a_shard, gather_dim, group, fuse, strict)
    world = collectives.size_of(how.group)
    if how.dim == 1 and scale_mode == "rowwise_sharded":
        raise ValueError(
            f"gather_dim={gather_dim} is the last dimension, whose parts share their rows: these "
            'have one scale on all ranks, so pass scale_mode="rowwise_replicated"'
        )
    rowwise, scales = scale_mode != "tensorwise", []
    leading = layout.shape if scale_mode == "rowwise_replicated" else a_shard.shape[:-1]
    for b, b_scale in zip(bs, b_scales, strict=True):
        check_scaled(a_shard, b, a_scale, b_scale, rowwise=rowwise, leading=(*leading,))
        check_inner(rows.shape[1] * (world if how.dim else 1), b)
    if rowwise:
        a_scale = layout.rows(a_scale.reshape(*leading, 1))
    for b_scale in b_scales:
        scale, b_scale = flat_scales(a_scale, b_scale, rowwise=rowwise)
        scales.append(b_scale)
    options = (scale_mode, out_dtype, *how, False, use_fast_accum)
    _, outs = ops.all_gather_matmul(rows.contiguous(), bs, scale, scales, *options)
    return [layout.restored(out) for out in outs]


def scaled_matmul_reduce_scatter(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    reduce_op: str,
    scatter_dim: int,
    group: Any = None,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
    fuse: str = "auto",
    strict: bool = False,
) -> Tensor:
    """`matmul_reduce_scatter` of float8 operands with their scales. Builds no autograd graph.

    Args:
        a: (..., K) float8.
        b: (K, N) float8 with contiguous columns.
        a_scale: One number or (..., 1), in float32.
        b_scale: One number or (1, N), in float32.
        reduce_op: "sum" or "avg".
        scatter_dim: As for `matmul_reduce_scatter`.
        group: As for `matmul_reduce_scatter`.
        out_dtype: Dtype of the partial results and of their sum.
        use_fast_accum: Let the tensor cores add in less than float32.
        fuse: As for `all_gather_matmul`.
        strict: As for `all_gather_matmul`.

    Returns:
        (..., N) with the scattered dimension divided by the number of ranks, in out_dtype.

    Raises:
        TypeError: An argument is of a wrong kind or dtype.
        ValueError: Shapes, strides, devices, scales or options do not fit.
        CommUnavailable: strict, with the reason.
    """
    rowwise = check_scaled(a, b, a_scale, b_scale)
    check_inner(a.shape[-1], b)
    how, layout, rows = _scattering(a, b, reduce_op, scatter_dim, group, fuse, strict)
    if rowwise:
        a_scale = layout.rows(a_scale.reshape(*a.shape[:-1], 1))
    scales = flat_scales(a_scale, b_scale, rowwise=rowwise)
    options = (out_dtype, *how, reduce_op, use_fast_accum)
    out = ops.matmul_reduce_scatter(rows.contiguous(), b, *scales, *options)
    return layout.restored(out)


class _AllGatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, a: Tensor, how: _How, keep: bool, scaling: str | None, *bs: Tensor
    ) -> tuple[Tensor, ...]:
        gathered, scale, outs = _gathered(a, bs, how, scaling, keep)
        ctx.how, ctx.scaling = how, scaling
        ctx.save_for_backward(gathered, scale, *bs)
        return tuple(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads: Tensor) -> tuple[Tensor | None, ...]:
        gathered, scale, *bs = ctx.saved_tensors
        da = None
        if ctx.needs_input_grad[0]:
            da = _scattered(ctx.how, *_side_by_side(grads, bs), "sum", ctx.scaling)
        wanted = ctx.needs_input_grad[4:]
        if any(wanted):
            whole = _decoded(gathered, scale, ctx, grads[0].dtype).t()
        dbs = [whole @ g if w else None for g, w in zip(grads, wanted, strict=True)]
        return da, None, None, None, *dbs


class _MatmulReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx, a: Tensor, b: Tensor, how: _How, reduce_op: str, scaling: str | None
    ) -> Tensor:
        ctx.how, ctx.reduce_op, ctx.scaling = how, reduce_op, scaling
        ctx.save_for_backward(a, b)
        return _scattered(how, a, b, reduce_op, scaling)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        if ctx.reduce_op == "avg":
            grad = grad / collectives.size_of(ctx.how.group)
        wanted = ctx.needs_input_grad[1]
        gathered, scale, (da,) = _gathered(grad, [b.t()], ctx.how, ctx.scaling, wanted)
        db = a.t() @ _decoded(gathered, scale, ctx, a.dtype) if wanted else None
        return da, db, None, None, None


def _gathered(
    a: Tensor, bs: Sequence[Tensor], how: _How, scaling: str | None, keep: bool
) -> tuple[Tensor, Tensor | None, list[Tensor]]:
    """The gathered a, if kept, in float8 this rank's or the common scale, and the products."""
    if scaling is None:
        options = (None, [], "", a.dtype, *how, keep)
        gathered, outs = ops.all_gather_matmul(a.contiguous(), [*bs], *options)
        return gathered, None, outs
    rowwise = scaling != "tensorwise"
    amax = largest(a, 1 if rowwise else None)
    if not rowwise or how.dim == 1:  # rows that span the ranks have one scale, as a tensor has
        amax = ops.maximum_over_ranks(amax, how.group)
    scale = scale_for(amax)
    rows = quantized(a, scale)
    mode = scaling
    if rowwise and how.dim == 1:
        mode = "rowwise_replicated"
    elif scaling == "rowwise_replicated":
        scale = ops.gather_rows(scale, how.group)
    right = [quantized_right(b, rowwise=rowwise) for b in bs]
    scales = [b_scale for _, b_scale in right]
    options = (mode, a.dtype, *how, keep)
    gathered, outs = ops.all_gather_matmul(rows, [b for b, _ in right], scale, scales, *options)
    return gathered, scale, outs


def _scattered(how: _How, a: Tensor, b: Tensor, reduce_op: str, scaling: str | None) -> Tensor:
    options = (a.dtype, *how, reduce_op)
    if scaling is None:
        return ops.matmul_reduce_scatter(a, b, None, None, *options)
    rowwise = scaling != "tensorwise"
    scale = scale_for(largest(a, 1 if rowwise else None))
    b8, b_scale = quantized_right(b, rowwise=rowwise)
    return ops.matmul_reduce_scatter(quantized(a, scale), b8, scale, b_scale, *options)


def _decoded(gathered: Tensor, scale: Tensor | None, ctx: Any, dtype: torch.dtype) -> Tensor:
    """A gathered matrix; of float8 times its scales, which are still to be gathered if sharded."""
    if scale is None:
        return gathered
    if ctx.scaling == "rowwise_sharded" and ctx.how.dim == 0:
        scale = ops.gather_rows(scale, ctx.how.group)
    return (gathered.float() * scale).to(dtype)


def _side_by_side(grads: Sequence[Tensor], bs: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """One product in place of a sum of them: sum g b^T = [g ...] [b ...]^T."""
    if len(bs) == 1:
        return grads[0].contiguous(), bs[0].t()
    return torch.cat([*grads], dim=1), torch.cat([*bs], dim=1).t()


@dataclass(frozen=True)
class _Layout:
    """A tensor of any number of dimensions as a matrix, and back."""

    shape: tuple[int, ...]  # of the result, but for its last dimension
    dim: int  # that is gathered or scattered
    last: bool

    def rows(self, x: Tensor) -> Tensor:
        """x (..., K) as a matrix, with the dimension in front of the other leading ones."""
        x = x if self.last else x.movedim(self.dim, 0)
        return x.reshape(x.shape[:-1].numel(), x.shape[-1])  # not -1, which no K of 0 allows

    def restored(self, out: Tensor) -> Tensor:
        """A result (rows, N) as (..., N)."""
        if self.last:
            return out.view(*self.shape, out.shape[1])
        others = [size for i, size in enumerate(self.shape) if i != self.dim]
        return out.view(self.shape[self.dim], *others, out.shape[1]).movedim(0, self.dim)


def _gathering(
    a: Tensor, dim: int, group: Any, fuse: str, strict: bool
) -> tuple[_How, _Layout, Tensor]:
    """How to gather, what the result looks like, and a (..., K) as a matrix."""
    if not isinstance(a, Tensor) or a.ndim < 2:
        shape = tuple(a.shape) if isinstance(a, Tensor) else type(a).__name__
        raise ValueError(f"a_shard must be a tensor (..., K) of 2 dimensions or more, got {shape}")
    dim = _checked_dim("gather_dim", dim, a)
    last = dim == a.ndim - 1
    how = _How(int(last), _checked(group, fuse), fuse, strict)
    shape = [*a.shape[:-1]]
    if not last:
        shape[dim] *= collectives.size_of(how.group)
    layout = _Layout(tuple(shape), dim, last)
    return how, layout, layout.rows(a)


def _scattering(
    a: Tensor, b: Tensor, reduce_op: str, dim: int, group: Any, fuse: str, strict: bool
) -> tuple[_How, _Layout, Tensor]:
    """How to scatter, what the result looks like, and a (..., K) as a matrix."""
    if reduce_op not in collectives.REDUCTIONS:
        raise ValueError(f"reduce_op must be one of {collectives.REDUCTIONS}, got {reduce_op!r}")
    dim = _checked_dim("scatter_dim", dim, a)
    last = dim == a.ndim - 1
    how = _How(int(last), _checked(group, fuse), fuse, strict)
    world = collectives.size_of(how.group)
    size, shape = b.shape[1] if last else a.shape[dim], [*a.shape[:-1]]
    if size % world:
        raise ValueError(
            f"scatter_dim={dim} of the product has size {size}, which {world} ranks do not divide; "
            "pad it, or scatter another dimension"
        )
    if not last:
        shape[dim] //= world
    layout = _Layout(tuple(shape), dim, last)
    return how, layout, layout.rows(a)


def _checked_dim(name: str, dim: int, a: Tensor) -> int:
    if isinstance(dim, bool) or not isinstance(dim, int):
        raise TypeError(f"{name} must be an int, got {dim!r}")
    if not -a.ndim <= dim < a.ndim:
        raise ValueError(f"{name} must be in [{-a.ndim}, {a.ndim}), got {dim}")
    return dim % a.ndim


def _checked(group: Any, fuse: str) -> str:
    """The name of the group, after a look at `fuse`."""
    if fuse not in FUSE:
        raise ValueError(f"fuse must be one of {FUSE}, got {fuse!r}")
    return collectives.name_of(group)


def _matrices(bs: Sequence[Tensor]) -> list[Tensor]:
    if isinstance(bs, Tensor) or not bs:
        kind = type(bs).__name__ if isinstance(bs, Tensor) else "none"
        raise ValueError(f"bs must be a sequence of matrices, got {kind}; pass [b] for one")
    return [*bs]


def _check_dtypes(a: Tensor, b: Tensor, scaling: str | None) -> None:
    if scaling not in SCALINGS:
        raise ValueError(f"scaling must be one of {SCALINGS}, got {scaling!r}")
    if not a.is_floating_point() or a.dtype.itemsize == 1:
        raise TypeError(
            f"a must have a floating dtype of 16 bits or more, got {a.dtype}; float8 operands go "
            "with their scales to the scaled functions"
        )
    if b.dtype != a.dtype:
        raise TypeError(f"b must have a's dtype {a.dtype}, got {b.dtype}; convert one of them")
    if scaling is not None:
        check_multiples(a, b)


def _autocast(*tensors: Tensor) -> list[Tensor]:
    first = tensors[0]
    if not isinstance(first, Tensor):
        raise TypeError(f"a must be a tensor, got {type(first).__name__}")
    dtype = autocast_dtype(first)
    return [cast(x, dtype) for x in tensors]
