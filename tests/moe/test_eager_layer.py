"""The layer as one autograd node: its operands' order and its gradients, through the interpreter.

The op of the compiled graph says what it must give, bit for bit.
"""

from __future__ import annotations

import types

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from .._compare import assert_same_bits
from ..kernels.test_gated_quantized_experts import Layer as QuantizedLayer
from ..kernels.test_gated_quantized_experts import Problem as QuantizedProblem
from ._eager import LayerProblem

SMALL = {"tokens": 6, "experts": 3, "hidden": 16, "intermediate": 16}
PROBLEMS = [
    LayerProblem(**SMALL),
    LayerProblem(**SMALL, rank=1, rank_down=None),
    LayerProblem(**SMALL, rank=None, rank_down=3, lora_dtype=torch.float16, dtype=torch.float16),
    LayerProblem(**SMALL, rank=None, rank_down=None, train_base=True),
    LayerProblem(**SMALL, bias=True, train_base=True, routing="sentinels"),
    LayerProblem(
        **SMALL, activation="gpt_oss", transposed=True, interleaved=True, bias=True, train_base=True
    ),
]


@pytest.fixture
def taken(submodule, monkeypatch, watch):
    """How often the node was taken, in a list; on a CPU as on a GPU."""
    module = submodule("moe.eager_layer")
    monkeypatch.setattr(module, "_is_on_gpu", lambda _: True)
    return watch(module, "_forward", lambda *_: 1)


@pytest.fixture
def by_ops(submodule):
    """A context in which the layer calls its ops, as torch.compile has it."""

    def without() -> pytest.MonkeyPatch:
        patch = pytest.MonkeyPatch()
        patch.setattr(submodule("moe.experts"), "eager_layer", lambda *_: None)
        return patch

    return without


def compared(by_ops, taken, run) -> None:
    """`run()` gives tensors by name: alike with the node and with the ops."""
    found = run()
    assert taken == [1]
    patch = by_ops()
    try:
        expected = run()
    finally:
        patch.undo()
    assert taken == [1] and found.keys() == expected.keys()
    for name, value in expected.items():
        if value is None:
            assert found[name] is None, name
        else:
            assert found[name].stride() == value.stride(), name
            assert_same_bits(found[name], value)


def results(out: torch.Tensor, leaves: dict, grad: torch.Tensor) -> dict:
    wanted = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    found = torch.autograd.grad(out, list(wanted.values()), grad)
    return {"out": out.detach(), **dict(zip(wanted, found, strict=True))}


@pytest.mark.kernels_ci
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_bits_of_the_ops(moe, device, taken, by_ops, problem) -> None:
    layer, x, ids, gates, grad = problem.drawn(moe, device, "triton")
    leaves = {"x": x, "gates": gates, **dict(layer.named_parameters())}
    compared(by_ops, taken, lambda: results(layer(x, ids, gates), leaves, grad))


@pytest.mark.parametrize("wanted", ["x", "gates", "lora_A", "lora_B"])
def test_one_leaf_alone(moe, device, taken, by_ops, wanted) -> None:
    layer, x, ids, gates, grad = PROBLEMS[0].drawn(moe, device, "triton")
    leaves = {"x": x, "gates": gates, **dict(layer.named_parameters())}
    for name, leaf in leaves.items():
        leaf.requires_grad_(wanted in name if "lora" in wanted else name == wanted)
    compared(by_ops, taken, lambda: results(layer(x, ids, gates), leaves, grad))


@pytest.fixture
def with_factors(moe, submodule, device):
    """`with_factors(kind)`: x, A and B of both projections, and a call of a layer over them."""

    def make(kind: str):
        problem, rank = PROBLEMS[0], 3
        layer, x, ids, gates, grad = problem.drawn(moe, device)
        e, h, i = problem.experts, problem.hidden, problem.intermediate
        leaves, factors = {"x": x.detach()}, []
        for name, inputs, outputs in (("gate_up", h, 2 * i), ("down", i, h)):
            sides = (outputs, inputs) if kind == "swapped" else (inputs, outputs)
            a = torch.randn(e * rank, sides[0], device=device)
            b = torch.randn(sides[1], e * rank, device=device)
            leaves |= {f"{name}.A": a, f"{name}.B": b}
            made = submodule("moe.lora").PeftFactors(a, b, e, 0.5, swapped=kind == "swapped")
            factors.append(lambda m=made: moe.LoraFactors(m.a, m.b, 0.5) if kind == "stacks" else m)
        options = {"layout": layer.layout, "backend": "triton"}

        def run() -> dict:
            lora = moe.ExpertsLora(*(one() for one in factors))
            tensors = (leaves["x"], ids, gates.detach(), layer.gate_up_proj, layer.down_proj)
            return results(moe.experts_forward(*tensors, lora=lora, **options), leaves, grad)

        return leaves, run

    return make


@pytest.mark.parametrize("kind", ["stacks", "matrices", "swapped"])
def test_factors_however_they_lie(taken, by_ops, with_factors, kind) -> None:
    """Stacks of any strides, PEFT's two matrices, and those of a wrapper that swapped them."""
    leaves, run = with_factors(kind)
    for leaf in leaves.values():
        leaf.requires_grad_()
    compared(by_ops, taken, run)


@pytest.mark.sees_defect(
    "gradients of swapped factors are exchanged",
    '    return wants[::-1] if kind == "swapped" else wants\n',
    "    return wants\n",
)
@pytest.mark.parametrize("wanted", ["gate_up.A", "down.B"])
def test_swapped_factors_want_their_own_gradients(taken, by_ops, with_factors, wanted) -> None:
    """One matrix of a swapped pair trains: the kernels are asked for the gradient of that one."""
    leaves, run = with_factors("swapped")
    leaves[wanted].requires_grad_()
    compared(by_ops, taken, run)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_and_a_graph_that_serves_twice(moe, device, taken, use_reentrant) -> None:
    layer, x, ids, gates, grad = PROBLEMS[4].drawn(moe, device, "triton")
    out = layer(x, ids, gates)
    first = torch.autograd.grad(out, x, grad, retain_graph=True)[0]
    assert_same_bits(torch.autograd.grad(out, x, grad)[0], first)
    again = checkpoint(layer, x, ids, gates, use_reentrant=use_reentrant)
    again.backward(grad)
    assert_same_bits(again.detach(), out.detach())
    assert_same_bits(x.grad, first)
    assert len(taken) == 3


def test_leading_dimensions_and_no_gradient(moe, device, taken) -> None:
    layer, x, ids, gates, _ = PROBLEMS[0].drawn(moe, device, "triton")
    out = layer(x, ids, gates)
    shaped = [one.reshape(2, 3, -1) for one in (x, ids, gates)]
    assert_same_bits(layer(*shaped), out.reshape(2, 3, -1))
    with torch.no_grad():
        alone = layer(x, ids, gates)
    assert not alone.requires_grad
    assert_same_bits(alone, out.detach())
    assert len(taken) == 3


def test_what_is_left_to_the_ops(moe, device, taken) -> None:
    """Subclasses and no tokens; gradients of gradients are refused."""
    layer, x, ids, gates, grad = PROBLEMS[0].drawn(moe, device, "triton")

    class Marked(torch.Tensor):
        """A subclass without behaviour of its own."""

    layer(x.detach().as_subclass(Marked), ids, gates)
    layer(x[:0], ids[:0], gates[:0])
    assert not taken
    out = layer(x, ids, gates)
    (dx,) = torch.autograd.grad(out, x, grad, create_graph=True)
    with pytest.raises(RuntimeError, match=r"once_differentiable|does not require grad"):
        dx.sum().backward()


def test_wrong_arguments_are_refused(moe, device, taken) -> None:
    layer, x, ids, gates, _ = PROBLEMS[0].drawn(moe, device, "triton")
    assert layer(x[0], ids[0], gates[0]).shape == x[0].shape, "one token without a dimension"
    for error, arguments, message in (
        (ValueError, (x[:, 1:], ids, gates), "hidden_states must be"),
        (TypeError, (x, ids.float(), gates), "expert_ids must have dtype"),
        (ValueError, (x, ids, gates[:, :1]), "top_k_index and top_k_weights"),
        (TypeError, (x.half(), ids, gates), "weight must have dtype"),
    ):
        with pytest.raises(error, match=message):
            layer(*arguments)
    with pytest.raises(ValueError, match="computes no float64"):
        layer.double()(x.double(), ids, gates)


def test_several_gradients_at_once_are_refused(moe, device, taken) -> None:
    layer, x, ids, gates, grad = PROBLEMS[0].drawn(moe, device, "triton")
    out = layer(x, ids, gates)
    with pytest.raises(RuntimeError, match="one plain gradient at a time"):
        torch.autograd.grad(out, x, torch.stack((grad, grad)), is_grads_batched=True)


QUANTIZED = [
    QuantizedProblem(lora_dtype=torch.bfloat16),
    QuantizedProblem(rank=None, rank_down=2, bias=True, wanted=("x", "gates", "down.b")),
    QuantizedProblem(activation="gelu", interleaved=True, routing="sentinels"),
    QuantizedProblem(wanted=("down.a",)),
]


@pytest.mark.parametrize("problem", QUANTIZED, ids=str)
def test_bits_of_the_ops_over_4_bits(moe, device, taken, by_ops, problem) -> None:
    compared(by_ops, taken, QuantizedLayer(moe, device, problem).step)


@pytest.fixture
def prepared(submodule, monkeypatch):
    """Kernels by name and rows of x, of launches that were recorded, none of which was made."""
    plans, launches = submodule("kernels.launch.launch_plan"), []

    def launch(recording, kernel, grid, *args, **named):
        launches.append((kernel.__name__, recording._operands[0]))

    ops = types.SimpleNamespace(
        launch_plan=lambda *_: [],  # no plan, and none that is played
        nf4_product=types.SimpleNamespace(default=None),
    )
    monkeypatch.setattr(plans, "_plays", lambda _: True)
    monkeypatch.setattr(plans, "ops", ops)
    monkeypatch.setattr(plans.Recording, "launch", launch)
    monkeypatch.setattr(plans.Recording, "program", lambda *_: [])
    ahead = submodule("moe.eager_layer")

    def in_background(compile_one, operands):
        assert all(x is None or x.data_ptr() >= 1 << 60 for x in operands), "stand-ins alone"
        compile_one(operands)

    monkeypatch.setattr(ahead, "in_background", in_background)
    monkeypatch.setattr(ahead, "_begun", set())
    return launches


@pytest.mark.kernels_ci
@pytest.mark.parametrize("problem", PROBLEMS[:2] + PROBLEMS[-1:], ids=str)
def test_compiled_ahead(moe, submodule, device, taken, prepared, problem) -> None:
    """A first forward asks for the kernels of both directions and of all heights of tiles."""
    layer, x, ids, gates, _ = problem.drawn(moe, device, "triton")
    layer(x, ids, gates)
    names = [name for name, _ in prepared]
    means = submodule("moe.eager_layer")._MEANS
    assert names.count("_gated_forward") == 2 + len(means), "prepared, each height, recorded"
    assert names.count("_gated_backward") == 1 + len(means)
    sizes = {end - start for name, (start, end) in prepared if name == "_gated_forward"}
    row = x.shape[1] * x.element_size()
    tokens = {max(mean * problem.experts // problem.top_k, 1) for mean in means}
    assert sizes == {row * number for number in {x.shape[0], *tokens}}
    prepared.clear()
    layer(x, ids, gates)
    names = [name for name, _ in prepared]
    assert names.count("_gated_backward") == 1, "the heights were begun before"


def test_compiled_ahead_over_4_bits(moe, submodule, device, taken, prepared) -> None:
    QuantizedLayer(moe, device, QUANTIZED[0]).step()
    names = [name for name, _ in prepared]
    means = submodule("moe.eager_layer")._MEANS
    products = "_packed_product"
    assert len({name for name in names if name.startswith(products)}) == 1
    sorts = names.count("_place")
    assert sorts == 2 + len(means), "prepared, each height, recorded"
    assert names.count("_glu_backward_dots") == 2 + len(means), "backward was recorded, too"
