"""glu on every path: values and gradients of each gated activation against torch in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from ..._compare import assert_error_at_most, assert_same_bits

PATHS = ("reference", "triton")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "gpt_oss")


@pytest.fixture(scope="session")
def module(submodule):
    """The module kernels.experts.glu of the loaded package."""
    return submodule("kernels.experts.glu")


def by_hand(gate_up, activation, interleaved):
    """The definition in float64, written apart from the shipped reference."""
    half = gate_up.shape[1] // 2
    gate, up = (
        (gate_up[:, 0::2], gate_up[:, 1::2])
        if interleaved
        else (gate_up[:, :half], gate_up[:, half:])
    )
    if activation == "gpt_oss":
        gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
        return (up + 1) * gate / (1 + torch.exp(-1.702 * gate))
    act = {
        "silu": lambda g: g / (1 + torch.exp(-g)),
        "gelu": lambda g: 0.5 * g * (1 + torch.erf(g / 2**0.5)),
        "gelu_tanh": lambda g: F.gelu(g, approximate="tanh"),
        "relu": torch.relu,
        "relu2": lambda g: torch.relu(g) ** 2,
    }[activation]
    return act(gate) * up


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("path", PATHS)
def test_value_and_gradient(module, device, path, activation, interleaved, dtype):
    """Clamps are met (values to 12); float32 may lose digits where exp or erf are approximate."""
    generator = torch.Generator().manual_seed(0)
    drawn = (4 * torch.randn(5, 26, generator=generator)).to(device, dtype)
    leaf, exact = drawn.clone().requires_grad_(), drawn.double().requires_grad_()
    grad = torch.randn(5, 13, generator=generator).to(device, dtype)
    actual = module.glu(leaf, activation, interleaved=interleaved, backend=path)
    expected = by_hand(exact, activation, interleaved)
    assert actual.dtype == dtype
    budget = 2 * torch.finfo(dtype).eps
    assert_error_at_most(actual, expected, budget)
    (found,) = torch.autograd.grad(actual, leaf, grad)
    (right,) = torch.autograd.grad(expected, exact, grad.double())
    assert found.dtype == dtype
    assert_error_at_most(found, right, budget)


@pytest.mark.parametrize("path", PATHS)
def test_strided_and_empty(module, device, path):
    drawn = torch.randn(6, 8, device=device)
    expected = module.glu(drawn, backend=path)
    strided = torch.stack((drawn, drawn), 2)[..., 0]
    assert_same_bits(module.glu(strided, backend=path), expected)
    assert module.glu(drawn[:0], backend=path).shape == (0, 4)


def test_backward_twice_is_right_and_second_order_raises(module, device):
    leaf = torch.randn(3, 8, device=device, requires_grad=True)
    y = module.glu(leaf).sum()
    (first,) = torch.autograd.grad(y, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(y, leaf, create_graph=True)
    assert_same_bits(first, second)
    with pytest.raises(RuntimeError):
        second.sum().backward()


def test_opcheck(ops, device):
    gate_up = torch.randn(3, 8, device=device)
    for path in PATHS:
        torch.library.opcheck(ops.glu.default, (gate_up, "silu", False, path))
        torch.library.opcheck(
            ops.glu_backward.default, (gate_up[:, :4], gate_up, "gpt_oss", True, path)
        )
    leaf = gate_up.requires_grad_()
    torch.library.opcheck(ops.glu.default, (leaf, "silu", False, "reference"))


def test_wrong_arguments(module):
    with pytest.raises(ValueError, match=r"gate_up must be \(M, 2I\)"):
        module.glu(torch.ones(2, 5))
    with pytest.raises(ValueError, match="activation must be one of"):
        module.glu(torch.ones(2, 4), "swish")
    with pytest.raises(TypeError, match="gate_up must have dtype"):
        module.glu(torch.ones(2, 4, dtype=torch.int64))
