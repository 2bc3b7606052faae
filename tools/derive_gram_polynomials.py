"""Derives the polynomials of gram_polynomial, or says how good the committed ones are.

    python tools/derive_gram_polynomials.py                 properties of the tables, and a refit
    python tools/derive_gram_polynomials.py --search 600    from random starts, for so many seconds

A minimax fit of 30 coefficients: Levenberg-Marquardt steps on squares whose weights grow where the
error is largest (Lawson). A search fits each polynomial alone on intervals that grow towards 0,
then both together. Nothing of it runs in the package, which has the numbers.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence

import torch
from derive_coefficients import load
from torch import Tensor

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
    options = parser.parse_args(arguments)
    torch.set_default_dtype(torch.float64)
    table = load("polynomials").POLYNOMIALS
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
