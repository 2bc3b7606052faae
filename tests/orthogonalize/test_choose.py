"""Which method, dtype and products, by size and device; the times it predicts; where halves pay."""

import inspect

import pytest
import torch

from .._compare import assert_error_at_most, assert_same_bits, relative_error
from ..conftest import module_fixture
from ._matrices import matrix

CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)


@pytest.fixture
def capability(monkeypatch, forgets_devices):
    """Pretends that CUDA device 0 has the given compute capability."""

    def pretend(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))
        forgets_devices()

    return pretend


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_cuda_iterates_in_float16(choose, capability, dtype) -> None:
    """From compute capability 8.0 on; float64 is kept."""
    for version in ((7, 5), (8, 0), (9, 0), (12, 0)):
        capability(*version)
        half = torch.float16 if version >= (8, 0) else torch.float32
        expected = dtype if dtype == torch.float64 else half
        assert choose.choose(512, 512, dtype=dtype, device=GPU).dtype == expected


POLYNOMIAL = "gram_polynomial"
HALF, BRAIN, SINGLE, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
SERVED = [(128, 128), (512, 512), (768, 512), (4096, 128)]


@pytest.mark.parametrize(
    ("shape", "where", "dtype", "asked", "method", "iterated"),
    [
        *((shape, CPU, SINGLE, None, POLYNOMIAL, SINGLE) for shape in SERVED),
        *((shape, CPU, SINGLE, HALF, POLYNOMIAL, HALF) for shape in SERVED),
        # On CUDA it has been timed in float16 alone.
        ((512, 512), GPU, SINGLE, None, POLYNOMIAL, HALF),
        ((512, 2048), GPU, SINGLE, None, POLYNOMIAL, HALF),
        ((64, 256), CPU, DOUBLE, None, "polar_express", DOUBLE),
        ((64, 256), GPU, DOUBLE, None, "polar_express", DOUBLE),
        # Never on a Gram matrix in bfloat16.
        ((64, 4096), CPU, BRAIN, BRAIN, "polar_express", BRAIN),
        # Small matrices on the CPU take fewer operations.
        ((127, 127), CPU, SINGLE, None, "polar_express", SINGLE),
        ((64, 4096), CPU, SINGLE, None, "gram_newton_schulz", SINGLE),
    ],
    ids=str,
)
def test_where_gram_polynomial_is_taken(
    choose, capability, shape, where, dtype, asked, method, iterated
) -> None:
    capability(9, 0)
    choice = choose.choose(*shape, dtype=dtype, device=where, iterate_dtype=asked)
    assert (choice.method, choice.dtype) == (method, iterated)
    assert "not measured" not in choice.reason
    if (method, where) == (POLYNOMIAL, CPU):
        forms = {POLYNOMIAL: (), "polar_express": (), "gram_newton_schulz": (2,)}
        cost = {"steps": 5, "symmetric": False}
        dense = {m: choose.flop(m, *shape, restarts=r, **cost) for m, r in forms.items()}
        assert min(dense, key=dense.get) == POLYNOMIAL


def test_what_is_not_measured_on_cuda_can_be_asked_for(opt, capability) -> None:
    capability(9, 0)
    asked = {"dtype": SINGLE, "device": "cuda", "iterate_dtype": SINGLE}
    text = opt.explain("orthogonalize", shape=(512, 512), **asked)
    assert "gram_polynomial can be asked for, it is not measured yet on cuda" in text


@pytest.mark.parametrize(
    ("m", "n", "gram"),
    [
        *((512, 512, False), (512, 767, False), (512, 768, True), (768, 512, True)),
        *((512, 2048, True), (2048, 512, True), (1, 1, False), (1, 2, True)),
    ],
)
@pytest.mark.parametrize(
    ("where", "steps", "dtypes"),
    [
        (GPU, 5, (SINGLE,)),
        (GPU, 4, (HALF, SINGLE)),
        (CPU, 4, (HALF, SINGLE)),
        (CPU, 6, (HALF, SINGLE)),
    ],
    ids=str,
)
def test_gram_from_an_aspect_of_three_halves(choose, m, n, gram, dtypes, where, steps) -> None:
    """Where gram_polynomial has not been measured, or does not stand for the steps asked for."""
    options = {"dtype": torch.float32, "device": where, "steps": steps}
    for iterate_dtype in dtypes:
        choice = choose.choose(m, n, iterate_dtype=iterate_dtype, **options)
        assert choice.method == ("gram_newton_schulz" if gram else "polar_express")
        assert bool(choice.restarts) == gram
    # The rule is the point where dense products cost the same.
    cost = {"m": m, "n": n, "steps": 5, "symmetric": False}
    less = choose.flop("gram_newton_schulz", restarts=(2,), **cost)
    assert (less <= choose.flop("polar_express", **cost)) == gram


def test_flop_formulas(choose) -> None:
    """The closed forms of the literature, in m^2 n and m^3."""
    m, n = 7, 11
    table = {
        ("polar_express", (), False): (20, 10),
        ("polar_express", (), True): (15, 5),
        ("gram_newton_schulz", (2,), False): (8, 28),
        ("gram_newton_schulz", (2,), True): (6, 14),
        ("gram_newton_schulz", (1, 2), False): (12, 22),
        ("gram_newton_schulz", (1, 2), True): (9, 11),
        ("gram_newton_schulz", (), True): (3, 17),
        ("gram_newton_schulz", (1, 2, 3, 4), False): (20, 10),
        ("gram_polynomial", (), False): (8, 20),
        ("gram_polynomial", (), True): (6, 10),
    }
    for (method, restarts, symmetric), (wide, small) in table.items():
        expected = wide * m * m * n + small * m**3
        for shape in ((m, n), (n, m)):
            cost = {"steps": 5, "restarts": restarts, "symmetric": symmetric}
            assert choose.flop(method, *shape, **cost) == expected


def test_slices_do_not_depend_on_the_batch(submodule) -> None:
    """Where torch's products serve; their bits would."""
    slice_for = submodule("orthogonalize.slices").slice_for
    assert "batch" not in inspect.signature(slice_for).parameters
    for shape in ((1, 1), (33, 65), (768, 3072), (4096, 14336), (1, 10**7)):
        cpu, cuda = (slice_for(*shape, torch.float32, where) for where in (CPU, GPU))
        assert (cpu.matrices, cpu.rows, cpu.columns) == (1, *shape)
        assert cuda.rows % 8 == 0 and 0 <= cuda.rows - shape[0] < 8
        assert cuda.columns % 8 == 0 and 0 <= cuda.columns - shape[1] < 8
        elements = cuda.rows * cuda.columns * cuda.matrices
        assert cuda.matrices == 1 or elements <= 16 * 2**20
        assert cpu.full and cuda.full and cuda.at_once(1) == cuda.matrices


def test_free_slices_share_the_batch_evenly(submodule, monkeypatch) -> None:
    """Where the compiled products serve: no matrix that nobody asked for, and bounded memory."""
    batch = submodule("orthogonalize.slices")
    monkeypatch.setattr(batch, "batch_is_free", lambda dtype, device: True)
    for m, n in ((64, 64), (768, 3072), (2048, 8192), (8192, 8192)):
        free = batch.slice_for(n, m, torch.float16, GPU)
        used = free.matrices * 2 * max(m * n + 5 * m * m, 2 * m * n + m * m)
        assert free.matrices == 1 or used <= 640 * 2**20
        for count in (1, 2, 7, 1000):
            at_once = free.at_once(count)
            slices = -(-count // at_once)
            assert at_once <= free.matrices and slices == -(-count // free.matrices)
            assert slices * at_once - count < slices


def test_explain_says_what_why_and_how_much(opt, choose, submodule, capability) -> None:
    capability(9, 0)
    text = opt.explain("orthogonalize", shape=(24, 768, 3072), dtype=torch.float32, device="cuda")
    for part in ("gram_polynomial", "5 steps", "float16", "FLOP", "ms"):
        assert part in text, f"{part!r} missing in: {text}"
    assert "2.36e+10" in text  # 8 m^2 n + 20 m^3
    slice_for = submodule("orthogonalize.slices").slice_for
    at_once = slice_for(768, 3072, torch.float16, GPU).at_once(24)
    assert f"batch of 24, {at_once} at a time" in text
    asked = {"dtype": torch.float32, "device": "cuda", "method": "gram_newton_schulz"}
    of_asked = opt.explain("orthogonalize", shape=(24, 768, 3072), **asked)
    assert "before step 3" in of_asked and "the method was asked for" in of_asked
    assert "floor (790 TFLOP/s, 4.3 TB/s) for five steps is 0.523 ms" in text
    predicted = choose.predicted_ms(768, 3072, 24, torch.float32, "cuda")
    assert f"{predicted:.3g} ms on an H200" in text
    text = opt.explain("orthogonalize", shape=(768, 768), dtype=torch.float32, device="cpu")
    assert "gram_polynomial" in text and "float32" in text and " ms" not in text


def test_explain_names_the_kernels_that_run(opt, submodule, capability, monkeypatch) -> None:
    """On Hopper a chain of squares is one launch."""
    capability(9, 0)
    asked = []

    def serves(count: int, m: int, dtype: torch.dtype, device: torch.device) -> bool:
        asked.append((count, m, dtype))
        return True

    monkeypatch.setattr(submodule("kernels.products.square_chain"), "serves", serves)
    for name in ("products", "choose", "slices"):
        module = submodule(f"orthogonalize.{name}")
        monkeypatch.setattr(module, "batch_is_free", lambda dtype, device: True)
    said = {"dtype": torch.float32, "device": "cuda"}
    text = opt.explain("orthogonalize", shape=(12, 768, 3070), **said)
    assert "by square_chain, the others matmul_add." in text
    assert asked == [(12, 768, torch.float16)]
    text = opt.explain("orthogonalize", shape=(2, 2048, 2048), **said)
    assert "square_chain" not in text and "M^2" in text
    newton = opt.explain("orthogonalize", shape=(12, 768, 3070), method="newton_schulz", **said)
    assert "square_chain" not in newton


@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"method": "svd"}, ValueError), ({"steps": 0}, ValueError), ({"steps": 2.0}, TypeError)],
)
@pytest.mark.parametrize("function", ["choose", "explain"])
def test_bad_arguments(choose, function, arguments, error) -> None:
    with pytest.raises(error, match=next(iter(arguments))):
        getattr(choose, function)(4, 8, dtype=torch.float32, device="cpu", **arguments)


@pytest.fixture
def as_on_an_h200(submodule, monkeypatch, capability):
    """Pretends that CUDA device 0 is an H200 with the compiled kernels."""
    capability(9, 0)
    served = submodule("kernels.products.symmetric_matmul").DTYPES
    runs = lambda device, dtype: device.type == "cuda" and dtype in served  # noqa: E731
    half = lambda device, dtype: runs(device, dtype) and dtype.itemsize == 2  # noqa: E731
    monkeypatch.setattr(submodule("orthogonalize.products"), "runs_compiled", runs)
    monkeypatch.setattr(submodule("orthogonalize.products"), "runs_dense_compiled", half)


# Milliseconds of "auto" on Gaussian matrices on an H200, at commit 1534f05.
MEASURED = {
    (1, 2048, 2048): 0.39,
    (1, 4096, 4096): 1.72,
    (1, 8192, 8192): 14.0,
    (1, 4096, 14336): 3.35,
    (16, 2048, 8192): 9.4,
}


@pytest.mark.parametrize("shape", MEASURED, ids=str)
def test_near_what_was_measured(choose, as_on_an_h200, shape) -> None:
    batch, m, n = shape
    predicted = choose.predicted_ms(m, n, batch, SINGLE, "cuda")
    assert predicted == pytest.approx(MEASURED[shape], rel=0.25)


def test_floors(choose) -> None:
    """The cheaper form by halves at 790 TFLOP/s; of a vector the bytes at 4.3 TB/s."""
    for batch, m, n in ((1, 2048, 2048), (8, 4096, 4096), (1, 4096, 14336), (24, 1024, 4096)):
        operations = min(15 * m * m * n + 5 * m**3, 6 * m * m * n + 14 * m**3)
        expected = pytest.approx(1e3 * batch * operations / 790e12)
        assert choose.floor_ms(m, n, batch) == choose.floor_ms(n, m, batch) == expected
    assert choose.floor_ms(1, 10**6) == pytest.approx(6e6 / 4.3e12 * 1e3)


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_grows_with_the_work(choose, as_on_an_h200, kind) -> None:
    ms = lambda *shape: choose.predicted_ms(*shape, SINGLE, kind)  # noqa: E731
    assert ms(64, 64, 0) == ms(0, 64, 3) == 0
    batch = 64  # full slices; one small matrix costs a slice of its shape
    assert 0 < ms(256, 1024, batch) < ms(512, 1024, batch) < ms(1024, 1024, batch)
    assert ms(1024, 1024, batch) < ms(2048, 1024, batch) < ms(2048, 4096, batch)
    assert ms(512, 2048, 256) > 3 * ms(512, 2048, 64)
    assert ms(512, 512, 1) <= ms(512, 512, 2) <= ms(512, 512, 200)


products = module_fixture("orthogonalize.products")


@pytest.fixture
def by_halves(products, submodule, device, monkeypatch):
    """`by_halves()` sends every symmetric product to symmetric_matmul, whatever pays; a list grows
    with the calls. On the CPU references answer instead of the compiled ops."""
    calls = []
    kernel = submodule("kernels.products.symmetric_matmul").symmetric_matmul
    compiled = products.symmetric

    def symmetric(A, B, **options) -> torch.Tensor:
        calls.append((A.shape[-2], A.shape[-1]))
        return kernel(A, B, **options) if device.type == "cpu" else compiled(A, B, **options)

    def multiply(A, B, C, out, beta, scale=None) -> None:
        value = A.float() @ B.float()
        value = value if C is None else value + beta * C.float()
        out.copy_(value if scale is None else value * scale[:, None, None])

    def start() -> list:
        if device.type == "cpu":
            monkeypatch.setattr(products, "_multiply", multiply)
        monkeypatch.setattr(products, "_pays", lambda m, dtype: True)
        monkeypatch.setattr(products, "runs_compiled", lambda device, dtype: True)
        for name in ("products", "gram_newton_schulz"):
            monkeypatch.setattr(submodule(f"orthogonalize.{name}"), "symmetric", symmetric)
        # The compiled call launches the same kernels, where Python cannot count them.
        module = submodule("orthogonalize.gram_polynomial")
        monkeypatch.setattr(module, "_runs_compiled", lambda *_: False)
        return calls

    return start


HALVED = [(m, d) for m in ("polar_express", "gram_newton_schulz") for d in (HALF, BRAIN, SINGLE)]


@pytest.mark.parametrize("spectrum", ["gaussian", "log3", "half_zero"])
@pytest.mark.parametrize(("method", "dtype"), [*HALVED, ("gram_polynomial", HALF)], ids=str)
@pytest.mark.parametrize("tall", [False, True])
def test_as_accurate_as_dense_products(
    opt, device, by_halves, tall, method, dtype, spectrum
) -> None:
    """In half precision folding rounds a I + B, an error of the size of X's own: sqrt(2) in all.

    In float32 nothing is folded, but sums run in another order than cuBLAS's, and a float32 product
    may differ 5 times as much. Measured 1.49 on an H200; see
    docs/dev/decisions/2026-11-21-order-of-gram-products.md.
    """
    x = matrix(spectrum, 96, 384)
    x = (x.mT if tall else x).to(device)
    exact = opt.orthogonalize(x, method, dtype=torch.float64)
    x = x.float()
    dense = relative_error(opt.orthogonalize(x, method, dtype=dtype), exact)
    calls = by_halves()
    actual = opt.orthogonalize(x, method, dtype=dtype)
    assert calls
    assert_error_at_most(actual, exact, (2 if dtype == SINGLE else 1.42) * dense)


@pytest.mark.sees_defect("plain batched products without a symmetric kernel")
@pytest.mark.sees_defect("dense products, 1.4 to 2.4 times the operations needed")
@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize(
    ("method", "dtype", "count"),
    [
        ("polar_express", HALF, 10),  # X X^T and A^2 in each of five steps
        ("polar_express", BRAIN, 10),
        ("polar_express", SINGLE, 10),
        ("gram_newton_schulz", HALF, 13),  # X X^T twice, R^2 5, R Z and Z R Z 3 each
        ("gram_newton_schulz", SINGLE, 13),
        ("gram_polynomial", HALF, 12),
    ],
    ids=str,
)
def test_which_products_run_by_halves(
    opt, products, device, by_halves, monkeypatch, method, dtype, count, tall, hopper
) -> None:
    """On Hopper all that are symmetric; else X^T X of a tall half-precision matrix stays dense."""
    calls = by_halves()
    served = lambda device, dtype: hopper and dtype.itemsize == 2  # noqa: E731
    monkeypatch.setattr(products, "runs_dense_compiled", served)
    if served(device, dtype):
        monkeypatch.setattr(products, "_pays", lambda m, dtype: False)
        for m in (8, 512, 3072, 8192):
            assert products.runs_symmetric(m, dtype, device)
            assert products.gram_runs_symmetric(4 * m, m, dtype, device)
    elif tall and dtype != SINGLE:
        count -= {"polar_express": 5}.get(method, 2)
    x = matrix("gaussian", 32, 96).float().to(device)
    opt.orthogonalize(x.mT if tall else x, method, dtype=dtype)
    assert len(calls) == count


def test_a_cubic_schedule_saves_the_square(opt, device, by_halves) -> None:
    x = matrix("gaussian", 32, 96).float().to(device)
    dense = opt.newton_schulz(x, 5, "cubic5", dtype=HALF)
    calls = by_halves()
    actual = opt.newton_schulz(x, 5, "cubic5", dtype=HALF)
    assert calls == [(32, 96)] * 5
    assert_error_at_most(actual, dense.double(), 0.01)


@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_same_bits_in_any_batch_by_halves(opt, device, by_halves, dtype) -> None:
    x = torch.stack([matrix("gaussian", 40, 72, seed) for seed in range(5)]).float().to(device)
    by_halves()
    batch = opt.orthogonalize(x, dtype=dtype)
    for i in range(len(x)):
        assert_same_bits(opt.orthogonalize(x[i], dtype=dtype), batch[i])


def test_cpu_products_stay_dense(products) -> None:
    for dtype in (HALF, BRAIN, SINGLE, torch.float64):
        assert not products.runs_symmetric(8192, dtype, torch.device("cpu"))


@pytest.mark.parametrize(
    ("m", "n", "dtype", "words"),
    [
        (4096, 4096, HALF, "X X^T, A^2 by symmetric_matmul"),
        (8192, 4096, HALF, "Products: R^2, R Z, Z R Z by symmetric_matmul"),
        (1024, 4096, HALF, "Products: torch's dense ones."),
    ],
    ids=str,
)
def test_explain_says_which_products_run(opt, products, submodule, monkeypatch, m, n, dtype, words):
    served = submodule("kernels.products.symmetric_matmul").DTYPES
    monkeypatch.setattr(products, "runs_compiled", lambda device, dtype: dtype in served)
    monkeypatch.setattr(products, "runs_dense_compiled", lambda device, dtype: False)
    problem = {"shape": (m, n), "dtype": dtype, "device": "cuda", "iterate_dtype": dtype}
    method = "polar_express" if m == n else "gram_newton_schulz"
    assert words in opt.explain("orthogonalize", **problem, method=method)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [HALF, SINGLE], ids=str)
def test_a_side_where_halves_pay(opt, products, device, monkeypatch, dtype) -> None:
    """The table's own pick at 4096 x 4096 agrees with dense products."""
    x = torch.randn(4096, 4096, device=device)
    assert products.runs_symmetric(4096, dtype, device)
    actual = opt.orthogonalize(x, dtype=dtype)
    monkeypatch.setattr(products, "_pays", lambda m, dtype: False)
    dense = opt.orthogonalize(x, dtype=dtype)
    assert_error_at_most(actual, dense, 0.005 if dtype == HALF else 2e-5)
