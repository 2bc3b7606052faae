"""save_quantized: what it writes, what it leaves out, and what load_quantized makes of it."""

from __future__ import annotations

import json

import pytest
import torch

from .._compare import assert_same_bits
from ._models import build, set_random_lora, tokens

OPTIONS = {"dtype": torch.float32, "device_map": "cpu"}
WEIGHTS = "model-quantized.safetensors"


@pytest.fixture
def quantized(opt):
    model = build("qwen3_moe").eval()
    opt.integrations.quantize_experts(model)
    return model


def logits(model) -> torch.Tensor:
    with torch.no_grad():
        return model(tokens(model)).logits


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_adapters_are_left_out(opt, quantized, tmp_path) -> None:
    """They travel in files of their own, and the base that was saved is found below them again."""
    expected = logits(quantized)
    opt.integrations.attach_lora(quantized, r=3, alpha=7)
    set_random_lora(quantized)
    with_lora = logits(quantized)
    opt.integrations.save_quantized(quantized, tmp_path / "base")
    opt.integrations.save_peft_adapter(quantized, tmp_path / "adapter")
    loaded = opt.integrations.load_quantized(tmp_path / "base", **OPTIONS)
    assert_same_bits(logits(loaded), expected)
    opt.integrations.load_peft_adapter(loaded, tmp_path / "adapter")
    assert_same_bits(logits(loaded), with_lora)


def test_defaults_of_generate_travel(opt, tmp_path) -> None:
    model = build("qwen3_moe")
    model.generation_config.update(do_sample=True, top_k=7, temperature=0.3)
    model.save_pretrained(tmp_path / "dense")
    loaded = opt.integrations.load_quantized(tmp_path / "dense", **OPTIONS)
    opt.integrations.save_quantized(loaded, tmp_path / "packed")
    again = opt.integrations.load_quantized(tmp_path / "packed", **OPTIONS)
    for found in (loaded.generation_config, again.generation_config):
        assert (found.do_sample, found.top_k, found.temperature) == (True, 7, 0.3)


def test_from_pretrained_refuses_the_folder(opt, quantized, tmp_path) -> None:
    """It knows no 4-bit experts: it would report them as missing and draw them at random."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = opt.integrations.save_quantized(quantized, tmp_path)
    assert path == tmp_path / WEIGHTS
    with pytest.raises(OSError, match=r"no file named model\.safetensors"):
        AutoModelForCausalLM.from_pretrained(tmp_path)
    assert AutoConfig.from_pretrained(tmp_path).model_type == "qwen3_moe"


@pytest.mark.parametrize("limit", ["1KB", "1GB"])
def test_a_folder_with_another_checkpoint_is_refused(opt, quantized, tmp_path, limit) -> None:
    """Its index would win when the folder is loaded, and a single file would be lost."""
    build("qwen3_moe").save_pretrained(tmp_path, max_shard_size=limit)
    before = files(tmp_path)
    assert ("model.safetensors.index.json" in before) == (limit == "1KB")
    with pytest.raises(ValueError, match="holds another checkpoint"):
        opt.integrations.save_quantized(quantized, tmp_path)
    assert files(tmp_path) == before


def test_a_failure_leaves_the_earlier_save(opt, quantized, tmp_path, monkeypatch) -> None:
    opt.integrations.save_quantized(quantized, tmp_path)
    before = files(tmp_path)
    with torch.no_grad():
        quantized.lm_head.weight.zero_()

    def full(*_, **__):
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        # Of the class: what is set and restored on the object stays in what it writes.
        patch.setattr(type(quantized.config), "save_pretrained", full)
        with pytest.raises(OSError, match="No space left"):
            opt.integrations.save_quantized(quantized, tmp_path)
    assert files(tmp_path) == before
    opt.integrations.save_quantized(quantized, tmp_path)
    loaded = opt.integrations.load_quantized(tmp_path, **OPTIONS)
    assert not loaded.lm_head.weight.any()


def test_what_could_not_be_loaded_is_not_written(opt, quantized, tmp_path) -> None:
    import peft

    def refused(model, message) -> None:
        with pytest.raises(ValueError, match=message):
            opt.integrations.save_quantized(model, tmp_path / "new")
        assert not (tmp_path / "new").exists()

    refused(torch.nn.Linear(2, 2), "no transformers model with experts")
    refused(build("qwen3_moe"), r"layers\.0\.mlp\.experts\.gate_up_proj is not in 4 bits")
    half = build("qwen3_moe")
    opt.integrations.quantize_experts(half)
    stack = half.model.layers[1].mlp.experts._modules.pop("down_proj")
    half.model.layers[1].mlp.experts.down_proj = torch.nn.Parameter(stack.decode())
    refused(half, r"layers\.1\.mlp\.experts\.down_proj is not in 4 bits")
    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    wrapped = peft.get_peft_model(build("qwen3_moe"), config)
    opt.integrations.quantize_experts(wrapped)
    refused(wrapped, "wrapped by PEFT")
    refused(wrapped.base_model.model, "wrapped by PEFT")
    quantized.config.quantization_config = {"quant_method": "bitsandbytes"}
    refused(quantized, "bitsandbytes")


def test_experts_of_bitsandbytes_are_refused(opt, tmp_path) -> None:
    """Their state is spread over keys that only bitsandbytes reads."""
    parametrize = pytest.importorskip("bitsandbytes.nn.parametrize")
    model = build("qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    for layer in model.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            parametrize.replace_parameter_4bit(layer.mlp.experts, name, quant_type="nf4")
    with pytest.raises(ValueError, match="from_quantized"):
        opt.integrations.save_quantized(model, tmp_path / "new")
    for layer in model.model.layers:
        experts = layer.mlp.experts
        for name in ("gate_up_proj", "down_proj"):
            stack = opt.moe.QuantizedExperts.from_quantized(opt.moe.expert_weight(experts, name))
            torch.nn.utils.parametrize.remove_parametrizations(
                experts, name, leave_parametrized=False
            )
            del experts._parameters[name]
            experts.add_module(name, stack)
    opt.integrations.use_in_transformers(model)
    opt.integrations.save_quantized(model, tmp_path / "new")
    loaded = opt.integrations.load_quantized(tmp_path / "new", **OPTIONS)
    assert_same_bits(logits(loaded), logits(model.eval()))


def test_the_description_is_readable(opt, quantized, tmp_path) -> None:
    """Everything beside the tensors is what transformers writes."""
    opt.integrations.save_quantized(quantized, tmp_path)
    assert set(files(tmp_path)) == {WEIGHTS, "config.json", "generation_config.json"}
    assert "quantization_config" not in json.loads((tmp_path / "config.json").read_text())
