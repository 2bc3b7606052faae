"""The products of experts under autocast: what torch.nn.functional.linear does of its operands."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from .._compare import assert_same_bits
from ._eager import Problem
from .conftest import gradients
from .test_parallel_linear import draw, unstable_sort

LOW = torch.bfloat16
PROBLEMS = (
    Problem(33, bias=True, peft=True),
    Problem(29, gates=True, bias=True, lora_dtype=torch.bfloat16),
    Problem(21, rank=None, grouped_in=True, grouped_out=True),
)


def operands(problem, device, dtypes):
    """Leaves of a problem in float32, x and weight with the values and the dtypes given.

    All values can be had in bfloat16, so that casting them there and back loses nothing.
    """
    leaves = dataclasses.replace(problem, dtype=LOW, lora_dtype=LOW).inputs(device)
    kept = {"x": dtypes[0], "weight": dtypes[1], "bias": dtypes[1], "gates": torch.float32}
    return {
        name: value
        if value is None
        else value.detach().to(kept.get(name, problem.lora_dtype)).requires_grad_()
        for name, value in leaves.items()
    }


@pytest.mark.kernels_ci
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize(
    "dtypes",
    [
        (LOW, torch.float32),
        (torch.float32, torch.float32),
        (torch.float32, LOW),
        (torch.float16,) * 2,
    ],
    ids=str,
)
def test_operands_are_cast(run, device, problem, dtypes):
    """Bit for bit the product of operands in autocast's dtype; gradients in the parameters'."""
    leaves = operands(problem, device, dtypes)
    ids = problem.ids(device)
    grad = torch.randn(problem.grad_shape(), device=device).to(LOW)
    with torch.autocast(device.type, dtype=LOW):
        found = run(problem, leaves, ids, grad)
        linear = F.linear(leaves["x"], leaves["x"])
    assert found["y"].dtype == linear.dtype == LOW
    narrow = operands(problem, device, (LOW, LOW))
    wanted = run(problem, narrow, ids, grad)
    for name, value in wanted.items():
        own = LOW if name == "y" else leaves[name].dtype
        assert_same_bits(found[name], value.to(own))


def test_gradients_are_those_of_linear(moe, device):
    """One expert for all tokens is a linear layer: dtypes of results and gradients are its."""
    x = torch.randn(7, 24, device=device, requires_grad=True)
    weight = torch.randn(40, 24, device=device, requires_grad=True)
    order = moe.expert_sort(torch.zeros(7, 1, dtype=torch.long, device=device), 1)
    with torch.autocast(device.type, dtype=LOW):
        y = moe.grouped_lora_linear(x, weight.T[None], order)
        wanted = F.linear(x, weight)
    assert y.dtype == wanted.dtype
    found = torch.autograd.grad(y.sum(), (x, weight))
    for one, other in zip(found, torch.autograd.grad(wanted.sum(), (x, weight)), strict=True):
        assert one.dtype == other.dtype == torch.float32
        torch.testing.assert_close(one, other, rtol=2**-7, atol=2**-7)


@pytest.mark.parametrize("float_x", [LOW, torch.float32], ids=str)
def test_four_bit_experts(opt, run, device, float_x):
    """x is cast, and the weight decoded to its dtype."""
    problem = Problem(33, bias=True, gates=True)
    leaves = operands(problem, device, (float_x, torch.float32))
    stored = leaves["weight"].detach().transpose(1, 2).contiguous()
    packed = opt.moe.QuantizedExperts.from_weight(stored).transpose(1, 2)
    ids = problem.ids(device)
    grad = torch.randn(problem.grad_shape(), device=device).to(LOW)
    with torch.autocast(device.type, dtype=LOW):
        found = four_bit(opt, problem, leaves, packed, ids, grad)
        inside = four_bit(opt, problem, leaves, packed, ids, grad, backward_inside=True)
    narrow = {**leaves, **{k: leaves[k].detach().to(LOW) for k in ("x", "bias")}}
    for name in ("x", "bias"):
        narrow[name].requires_grad_()
    wanted = four_bit(opt, problem, narrow, packed, ids, grad)
    for name, value in wanted.items():
        own = LOW if name == "y" else leaves[name].dtype
        assert_same_bits(found[name], value.to(own))
        assert_same_bits(inside[name], value.to(own))


def four_bit(opt, problem, leaves, packed, ids, grad, *, backward_inside=False):
    order = opt.moe.expert_sort(ids, problem.experts)
    y = opt.moe.grouped_lora_linear(
        leaves["x"],
        packed,
        order,
        leaves["lora_a"],
        leaves["lora_b"],
        scaling=problem.scaling,
        bias=leaves["bias"],
        gates=leaves["gates"],
    )
    trained = {name: x for name, x in leaves.items() if name != "weight"}
    with torch.autocast(ids.device.type, enabled=backward_inside, dtype=LOW):
        found = gradients(y, {**trained, "weight": None}, grad)
    return {"y": y.detach(), **found}


@pytest.mark.parametrize("x_dtype", [LOW, torch.float32], ids=str)
def test_the_predecessors_call(moe, device, x_dtype):
    shape = (8, 32, 16, 20, 2, 4)
    ids, leaves = draw(shape, device, LOW)
    experts = shape[0]
    leaves = {name: x.detach().float() for name, x in leaves.items()}
    leaves["x"] = leaves["x"].to(x_dtype)

    def call(x, weight):
        sorted_ids = unstable_sort(ids, experts)
        return moe.parallel_linear_lora(
            x, weight.mT, 2, *sorted_ids, leaves["lora_A"], leaves["lora_B"], 2.0
        )

    with torch.autocast(device.type, dtype=LOW):
        found = call(leaves["x"], leaves["weight"])
    assert_same_bits(found, call(leaves["x"].to(LOW), leaves["weight"].to(LOW)))


def test_what_autocast_leaves_alone(moe, device):
    """As linear: float64 operands are not cast, and do not go with others."""
    order = moe.expert_sort(torch.zeros(3, 1, dtype=torch.long, device=device), 1)
    x, weight = torch.ones(3, 4, device=device), torch.ones(1, 4, 2, device=device)
    with torch.autocast(device.type, dtype=LOW):
        wide = moe.grouped_lora_linear(x.double(), weight.double(), order)
        assert wide.dtype == torch.float64
        with pytest.raises(TypeError, match=r"weight must have dtype bfloat16, got torch\.float64"):
            moe.grouped_lora_linear(x, weight.double(), order)


def test_merging_is_not_cast(moe, device):
    """The delta of an adapter is formed in float32 wherever it is merged."""
    layers = []
    for enabled in (False, True):
        torch.manual_seed(0)
        layer = moe.Experts(3, 16, 24, device=device)
        layer.add_adapter(r=4, alpha=8)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
        with torch.autocast(device.type, dtype=LOW, enabled=enabled):
            layer.merge()
        layers.append(layer)
    assert_same_bits(layers[1].down_proj, layers[0].down_proj)
    assert_same_bits(layers[1].gate_up_proj, layers[0].gate_up_proj)


@pytest.mark.parametrize("weight_dtype", [torch.float32, LOW], ids=str)
def test_compiled(moe, device, weight_dtype):
    torch._dynamo.reset()
    problem = Problem(33, gates=True)
    leaves = operands(problem, device, (LOW, weight_dtype))
    order = moe.expert_sort(problem.ids(device), problem.experts)

    def product(x, weight, gates):
        return moe.grouped_lora_linear(x, weight, order, gates=gates)

    compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
    with torch.autocast(device.type, dtype=LOW):
        operand = (leaves["x"], leaves["weight"], leaves["gates"])
        found, wanted = compiled(*operand), product(*operand)
    assert_same_bits(found, wanted)
    trained = list(operand)
    for one, other in zip(
        torch.autograd.grad(found.float().sum(), trained),
        torch.autograd.grad(wanted.float().sum(), trained),
        strict=True,
    ):
        assert_same_bits(one, other)
    torch._dynamo.reset()
