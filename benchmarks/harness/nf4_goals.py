"""What the rows of `nf4.json` should reach, and whether they do.

A goal is judged on the row that a user gets ("auto"). One whose value could not be measured says
so: its `met` is null, and `value` the reason.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from .moe_problems import Layer
from .report import Row

# model -> (the baseline's listed ms, factor over it), forward + backward at 2048 tokens
STEP = {
    "Qwen3.5-35B-A3B": (4.05, 3.0),
    "Qwen3-30B-A3B": (3.68, 3.0),
    "OLMoE-1B-7B": (3.20, 2.4),
    "Mixtral-8x7B": (9.75, 1.4),
}
SHORT = {128: 5.0, 16: 5.0}  # tokens -> factor of forward
OF_BF16, UP_TO_ROWS = 1.05, 128  # of the same layer in bfloat16, at so many rows per expert
OF_PEAK = 0.25  # of the baseline's peak memory
OF_TRAFFIC = 1.3  # DRAM bytes of the fused products: packed weights and activations, moved once
TRAFFIC = ("Qwen3.5-35B-A3B", "Qwen3-30B-A3B")
COPY, COPY_FEW = 0.9, 0.8  # of the rate of a copy: whole stacks, 8 of 256 experts
OFFLOAD = 1.5  # of the time with experts on the device


@dataclasses.dataclass(frozen=True)
class Goal:
    """A bound of a value: from below, or from above."""

    bound: float
    at_least: bool

    def met(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


def layer_goals(layer: Layer, direction: str) -> dict[str, Goal]:
    """Name -> goal of a layer's row; none of a layer that is not listed."""
    goals: dict[str, Goal] = {}
    if layer.model not in STEP:
        return goals
    if direction == "fwd+bwd" and layer.tokens == 2048:
        listed, factor = STEP[layer.model]
        goals = {"speedup": Goal(factor, True), "ms": Goal(listed / factor, False)}
        goals["of_baseline_peak"] = Goal(OF_PEAK, False)
        if layer.model in TRAFFIC:
            goals["of_least_traffic"] = Goal(OF_TRAFFIC, False)
    if direction == "fwd" and layer.tokens in SHORT:
        goals = {"speedup": Goal(SHORT[layer.tokens], True)}
    if goals and layer.rows <= UP_TO_ROWS * layer.experts:
        goals["of_bf16"] = Goal(OF_BF16, False)
    return goals


def judged(row: Row, goals: Mapping[str, Goal], values: Mapping[str, float | str]) -> Row:
    """The row with its goals; `values` hold what the row itself does not, or why it is missing."""
    if not row.ok or not goals:
        return row
    own = {"speedup": row.speedup, "ms": row.ms}
    if row.peak_baseline_mb:
        own["of_baseline_peak"] = row.peak_mb / row.peak_baseline_mb
    found = {}
    for name, goal in goals.items():
        value = values.get(name, own.get(name))
        met = None if isinstance(value, str) else goal.met(value)
        found[name] = {"value": value, "goal": goal.bound, "met": met}
    return dataclasses.replace(row, goals=found)


def said(row: Row) -> str:
    """The goals for a printed line."""
    words = {True: "met", False: "MISSED", None: "not measured"}
    parts = [
        f"{name} {one['value'] if one['met'] is None else format(one['value'], '.3g')} of "
        f"{one['goal']:.3g} {words[one['met']]}"
        for name, one in (row.goals or {}).items()
    ]
    return "  " + ", ".join(parts) if parts else ""
