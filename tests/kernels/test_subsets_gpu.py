"""Products of some matrices of a batch, and how the device chooses them."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_same_bits
from ._chains import CHAINS

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


def listed(numbers: list[int], device: torch.device, batch: int = BATCH) -> torch.Tensor:
    """What the kernels take; behind the last number lies what must not be read as one."""
    filled = [len(numbers), *numbers, *[2**30] * (batch - len(numbers))]
    return torch.tensor(filled, dtype=torch.int32, device=device)


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
    scale, subset = torch.linspace(0.5, 2, BATCH, device=device), listed(numbers, device)
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
    scale, subset = torch.linspace(0.5, 2, BATCH, device=device), listed(numbers, device)
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
    scale, subset = torch.linspace(0.5, 1, BATCH, device=device), listed(numbers, device)
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


def grams(device: torch.device, m: int) -> torch.Tensor:
    """Gram matrices: Gaussian 1:8 to 1:1, rank 1, zero, NaN, the identity."""
    generator = torch.Generator().manual_seed(0)
    x = [torch.randn(m, k * m, generator=generator) for k in (8, 4, 3, 2, 1)]
    x += [torch.ones(m, m), torch.zeros(m, m), torch.full((m, m), torch.nan), torch.eye(m)]
    return torch.stack([(y @ y.mT) / y.shape[-1] for y in x]).to(device).half()


@pytest.mark.parametrize("m", [136, 264, 520])
def test_find_well_conditioned(submodule, device, m) -> None:
    module = submodule("kernels.subsets")
    R = grams(device, m)
    below = torch.arange(m, device=device) // 128
    tried = module.find_well_conditioned(
        R.masked_fill(below[:, None] > below, torch.inf), 1.02, 0.65, m
    )
    factors, roots = submodule("kernels.norm_factors").norm_factors(R, 1.02, symmetric=True)
    torch.testing.assert_close(tried.factors, factors, rtol=3e-7, atol=0, equal_nan=True)
    torch.testing.assert_close(tried.roots, roots, rtol=3e-7, atol=0, equal_nan=True)
    wide = R.double()
    mean = wide.diagonal(dim1=-2, dim2=-1).mean(-1)
    spread = (wide.square().sum((-2, -1)) / (m * mean * mean) - 1).clamp_min(0).sqrt()
    expected = spread <= 0.65
    assert expected.tolist() == [True, True, True, False, False, False, False, False, True]
    assert tried.found.bool().tolist() == expected.tolist()
    assert tried.subset[: 1 + 4].tolist() == [4, 0, 1, 2, 8]
    u = torch.where(expected, 1 / (mean * (1 + spread).square()), 0)
    torch.testing.assert_close(tried.narrow_factors.double(), u, rtol=3e-7, atol=0)
    torch.testing.assert_close(tried.narrow_roots.double(), u.sqrt(), rtol=3e-7, atol=0)
    for i in range(len(R)):
        alone = module.find_well_conditioned(R[i : i + 1], 1.02, 0.65, m)
        for one, many in zip(alone[:5], tried[:5], strict=True):
            assert_same_bits(one, many[i : i + 1])


def test_zeros_that_fill_a_matrix_up_are_not_counted(submodule, device) -> None:
    """133 rows and three of zeros: the moments and the residual of the 133."""
    module, side, m = submodule("kernels.subsets"), 133, 136
    R = torch.zeros(9, m, m, device=device, dtype=HALF)
    R[:, :side, :side] = grams(device, side)
    tried = module.find_well_conditioned(R, 1.02, 0.65, side)
    assert tried.subset[:5].tolist() == [4, 0, 1, 2, 8]
    torch.testing.assert_close(tried.narrow_factors[8].item(), 1.0)
    E = torch.zeros_like(R)
    E.diagonal(dim1=-2, dim2=-1)[:, side:] = -1
    E[1, 0, 0] = (0.003 * side) ** 0.5
    E[2, 0, 0] = (0.005 * side) ** 0.5
    rest = module.find_converged(E, 0.004, side, tried)
    assert tried.subset[:4].tolist() == [3, 0, 1, 8]
    assert rest[:7].tolist() == [6, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("batch", [9, 300, 700])
def test_find_converged(submodule, device, batch) -> None:
    """The bound is of the mean square per row; what was not tried is not looked at."""
    module, m = submodule("kernels.subsets"), 136
    generator = torch.Generator().manual_seed(batch)
    size = 10 ** torch.empty(batch).uniform_(-3, 0, generator=generator)
    E = torch.randn(batch, m, m, generator=generator).triu()
    E = (E + E.triu(1).mT) / m**0.5 * size[:, None, None]
    tried = torch.rand(batch, generator=generator) < 0.7
    E[~tried], E[tried.nonzero()[0]] = 0, torch.nan
    E, tried = E.to(device).half(), tried.to(device)
    state = module.WellConditioned(
        *torch.empty(4, batch, device=device).unbind(),
        tried.int(),
        listed(tried.nonzero().flatten().tolist(), device, batch),
    )
    rest = module.find_converged(E, 0.004, m, state)
    expected = tried & (E.double().square().sum((-2, -1)) <= 0.004 * m)
    assert 0 < expected.sum() < tried.sum()
    assert state.found.bool().tolist() == expected.tolist()
    for subset, wanted in ((state.subset, expected), (rest, ~expected)):
        numbers = wanted.nonzero().flatten().tolist()
        assert subset[: 1 + len(numbers)].tolist() == [len(numbers), *numbers]


def test_opcheck_and_wrong_arguments(ops, device) -> None:
    R = grams(device, 136)
    G = len(R)

    def lists():
        return (torch.zeros(n, dtype=torch.int32, device=device) for n in (G, 1 + G, 1 + G))

    found, subset, rest = lists()
    factors = torch.empty(4, G, device=device)
    arguments = (R.nan_to_num(), 1.02, 0.65, 136, factors, found, subset)
    utils = ("test_schema", "test_faketensor")
    torch.library.opcheck(ops.find_well_conditioned.default, arguments, test_utils=utils)
    converged = (R.nan_to_num(), 0.004, 136, found, subset, rest)
    torch.library.opcheck(ops.find_converged.default, converged, test_utils=utils)
    for wrong, reason in (
        ((R.float(), 1.02, 0.65, 136, factors, found, subset), "float16"),
        ((R[:, :128, :128], 1.02, 0.65, 136, factors, found, subset), "m > 128"),
        ((R, 1.02, 0.65, 136, factors[:3], found, subset), r"\(4, G\)"),
        ((R, 1.02, 0.65, 136, factors, found[1:], subset), "found must be"),
        ((R, 0.0, 0.65, 136, factors, found, subset), "prefactor"),
        ((R, 1.02, 0.65, 137, factors, found, subset), "side must be"),
    ):
        with pytest.raises(RuntimeError, match=reason):
            ops.find_well_conditioned(*wrong)
