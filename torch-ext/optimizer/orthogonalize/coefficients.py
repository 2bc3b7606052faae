"""Every polynomial schedule, with its source: derived Polar Express tables and published sets.

One step maps each singular value s of X to p(s) = a s + b s^3 + c s^5, computed on matrices as
X <- a X + (b A + c A^2) X with A = X X^T. A schedule is one row (a, b, c) per step; X is divided by
`prefactor` * ||X||_F before the first one, so that its singular values start in (0, 1].

This module imports nothing of the package, so `tools/derive_coefficients.py` can load it by path.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType
from typing import Literal

Row = tuple[float, float, float]
Rows = tuple[Row, ...]

# The slowest polynomial in use, cubic Newton-Schulz, multiplies a small singular value by 1.5: from
# float64's resolution, 2^-53, it is at 1 after 96 steps. Further ones only repeat rounding errors.
MAX_STEPS = 100
MAX_REMEZ_ITERATIONS = 100  # the tables in use need at most 10
# Below this relative width of [lower, upper] the minimax quintic equals its limit, the quintic
# Newton-Schulz (Pade) polynomial, to better than the exchange can resolve in float64.
DEGENERATE_INTERVAL = 5e-6


@dataclass(frozen=True)
class CoefficientSet:
    """A named schedule.

    Attributes:
        name: Key in `COEFFICIENT_SETS`.
        rows: One (a, b, c) per step.
        prefactor: X is divided by prefactor * ||X||_F before the first step.
        source: Where the numbers come from.
        beyond: What happens after the last row. "repeat_last" continues with the last row, as the
            source defines; "exact" serves the listed number of steps and nothing else. No set is
            ever cut short: its last rows are tuned for the end of the schedule.
    """

    name: str
    rows: Rows
    prefactor: float
    source: str
    beyond: Literal["exact", "repeat_last"] = "exact"

    def rows_for(self, steps: int) -> Rows:
        """The rows of a `steps`-step schedule; ValueError where the set does not define one."""
        steps = checked_steps(steps)
        if steps == len(self.rows):
            return self.rows
        if self.beyond == "repeat_last" and steps > len(self.rows):
            return self.rows + (self.rows[-1],) * (steps - len(self.rows))
        at_least = "at least " if self.beyond == "repeat_last" else ""
        raise ValueError(
            f"steps={steps}: the coefficient set {self.name!r} is a schedule of {at_least}"
            f"{len(self.rows)} steps; pass steps={len(self.rows)}, or use polar_express, which "
            f"derives a schedule for any number of steps"
        )


def checked_steps(steps: int) -> int:
    """`steps` itself if it is an int in [1, MAX_STEPS]; TypeError or ValueError otherwise."""
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"steps must be an int, got {steps!r}; pass the number of iterations")
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if steps > MAX_STEPS:
        raise ValueError(
            f"steps must be at most {MAX_STEPS}, got {steps}; 5 to 10 are usual, and every "
            "schedule has converged to float64's resolution before"
        )
    return steps


@lru_cache(maxsize=256, typed=True)
def polar_express_coefficients(
    steps: int = 5, lower: float = 1e-3, safety: float = 2e-2, cushion: float = 0.02
) -> Rows:
    """Derives the Polar Express schedule for exactly this number of steps.

    Each step is the odd quintic that is closest to 1, in the worst case, on the interval the step
    before left behind. The defaults give the five rows that nanochat, modded-nanogpt and dion use.

    Args:
        steps: Number of polynomials, 1 to `MAX_STEPS`. The last row depends on it: cutting a longer
            table short is not optimal.
        lower: Smallest singular value, after normalization, that is still driven to 1; in (0, 1].
        safety: All rows but the last are p(s / (1 + safety)), which keeps rounding errors from
            leaving the interval; divide X by (1 + safety) * ||X||_F to match. At least 0.
        cushion: A step never fits below cushion * upper, which caps its slope at 0; in [0, 1).

    Returns:
        One (a, b, c) per step, for p(s) = a s + b s^3 + c s^5.

    Raises:
        TypeError: steps is not an int or another argument is not a number.
        ValueError: An argument is out of its range or not finite.
        RuntimeError: The exchange iteration did not converge.

    Source: Amsel, Persson, Musco, Gower, "The Polar Express", arXiv 2505.16932, algorithm 1.
    """
    steps = checked_steps(steps)
    lower = _checked_number("lower", lower, "in (0, 1]", lambda v: 0 < v <= 1)
    safety = _checked_number("safety", safety, "at least 0", lambda v: v >= 0)
    cushion = _checked_number("cushion", cushion, "in [0, 1)", lambda v: 0 <= v < 1)
    upper = 1.0
    rows: list[Row] = []
    for step in range(steps):
        row = optimal_quintic(max(lower, cushion * upper), upper)
        if cushion * upper > lower:
            # The polynomial saw only [cushion * upper, upper]; recentre it so that its values at
            # the true ends of the interval are symmetric about 1.
            centre = 2 / (evaluate(row, lower) + evaluate(row, upper))
            row = (row[0] * centre, row[1] * centre, row[2] * centre)
        if step < steps - 1:
            row = rescaled((row,), 1 + safety)[0]
        rows.append(row)
        lower = evaluate(row, lower)
        upper = 2 - lower
        if not 0 < lower < math.inf:
            raise ValueError(
                f"safety={safety} leaves nothing to converge to after step {step + 1}; the "
                f"published tables use 0.01 to 0.05"
            )
    return tuple(rows)


def optimal_quintic(lower: float, upper: float) -> Row:
    """The (a, b, c) that minimizes max |1 - p| on [lower, upper], by the Remez exchange.

    The error of the minimax quintic alternates at four points: both ends and the two interior
    extrema q < r of p, which are roots of p'(s) = a + 3 b s^2 + 5 c s^4.
    """
    if lower / upper >= 1 - DEGENERATE_INTERVAL:
        return (15 / 8) / upper, -(10 / 8) / upper**3, (3 / 8) / upper**5
    q, r = (3 * lower + upper) / 4, (lower + 3 * upper) / 4
    previous = math.inf
    for _ in range(MAX_REMEZ_ITERATIONS):
        a, b, c, error = _solve(
            [
                [s, s**3, s**5, sign]
                for s, sign in ((lower, 1.0), (q, -1.0), (r, 1.0), (upper, -1.0))
            ],
            [1.0] * 4,
        )
        discriminant = 9 * b * b - 20 * a * c
        if not all(map(math.isfinite, (a, b, c, error))) or discriminant < 0 or c == 0:
            raise ValueError(
                f"no minimax quintic on [{lower}, {upper}]: the exchange left the real numbers; "
                f"use a larger lower or cushion"
            )
        if abs(error - previous) <= 1e-15:
            return a, b, c
        previous = error
        root = math.sqrt(discriminant)
        squares = (-3 * b - root) / (10 * c), (-3 * b + root) / (10 * c)
        if min(squares) < 0:
            raise ValueError(f"no interior extrema on [{lower}, {upper}]; use a larger lower")
        q, r = sorted(map(math.sqrt, squares))
    raise RuntimeError(
        f"the Remez exchange on [{lower}, {upper}] did not converge in {MAX_REMEZ_ITERATIONS} "
        f"iterations (last change {abs(error - previous):.1e})"
    )


def evaluate(row: Row, s: float) -> float:
    """p(s) = a s + b s^3 + c s^5."""
    a, b, c = row
    return a * s + b * s**3 + c * s**5


def rescaled(rows: Rows, scale: float) -> Rows:
    """The rows of p(s / scale)."""
    return tuple((a / scale, b / scale**3, c / scale**5) for a, b, c in rows)


def _solve(matrix: list[list[float]], right: list[float]) -> list[float]:
    """Gaussian elimination with partial pivoting; a singular matrix gives NaN."""
    rows = [[*row, value] for row, value in zip(matrix, right, strict=True)]
    size = len(rows)
    for k in range(size):
        pivot = max(range(k, size), key=lambda i: abs(rows[i][k]))
        rows[k], rows[pivot] = rows[pivot], rows[k]
        if rows[k][k] == 0 or not math.isfinite(rows[k][k]):
            return [math.nan] * size
        for i in range(k + 1, size):
            factor = rows[i][k] / rows[k][k]
            rows[i] = [x - factor * y for x, y in zip(rows[i], rows[k], strict=True)]
    solution = [0.0] * size
    for k in reversed(range(size)):
        known = sum(rows[k][j] * solution[j] for j in range(k + 1, size))
        solution[k] = (rows[k][size] - known) / rows[k][k]
    return solution


def _checked_number(name: str, value: float, allowed: str, accept) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number {allowed}, got {value!r}")
    if not math.isfinite(value) or not accept(value):
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    return float(value)


_POLAR_EXPRESS_PAPER: Rows = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    (1.875, -1.25, 0.375),
)
_KELLER_JORDAN: Row = (3.4445, -4.7750, 2.0315)

_SETS = (
    CoefficientSet(
        name="keller_jordan",
        rows=(_KELLER_JORDAN,),
        prefactor=1.0,
        source="Keller Jordan, https://kellerjordan.github.io/posts/muon/; one row, repeated",
        beyond="repeat_last",
    ),
    CoefficientSet(
        name="you",
        rows=(
            (4.0848, -6.8946, 2.9270),
            (3.9505, -6.3029, 2.6377),
            (3.7418, -5.5913, 2.3037),
            (2.8769, -3.1427, 1.2046),
            (2.8366, -3.0525, 1.2012),
        ),
        prefactor=1.0,
        source="Jiacheng You, https://leloykun.github.io/ponder/muon-opt-coeffs/",
    ),
    CoefficientSet(
        name="cans",
        rows=(
            (8.4703, -25.1081, 18.6293),
            (4.1828, -3.1087, 0.5806),
            (3.9619, -2.9541, 0.5630),
            (3.2866, -2.4647, 0.5074),
            (2.2737, -1.6447, 0.4162),
        ),
        prefactor=1.0,
        source="Grishina et al., Chebyshev-accelerated Newton-Schulz, arXiv 2506.10935",
    ),
    CoefficientSet(
        name="aol",
        rows=(
            (4.0098, -7.0585, 2.4635),
            (3.4585, -5.5479, 2.5959),
            (2.7573, -3.2939, 1.4254),
            (2.7215, -3.0494, 1.3169),
        ),
        prefactor=1.0,
        source=(
            "Turbo-Muon, https://github.com/thib-s/flash-newton-schulz; tuned for rows scaled by "
            "AOL, which newton_schulz does not do: the coefficients alone"
        ),
    ),
    CoefficientSet(
        name="cubic5",
        rows=(
            (3.3656576, -3.3420992, 0.0),
            (2.5744352, -1.4957376, 0.0),
            (2.5368962, -1.4312570, 0.0),
            (2.4418906, -1.2764040, 0.0),
            (2.2230472, -0.9630650, 0.0),
        ),
        prefactor=1.0,
        source="community cubic schedule for [0.007, 1] (Chen-Chow form); two products per step",
    ),
    CoefficientSet(
        name="deepseek_v4",
        rows=(_KELLER_JORDAN,) * 8 + ((2.0, -1.5, 0.5),) * 2,
        prefactor=1.0,
        source="DeepSeek-V4 technical report: eight fast steps, two that converge to 1",
    ),
    CoefficientSet(
        name="polar_express_paper",
        rows=_POLAR_EXPRESS_PAPER,
        prefactor=1.0,
        source=(
            "arXiv 2505.16932, listing 1: lower 1e-3, cushion 0.02407327424182761, no safety; "
            "the last row is the limit and repeats"
        ),
        beyond="repeat_last",
    ),
    CoefficientSet(
        name="gram_newton_schulz",
        rows=rescaled(_POLAR_EXPRESS_PAPER[:5], 1.05),
        prefactor=1.0,
        source=(
            "https://github.com/Dao-AILab/gram-newton-schulz: the paper's first five rows with "
            "a safety factor of 1.05, the last row included"
        ),
    ),
    CoefficientSet(
        name="emerging_optimizers",
        rows=(
            (8.2051, -22.9019, 16.4607),
            (4.0664, -2.8612, 0.5184),
            (3.9096, -2.8234, 0.5250),
            (3.2856, -2.4153, 0.4853),
            (2.2779, -1.6198, 0.3985),
            (1.8726, -1.2307, 0.3585),
            (1.8564, -1.2132, 0.3568),
            (1.8750, -1.2500, 0.3750),
        ),
        prefactor=1.0,
        source=(
            "https://github.com/NVIDIA-NeMo/Emerging-Optimizers: the paper's rows with a safety "
            "factor of 1.01, cut to four digits; the last row repeats"
        ),
        beyond="repeat_last",
    ),
)

# name -> published schedule, of which every step's (a, b, c), the prefactor and the source are kept
COEFFICIENT_SETS: Mapping[str, CoefficientSet] = MappingProxyType({s.name: s for s in _SETS})


def polar_express_set(
    steps: int = 5, lower: float = 1e-3, safety: float = 2e-2, cushion: float = 0.02
) -> CoefficientSet:
    """`polar_express_coefficients` with the prefactor 1 + safety that belongs to it."""
    return CoefficientSet(
        name="polar_express",
        rows=polar_express_coefficients(steps, lower, safety, cushion),
        prefactor=1 + safety,
        source="arXiv 2505.16932, derived for the step count",
    )


@lru_cache(maxsize=256, typed=True)
def resolve_coefficients(
    coefficients: str | CoefficientSet | Rows, steps: int
) -> tuple[Rows, float]:
    """(rows, prefactor) of a `steps`-step schedule.

    Args:
        coefficients: A name in `COEFFICIENT_SETS`, "polar_express" (derived for `steps`), a
            `CoefficientSet`, or exactly `steps` rows (a, b, c), which get the prefactor 1.
        steps: Number of iterations.

    Raises:
        TypeError: steps is not an int, or coefficients is of another kind.
        ValueError: Unknown name, a set that does not define `steps` steps, or malformed rows.
    """
    steps = checked_steps(steps)
    if coefficients == "polar_express":
        coefficients = polar_express_set(steps)
    if isinstance(coefficients, str):
        if coefficients not in COEFFICIENT_SETS:
            known = ", ".join(["polar_express", *COEFFICIENT_SETS])
            raise ValueError(
                f"coefficients={coefficients!r} is not a known set; use one of {known}"
            )
        coefficients = COEFFICIENT_SETS[coefficients]
    if isinstance(coefficients, CoefficientSet):
        return coefficients.rows_for(steps), coefficients.prefactor
    if len(coefficients) != steps:
        raise ValueError(
            f"coefficients has {len(coefficients)} rows and steps={steps}; pass one row per step"
        )
    return coefficients, 1.0


def frozen_rows(
    coefficients: str | CoefficientSet | Sequence[Sequence[float]],
) -> str | CoefficientSet | Rows:
    """Rows given as lists become tuples of floats, so that they can be a cache key.

    Raises:
        TypeError: coefficients is neither a name, a `CoefficientSet` nor a sequence of rows.
        ValueError: A row does not consist of three finite numbers.
    """
    if isinstance(coefficients, (str, CoefficientSet)):
        return coefficients
    if not isinstance(coefficients, Sequence):
        raise TypeError(
            f"coefficients must be a name, a CoefficientSet or a sequence of (a, b, c) rows, "
            f"got {type(coefficients).__name__}"
        )
    rows = []
    for row in coefficients:
        if not isinstance(row, Sequence) or isinstance(row, str) or len(row) != 3:
            raise ValueError(f"each row of coefficients must be (a, b, c), got {row!r}")
        rows.append(
            tuple(_checked_number("a coefficient", v, "finite", lambda v: True) for v in row)
        )
    return tuple(rows)
