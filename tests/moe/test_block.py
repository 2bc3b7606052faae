"""Router, experts and shared experts together, and the parts called as modules."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from .._compare import assert_error_at_most, assert_same_bits

HIDDEN, EXPERTS, TOKENS = 16, 6, 19


@pytest.fixture
def block(moe, device):
    """A block of every part, with random weights and LoRA on the experts, in float64."""
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


def eager_block(moe, block, x: torch.Tensor) -> torch.Tensor:
    """The block from its definition, token by token."""
    _, ids, weights = block.router(x)
    rows = []
    for t in range(x.shape[0]):
        row = torch.zeros_like(x[t])
        for expert, gate in zip(ids[t].tolist(), weights[t], strict=True):
            w = {}
            for target in ("gate_up", "down"):
                p = block.experts.expert_lora[target]
                factors = p.factors()
                base = getattr(block.experts, f"{target}_proj")[expert]
                w[target] = base + factors.scaling * factors.b[expert] @ factors.a[expert]
            g, up = (w["gate_up"] @ x[t]).chunk(2)
            row = row + gate * (w["down"] @ (F.silu(g) * up))
        shared = block.shared_experts
        y = shared.down_proj.weight @ (
            F.silu(shared.gate_proj.weight @ x[t]) * (shared.up_proj.weight @ x[t])
        )
        rows.append(row + torch.sigmoid(shared.shared_expert_gate.weight @ x[t]) * y)
    return torch.stack(rows)


def test_block_equals_its_definition(moe, block, x):
    out, expected = block(x), eager_block(moe, block, x)
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
    expected = (F.relu(x @ shared.gate_proj.weight.T) * (x @ shared.up_proj.weight.T)) @ (
        shared.down_proj.weight.T
    )
    assert shared.shared_expert_gate is None
    assert_error_at_most(shared(x), expected, 1e-14)
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


def folded(wrapped: LinearWithLora) -> nn.Linear:
    plain = copy.deepcopy(wrapped.base)
    with torch.no_grad():
        plain.weight += wrapped.B @ wrapped.A
    return plain


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
    setattr(part, name, folded(wrapped))
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


def test_state_dict_round_trip(moe, block, x):
    other = copy.deepcopy(block)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    other.load_state_dict(block.state_dict())
    assert_same_bits(other(x), block(x))
