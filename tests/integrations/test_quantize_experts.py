"""quantize_experts and attach_lora(quantize=...): the same model over rounded experts."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from .._compare import assert_error_at_most, assert_same_bits, relative_error
from ._models import build, set_random_lora, tokens
from .test_transformers import FP32, experts_of

TARGETS = ("gate_up_proj", "down_proj")


def logits(model: nn.Module) -> torch.Tensor:
    return model(input_ids=tokens(model).to(next(model.parameters()).device)).logits


def rounded(opt, model: nn.Module, quant_type: str) -> nn.Module:
    """A dense copy whose experts hold what their 4 bits decode to."""
    result = copy.deepcopy(model)
    for experts in experts_of(result):
        for target in TARGETS:
            weight = getattr(experts, target)
            stack = opt.moe.QuantizedExperts.from_weight(weight, quant_type=quant_type)
            with torch.no_grad():
                weight.copy_(stack.decode(dtype=weight.dtype))
    return result


@pytest.mark.parametrize("quant_type", ["nf4", "fp4"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_lora_over_4_bits_is_lora_over_the_rounded_experts(opt, device, name, quant_type) -> None:
    model = build(name).to(device)
    twin = rounded(opt, model, quant_type)
    attach = opt.integrations.attach_lora
    attach(model, r=3, alpha=7, quantize=quant_type)
    attach(twin, r=3, alpha=7)
    for one in (model, twin):
        set_random_lora(one)
    found, expected = logits(model), logits(twin)
    assert_error_at_most(found, expected, FP32)
    assert relative_error(found, logits(build(name).to(device))) > 0.05
    for output in (found, expected):
        output.square().sum().backward()
    wanted = {key: param.grad for key, param in twin.named_parameters() if param.requires_grad}
    trained = {key: param.grad for key, param in model.named_parameters() if param.requires_grad}
    assert trained.keys() == wanted.keys() and len(trained) == 2 * 2 * len(experts_of(model))
    for key, gradient in wanted.items():
        assert_error_at_most(trained[key], gradient, FP32)


def test_the_stacks_are_gone(opt, device) -> None:
    """Of the experts only bytes and their scales stay; what is quantised stays as it is."""
    model = build("qwen3_moe").to(device)
    opt.integrations.quantize_experts(model)
    kinds = {part.dtype for experts in experts_of(model) for part in experts.parameters()}
    assert kinds == {torch.uint8, torch.float32}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert not any(key.endswith(TARGETS) for key in before)
    opt.integrations.quantize_experts(model, "fp4")
    for key, value in model.state_dict().items():
        assert_same_bits(value, before[key])


def test_a_quantised_model_runs(opt, device) -> None:
    """No call beside quantize_experts: transformers' own experts know no 4 bits."""
    model = build("qwen3_moe").to(device)
    model.set_experts_implementation("grouped_mm")
    expected = logits(rounded(opt, build("qwen3_moe").to(device), "nf4"))
    opt.integrations.quantize_experts(model)
    assert_error_at_most(logits(model), expected, FP32)
    with pytest.raises(ValueError, match="Linear has no experts"):
        opt.integrations.quantize_experts(nn.Linear(2, 2))


def test_a_refused_or_failed_attachment_leaves_no_adapter(
    opt, device, submodule, monkeypatch
) -> None:
    attach, wide = opt.integrations.attach_lora, build("qwen3_moe").to(device).double()
    with pytest.raises(ValueError, match=r"gate_up_proj is torch\.float64; 4 bits are made of"):
        attach(wide, r=2, alpha=4, quantize="nf4")
    assert not any(".lora_" in name for name in wide.state_dict())
    assert all(parameter.requires_grad for parameter in wide.parameters())
    assert wide.config._experts_implementation == "eager"
    with pytest.raises(ValueError, match="blocksize must be one of"):
        opt.integrations.quantize_experts(build("qwen3_moe"), blocksize=48)

    model, calls = build("qwen3_moe").to(device), []
    module = submodule("kernels.quant.formats")
    quantize = module.nf4_quantize

    def short_of_memory(*arguments, **options):
        calls.append(arguments)
        if len(calls) == 8:  # within the second stack
            raise torch.OutOfMemoryError("CUDA out of memory")
        return quantize(*arguments, **options)

    monkeypatch.setattr(module, "nf4_quantize", short_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        attach(model, r=2, alpha=4, quantize="nf4")
    assert not any(".lora_" in name for name in model.state_dict())
    assert all(p.requires_grad for n, p in model.named_parameters() if ".experts." not in n)
    logits(model)  # half quantised, it runs
    attach(model, r=2, alpha=4, quantize="nf4")
    logits(model)
    assert not any(key.endswith(TARGETS) for key in model.state_dict())


def test_refusals_change_nothing(opt, device) -> None:
    model = build("qwen3_moe").to(device)
    before = set(model.state_dict())
    with pytest.raises(ValueError, match=r"one of \('nf4', 'fp4'\), got 'int4'"):
        opt.integrations.quantize_experts(model, "int4")
    last = experts_of(model)[-1]
    kept = last.down_proj
    last.down_proj = nn.Parameter(kept.detach().to("meta"), requires_grad=False)
    for call in (
        lambda: opt.integrations.quantize_experts(model),
        lambda: opt.integrations.attach_lora(model, r=2, alpha=4, quantize="nf4"),
    ):
        with pytest.raises(ValueError, match="down_proj is on the meta device; quantise a model"):
            call()
    assert set(model.state_dict()) == before


@pytest.mark.parametrize("reentrant", [False, True])
def test_experts_in_host_memory(opt, device, tmp_path, reentrant) -> None:
    """Gradient checkpointing over offloaded experts: the same bits, and they can be saved."""
    model = build("qwen3_moe", num_hidden_layers=3).to(device)
    opt.integrations.attach_lora(model, r=3, alpha=7, quantize="nf4")
    set_random_lora(model)
    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        logits(model).square().sum().backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    expected = gradients()
    offload = opt.moe.ExpertOffload(model)
    for _ in range(2):
        found = gradients()
        assert found.keys() == expected.keys() and len(found) >= 3 * 4
        for name, gradient in expected.items():
            assert_same_bits(found[name], gradient)
    assert offload.waits < offload.transfers
    opt.integrations.save_quantized(model, tmp_path)
    opt.integrations.save_peft_adapter(model, tmp_path / "adapter")
    options = {"dtype": torch.float32, "device_map": str(device)}
    loaded = opt.integrations.load_quantized(tmp_path, **options)
    opt.integrations.load_peft_adapter(loaded, tmp_path / "adapter")
    assert_same_bits(logits(loaded), logits(model))
