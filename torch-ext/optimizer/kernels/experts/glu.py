"""glu: the gated activation between the two grouped products, forward and backward in one pass.

out = act(gate) * up with gate and up the halves of (M, 2I), or its even and odd columns. Computed
in float32 and rounded once; backward recomputes from gate_up, so nothing else is kept.

path      | source           | taken
triton    | rows_triton.py   | CUDA
reference | reference/glu.py | everything else
"""

from __future__ import annotations

from torch import Tensor
from torch.library import custom_op

from ..._ops import add_op_namespace_prefix, ops
from ...dispatch import TRITON_PATHS, experts_path_name
from ...reference import glu as reference
from ..autocast import without_autocast
from ..checks import DTYPES, check_tensor, on_device_of, refuse_forward_mode

ACTIVATIONS = (*reference.ELEMENTWISE, "gpt_oss")


@custom_op(add_op_namespace_prefix("glu"), mutates_args=())
def _glu(gate_up: Tensor, activation: str, interleaved: bool, path: str) -> Tensor:
    if path in TRITON_PATHS:
        from .rows_triton import glu_triton

        with on_device_of(gate_up):
            return glu_triton(gate_up, activation, interleaved)
    return reference.glu(gate_up, activation, interleaved)


@custom_op(add_op_namespace_prefix("glu_backward"), mutates_args=())
def _glu_backward(
    grad: Tensor, gate_up: Tensor, activation: str, interleaved: bool, path: str
) -> Tensor:
    if path in TRITON_PATHS:
        from .rows_triton import glu_backward_triton

        with on_device_of(gate_up):
            return glu_backward_triton(grad, gate_up, activation, interleaved)
    return reference.glu_backward(grad, gate_up, activation, interleaved)


def _fake(gate_up, activation, interleaved, path):
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


_glu.register_fake(_fake)
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
