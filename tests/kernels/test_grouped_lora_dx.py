"""grouped_lora_dx as an op: input gradient, LoRA intermediate and gate gradient slot by slot."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_error_at_most
from ._grouped import PATHS, RANK, TOKENS, TOP_K, K, doubles, operands, valid_slots

NAMES = ("dy", "weight", "lora_a", "lora_b", "bias")


def arguments(problem: dict, path: str, grouped_out: bool = False, wants_dx: bool = True) -> tuple:
    return (
        *(problem[name] for name in NAMES),
        0.5,
        *problem["order"].operands(),
        problem["gates"],
        problem["x"],
        1,
        TOP_K,
        grouped_out,
        wants_dx,
        path,
    )


@pytest.mark.kernels_ci
@pytest.mark.parametrize("grouped_out", [False, True])
@pytest.mark.parametrize("path", PATHS)
def test_results(submodule, ops, device, path, grouped_out):
    problem = operands(submodule, device)
    dx, yb, dgates = ops.grouped_lora_dx(*arguments(problem, path, grouped_out))
    wide = doubles(problem)
    slots = problem["slots"].cpu()
    expected = torch.zeros(TOKENS * TOP_K, K, dtype=torch.float64)
    low = torch.zeros(TOKENS * TOP_K, RANK, dtype=torch.float64)
    dots = torch.zeros(TOKENS * TOP_K, dtype=torch.float64)
    for slot, token, e in valid_slots(problem):
        dy = wide["dy"][slot]
        low[slot] = 0.5 * dy @ wide["lora_b"][e]
        through = wide["weight"][e] @ dy + low[slot] @ wide["lora_a"][e]
        expected[slot] = wide["gates"].reshape(-1)[slot] * through
        dots[slot] = through @ wide["x"][token] + dy @ wide["bias"][e]
    assert_error_at_most(dx.cpu(), expected[slots] if grouped_out else expected, 1e-6)
    assert_error_at_most(yb.cpu(), low[slots], 1e-6)
    assert_error_at_most(dgates.cpu(), dots, 1e-6)


@pytest.mark.parametrize("path", PATHS)
def test_without_dx_the_rest_is_the_same(submodule, ops, device, path):
    problem = operands(submodule, device)
    _, yb, dgates = ops.grouped_lora_dx(*arguments(problem, path))
    dx, again, gates_again = ops.grouped_lora_dx(*arguments(problem, path, wants_dx=False))
    assert dx.shape == (0, K)
    assert torch.equal(yb, again) and torch.equal(dgates, gates_again)


@pytest.mark.parametrize("path", PATHS)
def test_opcheck(submodule, ops, device, path):
    problem = operands(submodule, device, torch.bfloat16)
    torch.library.opcheck(ops.grouped_lora_dx.default, arguments(problem, path))
