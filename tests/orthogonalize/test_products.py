"""Products by halves: as accurate as dense ones, where they run, and what `explain` says."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_error_at_most, assert_same_bits, relative_error
from ..conftest import module_fixture
from ._matrices import matrix

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32


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


@pytest.mark.parametrize("spectrum", ["gaussian", "log3", "half_zero"])
@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE], ids=str)
@pytest.mark.parametrize("method", ["polar_express", "gram_newton_schulz"])
@pytest.mark.parametrize("tall", [False, True])
def test_as_accurate_as_dense_products(
    opt, reference, device, by_halves, tall, method, dtype, spectrum
) -> None:
    """In half precision folding rounds a I + B, an error of the size of X's own: sqrt(2) in all.

    In float32 nothing is folded, but sums run in another order than cuBLAS's, and a float32 product
    may differ 5 times as much. Measured 1.49 on an H200; see
    docs/dev/decisions/2026-11-21-order-of-gram-products.md.
    """
    x = matrix(spectrum, 96, 384)
    exact = reference.newton_schulz(x, opt.polar_express_coefficients(), 1.02)
    x, exact = (x.mT, exact.mT) if tall else (x, exact)
    x = x.float().to(device)
    dense = relative_error(opt.orthogonalize(x, method, dtype=dtype).cpu(), exact)
    calls = by_halves()
    actual = opt.orthogonalize(x, method, dtype=dtype).cpu()
    assert calls
    assert_error_at_most(actual, exact, (2 if dtype == SINGLE else 1.42) * dense)


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("spectrum", ["gaussian", "log3", "half_zero"])
def test_gram_polynomial_by_halves(opt, products, device, by_halves, spectrum, tall) -> None:
    """X X^T and the squares, ten and two, go to symmetric_matmul; the error stays as it was."""
    x = matrix(spectrum, 96, 384)
    x = x.mT if tall else x
    exact = opt.orthogonalize(x.to(device), "gram_polynomial", dtype=torch.float64).cpu()
    single = x.float().to(device)
    dense = opt.orthogonalize(single, "gram_polynomial", dtype=HALF).cpu()
    calls = by_halves()
    halves = opt.orthogonalize(single, "gram_polynomial", dtype=HALF).cpu()
    # X^T X of a tall half-precision matrix stays dense without Hopper's instructions.
    dense_gram = tall and not products.batch_is_free(HALF, device)
    assert len(calls) == (10 if dense_gram else 12)
    assert_error_at_most(halves, exact, 1.42 * relative_error(dense, exact))


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
        (4096, 8192, HALF, "X X^T, R^2, R Z, Z R Z by symmetric_matmul"),
        (8192, 4096, HALF, "Products: R^2, R Z, Z R Z by symmetric_matmul"),
        (8192, 4096, SINGLE, "X^T X, R^2, R Z, Z R Z by symmetric_matmul"),
        (1024, 4096, HALF, "Products: torch's dense ones."),
        (4096, 4096, torch.float64, "Products: torch's dense ones."),
    ],
    ids=str,
)
def test_explain_says_which_products_run(opt, products, submodule, monkeypatch, m, n, dtype, words):
    """With the instructions of sm_80, and with Hopper's."""
    served = submodule("kernels.products.symmetric_matmul").DTYPES
    monkeypatch.setattr(products, "runs_compiled", lambda device, dtype: dtype in served)
    monkeypatch.setattr(products, "runs_dense_compiled", lambda device, dtype: False)
    problem = {"shape": (m, n), "dtype": dtype, "device": "cuda", "iterate_dtype": dtype}
    method = "polar_express" if m == n else "gram_newton_schulz"
    assert words in opt.explain("orthogonalize", **problem, method=method)
    if "by symmetric_matmul" in words:
        text = opt.explain("orthogonalize", **problem, method="gram_polynomial")
        assert "M^2 by symmetric_matmul" in text
    monkeypatch.setattr(products, "runs_dense_compiled", lambda device, dtype: dtype == HALF)
    monkeypatch.setattr(submodule("orthogonalize.choose"), "batch_is_free", products.batch_is_free)
    if dtype == HALF:
        text = opt.explain("orthogonalize", **problem, method=method)
        assert ("X X^T" if m <= n else "X^T X") in text and "the others matmul_add" in text


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
