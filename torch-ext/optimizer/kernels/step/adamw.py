"""adamw: one step of AdamW for a list of parameters of any shapes, with one rounding each.

path      | source                                   | taken
compiled  | kernels-src/{step,cpu}                   | CUDA >= 8.0, CPU (CPU variant)
reference | reference/{update,rounding}.py           | everything else, float64
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import register_fake

from ..._ops import add_op_namespace_prefix
from ...reference import update as reference
from .apply_update import _random
from .tensor_lists import (
    DTYPES,
    NARROW,
    StochasticRounding,
    call,
    check_lists,
    check_rounding,
    device_scalar,
    float32,
    residual_arguments,
    rounding_arguments,
)


@register_fake(add_op_namespace_prefix("adamw"))
def _fake(*arguments):
    return None


def _check(params, grads, exp_avgs, exp_avg_sqs, steps, residuals, rounding) -> None:
    lists = {
        "params": params,
        "grads": grads,
        "exp_avgs": exp_avgs,
        "exp_avg_sqs": exp_avg_sqs,
    }
    wide = (torch.float32, torch.float64)
    dtypes = dict.fromkeys(lists, (*DTYPES, torch.float64))
    dtypes |= {"exp_avgs": wide, "exp_avg_sqs": wide}
    check_lists(lists, dtypes, written=("params", "exp_avgs", "exp_avg_sqs"))
    if len(steps) != len(params):
        raise ValueError(f"steps has {len(steps)} entries for {len(params)} params")
    for k, (step, param) in enumerate(zip(steps, params, strict=True)):
        if not isinstance(step, Tensor) or step.dtype != torch.float32:
            raise TypeError(f"steps[{k}] must be a float32 tensor, got {step!r}")
        if step.numel() != 1 or step.device != param.device:
            raise ValueError(
                f"steps[{k}] must have one element on {param.device}, got shape "
                f"{tuple(step.shape)} on {step.device}"
            )
    check_rounding(params, residuals, rounding)


def _reference(
    params, grads, exp_avgs, exp_avg_sqs, steps, lr, betas, eps, weight_decay, residuals, rounding
) -> None:
    entries = zip(params, grads, exp_avgs, exp_avg_sqs, steps, strict=True)
    for k, (param, *others) in enumerate(entries):
        reference.adamw(
            param,
            *others,
            lr=float32(lr, param.dtype),
            betas=betas,
            eps=eps,
            weight_decay=float32(weight_decay, param.dtype),
            residual=residuals[k] if residuals is not None and param.dtype in NARROW else None,
            random=_random(rounding, k, param),
        )


def adamw(
    params: Sequence[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    steps: Sequence[Tensor],
    *,
    lr: float | Tensor,
    betas: tuple[float | Tensor, float | Tensor],
    eps: float | Tensor,
    weight_decay: float | Tensor,
    residuals: Sequence[Tensor | None] | None = None,
    rounding: StochasticRounding | None = None,
) -> None:
    """One step of AdamW (arXiv 1711.05101) in place, for any number of tensors of any shapes.

    m <- b1 m + (1 - b1) g; v <- b2 v + (1 - b2) g^2; p <- p - lr wd p - lr / (1 - b1^t) m /
    (sqrt(v / (1 - b2^t)) + eps), the averages as torch.lerp forms them. float32 maths (float64 for
    float64), every operation rounded on its own, the parameter once: the same bits on every device
    and path. Each step counter is advanced on the device; nothing is compiled per shape, nothing
    synchronises, and scalars given as device tensors are read at the replay of a CUDA graph.

    Args:
        params: K tensors, float32, bfloat16 or float16, any strides, dtypes may differ.
        grads: K tensors of the same shapes, only read.
        exp_avgs: K float32 tensors of the same shapes, advanced in place.
        exp_avg_sqs: the same for the squares.
        steps: K float32 tensors of one element, the steps before this one; advanced in place. No
            tensor may stand twice.
        lr: number or 0-D tensor; on the CPU it counts as a number, which a CUDA graph keeps.
        betas: two numbers in [0, 1) or 0-D tensors.
        eps: number or 0-D tensor.
        weight_decay: number or 0-D tensor.
        residuals: as in `apply_update`.
        rounding: as in `apply_update`.

    Raises:
        TypeError: an entry is no tensor or has an unsupported dtype.
        ValueError: lists, shapes, devices or layouts that do not fit together, betas are not two,
            or both residuals and rounding; nothing has been written then.
    """
    if not isinstance(betas, (tuple, list)) or len(betas) != 2:
        raise ValueError(f"betas must be two numbers or 0-D tensors, got {betas!r}")
    if len(params) == 0:
        if any(map(len, (grads, exp_avgs, exp_avg_sqs, steps))):
            raise ValueError("params is empty, but another list is not")
        return

    lists, rounded = (params, grads, exp_avgs, exp_avg_sqs, steps), (residuals, rounding)
    numbers = {"lr": lr, "betas[0]": betas[0], "betas[1]": betas[1], "eps": eps}
    numbers["weight_decay"] = weight_decay

    def arguments() -> tuple:
        device = params[0].device
        scalars = (part for name in numbers for part in device_scalar(name, numbers[name], device))
        kept = residual_arguments(residuals, params)
        return (*lists, *scalars, kept, *rounding_arguments(rounding))

    call(
        "adamw",
        lists[:3],
        arguments,
        lambda: _check(*lists, *rounded),
        lambda: _reference(*lists, lr, betas, eps, weight_decay, *rounded),
    )
