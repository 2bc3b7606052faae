"""`orthogonalize`: runs the method that `choose` picks for the shape, dtype and device."""

from __future__ import annotations

import torch

from .arguments import check_dtype, check_input
from .choose import chosen_method
from .coefficients import checked_steps
from .constants import dtype_for
from .gram_newton_schulz import gram_newton_schulz
from .gram_polynomial import gram_polynomial
from .newton_schulz import newton_schulz
from .polar_express import polar_express


def orthogonalize(
    x: torch.Tensor,
    method: str = "auto",
    steps: int = 5,
    dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Approximate polar factor U V^T of every matrix U S V^T of x.

    An optimizer primitive: it builds no autograd graph. Zero matrices give zeros, empty tensors
    empty ones; NaN or inf makes its own matrix NaN and no other. Method, dtype and restarts depend
    only on (m, n, dtype, device), and a matrix gives the same bits in any batch.

    Args:
        x: (..., m, n), any strides; float16, bfloat16, float32 or float64. Flatten convolution
            filters to (out, in * h * w) first. Never modified.
        method: "auto", "polar_express", "gram_newton_schulz" (both with the Polar Express schedule
            for `steps`), "gram_polynomial" (as close as 5 steps or closer, and made for 5 alone),
            or "newton_schulz" (Keller Jordan's coefficients).
        steps: Number of iterations, 1 to 100.
        dtype: Dtype of the iterates and of the result. None: float64 for float64 input; otherwise
            float16 on CUDA from compute capability 8.0, else float32.
        out: Receives the result in its own floating dtype; must not overlap x.

    Returns:
        (..., m, n) in `dtype`, or `out`.

    Raises:
        TypeError: x, out or steps is of a wrong kind or dtype.
        ValueError: A wrong shape, device, dtype, method, number of steps, or overlap.
    """
    check_input(x)
    if dtype is None:
        dtype = dtype_for(x.dtype, x.device)
    check_dtype(dtype)
    checked_steps(steps)
    picked = chosen_method(x.shape[-2], x.shape[-1], dtype, x.device, steps, method)
    if picked == "gram_polynomial":
        return gram_polynomial(x, dtype=dtype, out=out)
    if picked == "gram_newton_schulz":
        return gram_newton_schulz(x, steps, dtype=dtype, out=out)
    if picked == "newton_schulz":
        return newton_schulz(x, steps, dtype=dtype, out=out)
    return polar_express(x, steps, dtype=dtype, out=out)
