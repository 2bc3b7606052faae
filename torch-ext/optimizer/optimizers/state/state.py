"""Optimizer state: which tensors a parameter has, made at the first step, and loaded without loss.

    momentum_buffer          like the parameter, float32 (float64 for float64 parameters)
    second_momentum_buffer   only with beta2: the statistics of each block, see blocks.py
    exp_avg, exp_avg_sq      like the parameter, float32 (float64)
    step                     0-D float32 on the parameter's device, AdamW only
    rounding_step, rounding_residual   only with `rounding`, see rounding.py

No shape depends on anything but the parameter and its group's options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ...kernels.step.tensor_lists import NARROW
from ..groups.blocks import cut
from ..groups.options import FLOATING, AdamWOptions, MuonOptions
from ..groups.parameters import is_dtensor, local
from .host_state import KEPT, host_zeros
from .placements import fill, sharded_dims, zeros_beside
from .rounding import COUNTER, RESIDUAL, check_rounding

STATISTICS = "second_momentum_buffer"
OWN_FUNCTION = "<function>"
COUNTERS = frozenset({"step", COUNTER})
ASKED_FOR = frozenset({RESIDUAL, STATISTICS, COUNTER})  # by an option that may change
NOT_NEGATIVE = COUNTERS | {"exp_avg_sq", STATISTICS}


@dataclass(frozen=True)
class Slot:
    """One tensor of a parameter's state."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    like_param: bool  # placed and laid out as the parameter is
    stacked: bool = False  # its first dimension is that of a parameter which is a stack
    make: Callable[[Tensor, torch.dtype], Tensor] | None = None  # of a slice, instead of zeros

    def zeros(self, param: Tensor, *, on_host: bool = False) -> Tensor:
        """Also in inference mode a tensor that a later step may write."""
        with torch.inference_mode(False):
            if on_host:
                return host_zeros(param, self.dtype)
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
        slots = {"exp_avg": average, "exp_avg_sq": average, "step": step}
        return slots | _rounding_slots(param, options, where)
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
    return slots | _rounding_slots(param, options, where)


def _rounding_slots(
    param: Tensor, options: MuonOptions | AdamWOptions, where: str
) -> dict[str, Slot]:
    rounding = options.rounding
    if param.dtype not in NARROW or rounding == "nearest":
        return {}
    if rounding == "stochastic":
        if sharded_dims(param):
            check_rounding(options, param, where)
        return {COUNTER: Slot((), torch.int64, like_param=False)}
    return {RESIDUAL: Slot(tuple(param.shape), torch.int16, like_param=True)}


def layout_of(options: MuonOptions | AdamWOptions) -> tuple[Any, ...]:
    """The options that decide the blocks and the slots; a change of one needs a new plan."""
    if isinstance(options, AdamWOptions):
        return (options.rounding,)
    o = options
    return (
        *(dict(v) if isinstance(v, Mapping) else v for v in (o.split_sizes, o.num_heads)),
        o.expert_keys,
        o.flatten,
        o.momentum_dtype,
        o.beta2 is None,
        o.rounding,
    )


def complete_state(
    state: Mapping[str, Tensor],
    slots: Mapping[str, Slot],
    param: Tensor,
    where: str,
    *,
    offloaded: bool = False,
) -> dict[str, Tensor]:
    """The state with zeros for what is missing; offloaded, in host memory but for what is small.

    What no option asks for any more is dropped, as loading does: a residual, a second moment or a
    counter that no step keeps up to date belongs to values that are gone.

    Raises:
        ValueError: a tensor that is there does not fit the parameter any more.
        RuntimeError: a tensor is missing, and a CUDA graph is being captured.
    """
    for key, slot in slots.items():
        held = state.get(key)
        if held is None:
            continue
        hosted = offloaded and key not in KEPT
        device = torch.device("cpu") if hosted else param.device
        if (tuple(held.shape), held.dtype, local(held).device) != (slot.shape, slot.dtype, device):
            raise ValueError(
                f"{where}: {key} is {held.dtype} {tuple(held.shape)} on {held.device}, but the "
                f"parameter and its options ask for {slot.dtype} {slot.shape} on {device}; "
                "move or reshape the parameter before the optimizer is constructed"
            )
    kept = {key: held for key, held in state.items() if key not in ASKED_FOR or key in slots}
    missing = {key: slot for key, slot in slots.items() if key not in kept}
    if missing and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{where}: optimizer state is made at the first step, which cannot be captured in a "
            "CUDA graph; take one step or load a state_dict before capturing"
        )
    return kept | _zeros(missing, param, offloaded)


def _zeros(slots: Mapping[str, Slot], param: Tensor, offloaded: bool) -> dict[str, Tensor]:
    return {
        key: slot.zeros(param, on_host=offloaded and key not in KEPT) for key, slot in slots.items()
    }


def loaded_state(
    saved: Any, slots: Mapping[str, Slot], param: Tensor, where: str, *, offloaded: bool = False
) -> dict[str, Tensor]:
    """A copy of a saved state in the dtypes of `slots`, on the parameter's device or offloaded.

    torch's own loading casts floating-point state to the dtype of the parameter, which would cut a
    float32 buffer of a bfloat16 parameter to 8 bits. A step count may be a number, as in state that
    older optimizers wrote. State of `rounding` may be missing, as from a run without it, and begins
    with zeros.

    Raises:
        ValueError: an entry is missing, unknown, of another kind of numbers, has another shape, or
            a value that no step leaves behind.
    """
    saved = {} if saved is None else dict(saved)
    for key, slot in slots.items():
        if key == "step" and isinstance(saved.get(key), Real):
            saved[key] = torch.tensor(float(saved[key]), dtype=slot.dtype)
        if key in (COUNTER, RESIDUAL) and key not in saved:
            saved[key] = torch.zeros(slot.shape, dtype=slot.dtype)
        if not isinstance(saved.get(key), Tensor):
            raise ValueError(f"{where}: the loaded state has no {key}; it has {sorted(saved)}")
        if tuple(saved[key].shape) != slot.shape:
            raise ValueError(
                f"{where}: the loaded {key} has shape {tuple(saved[key].shape)}, expected "
                f"{slot.shape}"
            )
        _check_loaded_dtype(f"{where}: the loaded {key}", saved[key].dtype, slot.dtype)
        _check_loaded_values(f"{where}: the loaded {key}", saved[key], key)
    unused = {COUNTER, RESIDUAL} | ({STATISTICS} if "momentum_buffer" in slots else set())
    unknown = sorted(str(key) for key in saved.keys() - slots.keys() - unused)
    if unknown:
        raise ValueError(
            f"{where}: the loaded state has {', '.join(map(repr, unknown))}, which this parameter "
            f"does not have; it has {', '.join(slots)}"
        )
    copied = _zeros(slots, param, offloaded)
    for key, tensor in copied.items():
        fill(tensor, saved[key].detach(), f"{where}: the loaded {key}")
    return copied


def _check_loaded_dtype(what: str, saved: torch.dtype, expected: torch.dtype) -> None:
    if expected not in FLOATING:
        if saved != expected:
            raise ValueError(f"{what} must be {expected}, got {saved}")
    elif saved not in FLOATING:
        raise ValueError(f"{what} must be floating-point of 16 bits or more, got {saved}")


def _check_loaded_values(what: str, saved: Tensor, key: str) -> None:
    """Counts are finite; they and averages of squares are not negative, and no NaN."""
    values = local(saved.detach())  # of a DTensor those that are here
    if key not in NOT_NEGATIVE or not values.numel():
        return
    least = values.amin().item()  # NaN if there is one
    if not least >= 0 or (key in COUNTERS and least == math.inf):
        raise ValueError(
            f"{what} holds {least}; it must be {'finite and ' if key in COUNTERS else ''}at least "
            "0. Load another checkpoint, of a run or a step without NaN"
        )


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
