"""LoRA over published checkpoints: every route that trains, saves and resumes over NF4."""

from __future__ import annotations

import copy
from unittest import mock

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

from .._compare import assert_error_at_most, assert_same_bits, assert_same_tensors, relative_error
from ._models import (
    FP32,
    STACKS,
    experts_of,
    logits,
    set_random_lora,
    step,
)
from ._published import FP8, tiny, write_bnb, write_fp8, write_mxfp4
from ._trainers import STEPS, losses, samples, settings, trainer_of
from .test_peft import wrap, wrappers_of

WRITERS = {
    "nf4": lambda folder: write_bnb(tiny("qwen3_moe"), folder),
    "mxfp4": lambda folder: write_mxfp4(tiny("gpt_oss"), folder),
    "fp8": lambda folder: write_fp8(tiny("qwen3_moe", hidden_size=256), folder, FP8, (128, 128)),
}


@pytest.fixture(scope="module", params=WRITERS)
def files(request, tmp_path_factory):
    return request.param, WRITERS[request.param](tmp_path_factory.mktemp(request.param) / "files")


@pytest.fixture
def load(opt, device, files):
    def loaded(folder=files[1]):
        return opt.integrations.load_quantized(folder, dtype=torch.float32, device_map=device)

    return loaded


@pytest.fixture
def exact(load, tmp_path):
    """transformers' own model in float64, over what the experts decode to."""
    loaded = load()
    tensors = {}
    for name, value in loaded.state_dict().items():
        stack = loaded.get_submodule(name.rpartition(".")[0])
        if hasattr(stack, "decode"):
            name, value = name.rpartition(".")[0], stack.decode(dtype=torch.float32)
        tensors[name] = value
    model = AutoModelForCausalLM.from_config(loaded.config, experts_implementation="eager")
    model.load_state_dict(tensors)
    return model.to(loaded.device, torch.float64).eval()


def steps_in_other_orders(model, count: int):
    """Steps whose layers add up their products in an order drawn for each call."""
    linear, generator = torch.nn.functional.linear, torch.Generator().manual_seed(0)

    def permuted(x, weight, bias=None):
        order = torch.randperm(x.shape[-1], generator=generator).to(x.device)
        return linear(x[..., order], weight[:, order], bias)

    with mock.patch.object(torch.nn.functional, "linear", permuted):
        return [step(model) for _ in range(count)]


def test_gradients_against_float64(opt, load, exact, files) -> None:
    """Through the model: attention and both projections, in PEFT's layers, which are bypassed; at
    most 5 times the root mean square error of transformers' own model in float32 over decoded
    experts, over 8 orders of its sums.

    A model of two layers is conditioned worst in one direction, so that all of an error grows or
    shrinks with one rounding: over orders of the same sums, float32's own error of a gradient went
    from 2e-6 to 2e-5, and no single one of them bounds another. The error over their root mean
    square follows Student's t of 8 degrees of freedom, which exceeds 5 once in 950. TF32 rounds
    products to 5e-4.
    """
    model = load()
    formats = {getattr(e, target).format.quant_type for e in experts_of(model) for target in STACKS}
    assert formats == {files[0]}
    base = logits(model)
    options = {"parameters": [f"experts.{target}" for target in STACKS], "modules": ["q_proj"]}
    plain = wrap(copy.deepcopy(exact).float(), **options)
    model, exact = wrap(model, **options), wrap(exact, **options)
    assert len(wrappers_of(model)) == 4
    opt.integrations.use_in_transformers(model)
    (found, gradients), (expected, wanted) = map(step, (model, exact))
    usual = steps_in_other_orders(plain, 8)

    def budget(errors) -> float:
        return 5 * (sum(error**2 for error in errors) / len(usual)) ** 0.5

    logits_apart = (relative_error(dense, expected) for dense, _ in usual)
    assert relative_error(found, expected) <= budget(logits_apart)
    assert relative_error(found, base) > 0.01
    assert gradients.keys() == wanted.keys() and any("experts" in key for key in gradients)
    for key, gradient in wanted.items():
        allowed = budget(relative_error(dense[key], gradient) for _, dense in usual)
        assert relative_error(gradients[key], gradient) <= min(allowed, 1e-4), key
    with pytest.raises(ValueError, match="an adapter cannot be merged"):
        model.merge_adapter()


def test_adapters_of_ours_are_pefts(opt, load, exact, tmp_path) -> None:
    model = load()
    opt.integrations.use_in_transformers(model)
    base = logits(model)
    opt.integrations.attach_lora(model, r=3, lora_alpha=7)
    set_random_lora(model)
    with pytest.raises(ValueError, match="an adapter cannot be merged"):
        opt.integrations.merge_lora(model)
    opt.integrations.save_peft_adapter(model, tmp_path / "adapter")
    theirs = peft.PeftModel.from_pretrained(exact, tmp_path / "adapter")
    found = logits(model)
    assert_error_at_most(found, logits(theirs), FP32)
    again = load()
    opt.integrations.load_peft_adapter(again, tmp_path / "adapter")
    assert_same_bits(logits(again), found)
    with opt.integrations.lora_disabled(again):
        assert_same_bits(logits(again), base)


def test_saved_and_loaded(opt, load, tmp_path) -> None:
    """By ours and by transformers, adapters included or left out."""
    model = load()
    base, before = logits(model), model.state_dict()
    opt.integrations.save_quantized(model, tmp_path / "base")
    opt.integrations.attach_lora(model, r=3, lora_alpha=7)
    set_random_lora(model)
    model.save_pretrained(tmp_path / "whole")
    model.load_state_dict(load_file(tmp_path / "whole/model.safetensors"))  # as Trainer resumes
    again = load(tmp_path / "base")
    assert_same_tensors(again.state_dict(), before)
    assert_same_bits(logits(again), base)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "whole", dtype=torch.float32)
    for loaded in (load(tmp_path / "whole"), theirs.to(model.device)):
        assert_same_tensors(loaded.state_dict(), model.state_dict())
        assert_same_bits(logits(loaded), logits(model))


def test_which_path_runs_is_said(opt, load, device) -> None:
    stack = experts_of(load())[0].gate_up_proj
    said = opt.moe.explain_quantized(stack, 22)
    if device.type == "cpu":
        assert (
            said.startswith("chunked: 4.4 rows per expert") and "products are reference's" in said
        )
    else:
        assert said.startswith("fused: 4.4 rows per expert") and "forward by" in said
    with pytest.raises(ValueError, match="strategy must be one of"):
        stack.strategy = "unknown"
        opt.moe.explain_quantized(stack, 22)


class Stop(TrainerCallback):
    """As a run that is cut off after its second checkpoint."""

    def on_step_end(self, args, state, control, **_):
        control.should_training_stop = state.global_step == STEPS // 2


@pytest.mark.parametrize("kind", ["Trainer", "SFTTrainer"])
def test_a_run_resumes_to_the_same_losses(opt, load, device, kind, tmp_path) -> None:
    whole = trainer_of(opt, kind, tmp_path / "whole", device, load())
    whole.train()
    expected = losses(whole)
    assert expected[STEPS] < expected[1]
    cut = trainer_of(opt, kind, tmp_path / "cut", device, load())
    cut.add_callback(Stop())
    cut.train()
    last = tmp_path / "cut" / f"checkpoint-{STEPS // 2}"
    resumed = trainer_of(opt, kind, tmp_path / "cut", device, load())
    resumed.train(resume_from_checkpoint=str(last))
    assert losses(resumed) == expected


def test_a_run_without_peft_resumes(opt, load, device, tmp_path) -> None:
    """LoRA of attach_lora: the checkpoint holds the whole model, packed experts included."""

    def run(name, resume=None, callbacks=()):
        torch.manual_seed(5)
        model = load()
        opt.integrations.attach_lora(model, r=2, lora_alpha=4)
        arguments = TrainingArguments(**settings(tmp_path / name, device))
        rows = [{"input_ids": ids, "labels": ids} for ids in samples()]
        trainer = Trainer(model, arguments, train_dataset=rows, callbacks=list(callbacks))
        trainer.train(resume_from_checkpoint=resume)
        return losses(trainer)

    expected = run("whole")
    run("cut", callbacks=[Stop()])
    checkpoint = tmp_path / "cut" / f"checkpoint-{STEPS // 2}"
    assert run("cut", resume=str(checkpoint)) == expected
    loaded = load(checkpoint)
    packed = "model.layers.0.mlp.experts.down_proj.packed"
    assert_same_bits(loaded.state_dict()[packed], load().state_dict()[packed])
    theirs = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    assert_same_bits(logits(theirs.to(device)), logits(loaded))
