"""What "correct" means for the elementwise parts of a step, one plain function per part.

Every function works on any device. Arithmetic runs in float64 for float64 tensors and in float32
for everything else, and a tensor of lower precision is rounded exactly once, when it is written
back. Every product and every sum is rounded on its own, so that the compiled kernels can give the
same bits. Nothing here waits for the device: scalars are Python numbers or 0-D tensors and stay so.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from . import rounding


def average(old: Tensor, given: Tensor, beta: float | Tensor) -> Tensor:
    """beta old + (1 - beta) given, a step of a moving average, as torch.lerp forms it.

    The change is added to the end that weighs more: from the other one a small value would be lost,
    old + (given - old) is 0 for old = 4 and given = 1e-10. Exactly `given` for beta = 0.
    """
    change, weight = given - old, 1 - beta
    if not isinstance(beta, Tensor):
        return old + change * weight if weight < 0.5 else given - change * beta
    return torch.where(weight < 0.5, old + change * weight, given - change * beta)


def momentum(
    grad: Tensor, buffer: Tensor, mu: float, *, nesterov: bool = True, ema: bool = False
) -> Tensor:
    """Advance `buffer` in place by one gradient and return the direction to orthogonalize.

    Heavy ball (`ema=False`): buf <- mu buf + g, direction g + mu buf with Nesterov, else buf.
    Moving average (`ema=True`): buf <- mu buf + (1 - mu) g, direction mu buf + (1 - mu) g with
    Nesterov, else buf.
    The second is (1 - mu) times the first at every step, and orthogonalization removes the factor.
    `grad` is only read; the direction is a new tensor that shares no memory with `buffer`.
    """
    dtype = torch.promote_types(buffer.dtype, torch.float32)
    grad, old = grad.to(dtype), buffer.to(dtype)
    new = average(old, grad, mu) if ema else old * mu + grad
    buffer.copy_(new)
    if not nesterov:
        return new
    return average(new, grad, mu) if ema else grad + new * mu


# A row's norm counts as at least this part of its matrix's root mean square row norm.
SMALLEST_ROW = 1e-6


def scale_rows(x: Tensor, factors: Tensor, *, to_norm_one: bool = False) -> None:
    """Multiply every matrix of x (..., m, n) by its factor (...,) in place (Muon+), or its rows.

    With `to_norm_one` every row gets the norm 1, multiplied by no more than the factor of its
    matrix (MuonEq). A matrix whose rows differ in size is better conditioned then. MuonEq scales
    rows to their root mean square, |x|_F / sqrt(m), instead of to 1; what lies between the two is
    a factor of a whole matrix, by whose norm the iteration divides.

    With the factor for the norm sqrt(m) / SMALLEST_ROW rows that cancelled to rounding noise do not
    grow to the size of the others. This bound goes with the matrix, so that whatever the matrix has
    been multiplied by, as for a float16 message, changes no result. nanochat's optimizer (92d63d4)
    bounds factors by 1e6 itself: it leaves gradients below that unequilibrated.

    Source: arXiv 2603.28254 (MuonEq).
    """
    factors = factors[..., None]
    if to_norm_one:
        inverse = 1 / torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
        factors = torch.where(inverse <= factors, inverse, factors)  # a factor of NaN stays
    x.mul_(factors.to(torch.promote_types(x.dtype, torch.float32))[..., None])


def matrix_factors(x: Tensor, norm: float) -> Tensor:
    """What gives every matrix of x (..., m, n) a Frobenius norm: (...,), float64.

    With sqrt(min(m, n)) that of a semi-orthogonal matrix (Muon+), whatever the singular values that
    an iteration has not brought to 1 yet. It is finite, so that zeros stay zeros; NaN for a matrix
    with an inf or NaN, all of which becomes NaN.

    Source: arXiv 2602.21545 (Muon+).
    """
    rows = torch.linalg.vector_norm(x, dim=-1, dtype=torch.float64)
    norms = torch.linalg.vector_norm(rows, dim=-1)
    largest = torch.finfo(torch.promote_types(x.dtype, torch.float32)).max
    return torch.where(norms.isfinite(), (norm / norms).clamp_max(largest), torch.nan)


def variance_reduction(update: Tensor, second_moment: Tensor, beta2: float) -> Tensor:
    """Equalize the rows (or columns) of each matrix and keep its Frobenius norm (NorMuon).

    Args:
        update: (..., m, n), orthogonalized directions.
        second_moment: (..., m, 1) or (..., 1, n), float32 or float64; the moving average of the
            mean square of each row or column. Advanced in place.
        beta2: decay of that average.

    Returns:
        update * s * |update| / |update * s| with s = 1 / sqrt(second_moment).

    Source: arXiv 2510.05491, with the norm kept as in nanochat's optimizer.
    """
    reduced = -1 if second_moment.shape[-1] == 1 else -2
    size = update.shape[reduced]
    update = update.to(second_moment.dtype)
    mean = update.square().mean(reduced, keepdim=True)
    second_moment.copy_(average(second_moment, mean, beta2))
    scale = second_moment.clamp_min(1e-10).rsqrt()
    norm = (mean * size).sum((-2, -1), keepdim=True).sqrt()
    scaled = (mean * size * scale.square()).sum((-2, -1), keepdim=True).sqrt()
    return update * (scale * (norm / scaled.clamp_min(1e-10)))


def apply_update(
    param: Tensor,
    update: Tensor,
    *,
    lr: float | Tensor,
    decay: float | Tensor,
    cautious: bool = False,
    residual: Tensor | None = None,
    random: Tensor | None = None,
) -> None:
    """p <- p - decay p - lr u in place, in one pass with one rounding.

    With `cautious` only those weights decay for which u p >= 0, that is, whose update does not
    already push them away from zero. `decay` is the product of a learning rate and weight_decay.
    `residual` (int16) keeps what the rounding of a 16-bit parameter drops; `random` (int64 in
    [0, 2^16)) makes that rounding stochastic. Both: `reference.rounding`.
    """
    old = rounding.load(param, residual)
    update = update.to(old.dtype)
    shrunk = old * (update * old >= 0) if cautious else old
    rounding.store(param, old - shrunk * decay - update * lr, residual, random)


def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    lr: float | Tensor,
    betas: tuple[float | Tensor, float | Tensor],
    eps: float | Tensor,
    weight_decay: float | Tensor,
    residual: Tensor | None = None,
    random: Tensor | None = None,
) -> None:
    """One step of AdamW in place (arXiv 1711.05101), with one rounding of the parameter.

    `step` is a 0-D tensor that counts the steps before this one and is advanced here. The bias
    corrections 1 - beta^t are taken as -expm1(t log beta) in float64 and rounded once: their digits
    at small t stay, of which 1 - 0.999 in float32 would keep few. `residual` and `random` are those
    of `apply_update`.
    """
    beta1, beta2 = betas
    old = rounding.load(param, residual)
    grad = grad.to(old.dtype)
    step.add_(1)
    exp_avg.copy_(average(exp_avg, grad, beta1))
    exp_avg_sq.copy_(average(exp_avg_sq, grad * grad, beta2))
    correction1, correction2 = (_bias_correction(beta, step).to(old.dtype) for beta in betas)
    # torch's float32 sqrt on the CPU is not always the nearest number; float64, rounded once, is.
    denominator = (exp_avg_sq / correction2).double().sqrt().to(old.dtype) + eps
    new = old - old * (lr * weight_decay) - exp_avg / denominator * (lr / correction1)
    rounding.store(param, new, residual, random)


def _bias_correction(beta: float | Tensor, step: Tensor) -> Tensor:
    step = step.double()
    if isinstance(beta, Tensor):
        return -torch.expm1(step * torch.log1p(beta.double() - 1))
    return -torch.expm1(step * math.log1p(beta - 1)) if beta > 0 else torch.ones_like(step)
