"""Forward-mode derivatives through the experts: there are none, and none is made up."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad

from .._compare import assert_same_bits
from ._layers import LayerProblem

MESSAGE = "has no forward-mode derivative"


@pytest.fixture
def layer_and_inputs(moe, device):
    problem = LayerProblem()
    x, gates, _ = problem.inputs(device)
    return problem.module(moe, device), (x.detach(), problem.ids(device), gates.detach())


@pytest.mark.parametrize("operand", [0, 2], ids=["x", "gates"])
def test_jvp_through_the_experts(layer_and_inputs, operand) -> None:
    """A tangent of zeros, without a word, would train nothing."""
    layer, inputs = layer_and_inputs

    def call(value):
        return layer(*inputs[:operand], value, *inputs[operand + 1 :])

    tangent = torch.ones_like(inputs[operand])
    with pytest.raises(NotImplementedError, match=MESSAGE):
        torch.func.jvp(call, (inputs[operand],), (tangent,))
    with pytest.raises(NotImplementedError, match=MESSAGE):
        torch.func.jacfwd(call)(inputs[operand])
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=MESSAGE):
        call(forward_ad.make_dual(inputs[operand], tangent))


def test_jvp_of_a_parameter(layer_and_inputs) -> None:
    layer, inputs = layer_and_inputs
    name, weight = next(iter(layer.named_parameters()))

    def call(value):
        return torch.func.functional_call(layer, {name: value}, inputs)

    with pytest.raises(NotImplementedError, match=MESSAGE):
        torch.func.jvp(call, (weight.detach(),), (torch.ones_like(weight),))


@pytest.mark.parametrize("name", ["weight", "lora_a", "lora_b", "bias"])
def test_jvp_of_every_operand(moe, device, name) -> None:
    order = moe.expert_sort(torch.zeros(3, 1, dtype=torch.long, device=device), 2)
    shapes = {"weight": (2, 4, 6), "lora_a": (2, 1, 4), "lora_b": (2, 6, 1), "bias": (2, 6)}
    operands = {key: torch.ones(shape, device=device) for key, shape in shapes.items()}
    x = torch.ones(3, 4, device=device)

    def call(value):
        return moe.grouped_lora_linear(x, order=order, **{**operands, name: value})

    with pytest.raises(NotImplementedError, match=f"grouped_lora_linear {MESSAGE}"):
        torch.func.jvp(call, (operands[name],), (operands[name],))


def test_jvp_over_four_bit_experts(opt, device) -> None:
    """torch refuses a Function without one."""
    stored = torch.randn(2, 16, 64, device=device)
    packed = opt.moe.QuantizedExperts.from_weight(stored).transpose(1, 2)
    order = opt.moe.expert_sort(torch.zeros(3, 1, dtype=torch.long, device=device), 2)
    x = torch.ones(3, 64, device=device)
    with pytest.raises((NotImplementedError, RuntimeError), match=r"jvp|forward"):
        torch.func.jvp(lambda x: opt.moe.grouped_lora_linear(x, packed, order), (x,), (x,))


def test_jvp_of_the_activation(moe, device) -> None:
    x = torch.ones(3, 4, device=device)
    with pytest.raises(NotImplementedError, match=f"glu {MESSAGE}"):
        torch.func.jvp(lambda x: moe.glu(x, "silu"), (x,), (x,))


def test_constants_inside_of_a_jvp(layer_and_inputs) -> None:
    """What has no tangent may be used there."""
    layer, inputs = layer_and_inputs
    wanted = layer(*inputs).detach()
    one = torch.ones((), device=wanted.device)
    _, tangent = torch.func.jvp(lambda scale: scale * layer(*inputs).detach(), (one,), (one,))
    assert_same_bits(tangent, wanted)
