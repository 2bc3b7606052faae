"""PEFT over 4-bit experts: what it wraps, its one file, trainers that are killed and resumed."""

from __future__ import annotations

import copy
import os
import signal
import warnings

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from .._compare import assert_error_at_most, assert_same_bits, assert_same_tensors, relative_error
from ..conftest import ROOT
from ._models import (
    FP32,
    assert_close_tensors,
    build,
    experts_of,
    logits,
    parametrize_4_bits,
    rounded,
    step,
    tokens,
)
from ._trainers import SAVE_EVERY, STEPS, losses, trainer_of
from .test_peft import add, full_paths, wrap, wrappers_of

SUFFIXES = ["experts.down_proj", "experts.gate_up_proj"]


def quantized(opt, device, name: str = "qwen3_moe") -> tuple[nn.Module, nn.Module]:
    """A model with 4-bit experts, and a dense one that holds what they decode to."""
    model = build(name).to(device)
    twin = rounded(opt, model, "nf4")
    opt.integrations.quantize_experts(model)
    return model, twin


@pytest.mark.parametrize("targets", ["suffix", "full path"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_lora_over_4_bits_is_pefts_over_the_rounded_experts(opt, device, name, targets) -> None:
    model, twin = quantized(opt, device, name)
    parameters = SUFFIXES if targets == "suffix" else full_paths(model)
    base = logits(model)
    options = {"parameters": parameters, "modules": ["o_proj"]}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="target_parameters.*no parameter was matched")
        model = wrap(model, **options)
    reference = wrap(twin, **options)
    assert len(wrappers_of(model)) == 2 * len(experts_of(reference))
    opt.integrations.use_in_transformers(model)
    expected, wanted = step(reference)
    found, gradients = step(model)
    assert_error_at_most(found, expected, FP32)
    assert relative_error(found, base) > 0.1
    assert any("experts" in key for key in gradients)
    assert_close_tensors(gradients, wanted)
    with model.disable_adapter():
        assert_same_bits(logits(model), base)
    assert_same_bits(logits(copy.deepcopy(model)), found)


def train(model: nn.Module, steps: int = 3) -> None:
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    ids = tokens(model).to(parameters[0].device)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def test_an_adapter_of_experts_alone_is_loaded_by_both(opt, device, tmp_path) -> None:
    model, twin = quantized(opt, device)
    ours = copy.deepcopy(model)
    model = wrap(model)
    opt.integrations.use_in_transformers(model)
    train(model)
    model.save_pretrained(tmp_path)
    expected = logits(model)
    opt.integrations.load_peft_adapter(ours, tmp_path)
    assert_same_bits(logits(ours), expected)
    loaded = peft.PeftModel.from_pretrained(twin, tmp_path)
    assert_error_at_most(logits(loaded), expected, FP32)


def test_a_second_adapter_goes_onto_the_same_wrappers(opt, device) -> None:
    model, _ = quantized(opt, device)
    model = wrap(model)
    add(model, "other")
    assert len(wrappers_of(model)) == 4
    assert all(len(wrapper.lora_A) == 2 for wrapper in wrappers_of(model).values())
    opt.integrations.use_in_transformers(model)
    first = logits(model)
    model.set_adapter("other")
    assert relative_error(logits(model), first) > 0.1
    model.set_adapter("default")
    assert_same_bits(logits(model), first)


@pytest.mark.parametrize("kind", ["ours", "bitsandbytes"])
def test_nothing_is_merged_into_4_bits(opt, device, kind: str) -> None:
    """PEFT added to a decoded copy of bitsandbytes' stacks, and the adapter was gone."""
    model = build("qwen3_moe", moe_intermediate_size=64, hidden_size=64).to(device)
    parameters = full_paths(model)
    if kind == "ours":
        opt.integrations.quantize_experts(model)
    else:
        parametrize_4_bits(model)
    model = wrap(model, parameters=parameters, modules=["o_proj"])
    opt.integrations.use_in_transformers(model)
    expected = logits(model)
    for merge in (model.merge_adapter, lambda: copy.deepcopy(model).merge_and_unload()):
        with pytest.raises(ValueError, match="is in 4 bits: an adapter cannot be merged"):
            merge()
        model.unmerge_adapter()
        assert_error_at_most(logits(model), expected, FP32)


def test_only_peft_is_told_of_the_stacks(opt, device) -> None:
    """fully_shard and DDP ask in the same words, and would take the bytes twice."""
    model, _ = quantized(opt, device)
    for experts in experts_of(model):
        assert dict(experts.named_parameters(recurse=False)) == {}
        names = {name for name, _ in experts.named_parameters()}
        assert "gate_up_proj.packed" in names and "gate_up_proj" not in names
    twin = copy.deepcopy(model)
    for experts, other in zip(experts_of(twin), experts_of(model), strict=True):
        theirs = {id(parameter) for parameter in other.parameters()}
        assert not theirs & {id(parameter) for parameter in experts.parameters()}


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        (SUFFIXES, "experts.down_proj"),
        (["down_proj"], "down_proj"),
        (["experts.gate_proj"], "experts.gate_proj"),
    ],
    ids=str,
)
def test_experts_that_peft_missed_are_refused(opt, device, parameters, named) -> None:
    """bitsandbytes' stacks are found by their full path alone, and a wrong name by none."""
    model = build("qwen3_moe", moe_intermediate_size=64, hidden_size=64).to(device)
    parametrize_4_bits(model)
    model = wrap(model, parameters=parameters, modules=["q_proj"])
    assert not wrappers_of(model)
    with pytest.raises(ValueError, match=f"adapter 'default' has '{named}', and no LoRA is on"):
        opt.integrations.use_in_transformers(model)
    assert model.config._experts_implementation == "eager"


def test_layers_that_peft_did_not_reach_are_refused(opt, device) -> None:
    model = wrap(build("qwen3_moe").to(device), modules=["q_proj"])
    layer = model.get_base_model().model.layers[1].mlp
    layer.experts = layer.experts.base_layer.base_layer
    with pytest.raises(ValueError, match=r"no LoRA is on .*layers\.1\.mlp\.experts\.down_proj"):
        opt.integrations.use_in_transformers(model)


def test_a_model_inside_a_prompt_of_peft_is_refused(opt, device, tmp_path) -> None:
    """It has no layers of PEFT, but another name for everything."""
    inner = build("qwen3_moe").to(device)
    opt.integrations.attach_lora(inner, 3, 7)
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    model = peft.get_peft_model(inner, config)
    for call in (
        lambda: opt.integrations.save_peft_adapter(model, tmp_path / "adapter"),
        lambda: opt.integrations.attach_lora(model, 3, 7, adapter_name="other"),
    ):
        with pytest.raises(ValueError, match=r"PEFT has put .*(PROMPT|PeftModelForCausalLM)"):
            call()
    assert not (tmp_path / "adapter").exists()


@pytest.mark.parametrize("how", ["get_peft_model", "add_adapter"])
def test_peft_refuses_experts_with_lora_of_ours(opt, device, how: str) -> None:
    """It froze them, and its file left them out."""
    model = build("qwen3_moe").to(device)
    opt.integrations.attach_lora(model, 3, 7)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    config = peft.LoraConfig(target_modules=["q_proj"])
    with pytest.raises(ValueError, match="PEFT would freeze and leave out of its file"):
        peft.get_peft_model(model, config) if how == "get_peft_model" else model.add_adapter(config)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    opt.integrations.detach_lora(model)
    peft.get_peft_model(model, config)


KILLED_AFTER = 13


@pytest.mark.parametrize("kind", ["Trainer", "SFTTrainer"])
def test_a_killed_run_goes_on_as_if_it_had_not_been(opt, device, forks, kind, tmp_path) -> None:
    whole = trainer_of(opt, kind, tmp_path / "whole", device)
    whole.train()
    expected = losses(whole)
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert expected[STEPS] < expected[1] - 0.3

    killed = forks.run(
        *("-m", "tests.integrations._trainers", kind, tmp_path / "killed", KILLED_AFTER),
        folder=ROOT,
        environment=os.environ | {"TRAINER_DEVICE": device.type, "OMP_NUM_THREADS": "1"},
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    last = tmp_path / "killed" / f"checkpoint-{KILLED_AFTER // SAVE_EVERY * SAVE_EVERY}"
    kept = load_file(last / "adapter_model.safetensors")
    assert any("experts" in key for key in kept) and any("q_proj" in key for key in kept)

    resumed = trainer_of(opt, kind, tmp_path / "killed", device)
    resumed.train(resume_from_checkpoint=str(last))
    assert losses(resumed) == expected
    theirs = load_file(tmp_path / "whole" / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
    ours = load_file(tmp_path / "killed" / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
    assert_same_tensors(ours, theirs)
