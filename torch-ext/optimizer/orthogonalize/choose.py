"""Which method, in which dtype, with which restarts, for one matrix shape on one device, and why.

The answer depends on (m, n, dtype, device), the step count and the method asked for, never on the
batch: the same matrix gets the same treatment in any batch and on any owner. The batch decides how
many matrices are iterated at a time and, inside `symmetric_matmul`, which tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .batch import slice_for
from .coefficients import checked_steps, polar_express_coefficients
from .cost import floor_ms, flop, method_ms
from .products import batch_is_free, chain_serves, gram_runs_symmetric, runs_symmetric
from .restarts import restart_positions

METHODS = ("auto", "polar_express", "gram_newton_schulz", "gram_polynomial", "newton_schulz")

# Its two polynomials stand for this many steps of Polar Express, which they beat everywhere.
GRAM_POLYNOMIAL_STEPS = 5
# Kind of device -> iterate dtypes in which "auto" takes gram_polynomial: where it has been run and
# timed against the other methods (docs/dev/decisions/2026-11-22-gram-polynomial.md).
GRAM_POLYNOMIAL_DTYPES = {"cpu": (torch.float16, torch.float32), "cuda": (torch.float16,)}
# Smaller matrices are bound by the number of operations, of which it has half as many again.
GRAM_POLYNOMIAL_SIDE = 128

# With dense products Gram with one restart costs 8 m^2 n + 28 m^3 FLOP against 20 m^2 n + 10 m^3
# for five steps: equal at n = 1.5 m.
GRAM_ASPECT = 1.5
# The restart criterion leaves nothing to save in bfloat16; float64 is asked for its last digits.
GRAM_DTYPES = (torch.float16, torch.float32)


@dataclass(frozen=True)
class Choice:
    """What `orthogonalize` runs for a shape.

    Attributes:
        method: "polar_express", "gram_newton_schulz", "gram_polynomial" or "newton_schulz".
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
        ValueError: Unknown method, steps < 1, or a method that cannot serve the steps.
    """
    device = torch.device(device)
    checked_steps(steps)
    picked_dtype = iterate_dtype or default_dtype(dtype, device)
    picked = chosen_method(m, n, picked_dtype, device, steps, method)
    restarts: tuple[int, ...] = ()
    if picked == "gram_newton_schulz":
        restarts = restart_positions(polar_express_coefficients(steps), picked_dtype)
    reason = (
        f"{_why_method(m, n, picked_dtype, device, steps, method)}; "
        f"{'the dtype was asked for' if iterate_dtype else _why_dtype(dtype, device)}"
    )
    return Choice(picked, picked_dtype, restarts, reason)


def chosen_method(
    m: int, n: int, iterate_dtype: torch.dtype, device: torch.device, steps: int, method: str
) -> str:
    """`method` itself, or what "auto" means for m x n matrices iterated in this dtype."""
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; use one of {', '.join(METHODS)}")
    if method == "gram_polynomial" and steps != GRAM_POLYNOMIAL_STEPS:
        raise ValueError(
            f"steps={steps}: gram_polynomial is made for {GRAM_POLYNOMIAL_STEPS}; pass that, or "
            f"use polar_express, which derives a schedule for any number of steps"
        )
    if method != "auto":
        return method
    serves = steps == GRAM_POLYNOMIAL_STEPS and _polynomial_is_measured(iterate_dtype, device)
    if serves and min(m, n) >= GRAM_POLYNOMIAL_SIDE:
        return "gram_polynomial"
    if iterate_dtype in GRAM_DTYPES and max(m, n) >= GRAM_ASPECT * min(m, n):
        return "gram_newton_schulz"
    return "polar_express"


def _polynomial_is_measured(iterate_dtype: torch.dtype, device: torch.device) -> bool:
    return iterate_dtype in GRAM_POLYNOMIAL_DTYPES.get(device.type, ())


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


def predicted_ms(
    m: int,
    n: int,
    batch: int,
    dtype: torch.dtype,
    device: torch.device | str,
    *,
    steps: int = 5,
    method: str = "auto",
    iterate_dtype: torch.dtype | None = None,
) -> float:
    """Predicted milliseconds of `orthogonalize` on a batch of m x n matrices.

    The same number on every rank and in every run, whatever the machine is doing: a model of an
    H200 for CUDA (see `cost.method_ms`), nominal rates elsewhere. Made for sharing out work.

    Args and Raises are those of `choose`; batch is the number of matrices.
    """
    device = torch.device(device)
    choice = choose(
        m, n, dtype=dtype, device=device, steps=steps, method=method, iterate_dtype=iterate_dtype
    )
    return method_ms(
        choice.method,
        m,
        n,
        batch,
        dtype=choice.dtype,
        device=device,
        steps=steps,
        restarts=choice.restarts,
    )


def explain(
    m: int,
    n: int,
    *,
    dtype: torch.dtype,
    device: torch.device | str,
    steps: int = 5,
    method: str = "auto",
    iterate_dtype: torch.dtype | None = None,
    batch: int = 1,
) -> str:
    """What `orthogonalize` runs for m x n matrices, why, and what it costs, in a paragraph.

    Args and Raises are those of `choose`; batch is the number of matrices that times are for.
    """
    device = torch.device(device)
    options = {"steps": steps, "method": method, "iterate_dtype": iterate_dtype}
    choice = choose(m, n, dtype=dtype, device=device, **options)
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
    if choice.method.startswith("gram"):
        text += f", {direct:.3g} for polar_express"
    text += f"; with half of every symmetric product skipped at least {ideal:.3g}"
    if device.type == "cuda":
        at_once = slice_for(m, n, choice.dtype, device).at_once(batch)
        text += f". Predicted for a batch of {batch}, {at_once} at a time: "
        text += f"{predicted_ms(m, n, batch, dtype, device, **options):.3g} ms on an H200, whose "
        text += f"floor (790 TFLOP/s, 4.3 TB/s) for five steps is {floor_ms(m, n, batch):.3g} ms"
    return f"{text}. {_why_products(m, n, batch, choice, device)}"


def _why_products(m: int, n: int, batch: int, choice: Choice, device: torch.device) -> str:
    """Which of the method's products are computed by halves, in which kernel, and which not at all.

    The kernel may depend on the batch, whose bits do not.
    """
    by_halves, chained = [], ""
    if gram_runs_symmetric(m, n, choice.dtype, device):
        by_halves.append("X X^T" if m <= n else "X^T X")
    if choice.method == "gram_polynomial" and _runs_chain(m, n, batch, choice.dtype, device):
        chained = "the squares of a polynomial in one launch by square_chain, "
    elif runs_symmetric(min(m, n), choice.dtype, device):
        by_halves += {
            "gram_newton_schulz": ["R^2", "R Z", "Z R Z"],
            "gram_polynomial": ["M^2"],
        }.get(choice.method, ["A^2"])
    if not by_halves:
        return "Products: torch's dense ones."
    others = "matmul_add" if batch_is_free(choice.dtype, device) else "torch's dense ones"
    return f"Products: {', '.join(by_halves)} by symmetric_matmul, {chained}the others {others}."


def _runs_chain(m: int, n: int, batch: int, dtype: torch.dtype, device: torch.device) -> bool:
    if device.type != "cuda":
        return False
    shape = slice_for(m, n, dtype, device)
    count = batch if shape.full else min(batch, shape.at_once(batch))
    return chain_serves(count, min(shape.sides), dtype, device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _why_method(
    m: int, n: int, iterate_dtype: torch.dtype, device: torch.device, steps: int, method: str
) -> str:
    if method != "auto":
        return "the method was asked for"
    if chosen_method(m, n, iterate_dtype, device, steps, method) == "gram_polynomial":
        return "two polynomials of high degree cost less than five steps and come closer"
    aspect = f"aspect ratio {max(m, n)}:{min(m, n)}"
    if iterate_dtype not in GRAM_DTYPES:
        return f"the Gram forms are not picked in {_name(iterate_dtype)}"
    if max(m, n) < GRAM_ASPECT * min(m, n):
        why = f"{aspect} is below {GRAM_ASPECT}, where the Gram form costs more"
    else:
        why = f"{aspect} is at least {GRAM_ASPECT}, where the Gram form costs less"
    if steps == GRAM_POLYNOMIAL_STEPS and not _polynomial_is_measured(iterate_dtype, device):
        why += f"; gram_polynomial can be asked for, it is not measured yet on {device.type}"
    return why


def _why_dtype(dtype: torch.dtype, device: torch.device) -> str:
    picked = default_dtype(dtype, device)
    if picked == torch.float64:
        return "float64 input keeps float64 iterates"
    if picked == torch.float16:
        return "float16 iterates are as fast as bfloat16 and eight times as accurate"
    if device.type == "cuda":
        return "float32 iterates, because half-precision tensor cores start at capability 8.0"
    return f"float32 iterates, because half-precision products are not faster on {device.type}"
