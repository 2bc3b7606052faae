"""Autocast, under which users compute their losses, has no say in an iteration or a step."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_same_bits, relative_error
from ..optimizers._steps import both, train, values
from ._matrices import matrix

METHODS = ("polar_express", "gram_newton_schulz", "gram_polynomial", "newton_schulz")
LOW = (torch.bfloat16, torch.float16)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.kernels_ci
@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, None], ids=str)
@pytest.mark.parametrize("method", [*METHODS, "auto"])
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


@pytest.mark.parametrize("method", ["polar_express", "gram_newton_schulz", "newton_schulz"])
def test_named_methods_are_not_cast(opt, device, method) -> None:
    x = matrix("log3", 40, 96).T.float().to(device)
    wanted = getattr(opt, method)(x)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert_same_bits(getattr(opt, method)(x), wanted)


@pytest.mark.parametrize("inside", [False, True], ids=["around", "inside"])
@pytest.mark.parametrize("method", METHODS)
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("name", ["Muon", "MuonAdamW"])
def test_a_step_is_not_cast(opt, device, name, dtype) -> None:
    results = []
    for enabled in (False, True):
        params = [
            torch.nn.Parameter(matrix("log3", 24, 40, seed).to(device, dtype)) for seed in range(4)
        ]
        optimizer = both(opt, params, weight_decay=0.1)[name]()
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=enabled):
            train(optimizer, params, 3)
        results.append(values(params))
    for found, wanted in zip(results[1], results[0], strict=True):
        assert_same_bits(found, wanted)


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
