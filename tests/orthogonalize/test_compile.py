"""The methods inside torch.compile, fake tensors, CUDA graphs, and next to TF32."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_same_bits, relative_error
from ._matrices import matrix

METHODS = ("polar_express", "gram_newton_schulz", "newton_schulz")


@pytest.fixture
def compiled(opt):
    torch._dynamo.reset()
    yield torch.compile(opt.orthogonalize, fullgraph=True, backend="aot_eager")
    torch._dynamo.reset()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("method", METHODS)
def test_compiles_without_graph_break(opt, compiled, device, method) -> None:
    x = torch.randn(3, 6, 10, device=device)
    assert_same_bits(compiled(x, method), opt.orthogonalize(x, method))


def test_steps_may_change(opt, compiled, device) -> None:
    """From the second value on the compiler makes a number symbolic, unless it is told not to."""
    x = torch.randn(5, 9, device=device)
    for steps in (5, 3, 6, 5):
        assert_same_bits(compiled(x, steps=steps), opt.orthogonalize(x, steps=steps))


def test_many_shapes_need_few_graphs(opt, compiled, device) -> None:
    """More shapes than the compiler's limit of 8 graphs: sizes become symbolic, methods do not."""
    for m in range(4, 9):
        for n in (m, m + 1, 2 * m, 40):
            for shape in ((m, n), (n, m)):
                x = torch.randn(shape, device=device)
                assert_same_bits(compiled(x), opt.orthogonalize(x))


def test_compiled_out_and_options(opt, device) -> None:
    torch._dynamo.reset()
    rows = [(1.5, -0.5, 0.0), (1.875, -1.25, 0.375)]

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        opt.newton_schulz(x + 1, 2, rows, torch.float32, out=out)
        gram = opt.gram_newton_schulz(x, 5, "you", (1, 3))
        return out * 2 + gram + opt.polar_express(x, 4, lower=0.01)

    x, out = torch.randn(4, 7, device=device), torch.empty(4, 7, device=device)
    result = step(x, out)
    wanted = opt.newton_schulz(x + 1, 2, rows, torch.float32)
    assert_same_bits(out, wanted)
    gram = opt.gram_newton_schulz(x, 5, "you", (1, 3))
    assert_same_bits(result, wanted * 2 + gram + opt.polar_express(x, 4, lower=0.01))


@pytest.mark.parametrize("module", ["newton_schulz", "gram_newton_schulz"])
def test_opcheck(submodule, device, module) -> None:
    """Schema, fake implementation and functionalization of the registered ops."""
    op = getattr(submodule("_ops").ops, module).default
    x, out = torch.randn(2, 4, 6, device=device), torch.empty(2, 4, 6, device=device)
    rows = [3.4445, -4.7750, 2.0315] * 3
    restarts = [[1]] if module == "gram_newton_schulz" else []
    torch.library.opcheck(op, (x, out, rows, 1.0, *restarts, torch.float32))


def test_fake_tensors(opt) -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        x = torch.empty(3, 5, 40)
        result = opt.orthogonalize(x)
    assert (result.shape, result.dtype) == (x.shape, torch.float32)


def test_meta_tensors(opt) -> None:
    result = opt.orthogonalize(torch.empty(3, 5, 40, device="meta"), dtype=torch.bfloat16)
    assert (result.shape, result.dtype, result.device.type) == ((3, 5, 40), torch.bfloat16, "meta")


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(5, 96, 384), (256, 256), (3, 130, 70)], ids=str)
def test_cuda_graph(opt, device, shape) -> None:
    """No wait for the device on the path: a captured call replays with new input."""
    x, out = torch.randn(shape, device=device), torch.empty(shape, device=device)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        opt.orthogonalize(x, out=out)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        opt.orthogonalize(x, out=out)
    x.copy_(torch.randn(shape, device=device))
    graph.replay()
    captured = out.clone()
    assert_same_bits(captured, opt.orthogonalize(x, out=out))


@pytest.mark.gpu
def test_no_synchronization(opt, device) -> None:
    x = torch.randn(9, 64, 256, device=device)
    opt.orthogonalize(x)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for method in METHODS:
            opt.orthogonalize(x, method)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["high", "medium"])
@pytest.mark.parametrize("method", METHODS)
def test_reduced_precision_never_enters_float32_iterates(opt, device, method, precision) -> None:
    """`torch.set_float32_matmul_precision` allows TF32 on CUDA, bfloat16 or TF32 on the CPU."""
    x = matrix("gaussian", 128, 512).float().to(device)
    strict = opt.orthogonalize(x, method, dtype=torch.float32)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        assert_same_bits(opt.orthogonalize(x, method, dtype=torch.float32), strict)
        assert torch.get_float32_matmul_precision() == precision
        loose = x @ x.mT
    finally:
        torch.set_float32_matmul_precision(before)
    if device.type == "cuda":  # the switch had an effect elsewhere
        assert relative_error(loose, x.double() @ x.double().mT) > 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype", "limit"),
    [
        ((64, 768, 2048), torch.float16, 640),
        ((64, 768, 2048), torch.float32, 512),
        ((40, 1024, 1024), torch.bfloat16, 640),
    ],
    ids=str,
)
@pytest.mark.parametrize("method", METHODS)
def test_workspace_is_bounded(opt, device, method, shape, dtype, limit) -> None:
    x, out = torch.randn(shape, device=device), torch.empty(shape, device=device, dtype=dtype)
    opt.orthogonalize(x[:1], method, dtype=dtype)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    opt.orthogonalize(x, method, dtype=dtype, out=out)
    assert torch.cuda.max_memory_allocated() - before <= limit * 2**20
