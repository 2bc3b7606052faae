"""moe.Experts against eager experts in float64, in its output and in every gradient."""

import contextlib
import dataclasses

import pytest
import torch
import torch._dynamo.testing
from hypothesis import given, settings
from hypothesis import strategies as st

from .._compare import (
    assert_all_same_bits,
    assert_same_bits,
    assert_same_tensors,
    capture,
    relative_error,
)
from ..kernels._products import laid_out
from ._eager import (
    LayerProblem,
    assert_graph_follows,
    assert_layer_close_to_eager,
    kept_for_backward,
    step,
)

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROUTINGS = ("random", "one", "no-ends", "sentinels", "all-sentinels")
GPT_OSS = {"activation": "gpt_oss", "transposed": True, "interleaved": True, "bias": True}

PROBLEMS = (
    LayerProblem(),
    LayerProblem(rank=None),
    LayerProblem(rank_down=None),
    LayerProblem(rank=None, rank_down=None, train_base=True),
    LayerProblem(rank=3, rank_down=12, rslora=True, train_base=True, bias=True),
    LayerProblem(hidden=24, intermediate=12),  # 2I == H: no shape tells the projections apart
    LayerProblem(**GPT_OSS),
    LayerProblem(transposed=True, activation="gelu_tanh"),
    LayerProblem(gated=False, activation="relu2", intermediate=17),
    LayerProblem(activation="gelu", top_k=1, experts=3, rank=1),
)
# Of 96 tokens, so that no gradient's error is drawn by lot.
BY_PATH = [
    (dataclasses.replace(problem, dtype=dtype, tokens=96), "auto")
    for problem in PROBLEMS
    for dtype in DTYPES
]
BY_PATH.append((LayerProblem(20, hidden=16, routing="sentinels", **GPT_OSS), "triton"))


@pytest.mark.sees_defect("LoRA on one projection, with experts that have no rows")
@pytest.mark.sees_defect("LoRA must be on both projections")
@pytest.mark.kernels_ci
@pytest.mark.parametrize(("problem", "backend"), BY_PATH, ids=str)
def test_error_against_float64(moe, device, problem, backend):
    """LoRA in float32 over any dtype."""
    assert_layer_close_to_eager(moe, device, problem, backend=backend)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize("backend", [None, "triton"])
def test_router_weights_of_any_dtype(moe, device, dtype, backend):
    """Weights that all of them hold exactly give the same bits; gradients are theirs."""
    layer, x, ids, gates, grad = LayerProblem(5).drawn(moe, device, backend)
    eighths = (gates.detach() * 8).round() / 8
    found = []
    for weights in (eighths.clone(), eighths.to(dtype)):
        y = layer(x, ids, weights.requires_grad_())
        found += [y.detach(), *torch.autograd.grad(y, weights, grad)]
    y, dgates, same_y, narrow = found
    assert_same_bits(same_y, y)
    assert narrow.dtype == dtype
    torch.testing.assert_close(narrow.float(), dgates.to(dtype).float(), rtol=1e-2, atol=1e-3)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 40),
    top_k=st.integers(1, 4),
    experts=st.integers(1, 9),
    sizes=st.tuples(st.integers(1, 24), st.integers(1, 24)),
    ranks=st.tuples(st.none() | st.integers(1, 20), st.none() | st.integers(1, 20)),
    activation=st.sampled_from(["silu", "gelu", "gpt_oss"]),
    options=st.tuples(st.booleans(), st.booleans(), st.booleans(), st.booleans()),
    routing=st.sampled_from(ROUTINGS),
    seed=st.integers(0, 1000),
)
def test_generated_problems(
    moe, device, tokens, top_k, experts, sizes, ranks, activation, options, routing, seed
):
    names = ("transposed", "interleaved", "bias", "train_base")
    form = {"activation": activation, **dict(zip(names, options, strict=True))}
    problem = LayerProblem(tokens, top_k, experts, *sizes, *ranks, **form, routing=routing)
    # Results of one element cancel by lot: 2e-5 is left of float32's 6e-8 where two digits go, and
    # with one feature a gate's gradient is such a result of such results.
    floor = 2e-5 if min(sizes) > 1 else 1e-4
    assert_layer_close_to_eager(moe, device, problem, seed=seed, floor=floor)


@pytest.mark.sees_defect(
    "a frozen stack is copied, or gets a gradient as large as itself, in every step"
)
def test_frozen_base_gets_no_gradient_and_lora_does(moe, device):
    layer, x, ids, gates, grad = LayerProblem(bias=True).drawn(moe, device)
    layer(x, ids, gates).backward(grad)
    for name, parameter in layer.named_parameters():
        assert (parameter.grad is not None) == name.startswith("expert_lora"), name


def same(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """To the bit on the CPU; to float32's digits on a GPU, where a fused kernel may round later."""
    if expected.device.type == "cpu":
        assert_same_bits(actual, expected)
    else:
        assert relative_error(actual, expected) < 1e-6


@pytest.mark.sees_defect("the input must be contiguous")
@pytest.mark.parametrize("leading", [(21,), (3, 7), (7, 1, 3)], ids=str)
@pytest.mark.parametrize("strides", ("contiguous", "transposed", "every-third", "batch-inside"))
def test_leading_shapes_and_strides(moe, device, leading, strides):
    """The bits of (T, ...), also of what has no 2-D view.

    On a GPU a kernel sums the gates' gradient in threads' order.
    """
    layer, x, ids, gates, grad = LayerProblem().drawn(moe, device)
    expected = layer(x, ids, gates)

    def placed(t: torch.Tensor) -> torch.Tensor:
        return laid_out(t.detach().reshape(*leading, t.shape[-1]), strides)

    moved, weights = placed(x).requires_grad_(), placed(gates).requires_grad_()
    out = layer(moved, placed(ids), weights)
    assert out.shape == moved.shape
    same(out.reshape(expected.shape), expected)
    found = torch.autograd.grad(out, (moved, weights), placed(grad))
    for ours, theirs in zip(found, torch.autograd.grad(expected, (x, gates), grad), strict=True):
        same(ours.reshape(theirs.shape), theirs)


def test_one_state_for_all_tokens(moe, device):
    """An expanded input and an expanded gradient, whose strides are 0, as `out.sum()` makes one."""
    layer, x, ids, gates, _ = LayerProblem().drawn(moe, device)
    row = x.detach()[:1].requires_grad_()
    out = layer(row.expand(21, -1), ids, gates)
    assert_same_bits(out, layer(row.repeat(21, 1), ids, gates))
    (found,) = torch.autograd.grad(out.sum(), row)
    repeated = row.detach().repeat(21, 1).requires_grad_()
    (wanted,) = torch.autograd.grad(layer(repeated, ids, gates), repeated, torch.ones_like(out))
    assert relative_error(found, wanted.sum(0, keepdim=True)) < 1e-6


@pytest.mark.parametrize("weight_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_autocast(moe, device, weight_dtype):
    """float32 tokens under autocast: computed in bfloat16, as F.linear would, and returned so."""
    problem = LayerProblem(dtype=weight_dtype)
    layer, x, ids, gates, grad = problem.drawn(moe, device)
    x = x.detach().float().requires_grad_()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        out = layer(x, ids, gates)
    assert out.dtype == torch.float32
    (found,) = torch.autograd.grad(out, x, grad.float())
    narrow = problem.module(moe, device).to(torch.bfloat16)
    for name, parameter in layer.expert_lora.named_parameters():
        target, factor, _ = name.split(".", 2)
        getattr(narrow.expert_lora[target], factor)["default"].weight.data = parameter.data
    low = x.detach().bfloat16().requires_grad_()
    expected = narrow(low, ids, gates)
    assert_same_bits(out, expected.float())
    (wanted,) = torch.autograd.grad(expected, low, grad.bfloat16())
    assert_same_bits(found, wanted.float())


def test_backward_under_autocast(moe, device):
    """The products of backward are those of forward: autocast has no say in them."""
    layer, x, ids, gates, grad = LayerProblem().drawn(moe, device)
    leaves = [x, gates, *(p for p in layer.parameters() if p.requires_grad)]
    expected = torch.autograd.grad(layer(x, ids, gates), leaves, grad)
    out = layer(x, ids, gates)
    with torch.autocast(device.type, dtype=torch.bfloat16):
        assert_all_same_bits(torch.autograd.grad(out, leaves, grad), expected)


def test_shapes_alone(moe):
    """On the meta device, where models are laid out before they have memory."""
    layer, x, ids, gates, grad = LayerProblem(bias=True).drawn(moe, torch.device("meta"))
    out = layer(x, ids, gates)
    out.backward(grad)
    assert (out.device.type, out.shape) == ("meta", x.shape)
    assert layer.expert_lora["down"].lora_B["default"].weight.grad.shape == (24, 20)


def test_a_function_of_your_own_between_the_projections(moe, device):
    """Called on the whole gate_up output; torch rounds silu before the product with up."""
    layer, x, ids, gates, _ = LayerProblem().drawn(moe, device)
    expected = layer(x, ids, gates)
    seen = []

    def own(wide: torch.Tensor) -> torch.Tensor:
        seen.append(tuple(wide.shape))
        gate, up = wide.chunk(2, -1)
        return torch.nn.functional.silu(gate) * up

    layer.layout = moe.ExpertsLayout(own)
    same(layer(x, ids, gates), expected)
    assert seen == [(42, 40)]


def test_weights_that_do_not_belong_together(moe, device):
    layer, x, ids, gates, _ = LayerProblem().drawn(moe, device)
    arguments = (x, ids, gates, layer.gate_up_proj)
    for down in (layer.down_proj[:4], layer.down_proj.mT, layer.down_proj[:, :, 1:]):
        with pytest.raises(ValueError, match="are not one stack of experts"):
            moe.experts_forward(*arguments, down, layout=layer.layout)


def test_wrong_layouts_and_sizes(moe):
    for options, message in (
        ({"activation": "swish"}, "activation='swish' is unknown; pass one of silu"),
        ({"gated": False, "interleaved": True}, "gated=False has no gate to interleave"),
        ({"gated": False, "activation": "gpt_oss"}, "gated=False has no gate to interleave"),
    ):
        with pytest.raises(ValueError, match=message):
            moe.ExpertsLayout(**options)
    with pytest.raises(ValueError, match=r"must be positive, got \(0, 8, 8\)"):
        moe.Experts(0, 8, 8)


@pytest.mark.gpu
def test_a_training_step_in_a_cuda_graph(moe, device):
    problem = LayerProblem(tokens=64, bias=True, dtype=torch.bfloat16)
    layer, x, ids, gates, grad = problem.drawn(moe, device, "triton")

    def redraw(seed: int, routing: str) -> None:
        for old, new in zip((x, gates, grad), problem.inputs(device, seed), strict=True):
            old.copy_(new)
        ids.copy_(dataclasses.replace(problem, routing=routing).ids(device, seed))

    assert_graph_follows(lambda: step(layer, x, ids, gates, grad), redraw)


@pytest.mark.gpu
def test_sums_beside_dx_in_a_cuda_graph(moe, submodule, device, monkeypatch, watch):
    launches = submodule("kernels.experts.gated_launch_triton")
    problem = LayerProblem(512, 2, 8, 256, 256, 8, 8, dtype=torch.bfloat16)
    drawn = problem.drawn(moe, device, "triton")
    with monkeypatch.context() as alone:
        alone.setattr(launches, "sums_fit_beside", lambda *_: False)
        alone.setattr(launches, "packing", lambda factors, *_: contextlib.nullcontext(factors))
        expected = step(*drawn)
    chosen = watch(launches, "sums_fit_beside", lambda fit, *_: fit)
    found = []
    graph, _ = capture(lambda: found.append(step(*drawn)), 3)
    graph.replay()
    for results in found:
        assert_same_tensors(results, expected)
    assert chosen == [True] * 4


@pytest.mark.gpu
def test_a_step_allocates_a_fraction_of_the_weights(moe, device):
    """Few tokens over many experts: no copy of a stack, no gradient for a frozen one."""
    problem = LayerProblem(64, 2, 64, 512, 512, 8, 8, dtype=torch.bfloat16)
    layer, x, ids, gates, grad = problem.drawn(moe, device, "triton")
    layer(x, ids, gates).backward(grad)  # compiles; the gradients of LoRA exist from now on
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layer(x, ids, gates).backward(grad)
    extra = torch.cuda.max_memory_allocated() - before
    stack = layer.down_proj.nbytes
    lora = sum(p.nbytes for p in layer.parameters() if p.requires_grad)
    assert extra - 2 * lora < 0.25 * stack, f"{extra / 1e6:.1f} MB, a stack has {stack / 1e6:.1f}"


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(256, 2048, 512, 8), (64, 2048, 1024, 8), (8, 4096, 14336, 2)])
def test_real_sizes(moe, device, sizes):
    experts, hidden, intermediate, top_k = sizes
    torch.manual_seed(0)
    layer = moe.Experts(experts, hidden, intermediate, device=device, dtype=torch.bfloat16)
    layer.add_adapter(r=16, alpha=32)
    for projection in layer.expert_lora.values():
        torch.nn.init.normal_(projection.lora_B["default"].weight, std=0.01)
    problem = LayerProblem(512, top_k, experts, hidden, dtype=torch.bfloat16)
    x, gates, grad = problem.inputs(device)
    drawn = (layer, x, problem.ids(device), gates, grad)
    layer.backend = "triton"
    found = step(*drawn)
    assert_same_tensors(step(*drawn), found)
    layer.backend = "reference"
    for name, value in step(*drawn).items():
        assert relative_error(found[name], value) < 2**-7, name  # two roundings to bfloat16 apart


def test_nothing_expanded_or_copied_is_kept_for_backward(moe, device):
    """Of the weights only themselves, and never the (T k, H) output, which no gradient needs."""
    problem = LayerProblem(tokens=50, hidden=240, intermediate=20, bias=True)
    layer, x, ids, gates, _ = problem.drawn(moe, device)
    kept = kept_for_backward(lambda: layer(x, ids, gates))
    own = {p.untyped_storage().data_ptr() for p in (*layer.parameters(), x, gates)}
    rest = [t for t in kept if t.untyped_storage().data_ptr() not in own]
    assert len(kept) > len(rest) > 0
    output = 50 * problem.top_k * problem.hidden * x.element_size()
    assert sum(t.nbytes for t in rest) < output


COMPILED = [
    *(("auto", torch.float32, {"dynamic": d, "backend": "aot_eager"}) for d in (False, True)),
    *(pytest.param("triton", dtype, {}, marks=pytest.mark.gpu) for dtype in DTYPES[:2]),
]


@pytest.mark.parametrize(("backend", "dtype", "options"), COMPILED, ids=str)
def test_compiled_without_graph_breaks(moe, device, backend, dtype, options):
    torch._dynamo.reset()
    problem = LayerProblem(bias=True, routing="sentinels", dtype=dtype)

    def compiled(layer, *inputs):
        return torch.compile(layer, fullgraph=True, **options)(*inputs)

    assert_layer_close_to_eager(moe, device, problem, call=compiled, backend=backend)


def test_compiled_layer_serves_other_lengths(moe, device):
    """A second length of the batch compiles at most once more, and the third not at all."""
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    layer = LayerProblem().module(moe, device)
    compiled = torch.compile(layer, fullgraph=True, backend=counter)
    for tokens in (21, 30, 17, 40):
        _, x, ids, gates, _ = LayerProblem(tokens).drawn(moe, device)
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


@pytest.mark.sees_defect(
    "LoRA held as plain attributes stays behind when the module moves or is copied"
)
def test_moving_to_a_dtype_moves_lora_too(moe, device):
    layer, x, ids, gates, _ = LayerProblem(bias=True).drawn(moe, device)
    assert {p.dtype for p in layer.to(torch.bfloat16).parameters()} == {torch.bfloat16}
    out = layer(x.bfloat16(), ids, gates)
    assert out.dtype == torch.bfloat16 and bool(out.isfinite().all())


@pytest.mark.sees_defect("LoRA held as plain attributes is in no state dict")
def test_state_dict_names_and_round_trip(moe, device, tmp_path):
    problem = LayerProblem(bias=True, rank=3, rank_down=2)
    layer, x, ids, gates, _ = problem.drawn(moe, device)
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
    assert_same_bits(other(x, ids, gates), layer(x, ids, gates))
