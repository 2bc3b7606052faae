"""LoRA parameters of experts: PEFT's layout, several adapters, merging, and what is refused."""

import copy
import math

import pytest
import torch

from .._compare import assert_same_bits, fail_at, relative_error
from ._eager import LayerProblem


@pytest.fixture
def projection(moe):
    """Four experts, 6 -> 10, with the random adapters first (r 3) and second (r 5)."""
    torch.manual_seed(0)
    made = moe.LoraProjection(4, 6, 10)
    made.add_adapter("first", 3, 6.0)
    made.add_adapter("second", 5, 5.0, rslora=True)
    for factor in made.lora_B.values():
        torch.nn.init.normal_(factor.weight)
    return made


def delta(projection, name: str) -> torch.Tensor:
    """(E, out, in) in float64, by PEFT 0.19's definition of its two matrices."""
    A = projection.lora_A[name].weight.detach().double()
    B = projection.lora_B[name].weight.detach().double()
    experts, rank = 4, A.shape[0] // 4
    a = A.reshape(experts, rank, -1)
    b = B.reshape(B.shape[0], rank, experts)
    return projection.scaling[name] * torch.einsum("o r e, e r i -> e o i", b, a)


def test_factors_are_views_of_the_parameters(moe, projection):
    """Experts vary fastest in B; before 0.19 PEFT read its columns expert by expert."""
    factors = projection.factors()
    A, B = projection.lora_A["first"].weight, projection.lora_B["first"].weight
    assert (factors.a.shape, factors.b.shape) == ((4, 3, 6), (4, 10, 3))
    assert factors.a.data_ptr() == A.data_ptr() and factors.b.data_ptr() == B.data_ptr()
    found = factors.scaling * torch.einsum("eor,eri->eoi", factors.b, factors.a)
    assert relative_error(found, delta(projection, "first")) < 1e-6


def test_initialization(moe):
    """A uniform within 1/sqrt(in), by kaiming's bound with a = sqrt(5), and B zero, as in PEFT."""
    torch.manual_seed(1)
    made = moe.LoraProjection(8, 64, 32)
    made.add_adapter("default", 16, 32)
    A, B = made.lora_A["default"].weight, made.lora_B["default"].weight
    assert (A.dtype, B.dtype) == (torch.float32, torch.float32)
    assert torch.count_nonzero(B) == 0
    assert 0.99 / 8 < A.abs().max() <= 1 / 8
    assert abs(A.std().item() * 8 - 1 / math.sqrt(3)) < 0.01
    assert A.requires_grad and B.requires_grad


def test_one_adapter_of_several_is_in_use(moe, projection):
    assert projection.adapters == ["first", "second"] and projection.active == "first"
    projection.set_adapter("second")
    factors = projection.factors()
    assert factors.a.shape == (4, 5, 6) and factors.scaling == 5 / math.sqrt(5)
    projection.set_adapter(None)
    assert projection.factors() is None
    with pytest.raises(ValueError, match=r"one adapter can be in use, got \['first', 'second'\]"):
        projection.set_adapter(["first", "second"])
    projection.set_adapter("first")
    projection.delete_adapter("first")
    assert projection.active is None and projection.adapters == ["second"]
    assert set(projection.state_dict()) == {"lora_A.second.weight", "lora_B.second.weight"}


def test_disabled_is_restored_after_an_error(moe, projection):
    with pytest.raises(KeyError), projection.disabled():
        assert projection.factors() is None
        raise KeyError("inside")
    assert projection.factors() is not None
    projection.enabled = False
    with projection.disabled():
        pass
    assert projection.factors() is None, "what was off before stays off"


WRONG = [
    *((r"without dots|exists", {"name": name}) for name in ("", "a.b", "keys", "training", 3)),
    *((r"without dots|exists", {"name": name}) for name in (["first"], "first")),
    *(("r must be an integer of at least 1", {"r": r}) for r in (0, -1, 2.0, True, "4")),
    *(
        ("no dropout, no DoRA and no bias", option)
        for option in ({"dropout": 0.1}, {"use_dora": True}, {"lora_bias": True})
    ),
    *((f"dtype must be .*got {dtype}", {"dtype": dtype}) for dtype in (torch.int64, torch.bool)),
]


@pytest.mark.parametrize(("message", "changes"), WRONG, ids=str)
def test_wrong_adapters(moe, projection, message, changes):
    with pytest.raises(ValueError, match=message):
        projection.add_adapter(**{"name": "third", "r": 2, "alpha": 2} | changes)
    assert projection.adapters == ["first", "second"]
    for call in (projection.set_adapter, projection.delete_adapter):
        with pytest.raises(ValueError, match="adapter 'other' is unknown; there are"):
            call("other")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_merge_and_unmerge(moe, projection, dtype, transposed):
    """W + delta rounded once, whatever the stored order; and the original bits afterwards."""
    layout = moe.ExpertsLayout(transposed=transposed)
    weight = torch.randn(4, 10, 6, dtype=torch.float64).to(dtype)
    weight = weight.mT.contiguous() if transposed else weight
    before = weight.clone()
    projection.merge(weight, layout)
    assert projection.merged and projection.factors() is None
    expected = layout.operand(before).mT.double() + delta(projection, "first")
    unit = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float64: 1e-12}[dtype]
    difference = (layout.operand(weight).mT.double() - expected).abs()
    assert (difference <= unit * (expected.abs() + 1e-2)).all()
    projection.unmerge(weight)
    assert_same_bits(weight, before)
    assert not projection.merged and projection.factors() is not None


def test_merged_state_is_guarded(moe, projection):
    """A state dict of W + delta beside delta would add it twice when loaded."""
    weight, layout = torch.randn(4, 10, 6), moe.ExpertsLayout()
    projection.merge(weight, layout)
    merged = weight.clone()
    state = {"lora_A.first.weight": torch.zeros(12, 6)}
    for call in (
        lambda: projection.merge(weight, layout),
        lambda: projection.set_adapter("second"),
        lambda: projection.delete_adapter("first"),
        lambda: projection.state_dict(),
        lambda: projection.load_state_dict(state, strict=False),
        lambda: projection.disabled().__enter__(),
    ):
        with pytest.raises(ValueError, match="is merged into the weight"):
            call()
    projection.enabled = False  # a forward now would pass off W + delta as the base
    with pytest.raises(ValueError, match="is merged into the weight"):
        projection.factors()
    assert_same_bits(weight, merged)
    projection.unmerge(weight)
    assert projection.factors() is None
    projection.state_dict()


def test_merge_refuses_before_it_writes(moe, projection):
    weight, layout = torch.randn(4, 10, 6), moe.ExpertsLayout()
    before = weight.clone()
    with pytest.raises(ValueError, match=r"weight must be \(4, 6, 10\) as \(E, in, out\), got"):
        projection.merge(weight.mT, layout)
    with pytest.raises(ValueError, match="nothing is merged"):
        projection.unmerge(weight)
    projection.lora_B["first"].weight.data[0, 0] = float("nan")
    with pytest.raises(ValueError, match="adapter 'first' holds NaN or inf"):
        projection.merge(weight, layout)
    projection.set_adapter(None)
    with pytest.raises(ValueError, match="no adapter is active"):
        projection.merge(weight, layout)
    assert_same_bits(weight, before)


def test_deepcopy_of_a_merged_projection_unmerges_on_its_own(moe, projection):
    weight, layout = torch.randn(4, 10, 6), moe.ExpertsLayout()
    before = weight.clone()
    projection.merge(weight, layout)
    twin, other = copy.deepcopy(projection), weight.clone()
    projection.unmerge(weight)
    assert twin.merged
    twin.unmerge(other)
    assert_same_bits(other, before)


@pytest.mark.parametrize(
    ("a", "b", "experts"),
    [
        *[((12, 6), (10, 9), 4), ((13, 6), (10, 13), 4), ((3, 6, 2), (10, 3), 4)],
        *[(shape, (10, 12), experts) for shape in ((), (12,)) for experts in (0, -1, 4)],
        *[((12, 6), (10, 12), experts) for experts in (0, -1)],
    ],
)
def test_wrong_factor_shapes(moe, a, b, experts):
    with pytest.raises(ValueError, match=rf"lora_A must be .* {experts} experts, got"):
        moe.factor_views(torch.zeros(a), torch.zeros(b), experts)


@pytest.mark.parametrize("alpha", [None, [4.0], "4", True])
def test_a_refused_alpha_leaves_no_factors(moe, alpha):
    experts = moe.Experts(3, 4, 5)
    before = sorted(experts.state_dict())
    with pytest.raises(TypeError, match="alpha must be a number, got"):
        experts.add_adapter("one", r=2, alpha=alpha)
    for number in (float("nan"), float("inf")):
        with pytest.raises(ValueError, match=f"alpha must be finite, got {number}"):
            experts.add_adapter("one", r=2, alpha=number)
    assert sorted(experts.state_dict()) == before


def wrong_experts(**changes):
    x, ids, gates = torch.zeros(2, 4), torch.zeros(2, 1, dtype=torch.int64), torch.zeros(2, 1)
    weights = {"gate_up": torch.zeros(3, 10, 4), "down": torch.zeros(3, 4, 5)}
    given = {"hidden_states": x, "top_k_index": ids, "top_k_weights": gates, **weights}
    return lambda m: m.experts_forward(**({"layout": m.ExpertsLayout()} | given | changes))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (wrong_experts(lora=torch.zeros(2)), TypeError, "lora must be an ExpertsLora, got Tensor"),
        (wrong_experts(layout="silu"), TypeError, "layout must be an ExpertsLayout, got str"),
        (wrong_experts(down=torch.zeros(0)), ValueError, r"down must be a stack .* got shape \(0,"),
        (wrong_experts(gate_up=None), TypeError, "gate_up must be a stack .* got NoneType"),
        (wrong_experts(top_k_index=[[0]]), TypeError, "top_k_index must be a dense tensor"),
        (lambda m: m.Experts(3, 4, 5, layout=3), TypeError, "layout must be an ExpertsLayout"),
    ],
)
def test_arguments_of_experts_of_a_wrong_kind(moe, call, error, message):
    with pytest.raises(error, match=message):
        call(moe)


@pytest.fixture
def layer(moe, device):
    """A layer with a second adapter on down alone; call() runs it."""
    made, *inputs, _ = LayerProblem(bias=True).drawn(moe, device)
    made.add_adapter("other", r=2, alpha=2, targets=("down",))
    torch.nn.init.normal_(made.expert_lora["down"].lora_B["other"].weight, std=0.3)
    made.call = lambda: made(*inputs).detach()
    return made


@pytest.mark.sees_defect(
    "set_lora and clear_lora forget the adapter: no second one, no reference pass"
)
def test_off_equals_a_layer_that_never_had_lora(moe, device, layer):
    """DPO and GRPO take their reference from it: bit for bit, and again after turning it on."""
    bare, *inputs, _ = LayerProblem(bias=True).drawn(moe, device)
    for projection in bare.expert_lora.values():
        projection.delete_adapter("default")
    base, trained = bare(*inputs), layer.call()
    assert relative_error(trained, base) > 0.01
    with layer.expert_lora.disabled():
        assert_same_bits(layer.call(), base)
    assert_same_bits(layer.call(), trained)
    layer.expert_lora.set_adapter(None)
    assert_same_bits(layer.call(), base)


@pytest.mark.parametrize("keep_on", [None, "cpu"])
def test_merged_layer(moe, device, layer, keep_on):
    base = {name: p.clone() for name, p in layer.named_parameters(recurse=False)}
    expected = layer.call()
    layer.merge(keep_on=keep_on)
    assert layer.expert_lora.merged and layer.expert_lora.factors() is None
    assert relative_error(layer.call(), expected) < 1e-6
    layer.unmerge()
    for name, value in base.items():
        assert_same_bits(layer.get_parameter(name), value)
    assert_same_bits(layer.call(), expected)
    with pytest.raises(ValueError, match="nothing is merged"):
        layer.unmerge()
    layer.merge_and_unload()
    assert layer.state_dict().keys() == base.keys()
    assert relative_error(layer.call(), expected) < 1e-6


def test_a_merge_that_fails_half_way_changes_nothing(layer, submodule, monkeypatch):
    """As where the memory for the copy of the second weight is missing."""
    before, short = layer.gate_up_proj.clone(), torch.OutOfMemoryError("no memory")
    with monkeypatch.context() as patch:
        asked = fail_at(patch, submodule("moe.lora"), "factor_views", 2, short)
        with pytest.raises(torch.OutOfMemoryError):
            layer.merge()
    assert [a.shape[1] for a, *_ in asked] == [layer.hidden, layer.intermediate]
    assert_same_bits(layer.gate_up_proj, before)
    layer.merge()


def test_an_adapter_is_added_to_all_targets_or_to_none(moe, device, layer):
    """'other' exists on down: gate_up must not get it alone."""
    with pytest.raises(ValueError, match="adapter 'other' exists"):
        layer.add_adapter("other", r=2, alpha=2)
    for targets in ("down", (), ("up",)):
        with pytest.raises(ValueError, match="targets must be some of"):
            layer.add_adapter("third", r=2, alpha=2, targets=targets)
    assert layer.expert_lora["gate_up"].adapters == ["default"]


def test_selective_lora_weights(moe):
    """Rows of A and columns of B of the named experts, expert-major as in the predecessor."""
    A, B = torch.randn(4 * 3, 6, requires_grad=True), torch.randn(10, 4 * 3, requires_grad=True)
    active = torch.tensor([3, 1])
    a, b = moe.selective_lora_weights(A, B, active, 4)
    assert_same_bits(a, torch.cat((A[9:12], A[3:6])))
    assert_same_bits(b, torch.cat((B[:, 9:12], B[:, 3:6]), 1))
    (a.sum() + (b * b).sum()).backward()
    assert_same_bits(A.grad[3:6], torch.ones(3, 6))
    assert torch.count_nonzero(A.grad[[0, 1, 2, 6, 7, 8]]) == 0
    assert_same_bits(B.grad[:, 9:12], 2 * B.detach()[:, 9:12])


@pytest.mark.sees_defect("selecting LoRA by advanced indexing sorts in backward")
def test_selective_gradient_needs_no_sort(moe):
    """Advanced indexing would put index_put(accumulate) into the graph, which sorts on a GPU."""
    A, B = torch.randn(8, 6, requires_grad=True), torch.randn(10, 8, requires_grad=True)
    found, todo = set(), [t.grad_fn for t in moe.selective_lora_weights(A, B, torch.arange(4), 4)]
    while todo:
        node = todo.pop()
        found.add(type(node).__name__)
        todo += [parent for parent, _ in node.next_functions if parent is not None]
    assert "IndexSelectBackward0" in found
    assert not any(name.startswith("IndexBackward") for name in found)


@pytest.mark.sees_defect("an empty batch selects no expert and divides by zero")
def test_selective_of_no_expert(moe):
    a, b = moe.selective_lora_weights(
        torch.randn(8, 6), torch.randn(10, 8), torch.empty(0, dtype=torch.int64), 4
    )
    assert (a.shape, b.shape) == ((0, 6), (10, 0))


def test_selective_wrong_shapes(moe):
    a, b, ids = torch.zeros(8, 6), torch.zeros(10, 8), torch.arange(2)
    for error, arguments, message in (
        (ValueError, (torch.zeros(9, 6), torch.zeros(10, 9), ids), "lora_A"),
        (ValueError, (a, torch.zeros(10, 4), ids), "lora_A"),
        (TypeError, (a, b, ids.to_sparse()), "active_experts must be a dense tensor"),
        (ValueError, (a, b, ids[None]), "active_experts must have 1 dimensions"),
    ):
        with pytest.raises(error, match=message):
            moe.selective_lora_weights(*arguments, 4)
