"""What the mixture-of-experts ops share: which path serves a call, and checks of their tensors.

path      | what                                  | taken by "auto"
triton    | kernels/<op>_triton.py                | CUDA and ROCm with Triton
measured  | as triton; products over 4-bit        | over 4-bit experts instead of triton
          | experts by CUDA where that is faster  |
compiled  | as triton; products over 4-bit        | never; by name, on capability 9.0
          | experts by CUDA where it can          |
reference | reference/moe.py, expert after expert | everything else, and float64
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ... import dispatch
from ...dispatch import Path

BACKENDS = ("auto", "compiled", "triton", "reference")
# Of "auto" over 4-bit weights: what the times say is faster for a product, CUDA's or Triton's.
MEASURED = "measured"
# Paths that differ in the product over 4-bit experts alone; the other ops have Triton's kernels.
TRITON_PATHS = ("triton", "compiled", MEASURED)
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@functools.cache
def pick(
    device: torch.device, dtype: torch.dtype, backend: str = "auto", *, dense: bool = False
) -> Path:
    """The path of the mixture-of-experts ops for tensors of a dtype on a device.

    With `dense` the weights are known to be of that dtype, which no compiled product takes.
    """
    if backend == "grouped_mm":
        raise ValueError(
            'backend="grouped_mm" is none of ours, as torch.nn.functional.grouped_mm takes no '
            'LoRA; use "auto"'
        )
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    if backend == "compiled" and dense:
        raise ValueError(
            'backend="compiled" is for 4-bit experts: products with dense weights are Triton\'s; '
            'use "auto" or "triton"'
        )
    if backend == "compiled" and not (dispatch.is_hopper(device) and dispatch.has_triton()):
        raise ValueError(
            f'backend="compiled" needs a device of capability 9.0 and Triton, got {device}; '
            'use "auto"'
        )
    if backend != "auto":
        return Path(backend, "asked for by name")
    if device.type == "meta":
        return Path("reference", "shapes only")
    if dtype == torch.float64:
        return Path("reference", "float64 is computed by torch, expert after expert")
    if device.type == "cuda" and dispatch.has_triton():
        return Path("triton", f"Triton on {torch.cuda.get_device_name(device)}")
    return Path("reference", f"torch, expert after expert; no kernel for {device.type} tensors")


@torch.compiler.assume_constant_result
def pick_name(
    op: str, device: torch.device, dtype: torch.dtype, backend: str, *, dense: bool = False
) -> str:
    """The name of the path; a slow one that nobody asked for is reported once."""
    path = pick(device, dtype, backend, dense=dense)
    if path.name == "reference" and backend == "auto":
        dispatch.report_slow(op, path.reason)
    return path.name


def on_device_of(x: Tensor) -> torch.cuda.device_of:
    """A context in which Triton launches on the device of `x`; it would take the current one."""
    return torch.cuda.device_of(x)


def gradient_like(parameter: Tensor, wanted: bool) -> Tensor:
    """An unwritten gradient with the parameter's shape, dtype and strides; empty if not wanted."""
    if not wanted:
        return parameter.new_empty(0)
    return torch.empty_like(parameter)


def explain(
    device: torch.device | str, dtype: torch.dtype = torch.bfloat16, backend: str = "auto"
) -> str:
    """Say which implementation the mixture-of-experts ops take over dense weights, and why.

    Args:
        device: device of the tensors.
        dtype: dtype of the activations.
        backend: as in `grouped_lora_linear`.

    Returns:
        One line, "<triton | reference>: <reason>". Of 4-bit weights speaks `explain_quantized`.

    Raises:
        ValueError: unknown backend, or "compiled".
    """
    path = pick(torch.device(device), dtype, backend, dense=True)
    return f"{path.name}: {path.reason}"


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
