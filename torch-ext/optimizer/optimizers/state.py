"""Optimizer state: which tensors a parameter has, made at construction, and loaded without loss.

    momentum_buffer          like the parameter, float32 (float64 for float64 parameters)
    second_momentum_buffer   only with beta2: the statistics of each block, see blocks.py
    exp_avg, exp_avg_sq      like the parameter, float32 (float64)
    step                     0-D float32 on the parameter's device, AdamW only

No shape depends on anything but the parameter and its group's options.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from .blocks import cut
from .options import FLOATING, AdamWOptions, MuonOptions
from .parameters import is_dtensor
from .placing import fill, sharded_dims, zeros_beside

STATISTICS = "second_momentum_buffer"  # left behind where beta2 is set to None
OWN_FUNCTION = "<function>"


@dataclass(frozen=True)
class Slot:
    """One tensor of a parameter's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    like_param: bool  # placed and laid out as the parameter is
    stacked: bool = False  # its first dimension is that of a parameter which is a stack
    make: Callable[[Tensor, torch.dtype], Tensor] | None = None  # of a slice, instead of zeros

    def zeros(self, param: Tensor) -> Tensor:
        """Also in inference mode a tensor that a later step may write."""
        with torch.inference_mode(False):
            if self.make is not None:
                return self.make(param, self.dtype)
            if self.like_param:
                return torch.zeros_like(param, dtype=self.dtype, requires_grad=False)
            if self.shape and is_dtensor(param):
                return zeros_beside(param, self.shape, self.dtype, stacked=self.stacked)
            return torch.zeros(self.shape, dtype=self.dtype, device=param.device)


def slots_of(
    param: Tensor, name: str | None, options: MuonOptions | AdamWOptions, where: str
) -> dict[str, Slot]:
    """The state of a parameter under the options of its group."""
    wide = torch.promote_types(param.dtype, torch.float32)
    shape = tuple(param.shape)
    if isinstance(options, AdamWOptions):
        average = Slot(shape, wide, like_param=True)
        step = Slot((), torch.float32, like_param=False)
        return {"exp_avg": average, "exp_avg_sq": average, "step": step}
    blocks = cut(shape, name, options, where)
    slots = {"momentum_buffer": Slot(shape, options.momentum_dtype or wide, like_param=True)}
    if options.beta2 is not None:
        stacked = blocks.experts is not None
        if stacked and blocks.split and 0 in sharded_dims(param):
            raise ValueError(
                f"{where}: beta2 with split_sizes is not supported for experts that are sharded "
                "over ranks; set beta2=None, or keep the parts in parameters of their own"
            )
        factored = Slot(blocks.second_moment_shape(), wide, like_param=False, stacked=stacked)
        slots[STATISTICS] = factored
    return slots


def layout_of(options: MuonOptions | AdamWOptions) -> tuple[Any, ...]:
    """The options that decide the blocks and the slots; a change of one needs a new plan."""
    if isinstance(options, AdamWOptions):
        return ()
    o = options
    return (
        *(dict(v) if isinstance(v, Mapping) else v for v in (o.split_sizes, o.num_heads)),
        o.expert_keys,
        o.flatten,
        o.momentum_dtype,
        o.beta2 is None,
    )


def complete_state(
    state: Mapping[str, Tensor], slots: Mapping[str, Slot], param: Tensor, where: str
) -> dict[str, Tensor]:
    """The state with zeros for what is missing.

    Raises:
        ValueError: a tensor that is there does not fit the parameter any more.
    """
    for key, slot in slots.items():
        held = state.get(key)
        if held is None:
            continue
        if (tuple(held.shape), held.dtype, held.device) != (slot.shape, slot.dtype, param.device):
            raise ValueError(
                f"{where}: {key} is {held.dtype} {tuple(held.shape)} on {held.device}, but the "
                f"parameter and its options ask for {slot.dtype} {slot.shape} on {param.device}; "
                "move or reshape the parameter before the optimizer is constructed"
            )
    return {**state, **{k: slot.zeros(param) for k, slot in slots.items() if k not in state}}


def loaded_state(
    saved: Any, slots: Mapping[str, Slot], param: Tensor, where: str
) -> dict[str, Tensor]:
    """A copy of a saved state in the dtypes of `slots`, on the parameter's device.

    torch's own loading casts floating-point state to the dtype of the parameter, which would cut a
    float32 buffer of a bfloat16 parameter to 8 bits. A step count may be a number, as in state that
    older optimizers wrote.

    Raises:
        ValueError: an entry is missing, unknown, not floating-point, or has another shape.
    """
    saved = {} if saved is None else dict(saved)
    for key, slot in slots.items():
        if key == "step" and isinstance(saved.get(key), Real):
            saved[key] = torch.tensor(float(saved[key]), dtype=slot.dtype)
        if not isinstance(saved.get(key), Tensor):
            raise ValueError(f"{where}: the loaded state has no {key}; it has {sorted(saved)}")
        if tuple(saved[key].shape) != slot.shape:
            raise ValueError(
                f"{where}: the loaded {key} has shape {tuple(saved[key].shape)}, expected "
                f"{slot.shape}"
            )
        if saved[key].dtype not in FLOATING:
            raise ValueError(
                f"{where}: the loaded {key} must be floating-point of 16 bits or more, got "
                f"{saved[key].dtype}"
            )
    unused = {STATISTICS} if "momentum_buffer" in slots else set()
    unknown = sorted(str(key) for key in saved.keys() - slots.keys() - unused)
    if unknown:
        raise ValueError(
            f"{where}: the loaded state has {', '.join(map(repr, unknown))}, which this parameter "
            f"does not have; it has {', '.join(slots)}"
        )
    copied = {key: slot.zeros(param) for key, slot in slots.items()}
    for key, tensor in copied.items():
        fill(tensor, saved[key].detach(), f"{where}: the loaded {key}")
    return copied


def masked_options(group: dict[str, Any]) -> dict[str, Any]:
    """A group of a state_dict with a function in adjust_lr_fn replaced by a word.

    A function cannot be pickled safely; what loads the state_dict brings its own.
    """
    if callable(group.get("adjust_lr_fn")):
        return {**group, "adjust_lr_fn": OWN_FUNCTION}
    return group


def unmasked_options(saved: dict[str, Any], group: dict[str, Any], where: str) -> dict[str, Any]:
    """The saved options over the present ones, with the present function for adjust_lr_fn.

    Raises:
        ValueError: a function was saved, but the present group has none.
    """
    merged = {**{key: value for key, value in group.items() if key != "params"}, **saved}
    if merged.get("adjust_lr_fn") == OWN_FUNCTION:
        if not callable(group["adjust_lr_fn"]):
            raise ValueError(
                f"{where}: adjust_lr_fn was a function, which is not saved; construct the "
                f"optimizer with that function, not {group['adjust_lr_fn']!r}"
            )
        merged["adjust_lr_fn"] = group["adjust_lr_fn"]
    return merged
