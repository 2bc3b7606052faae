"""Predicted times: a model of one GPU, the same on every rank, and near what was measured there."""

from __future__ import annotations

import inspect

import pytest
import torch

HALF, SINGLE = torch.float16, torch.float32


@pytest.fixture(scope="session")
def cost(submodule):
    return submodule("orthogonalize.cost")


@pytest.fixture
def as_on_an_h200(submodule, monkeypatch, forgets_devices):
    """Pretends that CUDA device 0 is an H200 with the compiled kernels."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    served = submodule("kernels.products.symmetric_matmul").DTYPES
    runs = lambda device, dtype: device.type == "cuda" and dtype in served  # noqa: E731
    half = lambda device, dtype: runs(device, dtype) and dtype.itemsize == 2  # noqa: E731
    monkeypatch.setattr(submodule("orthogonalize.products"), "runs_compiled", runs)
    monkeypatch.setattr(submodule("orthogonalize.products"), "runs_dense_compiled", half)


# Milliseconds of "auto" on Gaussian matrices on an H200 (2026-11-22-orthogonalize-on-hopper.md).
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


def test_floors_are_those_of_the_result_file(cost) -> None:
    """The last column of the measured peers' table, in milliseconds."""
    floors = {
        (1, 2048, 2048): 0.217,
        (8, 4096, 4096): 13.9,
        (1, 4096, 14336): 3.05,
        (24, 1024, 4096): 1.24,
        (128, 768, 2048): 2.20,
        (256, 512, 2048): 1.65,
    }
    for (batch, m, n), floor in floors.items():
        assert cost.floor_ms(m, n, batch) == pytest.approx(floor, rel=5e-3)
        assert cost.floor_ms(n, m, batch) == cost.floor_ms(m, n, batch)
    assert cost.floor_ms(1, 10**6) == pytest.approx(6e6 / 4.3e12 * 1e3)  # bytes, not operations


def test_depends_on_nothing_but_its_arguments(choose, as_on_an_h200, monkeypatch) -> None:
    names = list(inspect.signature(choose.predicted_ms).parameters)
    assert names[:5] == ["m", "n", "batch", "dtype", "device"]
    first = choose.predicted_ms(768, 3072, 24, SINGLE, "cuda:0")
    assert choose.predicted_ms(768, 3072, 24, SINGLE, "cuda:7") == first
    assert choose.predicted_ms(3072, 768, 24, SINGLE, "cuda") == first


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_grows_with_the_work(choose, as_on_an_h200, kind) -> None:
    ms = lambda *shape: choose.predicted_ms(*shape, SINGLE, kind)  # noqa: E731
    assert ms(64, 64, 0) == ms(0, 64, 3) == 0
    batch = 64  # full slices; one small matrix costs a slice of its shape
    assert 0 < ms(256, 1024, batch) < ms(512, 1024, batch) < ms(1024, 1024, batch)
    assert ms(1024, 1024, batch) < ms(2048, 1024, batch) < ms(2048, 4096, batch)
    assert ms(512, 2048, 256) > 3 * ms(512, 2048, 64)
    assert ms(512, 512, 1) <= ms(512, 512, 2) <= ms(512, 512, 200)


def test_is_never_below_the_floor_of_its_products(choose, cost, as_on_an_h200) -> None:
    for batch, m, n in ((1, 2048, 2048), (16, 2048, 8192), (48, 768, 768), (256, 512, 2048)):
        for method in ("polar_express", "gram_newton_schulz", "gram_polynomial"):
            least = batch * choose.flop(method, m, n, steps=5, restarts=(2,), symmetric=True)
            predicted = choose.predicted_ms(m, n, batch, SINGLE, "cuda", method=method)
            assert predicted > 1e3 * least / cost.H200_RATE


def test_every_method_and_dtype_has_a_prediction(choose, as_on_an_h200) -> None:
    for device in ("cpu", "cuda", "meta"):
        for dtype in (HALF, torch.bfloat16, SINGLE, torch.float64):
            for method in ("auto", "polar_express", "gram_newton_schulz", "newton_schulz"):
                options = {"method": method, "iterate_dtype": dtype}
                assert choose.predicted_ms(96, 200, 3, dtype, device, **options) > 0
