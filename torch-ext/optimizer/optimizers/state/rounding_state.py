"""How a step stores 16-bit parameters: to nearest, stochastically, or with a kept residual.

The state that the last two need, for bfloat16 and float16 parameters alone:

    rounding_step       0-D int64: the steps of the group, whether this parameter had a gradient
                        or not, so that no two updates of a call draw the same random bits
    rounding_residual   int16, like the parameter: what rounding dropped, see reference/rounding.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ...kernels import StochasticRounding
from ...kernels.step.tensor_lists import NARROW
from ..groups.options import AdamWOptions, MuonOptions

COUNTER, RESIDUAL = "rounding_step", "rounding_residual"


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
        entries: returns per tensor of the call its parameter, the number of that parameter in the
            optimizer, and the number of the tensor's first element in the parameter.
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
