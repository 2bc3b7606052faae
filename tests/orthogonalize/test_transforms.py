"""What callers put around the methods: torch.compile, torch.func, CUDA graphs, autocast, TF32."""

import threading

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from .._compare import assert_same_bits, capture, no_waits, relative_error
from ._matrices import ALL_METHODS, METHODS, matrix


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def test_many_shapes_need_few_graphs(opt, device, fresh_compiler) -> None:
    """More shapes than the compiler's limit of 8 graphs: sizes become symbolic, methods do not."""
    compiled = torch.compile(opt.orthogonalize, fullgraph=True, backend="aot_eager")
    for m in range(4, 9):
        for n in (m, m + 1, 2 * m, 40):
            for shape in ((m, n), (n, m)):
                x = torch.randn(shape, device=device)
                assert_same_bits(compiled(x), opt.orthogonalize(x))


def test_compiled_out_and_options(opt, device, fresh_compiler) -> None:
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


ROWS = [3.4445, -4.7750, 2.0315] * 3
OPTIONS = {
    "newton_schulz": (ROWS, 1.0),
    "gram_newton_schulz": (ROWS, 1.0, [1]),
    "gram_polynomial": (),
}


@pytest.mark.parametrize("module", OPTIONS)
def test_opcheck(submodule, device, module) -> None:
    op = getattr(submodule("_ops").ops, module).default
    x, out = torch.randn(2, 4, 6, device=device), torch.empty(2, 4, 6, device=device)
    torch.library.opcheck(op, (x, out, *OPTIONS[module], torch.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["auto", "gram_polynomial"])
@pytest.mark.parametrize("shape", [(5, 96, 384), (256, 256), (3, 130, 70)], ids=str)
def test_cuda_graph(opt, device, shape, method) -> None:
    """No wait for the device on the path: a captured call replays with new input."""
    x, out = torch.randn(shape, device=device), torch.empty(shape, device=device)
    graph, _ = capture(lambda: opt.orthogonalize(x, method, out=out), 1)
    x.copy_(torch.randn(shape, device=device))
    graph.replay()
    captured = out.clone()
    assert_same_bits(captured, opt.orthogonalize(x, method, out=out))


@pytest.mark.gpu
def test_no_synchronization(opt, device) -> None:
    x = torch.randn(9, 64, 256, device=device)
    opt.orthogonalize(x)
    with no_waits():
        for method in ALL_METHODS:
            opt.orthogonalize(x, method)


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
@pytest.mark.parametrize("method", ALL_METHODS)
def test_workspace_is_bounded(opt, device, method, shape, dtype, limit) -> None:
    if method == "gram_polynomial" and dtype == torch.bfloat16:
        dtype = torch.float32  # it refuses bfloat16, and needs less than that for twice the bytes
        limit = 512
    x, out = torch.randn(shape, device=device), torch.empty(shape, device=device, dtype=dtype)
    opt.orthogonalize(x[:1], method, dtype=dtype)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    opt.orthogonalize(x, method, dtype=dtype, out=out)
    assert torch.cuda.max_memory_allocated() - before <= limit * 2**20


@pytest.mark.kernels_ci
@pytest.mark.parametrize("method", [*ALL_METHODS, "auto"])
@pytest.mark.parametrize("in_dim", [0, 1, 2])
def test_vmap(opt, device, method, in_dim) -> None:
    """One call over the batch, wherever its dimension is, and nested."""
    x = torch.randn(3, 5, 9, device=device)
    wanted = opt.orthogonalize(x, method)

    def call(matrix):
        assert matrix.shape == (5, 9)
        return opt.orthogonalize(matrix, method)

    moved = x.movedim(0, in_dim)
    assert_same_bits(torch.vmap(call, in_dims=in_dim)(moved), wanted)
    twice = torch.vmap(torch.vmap(call, in_dims=in_dim), out_dims=1)(moved[None])
    assert_same_bits(twice, wanted[:, None])


def test_vmap_with_out(opt, device) -> None:
    """One `out` for each call is written; one for all of them, or x itself, is refused."""
    x, out = torch.randn(3, 5, 9, device=device), torch.empty(3, 5, 9, device=device)
    kept = x.clone()
    torch.vmap(lambda m, o: opt.orthogonalize(m, out=o))(x, out)
    wanted = opt.orthogonalize(x, out=torch.empty_like(out))
    assert_same_bits(out, wanted)
    torch.vmap(lambda o: opt.orthogonalize(x[0], out=o))(out)
    assert_same_bits(out, wanted[:1].expand(3, 5, 9).contiguous())
    with pytest.raises(ValueError, match=r"out is one tensor \(5, 9\) for all 3 calls"):
        torch.vmap(lambda m: opt.orthogonalize(m, out=out[0]))(x)
    with pytest.raises(ValueError, match="out overlaps x in memory"):
        torch.vmap(lambda m: opt.orthogonalize(m, out=m))(x)
    assert_same_bits(x, kept)


def test_gradients_pass_it_by(opt, device) -> None:
    """As outside of transforms it is a constant, alone and under vmap."""
    x = torch.randn(3, 5, 9, device=device)

    def inner(matrix):
        return (opt.orthogonalize(matrix, dtype=torch.float32) * matrix).sum()

    wanted = opt.orthogonalize(x, dtype=torch.float32)
    assert_same_bits(torch.func.grad(inner)(x[0]), wanted[0])
    assert_same_bits(torch.vmap(torch.func.grad(inner))(x), wanted)


@pytest.mark.parametrize("name", ["orthogonalize", *METHODS])
def test_compiled_for_any_size_and_options(opt, device, fresh_compiler, name) -> None:
    """dynamic=True makes sizes and numbers symbolic at once, unless it is told not to."""
    method = getattr(opt, name)
    compiled = torch.compile(method, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((5, 9), (3, 7, 11), (8, 4)):
        x = torch.randn(shape, device=device)
        assert_same_bits(compiled(x), method(x))
    for steps in (3, 6):
        assert_same_bits(compiled(x, steps=steps), method(x, steps=steps))
    if name == "polar_express":
        for lower in (0.01, 0.02, 0.5):
            options = {"lower": lower, "safety": lower / 2, "cushion": 0.1}
            assert_same_bits(compiled(x, 4, **options), method(x, 4, **options))
        assert_same_bits(compiled(x, lower=1), method(x, lower=1))


REGISTERED_METHODS = {
    "newton_schulz": "newton_schulz",
    "polar_express": "newton_schulz",
    "gram_newton_schulz": "gram_newton_schulz",
    "gram_polynomial": "gram_polynomial",
}


class Recorded:
    """The package's ops, and the names of those that were called."""

    def __init__(self, ops, called: list[str]) -> None:
        self.ops, self.called = ops, called

    def __getattr__(self, name):
        def call(*arguments):
            self.called.append(name)
            return getattr(self.ops, name)(*arguments)

        return call


@pytest.fixture
def called(submodule, monkeypatch) -> list[str]:
    called: list[str] = []
    for name in set(REGISTERED_METHODS.values()):
        module = submodule(f"orthogonalize.{name}")
        monkeypatch.setattr(module, "ops", Recorded(module.ops, called))
    return called


@pytest.mark.parametrize("method", REGISTERED_METHODS)
def test_an_eager_call_passes_the_op_by(opt, called, device, method) -> None:
    """The same bits as the op, and autograd knows what was written."""
    x, out = torch.randn(3, 4, 6, device=device), torch.empty(3, 4, 6, device=device)
    before = out._version
    opt.orthogonalize(x, method, dtype=torch.float32, out=out)
    assert called == []
    assert out._version > before

    class Watched(torch.Tensor):
        pass

    by_op = torch.empty_like(out)
    opt.orthogonalize(x, method, dtype=torch.float32, out=by_op.as_subclass(Watched))
    assert called == [REGISTERED_METHODS[method]]
    assert_same_bits(out, by_op)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("method", REGISTERED_METHODS)
def test_a_compiler_sees_one_op(opt, device, fresh_compiler, method) -> None:
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    x = torch.randn(40, 4, 6, device=device)
    result = torch.compile(opt.orthogonalize, fullgraph=True, backend=backend)(x, method)
    targets = [str(node.target) for graph in graphs for node in graph.graph.nodes]
    assert sum(f".{REGISTERED_METHODS[method]}" in target for target in targets) == 1, targets
    assert not any("bmm" in target or "matmul" in target for target in targets)
    assert_same_bits(result, opt.orthogonalize(x, method))


def test_fake_tensors_see_one_op(opt, called) -> None:
    with FakeTensorMode():
        x = torch.empty(3, 5, 40)
        results = [opt.orthogonalize(x, method) for method in ("newton_schulz", "auto")]
    assert called[0] == "newton_schulz" and len(called) == 2
    assert all((r.shape, r.dtype) == (x.shape, torch.float32) for r in results)
    result = opt.orthogonalize(torch.empty(3, 5, 40, device="meta"), dtype=torch.bfloat16)
    assert (result.shape, result.dtype, result.device.type) == ((3, 5, 40), torch.bfloat16, "meta")


LOW = (torch.bfloat16, torch.float16)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, None], ids=str)
@pytest.mark.parametrize("method", [*ALL_METHODS, "auto"])
def test_iterations_are_not_cast(opt, device, method, dtype, low) -> None:
    """Of a spectrum from 1 to 1e-3 products in bfloat16 would change a fifth of the result."""
    x = matrix("log3", 40, 96).float().to(device)
    wanted = opt.orthogonalize(x, method, dtype=dtype)
    with torch.autocast(device.type, dtype=low):
        assert_same_bits(opt.orthogonalize(x, method, dtype=dtype), wanted)
        out = torch.empty_like(wanted)
        opt.orthogonalize(x, method, dtype=dtype, out=out)
        assert_same_bits(out, wanted)
        loose = x @ x.mT
        assert torch.is_autocast_enabled(device.type)
    assert loose.dtype == low  # it had an effect elsewhere
    assert relative_error(loose, x @ x.mT) > 1e-4


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("method", ALL_METHODS)
def test_compiled_iterations_are_not_cast(opt, device, fresh_compiler, method, inside) -> None:
    """With autocast around the call of the compiled function, or in what is compiled."""
    x = matrix("log3", 40, 96).float().to(device)
    wanted = opt.orthogonalize(x, method)

    def function(x):
        return opt.orthogonalize(x, method)

    def casting(x):
        with torch.autocast(device.type, dtype=torch.bfloat16):
            return opt.orthogonalize(x, method)

    compiled = torch.compile(casting if inside else function, fullgraph=True, backend="aot_eager")
    with torch.autocast(device.type, dtype=torch.bfloat16, enabled=not inside):
        assert_same_bits(compiled(x), wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_products_are_not_cast(submodule, device, dtype) -> None:
    """The op behind the iterations, which rounds once, also where torch computes it."""
    kernels = submodule("kernels")
    a = torch.randn(2, 24, 40, device=device).to(dtype)
    c = torch.randn(2, 24, 24, device=device).to(dtype)
    c += c.mT.clone()
    wanted = kernels.symmetric_matmul(a, C=c, alpha=0.3, beta=1.5)
    with torch.autocast(device.type, dtype=LOW[dtype == LOW[0]]):
        found = kernels.symmetric_matmul(a, C=c, alpha=0.3, beta=1.5)
    assert_same_bits(found, wanted)


BACKENDS = {"cpu": "mkldnn", "cuda": "cuda"}
VALUES = {"cpu": ("none", "ieee", "bf16", "tf32"), "cuda": ("none", "ieee", "tf32")}


def read(*switch: str) -> str:
    return torch._C._get_fp32_precision_getter(*switch)


def write(switch: tuple[str, str], value: str) -> None:
    torch._C._set_fp32_precision_setter(*switch, value)


@pytest.fixture
def switches(device):
    """(everything, backend, matmul), "none" in a new process, and again after the test."""
    backend = BACKENDS[device.type]
    found = (("generic", "all"), (backend, "all"), (backend, "matmul"))
    for switch in found:
        write(switch, "none")
    yield found
    for switch in found:
        write(switch, "none")


def test_settings_and_their_inheritance_are_left_alone(opt, device, switches) -> None:
    """Every combination of the three levels answers later changes as if no call had been made."""
    x = torch.randn(4, 6, device=device)
    values = VALUES[device.type]

    def answers(settings: tuple[str, ...], call: bool) -> list[str]:
        for switch, value in zip(switches, settings, strict=True):
            write(switch, value)
        if call:
            opt.orthogonalize(x, dtype=torch.float32)
        seen = [read(*switch) for switch in switches]
        for changed in switches:
            write(changed, "ieee" if read(*changed) != "ieee" else "tf32")
            seen += [read(*switch) for switch in switches]
        return seen

    for settings in [(a, b, c) for a in values for b in values for c in values]:
        assert answers(settings, call=True) == answers(settings, call=False), settings


def test_threads_leave_the_setting_as_it_was(opt, device, switches) -> None:
    """Overlapping calls: none gets reduced products, and the last one restores the first's."""
    x = matrix("gaussian", 64, 128).float().to(device)
    strict = opt.orthogonalize(x, dtype=torch.float32)
    write(switches[2], "tf32")
    results, start = [], threading.Barrier(4)

    def work() -> None:
        start.wait()
        results.extend(opt.orthogonalize(x, dtype=torch.float32) for _ in range(50))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert read(*switches[2]) == "tf32"
    assert len(results) == 200
    for result in results:
        assert_same_bits(result, strict)


def test_holds_of_ieee_float32(submodule, device, switches) -> None:
    """The first to leave must not release the switch under the second."""
    ieee_float32 = submodule("orthogonalize.products").ieee_float32
    write(switches[2], "tf32")
    first, second = (ieee_float32(device, torch.float32) for _ in range(2))
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert read(*switches[2]) == "ieee"
    second.__exit__(None, None, None)
    assert read(*switches[2]) == "tf32"
    with ieee_float32(device, torch.float16):  # other dtypes touch nothing
        assert read(*switches[2]) == "tf32"
    with ieee_float32(device, torch.float32):
        write(switches[2], "none")
    assert read(*switches[2]) == "none"  # a change meanwhile stands
