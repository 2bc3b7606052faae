"""State of a state_dict, checked and copied without loss, however tensors are placed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ...distributed import boxes, whole
from ..groups.options import FLOATING
from ..groups.parameters import is_dtensor, local
from .slots import ASKED_FOR, COUNTER, RESIDUAL, STATISTICS, Slot, placed_layout, zeros_of

OWN_FUNCTION = "<function>"
COUNTERS = frozenset({"step", COUNTER})
NOT_NEGATIVE = COUNTERS | {"exp_avg_sq", STATISTICS}


def loaded_state(
    saved: Any, slots: Mapping[str, Slot], param: Tensor, where: str, *, offloaded: bool = False
) -> dict[str, Tensor]:
    """A copy of a saved state in the dtypes of `slots`, on the parameter's device or offloaded.

    torch's own loading casts floating-point state to the dtype of the parameter, which would cut a
    float32 buffer of a bfloat16 parameter to 8 bits. A step count may be a number, as in state that
    older optimizers wrote. State of `rounding` and `beta2` may be missing, as from a run that took
    no step since it was switched on, and begins with zeros. So does that of a frozen parameter, all
    of which torch.distributed.checkpoint drops while it loads.

    Raises:
        ValueError: an entry is missing, unknown, of another kind of numbers, has another shape, or
            a value that no step leaves behind.
    """
    saved = {} if saved is None else dict(saved)
    if not saved and not param.requires_grad:
        return zeros_of(slots, param, offloaded)
    for key, slot in slots.items():
        if key == "step" and isinstance(saved.get(key), Real):
            saved[key] = torch.tensor(float(saved[key]), dtype=slot.dtype, device="cpu")
        if key in ASKED_FOR and key not in saved:
            saved[key] = torch.zeros(slot.shape, dtype=slot.dtype, device="cpu")
        if not isinstance(saved.get(key), Tensor):
            raise ValueError(f"{where}: the loaded state has no {key}; it has {sorted(saved)}")
        if saved[key].is_meta:
            raise ValueError(f"{where}: the loaded {key} is on the meta device and has no values")
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
    copied = zeros_of(slots, param, offloaded)
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
    if merged.get("adjust_lr_fn", OWN_FUNCTION) is None:
        merged["adjust_lr_fn"] = "none"  # of a version that had None for no scaling
    if merged.get("adjust_lr_fn") == OWN_FUNCTION:
        if not callable(group["adjust_lr_fn"]):
            raise ValueError(
                f"{where}: adjust_lr_fn was a function, which is not saved; construct the "
                f"optimizer with that function, not {group['adjust_lr_fn']!r}"
            )
        merged["adjust_lr_fn"] = group["adjust_lr_fn"]
    return merged


def fill(target: Tensor, saved: Tensor, what: str) -> None:
    """Copy a saved tensor into one of the same global shape, however the two are placed.

    Raises:
        ValueError: the saved one is sharded in another way, so that other ranks have parts of it.
    """
    if not is_dtensor(saved):
        if not is_dtensor(target):
            target.copy_(saved)
            return
        for here, region in pieces(target):
            here.copy_(saved[region])
        return
    everywhere = all(placement.is_replicate() for placement in saved.placements)
    if everywhere:
        fill(target, local(saved), what)
        return
    if not is_dtensor(target) or target.placements != saved.placements:
        raise ValueError(
            f"{what} has placements {tuple(saved.placements)}, this optimizer's "
            f"{tuple(target.placements) if is_dtensor(target) else 'is on one rank'}; load it with "
            "torch.distributed.checkpoint, which reshards"
        )
    local(target).copy_(local(saved))


def pieces(tensor: Tensor) -> Iterator[tuple[Tensor, tuple[slice, ...]]]:
    """What this rank holds of a tensor, and which elements of the whole they are."""
    if not is_dtensor(tensor):
        yield tensor, tuple(slice(0, size) for size in tensor.shape)
        return
    mesh = tensor.device_mesh
    layout = placed_layout(tuple(tensor.shape), tensor.placements, mesh)
    region = [(0, size) for size in tensor.shape]
    for box in boxes(layout.runs(mesh.get_coordinate()), region):
        yield box.view(local(tensor)), box.region


def gathered(tensor: Tensor) -> Tensor:
    """All of a tensor; of a DTensor all ranks of its mesh must ask."""
    return whole(tensor) if is_dtensor(tensor) else tensor
