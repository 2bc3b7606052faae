"""A gated layer of packed experts in one op: its stages apart say what it must compute."""

import contextlib
import dataclasses

import pytest
import torch

from .._compare import assert_same_bits, assert_same_tensors, relative_error
from ..moe._eager import PackedLayer, PackedProblem, assert_first_order_alone, assert_graph_follows


@pytest.fixture
def stages_apart(submodule, monkeypatch, watch):
    """A context in which nothing is fused; whether the op was taken outside of it, in a list.

    Layers call the op as torch.compile has it.
    """
    monkeypatch.setattr(submodule("moe.experts"), "eager_layer", lambda *_: None)
    experts, gated = submodule("moe.experts"), submodule("moe.grouped_linear")
    taken = watch(gated, "quantized_gated_linear", lambda y, *_, **__: y is not None)

    @contextlib.contextmanager
    def apart():
        with monkeypatch.context() as patch:
            patch.setattr(experts, "gated_lora_linear", lambda *_, **__: None)
            yield

    return apart, taken


PROBLEMS = (
    PackedProblem(lora_dtype=torch.bfloat16),
    PackedProblem(tokens=1, top_k=1, experts=2, wanted=("gate_up.b", "down.b")),
    PackedProblem(activation="gelu", interleaved=True, bias=True, routing="sentinels"),
    PackedProblem(
        activation="gpt_oss", rank=None, routing="no-ends", wanted=("x", "gates", "down.b")
    ),
    PackedProblem(rank_down=None, bias=True, routing="one", wanted=("gate_up.a",)),
    PackedProblem(rank=None, rank_down=None, wanted=("x",)),
    PackedProblem(rank=3, rank_down=17, routing="all-sentinels"),
    PackedProblem(bias=True, wanted=("gates",)),
    # A layer of gpt-oss
    PackedProblem(activation="gpt_oss", interleaved=True, bias=True, quant_type="mxfp4"),
    PackedProblem(routing="sentinels", quant_type="fp8", hidden=150, intermediate=70),
)
# Decoded to memory, most for blocks that leave their rows; and how many experts at a time.
SLICED = (
    (PackedProblem(strategy="chunked", hidden=48, bias=True, routing="sentinels"), 1),
    (PackedProblem(strategy="auto", hidden=48, intermediate=24, lora_dtype=torch.bfloat16), 2),
    (PackedProblem(strategy="chunked", routing="one", rank=None, quant_type="fp8"), 2),
    (PackedProblem(strategy="chunked", routing="all-sentinels", quant_type="mxfp4"), 3),
    (
        PackedProblem(
            strategy="chunked", hidden=48, quant_type="fp4", wanted=("gate_up.b", "gates")
        ),
        3,
    ),
)


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_it_equals_its_stages(moe, device, stages_apart, problem):
    compare_with_stages(PackedLayer(moe, device, problem), *stages_apart)


def compare_with_stages(layer, apart, taken) -> None:
    found = layer.step()
    assert taken == [True]
    with apart():
        expected = layer.step()
    assert taken == [True] and found.keys() == expected.keys()
    assert_same_bits(found["out"], expected["out"])
    for name, value in expected.items():
        assert found[name].stride() == value.stride(), name
        assert relative_error(found[name], value) <= 2e-6, name


@pytest.mark.parametrize("keeps", (True, False))
def test_a_product_that_activates_spares_the_launch(
    moe, device, submodule, monkeypatch, watch, keeps
):
    """The same layer, what is kept included; gate and up are not even stored for nobody."""
    monkeypatch.setattr(submodule("moe.experts"), "eager_layer", lambda *_: None)
    place = submodule("kernels.quant.gated_quantized_experts_triton")
    by_triton = submodule("kernels.quant.packed_product_triton").packed_product
    glu, forward, stored = place.glu_triton, place.gated_quantized_experts_triton, []

    def compiled(*operands, activated=None, early=False, **options):
        *others, out = operands
        stored.append(out.shape[0])
        wide = out if out.shape[0] else out.new_empty((others[5].slots.shape[0], out.shape[1]))
        by_triton(*others, wide, **options)
        if activated is not None:
            activated.copy_(glu(wide, "silu", False))

    launched = watch(place, "glu_triton", lambda *_: "glu")
    layer = PackedLayer(
        moe, device, PackedProblem(quant_type="fp8", dtype=torch.bfloat16, intermediate=64)
    )
    with contextlib.nullcontext() if keeps else torch.no_grad():
        run = layer.step if keeps else lambda: {"out": layer.forward()}
        expected = run()
        assert launched == ["glu"]
        by_name = lambda one, _, *rest: forward(one, "compiled", *rest)  # noqa: E731
        monkeypatch.setattr(place, "gated_quantized_experts_triton", by_name)
        product = submodule("kernels.quant.packed_product")
        monkeypatch.setattr(product, "prefer_compiled", compiled)
        found = run()
    rows = layer.ids.numel()
    assert launched == ["glu"] and stored == [rows if keeps else 0, rows]
    assert_same_tensors(found, expected)


class Launches:
    """What a layer would launch, in order: its stream, name, and whether it is early or signals."""

    NAMES = (
        *("low_rank", "reorder", "product_of_stack", "glu_triton", "glu_backward_dots"),
        "expert_products",
    )

    def __init__(self, place, packs, monkeypatch) -> None:
        self.found: list[tuple[str, str, bool, bool]] = []
        self.stream = "first"
        for name in self.NAMES:
            monkeypatch.setattr(place, name, self.noted(name))
        monkeypatch.setattr(packs, "reorder", self.noted("reorder"))
        monkeypatch.setattr(place, "beside", lambda *_, **__: contextlib.nullcontext(self))

    def noted(self, name: str):
        def launch(*operands, early=False, signals=False, **options):
            signals |= "activated" in options  # the compiled product lets the next begin
            self.found.append((self.stream, name, early, signals))
            if name == "glu_triton":
                return operands[0].chunk(2, 1)[0].contiguous()
            return signals

        return launch

    @contextlib.contextmanager
    def there(self):
        self.stream = "second"
        yield
        self.stream = "first"

    def there_waits(self) -> None:
        self.found.append(("second", "wait", False, False))

    def here_waits(self) -> None:
        self.found.append(("first", "wait", False, False))


@pytest.mark.parametrize("lora", (True, False))
@pytest.mark.parametrize("activates", (True, False))
def test_early_launches_follow_what_lets_them_begin(
    moe, device, submodule, monkeypatch, activates, lora
):
    """Products behind x A^T and dY B; these behind a copy of B or a product that activates."""
    monkeypatch.setattr(submodule("moe.experts"), "eager_layer", lambda *_: None)
    place = submodule("kernels.quant.gated_quantized_experts_triton")
    formats = submodule("kernels.quant.formats")
    monkeypatch.setattr(place, "overlaps", lambda _: True)
    monkeypatch.setattr(formats.InRegisters, "activates", lambda *_: activates)
    packs = submodule("kernels.experts.gated_launch_triton")
    launches = Launches(place, packs, monkeypatch)
    ranks = {} if lora else {"rank": None, "rank_down": None, "wanted": ("x", "gates")}
    PackedLayer(moe, device, PackedProblem(quant_type="fp8", **ranks)).step()
    signalled = {"first": False, "second": False}
    for stream, name, early, signals in launches.found:
        assert signalled[stream] or not early, (stream, name)
        signalled[stream] = signals
    early = sorted(name for _, name, is_early, _ in launches.found if is_early)
    if not lora:
        assert early == ["product_of_stack"] * activates
        return
    # dY B behind the copy of B, and the second x A^T behind a product that activates
    assert early == [*["low_rank"] * (1 + activates), *["product_of_stack"] * 4]
    assert ("glu_triton" in {name for _, name, *_ in launches.found}) is not activates


@pytest.mark.parametrize(("problem", "at_once"), SLICED, ids=str)
def test_slices_equal_their_stages(
    moe, device, submodule, monkeypatch, stages_apart, problem, at_once
):
    bound = at_once * 2 * problem.intermediate * problem.hidden * problem.dtype.itemsize
    monkeypatch.setattr(submodule("moe.quantized.strategy"), "SLICE_BYTES", (bound, bound))
    compare_with_stages(PackedLayer(moe, device, problem), *stages_apart)


def test_it_equals_its_reference(moe, submodule, device):
    """Experts decoded first, and the dense layer over them."""
    layer = PackedLayer(moe, device, PackedProblem(bias=True, routing="sentinels"))
    module, sides = layer.module.requires_grad_(False), []
    lora = module.expert_lora.factors()
    for name in ("gate_up", "down"):
        weight, factors = getattr(module, f"{name}_proj").quantized_weight(), getattr(lora, name)
        stack = (*weight.tensors.values(), None, None, weight.stored, 32, True)
        bias = getattr(module, f"{name}_proj_bias")
        sides.append((*stack, factors.a, factors.b, bias, factors.scaling))
    reference = submodule("reference.nf4").gated_nf4_experts
    inputs = (layer.leaves[name].detach() for name in ("x", "gates"))
    expected = reference(next(inputs), *sides, next(inputs), layer.ids, "silu", False)
    assert relative_error(layer.forward().detach(), expected) <= 2e-6


def test_what_it_does_not_take_runs_in_stages(moe, device, stages_apart):
    """Decoding of the active experts alone, and a bias that trains."""
    PackedLayer(moe, device, PackedProblem(strategy="selective")).step()
    layer = PackedLayer(moe, device, PackedProblem(bias=True))
    bias = layer.module.down_proj_bias.requires_grad_()
    torch.autograd.grad(layer.forward().sum(), bias)
    assert stages_apart[1] == [False, False]
    with torch.no_grad():
        layer.forward()
    assert stages_apart[1][-1]


def test_without_a_backward_nothing_is_kept(moe, device, submodule, monkeypatch, watch):
    monkeypatch.setattr(submodule("moe.experts"), "eager_layer", lambda *_: None)
    module = submodule("moe.quantized.quantized_linear")
    rows_of = lambda found, *_: [one.shape[0] for one in found[1:3]]  # noqa: E731
    sizes = watch(module, "gated_quantized_experts", rows_of)
    layer = PackedLayer(moe, device, PackedProblem())
    expected = layer.forward()
    with torch.no_grad():
        assert_same_bits(layer.forward(), expected.detach())
    rows = layer.ids.numel()
    assert sizes == [[rows, rows], [0, 0]]


def test_a_second_order_raises(moe, device):
    layer = PackedLayer(moe, device, PackedProblem())
    assert_first_order_alone(layer.forward(), layer.leaves["x"])


@pytest.mark.parametrize("wanted", ("d_wide", "dots", "both"))
def test_gradients_of_a_long_row(submodule, device, wanted):
    """More than a block of columns, of both kinds of results alone and together."""
    module, width = submodule("kernels.quant.gated_quantized_experts_triton"), 1100
    generator = torch.Generator().manual_seed(0)
    d, wide = (torch.randn(6, n, generator=generator).to(device) for n in (width, 2 * width))
    gates = torch.rand(3, 2, generator=generator).to(device)
    slots = torch.randperm(6, generator=generator).to(device)
    leaf = wide.clone().requires_grad_()
    gate, up = leaf.chunk(2, 1)
    h = torch.nn.functional.silu(gate) * up
    (expected,) = torch.autograd.grad(h, leaf, d * gates.view(-1, 1)[slots])
    out = wide.new_empty((0 if wanted == "dots" else 6, 2 * width))
    dots = wide.new_empty(0 if wanted == "d_wide" else 6)
    rows = (d, wide, gates, slots, out, dots)
    module.glu_backward_dots(*rows, activation="silu", interleaved=False)
    if wanted != "dots":
        assert relative_error(out, expected) <= 1e-6
    if wanted != "d_wide":
        assert relative_error(dots[slots], (d * h).sum(1)) <= 1e-6


@pytest.mark.gpu
def test_sums_beside_products_give_the_bits_of_one_stream(moe, device, submodule, monkeypatch):
    """Also in a CUDA graph, whose replays follow a new routing."""
    beside = submodule("kernels.launch.launch_plan")
    problem = PackedProblem(256, 2, 8, 256, 256, 8, 8, strategy="auto", dtype=torch.bfloat16)
    layer = PackedLayer(moe, device, problem)
    with monkeypatch.context() as alone:
        launches = submodule("kernels.quant.gated_quantized_experts_triton")
        on_the_cpu = lambda x, **_: beside.beside(x.new_empty(0, device="cpu"))  # noqa: E731
        alone.setattr(launches, "beside", on_the_cpu)
        expected = layer.step("auto")
    for _ in range(3):
        assert_same_tensors(layer.step("auto"), expected)

    def redraw(seed: int, routing: str) -> None:
        layer.ids.copy_(dataclasses.replace(problem, routing=routing).ids(device, seed))

    assert_graph_follows(lambda: layer.step("auto"), redraw, 1)
