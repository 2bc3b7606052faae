"""The stages of a step around the iteration, and AdamW.

Gradients and momentum buffers -> the directions to orthogonalize, as one batch; and the updates
made of them -> parameters: learning-rate rule, variance reduction, decay, one rounding. AdamW is
for what is no matrix: embeddings, heads, norms, biases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from torch import Tensor

from ..dispatch import say_once
from ..kernels import StochasticRounding, apply_update
from ..kernels import adamw as adamw_kernel
from ..kernels import momentum as momentum_kernel
from ..kernels.step.apply_update import apply_one
from ..kernels.step.tensor_lists import (
    MAX_DIMS,
    as_list,
    shaped,
    walkable,
    written,
    written_residuals,
)
from .groups.options import LR_RULES, AdamWOptions, MuonOptions, is_zero
from .groups.parameters import local
from .plan import AdamWWork
from .state.slots import RESIDUAL, Rounding, rounding_of


def momentum(
    grads: Sequence[Tensor],  # pieces, any shape of B_i * m * n elements
    buffers: Sequence[Tensor],  # the same pieces of momentum_buffer, advanced in place
    matrix: tuple[int, int],  # (m, n)
    *,
    mu: float,
    nesterov: bool,
    form: str,
    whole: bool = False,  # every piece is known to be one matrix (m, n)
) -> Tensor:
    """Advance the buffers and return the directions (sum of B_i, m, n), float32 or float64.

    The result is new memory: neither a gradient nor a buffer is ever handed to the iteration. Every
    direction is written to its place in it.
    """
    count = len(grads)
    if not whole:
        count = sum(grad.numel() for grad in grads) // (matrix[0] * matrix[1])
    batch = torch.empty(
        (count, *matrix),
        dtype=torch.promote_types(buffers[0].dtype, torch.float32),
        device=buffers[0].device,
    )
    used, read = buffers, grads
    if not whole:
        shapes = walkable(grads)
        used, read = shaped(buffers, shapes), shaped(grads, shapes)
    momentum_kernel(read, used, batch, mu=mu, nesterov=nesterov, form=form)
    written(buffers, used)
    return batch


@dataclass(frozen=True, eq=False)
class Rate:
    """The rate of a shape, lr factor, and its decay, (lr, or lr factor if shaped) weight_decay."""

    lr: float | Tensor
    factor: float
    weight_decay: float | Tensor
    shaped_decay: bool
    decay: float | Tensor | None = None  # in place of the last two, where they cannot express it


def rate_of(options: MuonOptions, rows: int, columns: int, device: torch.device) -> Rate:
    """The rate and the decay of a (rows, columns) matrix on a device.

    match_rms_adamw: lr 0.2 sqrt(max(rows, columns)), so that the update's root mean square is
    0.2 lr as AdamW's typically is (arXiv 2502.16982). original: lr sqrt(max(1, rows / columns)), of
    Keller Jordan's Muon. spectral: lr sqrt(rows / columns) (arXiv 2310.17813). none: lr. A callable
    gets (lr, rows, columns) and returns the rate; lr may be a Tensor, which it must not read.

    Raises:
        TypeError: a callable returned neither a number nor a Tensor.
        ValueError: it returned a number that is NaN, infinite or below 0, or a Tensor that is not
            one floating-point number on the device or the CPU. A Tensor's value is not read.
    """
    if options.transposed:  # (in, out)
        rows, columns = columns, rows
    rule, lr, weight_decay = options.adjust_lr_fn, options.lr, options.weight_decay
    if not callable(rule):
        return Rate(lr, factor_of(rule, rows, columns), weight_decay, options.shaped_decay)
    rate = rule(lr, rows, columns)
    if isinstance(rate, Tensor):
        fits = rate.device.type == "cpu" or rate.device == device
        if rate.numel() != 1 or not rate.is_floating_point() or not fits:
            raise ValueError(
                f"adjust_lr_fn must return one floating-point number on {device} or the CPU, got "
                f"{rate.dtype} of shape {tuple(rate.shape)} on {rate.device}"
            )
        rate = rate.detach().reshape(())
        if options.shaped_decay or is_zero(weight_decay):
            return Rate(rate, 1.0, weight_decay, shaped_decay=True)
        return Rate(rate, 1.0, 0.0, shaped_decay=False, decay=lr * weight_decay)
    if not isinstance(rate, Real):
        raise TypeError(f"adjust_lr_fn returned {rate!r}, not a number or a Tensor")
    if not 0 <= rate < math.inf:
        raise ValueError(
            f"adjust_lr_fn returned {rate!r} for a {rows} x {columns} matrix; a rate must be "
            "finite and at least 0"
        )
    if options.shaped_decay:
        return Rate(1.0, float(rate), weight_decay, shaped_decay=True)
    return Rate(1.0, float(rate), lr * weight_decay, shaped_decay=False)


def factor_of(rule: str, rows: int, columns: int) -> float:
    """By what the shape changes the learning rate under a rule with a name."""
    if rule == "none":
        return 1.0
    if rule == "match_rms_adamw":
        return 0.2 * math.sqrt(max(rows, columns))
    if rule == "original":
        return math.sqrt(max(1.0, rows / columns))
    if rule == "spectral":
        return math.sqrt(rows / columns)
    raise ValueError(f"adjust_lr_fn must be one of {', '.join(LR_RULES)}, got {rule!r}")


def update(
    params: Sequence[Tensor],  # pieces of B_i * m * n elements, written in place
    orthogonal: Tensor,  # (sum of B_i, m, n)
    second_moments: Sequence[Tensor] | None,  # (B_i, m, 1) or (B_i, 1, n), advanced in place
    rate: Rate,
    options: MuonOptions,
    rounding: Rounding,
    *,
    whole: bool = False,  # every piece is known to be one matrix (m, n), its moments without B_i
) -> None:
    """p <- p - decay p - rate u for every piece, with one rounding each."""
    matrix = orthogonal.shape[-2:]
    residuals = rounding.residuals  # of the pieces, advanced in place
    kept = residuals
    used = params
    if not whole:
        shapes = walkable(params)
        if second_moments is not None:
            shapes = [(param.numel() // matrix.numel(), *matrix) for param in params]
        used = shaped(params, shapes)
        if residuals is not None:
            kept = shaped(residuals, shapes)
    moments = second_moments, options.beta2
    apply_at_rate(
        used, orthogonal.contiguous(), rate, options.cautious, kept, rounding.noise, *moments
    )
    written(params, used)
    written_residuals(residuals, kept)


def apply_at_rate(
    params: Sequence[Tensor],
    updates: Sequence[Tensor] | Tensor,
    rate: Rate,
    cautious: bool,
    residuals: Sequence[Tensor | None] | None,
    noise: StochasticRounding | None = None,
    second_moments: Sequence[Tensor] | None = None,
    beta2: float | None = None,
) -> None:
    """`apply_update`, or its portable path for a rate that no factor and decay express."""
    if rate.decay is None:
        apply_update(
            params,
            updates,
            lr=rate.lr,
            factors=[rate.factor] * len(params),
            weight_decay=rate.weight_decay,
            shaped_decay=rate.shaped_decay,
            cautious=cautious,
            second_moments=second_moments,
            beta2=beta2,
            residuals=residuals,
            rounding=noise,
        )
        return
    say_once(
        "the update runs its portable path, which is slow: adjust_lr_fn returns a Tensor and the "
        "decay goes by the lr before it; the kernel takes the rules with names, functions that "
        "return numbers, and shaped_decay=True"
    )
    updates = as_list("updates", updates, params)
    if second_moments is not None:
        assert beta2 is not None
        pairs = zip(updates, second_moments, strict=True)
        evened = [torch.empty_like(u, dtype=m.dtype) for u, m in pairs]
        updates = even_out(evened, updates, second_moments, beta2)
    for k, (param, part) in enumerate(zip(params, updates, strict=True)):
        apply_one(k, param, part, rate.lr, rate.decay, cautious, residuals, noise)


def even_out(
    out: Sequence[Tensor],
    updates: Sequence[Tensor] | Tensor,
    second_moments: Sequence[Tensor],
    beta2: float,
) -> Sequence[Tensor]:
    """Write to `out` the updates with rows or columns evened out, as `apply_update` makes them.

    That is 0 - (-1) u' of the one op that advances second moments, so that a matrix has the same
    bits wherever its update is applied.
    """
    torch._foreach_zero_(list(out))
    apply_update(
        out,
        updates,
        lr=1.0,
        factors=[-1.0] * len(out),
        weight_decay=0.0,
        second_moments=second_moments,
        beta2=beta2,
    )
    return out


def adamw(
    work: AdamWWork,
    state: Mapping[Tensor, Mapping[str, Tensor]],
    numbers: Mapping[Tensor, int],
    options: AdamWOptions,
) -> None:
    """One step for any number of tensors of any shapes; gradients are only read.

    One call per device; float64, for which there is no kernel, has one of its own. Work that is
    uniform is one call as it stands. `numbers`: of the parameters in the optimizer.
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
    """The same for tensors of one device, all or none float64, whose state is given with them."""
    _step(params, grads, states, options, Rounding())


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
        shapes = walkable(lists["param"])
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
    written_residuals(residuals, kept)
