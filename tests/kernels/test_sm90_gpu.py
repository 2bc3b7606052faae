"""The sm_90a tiles of symmetric_matmul and matmul_add, by name: exact, stable, refused in words.

Operands lie in memory that is NaN between their elements (the deterministic mode of conftest fills
it), so that a copy that reaches too far shows; outputs are NaN before and must stay so outside.

Upper storage: symmetric matrices of which blocks of 128 x 128 below the diagonal do not exist.

They are NaN here, in operands and outputs: nothing may read them, nothing may write them. Every
result has the bits of the same call on whole matrices.
"""

import functools

import pytest
import torch

from .._compare import assert_same_bits
from ..conftest import module_fixture
from ._products import Problem, below, exact, laid_out, relaid, run_dense

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

symmetric = module_fixture("kernels.products.symmetric_matmul", "symmetric_matmul")

HALVES = (torch.float16, torch.bfloat16)
SYMMETRIC = ("sm90_128x256", "sm90_128x128", "sm90_64x128", "sm90_128x192")
EVERY = (*SYMMETRIC, "128x128")  # with one of the tiles for other GPUs
DENSE = ("sm90_128x256", "sm90_256x128", "sm90_128x128")
DENSE_OR_AUTO = ("auto", *DENSE)
# Around the sides of tiles and instructions; a stage holds 64 of k, a ring 3, 5 or 7 stages.
SIDES = (1, 7, 63, 64, 65, 127, 128, 129, 200, 255, 256, 257, 384, 520, 777)
DEPTHS = (1, 15, 63, 64, 65, 128, 191, 192, 193, 320, 321, 448, 449, 1000)


@pytest.fixture(scope="session")
def dense(ops):
    return functools.partial(run_dense, ops)


class Framed:
    """A NaN output of rows on 16 bytes inside a larger buffer, and whether its frame stayed NaN."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> None:
        *lead, rows, cols = shape
        pitch = -(-cols // 8) * 8 + 8
        self.buffer = torch.full((*lead, rows + 2, pitch), torch.nan, dtype=dtype, device=device)
        self.out = self.buffer[..., 1 : rows + 1, :cols]

    def intact(self) -> bool:
        inside = torch.zeros_like(self.buffer, dtype=torch.bool)
        inside[..., 1 : self.out.shape[-2] + 1, : self.out.shape[-1]] = True
        return bool(self.buffer[~inside].isnan().all())


def check(run, arguments: dict, expected: torch.Tensor, what: object) -> None:
    frame = Framed(expected.shape, expected.dtype, expected.device)
    run(**arguments, out=frame.out)
    assert torch.equal(frame.out, expected), what
    assert frame.intact(), what


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("pattern", ("padded", "transposed-padded"))
@pytest.mark.parametrize("added", (False, True))
@pytest.mark.parametrize("tile", SYMMETRIC)
def test_symmetric_is_exact(symmetric, device, tile, added, pattern, dtype):
    scalars = {"alpha": 0.5, "beta": 2.0 * added, "diag": 3.0}
    for m in SIDES:
        for k in DEPTHS:
            problem = Problem((2,), m, k, other=added, **scalars)
            arguments = problem.operands(dtype, device, seed=m + k)
            expected = exact(arguments, dtype)
            arguments = relaid(arguments, **dict.fromkeys("ABC", pattern))
            check(symmetric, {**arguments, "tile": tile}, expected, (m, k))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("added", (False, True))
@pytest.mark.parametrize("b", ("padded", "transposed-padded"))
@pytest.mark.parametrize("a", ("padded", "transposed-padded"))
@pytest.mark.parametrize("tile", DENSE)
def test_dense_is_exact(dense, device, tile, a, b, added, dtype):
    for m, n in ((1, 1), (7, 300), (64, 64), (129, 257), (256, 128), (300, 8), (520, 777)):
        for k in DEPTHS:
            problem = Problem((2,), m, k, n, alpha=0.5, beta=2.0 * added, scaled=added)
            arguments = problem.operands(dtype, device, seed=m + n + k)
            expected = exact(arguments, dtype)
            arguments = relaid(arguments, A=a, B=b, C="padded")
            check(dense, {**arguments, "tile": tile}, expected, (m, n, k))


@pytest.mark.parametrize("tile", DENSE)
def test_a_transposed_out_is_the_transposed_problem(dense, device, tile):
    arguments = Problem((3,), 200, 136, 72, beta=2.0).operands(torch.float16, device)
    expected = exact(arguments, torch.float16)
    arguments = relaid(arguments, **dict.fromkeys("ABC", "transposed-padded"))
    out = laid_out(torch.full_like(expected, torch.nan), "transposed-padded")
    dense(**arguments, out=out, tile=tile)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("side", (1024, 2048, 2056, 4104))
@pytest.mark.parametrize("tile", SYMMETRIC)
def test_big_symmetric_is_exact(symmetric, device, tile, side, dtype):
    """Several tiles per block, and in place."""
    arguments = Problem((), side, 2048, alpha=0.25, beta=-2.0, diag=1.0).operands(dtype, device)
    expected = exact(arguments, dtype)
    symmetric(**arguments, out=arguments["C"], tile=tile)
    assert torch.equal(arguments["C"], expected)


def stable(run, A, B, C, tile: str, other: str, **options) -> torch.Tensor:
    """The result, which has the same bits in every batch and run, and by the other tile."""
    options |= {"alpha": 0.3, "beta": 0.7}
    first = run(A, B, C=C, **options, tile=tile)
    assert_same_bits(run(A, B, C=C, **options, tile=other), first)
    for batch in (1, 2, 7, len(A) - 1):
        some = run(A[-batch:], B[-batch:], C=C[-batch:], **options, tile=tile)
        assert_same_bits(some, first[-batch:])
    for _ in range(30):
        assert torch.equal(run(A, B, C=C, **options, tile=tile), first)
    return first


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("tile", SYMMETRIC)
def test_symmetric_bits(symmetric, device, tile, dtype):
    """Also equal triangles of operands that do not commute."""
    A = torch.randn(300, 264, 136, device=device).to(dtype)
    B = torch.randn(300, 264, 136, device=device).to(dtype)  # A B^T is not symmetric: upper counts
    C = torch.randn(300, 264, 264, device=device).to(dtype)
    C = C.triu() + C.triu(1).mT
    found = stable(symmetric, A, B, C, tile, SYMMETRIC[0], diag=1.1)
    assert_same_bits(found, found.mT)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("tile", DENSE)
def test_dense_bits(dense, device, tile, dtype):
    A = torch.randn(100, 264, 136, device=device).to(dtype)
    B = torch.randn(100, 136, 520, device=device).to(dtype)
    C = torch.randn(100, 264, 520, device=device).to(dtype)
    stable(dense, A, B, C, tile, DENSE[0])


@pytest.mark.parametrize("tile", EVERY)
def test_strides_beyond_two_to_the_31_elements(submodule, device, tile):
    """The op itself: the rows of operands, C and out interleave, which the function refuses."""
    module = submodule("kernels.products.symmetric_matmul")
    m, k, stride = 70, 40, 2**25
    buffer = torch.zeros((m - 1) * stride + 1024, dtype=torch.float16, device=device)
    assert (m - 1) * stride > 2**31
    arguments = Problem((), m, k, beta=1.0, diag=1.0).operands(torch.float16, device)
    expected = exact(arguments, torch.float16)
    A = buffer.as_strided((1, m, k), (0, stride, 1)).copy_(arguments["A"])
    C = buffer.as_strided((1, m, m), (0, stride, 1), 128).copy_(arguments["C"])
    out = buffer.as_strided((1, m, m), (0, stride, 1), 512)
    columns = buffer.as_strided((1, k, m), (0, stride, 1), 768).copy_(arguments["A"].mT)
    for x in (A, columns.mT):
        out.fill_(torch.nan)
        module.ops.symmetric_matmul(x, x, C, out, 1.0, 1.0, 1.0, module._tile_number(tile))
        assert torch.equal(out[0], expected)


@pytest.mark.parametrize("tile", EVERY)
def test_batches_beyond_two_to_the_31_elements(symmetric, device, tile):
    A = Problem((2,), 2704, 16).operands(torch.float16, device)["A"]
    arguments = {"A": A, "B": None, "C": None, "alpha": 1, "diag": 0}
    expected = exact(arguments, torch.float16)
    many = torch.cat((A[:1].expand(299, -1, -1), A[1:]))
    out = torch.full((300, 2704, 2704), torch.nan, dtype=torch.float16, device=device)
    assert out.numel() > 2**31
    symmetric(many, out=out, tile=tile)
    assert torch.equal(out[299], expected[1])
    for first in range(0, 299, 23):
        assert (out[first : min(first + 23, 299)] == expected[0]).all()


REFUSED = {
    "TMA cannot read an operand": lambda x: {"A": laid_out(x, "shifted")},
    "TMA cannot write out": lambda x: {"A": x, "out": laid_out(x @ x.mT, "every-third")},
    "the same dimension": lambda x: {"A": x, "B": laid_out(x, "transposed")},
    "k is 0": lambda x: {"A": x[..., :0]},
    "float16 or bfloat16": lambda x: {"A": x.float()},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_a_tile_cannot_serve_is_refused_in_words(symmetric, device, reason):
    x = torch.ones(2, 64, 64, dtype=torch.float16, device=device)
    with pytest.raises(RuntimeError, match=reason):
        symmetric(**REFUSED[reason](x), tile="sm90_128x128")
    assert symmetric(x).isfinite().all()  # the device still works


@pytest.mark.parametrize("tile", DENSE_OR_AUTO)
def test_dense_scalars_are_applied_before_the_rounding(ops, device, tile):
    """1 - 1 + 2^-12: a product rounded to float16 on its own would lose the rest."""
    A = torch.zeros(1, 8, 8, dtype=torch.float16, device=device)
    A[:, :, 0], A[:, :, 1] = 1.0, 2.0**-6
    C = torch.ones(1, 8, 8, dtype=torch.float16, device=device)
    expected = torch.full((1, 8, 8), 2.0**-12, dtype=torch.float16, device=device)
    assert_same_bits(run_dense(ops, A, A.mT, C=C, beta=-1.0, tile=tile), expected)
    scale = torch.tensor([4.0], device=device)
    found = run_dense(ops, A, A.mT, C=C, beta=-1.0, scale=scale, tile=tile)
    assert_same_bits(found, 4 * expected)


@pytest.mark.parametrize("tile", DENSE_OR_AUTO)
def test_dense_c_may_be_out_and_is_not_read_without_beta(ops, device, tile):
    arguments = Problem((2,), 136, 24, 72, beta=0.5).operands(torch.float16, device)
    expected = exact(arguments, torch.float16)
    run_dense(ops, **arguments, out=arguments["C"], tile=tile)
    assert torch.equal(arguments["C"], expected)
    A = torch.ones(1, 8, 8, dtype=torch.float16, device=device)
    C = torch.full_like(A, torch.nan)
    assert_same_bits(run_dense(ops, A, A, C=C, tile=tile), torch.full_like(A, 8))


@pytest.mark.parametrize("added", (False, True))
def test_dense_opcheck(ops, device, added):
    A, B = (torch.randn(2, *s, device=device).half() for s in ((16, 24), (24, 16)))
    C = torch.zeros(2, 16, 16, device=device, dtype=torch.float16) if added else None
    out = torch.zeros(2, 16, 16, device=device, dtype=torch.float16)
    scale = torch.ones(2, device=device)
    arguments = (A, B, C, out, 1.0, 0.5 if added else 0.0, -1, scale)
    torch.library.opcheck(ops.matmul_add.default, arguments)


UPPER_SIDES = (8, 120, 128, 136, 192, 256, 264, 384, 520, 768, 1000, 1024)  # rows on 16 bytes


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
@pytest.mark.parametrize("m", UPPER_SIDES)
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
            for tile in (0, 1, 2, -1):
                expected = torch.full(shape, torch.nan, device=device, dtype=torch.float16)
                found = expected.clone()
                ops.matmul_add(left, right, C, expected, *options, tile, scale)
                given = (upper(left), right) if which == 1 else (left, upper(right))
                ops.matmul_add(*given, C, found, *options, tile, scale, which)
                assert_same_bits(found, expected)
