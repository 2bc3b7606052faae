"""What autograd may expect of grouped_lora_linear: repeats, frozen parts, saved tensors, graphs."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from .._compare import assert_error_at_most, assert_same_bits
from ._eager import NAMES, Problem
from .conftest import gradients

FULL = Problem(23, bias=True, gates=True, routing="gap", peft=True)
PATHS = ("auto", "triton")


@pytest.fixture
def product(moe):
    """`product(problem, leaves, ids, **options)` -> the result with its graph."""

    def call(problem, leaves, ids, **options):
        order = moe.expert_sort(ids, problem.experts)
        seen = problem.views(leaves)
        return moe.grouped_lora_linear(
            seen["x"],
            seen["weight"],
            order,
            seen["lora_a"],
            seen["lora_b"],
            scaling=problem.scaling,
            bias=seen["bias"],
            gates=seen["gates"],
            grouped_in=problem.grouped_in,
            grouped_out=problem.grouped_out,
            **options,
        )

    return call


@pytest.mark.parametrize("path", PATHS)
def test_two_runs_give_the_same_bits(product, device, path):
    leaves, ids = FULL.inputs(device), FULL.ids(device)
    grad = torch.randn(FULL.grad_shape(), device=device)
    runs = []
    for _ in range(2):
        y = product(FULL, leaves, ids, backend=path)
        runs.append({"y": y.detach(), **gradients(y, leaves, grad)})
    for name, value in runs[0].items():
        assert_same_bits(value, runs[1][name])


@pytest.mark.sees_defect("backward overwrites the expanded result: wrong when run twice")
@pytest.mark.parametrize("path", PATHS)
def test_backward_twice_is_right(product, device, path):
    """Nothing saved is written to: the predecessor used the expanded result as scratch."""
    leaves, ids = FULL.inputs(device), FULL.ids(device)
    grad = torch.randn(FULL.grad_shape(), device=device)
    y = product(FULL, leaves, ids, backend=path)
    wanted = [leaves[name] for name in NAMES]
    first = torch.autograd.grad(y, wanted, grad, retain_graph=True)
    for one, again in zip(first, torch.autograd.grad(y, wanted, grad), strict=True):
        assert_same_bits(one, again)


def test_second_order_raises(product, device):
    leaves, ids = FULL.inputs(device), FULL.ids(device)
    y = product(FULL, leaves, ids)
    (found,) = torch.autograd.grad(y.sum(), leaves["x"], create_graph=True)
    with pytest.raises(RuntimeError):
        found.sum().backward()


@pytest.mark.parametrize("kept", [*NAMES, ("lora_a", "lora_b"), ("x", "gates")], ids=str)
def test_each_gradient_alone_has_the_bits_it_has_among_all(product, device, kept):
    """Any subset may be frozen; what is asked for does not change."""
    kept = (kept,) if isinstance(kept, str) else kept
    leaves, ids = FULL.inputs(device), FULL.ids(device)
    grad = torch.randn(FULL.grad_shape(), device=device)
    everything = gradients(product(FULL, leaves, ids), leaves, grad)
    for name in NAMES:
        leaves[name].requires_grad_(name in kept)
    some = gradients(product(FULL, leaves, ids), leaves, grad)
    assert set(some) == set(kept)
    for name, value in some.items():
        assert_same_bits(value, everything[name])


@pytest.mark.sees_defect("the gradient of a frozen weight is computed in every step")
def test_a_frozen_weight_costs_no_gradient(product, ops_called, device):
    leaves, ids = FULL.inputs(device), FULL.ids(device)
    leaves["weight"].requires_grad_(False)
    leaves["bias"].requires_grad_(False)
    with ops_called() as called:
        product(FULL, leaves, ids).sum().backward()
    assert "grouped_lora_dab" in called and "grouped_lora_dw" not in called
    assert leaves["weight"].grad is None


def test_without_lora_no_lora_gradient_is_computed(product, ops_called, device):
    problem = dataclasses.replace(FULL, rank=None)
    leaves, ids = problem.inputs(device), problem.ids(device)
    leaves["weight"].requires_grad_(False)
    leaves["bias"].requires_grad_(False)
    with ops_called() as called:
        product(problem, leaves, ids).sum().backward()
    assert not {"grouped_lora_dab", "grouped_lora_dw"} & set(called)


@pytest.mark.sees_defect("the weights of every layer are kept alive or copied for backward")
@pytest.mark.sees_defect("the expanded result is stored for the gradient of the gates")
def test_what_is_saved(product, device):
    """No expanded result and no copy of the weight: parameters, x, and (R, r) of LoRA."""
    problem = dataclasses.replace(FULL, grouped_in=True)
    leaves, ids = problem.inputs(device), problem.ids(device)
    leaves["weight"].requires_grad_(False)
    saved: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        product(problem, leaves, ids)
    own = {leaf.untyped_storage().data_ptr() for leaf in leaves.values()}
    extra = [x for x in saved if x.untyped_storage().data_ptr() not in own]
    rows = problem.tokens * problem.top_k
    floating = [tuple(x.shape) for x in extra if x.dtype.is_floating_point]
    assert floating == [(rows, problem.rank)]


def test_scaling_zero_and_no_lora_are_the_base(product, device):
    leaves, ids = FULL.inputs(device), FULL.ids(device)
    base = dict(leaves, lora_a=None, lora_b=None)
    expected = product(FULL, base, ids) if not FULL.peft else None
    problem = dataclasses.replace(FULL, scaling=0.0)
    zero = product(problem, leaves, ids)
    if expected is None:
        expected = product(FULL, base, ids)
    assert_same_bits(zero + 0.0, expected + 0.0)


def test_gradients_arrive_in_the_parameters_memory_order(product, device):
    """PEFT's lora_B (N, r E) gets its gradient without a copy of a permuted one."""
    leaves, ids = FULL.inputs(device), FULL.ids(device)
    product(FULL, leaves, ids).sum().backward()
    for name in NAMES:
        assert leaves[name].grad.stride() == leaves[name].stride(), name
        assert leaves[name].grad.dtype == leaves[name].dtype, name


def test_the_order_of_experts_does_not_matter(product, device):
    """Renaming the experts permutes parameters and their gradients, bit for bit."""
    problem = dataclasses.replace(FULL, peft=False, routing="random")
    leaves, ids = problem.inputs(device), problem.ids(device)
    grad = torch.randn(problem.grad_shape(), device=device)
    y = product(problem, leaves, ids)
    expected = gradients(y, leaves, grad)
    permutation = torch.randperm(problem.experts, generator=torch.Generator().manual_seed(3))
    permutation = permutation.to(device)
    per_expert = ("weight", "lora_a", "lora_b", "bias")
    renamed = {
        name: x.detach()[permutation].requires_grad_() if name in per_expert else x
        for name, x in leaves.items()
    }
    y_renamed = product(problem, renamed, torch.argsort(permutation)[ids])
    assert_same_bits(y_renamed, y)
    for name, value in gradients(y_renamed, renamed, grad).items():
        wanted = expected[name][permutation] if name in per_expert else expected[name]
        assert_same_bits(value, wanted)


@pytest.mark.sees_defect("A and B are copied contiguous in every call")
def test_strided_operands(product, device):
    """Elements two apart, columns first, an expanded gradient; BLAS may sum in another order."""
    problem = dataclasses.replace(FULL, peft=False)
    leaves, ids = problem.inputs(device), problem.ids(device)
    wanted = [leaves[name] for name in NAMES]
    y = product(problem, leaves, ids)
    ones = torch.ones(1, 1, device=device).expand(problem.grad_shape())
    expected = torch.autograd.grad(y, wanted, ones.contiguous())
    spread = {name: torch.stack((x, x), x.ndim)[..., 0] for name, x in leaves.items()}
    turned = {
        name: x.detach().transpose(-1, -2).contiguous().transpose(-1, -2).requires_grad_()
        for name, x in leaves.items()
    }
    assert_error_at_most(product(problem, spread, ids), y, 1e-6)
    y_turned = product(problem, turned, ids)
    assert_error_at_most(y_turned, y, 1e-6)
    found = torch.autograd.grad(y_turned, [turned[name] for name in NAMES], ones)
    for one, other in zip(found, expected, strict=True):
        assert_error_at_most(one, other, 1e-6)


def test_gradcheck(product, device):
    """Numerical derivatives in float64, of all six operands at once."""
    problem = Problem(4, experts=3, k=5, n=4, rank=2, bias=True, gates=True, dtype=torch.float64)
    problem = dataclasses.replace(problem, lora_dtype=torch.float64, routing="sentinels")
    leaves, ids = problem.inputs(device), problem.ids(device, seed=3)
    leaves["gates"] = leaves["gates"].detach().double().requires_grad_()

    def run(*values):
        return product(problem, dict(zip(NAMES, values, strict=True)), ids)

    assert torch.autograd.gradcheck(run, [leaves[name] for name in NAMES])


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_changes_no_bit(product, device, reentrant):
    leaves, ids = FULL.inputs(device), FULL.ids(device)
    grad = torch.randn(FULL.grad_shape(), device=device)
    product(FULL, leaves, ids).backward(grad)
    expected = {name: leaves[name].grad for name in NAMES}
    for name in NAMES:
        leaves[name].grad = None

    def run(*values):
        return product(FULL, dict(zip(NAMES, values, strict=True)), ids)

    checkpoint(run, *(leaves[name] for name in NAMES), use_reentrant=reentrant).backward(grad)
    for name in NAMES:
        assert_same_bits(leaves[name].grad, expected[name])


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(product, device, dynamic):
    """Sort, product, gates and their backward in one graph; another number of tokens too."""

    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def compiled(leaves, ids):
        return product(FULL, leaves, ids).square().sum()

    for tokens in (23, 31):
        problem = dataclasses.replace(FULL, tokens=tokens)
        leaves, ids = problem.inputs(device), problem.ids(device)
        wanted = [leaves[name] for name in NAMES]
        expected = product(FULL, leaves, ids).square().sum()
        actual = compiled(leaves, ids)
        torch.testing.assert_close(actual, expected)
        found = torch.autograd.grad(actual, wanted)
        for one, other in zip(found, torch.autograd.grad(expected, wanted), strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.sees_defect("32-bit offsets into the stack and its rows")
@pytest.mark.parametrize("path", ["reference", "triton"])
def test_stacks_above_two_to_the_31_elements(moe, device, path):
    """Element offsets beyond 31 bits in every operand; memory that nobody touches costs nothing."""
    if device.type != "cpu":
        pytest.skip("untouched memory is real memory on a GPU; test_grouped_linear_gpu has its own")
    numpy = pytest.importorskip("numpy")
    far = 2**31 + 2**12
    pool = torch.from_numpy(numpy.empty(2 * far, dtype=numpy.float16))  # lazily mapped zero pages
    problem = Problem(6, experts=3, k=8, n=8, rank=2, dtype=torch.float16, routing="gap")
    problem = dataclasses.replace(problem, lora_dtype=torch.float16)
    leaves, ids = problem.inputs(device), problem.ids(device)
    order = moe.expert_sort(ids, 3)

    def spread(x: torch.Tensor, at: int) -> torch.Tensor:
        """x with its first dimension far apart: the last expert lies behind 2^31 elements."""
        step = far // (x.shape[0] - 1)
        view = pool.as_strided(x.shape, (step, *x.stride()[1:]), at)
        return view.copy_(x.detach())

    def run(operands):
        return moe.grouped_lora_linear(
            operands["x"],
            operands["weight"],
            order,
            operands["lora_a"],
            operands["lora_b"],
            backend=path,
        )

    names = ("x", "weight", "lora_a", "lora_b")
    expected = run({name: leaves[name].detach() for name in names})
    actual = run({name: spread(leaves[name], 1000 * i) for i, name in enumerate(names)})
    assert_same_bits(actual, expected)
