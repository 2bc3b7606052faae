"""combine and glu on every path: a token's gated sum of rows, and each activation in float64."""

import pytest
import torch
import torch.nn.functional as F

from ..._compare import assert_error_at_most, assert_same_bits
from ...conftest import module_fixture

PATHS = ("reference", "triton")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


module = module_fixture("kernels.experts.combine")


def problem(device, dtype, tokens=7, top_k=3, n=40, valid=17, seed=0):
    """y, gates, rows, offsets; rows from `valid` on are sentinels and hold NaN."""
    generator = torch.Generator().manual_seed(seed)
    total = tokens * top_k
    rows = torch.randperm(total, generator=generator)
    y = torch.randn(total, n, generator=generator).to(dtype)
    y[valid:] = torch.nan
    gates = torch.randn(tokens, top_k, generator=generator)
    offsets = torch.tensor([0, 4, valid])
    return tuple(part.to(device) for part in (y, gates, rows, offsets))


def by_hand(y, gates, rows, offsets, top_k):
    out = torch.zeros(rows.numel() // top_k, y.shape[1], dtype=torch.float64)
    for slot, row in enumerate(rows.tolist()):
        if row < int(offsets[-1]):
            weight = 1.0 if gates is None else gates.reshape(-1)[slot].double().cpu()
            out[slot // top_k] += weight * y[row].double().cpu()
    return out


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("path", PATHS)
def test_sums(module, device, path, gated, dtype):
    y, gates, rows, offsets = problem(device, dtype)
    gates = gates if gated else None
    actual = module.combine(y, gates, rows, offsets, 3, backend=path)
    assert actual.dtype == dtype
    eps = 2 * torch.finfo(dtype).eps  # one rounding, or the interpreter's truncation
    assert_error_at_most(actual.cpu(), by_hand(y, gates, rows, offsets, 3), eps)


@pytest.mark.parametrize("path", PATHS)
def test_strides_and_repeats(module, device, path):
    y, gates, rows, offsets = problem(device, torch.float32)
    expected = module.combine(y, gates, rows, offsets, 3, backend=path)
    strided = torch.stack((y, y), 2)[..., 0]
    again = module.combine(strided, gates.T.contiguous().T, rows, offsets, 3, backend=path)
    assert_same_bits(again, expected)


@pytest.mark.parametrize("path", PATHS)
def test_no_tokens(module, device, path):
    y, gates, rows, offsets = problem(device, torch.float32, tokens=0, valid=0)
    out = module.combine(y, gates, rows, offsets, 3, backend=path)
    assert out.shape == (0, 40)


def test_opcheck(ops, device):
    for path in PATHS:
        torch.library.opcheck(
            ops.combine.default, (*problem(device, torch.float32, valid=21), 3, path)
        )


@pytest.mark.parametrize("path", PATHS)
def test_no_columns(module, device, path):
    y, gates, rows, offsets = problem(device, torch.float32)
    out = module.combine(y[:, :0], gates, rows, offsets, 3, backend=path)
    assert out.shape == (len(gates), 0)


def test_wrong_arguments(module, device):
    y, gates, rows, offsets = problem(device, torch.float32)
    with pytest.raises(ValueError, match=r"gates must be \(T, k\)"):
        module.combine(y, gates[:-1], rows, offsets, 3)
    with pytest.raises(ValueError, match=r"y must be \(R, N\)"):
        module.combine(y[:-1], gates, rows, offsets, 3)
    with pytest.raises(ValueError, match="top_k must divide"):
        module.combine(y, None, rows, offsets, 4)
    with pytest.raises(TypeError, match="rows must have dtype"):
        module.combine(y, gates, rows.int(), offsets, 3)
    with pytest.raises(ValueError, match="must be on the device"):
        module.combine(y, gates.to("meta"), rows, offsets, 3)


ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2", "gpt_oss")


module_glu = module_fixture("kernels.experts.glu")


def by_hand_glu(gate_up, activation, interleaved):
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
def test_value_and_gradient(module_glu, device, path, activation, interleaved, dtype):
    """Clamps are met (values to 12); float32 may lose digits where exp or erf are approximate."""
    generator = torch.Generator().manual_seed(0)
    drawn = (4 * torch.randn(5, 26, generator=generator)).to(device, dtype)
    leaf, exact = drawn.clone().requires_grad_(), drawn.double().requires_grad_()
    grad = torch.randn(5, 13, generator=generator).to(device, dtype)
    actual = module_glu.glu(leaf, activation, interleaved=interleaved, backend=path)
    expected = by_hand_glu(exact, activation, interleaved)
    assert actual.dtype == dtype
    budget = 2 * torch.finfo(dtype).eps
    assert_error_at_most(actual, expected, budget)
    (found,) = torch.autograd.grad(actual, leaf, grad)
    (right,) = torch.autograd.grad(expected, exact, grad.double())
    assert found.dtype == dtype
    assert_error_at_most(found, right, budget)


@pytest.mark.parametrize("path", PATHS)
def test_strided_and_empty(module_glu, device, path):
    drawn = torch.randn(6, 8, device=device)
    expected = module_glu.glu(drawn, backend=path)
    strided = torch.stack((drawn, drawn), 2)[..., 0]
    assert_same_bits(module_glu.glu(strided, backend=path), expected)
    assert module_glu.glu(drawn[:0], backend=path).shape == (0, 4)


def test_backward_twice_is_right_and_second_order_raises(module_glu, device):
    leaf = torch.randn(3, 8, device=device, requires_grad=True)
    y = module_glu.glu(leaf).sum()
    (first,) = torch.autograd.grad(y, leaf, retain_graph=True)
    (second,) = torch.autograd.grad(y, leaf, create_graph=True)
    assert_same_bits(first, second)
    with pytest.raises(RuntimeError):
        second.sum().backward()


def test_opcheck_glu(ops, device):
    gate_up = torch.randn(3, 8, device=device)
    for path in PATHS:
        torch.library.opcheck(ops.glu.default, (gate_up, "silu", False, path))
        torch.library.opcheck(
            ops.glu_backward.default, (gate_up[:, :4], gate_up, "gpt_oss", True, path)
        )
    leaf = gate_up.requires_grad_()
    torch.library.opcheck(ops.glu.default, (leaf, "silu", False, "reference"))


def test_wrong_arguments_glu(module_glu):
    with pytest.raises(ValueError, match=r"gate_up must be \(M, 2I\)"):
        module_glu.glu(torch.ones(2, 5))
    with pytest.raises(ValueError, match="activation must be one of"):
        module_glu.glu(torch.ones(2, 4), "swish")
    with pytest.raises(TypeError, match="gate_up must have dtype"):
        module_glu.glu(torch.ones(2, 4, dtype=torch.int64))
