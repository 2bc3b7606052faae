"""The row of an op whose time is its bytes: checked, then timed beside its baseline and a copy."""

from __future__ import annotations

from typing import Any, Protocol

from .ceilings import copy_call
from .package import Built
from .report import Measured, Row, failed, floor_ms, line, passed
from .timer import cold_sets, times

MOST_SETS = 64  # of inputs; thousands of small tensors would take longer to make than to time


class Problem(Protocol):
    """What is to be done, without a tensor."""

    @property
    def case(self) -> str: ...

    @property
    def bytes_moved(self) -> int: ...


class Case(Protocol):
    """Inputs on the device, `sets` of them, ours and the baseline over each."""

    baseline_name: str
    sets: list[Any]

    def __init__(self, problem: Any, built: Built, sets: int) -> None: ...

    def ours(self, number: int) -> Any: ...

    def baseline(self, number: int) -> Any: ...

    def compare(self) -> tuple[bool, float, float]: ...


def measure(problem: Problem, built: Built, kind: type[Case]) -> tuple[Row, str]:
    """The row of one problem and its printed line."""
    import torch

    l2 = torch.cuda.get_device_properties(0).L2_cache_size
    case = kind(problem, built, min(cold_sets(problem.bytes_moved, l2), MOST_SETS))
    same, error, error_baseline = case.compare()
    if not same:
        row = failed(problem.case)
        return row, line(row, gigabytes=0)
    peak_mb = added_mb(lambda: case.ours(0))
    calls = {"ours": case.ours, "baseline": case.baseline, "copy": copy_call(problem.bytes_moved)}
    found = times(calls, sets=len(case.sets))
    row = passed(
        problem.case,
        Measured(
            times=found["ours"],
            floor_ms=floor_ms(bytes_moved=problem.bytes_moved),
            baseline=case.baseline_name,
            baseline_times=found["baseline"],
            error=error,
            error_baseline=error_baseline,
            peak_mb=peak_mb,
        ),
    )
    return row, line(row, gigabytes=problem.bytes_moved / 1e9, copy_ms=found["copy"].ms)


def added_mb(call) -> float:
    """Device memory that one call adds at its peak, its result included."""
    import torch

    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    return (torch.cuda.max_memory_allocated() - before) / 1e6
