"""symmetric_matmul on every path: exact where sums are, both triangles equal, any layout."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .._compare import assert_error_at_most, assert_same_bits
from ..conftest import module_fixture
from ._products import DTYPES, PATTERNS, Problem, exact, laid_out, relaid

module = module_fixture("kernels.products.symmetric_matmul")

PATHS = ("public", pytest.param("reference", marks=pytest.mark.gpu))  # one on a CPU


@pytest.fixture(scope="session")
def multiply(module, dispatch):
    """`multiply(path, A=..., B=..., ...)`: the public function, or the same on one path's op."""

    def call(path: str, **arguments) -> torch.Tensor:
        if path == "public":
            return module.symmetric_matmul(**arguments)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dispatch, "path_name", lambda op, device: path)
            return module.symmetric_matmul(**arguments)

    return call


def assert_exact(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Bits must match, of both triangles too."""
    actual = actual.clone(memory_format=torch.contiguous_format)
    assert_same_bits(actual, actual.mT)
    actual, expected = actual + 0.0, expected + 0.0  # -0 and +0 are the same number
    assert_same_bits(actual, expected)


PROBLEMS = (
    Problem((), 1, 1),
    Problem((), 5, 3),
    Problem((3,), 64, 32),
    Problem((2,), 65, 33, alpha=0.5),
    Problem((2,), 96, 40, alpha=-2.0, beta=4.0),
    Problem((2,), 63, 129, beta=-0.5, diag=3.0),
    Problem((2,), 129, 64, alpha=0.25, beta=2.0, diag=-8.0, other=True),
    Problem((2, 3), 17, 31, diag=1.0, other=True),
    Problem((1,), 8, 2048, alpha=0.125),
    Problem((3,), 33, 0, beta=2.0, diag=0.5),
    Problem((3,), 33, 0),
)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_exact(multiply, device, path, problem, dtype):
    arguments = problem.operands(dtype, device)
    assert_exact(multiply(path, **arguments), exact(arguments, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("out", PATTERNS)
@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("path", PATHS)
def test_every_layout(multiply, device, path, pattern, out, dtype):
    """Operands and C in one layout, out in another; elements between those of out stay."""
    problem = Problem((2, 2), 44, 21, alpha=2.0, beta=0.5, diag=1.0, other=True)
    arguments = problem.operands(dtype, device)
    expected = exact(arguments, dtype)
    arguments = relaid(arguments, **dict.fromkeys("ABC", pattern))
    target = laid_out(torch.full_like(expected, torch.nan), out)
    assert multiply(path, **arguments, out=target) is target
    assert_exact(target, expected)


@pytest.mark.parametrize("shape", [(0, 4, 3), (2, 0, 3), (2, 0, 0), (0, 2, 4, 3), (0, 0)], ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_empty(multiply, device, path, shape):
    A = torch.zeros(shape, dtype=torch.float16, device=device)
    assert multiply(path, A=A, diag=1.0).shape == (*shape[:-1], shape[-2])


@pytest.mark.sees_defect("the symmetric product serves 2-D tensors only")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_a_matrix_gives_the_same_bits_in_any_batch(multiply, device, path, dtype):
    A = torch.randn(5, 70, 90, device=device).to(dtype)
    C = torch.randn(5, 70, 70, device=device).to(dtype)
    C = C.triu() + C.triu(1).mT
    scalars = {"alpha": 0.3, "beta": 0.7, "diag": 1.1}
    batch = multiply(path, A=A, C=C, **scalars)
    for i in range(len(A)):
        assert_same_bits(multiply(path, A=A[i], C=C[i], **scalars), batch[i])
        assert_same_bits(multiply(path, A=A[i:], C=C[i:], **scalars), batch[i:])


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_strides_change_no_bit(module, device, pattern, dtype):
    A = torch.randn(2, 70, 90, device=device).to(dtype)
    expected = module.symmetric_matmul(A, alpha=0.3, diag=0.1)
    actual = module.symmetric_matmul(laid_out(A, pattern), alpha=0.3, diag=0.1)
    assert_same_bits(actual, expected)


LARGE = ((1, 512, 2048), (1, 1024, 1024), (1, 2048, 4096))
GAUSSIAN = [(2, 192, 320), *(pytest.param(shape, marks=pytest.mark.gpu) for shape in LARGE)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", GAUSSIAN, ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_error_on_gaussian_operands(multiply, device, path, shape, dtype):
    """At most 1.02 times torch's product of the same dtype, 5 times in float32."""
    A = torch.randn(shape, device=device).to(dtype)
    C = A @ A.mT
    C = (C.triu() + C.triu(1).mT).contiguous()
    expected = -0.5 * (A.double() @ A.double().mT) + 0.25 * C.double()
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    library = torch.baddbmm(C, A, A.mT, beta=0.25, alpha=-0.5)
    torch.set_float32_matmul_precision(before)
    error = ((library.double() - expected).norm() / expected.norm()).item()
    factor = 5 if dtype == torch.float32 else 1.02
    actual = multiply(path, A=A, C=C, alpha=-0.5, beta=0.25)
    assert_error_at_most(actual, expected, factor * error)


@pytest.mark.parametrize("path", PATHS)
def test_scalars_are_applied_before_the_rounding(multiply, device, path):
    """1 - 1 + 2^-12: a product or a diagonal rounded to float16 on its own would lose the rest."""
    A = torch.tensor([[1.0, 2.0**-6], [0.0, 2.0**-6]], dtype=torch.float16, device=device)
    expected = torch.tensor([[2.0**-12, 2.0**-12]] * 2, device=device)
    expected[1, 1] -= 1
    actual = multiply(path, A=A, diag=-1.0)
    assert_same_bits(actual, expected.half())
    C = torch.eye(2, dtype=torch.float16, device=device)
    assert_same_bits(multiply(path, A=A, C=C, beta=-1.0), expected.half())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_each_matrix_has_its_scale(multiply, device, path, dtype):
    """It multiplies the product and beta C, not the diagonal; strided factors are read right."""
    problem = Problem((3, 2), 70, 33, alpha=0.5, beta=2.0, diag=3.0)
    arguments = problem.operands(dtype, device)
    factors = torch.tensor([[1.0, 0.5, 2.0], [0.25, 0.0, -4.0]], device=device)
    arguments["scale"] = factors.mT
    assert_exact(multiply(path, **arguments), exact(arguments, dtype))


def test_a_scale_of_one_matrix_has_no_dimension(module, device):
    A = torch.ones(4, 2, dtype=torch.float16, device=device)
    out = module.symmetric_matmul(A, scale=torch.tensor(0.5, device=device))
    assert_same_bits(out, torch.ones(4, 4, dtype=torch.float16, device=device))


@pytest.mark.parametrize("path", PATHS)
def test_c_is_not_read_without_beta(multiply, device, path):
    A = torch.ones(3, 4, dtype=torch.float16, device=device)
    C = torch.full((3, 3), torch.nan, dtype=torch.float16, device=device)
    assert_same_bits(multiply(path, A=A, C=C), torch.full_like(C, 4))


@pytest.mark.parametrize("pattern", ("contiguous", "transposed", "shifted"))
@pytest.mark.parametrize("path", PATHS)
def test_c_may_be_out(multiply, device, path, pattern):
    arguments = Problem((2,), 130, 20, beta=0.5, diag=2.0).operands(torch.float16, device)
    expected = exact(arguments, torch.float16)
    arguments["C"] = laid_out(arguments["C"], pattern)
    multiply(path, **arguments, out=arguments["C"])
    assert_exact(arguments["C"], expected)


def test_nan_stays_in_its_rows_columns_and_matrix(module, device):
    A = torch.ones(3, 70, 8, dtype=torch.float16, device=device)
    A[1, 5, 2] = torch.nan
    out = module.symmetric_matmul(A)
    bad = torch.zeros_like(out, dtype=torch.bool)
    bad[1, 5] = bad[1, :, 5] = True
    assert torch.equal(out.isnan(), bad)


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_problem(multiply, device, data):
    sides = st.integers(1, 150)
    problem = Problem(
        tuple(data.draw(st.lists(st.integers(1, 3), max_size=2))),
        data.draw(sides),
        data.draw(sides),
        alpha=data.draw(st.sampled_from((1.0, -0.5, 8.0))),
        beta=data.draw(st.sampled_from((0.0, 1.0, -4.0))),
        diag=data.draw(st.integers(-4, 4)),
        other=data.draw(st.booleans()),
    )
    dtype = data.draw(st.sampled_from(DTYPES))
    arguments = problem.operands(dtype, device, seed=data.draw(st.integers(0, 2**31)))
    expected = exact(arguments, dtype)
    *patterns, out = (data.draw(st.sampled_from(PATTERNS)) for _ in range(4))
    arguments = relaid(arguments, **dict(zip("ABC", patterns, strict=True)))
    target = laid_out(torch.full_like(expected, torch.nan), out)
    assert_exact(multiply("public", **arguments, out=target), expected)


def test_builds_no_autograd_graph_and_modifies_nothing(module, device):
    A = torch.randn(3, 4, device=device, requires_grad=True)
    before = A.detach().clone()
    assert not module.symmetric_matmul(A).requires_grad
    assert_same_bits(A, before)


def matrices(*shape: int, dtype: torch.dtype = torch.float16) -> torch.Tensor:
    return torch.zeros(shape, dtype=dtype)


WIDE, META = matrices(3, 3, dtype=torch.float32), matrices(3, 3).to("meta")
A = matrices(3, 4)
BAD = [
    (TypeError, {"A": [[1.0]]}, "A must be a dense tensor, got list"),
    (TypeError, {"A": A.to_sparse()}, "got torch.float16 with layout torch.sparse_coo"),
    (TypeError, {"A": A.double()}, "A must have float16, bfloat16 or float32, got torch.float64"),
    (ValueError, {"A": matrices(4)}, "A must be (..., m, k), got shape (4,)"),
    (TypeError, {"B": A.float()}, "B must have A's dtype torch.float16, got torch.float32"),
    (ValueError, {"B": A.mT}, "B must have the shape of A (3, 4), got (4, 3)"),
    (ValueError, {"B": A.to("meta")}, "B must be on the device of A"),
    (ValueError, {"C": A, "beta": 1.0}, "C must have shape (3, 3)"),
    (TypeError, {"C": WIDE}, "C must have A's dtype"),
    (ValueError, {"C": META}, "C must be on the device of A"),
    (ValueError, {"beta": 2.0}, "beta=2.0 scales C, which is None"),
    (TypeError, {"alpha": torch.tensor(1.0)}, "alpha must be a number, got torch.float32"),
    (TypeError, {"diag": None}, "diag must be a number, got NoneType"),
    (TypeError, {"beta": True}, "beta must be a number, got bool"),
    (TypeError, {"scale": 2.0}, "scale must be a float32 tensor, got float"),
    (TypeError, {"scale": matrices()}, "scale must be a float32 tensor, got torch.float16"),
    (ValueError, {"scale": torch.ones(3)}, "one factor per matrix of A, got (3,)"),
    (ValueError, {"scale": torch.ones((), device="meta")}, "scale must be on the device of A"),
    (ValueError, {"tile": "sm90_128x256"}, "is one of the compiled op's; cpu takes reference"),
    (TypeError, {"out": WIDE}, "out must be a dense tensor of A's dtype torch.float16, got torch"),
    (TypeError, {"out": 3}, "out must be a dense tensor of A's dtype torch.float16, got int"),
    (ValueError, {"out": A}, "out must have shape (3, 3), got (3, 4)"),
    (ValueError, {"out": META}, "out must be on the device of A"),
    (ValueError, {"out": matrices(1, 3).expand(3, 3)}, "out is an expanded tensor"),
]


@pytest.mark.parametrize(("error", "changed", "message"), BAD, ids=[row[2] for row in BAD])
def test_wrong_arguments_are_named(module, error, changed, message):
    with pytest.raises(error, match=re.escape(message)):
        module.symmetric_matmul(**{"A": A, **changed})


def test_tiles_are_named(module):
    assert module._tile_number("auto") == module.AUTO
    assert module._tile_number("64x128") == 1
    with pytest.raises(ValueError, match="tile='sm90_9x9' is unknown; name auto or one of 64x64, "):
        module._tile_number("sm90_9x9")


@pytest.mark.parametrize("name", "ABC")
def test_out_must_not_overlap_an_operand(module, device, name):
    buffer = torch.zeros(32, dtype=torch.float16, device=device)
    arguments = {key: torch.zeros(4, 4, dtype=torch.float16, device=device) for key in "ABC"}
    arguments[name] = buffer[:16].view(4, 4)
    with pytest.raises(ValueError, match=f"out overlaps {name} in memory"):
        module.symmetric_matmul(**arguments, beta=1.0, out=buffer[8:24].view(4, 4))
    module.symmetric_matmul(**arguments, beta=1.0, out=buffer[16:].view(4, 4))


@pytest.mark.parametrize("added", (False, True))
@pytest.mark.parametrize("path", ("picked", "reference"))
def test_opcheck(module, dispatch, device, path, added):
    path = dispatch.path_name("symmetric_matmul", device) if path == "picked" else path
    A = torch.randn(2, 20, 24, device=device)
    C = torch.zeros(2, 20, 20, device=device) if added else None
    out = torch.zeros(2, 20, 20, device=device)
    tile = (module.AUTO,) if path == "compiled" else ()
    op = module.ops.symmetric_matmul if tile else module.ops.symmetric_matmul_reference
    torch.library.opcheck(op.default, (A, A, C, out, 1.0, 1.0, 0.5, *tile))


def test_compiles_without_a_graph_break(module, device):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(A: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return module.symmetric_matmul(A * 1, C=A @ A.mT, beta=1.0, diag=1.0, out=out) + 1

    for m, k in ((8, 16), (12, 20), (24, 8)):
        A = Problem((2,), m, k).operands(torch.float32, device)["A"]
        out = torch.empty(2, m, m, device=device)
        expected = 2 * (A @ A.mT) + torch.eye(m, device=device)
        assert_same_bits(step(A, out), expected + 1)
        assert_same_bits(out, expected)


TILES = (0, 1, 2)
HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(scope="session")
def run_tile(module):
    """`run_tile(tile, A, B, C, alpha, beta, diag)`: the compiled op with a named tile."""

    def call(tile: int, A, B, C, alpha, beta, diag) -> torch.Tensor:
        m = A.shape[-2]
        out = torch.full((A.shape[0], m, m), torch.nan, dtype=A.dtype, device=A.device)
        module.ops.symmetric_matmul(A, A if B is None else B, C, out, alpha, beta, diag, tile)
        return out

    return call


# Sides around the tiles' own (64, 128), and k around the depth of a stage (64).
SIDES = (1, 7, 64, 65, 127, 128, 129, 200, 255, 256, 257, 520)
DEPTHS = (1, 15, 64, 65, 191, 192, 1000)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", ("padded", "transposed-padded", "shifted"))
@pytest.mark.parametrize("tile", TILES)
def test_every_tile_is_exact(run_tile, device, tile, pattern, dtype):
    for m in SIDES:
        for k in DEPTHS:
            problem = Problem((2,), m, k, alpha=0.5, beta=2.0, diag=3.0, other=True)
            arguments = problem.operands(dtype, device, seed=m + k)
            expected = exact(arguments, dtype)
            actual = run_tile(tile, **relaid(arguments, **dict.fromkeys("ABC", pattern)))
            assert torch.equal(actual, expected), (m, k)
            assert_same_bits(actual, actual.mT)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_tiles_and_layouts_give_the_same_bits(run_tile, device, dtype):
    """Every element is one sum over growing k, whoever computes it."""
    A = torch.randn(2, 300, 777, device=device).to(dtype)
    expected = run_tile(0, A, None, None, 0.3, 0.0, 0.1)
    for tile in TILES:
        for pattern in PATTERNS:
            actual = run_tile(tile, laid_out(A, pattern), None, None, 0.3, 0.0, 0.1)
            assert_same_bits(actual, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("side", (1023, 2048, 2049, 4097))
def test_big_matrices_are_exact(module, device, side, dtype):
    problem = Problem((), side, 2048, alpha=0.25, beta=-2.0, diag=1.0)
    for pattern in ("padded", "contiguous", "transposed"):
        arguments = problem.operands(dtype, device)
        expected = exact(arguments, dtype)
        arguments["A"] = laid_out(arguments["A"], pattern)
        actual = module.symmetric_matmul(**arguments)
        assert torch.equal(actual, expected)
        assert_same_bits(actual, actual.mT)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("powers", ((0, 0), (1, 1), (2, 1), (2, 0), (0, 1), (0, 2)), ids=str)
def test_powers_of_the_scale(module, device, powers, dtype):
    """As if alpha and beta were numbers of their own for every matrix; exact, in both families."""
    arguments = Problem((4,), 200, 72, beta=2.0, diag=3.0).operands(dtype, device)
    scale = torch.tensor((1.0, 0.5, 0.0, -2.0), device=device)
    A, C = arguments["A"], arguments["C"]
    hopper = torch.cuda.get_device_capability(device) == (9, 0) and dtype != torch.float32
    for tile in (module.AUTO, *range(len(module.TILES))) if hopper else TILES:
        out = torch.full_like(C, torch.nan)
        module.ops.symmetric_matmul(A, A, C, out, 1.0, 2.0, 3.0, tile, scale, *powers)
        for k, s in enumerate(scale.tolist()):
            scalars = {"alpha": s ** powers[0], "beta": 2 * s ** powers[1], "diag": 3.0}
            one = {"A": A[k], "B": None, "C": C[k], **scalars}
            assert torch.equal(out[k], exact(one, dtype)), (tile, k)
    with pytest.raises(RuntimeError, match="a power must be 0, 1 or 2, got 3"):
        module.ops.symmetric_matmul(A, A, C, out, 1.0, 2.0, 3.0, module.AUTO, scale, 3, 1)
