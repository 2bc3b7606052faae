"""Products of some matrices of a batch, as the device chose them."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_same_bits
from ._chains import CHAINS
from ._grams import listed

pytestmark = pytest.mark.gpu

HALF = torch.float16
BATCH = 40
SUBSETS = ([], [0], [39], [3, 4, 17, 39], list(range(0, 40, 2)), list(range(40)))


@pytest.fixture(scope="session", autouse=True)
def hopper(device):
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("machine code for compute capability 9.0")


@pytest.fixture
def ops(submodule):
    return submodule("_ops").ops


def matrices(*shape: int, device: torch.device, seed: int = 0) -> torch.Tensor:
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5
    return x.to(device).half()


def check(found: torch.Tensor, whole: torch.Tensor, numbers: list[int]) -> None:
    others = [i for i in range(len(found)) if i not in numbers]
    assert found[others].isnan().all(), "a matrix outside of the subset was written"
    assert_same_bits(found[numbers], whole[numbers])


@pytest.mark.parametrize("numbers", SUBSETS, ids=len)
@pytest.mark.parametrize("m", [136, 264])
def test_symmetric_matmul(ops, submodule, device, m, numbers) -> None:
    A = matrices(BATCH, m, 200, device=device)
    C = matrices(BATCH, m, m, device=device, seed=1)
    C = C + C.mT
    scale, subset = torch.linspace(0.5, 2, BATCH, device=device), listed(numbers, device, BATCH)
    tiles = submodule("kernels.symmetric_matmul").TILES
    for tile in (-1, *(i for i, name in enumerate(tiles) if name.startswith("sm90"))):
        whole, found = (torch.full_like(C, torch.nan) for _ in range(2))
        options = (0.75, -1.5, 0.5, tile, scale, 2, 1, False, False)
        ops.symmetric_matmul(A, A, C, whole, *options)
        ops.symmetric_matmul(A, A, C, found, *options, subset)
        check(found, whole, numbers)


@pytest.mark.parametrize("numbers", SUBSETS, ids=len)
def test_matmul_add(ops, submodule, device, numbers) -> None:
    A, B = matrices(BATCH, 136, 136, device=device), matrices(BATCH, 136, 520, device=device)
    scale, subset = torch.linspace(0.5, 2, BATCH, device=device), listed(numbers, device, BATCH)
    for tile in range(-1, len(submodule("kernels.matmul_add").TILES)):
        whole, found = (torch.full_like(B, torch.nan) for _ in range(2))
        ops.matmul_add(A, B, B, whole, 1.0, 0.5, tile, scale, 0)
        ops.matmul_add(A, B, B, found, 1.0, 0.5, tile, scale, 0, subset)
        check(found, whole, numbers)


@pytest.mark.parametrize("numbers", SUBSETS, ids=len)
@pytest.mark.parametrize("groups", [0, 1, 7, BATCH])
def test_square_chain(submodule, device, numbers, groups) -> None:
    """Matrices that are left out hold NaN: a square that read them would spread it."""
    chain = submodule("kernels.square_chain").square_chain
    A = matrices(BATCH, 264, 264, device=device)
    A = (A @ A.mT) / 8
    scale, subset = torch.linspace(0.5, 1, BATCH, device=device), listed(numbers, device, BATCH)
    whole = chain(A.clone(), CHAINS["second"], scale, keep=True)
    others = [i for i in range(BATCH) if i not in numbers]
    A[others] = torch.nan
    kept = A.clone()
    found = chain(A, CHAINS["second"], scale, groups, keep=True, subset=subset)
    assert_same_bits(A, kept)
    block = torch.arange(264, device=device) // 128
    above = block[:, None] <= block
    assert_same_bits(found[numbers][:, above], whole[numbers][:, above])


def test_what_the_ops_refuse(ops, device) -> None:
    A = matrices(4, 136, 136, device=device)
    out, subset = torch.empty_like(A), listed([1], device, 4)
    options = (1.0, 0.0, 0.0, -1, None, 1, 1, False, False)
    for wrong in (subset[:-1], subset.long(), subset.cpu(), subset[:, None]):
        with pytest.raises(RuntimeError, match="subset must be"):
            ops.symmetric_matmul(A, A, None, out, *options, wrong)
    with pytest.raises(RuntimeError, match="needs the sm90 tiles"):
        ops.symmetric_matmul(A, A, None, out, *options[:3], 0, *options[4:], subset)
    single = A.float()
    with pytest.raises(RuntimeError, match="needs the sm90 tiles"):
        ops.symmetric_matmul(single, single, None, out.float(), *options, subset)
