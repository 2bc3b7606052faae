"""What the list ops share: their call, scalars, and checks with messages that say the remedy.

The compiled ops check everything before they write anything. Only when one refuses are its
arguments looked at again here, to say in full what is wrong: 200 parameters cost no Python loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ... import dispatch
from ..._ops import ops

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
NARROW = (torch.bfloat16, torch.float16)
MAX_DIMS = 6  # kMaxDims of kernels-src/common/tensor_list.h


@dataclasses.dataclass(frozen=True)
class StochasticRounding:
    """Round 16-bit parameters up or down at random, so that their mean is the float32 value.

    The random bits are Philox4x32-10 of (seed, step, parameter, element): the same for any split of
    a parameter over calls, tensors, devices or ranks.

    Args:
        seed: 64 bits.
        step: 0-D int64 or float32 tensor on the device of the parameters, read there.
        parameter: one 32-bit identity per parameter of the call.
        offset: number of each tensor's first element in its whole parameter, row-major.
    """

    seed: int
    step: Tensor
    parameter: Sequence[int]
    offset: Sequence[int]


def call(
    op: str,
    lists: Sequence[Sequence[Tensor]],
    arguments: Callable[[], tuple],
    check: Callable[[], None],
    reference: Callable[[], Tensor | None],
) -> Tensor | None:
    """Run a compiled op, or `reference` where there is no kernel: for the device, or for float64.

    The op refuses float64 as it refuses what is wrong, so that nobody looks for it before.

    Args:
        op: its name.
        lists: of tensors, in which float64 counts.
        arguments: returns those of the compiled op.
        check: raises with a remedy where the op refuses its arguments.
        reference: the same by plain torch operations.
    """
    if not isinstance(lists[0][0], Tensor):
        raise TypeError(f"{op} takes lists of tensors, got {type(lists[0][0]).__name__} in one")
    compiling = torch.compiler.is_compiling()
    no_kernel = dispatch.path_name(op, lists[0][0].device) == "reference"
    if no_kernel or (compiling and _has_float64(lists)):
        check()
        return reference()
    if compiling:
        check()
        return getattr(ops, op)(*arguments())
    try:
        return getattr(ops, op)(*arguments())
    except RuntimeError:
        check()
        if _has_float64(lists):
            return reference()
        raise


def _has_float64(lists: Sequence[Sequence[Tensor]]) -> bool:
    return any(tensor.dtype == torch.float64 for tensors in lists for tensor in tensors)


def device_scalar(
    name: str, value: float | Tensor, device: torch.device
) -> tuple[float, Tensor | None]:
    """(number, None), or (0.0, float32 tensor) for a tensor on the device, which nobody reads.

    A tensor on the CPU is a number to a kernel of another device.
    """
    if not isinstance(value, Tensor):
        return float(value), None
    if value.numel() != 1:
        raise ValueError(
            f"{name} must be a number or a tensor of one element, got shape {tuple(value.shape)}"
        )
    if value.device == device:
        return 0.0, value if value.dtype == torch.float32 else value.float()
    if value.device.type == "cpu":
        return float(value), None
    raise ValueError(f"{name} is on {value.device}, the tensors are on {device}; move it there")


def float32(value: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    """A scalar as the kernels take it: rounded to float32, unless float64 parameters need more."""
    if dtype == torch.float64:
        return value
    if isinstance(value, Tensor):
        return value.float()
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def check_lists(
    lists: Mapping[str, Sequence[Tensor]],
    dtypes: Mapping[str, tuple[torch.dtype, ...]],
    written: Sequence[str],
) -> None:
    """Raise unless entry k of every list has one shape and device, and dtypes are possible.

    Raises:
        TypeError: an entry is no tensor, or its dtype is not supported.
        ValueError: lengths, shapes, devices or memory layouts do not fit.
    """
    (first, leaders), *_ = lists.items()
    for name, tensors in lists.items():
        if len(tensors) != len(leaders):
            raise ValueError(
                f"{name} has {len(tensors)} entries and {first} has {len(leaders)}; give one per "
                "parameter"
            )
        for k, tensor in enumerate(tensors):
            _check_entry(f"{name}[{k}]", tensor, dtypes[name], name in written)
            if tensor.shape != leaders[k].shape:
                raise ValueError(
                    f"{name}[{k}] has shape {tuple(tensor.shape)}, {first}[{k}] has "
                    f"{tuple(leaders[k].shape)}; they must be equal"
                )
            if tensor.device != leaders[0].device:
                raise ValueError(
                    f"{name}[{k}] is on {tensor.device}, {first}[0] on {leaders[0].device}; make "
                    "one call per device"
                )


def as_list(name: str, tensors: Sequence[Tensor] | Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """The entries of a list, or of the one contiguous tensor that holds them one after another.

    Raises:
        ValueError: the tensor has other elements than the entries of `like` together.
    """
    if not isinstance(tensors, Tensor):
        return list(tensors)
    sizes = [tensor.numel() for tensor in like]
    if not tensors.is_contiguous() or tensors.numel() != sum(sizes):
        raise ValueError(
            f"{name} must be contiguous with the {sum(sizes)} elements of all tensors, got shape "
            f"{tuple(tensors.shape)} with strides {tensors.stride()}; or give a list"
        )
    parts = tensors.view(-1).split(sizes) if like else []
    return [part.view(tensor.shape) for part, tensor in zip(parts, like, strict=True)]


def _check_entry(name: str, tensor: Tensor, dtypes: tuple[torch.dtype, ...], written: bool) -> None:
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name} must be one of {dtypes}, got {tensor.dtype}; convert it")
    strides = zip(tensor.shape, tensor.stride(), strict=True)
    if written and any(size > 1 and stride == 0 for size, stride in strides):
        raise ValueError(
            f"{name} is expanded (strides {tensor.stride()}): several elements share one address; "
            "pass a clone()"
        )
    if tensor.ndim > MAX_DIMS and not tensor.is_contiguous():
        raise ValueError(
            f"{name} has {tensor.ndim} dimensions with strides {tensor.stride()}; only contiguous "
            f"tensors may have more than {MAX_DIMS}"
        )


def residual_arguments(
    residuals: Sequence[Tensor | None] | None, params: Sequence[Tensor]
) -> list[Tensor]:
    """The op's list: an empty int16 tensor stands for "none", which float32 parameters have."""
    if residuals is None:
        return []
    if not any(residual is None for residual in residuals):
        return list(residuals)
    nothing = torch.empty(0, dtype=torch.int16, device=params[0].device)
    return [nothing if residual is None else residual for residual in residuals]


def rounding_arguments(
    rounding: StochasticRounding | None,
) -> tuple[int, Tensor | None, list[int], list[int]]:
    """(seed, step, parameter, offset) of the op; no step means rounding to nearest."""
    if rounding is None:
        return 0, None, [], []
    seed = rounding.seed & 0xFFFFFFFFFFFFFFFF
    signed = seed - (1 << 64) if seed >= 1 << 63 else seed
    return signed, rounding.step, list(rounding.parameter), list(rounding.offset)


def check_rounding(
    params: Sequence[Tensor],
    residuals: Sequence[Tensor | None] | None,
    rounding: StochasticRounding | None,
) -> None:
    """Raise unless residuals and rounding, if any, fit the parameters.

    Raises:
        TypeError: a residual is not int16, or a step is neither int64 nor float32.
        ValueError: both are given, or lengths, shapes or devices do not fit.
    """
    if residuals is not None and rounding is not None:
        raise ValueError("give residuals or rounding, not both: a kept residual needs no noise")
    if residuals is not None:
        if len(residuals) != len(params):
            raise ValueError(f"residuals has {len(residuals)} entries for {len(params)} params")
        for k, (residual, param) in enumerate(zip(residuals, params, strict=True)):
            _check_residual(f"residuals[{k}]", residual, param)
    if rounding is not None:
        for name in ("parameter", "offset"):
            entries = getattr(rounding, name)
            if len(entries) != len(params):
                raise ValueError(
                    f"rounding.{name} has {len(entries)} entries for {len(params)} params"
                )
        step = rounding.step
        if not isinstance(step, Tensor) or step.dtype not in (torch.int64, torch.float32):
            raise TypeError(f"rounding.step must be an int64 or float32 tensor, got {step!r}")
        if step.numel() != 1 or step.device != params[0].device:
            raise ValueError(
                f"rounding.step must have one element on {params[0].device}, got shape "
                f"{tuple(step.shape)} on {step.device}"
            )


def _check_residual(name: str, residual: Tensor | None, param: Tensor) -> None:
    empty = residual is None or residual.numel() == 0
    if param.dtype not in NARROW:
        if not empty:
            raise ValueError(f"{name} must be None: a {param.dtype} parameter loses nothing")
        return
    if residual is None:
        raise ValueError(f"{name} is None, but its parameter is {param.dtype}: give int16 zeros")
    if residual.dtype != torch.int16:
        raise TypeError(f"{name} must be int16, got {residual.dtype}")
    if residual.shape != param.shape or residual.device != param.device:
        raise ValueError(
            f"{name} has shape {tuple(residual.shape)} on {residual.device}, its parameter "
            f"{tuple(param.shape)} on {param.device}; they must be equal"
        )


def walkable(tensors: Sequence[Tensor]) -> list[Sequence[int]]:
    """Shapes of at most MAX_DIMS dimensions, as kernels walk them: flat ones in place of more."""
    return [(t.numel(),) if t.ndim > MAX_DIMS else t.shape for t in tensors]


def written_residuals(
    residuals: Sequence[Tensor | None] | None, used: Sequence[Tensor | None] | None
) -> None:
    """`written` of kept residuals, which parameters of 32 bits have none of."""
    if residuals is not None and used is not None:
        pairs = [pair for pair in zip(residuals, used, strict=True) if pair[0] is not None]
        written(*map(list, zip(*pairs, strict=True)))


def shaped(tensors: Sequence[Tensor | None], shapes: Sequence[Sequence[int]]) -> list[Any]:
    """The tensors in other shapes: themselves, views or copies. None stays None.

    Strides of nearly every parameter allow a view. Where they allow none, as for channels_last
    filters whose rows are needed, it is a contiguous copy, which `written` writes back.
    """
    return [
        tensor if tensor is None or tensor.shape == shape else tensor.reshape(shape)
        for tensor, shape in zip(tensors, shapes, strict=True)
    ]


def written(tensors: Sequence[Tensor], used: Sequence[Tensor]) -> None:
    """Take over what a kernel wrote to `used`: `shaped` made it of the tensors, or it is they.

    Compiled ops do not tell autograd what they wrote. Here it learns it, so that a graph which
    saved an old value refuses to run backwards, as after any operation in place.
    """
    pairs = () if used is tensors else zip(tensors, used, strict=True)
    for tensor, other in pairs:
        if other is not tensor and other.data_ptr() != tensor.data_ptr():
            tensor.copy_(other.view(tensor.shape))
    torch.autograd.graph.increment_version(tensors)  # which passes over inference tensors
