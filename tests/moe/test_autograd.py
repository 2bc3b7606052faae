"""What autograd may expect of grouped_lora_linear: repeats, frozen parts, saved tensors, graphs."""

import dataclasses
import functools

import pytest
import torch
from torch.autograd import forward_ad

from .._compare import assert_all_same_bits, assert_error_at_most, assert_same_bits
from ..kernels._products import laid_out
from . import _eager
from ._eager import (
    NAMES,
    LayerProblem,
    Problem,
    assert_first_order_alone,
    gradients,
    kept_for_backward,
)

FULL = Problem(23, bias=True, gates=True, routing="gap", peft=True)
PATHS = ("auto", "triton")
LOW = torch.bfloat16


@pytest.fixture
def product(moe):
    return functools.partial(_eager.product, moe)


@pytest.mark.sees_defect("backward overwrites the expanded result: wrong when run twice")
@pytest.mark.parametrize("path", PATHS)
def test_backward_twice_is_right(product, device, path):
    leaves, ids = FULL.inputs(device), FULL.ids(device)
    grad = torch.randn(FULL.grad_shape(), device=device)
    y = product(FULL, leaves, ids, backend=path)
    wanted = [leaves[name] for name in NAMES]
    first = torch.autograd.grad(y, wanted, grad, retain_graph=True)
    assert_all_same_bits(first, torch.autograd.grad(y, wanted, grad))


def test_second_order_raises(product, device):
    leaves, ids = FULL.inputs(device), FULL.ids(device)
    assert_first_order_alone(product(FULL, leaves, ids), leaves["x"])


@pytest.mark.parametrize("kept", [*NAMES, ("lora_a", "lora_b"), ("x", "gates")], ids=str)
def test_each_gradient_alone_has_the_bits_it_has_among_all(product, device, kept):
    kept = (kept,) if isinstance(kept, str) else kept
    leaves, ids = FULL.inputs(device), FULL.ids(device)
    grad = torch.randn(FULL.grad_shape(), device=device)
    everything = gradients(product(FULL, leaves, ids), leaves, grad)
    for name in NAMES:
        leaves[name].requires_grad_(name in kept)
    some = gradients(product(FULL, leaves, ids), leaves, grad)
    assert set(some) == {"out", *kept}
    for name, value in some.items():
        assert_same_bits(value, everything[name])


@pytest.mark.sees_defect("the gradient of a frozen weight is computed in every step")
@pytest.mark.parametrize("rank", [FULL.rank, None])
def test_what_is_frozen_or_not_there_costs_no_gradient(product, device, rank):
    problem = dataclasses.replace(FULL, rank=rank)
    leaves, ids = problem.inputs(device), problem.ids(device)
    leaves["weight"].requires_grad_(False)
    leaves["bias"].requires_grad_(False)
    with torch.autograd.profiler.profile() as trace:
        product(problem, leaves, ids).sum().backward()
    called = {event.name.split("::")[-1] for event in trace.function_events}
    assert "grouped_lora_dw" not in called and ("grouped_lora_dab" in called) == bool(rank)
    assert leaves["weight"].grad is None


@pytest.mark.sees_defect("the weights of every layer are kept alive or copied for backward")
@pytest.mark.sees_defect("the expanded result is stored for the gradient of the gates")
def test_what_is_saved(product, device):
    """No expanded result and no copy of the weight: parameters, x, and (R, r) of LoRA."""
    problem = dataclasses.replace(FULL, grouped_in=True)
    leaves, ids = problem.inputs(device), problem.ids(device)
    leaves["weight"].requires_grad_(False)
    saved = kept_for_backward(lambda: product(problem, leaves, ids))
    own = {leaf.untyped_storage().data_ptr() for leaf in leaves.values()}
    extra = [x for x in saved if x.untyped_storage().data_ptr() not in own]
    rows = problem.tokens * problem.top_k
    floating = [tuple(x.shape) for x in extra if x.dtype.is_floating_point]
    assert floating == [(rows, problem.rank)]


def test_gradients_arrive_in_the_parameters_memory_order(product, device):
    """PEFT's lora_B (N, r E) gets its gradient without a copy of a permuted one."""
    leaves, ids = FULL.inputs(device), FULL.ids(device)
    product(FULL, leaves, ids).sum().backward()
    for name in NAMES:
        assert leaves[name].grad.stride() == leaves[name].stride(), name
        assert leaves[name].grad.dtype == leaves[name].dtype, name


@pytest.mark.sees_defect("A and B are copied contiguous in every call")
def test_strided_operands(product, device):
    problem = dataclasses.replace(FULL, peft=False)
    leaves, ids = problem.inputs(device), problem.ids(device)
    wanted = [leaves[name] for name in NAMES]
    y = product(problem, leaves, ids)
    ones = torch.ones(1, 1, device=device).expand(problem.grad_shape())
    expected = torch.autograd.grad(y, wanted, ones.contiguous())
    spread, turned = (
        {name: laid_out(x.detach(), pattern).requires_grad_() for name, x in leaves.items()}
        for pattern in ("every-third", "transposed")
    )
    assert_error_at_most(product(problem, spread, ids), y, 1e-6)
    y_turned = product(problem, turned, ids)
    assert_error_at_most(y_turned, y, 1e-6)
    found = torch.autograd.grad(y_turned, [turned[name] for name in NAMES], ones)
    for one, other in zip(found, expected, strict=True):
        assert_error_at_most(one, other, 1e-6)


@pytest.mark.parametrize("low", [False, True])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(product, device, dynamic, low):
    """Sort, product, gates and their backward in one graph; another number of tokens too.

    And under autocast, where operands of float32 are cast within it.
    """

    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def compiled(leaves, ids):
        return product(FULL, leaves, ids).square().sum()

    for tokens in (23, 31):
        problem = dataclasses.replace(FULL, tokens=tokens)
        leaves, ids = problem.inputs(device), problem.ids(device)
        wanted = [leaves[name] for name in NAMES]
        with torch.autocast(device.type, dtype=LOW, enabled=low):
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
        return view.copy_(x)

    plain = {name: leaves[name].detach() for name in NAMES[:4]}
    apart = {name: spread(x, 1000 * i) for i, (name, x) in enumerate(plain.items())}
    run = functools.partial(moe.grouped_lora_linear, order=order, backend=path)
    assert_same_bits(run(**apart), run(**plain))


PROBLEMS = (
    Problem(33, bias=True, peft=True),
    Problem(29, gates=True, bias=True, lora_dtype=torch.bfloat16),
    Problem(21, rank=None, grouped_in=True, grouped_out=True),
)


def operands(problem, device, dtypes):
    """Leaves in float32; their values can be had in bfloat16, so that casting loses nothing."""
    leaves = dataclasses.replace(problem, dtype=LOW, lora_dtype=LOW).inputs(device)
    kept = {"x": dtypes[0], "weight": dtypes[1], "bias": dtypes[1], "gates": torch.float32}
    return {
        name: value
        if value is None
        else value.detach().to(kept.get(name, problem.lora_dtype)).requires_grad_()
        for name, value in leaves.items()
    }


@pytest.mark.kernels_ci
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
@pytest.mark.parametrize(
    "dtypes",
    [
        (LOW, torch.float32),
        (torch.float32, torch.float32),
        (torch.float32, LOW),
        (torch.float16,) * 2,
    ],
    ids=str,
)
def test_operands_are_cast(run, product, device, problem, dtypes):
    """Bit for bit the product of operands in autocast's dtype; gradients in the parameters'."""
    leaves, narrow = operands(problem, device, dtypes), operands(problem, device, (LOW, LOW))
    assert_cast(run, product, problem, leaves, narrow, problem.ids(device))


@pytest.mark.parametrize("float_x", [LOW, torch.float32], ids=str)
def test_four_bit_experts(moe, run, product, device, float_x):
    """x is cast, and the weight decoded to its dtype."""
    problem = Problem(33, bias=True, gates=True)
    leaves = operands(problem, device, (float_x, torch.float32))
    stored = leaves.pop("weight").detach().mT.contiguous()
    packed = moe.QuantizedExperts.from_weight(stored).transpose(1, 2)
    narrow = operands(problem, device, (LOW, LOW))
    leaves["weight"] = narrow["weight"] = None
    assert_cast(run, product, problem, leaves, narrow, problem.ids(device), packed)


def assert_cast(run, product, problem, leaves, narrow, ids, weight=None) -> None:
    """Whether backward runs under autocast or after it."""
    grad = torch.randn(problem.grad_shape(), device=ids.device).to(LOW)
    with torch.autocast(ids.device.type, dtype=LOW):
        inside = run(problem, leaves, ids, grad, weight=weight)
        y = product(problem, leaves, ids, weight)
    outside = gradients(y, leaves, grad)
    for name, value in run(problem, narrow, ids, grad, weight=weight).items():
        own = LOW if name == "out" else leaves[name].dtype
        for found in (inside, outside):
            assert_same_bits(found[name], value.to(own))


def test_what_autocast_leaves_alone(moe, device):
    """As linear: float64 operands are not cast, and do not go with others."""
    order = moe.expert_sort(torch.zeros(3, 1, dtype=torch.long, device=device), 1)
    x, weight = torch.ones(3, 4, device=device), torch.ones(1, 4, 2, device=device)
    with torch.autocast(device.type, dtype=LOW):
        wide = moe.grouped_lora_linear(x.double(), weight.double(), order)
        assert wide.dtype == torch.float64
        with pytest.raises(TypeError, match=r"weight must have dtype bfloat16, got torch\.float64"):
            moe.grouped_lora_linear(x, weight.double(), order)


def test_merging_is_not_cast(moe, device):
    """The delta of an adapter is formed in float32 wherever it is merged."""
    layers = []
    for enabled in (False, True):
        torch.manual_seed(0)
        layer = moe.Experts(3, 16, 24, device=device)
        layer.add_adapter(r=4, alpha=8)
        for parameter in layer.parameters():
            torch.nn.init.normal_(parameter)
        with torch.autocast(device.type, dtype=LOW, enabled=enabled):
            layer.merge()
        layers.append(layer)
    assert_same_bits(layers[1].down_proj, layers[0].down_proj)
    assert_same_bits(layers[1].gate_up_proj, layers[0].gate_up_proj)


MESSAGE = "has no forward-mode derivative"


@pytest.fixture
def layer_and_inputs(moe, device):
    problem = LayerProblem()
    x, gates, _ = problem.inputs(device)
    return problem.module(moe, device), (x.detach(), problem.ids(device), gates.detach())


@pytest.mark.parametrize("operand", [0, 2], ids=["x", "gates"])
def test_jvp_through_the_experts(layer_and_inputs, operand) -> None:
    """A tangent of zeros, without a word, would train nothing."""
    layer, inputs = layer_and_inputs

    def call(value):
        return layer(*inputs[:operand], value, *inputs[operand + 1 :])

    tangent = torch.ones_like(inputs[operand])
    with pytest.raises(NotImplementedError, match=MESSAGE):
        torch.func.jvp(call, (inputs[operand],), (tangent,))
    with pytest.raises(NotImplementedError, match=MESSAGE):
        torch.func.jacfwd(call)(inputs[operand])
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=MESSAGE):
        call(forward_ad.make_dual(inputs[operand], tangent))


@pytest.mark.parametrize("name", ["weight", "lora_a", "lora_b", "bias"])
def test_jvp_of_every_operand(moe, device, name) -> None:
    order = moe.expert_sort(torch.zeros(3, 1, dtype=torch.long, device=device), 2)
    shapes = {"weight": (2, 4, 6), "lora_a": (2, 1, 4), "lora_b": (2, 6, 1), "bias": (2, 6)}
    operands = {key: torch.ones(shape, device=device) for key, shape in shapes.items()}
    x = torch.ones(3, 4, device=device)

    def call(value):
        return moe.grouped_lora_linear(x, order=order, **{**operands, name: value})

    with pytest.raises(NotImplementedError, match=f"grouped_lora_linear {MESSAGE}"):
        torch.func.jvp(call, (operands[name],), (operands[name],))


def test_jvp_of_the_activation(moe, device) -> None:
    x = torch.ones(3, 4, device=device)
    with pytest.raises(NotImplementedError, match=f"glu {MESSAGE}"):
        torch.func.jvp(lambda x: moe.glu(x, "silu"), (x,), (x,))


def test_constants_inside_of_a_jvp(layer_and_inputs) -> None:
    """What has no tangent may be used there."""
    layer, inputs = layer_and_inputs
    wanted = layer(*inputs).detach()
    one = torch.ones((), device=wanted.device)
    _, tangent = torch.func.jvp(lambda scale: scale * layer(*inputs).detach(), (one,), (one,))
    assert_same_bits(tangent, wanted)
