"""apply_update: p <- p - decay p - rate u for a list of parameters, with one rounding each.

Decoupled decay, cautious mask, factored second-moment scale, stochastic rounding or a kept residual
in one pass (two more over the updates with second moments).

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
from ...reference import rounding as reference_rounding
from ...reference import update as reference
from .tensor_lists import (
    DTYPES,
    NARROW,
    StochasticRounding,
    as_list,
    call,
    check_lists,
    check_rounding,
    device_scalar,
    float32,
    residual_arguments,
    rounding_arguments,
)


@register_fake(add_op_namespace_prefix("apply_update"))
def _fake(*arguments):
    return None


def _check_second_moments(
    params: Sequence[Tensor], second_moments: Sequence[Tensor], beta2: float | None
) -> None:
    if beta2 is None:
        raise ValueError("second_moments needs beta2, the decay of their average")
    if len(second_moments) != len(params):
        raise ValueError(f"second_moments has {len(second_moments)} entries for {len(params)}")
    for k, (second, param) in enumerate(zip(second_moments, params, strict=True)):
        shape, name = tuple(param.shape), f"second_moments[{k}]"
        if param.ndim < 2 or tuple(second.shape) not in (
            (*shape[:-1], 1),
            (*shape[:-2], 1, shape[-1]),
        ):
            raise ValueError(
                f"{name} must be (..., m, 1) or (..., 1, n) for a parameter (..., m, n) = {shape}, "
                f"got {tuple(second.shape)}"
            )
        wide = second.dtype == torch.float64 and param.dtype == torch.float64
        if (second.dtype != torch.float32 and not wide) or second.device != param.device:
            raise ValueError(
                f"{name} must be float32 on {param.device}, got {second.dtype} on {second.device}"
            )
        if not second.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got strides {second.stride()}")


def _check(params, updates, factors, second_moments, beta2, residuals, rounding) -> None:
    lists = {"params": params, "updates": updates}
    dtypes = (*DTYPES, torch.float64)
    check_lists(lists, dict.fromkeys(lists, dtypes), written=("params",))
    if len(factors) != len(params):
        raise ValueError(f"factors has {len(factors)} entries for {len(params)} params")
    if second_moments is not None:
        _check_second_moments(params, second_moments, beta2)
    check_rounding(params, residuals, rounding)


def _random(rounding: StochasticRounding | None, k: int, param: Tensor) -> Tensor | None:
    if rounding is None or param.dtype not in NARROW:
        return None
    return reference_rounding.random_bits(
        param.shape,
        seed=rounding.seed,
        step=rounding.step,
        parameter=rounding.parameter[k],
        offset=rounding.offset[k],
        device=param.device,
    )


def _reference(
    params,
    updates,
    lr,
    factors,
    weight_decay,
    shaped_decay,
    cautious,
    second_moments,
    beta2,
    residuals,
    rounding,
) -> None:
    for k, (param, update) in enumerate(zip(params, updates, strict=True)):
        raw = float32(lr, param.dtype)
        rate = raw * float32(factors[k], param.dtype)
        decay = (rate if shaped_decay else raw) * float32(weight_decay, param.dtype)
        if second_moments is not None:
            update = reference.variance_reduction(update, second_moments[k], beta2)
        apply_one(k, param, update, rate, decay, cautious, residuals, rounding)


def apply_one(
    k: int,
    param: Tensor,
    update: Tensor,
    rate: float | Tensor,
    decay: float | Tensor,
    cautious: bool,
    residuals: Sequence[Tensor | None] | None,
    rounding: StochasticRounding | None,
) -> None:
    """The k-th parameter of a call by plain torch, at any rate and decay."""
    reference.apply_update(
        param,
        update,
        lr=rate,
        decay=decay,
        cautious=cautious,
        residual=residuals[k] if residuals is not None and param.dtype in NARROW else None,
        random=_random(rounding, k, param),
    )


def apply_update(
    params: Sequence[Tensor],
    updates: Sequence[Tensor] | Tensor,
    *,
    lr: float | Tensor,
    factors: Sequence[float],
    weight_decay: float | Tensor,
    shaped_decay: bool = False,
    cautious: bool = False,
    second_moments: Sequence[Tensor] | None = None,
    beta2: float | None = None,
    residuals: Sequence[Tensor | None] | None = None,
    rounding: StochasticRounding | None = None,
) -> None:
    """p <- p - decay p - rate u in place, rate = lr factor, decay = (lr or rate) weight_decay.

    float32 maths (float64 for float64), every operation rounded on its own, the parameter once: the
    same bits on every device and path, and for a number or a tensor of the same value. A constant
    number of launches for hundreds of tensors, no synchronisation, no copies: the call can be
    captured in a CUDA graph, and a tensor `lr` or `weight_decay` is read at replay.

    Args:
        params: K tensors, float32, bfloat16 or float16, any strides, dtypes may differ.
        updates: K tensors of the same shapes, only read. Or a contiguous one that holds all of
            them, row-major and one after another.
        lr: number or 0-D tensor; on the CPU it counts as a number, which a CUDA graph keeps.
        factors: one number per parameter, by which its shape changes lr.
        weight_decay: number or 0-D tensor.
        shaped_decay: decay by rate weight_decay instead of lr weight_decay.
        cautious: decay only where u p >= 0.
        second_moments: K contiguous float32 tensors (..., m, 1) or (..., 1, n) for parameters (...,
            m, n), advanced in place by the mean squares of the rows or columns of u, which is then
            equalized and keeps its norm (NorMuon, arXiv 2510.05491, as in `reference`).
        beta2: decay of those averages, with second_moments.
        residuals: one int16 tensor per bfloat16 or float16 parameter, of its shape, zeros at first,
            None for a float32 one. It keeps what rounding drops: (p, residual) is an exact float32
            number for bfloat16, and for float16 from 2^-17 to 65519 (to 2^-41 below).
        rounding: stochastic rounding of bfloat16 and float16 parameters; None rounds to nearest.

    Raises:
        TypeError: an entry is no tensor or has an unsupported dtype.
        ValueError: lists, shapes, devices or layouts that do not fit together, or both residuals
            and rounding; nothing has been written then.
    """
    if len(params) == 0:
        if len(updates) or len(factors):
            raise ValueError(
                f"params is empty, but updates has {len(updates)} and factors {len(factors)}"
            )
        return

    listed, batch = ([], updates) if isinstance(updates, Tensor) else (updates, None)
    rule = lr, factors, weight_decay, shaped_decay, cautious
    rest = second_moments, beta2, residuals, rounding

    def check() -> None:
        _check(params, as_list("updates", updates, params), factors, *rest)

    if second_moments is not None and beta2 is None:
        check()
    call(
        "apply_update",
        (params, listed if batch is None else [batch]),
        lambda: (
            params,
            listed,
            *device_scalar("lr", lr, params[0].device),
            factors,
            *device_scalar("weight_decay", weight_decay, params[0].device),
            shaped_decay,
            cautious,
            second_moments or [],
            0.0 if beta2 is None else beta2,
            residual_arguments(residuals, params),
            *rounding_arguments(rounding),
            batch,
        ),
        check,
        lambda: _reference(params, as_list("updates", updates, params), *rule, *rest),
    )
