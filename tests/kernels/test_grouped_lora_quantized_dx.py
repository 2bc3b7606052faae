"""grouped_lora_quantized_dx: the same bytes read the other way round."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_same_bits, relative_error
from ._quantized_grouped import CASES, STACKS, TOP_K, Stack, budget, draw, valid, way, weights_of


def backward(submodule, problem, path, *, wants_dx=True, wants_gates=True):
    """dx in expert order, yb and dgates, of gated and combined rows."""
    module = submodule("kernels.quant.grouped_lora_quantized")
    weights, x = weights_of(submodule, problem, 2.0), problem["x"] if wants_gates else None
    operands = (problem["dy"], weights, problem["order"], problem["gates"], x)
    options = {"dy_fan": TOP_K, "x_fan": TOP_K, "grouped_out": True, "wants_dx": wants_dx}
    return module.grouped_lora_quantized_dx(*operands, **options, **way(module, path))


def exact(submodule, problem):
    lora_a, lora_b = (None if t is None else t.double() for t in problem["lora"])
    bias, order = problem["bias"], problem["order"]
    bias = None if bias is None else bias.double()
    operands = (problem["dy"].double(), problem["dense"].double(), lora_a, lora_b, bias)
    operands += (problem["gates"].double(), problem["x"].double(), order.slots, order.offsets)
    return submodule("reference.moe").grouped_lora_dx(*operands, 2.0, TOP_K, TOP_K, True, True)


@pytest.mark.parametrize("path", ("slices", "active"))
@pytest.mark.parametrize("stack", (STACKS[0], STACKS[2]), ids=str)
def test_slices_of_experts_write_one_result(submodule, device, stack, path):
    """Three experts, then one; the gradient of a gate comes from the slice of its expert."""
    problem = draw(submodule, stack, device, torch.float32)
    rows = valid(problem["order"])
    for found, expected in zip(
        backward(submodule, problem, path), exact(submodule, problem), strict=True
    ):
        part = rows if found.ndim == 2 else slice(None)
        limit = budget("triton", device, torch.float32)
        assert relative_error(found[part], expected[part]) <= limit


@pytest.mark.parametrize("path", ("triton", "reference"))
@pytest.mark.parametrize(("stack", "dtype"), CASES, ids=str)
def test_gradients_of_the_decoded_weights(submodule, device, stack, path, dtype):
    problem = draw(submodule, stack, device, dtype)
    dx, yb, dgates = backward(submodule, problem, path)
    expected_dx, expected_yb, expected_dgates = exact(submodule, problem)
    rows = valid(problem["order"])
    assert relative_error(dx[rows], expected_dx[rows]) <= budget(path, device, dtype)
    assert (dx[~rows] == 0).all()
    if stack.rank is not None:
        assert relative_error(yb, expected_yb) <= budget(path, device, dtype)
    assert relative_error(dgates, expected_dgates) <= budget(path, device, dtype)
    assert dgates.isfinite().all()


def test_only_what_is_wanted(submodule, device):
    problem = draw(submodule, Stack(), device, torch.float32)
    dx, yb, dgates = backward(submodule, problem, "triton")
    none, low, same = backward(submodule, problem, "triton", wants_dx=False)
    assert none.shape == (0, 128)
    assert_same_bits(same, dgates)
    assert_same_bits(low, yb)
    again, _, none = backward(submodule, problem, "triton", wants_gates=False)
    assert_same_bits(again, dx)
    assert none.shape == (0,)


def test_opcheck(submodule, ops, device):
    problem = draw(submodule, Stack(), device, torch.float32)
    module = submodule("kernels.quant.grouped_lora_quantized")
    weights = module.quantized_operands(weights_of(submodule, problem, 1.0))
    rows = (*problem["order"].operands(), problem["gates"], problem["x"])
    arguments = (problem["dy"], *weights, *rows, TOP_K, TOP_K, True, True, 0, "reference")
    torch.library.opcheck(ops.grouped_lora_quantized_dx.default, arguments)
