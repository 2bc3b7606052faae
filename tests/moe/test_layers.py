"""The Hub layer: kernelize swaps its forward into the experts of transformers."""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest
import torch
from torch import nn

from .._compare import assert_error_at_most, assert_same_bits
from ..integrations._models import MODELS, build, experts_of
from ..integrations.test_transformers import routing, stand_alone

# Experts of transformers, what is changed of them, and the activation that is read off them: None
# where their own gate is called as it is.
KINDS = {
    "silu": ("qwen3_moe", {}, "silu"),
    "tanh": ("qwen3_moe", {"act_fn": nn.GELU(approximate="tanh")}, "gelu_tanh"),
    "unknown activation": ("qwen3_moe", {"act_fn": nn.Hardswish()}, None),
    "gpt_oss": ("gpt_oss", {}, "gpt_oss"),
    "other constants": ("gpt_oss", {"alpha": 1.0, "limit": 0.5}, None),
    "no gate": ("nemotron_h", {}, "relu2"),
    "clamped": ("deepseek_v4", {}, None),
}


def made(kind: str, device: torch.device) -> nn.Module:
    name, changes, _ = KINDS[kind]
    experts = experts_of(build(name))[0] if name in MODELS else stand_alone(name)
    for attribute, value in changes.items():
        setattr(experts, attribute, value)
    return experts.to(device, torch.float64)


def inputs_of(experts: nn.Module, device: torch.device) -> tuple[torch.Tensor, ...]:
    return routing(experts, device, dtype=torch.float64)


@pytest.mark.sees_defect("routing is written again for every model")
@pytest.mark.parametrize("kind", KINDS)
def test_forward_equals_the_eager_one(opt, device, kind):
    experts = made(kind, device)
    inputs = inputs_of(experts, device)
    found = opt.layers.ScatterMoEExperts.forward(experts, *inputs)
    assert_error_at_most(found, experts(*inputs), 1e-13)


@pytest.mark.parametrize("kind", KINDS)
def test_layout_is_read_off_the_attributes(submodule, device, kind):
    experts, activation = made(kind, device), KINDS[kind][2]
    layout = submodule("moe.layout").module_layout(experts)
    assert (layout.transposed, layout.gated) == (experts.is_transposed, experts.has_gate)
    assert layout.interleaved == (experts.has_gate and not experts.is_concatenated)
    assert callable(layout.activation) if activation is None else layout.activation == activation


def test_experts_with_a_norm_of_their_own_are_refused(opt, device):
    experts = made("silu", device)
    experts.has_post_expert_norm = True
    with pytest.raises(ValueError, match="normalizes every expert's output"):
        opt.layers.ScatterMoEExperts.forward(experts, *inputs_of(experts, device))


def test_attached_lora_is_added(opt, moe, device):
    experts = made("silu", device)
    inputs = inputs_of(experts, device)
    adapters = moe.ExpertAdapters(5, 24, 20, moe.ExpertsLayout()).to(device)
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


def test_kernelize_swaps_the_forward(opt, device):
    """As a trainer does it, from the built folder, for training and for a compiled graph."""
    from kernels import (
        LocalLayerRepository,
        Mode,
        kernelize,
        replace_kernel_forward_from_hub,
        use_kernel_mapping,
    )

    experts = made("silu", device)
    inputs = inputs_of(experts, device)
    expected = experts(*inputs)

    class Experts(type(experts)):
        pass

    replace_kernel_forward_from_hub(Experts, "OptimizerExperts")
    experts.__class__ = Experts
    model = nn.ModuleDict({"experts": experts})
    variant = Path(opt.__file__).parent  # named, or a CUDA build of torch asks for a CUDA variant
    layer = LocalLayerRepository(repo_path=variant, layer_name="ScatterMoEExperts")
    with use_kernel_mapping({"OptimizerExperts": {device.type: layer}}):
        kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device=device)
    found = model["experts"](*inputs)
    assert_error_at_most(found, expected, 1e-13)
    found.sum().backward()
    assert model["experts"].gate_up_proj.grad is not None
    assert "experts_forward" in inspect.getsource(model["experts"].forward)
