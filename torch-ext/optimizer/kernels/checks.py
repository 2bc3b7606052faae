"""What ops ask of their tensors, and what they give them: shared by the experts and by `moe`."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def on_device_of(x: Tensor) -> torch.cuda.device_of:
    """A context in which Triton launches on the device of `x`; it would take the current one."""
    return torch.cuda.device_of(x)


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
