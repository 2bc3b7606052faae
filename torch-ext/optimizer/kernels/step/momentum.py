"""momentum: buffers, directions and their size, in one pass over a list of tensors.

buffer <- mu buffer + g (heavy ball) or its moving average; out <- direction * scale, rounded once.

path      | source                                   | taken
compiled  | kernels-src/{step,cpu}                   | CUDA >= 8.0, CPU (CPU variant)
reference | reference/update.py, plain torch         | everything else, float64
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import register_fake

from ..._ops import add_op_namespace_prefix
from ...reference import update as reference
from .tensor_lists import DTYPES, as_list, call, check_lists

FORMS = ("heavy_ball", "ema")


@register_fake(add_op_namespace_prefix("momentum"))
def _fake(grads, buffers, out, mu, nesterov, ema, scale=None, batch=None):
    return grads[0].new_empty((len(grads), 2), dtype=torch.float32)


def _check(
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    out: Sequence[Tensor],
    scale: Tensor | None,
) -> None:
    lists = {"grads": grads, "buffers": buffers, "out": out}
    dtypes = (*DTYPES, torch.float64)
    check_lists(lists, dict.fromkeys(lists, dtypes), written=("buffers", "out"))
    if scale is None:
        return
    if scale.dtype != torch.float32 or tuple(scale.shape) != (len(grads),):
        raise ValueError(
            f"scale must be ({len(grads)},) float32, got {tuple(scale.shape)} {scale.dtype}"
        )
    if scale.device != grads[0].device or not scale.is_contiguous():
        raise ValueError(
            f"scale must be contiguous on {grads[0].device}, got {scale.device} with stride "
            f"{scale.stride()}"
        )


def _reference(grads, buffers, out, mu, nesterov, ema, scale) -> Tensor:
    stats = []
    for k, (grad, buffer, target) in enumerate(zip(grads, buffers, out, strict=True)):
        direction = reference.momentum(grad, buffer, mu, nesterov=nesterov, ema=ema)
        target.copy_(direction if scale is None else direction * scale[k])
        largest = direction.abs().amax() if direction.numel() else direction.new_zeros(())
        stats.append(torch.stack((largest, direction.square().sum())).float())
    return torch.stack(stats)


def momentum(
    grads: Sequence[Tensor],
    buffers: Sequence[Tensor],
    out: Sequence[Tensor] | Tensor,
    *,
    mu: float,
    nesterov: bool,
    form: str,
    scale: Tensor | None = None,
) -> Tensor:
    """Advance every buffer by its gradient and write the directions to orthogonalize.

    heavy_ball: buf <- mu buf + g, direction g + mu buf with Nesterov, else buf. ema: buf <- mu buf
    + (1 - mu) g, direction mu buf + (1 - mu) g with Nesterov, else buf; an average is formed as
    torch.lerp does. float32 maths (float64 for float64), every operation rounded on its own: the
    same bits on every device and path. A constant number of launches for hundreds of tensors, no
    synchronisation, no copies: the call can be captured in a CUDA graph.

    Args:
        grads: K tensors, only read; float32, bfloat16 or float16, any strides, dtypes may differ.
        buffers: K tensors of the same shapes, advanced in place.
        out: K tensors of the same shapes, written: direction * scale, rounded once. Or a contiguous
            one with room for all of them, row-major and one after another, which spares the host
            the making of K views.
        mu: decay of the buffer, a number.
        nesterov: look one step ahead.
        form: "heavy_ball" or "ema".
        scale: (K,) float32 on the device; None means 1.

    Returns:
        (K, 2) float32: the largest magnitude and the sum of squares of each unscaled direction,
        NaN if it holds one, 0 if it is empty. The sums are added in an order that depends on the
        tensor's size and layout alone.

    Raises:
        TypeError: an entry is no tensor or has an unsupported dtype.
        ValueError: unknown form, or lists, shapes, devices or layouts that do not fit together;
            nothing has been written then.
    """
    if form not in FORMS:
        raise ValueError(f"form must be one of {FORMS}, got {form!r}")
    if len(grads) == 0:
        if len(buffers) or len(out):
            raise ValueError(
                f"grads is empty, but buffers has {len(buffers)} and out {len(out)} entries"
            )
        return torch.empty(0, 2)

    places, batch = ([], out) if isinstance(out, Tensor) else (out, None)
    options = (mu, nesterov, form == "ema", scale)
    return call(
        "momentum",
        (grads, buffers),
        lambda: (grads, buffers, places, *options, batch),
        lambda: _check(grads, buffers, as_list("out", out, grads), scale),
        lambda: _reference(grads, buffers, as_list("out", out, grads), *options),
    )
