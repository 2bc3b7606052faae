"""The Hub layer: kernelize swaps its forward into experts that look like transformers'."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

from .._compare import assert_error_at_most, assert_same_bits

E, HIDDEN, INNER, T, K = 5, 16, 12, 18, 2


def default_gate(self, gate_up_out: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up_out.chunk(2, dim=-1)
    return self.act_fn(gate) * up


# What transformers' decorator puts on a class without a gate of its own.
default_gate.__module__ = "transformers.integrations.moe"


class ExpertsLikeTransformers(nn.Module):
    """An experts module with the attributes that transformers' decorator leaves, run eagerly."""

    has_gate, has_bias, is_transposed, is_concatenated = True, False, False, True
    _apply_gate = default_gate

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = E
        self.act_fn = nn.SiLU()
        width = 2 * INNER if self.has_gate else INNER
        first = "gate_up_proj" if self.has_gate else "up_proj"
        for name, size_in, size_out in ((first, HIDDEN, width), ("down_proj", INNER, HIDDEN)):
            shape = (size_in, size_out) if self.is_transposed else (size_out, size_in)
            setattr(self, name, nn.Parameter(torch.randn(E, *shape, dtype=torch.float64) * 0.3))
            if self.has_bias:
                bias = nn.Parameter(torch.randn(E, size_out, dtype=torch.float64))
                setattr(self, f"{name}_bias", bias)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        first = "gate_up_proj" if self.has_gate else "up_proj"
        out = torch.zeros_like(hidden_states)
        for expert in range(E):
            token, choice = torch.where(top_k_index == expert)
            wide = self._linear(hidden_states[token], first, expert)
            narrow = self._apply_gate(wide) if self.has_gate else self.act_fn(wide)
            y = self._linear(narrow, "down_proj", expert)
            out = out.index_add(0, token, y * top_k_weights[token, choice, None])
        return out

    def _linear(self, x: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        weight = getattr(self, name)[expert]
        y = x @ (weight if self.is_transposed else weight.mT)
        return y + getattr(self, f"{name}_bias")[expert] if self.has_bias else y


class LikeGptOss(ExpertsLikeTransformers):
    has_bias, is_transposed, is_concatenated = True, True, False

    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.limit = 1.702, 7.0

    def _apply_gate(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up[..., ::2], gate_up[..., 1::2]
        gate, up = gate.clamp(max=self.limit), up.clamp(min=-self.limit, max=self.limit)
        return (up + 1) * (gate * torch.sigmoid(gate * self.alpha))


class OtherConstants(LikeGptOss):
    def __init__(self) -> None:
        super().__init__()
        self.alpha, self.limit = 1.0, 0.5


class LikeNemotron(ExpertsLikeTransformers):
    has_gate = False

    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.ReLU()


class UnknownActivation(ExpertsLikeTransformers):
    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.Hardswish()


class TanhGelu(ExpertsLikeTransformers):
    def __init__(self) -> None:
        super().__init__()
        self.act_fn = nn.GELU(approximate="tanh")


KINDS = {
    ExpertsLikeTransformers: "silu",
    LikeGptOss: "gpt_oss",
    OtherConstants: None,
    LikeNemotron: "relu",
    UnknownActivation: None,
    TanhGelu: "gelu_tanh",
}


@pytest.fixture
def inputs(device):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, E + 1, (T, K), generator=generator)  # E: a sentinel
    x = torch.randn(T, HIDDEN, generator=generator, dtype=torch.float64)
    gates = torch.rand(T, K, generator=generator, dtype=torch.float64)
    return x.to(device), ids.to(device), gates.to(device)


@pytest.mark.sees_defect("routing is written again for every model")
@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_forward_equals_the_eager_one(opt, device, inputs, kind):
    torch.manual_seed(0)
    experts = kind().to(device)
    found = opt.layers.ScatterMoEExperts.forward(experts, *inputs)
    assert_error_at_most(found, experts(*inputs), 1e-13)


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_layout_is_read_off_the_attributes(submodule, moe, kind):
    layout = submodule("moe.layout").module_layout(kind())
    assert (layout.transposed, layout.gated) == (kind.is_transposed, kind.has_gate)
    assert layout.interleaved == (kind.has_gate and not kind.is_concatenated)
    if KINDS[kind] is None:
        assert callable(layout.activation)
    else:
        assert layout.activation == KINDS[kind]


def test_experts_with_a_norm_of_their_own_are_refused(opt, inputs):
    experts = ExpertsLikeTransformers()
    experts.has_post_expert_norm = True
    with pytest.raises(ValueError, match="normalizes every expert's output"):
        opt.layers.ScatterMoEExperts.forward(experts, *inputs)


def test_attached_lora_is_added(opt, moe, device, inputs):
    torch.manual_seed(0)
    experts = ExpertsLikeTransformers().to(device)
    adapters = moe.ExpertAdapters(E, HIDDEN, INNER, moe.ExpertsLayout()).to(device)
    adapters.add_adapter(r=2, alpha=4, dtype=torch.float64, device=device)
    for projection in adapters.values():
        nn.init.normal_(projection.lora_B["default"].weight)
    base = opt.layers.ScatterMoEExperts.forward(experts, *inputs)
    experts.expert_lora = adapters
    found = opt.layers.ScatterMoEExperts.forward(experts, *inputs)
    with adapters.disabled():
        assert_same_bits(opt.layers.ScatterMoEExperts.forward(experts, *inputs), base)
    adapters.merge({"gate_up": experts.gate_up_proj, "down": experts.down_proj})
    assert_error_at_most(found, experts(*inputs), 1e-12)


def test_kernelize_swaps_the_forward(opt, device, inputs):
    """As a trainer does it, from the built folder, for training and for a compiled graph."""
    from kernels import (
        LocalLayerRepository,
        Mode,
        kernelize,
        replace_kernel_forward_from_hub,
        use_kernel_mapping,
    )

    class Experts(ExpertsLikeTransformers):
        pass

    replace_kernel_forward_from_hub(Experts, "OptimizerExperts")
    torch.manual_seed(0)
    model = nn.ModuleDict({"experts": Experts().to(device)})
    expected = model["experts"](*inputs)
    variant = Path(opt.__file__).parent  # named, or a CUDA build of torch asks for a CUDA variant
    layer = LocalLayerRepository(repo_path=variant, layer_name="ScatterMoEExperts")
    with use_kernel_mapping({"OptimizerExperts": {device.type: layer}}):
        kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device=device)
    found = model["experts"](*inputs)
    assert_error_at_most(found, expected, 1e-13)
    found.sum().backward()
    assert model["experts"].gate_up_proj.grad is not None
    assert "experts_forward" in inspect.getsource(model["experts"].forward)
