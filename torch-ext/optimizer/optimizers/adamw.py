"""AdamW for what is not a matrix: embeddings, heads, norms, biases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..kernels import adamw as adamw_kernel
from .layout import MAX_DIMS, shaped, written
from .options import AdamWOptions
from .parameters import local
from .rounding import RESIDUAL, Rounding, rounding_of


def adamw(
    params: Sequence[Tensor],
    find: Callable[[Tensor], Mapping[str, Tensor]],
    state: Mapping[Tensor, Mapping[str, Tensor]],
    numbers: Mapping[Tensor, int],
    options: AdamWOptions,
) -> list[Tensor]:
    """One step for any number of tensors of any shapes; gradients are only read.

    Parameters without a gradient are left alone; the others are returned. One call per device;
    float64, for which there is no kernel, has one of its own.

    Args:
        params: of a group.
        find: parameter -> its exp_avg, exp_avg_sq, step on its device.
        state: of the optimizer, with the counters of stochastic rounding.
        numbers: of the parameters in the optimizer.
        options: of the group.
    """
    taken = [param for param in params if param.grad is not None]
    grads = [param.grad for param in taken]
    for members in _calls(taken, grads):
        of_call = [taken[k] for k in members]
        states = [find(param) for param in of_call]
        device = of_call[0].device
        rounding = rounding_of(
            options,
            (param for param in params if param.device == device),
            state,
            lambda of_call=of_call: [(param, numbers[param], 0) for param in of_call],
            lambda k, states=states: local(states[k][RESIDUAL]),
        )
        _step(of_call, [grads[k] for k in members], states, options, rounding)
    return taken


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
) -> None:
    lists = {
        "param": [local(param) for param in params],
        "grad": [local(grad) for grad in grads],
        "exp_avg": [local(of_one["exp_avg"]) for of_one in states],
        "exp_avg_sq": [local(of_one["exp_avg_sq"]) for of_one in states],
    }
    residuals = kept = rounding.residuals
    used = lists
    if any(param.ndim > MAX_DIMS for param in params):
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
    if residuals is not None and kept is not None:
        written(residuals, kept)
