"""What training does with a layer of experts beyond one forward and one backward."""

from __future__ import annotations

import copy

import pytest
import torch
import torch._dynamo.testing
from torch.utils.checkpoint import checkpoint

from .._compare import assert_all_same_bits, assert_same_bits
from ._eager import LayerProblem, assert_layer_close_to_eager


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing(moe, device, use_reentrant):
    """Forward runs twice, once without a graph; outputs and gradients keep their bits."""
    problem = LayerProblem(bias=True, train_base=True, routing="sentinels")
    results = []
    for recompute in (False, True):
        layer, x, ids, gates, grad = problem.drawn(moe, device)
        inputs = (x, ids, gates)
        out = (
            checkpoint(layer, *inputs, use_reentrant=use_reentrant) if recompute else layer(*inputs)
        )
        out.backward(grad)
        results.append([out.detach(), *(t.grad for t in (x, gates, *layer.parameters()))])
    assert_all_same_bits(*results)


@pytest.mark.sees_defect("backward overwrites what forward saved: a second backward is wrong")
def test_backward_twice_over_one_graph(moe, device):
    layer, x, ids, gates, grad = LayerProblem(bias=True, train_base=True).drawn(moe, device)
    out = layer(x, ids, gates)
    leaves = [x, gates, *layer.parameters()]
    first = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    second = torch.autograd.grad(out, leaves, grad)
    assert_all_same_bits(first, second)


def test_nothing_expanded_or_copied_is_kept_for_backward(moe, device):
    """Of the weights only themselves are kept, and never the (T k, H) output of the experts.

    A copy of a stack per layer would undo quantization and cost its size in memory; the expanded
    output is not needed, since the gradient of the gates follows from that of the hidden rows.
    """
    problem = LayerProblem(tokens=50, hidden=24, intermediate=20, bias=True)
    layer, x, ids, gates, _ = problem.drawn(moe, device)
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        layer(x, ids, gates)
    own = {p.untyped_storage().data_ptr() for p in (*layer.parameters(), x, gates)}
    rest = [t for t in kept if t.untyped_storage().data_ptr() not in own]
    assert len(kept) > len(rest) > 0
    shapes = {tuple(t.shape) for t in rest if t.is_floating_point()}
    rows = 50 * problem.top_k
    assert (rows, problem.hidden) not in shapes
    assert max(t.numel() for t in rest) <= rows * 2 * problem.intermediate
    assert all(len(shape) <= 2 for shape in shapes), shapes


@pytest.mark.parametrize("leaf", ["x", "gates", "lora_A", "lora_B"])
def test_second_order_raises(moe, device, leaf):
    """Through every first derivative: an error, never a wrong or a missing number."""
    layer, x, ids, gates, _ = LayerProblem().drawn(moe, device)
    down = layer.expert_lora["down"]
    leaves = {"x": x, "gates": gates}
    leaves |= {name: getattr(down, name)["default"].weight for name in ("lora_A", "lora_B")}
    out = layer(x, ids, gates)
    (first,) = torch.autograd.grad(out.square().sum(), leaves[leaf], create_graph=True)
    with pytest.raises(RuntimeError, match=r"no autograd formula|once_differentiable"):
        first.square().sum().backward()


@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_without_graph_breaks(moe, device, dynamic):
    """The whole layer is one graph, and gives what eager experts give, gradients included."""
    torch._dynamo.reset()
    problem = LayerProblem(bias=True, routing="sentinels")

    def compiled(layer, *inputs):
        return torch.compile(layer, fullgraph=True, dynamic=dynamic, backend="aot_eager")(*inputs)

    assert_layer_close_to_eager(moe, device, problem, call=compiled)


def test_compiled_layer_serves_other_lengths(moe, device):
    """A second length of the batch compiles at most once more, and the third not at all."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layer = LayerProblem().module(moe, device)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for tokens in (21, 30, 17, 40):
        problem = LayerProblem(tokens)
        x, gates, _ = problem.inputs(device)
        ids = problem.ids(device)
        assert_same_bits(compiled(x, ids, gates), layer(x, ids, gates))
    assert counter.frame_count <= 2


def test_compiled_layer_follows_its_adapters(moe, device):
    torch._dynamo.reset()
    layer, x, ids, gates, _ = LayerProblem().drawn(moe, device)
    inputs = (x, ids, gates)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with_lora = compiled(*inputs)
    with layer.expert_lora.disabled():
        assert_same_bits(compiled(*inputs), layer(*inputs))
    assert_same_bits(compiled(*inputs), with_lora)


def test_deepcopy_shares_nothing(moe, device):
    layer, x, ids, gates, _ = LayerProblem(bias=True).drawn(moe, device)
    inputs = (x, ids, gates)
    expected = layer(*inputs)
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
    assert_same_bits(layer(*inputs), expected)
    assert torch.count_nonzero(twin(*inputs)) == 0
    twin.load_state_dict(layer.state_dict())
    assert_same_bits(twin(*inputs), expected)


@pytest.mark.sees_defect(
    "LoRA held as plain attributes stays behind when the module moves or is copied"
)
def test_moving_to_a_dtype_moves_lora_too(moe, device):
    problem = LayerProblem(bias=True)
    layer = problem.module(moe, device).to(torch.bfloat16)
    assert {p.dtype for p in layer.parameters()} == {torch.bfloat16}
    x, gates, _ = problem.inputs(device)
    out = layer(x.bfloat16(), problem.ids(device), gates)
    assert out.dtype == torch.bfloat16 and bool(out.isfinite().all())


@pytest.mark.sees_defect("LoRA held as plain attributes is in no state dict")
def test_state_dict_names_and_round_trip(moe, device, tmp_path):
    """Keys and shapes are a format: base as in transformers, LoRA as in PEFT."""
    problem = LayerProblem(bias=True, rank=3, rank_down=2)
    layer = problem.module(moe, device)
    shapes = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    assert shapes == {
        "gate_up_proj": (5, 40, 24),
        "down_proj": (5, 24, 20),
        "gate_up_proj_bias": (5, 40),
        "down_proj_bias": (5, 24),
        "expert_lora.gate_up.lora_A.default.weight": (15, 24),
        "expert_lora.gate_up.lora_B.default.weight": (40, 15),
        "expert_lora.down.lora_A.default.weight": (10, 20),
        "expert_lora.down.lora_B.default.weight": (24, 10),
    }
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other = problem.module(moe, device, seed=9)
    other.load_state_dict(torch.load(tmp_path / "layer.pt", weights_only=True))
    x, gates, _ = problem.inputs(device)
    ids = problem.ids(device)
    assert_same_bits(other(x, ids, gates), layer(x, ids, gates))
