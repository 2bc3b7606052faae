"""Which method, in which dtype, with which restarts, for one matrix shape on one device, and why.

The answer depends on (m, n, dtype, device), the step count and the method asked for, never on the
batch: the same matrix gets the same treatment in any batch and on any owner.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .coefficients import checked_steps, polar_express_coefficients
from .products import gram_runs_symmetric, runs_symmetric
from .restarts import restart_positions

METHODS = ("auto", "polar_express", "gram_newton_schulz", "newton_schulz")

# With dense products Gram with one restart costs 8 m^2 n + 28 m^3 FLOP against 20 m^2 n + 10 m^3
# for five steps: equal at n = 1.5 m.
GRAM_ASPECT = 1.5
# The restart criterion leaves nothing to save in bfloat16; float64 is asked for its last digits.
GRAM_DTYPES = (torch.float16, torch.float32)

# Dense half-precision FLOP/s of an H200 on random data; `explain` states floors with it.
H200_RATE = 790e12


@dataclass(frozen=True)
class Choice:
    """What `orthogonalize` runs for a shape.

    Attributes:
        method: "polar_express", "gram_newton_schulz" or "newton_schulz".
        dtype: Dtype of the iterates.
        restarts: Steps at which Gram-Newton-Schulz rebuilds its Gram matrix; empty otherwise.
        reason: Why, in a sentence.
    """

    method: str
    dtype: torch.dtype
    restarts: tuple[int, ...]
    reason: str


def choose(
    m: int,
    n: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    steps: int = 5,
    method: str = "auto",
    iterate_dtype: torch.dtype | None = None,
) -> Choice:
    """The method, iterate dtype and restarts for m x n matrices.

    Args:
        m: Rows.
        n: Columns; tall and wide are treated alike.
        dtype: Dtype of the input.
        device: Where it lives.
        steps: Number of iterations.
        method: "auto", or the method to use whatever the shape.
        iterate_dtype: Dtype of the iterates; None picks by device and input.

    Returns:
        A `Choice`.

    Raises:
        TypeError: steps is not an int.
        ValueError: Unknown method or steps < 1.
    """
    device = torch.device(device)
    picked_dtype = iterate_dtype or default_dtype(dtype, device)
    picked = chosen_method(m, n, picked_dtype, method)
    restarts: tuple[int, ...] = ()
    if picked == "gram_newton_schulz":
        restarts = restart_positions(polar_express_coefficients(steps), picked_dtype)
    checked_steps(steps)
    reason = (
        f"{_why_method(m, n, picked_dtype, method)}; "
        f"{'the dtype was asked for' if iterate_dtype else _why_dtype(dtype, device)}"
    )
    return Choice(picked, picked_dtype, restarts, reason)


def chosen_method(m: int, n: int, iterate_dtype: torch.dtype, method: str) -> str:
    """`method` itself, or what "auto" means for m x n matrices iterated in this dtype."""
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; use one of {', '.join(METHODS)}")
    if method != "auto":
        return method
    if iterate_dtype in GRAM_DTYPES and max(m, n) >= GRAM_ASPECT * min(m, n):
        return "gram_newton_schulz"
    return "polar_express"


def default_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Iterate dtype for an input dtype on a device.

    float64 input keeps float64. On CUDA from compute capability 8.0 (Ampere) float16: as fast as
    bfloat16 with eight times its precision. Elsewhere float32.
    """
    if dtype == torch.float64:
        return torch.float64
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0):
        return torch.float16
    return torch.float32


def flop(
    method: str, m: int, n: int, *, steps: int, restarts: tuple[int, ...] = (), symmetric: bool
) -> int:
    """Floating-point operations for one m x n matrix, a multiply-add counting 2.

    Args:
        method: As `Choice.method`.
        m: Rows.
        n: Columns; tall and wide cost the same.
        steps: Number of iterations.
        restarts: Restart positions of the Gram form.
        symmetric: Count half of every product whose result is symmetric (the ideal of a kernel
            that skips mirrored tiles) instead of dense products.
    """
    m, n = min(m, n), max(m, n)
    half = 1 if symmetric else 2
    if method != "gram_newton_schulz":
        return steps * ((half + 2) * m * m * n + half * m**3)
    runs = len(restarts) + 1
    small_products = steps + 3 * (steps - runs)  # Z; and Q Z, R Z, Z R Z within a run
    return runs * (half + 2) * m * m * n + small_products * half * m**3


def explain(
    m: int,
    n: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    steps: int = 5,
    method: str = "auto",
    iterate_dtype: torch.dtype | None = None,
) -> str:
    """What `orthogonalize` runs for m x n matrices, why, and what it costs, in a paragraph.

    Args and Raises are those of `choose`.
    """
    device = torch.device(device)
    choice = choose(
        m, n, dtype=dtype, device=device, steps=steps, method=method, iterate_dtype=iterate_dtype
    )
    cost = {"steps": steps, "restarts": choice.restarts}
    dense = flop(choice.method, m, n, **cost, symmetric=False)
    direct = flop("polar_express", m, n, steps=steps, symmetric=False)
    ideal = flop(choice.method, m, n, **cost, symmetric=True)
    text = f"{m} x {n} {_name(dtype)} matrices on {device}: {choice.method}, {steps} steps, "
    text += f"{_name(choice.dtype)} iterates"
    if choice.restarts:
        text += (
            f", Gram matrix rebuilt before step {' and '.join(str(r + 1) for r in choice.restarts)}"
        )
    text += f". Reason: {choice.reason}. Dense products: {dense:.3g} FLOP per matrix"
    if choice.method == "gram_newton_schulz":
        text += f", {direct:.3g} for polar_express"
    text += f"; with half of every symmetric product skipped at least {ideal:.3g}"
    if device.type == "cuda" and choice.dtype in (torch.float16, torch.bfloat16):
        text += f", {1e3 * ideal / H200_RATE:.3g} ms at the 790 TFLOP/s of an H200"
    return f"{text}. {_why_products(m, n, choice, device)}"


def _why_products(m: int, n: int, choice: Choice, device: torch.device) -> str:
    """Which of the method's products are computed by halves."""
    by_halves = []
    if gram_runs_symmetric(m, n, choice.dtype, device):
        by_halves.append("X X^T" if m <= n else "X^T X")
    if runs_symmetric(min(m, n), choice.dtype, device):
        gram_form = choice.method == "gram_newton_schulz"
        by_halves += ["R^2", "R Z", "Z R Z"] if gram_form else ["A^2"]
    if not by_halves:
        return "Products: torch's dense ones."
    return f"Products: {', '.join(by_halves)} by symmetric_matmul, the others torch's dense ones."


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _why_method(m: int, n: int, iterate_dtype: torch.dtype, method: str) -> str:
    if method != "auto":
        return "the method was asked for"
    aspect = f"aspect ratio {max(m, n)}:{min(m, n)}"
    if iterate_dtype not in GRAM_DTYPES:
        return f"the Gram form is not picked in {_name(iterate_dtype)}"
    if max(m, n) < GRAM_ASPECT * min(m, n):
        return f"{aspect} is below {GRAM_ASPECT}, where the Gram form costs more"
    return f"{aspect} is at least {GRAM_ASPECT}, where the Gram form costs less"


def _why_dtype(dtype: torch.dtype, device: torch.device) -> str:
    picked = default_dtype(dtype, device)
    if picked == torch.float64:
        return "float64 input keeps float64 iterates"
    if picked == torch.float16:
        return "float16 iterates are as fast as bfloat16 and eight times as accurate"
    if device.type == "cuda":
        return "float32 iterates, because half-precision tensor cores start at capability 8.0"
    return f"float32 iterates, because half-precision products are not faster on {device.type}"
