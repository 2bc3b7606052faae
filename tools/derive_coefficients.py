"""Prints a schedule of Newton-Schulz polynomials, derived or named, and what it does.

    python tools/derive_coefficients.py --steps 6 --lower 1e-2
    python tools/derive_coefficients.py --set you --steps 5

Uses the package's own generator, loaded from its source file: no build, no torch.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import sys
from pathlib import Path
from types import ModuleType

FOLDER = Path(__file__).resolve().parent.parent / "torch-ext/optimizer/orthogonalize"
POINTS_PER_DECADE = 2000


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def band(generator: ModuleType, rows, lower: float) -> tuple[float, float]:
    """Smallest and largest value of the schedule on [lower, 1] in exact arithmetic."""
    count = max(2, round(-math.log10(lower) * POINTS_PER_DECADE) + 1)
    values = []
    for i in range(count):
        s = lower ** (i / (count - 1))
        for row in rows:
            s = generator.evaluate(row, s)
        values.append(s)
    return min(values), max(values)


def as_python(rows, note: str) -> str:
    return "\n".join([f"# {note}", "ROWS = (", *(f"    {row!r}," for row in rows), ")"])


def parse(arguments: list[str] | None, generator: ModuleType) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--set", choices=generator.COEFFICIENT_SETS, help="a named set")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--lower", type=float, default=1e-3, help="smallest value driven to 1")
    parser.add_argument("--safety", type=float, default=2e-2, help="room for rounding errors")
    parser.add_argument("--cushion", type=float, default=0.02, help="caps the slope at 0")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    generator = load("coefficients")
    options = parse(arguments, generator)
    derivation = {k: getattr(options, k) for k in ("steps", "lower", "safety", "cushion")}
    try:
        if options.set:
            table = generator.COEFFICIENT_SETS[options.set]
            rows, title = table.rows_for(options.steps), table.name
        else:
            table = generator.polar_express_set(**derivation)
            rows = table.rows
            title = "Polar Express, " + ", ".join(f"{k} {v:g}" for k, v in derivation.items())
    except (ValueError, RuntimeError) as error:
        print(error, file=sys.stderr)
        return 2
    low, high = band(generator, rows, options.lower)
    slope = math.prod(a for a, _, _ in rows)
    note = (
        f"{title}: divide X by {table.prefactor:g} ||X||_F; [{options.lower:g}, 1] -> "
        f"[{low:.3f}, {high:.3f}], slope {slope:.0f} at 0. {table.source}"
    )
    print(as_python(rows, note))
    return 0


if __name__ == "__main__":
    sys.exit(main())
