"""What the methods cost: operations, the floor of an H200, and a predicted time.

Everything follows from the shape, the dtype and the kind of device alone, so that every rank of a
job comes to the same numbers and can share out work by them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch

from .batch import slice_for
from .polynomials import POLYNOMIALS, SQUARES
from .products import batch_is_free, gram_runs_symmetric, runs_symmetric

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
