"""grouped_lora_dw as an op: gradients of weights and biases, for experts that are trained."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_error_at_most, assert_same_bits
from ._grouped import PATHS, TOP_K, doubles, operands, valid_slots

NAMES = ("x", "dy", "weight", "bias")


def arguments(problem: dict, path: str, wants=(True, True)) -> tuple:
    operands = (*(problem[name] for name in NAMES), *problem["order"].operands())
    return (*operands, problem["gates"], TOP_K, 1, *wants, path)


@pytest.mark.sees_defect("the gradient of a bias is None and that of a trained weight is zero")
@pytest.mark.kernels_ci
@pytest.mark.parametrize("path", PATHS)
def test_results(submodule, ops, device, path):
    problem = operands(submodule, device)
    dw, dbias = ops.grouped_lora_dw(*arguments(problem, path))
    wide = doubles(problem)
    expected_w = torch.zeros(dw.shape, dtype=torch.float64)
    expected_b = torch.zeros(dbias.shape, dtype=torch.float64)
    for slot, token, e in valid_slots(problem):
        grad = wide["gates"].reshape(-1)[slot] * wide["dy"][slot]
        expected_w[e] += torch.outer(wide["x"][token], grad)
        expected_b[e] += grad
    assert_error_at_most(dw.cpu(), expected_w, 1e-6)
    assert_error_at_most(dbias.cpu(), expected_b, 1e-6)
    assert dw.stride() == problem["weight"].stride()
    assert_same_bits(dw[1].contiguous(), torch.zeros_like(dw[1]).contiguous())


@pytest.mark.parametrize("path", PATHS)
def test_what_is_not_wanted_is_empty(submodule, ops, device, path):
    problem = operands(submodule, device)
    dw, dbias = ops.grouped_lora_dw(*arguments(problem, path, wants=(False, True)))
    assert dw.numel() == 0 and dbias.shape == problem["bias"].shape


@pytest.mark.parametrize("path", PATHS)
def test_opcheck(submodule, ops, device, path):
    problem = operands(submodule, device, torch.bfloat16)
    torch.library.opcheck(ops.grouped_lora_dw.default, arguments(problem, path))
