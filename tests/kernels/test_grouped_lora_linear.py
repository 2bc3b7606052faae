"""grouped_lora_linear as an op: opcheck with its gradients, and the shipped reference."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_error_at_most
from ._grouped import PATHS, operands

NAMES = ("x", "weight", "lora_a", "lora_b", "bias")


def arguments(problem: dict, path: str, gated: bool = True) -> tuple:
    operands = (*(problem[name] for name in NAMES), 0.5, *problem["order"].operands())
    return (*operands, problem["gates"] if gated else None, False, False, path)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_equals_the_shipped_reference(submodule, ops, device, path, gated):
    problem = operands(submodule, device)
    y, _ = ops.grouped_lora_linear(*arguments(problem, path, gated))
    names = ("x", "weight", "lora_a", "lora_b", "bias", "gates")
    wide = [problem[name].double().cpu() for name in names]
    wide[5] = wide[5] if gated else None
    reference = submodule("reference.moe").grouped_lora_linear
    assert_error_at_most(y.cpu(), reference(*wide, problem["ids"], 0.5), 1e-6)


@pytest.mark.sees_defect("a flat list of fifteen arguments, no registered op")
@pytest.mark.parametrize("path", PATHS)
def test_opcheck(submodule, ops, device, path):
    problem = operands(submodule, device)
    for name in ("x", "weight", "lora_a", "lora_b", "bias", "gates"):
        problem[name] = problem[name].detach().requires_grad_()
    torch.library.opcheck(ops.grouped_lora_linear.default, arguments(problem, path))
