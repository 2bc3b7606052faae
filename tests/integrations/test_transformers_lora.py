"""attach_lora, its switches and quantize_experts: the results of PEFT, without PEFT."""

from unittest import mock

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from .._compare import assert_error_at_most, assert_same_bits, assert_same_tensors, fail_at
from ._models import (
    DISTINCT,
    FP32,
    OPTIONS,
    STACKS,
    attached,
    build,
    experts_of,
    logits,
    parametrize_4_bits,
    set_random_lora,
    set_stacks,
    step,
    trained,
)
from .test_transformers import routing, stand_alone


def test_experts_without_a_gate(opt, device) -> None:
    experts = stand_alone("nemotron_h").to(device)
    experts.config._experts_implementation = opt.integrations.use_in_transformers()
    inputs = routing(experts, device)
    holder = nn.ModuleDict({"experts": experts})
    with torch.no_grad():
        attached(opt, holder, target_parameters=("up_proj", "down_proj"))
        ours = experts(*inputs)
        with pytest.raises(ValueError, match=r"has \['gate_up_proj'\].*they have .*'up_proj'"):
            opt.integrations.attach_lora(
                holder, 3, 7, target_parameters=["gate_up_proj"], adapter_name="other"
            )
        opt.integrations.merge_lora(holder)
        assert_error_at_most(ours, experts(*inputs), FP32)


def test_4_bit_experts_are_decoded_and_never_merged(opt, fresh, tmp_path) -> None:
    sizes = {"moe_intermediate_size": 64, "hidden_size": 64}
    model, dense = (fresh(**sizes) for _ in range(2))
    parametrize_4_bits(model)
    set_stacks(dense, model)
    for entry in (model, dense):
        attached(opt, entry)
    assert_same_bits(logits(model), logits(dense))
    with pytest.raises(ValueError, match="cannot be merged into it"):
        opt.integrations.merge_lora(model)
    opt.integrations.save_peft_adapter(model, tmp_path)  # in the order that PEFT uses over 4 bits
    again = fresh(**sizes)
    with pytest.raises(ValueError, match="saved over quantized experts"):
        opt.integrations.load_peft_adapter(again, tmp_path)


def test_other_implementations_do_not_drop_lora_in_silence(opt, fresh) -> None:
    model = attached(opt, fresh())
    model.set_experts_implementation("eager")
    with pytest.raises(RuntimeError, match="implementation is 'eager'; use_in_transformers"):
        logits(model)
    opt.integrations.disable_lora(model)
    assert_same_bits(logits(model), logits(fresh()))


def test_what_a_model_or_its_adapters_do_not_allow(opt, fresh) -> None:
    attach = opt.integrations.attach_lora
    model = fresh()
    for words, call in (
        ("no experts.*get_peft_model", lambda: attach(nn.Linear(2, 2), 1, 1)),
        ("no LoRA to save; attach_lora", lambda: opt.integrations.save_peft_adapter(model, "x")),
        ("attach_lora first", lambda: opt.integrations.disable_lora(model)),
        ("no adapter is active", lambda: opt.integrations.merge_lora(model)),
    ):
        with pytest.raises(ValueError, match=words):
            call()
    attach(model, 1, 1)
    experts_of(model)[0]._is_expert_parallel = True
    with pytest.raises(ValueError, match="split over ranks"):
        attach(model, 1, 1, adapter_name="b")
    biased = fresh("gpt_oss")
    with pytest.raises(ValueError, match=r"has LoRA on .*, not 'down_proj_bias'"):
        attach(biased, 1, 1, target_parameters=["experts.down_proj_bias"])
    ours = opt.integrations
    for call in (
        attach,
        ours.use_in_transformers,
        ours.quantize_experts,
        ours.merge_lora,
        ours.unmerge_lora,
        ours.detach_lora,
        ours.disable_lora,
        lambda name: ours.load_peft_adapter(name, "folder"),
    ):
        with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got str; load it"):
            call("Qwen/Qwen3-30B-A3B")


@pytest.mark.parametrize("parts", [{}, {"target_modules": ["q_proj"]}], ids=["experts", "all"])
def test_experts_that_accelerate_keeps_on_disk(opt, tmp_path, parts) -> None:
    """LoRA would lie on the meta device beside them, and the first product would fail."""
    pytest.importorskip("accelerate")
    build("qwen3_moe").save_pretrained(tmp_path / "whole")
    names = ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head", "model.layers.0")
    places = dict.fromkeys(names, "cpu") | {"model.layers.1": "disk"}
    model = transformers.Qwen3MoeForCausalLM.from_pretrained(
        tmp_path / "whole", device_map=places, offload_folder=tmp_path / "disk"
    )
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts .*device_map.*load_quantized"):
        opt.integrations.attach_lora(model, 3, 7, **parts)
    assert not any("lora" in name for name, _ in model.named_parameters())


def test_the_stacks_are_gone(opt, fresh) -> None:
    """Of the experts only bytes and their scales stay; what is quantised stays as it is."""
    model = fresh()
    opt.integrations.quantize_experts(model)
    kinds = {part.dtype for experts in experts_of(model) for part in experts.parameters()}
    assert kinds == {torch.uint8, torch.float32}
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert not any(key.endswith(STACKS) for key in before)
    opt.integrations.quantize_experts(model, "fp4")
    assert_same_tensors(model.state_dict(), before)


def test_memory_that_is_too_short_for_the_factors(opt, fresh, submodule, monkeypatch) -> None:
    model = fresh()
    kind = submodule("moe.lora").LoraProjection
    calls = fail_at(monkeypatch, kind, "add_adapter", 3, torch.OutOfMemoryError("short"))
    before = list(model.state_dict())
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            opt.integrations.attach_lora(model, r=2, lora_alpha=4)
        assert list(model.state_dict()) == before
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert not any(module._forward_pre_hooks for module in experts_of(model))
        calls.clear()


@pytest.mark.parametrize("name", DISTINCT)
def test_lora_over_16_bits_comes_back_from_the_files(opt, device, fresh, name, tmp_path) -> None:
    """from_pretrained would pass over the factors with a warning; a trainer gathers the tensors.

    Mixtral's files have older names than the model, under which a trainer would load nothing.
    """
    model = attached(opt, fresh(name), target_parameters=["down_proj"], use_rslora=True)
    opt.integrations.attach_lora(model, r=2, lora_alpha=4, adapter_name="second")
    opt.integrations.set_lora(model, "second", trainable=True)
    set_random_lora(model)
    model = model.bfloat16()
    kept = {n: p.float() if ".expert_lora." in n else p for n, p in model.state_dict().items()}
    model.save_pretrained(tmp_path / "own")
    model.save_pretrained(tmp_path / "given", state_dict=dict(kept))
    for folder, wanted in (("own", model.state_dict()), ("given", kept)):
        loaded = type(model).from_pretrained(tmp_path / folder, dtype=torch.bfloat16)
        assert trained(loaded) == trained(model)
        for key, tensor in loaded.state_dict().items():
            assert_same_bits(tensor.to(device), wanted[key].to(tensor.dtype))
        assert loaded.state_dict().keys() == wanted.keys()
        assert getattr(loaded, "hf_quantizer", None) is None and not loaded.is_quantized
        loaded.save_pretrained(tmp_path / "again")
        assert "second" in (tmp_path / "again" / "config.json").read_text()
    for tensors in (load_file(tmp_path / "own" / "model.safetensors"), dict(kept)):
        set_random_lora(model, seed=5)
        model.load_state_dict(tensors, strict=False)
        for key in trained(model):
            assert_same_bits(model.get_parameter(key), kept[key].to(model.dtype))
    opt.integrations.detach_lora(model)
    model.save_pretrained(tmp_path / "base")
    assert "quant" not in (tmp_path / "base" / "config.json").read_text()


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_nothing_trains_where_no_adapter_was_active(opt, fresh, quantize, tmp_path) -> None:
    model = attached(opt, fresh(), quantize=quantize)
    opt.integrations.set_lora(model, None)
    model.save_pretrained(tmp_path)
    loaded = [type(model).from_pretrained(tmp_path)]
    if quantize:
        loaded.append(opt.integrations.load_quantized(tmp_path, **OPTIONS))
    for again in loaded:
        assert trained(again) == set()
        opt.integrations.set_lora(again, "default", trainable=True)
        assert trained(again) == trained(model)


def test_adapters_that_the_files_lack_are_refused(opt, fresh, tmp_path) -> None:
    """Two models of one configuration: what is said of the first one is written with the second."""
    model = fresh()
    other = type(model)(model.config)
    opt.integrations.attach_lora(model)
    other.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"lacks model\.layers\.0.*lora_A.*quantization_config"):
        type(model).from_pretrained(tmp_path)


def test_adapters_on_the_disk_are_refused(opt, fresh, tmp_path) -> None:
    model = opt.integrations.attach_lora(fresh())
    model.save_pretrained(tmp_path)
    names = ["model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.norm", "lm_head"]
    places = dict.fromkeys(names, "cpu") | {"model.layers.1": "disk"}
    with pytest.raises(ValueError, match=r"device_map keeps model\.layers\.1.* on the disk"):
        type(model).from_pretrained(tmp_path, device_map=places, offload_folder=tmp_path / "disk")


def test_lora_beside_another_quantizer_is_not_lost(opt, fresh, tmp_path) -> None:
    """Its files have no place for our factors; without them it saves as before."""
    model = fresh()
    other = mock.Mock(**{"get_state_dict_and_metadata.return_value": (None, {})})
    model.hf_quantizer = other
    model.config.quantization_config = {"quant_method": "bitsandbytes"}
    opt.integrations.attach_lora(model, 3, 7)
    with pytest.raises(ValueError, match=r"beside its experts.*save_peft_adapter"):
        model.save_pretrained(tmp_path)
    opt.integrations.detach_lora(model)
    model.save_pretrained(tmp_path)
    assert other.get_state_dict_and_metadata.called


def test_what_has_no_4_bits_is_left_alone(opt, device, fresh) -> None:
    model = fresh()
    keys, names = model.state_dict().keys(), trained(model)
    wide = fresh().double()
    last = experts_of(model)[-1]
    last.down_proj = nn.Parameter(last.down_proj.detach().to("meta"))
    quantize, attach = opt.integrations.quantize_experts, opt.integrations.attach_lora
    for words, one, call in (
        (r"one of \('nf4', 'fp4'.*, got 'int4'", model, lambda: quantize(model, "int4")),
        ("blocksize must be one of", model, lambda: quantize(model, blocksize=48)),
        ("down_proj is on the meta device; quantise whole", model, lambda: quantize(model)),
        ("down_proj is on the meta device", model, lambda: attach(model, quantize="nf4")),
        ("gate_up_proj is torch.float64; 4 bits are", wide, lambda: attach(wide, quantize="nf4")),
    ):
        with pytest.raises(ValueError, match=words):
            call()
        assert (one.state_dict().keys(), trained(one)) == (keys, names)
        assert one.config._experts_implementation == "eager"


@pytest.mark.parametrize("parts", [{}, {"target_modules": ["q_proj"]}], ids=["experts", "all"])
def test_merged_adapters_are_not_rounded_into_4_bits(opt, fresh, parts) -> None:
    model = attached(opt, fresh(), **parts)
    expected = logits(model)
    opt.integrations.merge_lora(model)
    with pytest.raises(ValueError, match="is merged into the experts; unmerge_lora"):
        opt.integrations.quantize_experts(model)
    opt.integrations.unmerge_lora(model)
    assert_same_bits(logits(model), expected)
    opt.integrations.merge_lora(model)
    opt.integrations.quantize_experts(opt.integrations.detach_lora(model))


def test_experts_in_host_memory(opt, device, fresh, tmp_path) -> None:
    """Gradient checkpointing over offloaded experts: the same bits, and they can be saved."""
    model = attached(opt, fresh(num_hidden_layers=3), quantize="nf4")
    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})

    _, expected = step(model)
    offload = opt.moe.ExpertOffload(model)
    for _ in range(2):
        assert_same_tensors(step(model)[1], expected)
    assert len(expected) >= 3 * 4
    assert offload.waits < offload.transfers
    model.save_pretrained(tmp_path)
    loaded = opt.integrations.load_quantized(tmp_path, **OPTIONS | {"device_map": str(device)})
    assert_same_bits(logits(loaded), logits(model))
