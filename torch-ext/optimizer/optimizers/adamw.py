"""AdamW for what is not a matrix: embeddings, heads, norms, biases."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..kernels import adamw as adamw_kernel
from .layout import MAX_DIMS, shaped, written
from .options import AdamWOptions
from .parameters import local
from .rounding import Rounding, rounding_of


def adamw(
    params: Sequence[Tensor],
    state: Mapping[Tensor, Mapping[str, Tensor]],  # exp_avg, exp_avg_sq, step of each
    first: int,  # number of params[0] in the optimizer
    options: AdamWOptions,
) -> list[Tensor]:
    """One step for any number of tensors of any shapes; gradients are only read.

    Parameters without a gradient are left alone; the others are returned. One call per device;
    float64, for which there is no kernel, has one of its own.
    """
    taken = [
        (param, number) for number, param in enumerate(params, first) if param.grad is not None
    ]
    for members in _calls(taken):
        device = members[0][0].device
        rounding = rounding_of(
            options,
            (param for param in params if param.device == device),
            state,
            lambda members=members: [(param, number, 0, local) for param, number in members],
        )
        _step([param for param, _ in members], state, options, rounding)
    return [param for param, _ in taken]


def _calls(taken: list[tuple[Tensor, int]]) -> list[list[tuple[Tensor, int]]]:
    """The parameters by device and by whether float64 is among parameter and gradient."""
    calls: dict[tuple[torch.device, bool], list[tuple[Tensor, int]]] = {}
    for entry in taken:
        param = entry[0]
        wide = param.dtype is torch.float64 or param.grad.dtype is torch.float64
        calls.setdefault((param.device, wide), []).append(entry)
    return list(calls.values())


def _step(
    params: list[Tensor],
    state: Mapping[Tensor, Mapping[str, Tensor]],
    options: AdamWOptions,
    rounding: Rounding,
) -> None:
    states = [state[param] for param in params]
    lists = {
        "param": [local(param) for param in params],
        "grad": [local(param.grad) for param in params],
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
