"""grouped_lora_linear against eager experts in float64, in its result and in every gradient."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .._compare import assert_same_bits, relative_error
from ._eager import Problem, eager
from .conftest import gradients

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FLOOR = {torch.float32: 5e-7, torch.bfloat16: 1e-3, torch.float16: 1.3e-4}


def usual_sizes(problem, leaves, ids, grad) -> dict[str, float]:
    """The norm of every result if the signs of its terms were drawn: the root of their squares.

    Results are linear in each operand, so operands squared give sums of squares. Where a result of
    few elements is far smaller, its terms cancelled, and their rounding errors did not.
    """
    squares = {name: x if x is None else x.detach().double() ** 2 for name, x in leaves.items()}
    squares = {name: x if x is None else x.requires_grad_() for name, x in squares.items()}
    squared = dataclasses.replace(problem, scaling=problem.scaling**2)
    y = eager(squared, squares, ids, torch.float64)
    sums = {"y": y.detach(), **gradients(y, squares, grad.double() ** 2)}
    return {name: value.sum().sqrt().item() for name, value in sums.items()}


def assert_close_to_eager(problem, run, device, backend="auto", factor=1.5, seed=0) -> None:
    """Each error is at most `factor` times eager's in the same dtype.

    The floor is about half of the dtype's rounding error (four units for float32's sums) of a
    result of the usual size, for results of so few elements that eager is lucky, or that cancel.
    """
    ids = problem.ids(device, seed)
    leaves = problem.inputs(device, seed)
    generator = torch.Generator().manual_seed(seed + 2)
    grad = torch.randn(problem.grad_shape(), generator=generator, dtype=torch.float64)
    grad = grad.to(device, problem.dtype)
    actual = run(problem, leaves, ids, grad, backend)
    wide = {name: x if x is None else x.detach().double() for name, x in leaves.items()}
    wide = {name: x if x is None else x.requires_grad_() for name, x in wide.items()}
    exact_y = eager(problem, wide, ids, torch.float64)
    exact = {"y": exact_y.detach(), **gradients(exact_y, wide, grad.double())}
    plain_y = eager(problem, leaves, ids, problem.dtype)
    plain = {"y": plain_y.detach(), **gradients(plain_y, leaves, grad)}
    usual = usual_sizes(problem, leaves, ids, grad)
    for name, expected in exact.items():
        assert actual[name].dtype == (leaves[name].dtype if name != "y" else problem.dtype)
        assert actual[name].shape == expected.shape
        if expected.numel() == 0 or expected.norm() == 0:
            assert_same_bits(actual[name] + 0.0, torch.zeros_like(actual[name]))
            continue
        error = relative_error(actual[name], expected)
        floor = FLOOR[problem.dtype] * max(usual[name] / expected.norm().item(), 1.0)
        allowed = max(factor * relative_error(plain[name], expected), floor)
        assert error <= allowed, f"{name}: relative error {error:.2e} exceeds {allowed:.2e}"


SHAPES = (
    Problem(33),
    Problem(33, peft=True),
    Problem(40, top_k=3, experts=5, rank=None, bias=True),
    Problem(29, gates=True),
    Problem(29, gates=True, bias=True, peft=True),
    Problem(29, grouped_in=True, gates=True, bias=True),
    Problem(29, grouped_out=True, bias=True),
    Problem(29, grouped_in=True, grouped_out=True),
    Problem(50, top_k=1, experts=3, rank=12),
    Problem(17, k=96, n=80, rank=1),
    Problem(20, k=32, n=32, rank=8, peft=True, gates=True),
    Problem(64, rank=48, gates=True),
)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("problem", SHAPES, ids=str)
def test_error_against_float64(run, device, problem, dtype):
    assert_close_to_eager(dataclasses.replace(problem, dtype=dtype), run, device)


@pytest.mark.sees_defect("float32 LoRA over half-precision activations raises")
@pytest.mark.parametrize("lora_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gates", [False, True])
def test_lora_dtype_differs_from_the_activations(run, device, lora_dtype, gates):
    """PEFT keeps LoRA in float32 over a bfloat16 base; gradients come in the LoRA's dtype."""
    problem = Problem(40, dtype=torch.bfloat16, lora_dtype=lora_dtype, peft=True, gates=gates)
    assert_close_to_eager(problem, run, device)


ROUTINGS = ("random", "one", "no-ends", "gap", "sentinels", "all-sentinels")


@pytest.mark.sees_defect("no tokens")
@pytest.mark.parametrize("tokens", [0, 1, 2, 37])
@pytest.mark.parametrize("routing", ROUTINGS)
@pytest.mark.parametrize("gates", [False, True])
def test_routings(run, device, routing, tokens, gates):
    """Experts without rows, one with all, sentinels, no token at all; gradients included."""
    problem = Problem(tokens, top_k=2, experts=6, gates=gates, bias=True, routing=routing)
    assert_close_to_eager(problem, run, device)


@pytest.mark.sees_defect(
    "masked loads without a value for masked lanes, sizes that are no multiple of a tile"
)
@settings(max_examples=60, deadline=None)
@given(
    tokens=st.integers(0, 40),
    top_k=st.integers(1, 4),
    experts=st.integers(1, 9),
    k=st.integers(1, 40),
    n=st.integers(1, 40),
    rank=st.none() | st.integers(1, 20),
    options=st.lists(st.booleans(), min_size=5, max_size=5),
    routing=st.sampled_from(ROUTINGS),
    seed=st.integers(0, 1000),
)
def test_generated_problems(
    run, device, tokens, top_k, experts, k, n, rank, options, routing, seed
):
    bias, gates, grouped_in, grouped_out, peft = options
    problem = Problem(
        tokens,
        top_k,
        experts,
        k,
        n,
        rank,
        bias=bias,
        gates=gates,
        grouped_in=grouped_in,
        grouped_out=grouped_out and not gates,
        peft=peft,
        routing=routing,
    )
    assert_close_to_eager(problem, run, device, seed=seed)
