"""What symmetric_matmul promises on a CUDA device: every tile, big sizes, capture, wide offsets."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_same_bits, relative_error
from ._symmetric import DTYPES, PATTERNS, Problem, exact, laid_out

pytestmark = pytest.mark.gpu

TILES = (0, 1, 2)
HALVES = (torch.float16, torch.bfloat16)


@pytest.fixture(scope="session")
def module(submodule):
    return submodule("kernels.products.symmetric_matmul")


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("pattern", ("padded", "transposed-padded", "shifted"))
@pytest.mark.parametrize("tile", TILES)
def test_every_tile_is_exact(run_tile, device, tile, pattern, dtype):
    for m in SIDES:
        for k in DEPTHS:
            problem = Problem((2,), m, k, alpha=0.5, beta=2.0, diag=3.0, other=True)
            arguments = problem.operands(dtype, device, seed=m + k)
            expected = exact(arguments, dtype)
            for name in "ABC":
                arguments[name] = laid_out(arguments[name], pattern)
            actual = run_tile(tile, **arguments)
            assert torch.equal(actual, expected), (m, k)
            assert_same_bits(actual, actual.mT)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_tiles_and_layouts_give_the_same_bits(run_tile, device, dtype):
    """Every element is one sum over growing k, whoever computes it."""
    A = torch.randn(2, 300, 777, device=device).to(dtype)
    expected = run_tile(0, A, None, None, 0.3, 0.0, 0.1)
    for tile in TILES:
        for pattern in PATTERNS:
            actual = run_tile(tile, laid_out(A, pattern), None, None, 0.3, 0.0, 0.1)
            assert_same_bits(actual, expected)


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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("batch", (1, 2, 37, 300))
def test_any_batch(module, device, batch, dtype):
    """Exact, and on Gaussian operands the same bits as the last matrix alone."""
    arguments = Problem((batch,), 193, 129, diag=2.0).operands(dtype, device)
    assert torch.equal(module.symmetric_matmul(**arguments), exact(arguments, dtype))
    A = torch.randn(batch, 193, 129, device=device).to(dtype)
    assert_same_bits(module.symmetric_matmul(A[-1]), module.symmetric_matmul(A)[-1])


def test_strides_beyond_two_to_the_31_elements(module, device):
    """Operands, C and out whose last rows lie more than 2**31 elements behind the first."""
    m, k, stride = 70, 40, 2**25
    buffer = torch.zeros((m - 1) * stride + 1024, dtype=torch.float16, device=device)
    assert (m - 1) * stride > 2**31
    arguments = Problem((), m, k, beta=1.0, diag=1.0).operands(torch.float16, device)
    expected = exact(arguments, torch.float16)
    A = buffer.as_strided((1, m, k), (0, stride, 1)).copy_(arguments["A"])
    C = buffer.as_strided((1, m, m), (0, stride, 1), 128).copy_(arguments["C"])
    out = buffer.as_strided((1, m, m), (0, stride, 1), 512)
    module.ops.symmetric_matmul(A, A, C, out, 1.0, 1.0, 1.0, module.AUTO)
    assert torch.equal(out[0], expected)
    columns = buffer.as_strided((1, k, m), (0, stride, 1), 768).copy_(arguments["A"].mT)
    assert (k - 1) * stride > 2**30
    module.ops.symmetric_matmul(columns.mT, columns.mT, C, out, 1.0, 1.0, 1.0, module.AUTO)
    assert torch.equal(out[0], expected)


def test_batches_beyond_two_to_the_31_elements(module, device):
    A = Problem((2,), 2700, 16).operands(torch.float16, device)["A"]
    expected = exact({"A": A, "B": None, "C": None, "alpha": 1, "diag": 0}, torch.float16)
    many = A[:1].expand(299, -1, -1).contiguous()
    many = torch.cat((many, A[1:]))
    out = torch.full((300, 2700, 2700), torch.nan, dtype=torch.float16, device=device)
    assert out.numel() > 2**31
    module.ops.symmetric_matmul(many, many, None, out, 1.0, 0.0, 0.0, module.AUTO)
    assert torch.equal(out[299], expected[1])
    for first in range(0, 299, 23):
        assert (out[first : min(first + 23, 299)] == expected[0]).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", ((512, 2048), (1024, 1024), (2048, 4096)), ids=str)
def test_error_is_that_of_cublas(module, device, shape, dtype):
    A = torch.randn(*shape, device=device).to(dtype)
    C = module.symmetric_matmul(A)
    expected = A.double() @ A.double().mT * -0.5 + 0.25 * C.double()
    library = relative_error(torch.addmm(C, A, A.mT, beta=0.25, alpha=-0.5), expected)
    ours = relative_error(module.symmetric_matmul(A, alpha=-0.5, C=C, beta=0.25), expected)
    assert ours <= (5 if dtype == torch.float32 else 1.02) * library


def test_graph_capture_replays_with_new_contents(module, device):
    A = torch.randn(3, 200, 300, device=device).half()
    C = module.symmetric_matmul(A)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module.symmetric_matmul(A, C=C, beta=0.5, diag=1.0)
    A.copy_(torch.randn(3, 200, 300))
    C.copy_(module.symmetric_matmul(A))
    graph.replay()
    assert_same_bits(out, module.symmetric_matmul(A, C=C, beta=0.5, diag=1.0))


def test_runs_on_the_current_stream(module, device):
    A = torch.randn(3, 200, 300, device=device).half()
    expected = module.symmetric_matmul(A)
    late, stream = torch.zeros_like(A), torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        late.copy_(A)
        out = module.symmetric_matmul(late)
    stream.synchronize()
    assert_same_bits(out, expected)


def test_compiles_with_inductor(module, device):
    A = torch.randn(2, 70, 40, device=device).half()
    step = torch.compile(lambda x: module.symmetric_matmul(x, diag=1.0) * 2, fullgraph=True)
    assert_same_bits(step(A), module.symmetric_matmul(A, diag=1.0) * 2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("powers", ((0, 0), (1, 1), (2, 1), (2, 0), (0, 1), (0, 2)), ids=str)
def test_powers_of_the_scale(module, device, powers, dtype):
    """As if alpha and beta were numbers of their own for every matrix; exact, in both families."""
    arguments = Problem((4,), 200, 72, beta=2.0, diag=3.0).operands(dtype, device)
    scale = torch.tensor((1.0, 0.5, 0.0, -2.0), device=device)
    A, C = arguments["A"], arguments["C"]
    tiles = TILES if dtype == torch.float32 else (module.AUTO, *TILES)
    for tile in tiles:
        out = torch.full_like(C, torch.nan)
        module.ops.symmetric_matmul(A, A, C, out, 1.0, 2.0, 3.0, tile, scale, *powers)
        for k, s in enumerate(scale.tolist()):
            scalars = {"alpha": s ** powers[0], "beta": 2 * s ** powers[1], "diag": 3.0}
            one = {"A": A[k], "B": None, "C": C[k], **scalars}
            assert torch.equal(out[k], exact(one, dtype)), (tile, k)
    with pytest.raises(RuntimeError, match="a power must be 0, 1 or 2, got 3"):
        module.ops.symmetric_matmul(A, A, C, out, 1.0, 2.0, 3.0, module.AUTO, scale, 3, 1)
