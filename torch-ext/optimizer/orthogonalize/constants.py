"""Schedules, restarts and dtypes as constants of a compiled graph.

They follow from Python numbers alone. Marked as constant results, they are computed once while a
graph is traced instead of being traced operation by operation.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from .choose import default_dtype
from .coefficients import CoefficientSet, Rows, frozen_rows, polar_express_set, resolve_coefficients
from .restarts import checked_positions, restart_positions


def schedule(
    coefficients: str | CoefficientSet | Sequence[Sequence[float]], steps: int
) -> tuple[Rows, float]:
    """(rows, prefactor) of a `steps`-step schedule; see `resolve_coefficients`."""
    return _schedule(coefficients, _number(steps))


def polar_express_schedule(
    steps: int, lower: float, safety: float, cushion: float
) -> tuple[Rows, float]:
    """(rows, prefactor) of the Polar Express schedule derived for `steps`."""
    return _polar_express_schedule(
        _number(steps), _constant(lower), _constant(safety), _constant(cushion)
    )


@torch.compiler.assume_constant_result
def restarts_for(
    rows: Rows, dtype: torch.dtype, restarts: Sequence[int] | None = None
) -> tuple[int, ...]:
    """The given restart positions, checked, or the best ones for these rows in this dtype."""
    if restarts is None:
        return restart_positions(rows, dtype)
    return checked_positions(restarts, len(rows))


@torch.compiler.assume_constant_result
def dtype_for(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """`default_dtype`: the iterate dtype for an input dtype on a device."""
    return default_dtype(dtype, device)


@torch.compiler.assume_constant_result
def _schedule(coefficients, steps: int) -> tuple[Rows, float]:
    return resolve_coefficients(frozen_rows(coefficients), steps)


@torch.compiler.assume_constant_result
def _polar_express_schedule(
    steps: int, lower: float, safety: float, cushion: float
) -> tuple[Rows, float]:
    table = polar_express_set(steps, lower, safety, cushion)
    return table.rows, table.prefactor


def _number(steps: int) -> int:
    """`steps`, made a constant where the compiler has turned it into a symbol.

    That happens from the second value on. The length of a tuple is always a constant.
    """
    return len((None,) * steps) if torch.compiler.is_compiling() else steps


def _constant(number: float) -> float:
    """A float or an int, made a constant likewise: text is always one."""
    if not torch.compiler.is_compiling():
        return number
    return _number(number) if isinstance(number, int) else float.fromhex(number.hex())
