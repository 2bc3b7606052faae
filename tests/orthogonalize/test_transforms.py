"""The methods under torch.vmap and other transforms of torch.func, and compiled for any size."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_same_bits

METHODS = ("polar_express", "gram_newton_schulz", "gram_polynomial", "newton_schulz", "auto")
NAMED = ("polar_express", "gram_newton_schulz", "newton_schulz")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("method", METHODS)
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


@pytest.mark.parametrize("name", NAMED)
def test_vmap_of_a_named_method(opt, device, name) -> None:
    x = torch.randn(3, 9, 5, device=device)
    method = getattr(opt, name)
    assert_same_bits(torch.vmap(method)(x), method(x))
    assert_same_bits(
        torch.vmap(lambda m: method(m, dtype=torch.float64))(x), method(x, dtype=torch.float64)
    )


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


@pytest.mark.parametrize("name", ["orthogonalize", *NAMED])
def test_compiled_for_any_size_and_options(opt, device, name) -> None:
    """dynamic=True makes sizes symbolic at once, and floating-point arguments with them."""
    method = getattr(opt, name)
    torch._dynamo.reset()
    compiled = torch.compile(method, fullgraph=True, dynamic=True, backend="aot_eager")
    for shape in ((5, 9), (3, 7, 11), (8, 4)):
        x = torch.randn(shape, device=device)
        assert_same_bits(compiled(x), method(x))
    if name == "polar_express":
        for lower in (0.01, 0.02, 0.5):
            options = {"lower": lower, "safety": lower / 2, "cushion": 0.1}
            assert_same_bits(compiled(x, 4, **options), method(x, 4, **options))
        assert_same_bits(compiled(x, lower=1), method(x, lower=1))
    torch._dynamo.reset()
