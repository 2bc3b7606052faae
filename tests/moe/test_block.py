"""Routers against plain loops over tokens in float64, and the block that they make with experts."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from .._compare import assert_all_same_bits, assert_error_at_most, assert_same_bits
from ._eager import LayerProblem, eager_layer


def draw(tokens: int, experts: int, seed: int = 0, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tokens, experts, generator=generator, dtype=torch.float64).to(dtype)


def group_oracle(
    scores: list[float],
    bias: list[float],
    k: int,
    groups: int,
    kept_groups: int,
    norm: bool,
    factor: float,
) -> dict[int, float]:
    """Expert -> weight of one token by DeepSeek-V3's rule, over scores already computed."""
    size = len(scores) // groups
    corrected = [s + b for s, b in zip(scores, bias, strict=True)]
    if groups > 1:
        strength = [
            sum(sorted(corrected[g * size : (g + 1) * size], reverse=True)[:2])
            for g in range(groups)
        ]
        best = sorted(range(groups), key=lambda g: -strength[g])[:kept_groups]
        corrected = [c if e // size in best else 0.0 for e, c in enumerate(corrected)]
    chosen = sorted(range(len(scores)), key=lambda e: -corrected[e])[:k]
    total = sum(scores[e] for e in chosen) + 1e-20 if norm else 1.0
    return {e: factor * scores[e] / total for e in chosen}


def assert_routes(index, weights, expected: list[dict[int, float]]) -> None:
    """The chosen sets are equal and each expert has its weight, in any order within a token."""
    assert index.shape == weights.shape and index.dtype == torch.int64
    for ids, values, wanted in zip(index.tolist(), weights.tolist(), expected, strict=True):
        assert set(ids) == set(wanted) and len(set(ids)) == len(ids)
        for expert, value in zip(ids, values, strict=True):
            assert value == pytest.approx(wanted[expert], rel=1e-6, abs=1e-12)


@pytest.mark.sees_defect("softmax in the dtype of the logits")
@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("top_k", [1, 3, 8])
def test_softmax_top_k(moe, top_k, norm):
    logits = draw(40, 8)
    rows, zeros = logits.softmax(-1).tolist(), [0.0] * 8
    expected = [group_oracle(row, zeros, top_k, 1, 1, norm, 1.0) for row in rows]
    index, weights = moe.softmax_top_k(logits, top_k, norm_topk_prob=norm)
    assert_routes(index, weights, expected)
    assert (weights.diff(dim=-1) <= 0).all(), "the most probable expert comes first"


@pytest.mark.sees_defect(
    "softmax routing has no groups, although a model that needs them is listed"
)
@pytest.mark.sees_defect("corrected scores leak into the weights or their gradient")
@settings(max_examples=60, deadline=None)
@given(
    groups=st.sampled_from([1, 2, 3, 4]),
    size=st.integers(1, 5),
    data=st.data(),
    norm=st.booleans(),
    score=st.sampled_from(["sigmoid", "softmax"]),
    seed=st.integers(0, 1000),
)
def test_group_top_k(moe, groups, size, data, norm, score, seed):
    kept = data.draw(st.integers(1, groups))
    top_k = data.draw(st.integers(1, kept * size))
    logits = draw(12, groups * size, seed)
    bias = 0.3 * draw(1, groups * size, seed + 1)[0].abs()  # negative ones could tie with 0
    scores = logits.sigmoid() if score == "sigmoid" else logits.softmax(-1)
    expected = [
        group_oracle(row, bias.tolist(), top_k, groups, kept, norm, 2.5) for row in scores.tolist()
    ]
    options = {"score": score, "n_group": groups, "topk_group": kept, "norm_topk_prob": norm}
    options |= {"correction_bias": bias, "routed_scaling_factor": 2.5}
    assert_routes(*moe.group_top_k(logits, top_k, **options), expected)


def test_a_dropped_group_counts_as_zero_not_as_minus_infinity(moe):
    """As in the models' code: a kept expert with a negative corrected score loses against it."""
    logits = torch.zeros(1, 4)
    bias = torch.tensor([3.0, -2.0, 0.0, 0.0])
    index, _ = moe.group_top_k(logits, 2, correction_bias=bias, n_group=2, topk_group=1)
    assert 0 in index and 1 not in index


@pytest.mark.sees_defect("renormalization divides by zero")
def test_renormalization_stays_finite_where_sigmoids_underflow(moe):
    """Weights that are all 0 stay 0; without the 1e-20 they would be NaN."""
    index, weights = moe.group_top_k(torch.full((2, 4), -200.0), 2)
    assert index.shape == (2, 2)
    assert_same_bits(weights, torch.zeros(2, 2))


@pytest.mark.parametrize("route", ["softmax_top_k", "group_top_k"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_scores_are_float32(moe, route, dtype):
    """Narrow logits are widened first: the weights are those of the same numbers in float32."""
    logits = draw(30, 16, dtype=dtype)
    index, weights = getattr(moe, route)(logits, 4)
    wide_index, wide_weights = getattr(moe, route)(logits.float(), 4)
    assert weights.dtype == torch.float32
    assert_same_bits(index, wide_index)
    assert_same_bits(weights, wide_weights)


@pytest.mark.parametrize("leading", [(), (2, 3), (0,)])
def test_leading_dimensions(moe, leading):
    logits = draw(math.prod(leading), 8)
    for route in (moe.softmax_top_k, moe.group_top_k):
        index, weights = route(logits.view(*leading, 8), 3)
        assert index.shape == weights.shape == (*leading, 3)
        assert_same_bits(index.reshape(-1, 3), route(logits, 3)[0])
    index, weights = moe.group_top_k(torch.empty(0, 8), 2, n_group=4, topk_group=2)
    assert index.shape == weights.shape == (0, 2)


@pytest.mark.parametrize("norm", [True, False])
def test_gradients(moe, norm):
    logits = draw(5, 6).requires_grad_()
    bias = draw(1, 6, 3)[0].requires_grad_()
    options = {"n_group": 3, "topk_group": 2, "norm_topk_prob": norm}
    assert torch.autograd.gradcheck(
        lambda x: moe.group_top_k(x, 2, correction_bias=bias, **options)[1], logits
    )
    assert torch.autograd.gradcheck(
        lambda x: moe.softmax_top_k(x, 2, norm_topk_prob=norm)[1], logits
    )
    moe.group_top_k(logits, 2, correction_bias=bias)[1].sum().backward()
    assert bias.grad is None


@pytest.mark.sees_defect("sigmoid routing is guessed from the presence of a correction")
@pytest.mark.parametrize(
    ("options", "route"),
    [
        ({"score": "softmax"}, "softmax_top_k"),
        ({"score": "softmax", "norm_topk_prob": False}, "softmax_top_k"),
        ({"score": "sigmoid", "n_group": 4, "topk_group": 2}, "group_top_k"),
        ({"score": "softmax", "n_group": 4, "topk_group": 2}, "group_top_k"),
        ({"score": "softmax", "routed_scaling_factor": 2.0}, "group_top_k"),
    ],
)
@pytest.mark.parametrize("corrected", [False, True])
def test_the_rule_is_named_and_never_guessed(moe, options, route, corrected):
    """A correction does not turn softmax into sigmoid, nor its absence sigmoid into softmax."""
    logits, bias = draw(9, 8), 0.5 * draw(1, 8, 7)[0]
    bias = bias if corrected else None
    found = moe.select_experts(logits, moe.RouterRule(top_k=3, **options), bias)
    if route == "softmax_top_k" and not corrected:
        expected = moe.softmax_top_k(logits, 3, norm_topk_prob=options.get("norm_topk_prob", True))
    else:
        expected = moe.group_top_k(logits, 3, correction_bias=bias, **options)
    assert_all_same_bits(found, expected)


WRONG = {
    ValueError: [
        (lambda m, x: m.softmax_top_k(x, 0), "top_k must be 1 to 8, the experts of .*, got 0"),
        (lambda m, x: m.softmax_top_k(x, 9), "top_k must be 1 to 8, the experts of .*, got 9"),
        (lambda m, x: m.softmax_top_k(x.long(), 2), "router_logits must be floating"),
        (
            lambda m, x: m.softmax_top_k(x.to(torch.float8_e5m2), 2),
            "router_logits must be floating .* of 16 bits or more, got torch.float8_e5m2",
        ),
        (lambda m, x: m.group_top_k(x, 2, n_group=3), "8 experts do not form n_group=3"),
        (lambda m, x: m.group_top_k(x, 3, n_group=4, topk_group=1), "do not form n_group=4 groups"),
        (lambda m, x: m.group_top_k(x, 2, n_group=2, topk_group=3), "topk_group must be 1 to n"),
        (lambda m, x: m.group_top_k(x, 2, score="relu"), "score='relu' is unknown"),
        (lambda m, x: m.group_top_k(x, 2, correction_bias=x[0, :3]), r"correction_.* be \(8,\)"),
        (
            lambda m, x: m.group_top_k(x, 2, correction_bias=torch.zeros(8, device="meta")),
            "correction_bias is on meta",
        ),
        (lambda m, x: m.RouterRule("topk", 2), "score='topk' is unknown"),
        (lambda m, x: m.RouterRule("softmax", 0), "top_k must be at least 1, got 0"),
        (
            lambda m, x: m.RouterRule("sigmoid", 2, routed_scaling_factor=float("nan")),
            "routed_scaling_factor must be finite, got nan",
        ),
    ],
    TypeError: [
        (lambda m, x: m.softmax_top_k(x.to_sparse(), 2), "router_logits must be a dense tensor"),
        (lambda m, x: m.softmax_top_k(x.tolist(), 2), "router_logits must be a dense tensor"),
        (lambda m, x: m.softmax_top_k(x, 2.0), "top_k must be an integer, got 2.0"),
        (lambda m, x: m.group_top_k(x, 2, n_group="2"), "n_group must be an integer, got '2'"),
        (lambda m, x: m.group_top_k(x, 2, correction_bias=[0.0] * 8), "correction_bias must be a"),
        (
            lambda m, x: m.group_top_k(x, 2, routed_scaling_factor="2"),
            "routed_scaling_factor must be a number, got '2'",
        ),
        (lambda m, x: m.RouterRule("softmax", None), "top_k must be an integer, got None"),
        (lambda m, x: m.RouterRule("softmax", 2, topk_group=[1]), "topk_group must be an integer"),
        (lambda m, x: m.select_experts(x, "softmax"), "rule must be a RouterRule, got str"),
        (lambda m, x: m.active_experts(3), "order must be the result of expert_sort, got int"),
    ],
}


@pytest.mark.parametrize(
    ("error", "call", "message"), [(error, *row) for error in WRONG for row in WRONG[error]]
)
def test_wrong_arguments(moe, error, call, message):
    with pytest.raises(error, match=message):
        call(moe, draw(4, 8))


def test_router_module(moe):
    rule = moe.RouterRule("sigmoid", 2, n_group=4, topk_group=2, routed_scaling_factor=1.5)
    router = moe.Router(16, 8, rule, correction=True)
    assert set(router.state_dict()) == {"gate.weight", "e_score_correction_bias"}
    router.e_score_correction_bias.copy_(0.3 * draw(1, 8, 5)[0])
    x = draw(7, 16).bfloat16()
    logits, index, weights = router(x)
    assert logits.dtype == torch.float32, "the gate's dtype, not that of the tokens"
    assert_same_bits(logits, x.float() @ router.gate.weight.T)
    expected = moe.select_experts(logits, rule, router.e_score_correction_bias)
    assert_same_bits(index, expected[0])
    assert_same_bits(weights, expected[1])


HIDDEN, EXPERTS, TOKENS = 16, 6, 19


@pytest.fixture
def block(moe, device):
    torch.manual_seed(0)
    wide = {"device": device, "dtype": torch.float64}
    rule = moe.RouterRule("sigmoid", 2, n_group=3, topk_group=2, routed_scaling_factor=1.5)
    made = moe.MoEBlock(
        moe.Router(HIDDEN, EXPERTS, rule, correction=True, **wide),
        moe.Experts(EXPERTS, HIDDEN, 12, **wide),
        moe.SharedExperts(HIDDEN, 20, sigmoid_gate=True, **wide),
    )
    made.experts.add_adapter(r=3, alpha=6, dtype=torch.float64)
    with torch.no_grad():
        for tensor in (*made.parameters(), made.router.e_score_correction_bias):
            tensor.normal_(std=0.3)
    return made


@pytest.fixture
def x(device):
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    return drawn.to(device).requires_grad_()


def eager_shared(shared, x: torch.Tensor, activation=F.silu) -> torch.Tensor:
    """Shared experts from their definition, without their gate."""
    hidden = activation(x @ shared.gate_proj.weight.T) * (x @ shared.up_proj.weight.T)
    return hidden @ shared.down_proj.weight.T


def eager_block(block, x: torch.Tensor) -> torch.Tensor:
    """The block from its definition, expert by expert."""
    _, ids, gates = block.router(x)
    problem = LayerProblem(TOKENS, 2, EXPERTS, HIDDEN, 12, 3, 3)
    leaves = {"x": x, "gates": gates, **dict(block.experts.named_parameters())}
    shared = block.shared_experts
    y = torch.sigmoid(x @ shared.shared_expert_gate.weight.T) * eager_shared(shared, x)
    return eager_layer(problem, leaves, ids, torch.float64) + y


def test_block_equals_its_definition(block, x):
    out, expected = block(x), eager_block(block, x)
    assert_error_at_most(out, expected, 1e-12)
    grad = torch.randn_like(expected)
    leaves = [x, *(p for p in block.parameters() if p.requires_grad)]
    found = torch.autograd.grad(out, leaves, grad)
    wanted = torch.autograd.grad(expected, leaves, grad)
    for ours, theirs in zip(found, wanted, strict=True):
        assert_error_at_most(ours, theirs, 1e-11)


def test_any_leading_shape(block, x):
    assert_same_bits(block(x[:18].view(2, 9, HIDDEN)).view(18, HIDDEN), block(x[:18]))


def test_without_shared_experts(moe, block, x):
    alone = moe.MoEBlock(block.router, block.experts)
    out = alone(x) + block.shared_experts(x)
    assert_same_bits(out, block(x))


def test_shared_experts_without_gate(moe, device, x):
    shared = moe.SharedExperts(HIDDEN, 8, activation="relu", device=device, dtype=torch.float64)
    assert shared.shared_expert_gate is None
    assert_error_at_most(shared(x), eager_shared(shared, x, F.relu), 1e-14)
    with pytest.raises(ValueError, match="activation='gpt_oss' is none of the elementwise ones"):
        moe.SharedExperts(8, 8, activation="gpt_oss")


class LinearWithLora(nn.Module):
    """What PEFT puts in the place of a linear: the base, plus a low-rank branch."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        new = {"dtype": base.weight.dtype, "device": base.weight.device}
        self.A = nn.Parameter(torch.randn(2, base.in_features, **new))
        self.B = nn.Parameter(torch.randn(base.out_features, 2, **new))

    @property
    def weight(self) -> torch.Tensor:
        return self.base.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + (x @ self.A.T) @ self.B.T


@pytest.mark.sees_defect(
    "shared experts or the router are bypassed with what is wrapped around them"
)
@pytest.mark.parametrize(
    ("owner", "name"),
    [("router", "gate"), ("shared_experts", "up_proj"), ("shared_experts", "shared_expert_gate")],
)
def test_lora_around_the_other_linears_acts_and_learns(block, x, owner, name):
    """Replacing the block's forward must not bypass the modules in it."""
    part = getattr(block, owner)
    without = block(x)
    wrapped = LinearWithLora(getattr(part, name))
    setattr(part, name, wrapped)
    out = block(x)
    out.square().sum().backward()
    assert torch.count_nonzero(wrapped.A.grad) > 0 and torch.count_nonzero(wrapped.B.grad) > 0
    with torch.no_grad():
        wrapped.base.weight += wrapped.B @ wrapped.A
    setattr(part, name, wrapped.base)
    assert_error_at_most(out, block(x), 1e-12)
    assert (out - without).abs().max() > 1e-3


def test_hooks_see_the_router_logits(block, x):
    """The auxiliary loss of a model is computed from what a hook collects."""
    seen = []
    block.router.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))
    block.router.gate.register_forward_hook(lambda module, inputs, output: seen.append(output))
    block(x)
    gate_logits, router_logits = seen
    assert router_logits is gate_logits
    assert_same_bits(router_logits, x @ block.router.gate.weight.T)
    assert router_logits.requires_grad


def test_block_compiles_without_graph_breaks(block, x):
    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend="aot_eager")
    assert_error_at_most(compiled(x), block(x), 1e-13)
