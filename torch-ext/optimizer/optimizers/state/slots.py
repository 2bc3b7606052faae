"""Optimizer state: which tensors a parameter has, and how they are made at the first step.

    momentum_buffer          like the parameter, float32 (float64 for float64 parameters)
    second_momentum_buffer   only with beta2: the statistics of each block, see blocks.py
    exp_avg, exp_avg_sq      like the parameter, float32 (float64)
    step                     0-D float32 on the parameter's device, AdamW only
    rounding_step            only with rounding="stochastic" and 16 bits: 0-D int64, the steps of
                             the group, whether this parameter had a gradient or not, so that no two
                             updates of a call draw the same random bits
    rounding_residual        only with rounding="residual" and 16 bits: int16, like the parameter,
                             what rounding dropped (reference/rounding.py)

No shape depends on anything but the parameter and its group's options.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...distributed import Layout, splits_of
from ...kernels import StochasticRounding
from ...kernels.step.tensor_lists import NARROW
from ..groups.blocks import cut
from ..groups.options import AdamWOptions, MuonOptions
from ..groups.parameters import is_dtensor, local

COUNTER, RESIDUAL = "rounding_step", "rounding_residual"
STATISTICS = "second_momentum_buffer"
ASKED_FOR = frozenset({RESIDUAL, STATISTICS, COUNTER})  # by an option that may change
# Small state that stays on the device: one number, and one per row or column.
KEPT = frozenset({"step", "second_momentum_buffer", "rounding_step"})


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
        o.transposed,
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

    State follows a parameter to another device and dtype, as model.to(...) takes it there. What no
    option asks for any more is dropped, as loading does: a residual, a second moment or a
    counter that no step keeps up to date belongs to values that are gone.

    Raises:
        ValueError: a tensor that is there does not fit the parameter any more.
        RuntimeError: a tensor is missing or moves, and a CUDA graph is being captured.
    """
    following = {}
    for key, slot in slots.items():
        held = state.get(key)
        if held is None:
            continue
        hosted = offloaded and key not in KEPT
        device = torch.device("cpu") if hosted else param.device
        if (tuple(held.shape), held.dtype, local(held).device) == (slot.shape, slot.dtype, device):
            continue
        moved = is_dtensor(held) and local(held).device != device
        if tuple(held.shape) != slot.shape or hosted or moved:
            raise ValueError(
                f"{where}: {key} is {held.dtype} {tuple(held.shape)} on {held.device}, but the "
                f"parameter and its options ask for {slot.dtype} {slot.shape} on {device}; "
                f"{_remedy(hosted=hosted and tuple(held.shape) == slot.shape)}"
            )
        following[key] = (held, device, slot.dtype)
    kept = {key: held for key, held in state.items() if key not in ASKED_FOR or key in slots}
    missing = {key: slot for key, slot in slots.items() if key not in kept}
    changes = missing or following
    if changes and torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{where}: optimizer state is made at the first step, and moved at the first one after "
            "its parameter, which cannot be captured in a CUDA graph; take one step or load a "
            "state_dict before capturing"
        )
    with torch.inference_mode(False):
        kept |= {key: held.to(*target) for key, (held, *target) in following.items()}
    return kept | zeros_of(missing, param, offloaded)


def _remedy(*, hosted: bool) -> str:
    if hosted:
        return "call turn_off_cpu_offload() before the model is moved, and turn it on again after"
    return "move or reshape the parameter before the optimizer is constructed"


def zeros_of(slots: Mapping[str, Slot], param: Tensor, offloaded: bool) -> dict[str, Tensor]:
    """New state for these slots; offloaded, in host memory but for what is small."""
    return {
        key: slot.zeros(param, on_host=offloaded and key not in KEPT) for key, slot in slots.items()
    }


def host_zeros(param: Tensor, dtype: torch.dtype) -> Tensor:
    """Zeros shaped and sharded like a parameter, row-major in host memory, pinned for CUDA."""
    shape, pinned = local(param).shape, param.device.type == "cuda"
    zeros = torch.zeros(shape, dtype=dtype, device="cpu", pin_memory=pinned)
    if not is_dtensor(param):
        return zeros
    from torch.distributed.tensor import DTensor

    # As FSDP2 makes its offloaded parameters: from_local would move it to the mesh's device.
    spec = param._spec
    meta = spec.tensor_meta._replace(dtype=dtype)
    spec = type(spec)(spec.mesh, spec.placements, tensor_meta=meta)
    return DTensor(zeros, spec, requires_grad=False)


def travels(param: Tensor, key: str, value: Any) -> bool:
    """Whether offload moves an entry of a parameter's state."""
    return key not in KEPT and isinstance(value, Tensor) and value.shape == param.shape


def sharded_dims(param: Tensor) -> set[int]:
    """The dimensions of a parameter that ranks share out; none of a plain tensor."""
    if not is_dtensor(param):
        return set()
    splits = splits_of(param.placements, param.ndim)
    sizes = param.device_mesh.mesh.shape
    return {
        split.dim
        for split, size in zip(splits, sizes, strict=True)
        if split.dim is not None and size > 1
    }


def rows_here(param: Tensor) -> Tensor | None:
    """The numbers of the rows of a parameter that this rank holds; None for all of them."""
    if 0 not in sharded_dims(param):
        return None
    mesh = param.device_mesh
    runs = placed_layout(tuple(param.shape), param.placements, mesh).runs(mesh.get_coordinate())[0]
    numbers = [torch.arange(start, start + length) for start, length in runs]
    return torch.cat([torch.empty(0, dtype=torch.int64), *numbers]).to(param.device)


def zeros_beside(
    param: Tensor, shape: tuple[int, ...], dtype: torch.dtype, *, stacked: bool
) -> Tensor:
    """Zeros of another shape on the ranks of a DTensor: sharded as a stack is, else on all."""
    from torch.distributed.tensor import Replicate

    splits = splits_of(param.placements, param.ndim)
    placements = [
        placement if stacked and split.dim == 0 else Replicate()
        for placement, split in zip(param.placements, splits, strict=True)
    ]
    return sharded_zeros(param, shape, dtype, param.device_mesh, placements)


def sharded_zeros(
    param: Tensor, shape: tuple[int, ...], dtype: torch.dtype, mesh: Any, placements: Sequence[Any]
) -> Tensor:
    """A DTensor of zeros on the device of a parameter, made without communication."""
    from torch.distributed.tensor import DTensor

    here = placed_layout(shape, placements, mesh).local_shape(mesh.get_coordinate())
    return DTensor.from_local(
        torch.zeros(here, dtype=dtype, device=param.device),
        mesh,
        placements,
        run_check=False,
        shape=torch.Size(shape),
        stride=tuple(math.prod(shape[i + 1 :]) for i in range(len(shape))),
    )


def placed_layout(shape: tuple[int, ...], placements: Any, mesh: Any) -> Layout:
    """How the ranks of a mesh hold a tensor of this shape."""
    return Layout(shape, tuple(mesh.mesh.shape), splits_of(placements, max(len(shape), 1)))


@dataclass(frozen=True, eq=False)
class Rounding:
    """What a call of a kernel is told; neither of the two means to nearest."""

    residuals: list[Tensor | None] | None = None
    noise: StochasticRounding | None = None


def check_rounding(options: MuonOptions | AdamWOptions, param: Tensor, where: str) -> None:
    """Raise ValueError if the random bits of a shared parameter would depend on its shards."""
    if options.rounding == "stochastic" and param.dtype in NARROW:
        raise ValueError(
            f"{where}: rounding='stochastic' is not supported for {param.dtype} parameters that "
            "several ranks share; use rounding='residual', which no sharding changes"
        )


def check_unreduced(options: MuonOptions | AdamWOptions, param: Tensor, where: str) -> None:
    """Raise ValueError if 16-bit parameters are not rounded to nearest, where owners update."""
    if options.rounding != "nearest" and param.dtype in NARROW:
        raise ValueError(
            f"{where}: rounding={options.rounding!r} is not supported with gradients='unreduced'; "
            "use rounding='nearest', or reduce the gradients and use gradients='reduced'"
        )


def count_step(
    params: Sequence[Tensor],
    state: Mapping[Tensor, Mapping[str, Tensor]],
    options: MuonOptions | AdamWOptions,
) -> None:
    """Advance the counters of a group that rounds stochastically and takes a step."""
    if options.rounding == "stochastic" and any(param.grad is not None for param in params):
        counters = [state[param][COUNTER] for param in params if param.dtype in NARROW]
        if counters:
            torch._foreach_add_(counters, 1)


def rounding_of(
    options: MuonOptions | AdamWOptions,
    planned: Iterable[Tensor],
    state: Mapping[Tensor, Mapping[str, Tensor]],
    entries: Callable[[], Sequence[tuple[Tensor, int, int]]],
    residual: Callable[[int], Tensor],
) -> Rounding:
    """The rounding of one call.

    Args:
        options: of the group.
        planned: the parameters that such a call may hold; the first of 16 bits has its counter.
        state: of the optimizer.
        entries: returns (parameter, its number, number of its first element here) per tensor.
        residual: returns the kept residual of the k-th tensor of the call.
    """
    if options.rounding == "nearest":
        return Rounding()
    tensors = entries()
    if not any(param.dtype in NARROW for param, *_ in tensors):
        return Rounding()
    if options.rounding == "residual":
        return Rounding(
            residuals=[
                residual(k) if param.dtype in NARROW else None
                for k, (param, _, _) in enumerate(tensors)
            ]
        )
    first = next(param for param in planned if param.dtype in NARROW)
    return Rounding(
        noise=StochasticRounding(
            seed=options.rounding_seed,
            step=state[first][COUNTER],
            parameter=[number for _, number, _ in tensors],
            offset=[offset for _, _, offset in tensors],
        )
    )
