"""Which method, in which dtype, with which restarts, for one matrix shape on one device, and why.

The answer depends on (m, n, dtype, device), the step count and the method asked for, never on the
batch: the same matrix gets the same treatment in any batch and on any owner. The batch decides how
many matrices are iterated at a time and, inside `symmetric_matmul`, which tiles.

What the methods cost is at the end: operations, the floor of an H200, and a predicted time. All of
it follows from the shape, the dtype and the kind of device, so that every rank of a job comes to
the same numbers and can share out work by them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .arguments import check_dtype, check_input, default_dtype, dtype_for
from .coefficients import checked_steps, polar_express_coefficients
from .gram_newton_schulz import gram_newton_schulz, restart_positions
from .gram_polynomial import gram_polynomial
from .newton_schulz import newton_schulz, polar_express
from .polynomials import POLYNOMIALS, SQUARES
from .products import batch_is_free, chain_serves, gram_runs_symmetric, runs_symmetric
from .slices import slice_for

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

# An H200 on random data: dense 16-bit FLOP/s, and bytes read plus bytes written per second.
H200_RATE = 790e12
H200_BANDWIDTH = 4.3e12

# FLOP/s that products reach, by kind of device and bytes of an element. On CUDA the 16-bit rate is
# the H200's, float32's what docs/dev/decisions/2026-11-21-symmetric-products-sm80.md lists; the
# rest are nominal and serve to compare shapes with each other.
RATES = {"cuda": {2: H200_RATE, 4: 60e12, 8: 50e12}, "cpu": {2: 20e9, 4: 100e9, 8: 50e9}}
MULTIPROCESSORS = 132
TILE = 128  # sides of the tiles that cuBLAS and symmetric_matmul cut large products into
# Share of the rate within full rounds of tiles: 16 products of the same table, 0.85 to 0.99.
EFFICIENCY = 0.92
# symmetric_matmul computes the tiles that it does not skip at half of cuBLAS's rate (mma.sync).
HALVES_EFFICIENCY = 0.5
# With Hopper's instructions a tile takes so many microseconds per 64 of k, and so many beside them:
# {by halves: ...}, 128 x 128 tiles and halves of 128 x 256 ones, which serve large products most
# often; kernels-src/products/tiles_sm90.h.
HOPPER_TILE = {True: (0.391, 2.27), False: (0.361, 0.851)}
LAUNCH_MS = 3e-3
CPU_LAUNCH_MS = 5e-3


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
    H200 for CUDA (see `method_ms`), nominal rates elsewhere. Made for sharing out work.

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


class Product(NamedTuple):
    """`count` products of rows x inner by inner x columns.

    `symmetric` in exact arithmetic; `mirrored` if one triangle may stand for both.
    """

    count: int
    rows: int
    inner: int
    columns: int
    symmetric: bool
    mirrored: bool


def products(
    method: str, m: int, n: int, *, steps: int, restarts: tuple[int, ...] = ()
) -> tuple[Product, ...]:
    """Every product of a method on one m x n matrix."""
    m, n = min(m, n), max(m, n)
    if method == "gram_polynomial":
        runs, squares, others = len(POLYNOMIALS), SQUARES, 0
    elif method == "gram_newton_schulz":
        # Z in each step; and Z Q, R Z, Z R Z within a run. Z Q must not be mirrored once rounded.
        runs = len(restarts) + 1
        squares, others = steps + 2 * (steps - runs), steps - runs
    else:
        runs, squares, others = steps, steps, 0
    return (
        Product(runs, m, n, m, True, True),
        Product(squares, m, m, m, True, True),
        Product(others, m, m, m, True, False),
        Product(runs, m, m, n, False, False),
    )


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
        symmetric: Count half of every product whose result is symmetric in exact arithmetic (the
            ideal of a kernel that skips mirrored tiles) instead of dense products.
    """
    total = 0
    for product in products(method, m, n, steps=steps, restarts=restarts):
        size = product.rows * product.inner * product.columns
        total += product.count * size * (1 if symmetric and product.symmetric else 2)
    return total


def floor_ms(m: int, n: int, batch: int = 1) -> float:
    """The least milliseconds of five steps on an H200, whoever computes them.

    The cheaper of the direct and the Gram form with every symmetric product by halves, at 790
    TFLOP/s; or a float32 matrix read and a 16-bit one written at 4.3 TB/s, if that takes longer.
    """
    operations = min(
        flop("polar_express", m, n, steps=5, symmetric=True),
        flop("gram_newton_schulz", m, n, steps=5, restarts=(2,), symmetric=True),
    )
    return 1e3 * batch * max(operations / H200_RATE, 6 * m * n / H200_BANDWIDTH)


def method_ms(
    method: str,
    m: int,
    n: int,
    batch: int,
    *,
    dtype: torch.dtype,
    device: torch.device,
    steps: int,
    restarts: tuple[int, ...] = (),
) -> float:
    """Predicted milliseconds of a method on a batch of m x n matrices iterated in `dtype`.

    Products in slices as `batch.walk` cuts them: rounds of tiles at a constant rate, or the bytes
    of their operands, whichever takes longer, and a launch each.
    """
    if batch == 0 or m == 0 or n == 0:
        return 0.0
    kind = "cuda" if device.type == "cuda" else "cpu"
    at_once = slice_for(m, n, dtype, device).at_once(batch)
    launch = LAUNCH_MS if kind == "cuda" else CPU_LAUNCH_MS
    elements = at_once * m * n
    per_slice = 3 * launch + _moved_ms(4 * 6 * elements, kind)  # staged, scaled, cast, copied out
    for product in products(method, m, n, steps=steps, restarts=restarts):
        if product.inner == max(m, n) != min(m, n):
            halves = gram_runs_symmetric(m, n, dtype, device)
        else:
            halves = product.mirrored and runs_symmetric(min(m, n), dtype, device)
        one = _product_ms(product, at_once, dtype, device, halves=halves)
        per_slice += product.count * (one + launch)
    return -(-batch // at_once) * per_slice


def _product_ms(
    product: Product, matrices: int, dtype: torch.dtype, device: torch.device, *, halves: bool
) -> float:
    """One launch: `matrices` products."""
    rows, inner, columns = product.rows, product.inner, product.columns
    kind, itemsize = "cuda" if device.type == "cuda" else "cpu", dtype.itemsize
    rate = RATES[kind][itemsize]
    if kind == "cpu":
        return 1e3 * matrices * 2 * rows * inner * columns / rate
    down, across = math.ceil(rows / TILE), math.ceil(columns / TILE)
    tiles = matrices * (down * (down + 1) // 2 if halves else down * across)
    # Products of few tiles are cut finer, down to a quarter of a tile for each multiprocessor.
    rounds = max(tiles / MULTIPROCESSORS, 0.25)
    rounds = math.ceil(rounds) if rounds > 1 else rounds
    if batch_is_free(dtype, device):
        rounds = math.ceil(2 * tiles / MULTIPROCESSORS) / 2  # there are tiles of half the size
        block, tile = HOPPER_TILE[halves]
        seconds = 1e-6 * rounds * (-(-inner // 64) * block + tile)
    else:
        slowdown = HALVES_EFFICIENCY if halves and itemsize == 2 else 1.0
        work = MULTIPROCESSORS * 2 * TILE * TILE * inner
        seconds = rounds * work / (rate * EFFICIENCY * slowdown)
    moved = itemsize * matrices * (rows * inner + inner * columns + rows * columns)
    return max(1e3 * seconds, _moved_ms(moved, kind))


def _moved_ms(moved: float, kind: str) -> float:
    return 1e3 * moved / (H200_BANDWIDTH if kind == "cuda" else 20e9)
