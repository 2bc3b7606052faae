"""What save_quantized and save_pretrained write of 4-bit experts, and who reads it."""

from __future__ import annotations

import copy
import json
import pickle

import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.quantizers import auto
from transformers.trainer_utils import validate_quantization_for_training

from .._compare import assert_same_bits, assert_same_tensors
from ._models import (
    OPTIONS,
    build,
    experts_of,
    logits,
    parametrize_4_bits,
    set_random_lora,
    tokens,
    trained,
)
from ._moe_table import inputs, tiny

METHOD = "quantized_experts"
WEIGHTS = "model-quantized.safetensors"


@pytest.fixture
def quantized(opt):
    model = build("qwen3_moe").eval()
    opt.integrations.quantize_experts(model)
    return model


def save_quantized(opt, model, folder) -> None:
    opt.integrations.save_quantized(model, folder)


def save_pretrained(opt, model, folder) -> None:
    model.save_pretrained(folder)


def files(folder) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_adapters_are_left_out(opt, quantized, tmp_path) -> None:
    """They travel in files of their own, and the base that was saved is found below them again.

    So it is after save_pretrained, whose configuration describes them.
    """
    expected = logits(quantized)
    opt.integrations.attach_lora(quantized, r=3, lora_alpha=7)
    set_random_lora(quantized)
    with_lora = logits(quantized)
    quantized.save_pretrained(tmp_path / "whole")
    opt.integrations.save_quantized(quantized, tmp_path / "base")
    assert "quantization_config" not in json.loads((tmp_path / "base/config.json").read_text())
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


@pytest.mark.parametrize("save", [save_quantized, save_pretrained])
def test_what_could_not_be_read_is_not_written(opt, quantized, save, tmp_path) -> None:
    def refused(model, message) -> None:
        with pytest.raises(ValueError, match=message):
            save(opt, model, tmp_path)
        assert not list(tmp_path.iterdir())

    config = peft.LoraConfig(r=2, target_modules=["q_proj"])
    wrapped = peft.get_peft_model(build("qwen3_moe"), config)
    opt.integrations.quantize_experts(wrapped)
    refused(wrapped.base_model.model, "wrapped by PEFT")
    both = build("qwen3_moe")
    both.hf_quantizer = object()  # of bitsandbytes, for the linear layers
    both.config.quantization_config = {"quant_method": "bitsandbytes"}
    opt.integrations.quantize_experts(both)
    refused(both, "quantised by .*bitsandbytes.* beside its experts")
    experts = quantized.model.layers[1].mlp.experts
    stack = experts._modules.pop("down_proj")
    experts.down_proj = torch.nn.Parameter(stack.decode())
    refused(quantized, r"layers\.1\.mlp\.experts\.down_proj is not in 4 bits")
    if save is save_quantized:
        refused(wrapped, "wrapped by PEFT")
        refused(torch.nn.Linear(2, 2), "no transformers model with experts")
        refused(build("qwen3_moe"), r"layers\.0\.mlp\.experts\.gate_up_proj is not in 4 bits")


def test_experts_of_bitsandbytes_are_refused(opt, tmp_path) -> None:
    """Their state is spread over keys that only bitsandbytes reads."""
    model = build("qwen3_moe", hidden_size=64, moe_intermediate_size=64)
    parametrize_4_bits(model)
    with pytest.raises(ValueError, match="from_quantized"):
        opt.integrations.save_quantized(model, tmp_path / "new")
    for experts in experts_of(model):
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


def from_pretrained(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)


def test_in_several_files(opt, quantized, tmp_path) -> None:
    quantized.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 1
    assert_same_bits(
        logits(opt.integrations.load_quantized(tmp_path, **OPTIONS)), logits(quantized)
    )
    assert_same_bits(logits(from_pretrained(tmp_path)), logits(quantized))


def test_nested_scales_and_fp4_keep_their_format(opt, tmp_path) -> None:
    build("qwen3_moe").save_pretrained(tmp_path / "dense")
    load = opt.integrations.load_quantized
    model = load(tmp_path / "dense", nested=True, quant_type="fp4", blocksize=32, **OPTIONS)
    model.save_pretrained(tmp_path / "packed")
    for loaded in (load(tmp_path / "packed", **OPTIONS), from_pretrained(tmp_path / "packed")):
        assert_same_tensors(loaded.state_dict(), model.state_dict())


def test_what_trains_after_loading(opt, quantized, tmp_path) -> None:
    """Packed experts never; with adapters these alone, as attach_lora left it."""
    quantized.save_pretrained(tmp_path / "base")
    loaded = from_pretrained(tmp_path / "base")
    assert trained(loaded) == {n for n, _ in loaded.named_parameters() if ".experts." not in n}
    validate_quantization_for_training(loaded)
    opt.integrations.attach_lora(
        quantized, r=2, lora_alpha=4, target_parameters=("down_proj",), use_rslora=True
    )
    opt.integrations.attach_lora(quantized, r=3, lora_alpha=5, adapter_name="second")
    opt.integrations.set_lora(quantized, "second")
    set_random_lora(quantized)
    quantized.save_pretrained(tmp_path / "adapted")
    load = opt.integrations.load_quantized
    for loaded in (load(tmp_path / "adapted", **OPTIONS), from_pretrained(tmp_path / "adapted")):
        assert trained(loaded) == {n for n, _ in loaded.named_parameters() if ".second." in n}
        assert_same_bits(logits(loaded), logits(quantized))
        opt.integrations.set_lora(loaded, "default")
        opt.integrations.set_lora(quantized, "default")
        assert_same_bits(logits(loaded), logits(quantized))
        opt.integrations.set_lora(quantized, "second")


def test_the_base_model_of_the_files(quantized, tmp_path) -> None:
    quantized.save_pretrained(tmp_path)
    base = AutoModel.from_pretrained(tmp_path, dtype=torch.float32)
    found, expected = (model(tokens(model)).last_hidden_state for model in (base, quantized.model))
    assert_same_bits(found, expected)


def test_without_this_package_from_pretrained_raises(quantized, tmp_path, monkeypatch) -> None:
    """It would go on with a warning and draw experts whose names it misses at random."""
    quantized.save_pretrained(tmp_path)
    monkeypatch.delitem(auto.AUTO_QUANTIZER_MAPPING, METHOD)
    monkeypatch.delitem(auto.AUTO_QUANTIZATION_CONFIG_MAPPING, METHOD)
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        from_pretrained(tmp_path)


def test_files_that_do_not_fit_are_refused(quantized, tmp_path) -> None:
    quantized.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="load it with the class and the configuration"):
        from_pretrained(tmp_path, num_hidden_layers=1)
    with pytest.raises(ValueError, match=r"the configuration asks for \(6, "):
        from_pretrained(tmp_path, num_experts=6)
    with pytest.raises(ValueError, match="need one device per rank"):
        from_pretrained(tmp_path, device_map={"model": "cpu", "lm_head": "meta"})
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.down_proj.absmax"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"lacks model\.layers\.1\.mlp\.experts\.down_proj\.absmax"
    ):
        from_pretrained(tmp_path)


def test_an_adapter_of_transformers_is_written_alone(quantized, tmp_path) -> None:
    quantized.add_adapter(peft.LoraConfig(r=2, target_modules=["q_proj"]))
    quantized.save_pretrained(tmp_path)
    assert (tmp_path / "adapter_model.safetensors").exists()
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["GraniteMoeForCausalLM", "NemotronHForCausalLM"])
def test_save_quantized_round_trip_by_the_models_own_names(opt, tmp_path, name) -> None:
    """Granite calls its block what Mixtral's files call it, and was renamed when it was read."""
    model = tiny(name)
    opt.integrations.quantize_experts(model)
    opt.integrations.save_quantized(model, tmp_path)
    loaded = opt.integrations.load_quantized(tmp_path, **OPTIONS)
    with torch.no_grad():
        assert_same_bits(loaded(**inputs(model)).logits, model(**inputs(model)).logits)


def test_a_model_can_be_copied_and_pickled(quantized, tmp_path) -> None:
    quantized.save_pretrained(tmp_path)
    for twin in (copy.deepcopy(quantized), pickle.loads(pickle.dumps(quantized))):
        assert type(twin.hf_quantizer) is type(quantized.hf_quantizer)
        assert_same_bits(logits(twin), logits(quantized))
