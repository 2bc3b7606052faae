"""What a parameter and its gradient must be, what is here of them, and the parts of names."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from ...kernels.step.tensor_lists import MAX_DIMS
from .options import FLOATING

# What DTensor.to_local returns where no graph is built, without 5 us of Python for each.
_kept = operator.attrgetter("_local_tensor")
# Components that wrappers put into names: torch.compile, activation checkpointing, FSDP1.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


def local(tensor: Tensor) -> Tensor:
    """What this rank holds of a DTensor, and any other tensor itself."""
    if is_plain(tensor) or not is_dtensor(tensor):
        return tensor
    return tensor.to_local()


def locals_of(tensors: Sequence[Tensor]) -> list[Tensor]:
    """`local` of every tensor, where no graph is built."""
    try:
        return [*map(_kept, tensors)]
    except AttributeError:
        return [*map(local, tensors)]


def is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is of torch's own classes, in the time of two comparisons."""
    kind = type(tensor)
    return kind is Tensor or kind is torch.nn.Parameter


def is_dtensor(tensor: Tensor) -> bool:
    """By its attributes: torch.distributed is not imported for a model that does not use it."""
    return hasattr(tensor, "placements") and hasattr(tensor, "to_local")


def label(where: str, index: int, name: str | None) -> str:
    """How messages name a parameter."""
    return f"{where}, parameter {index if name is None else repr(name)}"


def check_parameter(param: Any, where: str) -> None:
    """Raise TypeError or ValueError if no optimizer here can update this parameter."""
    if not isinstance(param, Tensor):
        raise TypeError(f"{where}: a parameter must be a torch.Tensor, got {type(param).__name__}")
    check_initialized(param, where)
    if not (param.is_leaf or param.retains_grad):
        raise ValueError(f"{where}: cannot optimize a tensor that is not a leaf of the graph")
    check_format(param, where)
    strides = local(param).stride()
    if any(size > 1 and not step for size, step in zip(local(param).shape, strides, strict=True)):
        raise ValueError(
            f"{where}: expanded (strides {strides}), so that elements share one address; make the "
            "parameter of a clone()"
        )


def check_initialized(param: Tensor, where: str) -> None:
    """Raise ValueError if a lazy module has not made its parameter yet."""
    if is_lazy(param):
        raise ValueError(
            f"{where}: not initialized; run the model once on a batch, then construct its optimizer"
        )


def check_format(tensor: Tensor, where: str) -> None:
    """A dense, real floating-point tensor; a DTensor whose ranks hold shards or copies of it."""
    if tensor.layout != torch.strided:
        raise ValueError(f"{where}: must be dense, got layout {tensor.layout}")
    if tensor.is_complex():
        raise ValueError(f"{where}: must be real, got {tensor.dtype}; optimize torch.view_as_real")
    if tensor.dtype not in FLOATING:
        raise ValueError(f"{where}: must be floating-point of 16 bits or more, got {tensor.dtype}")
    if not is_dtensor(tensor):
        return
    if any(placement.is_partial() for placement in tensor.placements):
        raise TypeError(
            f"{where}: a DTensor with placements {tuple(tensor.placements)} holds sums that are "
            "not made yet; redistribute it to Shard or Replicate placements"
        )
    sharded = not all(placement.is_replicate() for placement in tensor.placements)
    if sharded and tensor.ndim > MAX_DIMS:
        raise ValueError(
            f"{where}: a sharded tensor may have {MAX_DIMS} dimensions, got {tensor.ndim}; flatten "
            "it before it is sharded"
        )


def check_gradient(param: Tensor, where: str) -> None:
    """Raise if a gradient cannot be used. It may have another precision than its parameter."""
    grad = param.grad
    if grad is None:
        return
    check_format(grad, f"{where}: gradient")
    if grad.shape != param.shape or grad.device != param.device:
        raise ValueError(
            f"{where}: the gradient has shape {tuple(grad.shape)} on {grad.device}, the parameter "
            f"{tuple(param.shape)} on {param.device}; recompute it after changing the parameter"
        )
    if is_dtensor(grad) != is_dtensor(param) or (
        is_dtensor(grad)
        and (grad.placements != param.placements or grad.device_mesh != param.device_mesh)
    ):
        raise TypeError(
            f"{where}: gradient: it is placed as {_placing(grad)}, its parameter as "
            f"{_placing(param)}; redistribute it like the parameter"
        )


def _placing(tensor: Tensor) -> str:
    return str(tuple(tensor.placements)) if is_dtensor(tensor) else "a plain tensor"


def components(name: str) -> list[str]:
    """The parts of a qualified name without those that wrappers add."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    if parts[0] == "module" and len(parts) > 1:  # DistributedDataParallel
        del parts[0]
    return parts


def has_component(name: str, key: str) -> bool:
    """Whether `key` occurs in `name` as whole components; `shared_experts.w1` has no `experts`."""
    parts, wanted = components(name), key.split(".")
    last = len(parts) - len(wanted)
    return any(parts[i : i + len(wanted)] == wanted for i in range(last + 1))
