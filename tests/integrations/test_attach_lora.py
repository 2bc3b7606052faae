"""attach_lora on experts, attention and whole modules: one adapter and one file for all of it."""

import copy
import shutil
import sys
import warnings
import weakref
from pathlib import Path
from unittest import mock

import peft
import pytest
import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from safetensors.torch import load_file, save_file
from torch import nn

from .._compare import (
    assert_error_at_most,
    assert_same_bits,
    assert_same_tensors,
    fail_at,
    relative_error,
)
from ._models import (
    FP32,
    STACKS,
    assert_close_tensors,
    assert_read_everywhere,
    attached,
    experts_of,
    logits,
    parametrize_4_bits,
    rounded,
    set_random_lora,
    step,
    trained,
)
from ._moe_table import tiny
from ._trainers import losses, plain_trainer, settings
from .test_peft import train
from .test_peft_adapter import UNTRAINABLE, edit

SHORT = torch.OutOfMemoryError("CUDA out of memory")
ALL = {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head"]}
PARTS_OF_A_MODEL = pytest.mark.parametrize("parts", [{}, ALL], ids=["experts", "all"])
LAYERS = (BaseTunerLayer, AuxiliaryTrainingWrapper)
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
PARTS = ("q_proj.lora_A", "v_proj.lora_B", "experts.lora_A", "experts.base_layer.lora_B", "lm_head")


def everything(model: nn.Module) -> dict[str, object]:
    """What a refusal must leave alone."""
    return {
        "modules": [(name, type(module)) for name, module in model.named_modules()],
        "forwards": [name for name, m in model.named_modules() if "forward" in vars(m)],
        "flags": {name: p.requires_grad for name, p in model.named_parameters()},
        "dtypes": {name: p.dtype for name, p in model.named_parameters()},
        "configs": copy.deepcopy(vars(model).get("peft_config")),
        "active": [m.active_adapters for m in model.modules() if isinstance(m, LAYERS)],
        "implementation": model.config._experts_implementation,
    }


@pytest.mark.parametrize("quantize", [None, "nf4", "fp8"])
def test_one_file_is_read_by_peft_and_by_us(opt, fresh, quantize, tmp_path: Path) -> None:
    base = fresh()
    dense = rounded(opt, base, quantize) if quantize else copy.deepcopy(base)
    other = copy.deepcopy(base)
    model = attached(opt, base, quantize=quantize, **ALL)
    train(model)
    expected = logits(model.eval())
    opt.integrations.save_peft_adapter(model, tmp_path / "ours")
    model.save_pretrained(tmp_path / "peft")
    ours, theirs = (load_file(tmp_path / f / "adapter_model.safetensors") for f in ("ours", "peft"))
    assert_same_tensors(ours, theirs)
    assert all(any(part in key for key in ours) for part in PARTS)

    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(dense), tmp_path / "ours")
    assert_error_at_most(logits(loaded), expected, FP32)  # PEFT alone, over the decoded weights
    if quantize:
        opt.integrations.quantize_experts(other, quantize)
        loaded = peft.PeftModel.from_pretrained(copy.deepcopy(other), tmp_path / "ours")
        opt.integrations.use_in_transformers(loaded)
        assert_error_at_most(logits(loaded), expected, FP32)
        with pytest.raises(ValueError, match="few bits: an adapter cannot be merged"):
            opt.integrations.merge_lora(model)
        assert_same_bits(logits(model), expected)
    for folder in ("ours", "peft"):
        again = copy.deepcopy(other)
        flags = {id(p): p.requires_grad for p in again.parameters()}
        result = opt.integrations.load_peft_adapter(again, tmp_path / folder, adapter_name="b")
        assert isinstance(result, peft.PeftModel) and result.get_base_model() is again
        assert_same_bits(logits(result), expected)
        assert_same_bits(logits(again), expected)
        assert all(p.requires_grad == flags.get(id(p), False) for p in result.parameters())
        opt.integrations.save_peft_adapter(result, tmp_path / "again")
        assert_same_tensors(load_file(tmp_path / "again" / "adapter_model.safetensors"), ours)
        opt.integrations.set_lora(result, "b", trainable=True)
        assert {name.replace(".b.", ".default.") for name in trained(result)} == trained(model)


def test_files_of_old_versions_of_peft_are_converted(opt, fresh, tmp_path) -> None:
    """Of experts A and B had other roles; a file of the experts alone shows which, 2I == H."""
    options = {"target_modules": ["q_proj"], "target_parameters": EXPERTS[:1]}
    model = attached(opt, fresh("qwen3_moe_square"), **options)
    opt.integrations.save_peft_adapter(model, tmp_path / "both")
    edit(tmp_path / "both", peft_version="0.18.1")
    shutil.copytree(tmp_path / "both", tmp_path / "alone")
    edit(tmp_path / "alone", target_modules=[])
    file = tmp_path / "alone" / "adapter_model.safetensors"
    save_file({key: t for key, t in load_file(file).items() if "experts" in key}, file)

    experts, both = (fresh("qwen3_moe_square") for _ in range(2))
    opt.integrations.load_peft_adapter(experts, tmp_path / "alone")
    both = opt.integrations.load_peft_adapter(both, tmp_path / "both")
    with torch.no_grad():
        for one in (both, model):
            for name, parameter in one.named_parameters():
                if "q_proj.lora_B" in name:
                    parameter.zero_()
    assert_error_at_most(logits(both), logits(experts), FP32)
    assert relative_error(logits(both), logits(model)) > 0.1


@pytest.mark.parametrize("rslora", [False, True])
def test_a_lora_config_is_read_whole(opt, fresh, rslora: bool, tmp_path) -> None:
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        use_rslora=rslora,
        target_modules="all-linear",
        target_parameters=["experts.down_proj"],
        modules_to_save=["lm_head", "router"],
        rank_pattern={"down_proj": 2, "q_proj": 5},
        alpha_pattern={"down_proj": 11},
        exclude_modules=["o_proj"],
    )
    before = copy.deepcopy(config)
    model = opt.integrations.attach_lora(fresh("gpt_oss"), peft_config=config)
    assert config == before
    set_random_lora(model)
    reference = peft.get_peft_model(fresh("gpt_oss"), copy.deepcopy(config))
    reference.load_state_dict(model.state_dict())
    (found, gradients), (expected, wanted) = step(model), step(reference)
    assert_error_at_most(found, expected, FP32)
    assert_close_tensors(gradients, wanted)
    names = trained(model)
    assert names == trained(reference)
    assert any("k_proj.lora_A" in name for name in names)
    assert sum("router.modules_to_save" in name for name in names) == 4
    assert not any("o_proj" in name or "experts.base_layer.lora" in name for name in names)
    assert_read_everywhere(opt, model, tmp_path, fresh, "gpt_oss")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_the_dtype_of_the_factors(opt, fresh, dtype) -> None:
    model = fresh(dtype=torch.bfloat16)
    model = opt.integrations.attach_lora(model, 2, 4, dtype=dtype, **ALL)
    kinds = {p.dtype for n, p in model.named_parameters() if ".lora_" in n}
    assert kinds == {dtype}
    assert {p.dtype for n, p in model.named_parameters() if "lm_head" in n} == {torch.bfloat16}


def test_bitsandbytes_experts_are_found_by_their_whole_names(opt, fresh) -> None:
    model = fresh(moe_intermediate_size=64, hidden_size=64)
    parametrize_4_bits(model)
    model = opt.integrations.attach_lora(model, 3, 7, target_modules=["q_proj"])
    assert sum(".experts." in name for name in trained(model)) == 8


@PARTS_OF_A_MODEL
def test_switching_off_is_the_base_bit_for_bit(opt, fresh, parts) -> None:
    base = fresh()
    opt.integrations.use_in_transformers(base)
    expected = logits(base)
    model = attached(opt, base, **parts)
    flags = trained(model)
    adapted = logits(model)
    assert relative_error(adapted, expected) > 0.1
    with opt.integrations.lora_disabled(model):
        assert_same_bits(logits(model), expected)
    assert_same_bits(logits(model), adapted)
    opt.integrations.disable_lora(model)
    assert_same_bits(logits(model), expected)
    with opt.integrations.lora_disabled(model):
        pass
    assert_same_bits(logits(model), expected)  # still off, as before the block
    opt.integrations.enable_lora(model)
    assert_same_bits(logits(model), adapted)
    assert trained(model) == flags


@PARTS_OF_A_MODEL
def test_several_adapters(opt, fresh, parts) -> None:
    base = fresh()
    opt.integrations.use_in_transformers(base)
    expected = logits(base)
    model = attached(opt, base, **parts)
    flags, adapted = trained(model), logits(model)
    whole = bool(parts)
    second = {"target_modules": ["o_proj"]} if whole else {"target_parameters": ["down_proj"]}
    opt.integrations.attach_lora(model, 2, 3, adapter_name="other", **second)
    assert_same_bits(logits(model), adapted)  # the first one stays active, and trains
    assert trained(model) == flags
    assert all(model.get_parameter(name).is_contiguous() for name in flags)
    opt.integrations.set_lora(model, "other")
    assert_same_bits(logits(model), expected)  # B is zero still
    assert trained(model) == flags
    opt.integrations.set_lora(model, "other", trainable=True)
    assert len(trained(model)) == (12 if whole else 4)
    assert all(".other." in name for name in trained(model))
    if whole:
        with pytest.raises(ValueError, match="PEFT keeps one adapter active"):
            opt.integrations.set_lora(model, None)
        with pytest.raises(ValueError, match=r"all adapters .* on the same target_parameters"):
            opt.integrations.attach_lora(
                model, 2, 3, target_parameters=["experts.down_proj"], adapter_name="third"
            )
    else:
        opt.integrations.set_lora(model, None)
        assert_same_bits(logits(model), expected)
    opt.integrations.set_lora(model, "default")
    assert_same_bits(logits(model), adapted)
    for name in ("third", ["default", "other"]):
        with pytest.raises(ValueError, match=r"is not attached; there are .*'other'.* one can be"):
            opt.integrations.set_lora(model, name)
    with pytest.raises(ValueError, match="'default' is attached already"):
        opt.integrations.attach_lora(model, 2, 3)


@PARTS_OF_A_MODEL
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_merge_and_unmerge(opt, fresh, dtype, parts) -> None:
    model = attached(opt, fresh("gpt_oss", dtype=dtype), **parts)
    weights = {n: p.clone() for n, p in model.named_parameters()}
    adapted = logits(model)
    opt.integrations.merge_lora(model, keep_on="cpu")
    if dtype == torch.float32:
        assert_error_at_most(logits(model), adapted, FP32)
    changed = [n for n, p in model.named_parameters() if not torch.equal(p, weights[n])]
    # both projections, and with them q and v, of both layers
    assert len(changed) == 2 * (2 + 2 * bool(parts))
    for action in (
        lambda: opt.integrations.merge_lora(model),
        lambda: opt.integrations.disable_lora(model),
        lambda: opt.integrations.set_lora(model, "default"),
        lambda: opt.integrations.attach_lora(model, 1, 1, adapter_name="other"),
        *([] if parts else [lambda: opt.integrations.set_lora(model, None), model.state_dict]),
    ):
        with pytest.raises(ValueError, match="merged"):
            action()
    opt.integrations.unmerge_lora(model)
    assert_same_tensors(dict(model.named_parameters()), weights)
    assert_same_bits(logits(model), adapted)
    with pytest.raises(ValueError, match="nothing is merged"):
        opt.integrations.unmerge_lora(model)
    last = "1.self_attn.v_proj.lora_B" if parts else "1.mlp.experts.expert_lora.down.lora_B"
    with torch.no_grad():
        next(p for n, p in model.named_parameters() if last in n)[0] = 1e999
    said = "v_proj has NaN or inf; nothing was merged" if parts else "NaN or inf"
    with pytest.raises(ValueError, match=said):
        opt.integrations.merge_lora(model)
    for name in changed:
        assert_same_bits(model.get_parameter(name), weights[name])


@pytest.mark.parametrize("kind", ["ParamWrapper", "Linear", "LoraProjection"])
def test_a_merge_that_runs_out_of_memory_takes_back_what_it_did(
    opt, fresh, submodule, monkeypatch, kind
) -> None:
    """Also of the weight that the failing call has written already."""
    ours = kind == "LoraProjection"
    model = attached(opt, fresh(), **({} if ours else ALL))
    weights, adapted = {n: p.clone() for n, p in model.named_parameters()}, logits(model)
    layer = getattr(submodule("moe.lora") if ours else peft.tuners.lora.layer, kind)
    merge, calls = layer.merge, []

    def short(*arguments, **options) -> None:
        calls.append(merge(*arguments, **options))
        if len(calls) == 2:
            raise SHORT

    with monkeypatch.context() as patch:
        patch.setattr(layer, "merge", short)
        with pytest.raises(torch.OutOfMemoryError):
            opt.integrations.merge_lora(model)
        assert len(calls) == 2
    assert_same_tensors(dict(model.named_parameters()), weights)
    assert_same_bits(logits(model), adapted)
    opt.integrations.merge_lora(model)


@PARTS_OF_A_MODEL
@pytest.mark.parametrize("merged", [False, True])
def test_detached_models_are_clean(opt, fresh, merged: bool, parts) -> None:
    plain = fresh()
    base = copy.deepcopy(plain)
    model = attached(opt, base, **parts)
    adapted = logits(model)
    if merged:
        opt.integrations.merge_lora(model)
    assert opt.integrations.detach_lora(model) is base
    assert base.state_dict().keys() == plain.state_dict().keys()
    assert not hasattr(base, "peft_config")
    base.set_experts_implementation("eager")
    if merged:
        assert_error_at_most(logits(base), adapted, FP32)
    else:
        assert_same_bits(logits(base), logits(plain))
    attached(opt, base, **parts)
    hooks = 0 if parts else 1
    assert all(len(m._forward_pre_hooks) == hooks for m in experts_of(base))


@pytest.mark.parametrize("how", ["PeftModel", "its base", "transformers"])
def test_experts_join_an_adapter_of_peft(opt, fresh, how: str, tmp_path) -> None:
    """Attention goes on training, and one file holds both."""
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=["q_proj"])
    base = fresh()
    if how == "transformers":
        base.add_adapter(config)
        model = base
    else:
        model = peft.get_peft_model(base, config)
        model = model if how == "PeftModel" else base
    set_random_lora(model)
    attention = {n: p.clone() for n, p in model.named_parameters() if "q_proj.lora" in n}
    before = logits(model)
    assert opt.integrations.attach_lora(model, 2, 5) is model
    assert_error_at_most(logits(model), before, FP32)  # B of the experts is zero
    for name, parameter in attention.items():
        assert_same_bits(model.get_parameter(name), parameter)
    assert len(trained(model)) == 2 * (2 + 4)
    set_random_lora(model)
    train(model)
    assert_read_everywhere(opt, model.eval(), tmp_path, fresh)
    if how == "PeftModel":
        model.save_pretrained(tmp_path / "peft")
        loaded = peft.PeftModel.from_pretrained(fresh(), tmp_path / "peft")
        assert_error_at_most(logits(loaded), logits(model), FP32)


@pytest.mark.parametrize("how", ["PeftModel", "its base"])
def test_what_is_active_stays_so(opt, fresh, how: str) -> None:
    """Of a model whose experts join an adapter that is not in use, or that gets a new one."""
    model = peft.get_peft_model(fresh(), peft.LoraConfig(target_modules=["q_proj"]))
    model.add_adapter("other", peft.LoraConfig(target_modules=["q_proj"]))
    model = model if how == "PeftModel" else model.get_base_model()
    set_random_lora(model)
    expected, flags = logits(model), trained(model)
    opt.integrations.attach_lora(model, 2, 4, adapter_name="other")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".experts." in name and ".other." in name:
                parameter.normal_()
    assert trained(model) == flags
    assert_error_at_most(logits(model), expected, FP32)
    opt.integrations.attach_lora(model, 2, 4, target_modules=["o_proj"], adapter_name="third")
    assert trained(model) == flags
    opt.integrations.set_lora(model, "other", trainable=True)
    assert len(trained(model)) == 2 * (2 + 4)
    assert relative_error(logits(model), expected) > 0.1


REFUSED = [
    ({"quantize": "int4"}, "one of .*, got 'int4'"),
    ({"quantize": "mxfp4"}, r"quantize='mxfp4': model\.layers\.0.*must be a multiple"),  # of 24
    ({"quantize": "mxfp4", "target_modules": ["q_proj"]}, "must be a multiple"),
    ({"r": 0}, "r must be an integer"),
    ({"r": True}, "r must be an integer .*, got True"),
    *(({"dtype": dtype}, f"dtype must be one of .*got {dtype}") for dtype in UNTRAINABLE),
    ({"r": 2**63}, "r must be an integer from 1 to 65536"),
    ({"lora_alpha": float("nan")}, "alpha must be"),
    ({"target_parameters": ["q_proj"]}, "has .'q_proj'.*they have .'down_proj'"),
    ({"target_parameters": "down_proj"}, "sequence of names, got 'down_proj'"),
    ({"target_parameters": []}, "to put LoRA on: target_parameters is empty"),
    ({"adapter_name": "a.b"}, "'a.b' must be a string without dots"),
    ({"adapter_name": "keys"}, "adapter_name='keys'"),
    ({"target_modules": ["nowhere"], "target_parameters": ["nowhere"]}, "not found|nowhere"),
    ({"target_modules": ["q_proj", "input_layernorm"]}, r"RMSNorm\(.* is not supported"),
    ({"target_modules": ["q_proj", "q_prj"]}, r"target_modules: \['q_prj'\] are names"),
    (
        {"target_modules": ["q_proj", "down_proj"]},
        r"'down_proj'.* of no modules; .* experts are stacks that have LoRA without being named",
    ),
    ({"alpha": 16}, r"unexpected keyword argument 'alpha'; it is called lora_alpha"),
    ({"r": peft.LoraConfig()}, r"write peft_config=LoraConfig\(\.\.\.\)"),
    ({"rank": 16}, r"unexpected keyword argument 'rank'; it is called r"),
    ({"lora_dropout": 0.05}, r"'lora_dropout'; experts have no dropout"),
    ({"task_type": "CAUSAL_LM"}, r"'task_type'; if LoraConfig has it, pass peft_config=peft.Lora"),
    ({"modules_to_save": ["lm_haed"]}, r"modules_to_save: \['lm_haed'\] are names of no"),
    ({"modules_to_save": ["experts"]}, "modules_to_save: 'experts' has experts in it"),
    ({"modules_to_save": ["lm_head", "mlp"]}, "modules_to_save: 'mlp' has experts in it"),
    ({"target_modules": "((("}, r"target_modules='\(\(\(' is no pattern"),
    ({"target_modules": ["q_proj"], "target_parameters": ["experts.nowhere"]}, "experts.nowhere"),
    ({"target_modules": ["q_proj"], "target_parameters": []}, "target_parameters is empty"),
    ({"modules_to_save": "lm_head"}, r"modules_to_save must be a sequence.*\['lm_head'\]"),
    ({"target_modules": ["q_proj"], "r": 0}, "r must be an integer"),
    ({"target_modules": 5}, "target_modules must be a sequence of names, got 5"),
    ({"target_modules": ["q_proj"], "use_rslora": "no"}, "use_rslora must be True or False"),
    ({"target_modules": ["q_proj"], "adapter_name": "mlp"}, "'mlp' is part of a module's name"),
    ({"peft_config": peft.LoraConfig(lora_dropout=0.1)}, "no support for {'lora_dropout': 0.1}"),
    ({"peft_config": peft.LoraConfig(use_dora=True)}, "'use_dora': True"),
    (
        {"peft_config": peft.LoraConfig(modules_to_save="lm_head")},
        "modules_to_save must be a sequence of names, got 'lm_head'",
    ),
    ({"peft_config": peft.LoraConfig(bias="all")}, "'bias': 'all'"),
    ({"peft_config": peft.LoraConfig(layers_to_transform=[1])}, r"'layers_to_transform': \[1\]"),
    ({"peft_config": peft.LoraConfig(init_lora_weights="pissa")}, "'init_lora_weights': 'pissa'"),
    ({"peft_config": peft.LoraConfig(), "r": 4}, "peft_config says it all; leave out {'r': 4}"),
    ({"peft_config": {"r": 4}}, "must be a peft.LoraConfig"),
]


@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize(("options", "words"), REFUSED, ids=[words for _, words in REFUSED])
def test_a_refusal_leaves_the_model_alone(opt, fresh, options, words, quantize) -> None:
    model = fresh()
    before, expected = everything(model), logits(model)
    with pytest.raises((ValueError, TypeError), match=words):
        opt.integrations.attach_lora(model, **{"quantize": quantize} | options)
    assert everything(model) == before
    assert_same_bits(logits(model), expected)


def test_peft_does_not_warn_of_patterns_that_nobody_wrote(opt, fresh) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*_pattern keys did not match")
        opt.integrations.attach_lora(fresh(), target_modules="all-linear")


def test_the_hub_is_not_asked_for_the_base_model(opt, fresh, tmp_path, monkeypatch) -> None:
    model = attached(opt, fresh(), **ALL)
    opt.integrations.save_peft_adapter(model, tmp_path)
    edit(tmp_path, base_model_name_or_path="somebody/other")
    asked = mock.Mock(return_value=False)
    monkeypatch.setattr("peft.utils.save_and_load.check_file_exists_on_hf_hub", asked)
    opt.integrations.load_peft_adapter(model, tmp_path, adapter_name="other")
    opt.integrations.save_peft_adapter(model, tmp_path / "again")
    asked.assert_not_called()


def test_a_refused_second_adapter_leaves_the_first_alone(opt, fresh, tmp_path) -> None:
    model = attached(opt, fresh(), **ALL)
    base = model.get_base_model()
    opt.integrations.save_peft_adapter(model, tmp_path)
    expected, before, known = logits(model), everything(base), list(model.peft_config)
    state = model.state_dict().keys()
    edit(tmp_path, r=4)
    for call in (
        lambda: opt.integrations.attach_lora(
            model, 2, 4, target_modules=["q_proj", "input_layernorm"], adapter_name="other"
        ),
        lambda: opt.integrations.load_peft_adapter(model, tmp_path, adapter_name="other"),
        lambda: opt.integrations.load_peft_adapter(model, tmp_path, adapter_name="a.b"),
    ):
        with pytest.raises(ValueError):
            call()
        assert everything(base) == before and model.state_dict().keys() == state
        assert list(model.peft_config) == list(base.peft_config) == known
        assert model.active_adapter == "default"
        assert_same_bits(logits(model), expected)
    opt.integrations.attach_lora(model, 2, 4, target_modules=["q_proj"], adapter_name="other")
    opt.integrations.set_lora(model, "other")
    assert model.active_adapter == "other"


@PARTS_OF_A_MODEL
def test_short_of_memory_in_the_middle_of_4_bits(opt, fresh, submodule, monkeypatch, parts) -> None:
    model = fresh()
    formats = submodule("kernels.quant.formats")
    fail_at(monkeypatch, formats, "nf4_quantize", 8, SHORT)  # within the second stack
    with pytest.raises(torch.OutOfMemoryError):
        opt.integrations.attach_lora(model, 2, 4, quantize="nf4", **parts)
    assert not any(".lora_" in name or "modules_to_save" in name for name in model.state_dict())
    assert all(p.requires_grad for n, p in model.named_parameters() if ".experts." not in n)
    logits(model)  # half quantised, it runs
    model = opt.integrations.attach_lora(model, 2, 4, quantize="nf4", **parts)
    assert not any(name.endswith(STACKS) for name in model.state_dict())
    train(model)


def test_lora_on_experts_alone_is_not_mixed_with_pefts(opt, fresh) -> None:
    model = fresh()
    opt.integrations.attach_lora(model, 2, 4)
    with pytest.raises(ValueError, match=r"on the experts alone; detach_lora\(model\) first"):
        opt.integrations.attach_lora(model, 2, 4, target_modules=["q_proj"], adapter_name="other")
    opt.integrations.detach_lora(model)
    opt.integrations.attach_lora(model, 2, 4, target_modules=["q_proj"])


def test_what_needs_peft_says_so(opt, fresh, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "peft", None)
    model = fresh()
    before = everything(model)
    for options in ({"target_modules": ["q_proj"]}, {"modules_to_save": ["lm_head"]}):
        with pytest.raises(ImportError, match="PEFT's work, which is not installed: pip install"):
            opt.integrations.attach_lora(model, 2, 4, **options)
    assert everything(model) == before
    assert opt.integrations.attach_lora(model, 2, 4, target_parameters=["down_proj"]) is model
    assert len(trained(model)) == 4


@PARTS_OF_A_MODEL
@pytest.mark.parametrize("name", ["embed_tokens.weight", "layers.1.mlp.gate.weight"])
def test_a_file_leaves_out_nothing_that_trains(opt, fresh, name, parts, tmp_path) -> None:
    base = fresh()
    model = attached(opt, base, **parts)
    base.model.get_parameter(name).requires_grad_(True)
    with pytest.raises(ValueError, match=rf"{name} trains beside .*modules_to_save"):
        opt.integrations.save_peft_adapter(model, tmp_path / "adapter")
    assert not (tmp_path / "adapter").exists()
    base.model.get_parameter(name).requires_grad_(False)
    opt.integrations.save_peft_adapter(model, tmp_path / "adapter")


@pytest.mark.parametrize("quantize", [None, "nf4"])
@PARTS_OF_A_MODEL
def test_trainer(opt, device, fresh, parts, quantize, tmp_path: Path) -> None:
    def trainer(folder: Path) -> transformers.Trainer:
        torch.manual_seed(7)
        model = opt.integrations.attach_lora(fresh(), 3, 7, quantize=quantize, **parts)
        return plain_trainer(model, settings(folder, device) | {"max_steps": 5, "save_steps": 3})

    whole = trainer(tmp_path)
    whole.train()
    expected = losses(whole)
    assert sorted(expected) == [1, 2, 3, 4, 5] and expected[5] < expected[1]
    again = trainer(tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert losses(again) == expected
    for name, parameter in whole.model.named_parameters():
        if parameter.requires_grad:
            assert_same_bits(again.model.get_parameter(name), parameter)
    opt.integrations.save_peft_adapter(again.model, tmp_path / "adapter")
    loaded = fresh()
    if quantize:
        opt.integrations.quantize_experts(loaded)
    opt.integrations.load_peft_adapter(loaded, tmp_path / "adapter")
    assert_same_bits(logits(loaded), logits(whole.model.eval()))


@PARTS_OF_A_MODEL
def test_wide_stacks_go_while_4_bits_are_made(opt, fresh, submodule, watch, parts) -> None:
    """What undoes a failure must not keep the 16 bits of layers that are done."""
    model = fresh()
    first = weakref.ref(model.model.layers[0].mlp.experts.gate_up_proj)
    module = submodule("kernels.quant.formats")
    alive = watch(module, "nf4_quantize", lambda *_, **__: first() is not None)
    opt.integrations.attach_lora(model, 2, 4, quantize="nf4", **parts)
    assert alive[0] and not alive[-1]


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_next"])
@pytest.mark.parametrize("target_modules", [["down_proj", "q_proj"], "all-linear"], ids=str)
@pytest.mark.parametrize("first", ["quantize", "attach"])
def test_4_bit_stacks_are_no_modules_of_peft(
    opt, fresh, first, target_modules, name, tmp_path
) -> None:
    """Shared experts have a down_proj, a Linear, and experts one, a stack.

    Of models that transformers 4 knew, as Qwen3-Next, PEFT takes the name for the experts alone.
    """
    model, again, other = (fresh(name) for _ in range(3))
    if first == "quantize":
        opt.integrations.quantize_experts(model)
    options = {"target_modules": target_modules, "quantize": "nf4" if first == "attach" else None}
    model = attached(opt, model, **options)
    shared = any("shared_expert.down_proj.lora_A" in key for key in trained(model))
    assert shared == (name == "qwen3_5_moe")
    expected = logits(model)
    opt.integrations.save_peft_adapter(model, tmp_path)
    loaded = peft.PeftModel.from_pretrained(rounded(opt, other, "nf4"), tmp_path)
    assert_error_at_most(logits(loaded), expected, FP32)
    opt.integrations.quantize_experts(again)
    loaded = peft.PeftModel.from_pretrained(copy.deepcopy(again), tmp_path)
    opt.integrations.use_in_transformers(loaded)
    assert_same_bits(logits(loaded), expected)
    opt.integrations.load_peft_adapter(again, tmp_path)
    assert_same_bits(logits(again), expected)


@pytest.mark.parametrize(
    "name", ["UnlimitedOcrForConditionalGeneration", "MistralLarge4ForConditionalGeneration"]
)
def test_keys_that_peft_renames_for_some_classes_are_loaded(opt, name: str, tmp_path) -> None:
    """Of these PEFT renames the keys of today as if they were those of published checkpoints."""
    model = attached(opt, tiny(name), target_modules=["o_proj"])
    opt.integrations.save_peft_adapter(model, tmp_path)
    loaded = opt.integrations.load_peft_adapter(tiny(name), tmp_path)
    assert_same_tensors(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize("how", ["compiled", "in parallel", "layers compiled"])
def test_wrappers_around_a_peft_model_stay_out_of_the_file(opt, fresh, how: str, tmp_path) -> None:
    model = attached(opt, fresh(), **ALL)
    opt.integrations.save_peft_adapter(model, tmp_path / "plain")
    layers = model.get_base_model().model.layers
    if how == "layers compiled":
        layers[0] = torch.compile(layers[0], backend="eager")
        wrapped = model
    elif how == "compiled":
        wrapped = torch.compile(model, backend="eager")
    else:
        wrapped = nn.DataParallel(model)
    opt.integrations.save_peft_adapter(wrapped, tmp_path / "wrapped")
    files = [load_file(tmp_path / f / "adapter_model.safetensors") for f in ("plain", "wrapped")]
    assert_same_tensors(*files)
    expected = logits(model)
    opt.integrations.load_peft_adapter(wrapped, tmp_path / "wrapped", adapter_name="second")
    assert_same_bits(logits(model), expected)
    assert opt.integrations.attach_lora(wrapped, adapter_name="third", **ALL) is wrapped
    opt.integrations.set_lora(wrapped, "third")
    expected = logits(model)
    assert_same_bits(logits(opt.integrations.detach_lora(wrapped)), expected)


def test_a_file_with_patterns_that_are_not_read_has_a_way(opt, fresh, tmp_path) -> None:
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    config.rank_pattern = {"(q_proj|v_proj)": 3}
    model = opt.integrations.attach_lora(fresh(), peft_config=config)
    assert model.peft_config["default"].target_parameters == set(EXPERTS)
    set_random_lora(model)
    opt.integrations.save_peft_adapter(model, tmp_path)
    base = fresh()
    with pytest.raises(ValueError, match=r"PeftModel\.from_pretrained.*use_in_transformers"):
        opt.integrations.load_peft_adapter(base, tmp_path)
    loaded = peft.PeftModel.from_pretrained(base, tmp_path)
    opt.integrations.use_in_transformers(loaded)
    assert_same_bits(logits(loaded), logits(model))
