"""grouped_lora_dab as an op: both gradients in the parameters' strides, zero without rows."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_error_at_most, assert_same_bits
from ._grouped import EXPERTS, PATHS, RANK, TOKENS, TOP_K, doubles, operands, valid_slots

ROWS = TOKENS * TOP_K


def arguments(submodule, device, path, dtype=torch.float32, wants=(True, True)) -> tuple:
    problem = operands(submodule, device, dtype)
    generator = torch.Generator().manual_seed(1)
    xa, yb = torch.randn(2, ROWS, RANK, generator=generator).to(device, dtype).unbind()
    tensors = (problem["x"], problem["dy"], xa, yb, problem["lora_a"], problem["lora_b"])
    order = problem["order"].operands()
    return problem, (*tensors, *order, problem["gates"], TOP_K, 1, *wants, path)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("path", PATHS)
def test_results(submodule, ops, device, path):
    problem, given = arguments(submodule, device, path)
    da, db = ops.grouped_lora_dab(*given)
    wide = doubles(problem)
    xa, yb = given[2].double().cpu(), given[3].double().cpu()
    expected_a = torch.zeros(da.shape, dtype=torch.float64)
    expected_b = torch.zeros(db.shape, dtype=torch.float64)
    rows = problem["rows"].cpu()
    for slot, token, e in valid_slots(problem):
        gate = wide["gates"].reshape(-1)[slot]
        expected_a[e] += gate * torch.outer(yb[rows[slot]], wide["x"][token])
        expected_b[e] += gate * torch.outer(wide["dy"][slot], xa[rows[slot]])
    assert_error_at_most(da.cpu(), expected_a, 1e-6)
    assert_error_at_most(db.cpu(), expected_b, 1e-6)


@pytest.mark.parametrize("path", PATHS)
def test_experts_without_rows_get_exact_zeros(submodule, ops, device, path):
    problem, given = arguments(submodule, device, path)
    empty = sorted(set(range(EXPERTS)) - {e for _, _, e in valid_slots(problem)})
    assert empty == [1]
    for gradient in ops.grouped_lora_dab(*given):
        assert_same_bits(gradient[1].contiguous(), torch.zeros_like(gradient[1]).contiguous())


@pytest.mark.parametrize("path", PATHS)
def test_gradients_have_the_strides_of_the_parameters(submodule, ops, device, path):
    """PEFT's B (N, r E) is read through a view; its gradient comes in the same memory order."""
    problem, given = arguments(submodule, device, path)
    da, db = ops.grouped_lora_dab(*given)
    assert da.stride() == problem["lora_a"].stride()
    assert db.stride() == problem["lora_b"].stride() == (1, RANK * EXPERTS, EXPERTS)
    assert (da.dtype, db.dtype) == (torch.float32, torch.float32)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wants", [(True, False), (False, True)])
def test_what_is_not_wanted_is_empty(submodule, ops, device, path, wants):
    _, given = arguments(submodule, device, path)
    both = ops.grouped_lora_dab(*given)
    _, given = arguments(submodule, device, path, wants=wants)
    for wanted, one, of_both in zip(wants, ops.grouped_lora_dab(*given), both, strict=True):
        assert torch.equal(one, of_both) if wanted else one.numel() == 0


@pytest.mark.parametrize("path", PATHS)
def test_opcheck(submodule, ops, device, path):
    _, given = arguments(submodule, device, path, torch.bfloat16)
    torch.library.opcheck(ops.grouped_lora_dab.default, given)
