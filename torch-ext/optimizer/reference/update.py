"""What "correct" means for the elementwise parts of a step, one plain function per part.

Every function works on any device. Arithmetic runs in float64 for float64 tensors and in float32
for everything else, and a tensor of lower precision is rounded exactly once, when it is written
back. Nothing here waits for the device: scalars are Python numbers or 0-D tensors and stay so.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def momentum(
    grad: Tensor, buffer: Tensor, mu: float, *, nesterov: bool = True, ema: bool = False
) -> Tensor:
    """Advance `buffer` in place by one gradient and return the direction to orthogonalize.

    Heavy ball (`ema=False`): buf <- mu buf + g, direction g + mu buf with Nesterov, else buf.
    Moving average (`ema=True`): buf <- lerp(buf, g, 1 - mu), direction lerp(g, buf, mu), else buf.
    The second is (1 - mu) times the first at every step, and orthogonalization removes the factor.
    `grad` is only read; the direction is a new tensor that shares no memory with `buffer`.
    """
    dtype = torch.promote_types(buffer.dtype, torch.float32)
    grad, old = grad.to(dtype), buffer.to(dtype)
    new = old.lerp(grad, 1 - mu) if ema else old * mu + grad
    buffer.copy_(new)
    if not nesterov:
        return new
    return grad.lerp(new, mu) if ema else grad + new * mu


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
    second_moment.lerp_(mean, 1 - beta2)
    scale = second_moment.clamp_min(1e-10).rsqrt()
    norm = (mean * size).sum((-2, -1), keepdim=True).sqrt()
    scaled = (mean * size * scale.square()).sum((-2, -1), keepdim=True).sqrt()
    return update * (scale * (norm / scaled.clamp_min(1e-10)))


def muon_update(
    param: Tensor,
    update: Tensor,
    *,
    lr: float | Tensor,
    decay: float | Tensor,
    cautious: bool = False,
) -> None:
    """p <- p - decay p - lr u in place, in one pass with one rounding.

    With `cautious` only those weights decay for which u p >= 0, that is, whose update does not
    already push them away from zero. `decay` is the product of a learning rate and weight_decay.
    """
    dtype = torch.promote_types(param.dtype, torch.float32)
    old, update = param.to(dtype), update.to(dtype)
    shrunk = old * (update * old >= 0) if cautious else old
    param.copy_(old - shrunk * decay - update * lr)


def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    *,
    lr: float | Tensor,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """One step of AdamW in place (arXiv 1711.05101), with one rounding of the parameter.

    `step` is a 0-D tensor that counts the steps before this one and is advanced here. The bias
    corrections 1 - beta^t are taken as -expm1(t log beta): float32 keeps their digits at small t,
    where 1 - 0.999 would keep only two in the last place.
    """
    beta1, beta2 = betas
    dtype = torch.promote_types(param.dtype, torch.float32)
    grad, old = grad.to(dtype), param.to(dtype)
    step.add_(1)
    exp_avg.lerp_(grad, 1 - beta1)
    exp_avg_sq.lerp_(grad.square(), 1 - beta2)
    correction1, correction2 = (_bias_correction(beta, step.to(dtype)) for beta in betas)
    denominator = (exp_avg_sq / correction2).sqrt() + eps
    param.copy_(old - old * (lr * weight_decay) - exp_avg / denominator * (lr / correction1))


def _bias_correction(beta: float, step: Tensor) -> Tensor | float:
    return -torch.expm1(step * math.log(beta)) if beta > 0 else 1.0
