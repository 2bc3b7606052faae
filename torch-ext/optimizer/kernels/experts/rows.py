"""combine and glu: what of a layer is no product, each in one pass over its rows.

combine  out[t] = sum_j gates[t, j] y[rows[t k + j]], in float32 and in the order of j: no atomics,
         so runs repeat bit for bit. Slots whose row is not valid (sentinels) are left out
glu      out = act(gate) * up with gate and up the halves of (M, 2I), or its even and odd columns.
         Computed in float32 and rounded once; backward recomputes from gate_up

path      | source                             | taken
triton    | rows_triton.py                     | CUDA
reference | reference/moe.py, reference/glu.py | everything else
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op

from ..._ops import add_op_namespace_prefix, ops
from ...dispatch import TRITON_PATHS, experts_path_name
from ...reference import glu as reference_glu
from ...reference import moe as reference
from ..autocast import without_autocast
from ..checks import (
    DTYPES,
    check_device,
    check_shape,
    check_tensor,
    on_device_of,
    refuse_forward_mode,
)
from .expert_sort import ExpertOrder

ACTIVATIONS = (*reference_glu.ELEMENTWISE, "gpt_oss")


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


@custom_op(add_op_namespace_prefix("glu"), mutates_args=())
def _glu(gate_up: Tensor, activation: str, interleaved: bool, path: str) -> Tensor:
    if path in TRITON_PATHS:
        from .rows_triton import glu_triton

        with on_device_of(gate_up):
            return glu_triton(gate_up, activation, interleaved)
    return reference_glu.glu(gate_up, activation, interleaved)


@custom_op(add_op_namespace_prefix("glu_backward"), mutates_args=())
def _glu_backward(
    grad: Tensor, gate_up: Tensor, activation: str, interleaved: bool, path: str
) -> Tensor:
    if path in TRITON_PATHS:
        from .rows_triton import glu_triton

        with on_device_of(gate_up):
            return glu_triton(gate_up, activation, interleaved, grad)
    return reference_glu.glu_backward(grad, gate_up, activation, interleaved)


def _fake_glu(gate_up, activation, interleaved, path):
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


def _fake_backward(grad, gate_up, activation, interleaved, path):
    return gate_up.new_empty(gate_up.shape)


def _save(ctx, inputs, output):
    gate_up, *ctx.constants = inputs
    ctx.save_for_backward(gate_up)


def _backward(ctx, grad):
    with without_autocast(grad.device):
        gradient = ops.glu_backward(grad, *ctx.saved_tensors, *ctx.constants)
    return gradient, None, None, None


_glu.register_fake(_fake_glu)
_glu_backward.register_fake(_fake_backward)
_glu.register_autograd(_backward, setup_context=_save)


def glu(
    gate_up: Tensor,
    activation: str = "silu",
    *,
    interleaved: bool = False,
    backend: str = "auto",
) -> Tensor:
    """act(gate) * up. Differentiable once (Shazeer, GLU Variants, arXiv:2002.05202).

    Args:
        gate_up: (M, 2I), any strides; float16, bfloat16, float32 or float64.
        activation: "silu" (SwiGLU), "gelu" or "gelu_tanh" (GeGLU), "relu", "relu2", or "gpt_oss":
            gate sigmoid(1.702 gate) (up + 1) with gate <= 7 and -7 <= up <= 7.
        interleaved: gate and up columns alternate (gpt-oss); else all gates come first.
        backend: "auto", "triton" or "reference".

    Returns:
        (M, I) in gate_up's dtype.

    Raises:
        TypeError: gate_up is no floating tensor.
        ValueError: An odd number of columns, an unknown activation or backend.
    """
    check_tensor("gate_up", gate_up, 2, DTYPES)
    if gate_up.shape[1] % 2 or gate_up.shape[1] == 0:
        raise ValueError(f"gate_up must be (M, 2I), got shape {tuple(gate_up.shape)}")
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {ACTIVATIONS}, got {activation!r}")
    refuse_forward_mode("glu", gate_up)
    path = experts_path_name("glu", gate_up.device, gate_up.dtype, backend)
    return ops.glu(gate_up, activation, interleaved, path)
