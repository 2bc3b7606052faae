"""Derives the polynomials of gram_polynomial, or says how good the committed ones are.

    python tools/derive_gram_polynomials.py                 properties of the tables, and a refit
    python tools/derive_gram_polynomials.py --search 600    from random starts, for so many seconds
    python tools/derive_gram_polynomials.py --well-conditioned    the table of that name
    python tools/derive_gram_polynomials.py --quarter-circle 200  the table of that name

A minimax fit of 30 coefficients: Levenberg-Marquardt steps on squares whose weights grow where the
error is largest (Lawson). A search fits each polynomial alone on intervals that grow towards 0,
then both together. Two squares alone are every quartic that rises in the end: WELL_CONDITIONED is
the best one, found by exchange (Remez). QUARTER_CIRCLE is a fit of least squares, from random
starts and intervals that grow towards 0. Nothing of it runs in the package, which has the numbers.
"""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

SOURCE = Path(__file__).resolve().parent.parent / "torch-ext/optimizer/orthogonalize/polynomials.py"
SMALLEST = 1e-4  # of the singular values that are fitted; below, the slope at 0 decides
# The allowed error: of five steps of Polar Express on small values, for a matrix whose Schatten-4
# norm is 0.84 of its Frobenius norm (two equal values); and what better is not asked for.
SLOPE = 0.97 * 0.84 * 989 / 1.02
FLAT, TOP, TOP_FROM = 0.12, 0.06, 0.35
# Rounding between the polynomials that must change nothing: factors of all values.
LIFTS = (0.97, 1.02, 1.05, 1.08)
# Where the first polynomial may leave its smallest value, relative to its largest; the second one
# can bring that to 1 within the allowed error.
FIRST_FROM, SECOND_FROM = 2.2e-3, 0.038

# Operands of QUARTER_CIRCLE: the best of 18 patterns that were searched.
CIRCLE = (0, 0, 0, 1, 3, 3)
# No value above 1 + CAP at four times its error; beyond the quarter circle, up to END, errors of up
# to SLACK do not count, as few singular values lie there.
CAP, END, SLACK = 0.14, 1.022, 0.2

# Smallest over largest eigenvalue that WELL_CONDITIONED is fitted to.
CONDITION = 0.1


def load_table() -> ModuleType:
    spec = importlib.util.spec_from_file_location("polynomials", SOURCE)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def applied(theta: Tensor, operands: Sequence[int], s: Tensor) -> Tensor:
    """One polynomial on values s; theta (3 * squares,) holds each square's alpha, beta, delta."""
    m = [s * s]
    for j, i in enumerate(operands):
        alpha, beta, delta = theta[3 * j], theta[3 * j + 1], theta[3 * j + 2]
        m.append(alpha * m[-1] ** 2 + beta * m[i] + delta)
    return s * m[-1]


def both(theta: Tensor, operands: Sequence[Sequence[int]], s: Tensor, lift: float = 1.0) -> Tensor:
    """The second polynomial of `lift` times the first one."""
    split = 3 * len(operands[0])
    return applied(theta[split:], operands[1], lift * applied(theta[:split], operands[0], s))


def grid(points: int) -> Tensor:
    """[SMALLEST, 1], finer towards both ends, where the ripples narrow."""
    middle = torch.linspace(0, math.pi / 2, points).sin()
    ends = torch.logspace(math.log10(SMALLEST), 0, points), 1 - torch.logspace(-6, -1, points // 4)
    return torch.cat([middle, *ends]).clamp(SMALLEST, 1).unique()


def allowed(s: Tensor) -> Tensor:
    """The error that the fit divides by."""
    better = torch.where(s > TOP_FROM, TOP, FLAT)
    return torch.maximum(better, 1 - SLOPE * s)


def stepped(
    error: Callable[[Tensor], Tensor], theta: Tensor, r: Tensor, weights: Tensor, damping: float
) -> tuple[Tensor, Tensor, float]:
    """A step of Levenberg and Marquardt from theta with error r: theta, error and damping after."""
    rows = torch.func.jacfwd(error)(theta) * weights.sqrt()[:, None]
    gradient, normal = rows.mT @ (r * weights.sqrt()), rows.mT @ rows
    scale = torch.diag(normal.diagonal().clamp_min(1e-14))
    before = (weights * r * r).sum()
    for _ in range(10):
        moved = theta - torch.linalg.solve(normal + damping * scale, gradient)
        there = error(moved)
        if (weights * there * there).sum() < before:
            return moved, there, max(damping / 4, 1e-10)
        damping *= 5
    return theta, r, damping


def minimax(
    error: Callable[[Tensor], Tensor], theta: Tensor, iterations: int
) -> tuple[float, Tensor]:
    """(largest |error|, theta) of the best step from `theta` on."""
    r = error(theta)
    weights, damping = torch.ones_like(r), 1e-2
    best = r.abs().max().item(), theta
    for iteration in range(iterations):
        theta, r, damping = stepped(error, theta, r, weights, damping)
        largest = r.abs().max().item()
        best = min(best, (largest, theta), key=lambda found: found[0])
        if iteration % 3 == 2:
            weights = weights * (r.abs() / largest + 1e-3) ** 0.6
            weights = weights / weights.mean()
    return best


def refit(
    theta: Tensor, operands: Sequence[Sequence[int]], iterations: int, points: int
) -> tuple[float, Tensor]:
    """Both polynomials at once, under every lift."""
    s = grid(points)
    scale = allowed(s)

    def error(theta: Tensor) -> Tensor:
        return torch.cat([(both(theta, operands, s, lift) - 1) / scale for lift in LIFTS])

    return minimax(error, theta, iterations)


def alone(operands: Sequence[int], smallest: float) -> tuple[float, Tensor]:
    """One polynomial near 1 on [smallest, 1], from a random start and intervals that grow."""
    theta = torch.tensor([0.3, -0.5, 1.2] * len(operands))
    theta += 0.25 * torch.randn(3 * len(operands))
    lower, largest = 0.5, math.inf
    while lower > smallest:
        lower = max(0.75 * lower, smallest)
        s = torch.cat([torch.logspace(math.log10(lower), 0, 140), torch.linspace(lower, 1, 140)])
        last = lower == smallest
        largest, theta = minimax(
            lambda theta, s=s: applied(theta, operands, s) - 1, theta, 60 if last else 14
        )
    return largest, theta


def scaled(theta: Tensor, operands: Sequence[int], upper: float) -> Tensor:
    """The polynomial of s / upper."""
    theta = theta.clone()
    factor = upper**-2
    theta[0] *= factor**2
    for j, i in enumerate(operands):
        theta[3 * j + 1] *= factor if i == 0 else 1
    theta[-3:] *= factor**0.5
    return theta


def search(operands: Sequence[Sequence[int]], seconds: float) -> tuple[float, Tensor]:
    """The best table from random starts."""
    best: list[tuple[float, Tensor]] = [(math.inf, torch.empty(0))] * 2
    found, start, number = (math.inf, torch.empty(0)), time.monotonic(), 0
    while time.monotonic() - start < seconds or math.isinf(found[0]):
        torch.manual_seed(number)
        side, number = number % 2, number + 1
        fit = alone(operands[side], (FIRST_FROM, SECOND_FROM)[side])
        if not fit[0] < best[side][0]:
            continue
        best[side] = fit
        if math.isfinite(best[0][0] + best[1][0]):
            upper = 1 + best[0][0]
            second = scaled(best[1][1], operands[1], upper)
            together = refit(torch.cat([best[0][1], second]), operands, 120, 260)
            found = min(found, together, key=lambda one: one[0])
            print(f"start {number}: alone {fit[0]:.4f}, together {together[0]:.4f}", flush=True)
    return min(found, refit(found[1], operands, 200, 400), key=lambda one: one[0])


def circle_nodes(points: int) -> tuple[Tensor, Tensor]:
    """(s, weights) of the quarter circle's density on (0, 1), and some beyond."""
    angle = (torch.arange(points) + 0.5) / points * math.pi / 2
    beyond = torch.linspace(1, END, 10)
    weights = torch.cat([2 * angle.sin() ** 2 / points, torch.full_like(beyond, 1e-3)])
    return torch.cat([angle.cos(), beyond]), weights


def circle_error(theta: Tensor, s: Tensor) -> Tensor:
    error = applied(theta, CIRCLE, s) - 1
    beyond = error - error.clamp(-SLACK, SLACK)
    return torch.where(s > 1, beyond, error + 3 * (error - CAP).clamp_min(0))


def circle_fit(theta: Tensor, lower: float = 0.0, iterations: int = 60) -> tuple[float, Tensor]:
    """(weighted mean square error, theta) of values above `lower`, about."""
    s, weights = circle_nodes(180)
    if lower > 0:
        weights = weights * torch.sigmoid((s - lower) / (0.2 * lower))
    r, damping = circle_error(theta, s), 1e-2
    for _ in range(iterations):
        theta, r, damping = stepped(
            lambda theta: circle_error(theta, s), theta, r, weights, damping
        )
    return (weights * r * r).sum().item(), theta


def circle_search(seconds: float) -> tuple[float, Tensor]:
    """The best QUARTER_CIRCLE from random starts."""
    found, start, seed = (math.inf, torch.empty(0)), time.monotonic(), 0
    while time.monotonic() - start < seconds or math.isinf(found[0]):
        torch.manual_seed(seed)
        theta = torch.tensor([0.3, -0.5, 1.2] * len(CIRCLE)) + 0.35 * torch.randn(3 * len(CIRCLE))
        lower, seed = 0.5, seed + 1
        while lower > 2e-3:
            lower *= 0.75
            error, theta = circle_fit(theta, lower, 10)
            if not error < 0.05:  # nothing comes of such starts
                break
        else:
            fit = circle_fit(theta)
            if fit[0] < found[0]:
                found = fit
                print(f"start {seed}: {fit[0]:.5f}", flush=True)
    return found


def quartic(lower: float) -> tuple[float, Tensor]:
    """(largest |1 - x^(1/2) q(x)| on [lower, 1], coefficients (5,) from x^0 on) of the best q."""
    x = lower + (1 - lower) * torch.linspace(0, math.pi / 2, 200_001).sin() ** 2
    powers = x[:, None] ** torch.arange(5)  # (points, 5)
    signs = (-1.0) ** torch.arange(6)
    reference = torch.linspace(0, len(x) - 1, 6).long()
    for _ in range(20):
        rows = torch.cat([powers[reference] * x[reference, None].sqrt(), signs[:, None]], dim=1)
        coefficients = torch.linalg.solve(rows, torch.ones(6))[:5]
        error = 1 - x.sqrt() * (powers @ coefficients)
        # Between two changes of its sign the error has one point of the next reference.
        runs = (error[1:] * error[:-1] < 0).nonzero().flatten().add(1).tolist()
        edges = [0, *runs, len(x)]
        if len(edges) != 7:
            raise RuntimeError(f"on [{lower}, 1] the error has {len(runs)} zeros, not 5")
        found = [a + error[a:b].abs().argmax().item() for a, b in itertools.pairwise(edges)]
        reference = torch.tensor(found)
    return error.abs().max().item(), coefficients


def well_conditioned(lower: float) -> tuple[float, float, Tensor]:
    """(largest error, end of the interval, theta (6,)) of two squares that are exact at 1.

    The best quartic on [lower, 1], of x / end: its last zero moves to 1. The scale of the first
    square is free; it is such that the second one has alpha = 1.
    """
    largest, coefficients = quartic(lower)

    def error(x: float) -> float:
        return x**0.5 * sum(c * x**k for k, c in enumerate(coefficients.tolist())) - 1

    below, above = 0.92, 1.0  # the error is negative at 0.92 and has one zero more
    for _ in range(60):
        middle = (below + above) / 2
        below, above = (middle, above) if error(middle) < 0 else (below, middle)
    end = 1 / below
    c0, c1, c2, c3, c4 = (c / end ** (k + 0.5) for k, c in enumerate(coefficients.tolist()))
    half, root = c3 / (2 * c4), c4**0.5  # q = c4 (x^2 + half x + rest)^2 + beta x + delta
    rest = (c2 / c4 - half**2) / 2
    beta, delta = c1 - 2 * c4 * half * rest, c0 - c4 * rest**2
    return largest, end, torch.tensor([root, root * half, root * rest, 1, beta, delta])


def as_python(theta: Tensor, operands: Sequence[Sequence[int]]) -> str:
    """The table as polynomials.py holds it."""
    values, lines = iter(theta.tolist()), []
    for of_one in operands:
        lines.append("    (")
        for i in of_one:
            alpha, beta, delta = (f"{next(values):.10g}" for _ in range(3))
            lines.append(f"        Square({i}, {alpha}, {beta}, {delta}),")
        lines.append("    ),")
    return "\n".join(lines)


def flat(table: Sequence[Sequence[tuple]]) -> list[float]:
    return [value for squares in table for square in squares for value in square[1:]]


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--search", type=float, metavar="SECONDS", help="derive a new table")
    parser.add_argument("--iterations", type=int, default=60, help="of the refit")
    parser.add_argument("--points", type=int, default=260, help="of the grid of the refit")
    parser.add_argument("--well-conditioned", action="store_true", help="derive that table")
    parser.add_argument("--quarter-circle", type=float, metavar="SECONDS", help="derive that table")
    options = parser.parse_args(arguments)
    torch.set_default_dtype(torch.float64)
    largest, end, theta = well_conditioned(CONDITION)
    if options.well_conditioned:
        print(f"largest error {largest:.4f} on [{CONDITION * end:.4f}, {end:.4f}]")
        print(as_python(theta, [[0, 0]]))
        return 0
    if options.quarter_circle is not None:
        error, theta = circle_search(options.quarter_circle)
        print(f"mean square {error:.5f}\n{as_python(theta, [CIRCLE])}")
        return 0
    tables = load_table()
    difference = max(
        abs(value - best)
        for value, best in zip(flat([tables.WELL_CONDITIONED]), theta.tolist(), strict=True)
    )
    print(f"well-conditioned: {largest:.4f} on [{CONDITION * end:.4f}, {end:.4f}], ", end="")
    print(f"coefficients within {difference:.0e} of the best")
    circle = torch.tensor(flat([tables.QUARTER_CIRCLE]))
    s, weights = circle_nodes(4000)
    values, inside = applied(circle, CIRCLE, s), s < 1
    root = (weights * (values - 1) ** 2)[inside].sum().sqrt().item()
    before, after = circle_fit(circle, iterations=0)[0], circle_fit(circle)[0]
    print(
        f"quarter circle: {root:.4f} in the root mean square, at most {values[inside].max():.4f}, ",
        end="",
    )
    print(f"a refit gains {before / after - 1:.0e}")
    table = tables.POLYNOMIALS
    operands = [[square.operand for square in squares] for squares in table]
    if options.search is not None:
        largest, theta = search(operands, options.search)
        print(f"largest error {largest:.4f} of the allowed one\n{as_python(theta, operands)}")
        return 0
    theta = torch.tensor(flat(table))
    s = grid(100_000)
    error = ((both(theta, operands, s) - 1) / allowed(s)).abs().max().item()
    values = both(theta, operands, s[s >= 1.2e-3])
    slope = both(theta, operands, torch.tensor([1e-9])).item() * 1e9
    print(f"on [1.2e-3, 1]: [{values.min():.4f}, {values.max():.4f}]; slope at 0: {slope:.1f}")
    print(f"largest error: {error:.4f} of the allowed one")
    refitted, _ = refit(theta, operands, options.iterations, options.points)
    print(f"largest error after a refit, lifts included: {refitted:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
