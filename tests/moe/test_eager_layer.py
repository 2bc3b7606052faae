"""The layer as one autograd node: operands' order and gradients, launches played again."""

import contextlib
import dataclasses
import gc
import os
import subprocess
import sys
import types

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from .._compare import (
    assert_all_same_bits,
    assert_same_bits,
    assert_same_tensors,
    relative_error,
)
from ._eager import (
    LayerProblem,
    PackedLayer,
    PackedProblem,
    assert_first_order_alone,
    compare,
    gradients,
    kept_for_backward,
    step,
    together,
)
from .test_experts import GPT_OSS

SMALL = {"tokens": 6, "experts": 3, "hidden": 16, "intermediate": 16}
PROBLEMS = [
    LayerProblem(**SMALL),
    LayerProblem(**SMALL, rank=1, rank_down=None),
    LayerProblem(**SMALL, rank=None, rank_down=3, lora_dtype=torch.float16, dtype=torch.float16),
    LayerProblem(**SMALL, rank=None, rank_down=None, train_base=True),
    LayerProblem(**SMALL, bias=True, train_base=True, routing="sentinels"),
    LayerProblem(**SMALL, **GPT_OSS, train_base=True),
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

    @contextlib.contextmanager
    def without():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(submodule("moe.experts"), "eager_layer", lambda *_: None)
            yield

    return without


def compared(by_ops, taken, run) -> None:
    """`run()` gives tensors by name: alike with the node and with the ops."""
    found = run()
    assert taken == [1]
    with by_ops():
        expected = run()
    assert taken == [1]
    compare(found, expected)


@pytest.mark.kernels_ci
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_bits_of_the_ops(moe, device, taken, by_ops, problem) -> None:
    drawn = problem.drawn(moe, device, "triton")
    compared(by_ops, taken, lambda: step(*drawn))


@pytest.mark.parametrize("wanted", ["x", "gates", "lora_A", "lora_B"])
def test_one_leaf_alone(moe, device, taken, by_ops, wanted) -> None:
    layer, x, ids, gates, grad = PROBLEMS[0].drawn(moe, device, "triton")
    leaves = {"x": x, "gates": gates, **dict(layer.named_parameters())}
    for name, leaf in leaves.items():
        leaf.requires_grad_(wanted in name if "lora" in wanted else name == wanted)
    compared(by_ops, taken, lambda: step(layer, x, ids, gates, grad))


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
            return gradients(moe.experts_forward(*tensors, lora=lora, **options), leaves, grad)

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
    leaves = [x, gates, *layer.parameters()]
    out = layer(x, ids, gates)
    first = torch.autograd.grad(out, leaves, grad, retain_graph=True)
    assert_all_same_bits(torch.autograd.grad(out, leaves, grad), first)
    again = checkpoint(layer, x, ids, gates, use_reentrant=use_reentrant)
    again.backward(grad)
    assert_same_bits(again.detach(), out.detach())
    assert_all_same_bits([leaf.grad for leaf in leaves], first)
    assert len(taken) == 3


def test_no_node_where_nothing_is_recorded(moe, submodule, device, taken, monkeypatch) -> None:
    layer, x, ids, gates, _ = PROBLEMS[0].drawn(moe, device, "triton")
    expected = layer(x, ids, gates)
    monkeypatch.setattr(submodule("moe.eager_layer"), "_Layer", None)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert_same_bits(layer(x, ids, gates).clone(), expected.detach())
    assert len(taken) == 3


def test_leading_dimensions(moe, device, taken) -> None:
    layer, x, ids, gates, _ = PROBLEMS[0].drawn(moe, device, "triton")
    out = layer(x, ids, gates)
    shaped = [one.reshape(2, 3, -1) for one in (x, ids, gates)]
    assert_same_bits(layer(*shaped), out.reshape(2, 3, -1))
    assert len(taken) == 2


def test_what_is_left_to_the_ops(moe, device, taken) -> None:
    """Subclasses and no tokens; gradients of gradients are refused."""
    layer, x, ids, gates, _ = PROBLEMS[0].drawn(moe, device, "triton")

    class Marked(torch.Tensor):
        """A subclass without behaviour of its own."""

    layer(x.detach().as_subclass(Marked), ids, gates)
    layer(x[:0], ids[:0], gates[:0])
    assert not taken
    assert_first_order_alone(layer(x, ids, gates), x)


@pytest.mark.parametrize("place", ["x", "factor", "bias"])
def test_what_a_transform_left_behind_is_left_to_the_ops(moe, device, taken, place) -> None:
    layer, x, ids, gates, _ = PROBLEMS[0].drawn(moe, device, "triton")
    experts, outputs, inputs = layer.gate_up_proj.shape
    a, b, bias = (
        torch.randn(experts, *s, device=device) for s in ((3, inputs), (outputs, 3), (outputs,))
    )
    given, left = {"x": x.detach(), "factor": a, "bias": bias}, []
    torch.func.grad(lambda t: (left.append(t), t.sum())[1])(given[place])

    def call(**changed) -> torch.Tensor:
        used = given | changed
        lora = moe.ExpertsLora(moe.LoraFactors(used["factor"], b, 0.5), None)
        options = {"lora": lora, "layout": layer.layout, "backend": "triton"}
        tensors = (used["x"], ids, gates.detach(), layer.gate_up_proj, layer.down_proj)
        return moe.experts_forward(*tensors, gate_up_bias=used["bias"], **options).detach()

    expected = call()
    assert taken.pop()
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            assert_same_bits(call(**{place: left[0]}), expected)
    assert not taken


REFUSED = (
    (lambda x, i, w: (x, i[1:], w[1:]), r"top_k_index and top_k_weights .* for the 21 tokens"),
    (lambda x, i, w: (x, i, w[:, :1]), "got .21, 2. and .21, 1."),
    (lambda x, i, w: (x[:, 1:], i, w), r"hidden_states must be \(\.\.\., 24\)"),
    (lambda x, i, w: (x.bfloat16(), i, w), "weight must have dtype bfloat16"),
    (lambda x, i, w: (x, i.float(), w), "expert_ids must have dtype"),
    (lambda x, i, w: (x, i, w.detach().long()), "gates must have dtype"),
)


def test_wrong_arguments_are_refused(moe, device, taken, by_ops) -> None:
    layer, x, ids, gates, _ = LayerProblem().drawn(moe, device, "triton")
    assert layer(x[0], ids[0], gates[0]).shape == x[0].shape, "one token without a dimension"
    for change, message in REFUSED:
        for by in (contextlib.nullcontext, by_ops):
            with by(), pytest.raises((TypeError, ValueError), match=message):
                layer(*change(x, ids, gates))
    with pytest.raises(ValueError, match="computes no float64"):
        layer.double()(x.double(), ids, gates)


def test_several_gradients_at_once_are_refused(moe, device, taken) -> None:
    layer, x, ids, gates, grad = PROBLEMS[0].drawn(moe, device, "triton")
    out = layer(x, ids, gates)
    with pytest.raises(RuntimeError, match="one plain gradient at a time"):
        torch.autograd.grad(out, x, torch.stack((grad, grad)), is_grads_batched=True)


QUANTIZED = [
    PackedProblem(lora_dtype=torch.bfloat16),
    PackedProblem(rank=None, rank_down=2, bias=True, wanted=("x", "gates", "down.b")),
    PackedProblem(activation="gelu", interleaved=True, routing="sentinels"),
    PackedProblem(wanted=("down.a",)),
    PackedProblem(hidden=48, strategy="auto"),
    PackedProblem(quant_type="fp8", strategy="chunked", routing="sentinels"),
]


@pytest.mark.parametrize("problem", QUANTIZED, ids=str)
def test_bits_of_the_ops_over_4_bits(moe, device, taken, by_ops, problem) -> None:
    compared(by_ops, taken, PackedLayer(moe, device, problem).step)


@pytest.mark.parametrize("down", ["nf4", "fp4", "fp8"])
@pytest.mark.parametrize("nested", [False, True])
def test_a_layer_over_packed_experts_is_two_plans(
    moe, submodule, device, taken, by_ops, watch, nested, down
) -> None:
    """One forward and one back, whatever both stacks share, and no tensor is handed over twice."""
    layer = PackedLayer(moe, device, PackedProblem(nested=nested))
    if down != "nf4":
        weight = layer.module.down_proj.decode(dtype=torch.float32)
        layer.module.down_proj = moe.QuantizedExperts.from_weight(
            weight, quant_type=down, strategy="chunked"
        )
    place = submodule("moe.eager_layer")
    calls = watch(place, "replayed", lambda _, name, function, operands, *__: (name, operands))
    compared(by_ops, taken, layer.step)
    assert [name for name, _ in calls] == ["experts", "experts_backward"]
    for _, operands in calls:
        numbers = [id(x) for x in operands if x is not None]
        assert len(set(numbers)) == len(numbers)


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
    monkeypatch.setattr(ahead, "compiles", lambda: True)
    monkeypatch.setattr(ahead, "_begun", set())
    return launches


@pytest.mark.parametrize(("problem", "forgets"), [(3, False), (4, False), (4, True)])
def test_all_that_a_forward_keeps_is_one_tensor(
    moe, plans, submodule, device, taken, by_ops, prepared, monkeypatch, problem, forgets
) -> None:
    """How it lies is found again where that was forgotten before the backward, or is said."""
    monkeypatch.setattr(plans, "_refused", refused := set())
    real, place = plans.replayed, submodule("moe.eager_layer")

    def joined(*arguments):
        found = real(*arguments)
        return [found[0], together(plans, found[1:])] if arguments[5:] == (True,) else found

    monkeypatch.setattr(place, "replayed", joined)
    layer, x, ids, gates, grad = PROBLEMS[problem].drawn(moe, device, "triton")
    leaves = {"x": x, "gates": gates, **dict(layer.named_parameters())}

    def run() -> dict:
        out = layer(x, ids, gates)
        if forgets:
            place._kept.clear()
        return gradients(out, leaves, grad)

    saved = kept_for_backward(lambda: layer(x, ids, gates))
    found = run()
    assert not refused, "both directions can be recorded"
    own = {one.data_ptr() for one in leaves.values()}
    (kept,) = (one for one in saved if one.data_ptr() not in own)
    assert kept.dtype == torch.uint8 and kept.ndim == 1
    with by_ops():
        expected = run()
    assert_same_tensors(found, expected)
    if forgets:
        monkeypatch.setattr(place, "prepare", lambda *_: None)
        with pytest.raises(
            RuntimeError, match=r"forgotten after 1024 others.*run the forward again"
        ):
            run()


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


def test_nothing_is_begun_ahead_of_what_came(
    moe, submodule, device, taken, prepared, monkeypatch
) -> None:
    """A package that brings a layer's kernels brings those of all heights."""
    monkeypatch.setattr(submodule("moe.eager_layer"), "compiles", lambda: False)
    layer, x, ids, gates, _ = PROBLEMS[0].drawn(moe, device, "triton")
    layer(x, ids, gates)
    assert [name for name, _ in prepared].count("_gated_forward") == 2, "prepared and recorded"


def test_ids_and_gates_with_gaps_are_played(moe, plans, device, taken, prepared, monkeypatch):
    """A copy by torch inside of a recording would launch the layer from Python in every call."""
    refused = set()
    monkeypatch.setattr(plans, "_refused", refused)
    layer, x, ids, gates, grad = PROBLEMS[0].drawn(moe, device, "triton")
    apart = [torch.stack((one.detach(), one.detach()), -1)[..., 0] for one in (ids, gates)]
    assert not any(one.is_contiguous() for one in apart)
    layer(x, apart[0], apart[1].requires_grad_()).backward(grad)
    assert taken and not refused


def test_compiled_ahead_over_4_bits(moe, submodule, device, taken, prepared) -> None:
    PackedLayer(moe, device, QUANTIZED[0]).step()
    names = [name for name, _ in prepared]
    means = submodule("moe.eager_layer")._MEANS
    products = "_packed_product"
    assert len({name for name in names if name.startswith(products)}) == 1
    sorts = names.count("_place")
    assert sorts == 2 + len(means), "prepared, each height, recorded"
    assert names.count("_glu_backward_dots") == 2 + len(means), "backward was recorded, too"


@pytest.mark.parametrize("quant_type", ["nf4", "fp4", "mxfp4", "fp8"])
def test_slices_are_recorded(
    moe, submodule, device, taken, prepared, monkeypatch, quant_type
) -> None:
    """All of a layer whose experts are decoded to memory is launches: two for a slice."""
    problem = PackedProblem(strategy="chunked", quant_type=quant_type, hidden=96)
    bound = problem.hidden * 2 * problem.intermediate * 4
    monkeypatch.setattr(submodule("moe.quantized.strategy"), "SLICE_BYTES", (bound, bound))
    PackedLayer(moe, device, problem).step()
    names = [name for name, _ in prepared]
    decodes = "_fp8" if quant_type == "fp8" else "_nibbles"
    directions = 2 + len(submodule("moe.eager_layer")._MEANS)  # prepared, heights, recorded
    # Of gate_up one expert at a time, of down two; three experts in each.
    assert names.count(decodes) == names.count("_grouped_product") == 2 * directions * (3 + 2)
    assert names.count("_tiles_of_slices") == 2 * directions * 2


LARGE = {"tokens": 300, "top_k": 2, "experts": 8, "hidden": 256, "intermediate": 128}
PLAYED = [
    LayerProblem(**LARGE, dtype=torch.bfloat16, lora_dtype=torch.bfloat16),
    LayerProblem(**LARGE, dtype=torch.bfloat16),
    LayerProblem(**LARGE, dtype=torch.float16, rank=12, rank_down=1),
    LayerProblem(**LARGE, dtype=torch.bfloat16, rank=128, rank_down=None),
    LayerProblem(**LARGE, dtype=torch.bfloat16, rank=None, rank_down=None),
    LayerProblem(**LARGE, dtype=torch.bfloat16, train_base=True, bias=True),
    LayerProblem(**LARGE, dtype=torch.bfloat16, routing="sentinels"),
    LayerProblem(**LARGE, **GPT_OSS, dtype=torch.bfloat16),
    LayerProblem(dtype=torch.float32),
    LayerProblem(tokens=1, dtype=torch.bfloat16),
]


def assert_played_as_launched(launched, *arguments) -> dict[str, torch.Tensor]:
    """Returns what it is in either way."""
    with launched():
        expected = step(*arguments)
    compare(step(*arguments), expected)
    return expected


@pytest.mark.gpu
@pytest.mark.parametrize("problem", PLAYED, ids=str)
def test_bits_of_launches(moe, device, launched, played, problem) -> None:
    """Other addresses, another routing, with and without backward: as if launched one by one."""
    layer = problem.module(moe, device)
    for seed in range(3):
        (x, gates, grad), ids = problem.inputs(device, seed), problem.ids(device, seed)
        expected = assert_played_as_launched(launched, layer, x, ids, gates, grad)
        with torch.no_grad():
            assert_same_bits(layer(x, ids, gates), expected["out"])
    assert len(played) == 3, "with backward, backward and without, once each"


@pytest.mark.gpu
def test_shapes_alternate(moe, device, launched, played) -> None:
    layer = PLAYED[0].module(moe, device)
    for _ in range(3):
        for tokens in (16, 200, 17, 700):
            problem = LayerProblem(**{**LARGE, "tokens": tokens}, dtype=torch.bfloat16)
            (x, gates, grad), ids = problem.inputs(device), problem.ids(device)
            assert_played_as_launched(launched, layer, x, ids, gates, grad)
    assert len(played) == 8


@pytest.mark.gpu
def test_what_changes_between_calls_is_read(moe, device, launched) -> None:
    """Nothing computed from a parameter outlives a call, nor does an address of it."""
    layer, x, ids, gates, grad = PLAYED[1].drawn(moe, device)
    trained = [p for p in layer.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-2)

    def add() -> None:
        for p in layer.parameters():
            p.data.add_(0.01)

    def swap() -> None:
        for p in layer.parameters():
            p.data = p.data.clone() * 1.5

    def load() -> None:
        state = {name: 0.9 * value for name, value in layer.state_dict().items()}
        layer.load_state_dict(state, assign=True)
        for name, p in layer.named_parameters():
            p.requires_grad_("lora" in name)

    def update() -> None:
        layer(x, ids, gates).backward(grad)
        optimizer.step()
        optimizer.zero_grad()

    step(layer, x, ids, gates, grad)
    for change in (add, swap, update, load):
        change()
        assert_played_as_launched(launched, layer, x, ids, gates, grad)


@pytest.mark.gpu
def test_strides_and_alignment_are_part_of_the_plan(moe, device, launched) -> None:
    layer, x, ids, gates, grad = PLAYED[0].drawn(moe, device)
    wide = torch.zeros(x.shape[0], x.shape[1] + 8, dtype=x.dtype, device=device)
    for first in (0, 8, 1, 3):
        if first + x.shape[1] > wide.shape[1]:
            continue
        other = wide[:, first : first + x.shape[1]].copy_(x.detach()).requires_grad_()
        assert_played_as_launched(launched, layer, other, ids, gates, grad)
    spread = grad[:1].expand_as(grad)
    assert_played_as_launched(launched, layer, x, ids, gates, spread)


MEMORY = [
    LayerProblem(2048, 8, 32, 1024, 512, 16, 16, dtype=torch.bfloat16),
    LayerProblem(2048, 8, 32, 1024, 512, 128, 128, dtype=torch.bfloat16),
    LayerProblem(2048, 8, 32, 1024, 512, None, None, train_base=True, dtype=torch.bfloat16),
    LayerProblem(256, 8, 32, 1024, 512, 64, 64, train_base=True, dtype=torch.bfloat16),
]


@pytest.mark.gpu
@pytest.mark.parametrize("problem", MEMORY, ids=str)
def test_memory_is_no_more_than_that_of_launches(moe, device, launched, problem) -> None:
    layer, x, ids, gates, grad = problem.drawn(moe, device)

    def peak() -> int:
        for _ in range(2):
            gc.collect()  # else what the call before left may go in between: a lower peak
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            step(layer, x, ids, gates, grad)
        return torch.cuda.max_memory_allocated() - before

    with launched():
        alone = peak()
    assert peak() <= max(1.02 * alone, alone + 5 * 2**20)


@pytest.mark.gpu
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("lora_dtype", [torch.bfloat16, torch.float32])
def test_bits_of_launches_over_4_bits(
    moe, device, launched, played, nested, quant_type, lora_dtype
) -> None:
    options = {"quant_type": quant_type, "nested": nested, "strategy": "auto", "blocksize": 64}
    dtypes = {"dtype": torch.bfloat16, "lora_dtype": lora_dtype}
    layer = PackedLayer(moe, device, PackedProblem(**LARGE, **dtypes, **options, rank=8))
    for seed in range(3):
        layer.draw(device, seed)
        with launched():
            expected = layer.step("auto")
        compare(layer.step("auto"), expected)
    assert len(played) == 2


@pytest.mark.gpu
@pytest.mark.parametrize("at_once", [3, 8])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("quant_type", ["nf4", "fp4", "mxfp4", "fp8"])
def test_bits_of_launches_in_slices(
    moe, submodule, device, launched, played, monkeypatch, quant_type, dtype, at_once
) -> None:
    """Decoded to memory, some experts at a time: as launched one by one, and near `selective`."""
    sizes = {"tokens": 300, "experts": 8, "hidden": 224, "intermediate": 160}
    form = {"bias": True, "routing": "sentinels", "dtype": dtype, "rank": 8, "rank_down": 12}
    options = {**sizes, **form, "quant_type": quant_type}
    problem = PackedProblem(**options, strategy="chunked", blocksize=64)
    bound = at_once * 2 * problem.hidden * problem.intermediate * dtype.itemsize
    monkeypatch.setattr(submodule("moe.quantized.strategy"), "SLICE_BYTES", (bound, bound))
    monkeypatch.setattr(submodule("moe.quantized.eager_quantized"), "_taken", {})
    layer = PackedLayer(moe, device, problem)
    for routing in ("sentinels", "one", "no-ends"):
        layer.ids.copy_(dataclasses.replace(problem, routing=routing).ids(device))
        with launched():
            expected = layer.step("auto")
        found = layer.step("auto")
        compare(found, expected)
        stacks = (layer.module.gate_up_proj, layer.module.down_proj)
        for one in stacks:
            one.strategy = "selective"
        for name, value in layer.step("auto").items():
            assert relative_error(found[name], value) <= 2e-2, name
        for one in stacks:
            one.strategy = "chunked"
    assert sorted(set(played) - {"expert_sort"}) == ["experts", "experts_backward"]
    assert len(played) <= 3, "once each"


@pytest.mark.gpu
def test_a_slice_bounds_the_peak(moe, submodule, device, monkeypatch) -> None:
    """Of a stack that is decoded in slices, one slice is in memory beside what one row takes."""
    problem = PackedProblem(
        tokens=64, experts=16, hidden=1040, intermediate=1040, strategy="auto", blocksize=64,
        dtype=torch.bfloat16,
    )  # fmt: skip
    each = 2 * problem.hidden * problem.intermediate * 2
    monkeypatch.setattr(submodule("moe.quantized.strategy"), "SLICE_BYTES", (each, 3 * each))
    layer = PackedLayer(moe, device, problem)
    layer.step("auto")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    layer.step("auto")
    rows = problem.tokens * problem.top_k
    activations = 10 * rows * 3 * problem.hidden * 4
    most = 3 * each + activations + sum(x.nbytes for x in layer.leaves.values())
    assert torch.cuda.max_memory_allocated() - before <= most < 16 * each / 2


FIRST_CALL = """
import torch
from kernels import get_kernel

moe = get_kernel({repo_id!r}, version=1, trust_remote_code=True).moe
layer = moe.Experts(8, 256, 128, device="cuda", dtype=torch.bfloat16)
layer.add_adapter(r=16, alpha=16)
with torch.no_grad():
    for parameter in layer.parameters():
        parameter.normal_(std=0.02)
for tokens in (300, 7):
    x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    top = torch.rand(tokens, 8, device="cuda").topk(2)
    layer(x, top.indices, top.values.bfloat16()).sum().backward()
    assert x.grad.isfinite().all() and x.grad.any()
"""


@pytest.mark.gpu
def test_a_first_call_needs_no_compiler(repo_id, tmp_path) -> None:
    """In a fresh process with nothing compiled before and nothing on the PATH."""
    environment = {key: value for key, value in os.environ.items() if key != "CC"}
    environment |= {"PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    command = [sys.executable, "-c", FIRST_CALL.format(repo_id=repo_id)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "launched from Python" not in done.stderr
