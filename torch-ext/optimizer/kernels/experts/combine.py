"""combine: the rows of each token, weighted by its gates and summed, in one pass.

out[t] = sum_j gates[t, j] y[rows[t k + j]], in float32 and in the order of j: no atomics, so runs
repeat bit for bit. Slots whose row is not valid (sentinels) are left out.

path      | source            | taken
triton    | rows_triton.py    | CUDA
reference | reference/moe.py  | everything else
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from ..._ops import add_op_namespace_prefix, ops
from ...dispatch import TRITON_PATHS, experts_path_name
from ...reference import moe as reference
from ..checks import DTYPES, check_device, check_shape, check_tensor, on_device_of
from .expert_sort import ExpertOrder


@custom_op(add_op_namespace_prefix("combine"), mutates_args=())
def _combine(
    y: Tensor,  # (R, N) in expert order
    gates: Tensor | None,  # (T, k)
    rows: Tensor,  # (R,)
    offsets: Tensor,  # (E + 1,)
    top_k: int,
    path: str,
) -> Tensor:
    if path in TRITON_PATHS:
        from .rows_triton import combine_triton

        with on_device_of(y):
            return combine_triton(y, gates, rows, offsets, top_k)
    return reference.combine(y, gates, rows, offsets, top_k)


def _fake(y, gates, rows, offsets, top_k, path):
    return y.new_empty((rows.shape[0] // top_k, y.shape[1]))


_combine.register_fake(_fake)


def combine_rows(y: Tensor, gates: Tensor | None, order: ExpertOrder, path: str) -> Tensor:
    """`combine` on a path, of an order's rows; nothing is checked."""
    return ops.combine(y, gates, order.rows, order.offsets, order.top_k, path)


def combine(
    y: Tensor,
    gates: Tensor | None,
    rows: Tensor,
    offsets: Tensor,
    top_k: int,
    *,
    backend: str = "auto",
) -> Tensor:
    """Sum the rows of each token, weighted by its gates. Builds no autograd graph.

    Args:
        y: (R, N) in expert order, R = T k.
        gates: (T, k), or None for a plain sum.
        rows: (R,) int64, the row of every slot; `expert_sort` makes it.
        offsets: (E + 1,) int64; rows from offsets[E] on are left out.
        top_k: k.
        backend: "auto", "triton" or "reference".

    Returns:
        (T, N) in y's dtype.

    Raises:
        TypeError: An argument is of a wrong kind or dtype.
        ValueError: Shapes or devices do not fit.
    """
    check_tensor("y", y, 2, DTYPES)
    check_tensor("rows", rows, 1, (torch.int64,))
    check_tensor("offsets", offsets, 1, (torch.int64,))
    check_shape("y", y, (rows.shape[0], y.shape[1]), "(R, N)")
    if top_k < 1 or rows.shape[0] % top_k != 0:
        raise ValueError(f"top_k must divide the number of rows {rows.shape[0]}, got {top_k}")
    if gates is not None:
        check_tensor("gates", gates, 2, DTYPES)
        check_shape("gates", gates, (rows.shape[0] // top_k, top_k), "(T, k)")
    for name, value in (("gates", gates), ("rows", rows), ("offsets", offsets)):
        if value is not None:
            check_device(name, value, y, "y")
    path = experts_path_name("combine", y.device, y.dtype, backend)
    gates = None if gates is None else gates.detach()
    return ops.combine(y.detach(), gates, rows, offsets, top_k, path)
