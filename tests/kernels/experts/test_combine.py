"""combine on every path: gate-weighted sums of a token's rows, sentinels left out."""

from __future__ import annotations

import pytest
import torch

from ..._compare import assert_error_at_most, assert_same_bits

PATHS = ("reference", "triton")
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(scope="session")
def module(submodule):
    """The module kernels.experts.combine of the loaded package."""
    return submodule("kernels.experts.combine")


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
