"""What ops ask of their tensors, and what they give them: shared by the experts and by `moe`."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def on_device_of(x: Tensor) -> torch.cuda.device_of:
    """A context in which Triton launches on the device of `x`; it would take the current one."""
    return torch.cuda.device_of(x)


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """The body of an op that Dynamo leaves alone where a frame that it gave up calls the op.

    `custom_op` has its bodies so by `torch._disable_dynamo`, which takes an eager call 0.5 us and
    loads torch's compiler in the first one. Here only a call that is being traced goes that way.
    """
    disabled = torch._disable_dynamo(function)

    @functools.wraps(function)
    def body(*arguments: Any) -> Any:
        return (disabled if torch.compiler.is_compiling() else function)(*arguments)

    return body


def gradient_like(parameter: Tensor, wanted: bool) -> Tensor:
    """An unwritten gradient with the parameter's shape, dtype and strides; empty if not wanted."""
    if not wanted:
        return parameter.new_empty(0)
    return torch.empty_like(parameter)


def check_dense(name: str, value: object) -> Tensor:
    """A dense tensor."""
    if not isinstance(value, Tensor) or value.layout != torch.strided:
        kind = value.layout if isinstance(value, Tensor) else type(value).__name__
        raise TypeError(f"{name} must be a dense tensor, got {kind}")
    return value


def check_tensor(name: str, value: object, ndim: int, dtypes: tuple[torch.dtype, ...]) -> Tensor:
    """A dense tensor of so many dimensions and one of the dtypes."""
    value = check_dense(name, value)
    if value.dtype not in dtypes:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{name} must have dtype {allowed}, got {value.dtype}; convert it first")
    if value.ndim != ndim:
        raise ValueError(f"{name} must have {ndim} dimensions, got shape {tuple(value.shape)}")
    return value


def refuse_forward_mode(name: str, *operands: Tensor | None) -> None:
    """NotImplementedError if an operand has a tangent, which the op would drop without a word."""
    if forward_ad._current_level < 0:  # neither torch.func.jvp nor forward_ad is in use
        return
    for x in operands:
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{name} has no forward-mode derivative (torch.func.jvp, jacfwd, forward_ad): its "
                "tangent would be zero; use reverse mode, torch.autograd.grad or backward()"
            )


def check_shape(name: str, value: Tensor, shape: tuple[int, ...], legend: str) -> None:
    """`value` has `shape`, which `legend` spells in letters."""
    if tuple(value.shape) != tuple(shape):
        raise ValueError(
            f"{name} must be {legend} = {tuple(shape)}, got shape {tuple(value.shape)}"
        )


def check_device(name: str, value: Tensor, like: Tensor, like_name: str) -> None:
    """`value` lies where `like` does."""
    if value.device != like.device:
        raise ValueError(
            f"{name} must be on the device of {like_name} ({like.device}), got {value.device}; "
            f"move it with {name}.to({like_name}.device)"
        )


def check_packed(name: str, value: object, dtypes: tuple[torch.dtype, ...], numel: int) -> Tensor:
    """A contiguous tensor of so many elements of frozen weights, which get no gradient."""
    value = check_dense(name, value)
    if value.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            f"{name} requires a gradient, but frozen weights have none; call it under "
            f"torch.no_grad() or pass {name}.detach()"
        )
    if value.dtype not in dtypes or value.numel() != numel or not value.is_contiguous():
        kinds = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name} must hold {numel} contiguous elements of {kinds}, got {value.dtype} of shape "
            f"{tuple(value.shape)} with strides {tuple(value.stride())}; see the layout of the "
            "format"
        )
    return value


def check_ids(active_experts: object, like: Tensor) -> Tensor:
    """A vector of expert ids on the device of the packed bytes."""
    ids = check_tensor("active_experts", active_experts, 1, (torch.int32, torch.int64))
    check_device("active_experts", ids, like, "packed")
    return ids.contiguous()


def check_quantizable(weight: object, least_ndim: int) -> Tensor:
    """A dense floating weight of which no gradient is expected."""
    weight = check_dense("weight", weight)
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise TypeError(
            f"weight must be bfloat16, float16 or float32, got {weight.dtype}; convert it first"
        )
    if weight.ndim < least_ndim or weight.numel() == 0:
        raise ValueError(
            f"weight must have {least_ndim} dimensions or more and no empty one, got shape "
            f"{tuple(weight.shape)}"
        )
    if weight.requires_grad and torch.is_grad_enabled():
        raise ValueError(
            "weight requires a gradient, but quantisation has none: pass weight.detach()"
        )
    return weight.detach()


def check_expert_shape(expert_shape: object) -> tuple[int, ...]:
    """Positive sizes of one expert."""
    integer = (int, torch.SymInt)
    if not isinstance(expert_shape, Sequence) or not all(
        isinstance(size, integer) and not isinstance(size, bool) for size in expert_shape
    ):
        raise TypeError(f"expert_shape must be a sequence of integers, got {expert_shape!r}")
    if len(expert_shape) < 2 or min(expert_shape) <= 0:
        raise ValueError(
            f"expert_shape must hold two positive sizes (N, K) or more, got {tuple(expert_shape)}"
        )
    return tuple(expert_shape)


def check_stack(packed: object, per_expert: int, elements_per_byte: int = 1) -> int:
    """The number of experts that packed bytes hold."""
    held = check_dense("packed", packed).numel() * elements_per_byte
    if held % per_expert:
        raise ValueError(
            f"packed holds {held} elements, no whole number of experts of {per_expert}; pass the "
            "shape of one expert"
        )
    return held // per_expert
