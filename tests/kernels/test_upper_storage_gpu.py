"""Upper storage: symmetric matrices of which blocks of 128 x 128 below the diagonal do not exist.

They are NaN here, in operands and outputs: nothing may read them, nothing may write them. Every
result has the bits of the same call on whole matrices.
"""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_same_bits

pytestmark = pytest.mark.gpu

SIDES = (8, 120, 128, 136, 192, 256, 264, 384, 520, 768, 1000, 1024)  # rows on 16 bytes
BLOCK = 128


@pytest.fixture(scope="session", autouse=True)
def hopper(device):
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("machine code for compute capability 9.0")


@pytest.fixture
def ops(submodule):
    return submodule("_ops").ops


def below(m: int, device: torch.device) -> torch.Tensor:
    """(m, m): whether an element lies in a block below the diagonal."""
    block = torch.arange(m, device=device) // BLOCK
    return block[:, None] > block


def symmetric_matrices(batch: int, m: int, device: torch.device) -> torch.Tensor:
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(batch, m, m, generator=generator) / m**0.5
    return ((x + x.mT) / 2).to(device).half()


def upper(x: torch.Tensor) -> torch.Tensor:
    return x.masked_fill(below(x.shape[-1], x.device), torch.nan)


def check_upper(actual: torch.Tensor, whole: torch.Tensor) -> None:
    lower = below(whole.shape[-1], whole.device)
    assert actual[:, lower].isnan().all(), "a block below the diagonal was written"
    assert_same_bits(actual.masked_fill(lower, 0), whole.masked_fill(lower, 0))


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("m", SIDES)
def test_gram_matrices_and_products(ops, device, m, tall):
    """X X^T into upper storage, and M X or X M from it, for X by rows or by columns."""
    n = m + 72
    generator = torch.Generator().manual_seed(m)
    x = torch.randn(5, m, n, generator=generator).to(device).half() / n**0.5
    rows = x.mT.contiguous().mT if tall else x  # what a tall slice gives
    whole = torch.full((5, m, m), torch.nan, device=device, dtype=torch.float16)
    out = whole.clone()
    ops.symmetric_matmul(rows, rows, None, whole, 1.0, 0.0, 0.0, -1)
    ops.symmetric_matmul(rows, rows, None, out, 1.0, 0.0, 0.0, -1, None, 1, 1, True)
    check_upper(out, whole)
    scale = torch.linspace(0.5, 2, 5, device=device)
    B = symmetric_matrices(5, m, device)
    operands = [(B, x, 1), (B, x.mT.contiguous().mT, 1)]
    operands += [(x.mT, B, 2), (x.mT.contiguous(), B, 2)]
    for left, right, which in operands:
        shape = (5, left.shape[1], right.shape[2])
        for C in (None, torch.randn(shape, generator=generator).to(device).half()):
            options = (2.0, 0.0 if C is None else 0.5)
            for tile in (0, 2, 3, -1):
                expected = torch.full(shape, torch.nan, device=device, dtype=torch.float16)
                found = expected.clone()
                ops.matmul_add(left, right, C, expected, *options, tile, scale)
                given = (upper(left), right) if which == 1 else (left, upper(right))
                ops.matmul_add(*given, C, found, *options, tile, scale, which)
                assert_same_bits(found, expected)


def test_what_upper_storage_refuses(ops, device):
    A = symmetric_matrices(2, 256, device)
    out, X = torch.empty_like(A), torch.randn(2, 256, 64, device=device).half()
    product = (1.0, 0.0, 0.0, -1, None, 1, 1)
    with pytest.raises(RuntimeError, match="float16"):
        ops.symmetric_matmul(A.bfloat16(), A.bfloat16(), None, out.bfloat16(), *product, True)
    with pytest.raises(RuntimeError, match="square"):
        ops.matmul_add(X.mT.contiguous(), A, None, X.mT.contiguous(), 1.0, 0.0, -1, None, 1)
    with pytest.raises(RuntimeError, match="upper must be"):
        ops.matmul_add(A, X, None, X.clone(), 1.0, 0.0, -1, None, 3)
    with pytest.raises(RuntimeError, match="TMA"):
        shifted = torch.empty(2, 256, 260, device=device, dtype=torch.float16)[..., 1:257]
        ops.symmetric_matmul(shifted, shifted, None, out, *product, True)
