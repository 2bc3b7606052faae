"""AdamW for what is not a matrix: embeddings, heads, norms, biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...kernels import adamw as adamw_kernel
from ...kernels.step.tensor_lists import MAX_DIMS, shaped, written
from ..groups.options import AdamWOptions
from ..groups.parameters import local
from ..state.on_device import AdamWWork
from ..state.rounding_state import RESIDUAL, Rounding, rounding_of


def adamw(
    work: AdamWWork,
    state: Mapping[Tensor, Mapping[str, Tensor]],
    numbers: Mapping[Tensor, int],
    options: AdamWOptions,
) -> None:
    """One step for any number of tensors of any shapes; gradients are only read.

    One call per device; float64, for which there is no kernel, has one of its own. Work that is
    uniform is one call as it stands.

    Args:
        work: tensors, gradients and state, of one group.
        state: of the optimizer, with the counters of stochastic rounding.
        numbers: of the parameters in the optimizer.
        options: of the group.
    """
    parts = [work]
    if not work.uniform:
        parts = [work.part(members) for members in _calls(work.tensors, work.grads)]
    for part in parts:
        rounding = rounding_of(
            options,
            part.params,
            state,
            lambda part=part: [
                (param, numbers[param], first)
                for param, first in zip(part.params, part.first, strict=True)
            ],
            lambda k, part=part: local(part.states[k][RESIDUAL]),
        )
        _step(part.tensors, part.grads, part.states, options, rounding, uniform=part.uniform)


def adamw_on(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],  # exp_avg, exp_avg_sq, step of each
    options: AdamWOptions,
) -> None:
    """The same for parameters, or parts of them, with gradients and state from elsewhere."""
    for members in _calls(params, grads):
        lists = ([of_all[k] for k in members] for of_all in (params, grads, states))
        _step(*lists, options, Rounding())


def _calls(params: Sequence[Tensor], grads: Sequence[Tensor]) -> list[list[int]]:
    """The numbers of the parameters by device and by whether float64 is in it or its gradient."""
    calls: dict[tuple[torch.device, bool], list[int]] = {}
    for k, (param, grad) in enumerate(zip(params, grads, strict=True)):
        wide = param.dtype is torch.float64 or grad.dtype is torch.float64
        calls.setdefault((param.device, wide), []).append(k)
    return list(calls.values())


def _step(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    states: Sequence[Mapping[str, Tensor]],
    options: AdamWOptions,
    rounding: Rounding,
    *,
    uniform: bool = False,  # plain tensors of few dimensions
) -> None:
    lists = {
        "param": params,
        "grad": grads,
        "exp_avg": [of_one["exp_avg"] for of_one in states],
        "exp_avg_sq": [of_one["exp_avg_sq"] for of_one in states],
    }
    if not uniform:
        lists |= {name: [*map(local, lists[name])] for name in ("exp_avg", "exp_avg_sq")}
    residuals = kept = rounding.residuals
    used = lists
    if not uniform and any(param.ndim > MAX_DIMS for param in params):
        shapes = [(p.numel(),) if p.ndim > MAX_DIMS else p.shape for p in lists["param"]]
        used = {name: shaped(tensors, shapes) for name, tensors in lists.items()}
        kept = None if residuals is None else shaped(residuals, shapes)
    adamw_kernel(
        *used.values(),
        [of_one["step"] for of_one in states],
        lr=options.lr,
        betas=options.betas,
        eps=options.eps,
        weight_decay=options.weight_decay,
        residuals=kept,
        rounding=rounding.noise,
    )
    for name in ("param", "exp_avg", "exp_avg_sq"):
        written(lists[name], used[name])
    if residuals is not None and kept is not None:  # parameters of 32 bits have none
        pairs = [pair for pair in zip(residuals, kept, strict=True) if pair[0] is not None]
        written(*map(list, zip(*pairs, strict=True)))
