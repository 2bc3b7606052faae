"""LoRA that PEFT put on experts, in 16 bits or few: PEFT's results, in every state it can be in."""

import copy
import os
import signal
import warnings
from unittest import mock

import peft
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from .._compare import assert_error_at_most, assert_same_bits, assert_same_tensors, relative_error
from ..conftest import ROOT
from ._models import (
    DISTINCT,
    FP32,
    assert_close_tensors,
    attached,
    experts_of,
    logits,
    parametrize_4_bits,
    rounded,
    set_random_lora,
    set_stacks,
    step,
    tokens,
)
from ._trainers import SAVE_EVERY, STEPS, losses, trainer_of
from .test_transformers import ROUTER_LOSS, gradients_of, routing

SQUARE = {"qwen3_moe_square": {}, "gpt_oss": {"intermediate_size": 12}}  # 2I == H
BOTH = ("experts.gate_up_proj", "experts.down_proj")


def wrap(model: nn.Module, *, parameters=BOTH, modules=(), seed: int = 2, **options) -> nn.Module:
    """A PEFT model with random factors: a fresh adapter would change nothing."""
    config = peft.LoraConfig(
        **{"r": 3, "lora_alpha": 7} | options,
        target_modules=list(modules),
        target_parameters=list(parameters),
    )
    model = peft.get_peft_model(model, config)
    set_random_lora(model, seed=seed)
    return model


def add(model: nn.Module, name: str, **options) -> None:
    config = peft.LoraConfig(
        **{"r": 2, "lora_alpha": 3} | options, target_modules=[], target_parameters=list(BOTH)
    )
    model.add_adapter(name, config)
    set_random_lora(model, seed=5)


def full_paths(model: nn.Module) -> list[str]:
    """Of the stacks, without which PEFT finds none that are parametrized."""
    names = [name for name, _ in model.named_modules() if name.endswith(".experts")]
    return [f"{name}.{target}" for name in names for target in ("down_proj", "gate_up_proj")]


def wrappers_of(model: nn.Module) -> dict[tuple[str, str], nn.Module]:
    return {
        (name.split("layers.")[1].split(".")[0], module.parameter_name): module
        for name, module in model.named_modules()
        if type(module).__name__ == "ParamWrapper" and ".experts" in name
    }


WITH_ROUTER = {"modules": ["o_proj"], "parameters": [*BOTH, "gate.weight"]}
ONE = [{"parameters": [target], "use_rslora": True} for target in BOTH]


@pytest.mark.sees_defect("B is read expert by expert, while PEFT's expert varies fastest")
@pytest.mark.sees_defect("an adapter of one projection is read as the other's, or not at all")
@pytest.mark.parametrize(
    ("name", "targets"),
    [(name, WITH_ROUTER) for name in DISTINCT]
    + [(name, targets) for name in ("qwen3_moe_square", "gpt_oss") for targets in ONE],
    ids=str,
)
def test_logits_and_gradients_are_pefts(opt, fresh, name: str, targets) -> None:
    model = wrap(fresh(name), **targets)
    options = ROUTER_LOSS.get(name, {})
    expected, gradients = step(model, **options)
    wrapped = 2 if targets is WITH_ROUTER else 1
    assert sum(".experts." in key for key in gradients) == 2 * wrapped * len(experts_of(model))

    opt.integrations.use_in_transformers(model)
    found, ours = step(model, **options)
    assert_error_at_most(found, expected, FP32)
    assert_close_tensors(ours, gradients)


@pytest.mark.sees_defect("PEFT forms W + delta for every expert on every forward")
def test_weights_are_never_replaced(opt, fresh, monkeypatch) -> None:
    model = wrap(fresh())
    opt.integrations.use_in_transformers(model)
    refuse = mock.Mock(side_effect=AssertionError("PEFT formed W + delta"))
    monkeypatch.setattr(torch.nn.utils.parametrize, "register_parametrization", refuse)
    before = [entry.gate_up_proj.clone() for entry in experts_of(model)]
    step(model)
    for entry, weight in zip(experts_of(model), before, strict=True):
        assert not hasattr(entry, "parametrizations") and entry.gate_up_proj.grad is None
        assert_same_bits(entry.gate_up_proj, weight)


@pytest.mark.sees_defect("B is copied on every forward; gradients come back in another layout")
def test_factors_are_views_of_the_parameters(opt, fresh, submodule) -> None:
    model = wrap(fresh("gpt_oss"))
    lora = submodule("integrations.adapters.peft").active_lora(wrappers_of(model)["0", "down_proj"])
    for factors, target in ((lora.gate_up, "gate_up_proj"), (lora.down, "down_proj")):
        wrapper = wrappers_of(model)["0", target]
        for factor, parameter in (
            (factors.a, wrapper.lora_A["default"].weight),
            (factors.b, wrapper.lora_B["default"].weight),
        ):
            assert factor.data_ptr() == parameter.data_ptr()
            assert factor.numel() == parameter.numel()
        assert factors.scaling == 7 / 3


@pytest.mark.sees_defect("one patch of a class changes every model in the process")
def test_other_models_keep_pefts_forward(opt, fresh) -> None:
    """Nothing is patched but the model that was given."""
    model, other = (wrap(fresh()) for _ in range(2))
    expected = logits(other)
    opt.integrations.use_in_transformers(model)
    assert_same_bits(logits(other), expected)
    wrapper = wrappers_of(other)["0", "down_proj"]
    assert "forward" not in vars(wrapper)
    assert type(wrapper).forward.__module__.startswith("peft.")


@pytest.mark.parametrize("lora", ["peft", "attached"])
def test_compiles_without_a_graph_break(opt, device, fresh, lora: str) -> None:
    model = fresh()
    if lora == "peft":
        model = wrap(model)
        opt.integrations.use_in_transformers(model)
        module = wrappers_of(model)["0", "down_proj"]
    else:
        attached(opt, model)
        module = experts_of(model)[0]
    inputs = routing(experts_of(model)[0], device)
    expected = gradients_of(module, module, *inputs)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    found = gradients_of(module, compiled, *inputs)
    for key, value in expected.items():
        if value is not None:
            assert relative_error(found[key], value) <= FP32, key
    torch.compiler.reset()


@pytest.mark.sees_defect("disabled adapters act on: reference passes of DPO and GRPO see LoRA")
@pytest.mark.sees_defect("merged adapters count twice")
def test_adapters_that_are_disabled_or_merged(opt, fresh) -> None:
    """The base bit for bit without them; once merged they count once."""
    base = fresh()
    opt.integrations.use_in_transformers(base)
    expected = logits(base)
    model = wrap(base)
    opt.integrations.use_in_transformers(model)
    adapted = logits(model)
    assert relative_error(adapted, expected) > 0.1
    with model.disable_adapter():
        assert_same_bits(logits(model), expected)
    assert_same_bits(logits(model), adapted)
    model.merge_adapter()
    assert_error_at_most(logits(model), adapted, FP32)
    with model.disable_adapter():  # PEFT takes the delta out of the weights for it
        assert_error_at_most(logits(model), expected, FP32)
    assert_error_at_most(logits(model), adapted, FP32)
    other = wrap(fresh())
    opt.integrations.use_in_transformers(other)
    assert_same_bits(logits(other.unload()), expected)


@pytest.mark.sees_defect("the first of several active adapters is taken in silence")
def test_active_adapter_is_the_one_that_is_set(opt, fresh) -> None:
    model = wrap(fresh())
    add(model, "other")
    expected = {}
    for name in ("default", "other"):
        model.set_adapter(name)
        expected[name] = logits(model)
    assert relative_error(expected["default"], expected["other"]) > 0.1
    opt.integrations.use_in_transformers(model)
    for name in ("default", "other", "default"):
        model.set_adapter(name)
        assert_error_at_most(logits(model), expected[name], FP32)
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(ValueError, match=r"\['default', 'other'\] are active.*set_adapter"):
        logits(model)
    model.base_model.set_adapter("other")
    model.delete_adapter("default")
    assert_error_at_most(logits(model), expected["other"], FP32)


@pytest.mark.sees_defect(
    "the order of the wrappers is taken for granted; PEFT turns it round over 4-bit experts"
)
@pytest.mark.sees_defect(
    "PEFT 0.21.2 leaves its parametrization on 4-bit experts: every forward adds a delta"
)
def test_two_forwards_are_bit_equal_over_4_bit_experts(opt, fresh) -> None:
    """PEFT 0.21.2 leaves its parametrization on quantized experts: each forward adds a delta."""
    sizes = {"moe_intermediate_size": 64, "hidden_size": 64}
    base, model, dense = (fresh(**sizes) for _ in range(3))
    for one in (base, model):
        parametrize_4_bits(one)
    opt.integrations.use_in_transformers(base)
    expected = logits(base)
    model = wrap(model, parameters=full_paths(model))
    opt.integrations.use_in_transformers(model)
    first = logits(model)
    assert relative_error(first, expected) > 0.1
    assert_same_bits(logits(model), first)
    with model.disable_adapter():
        assert_same_bits(logits(model), expected)
    for experts in experts_of(model):
        assert [len(entries) for entries in experts.parametrizations.values()] == [1, 1]

    set_stacks(dense, model)
    reference = wrap(dense)  # the same model with decoded weights and PEFT's own arithmetic
    with torch.no_grad():
        for place, wrapper in wrappers_of(model).items():
            for factor in ("lora_A", "lora_B"):
                theirs = getattr(wrappers_of(reference)[place], factor)["default"].weight
                theirs.copy_(getattr(wrapper, factor)["default"].weight)
    assert_error_at_most(first, logits(reference), FP32)


def test_other_implementations_run_pefts_own_forward(opt, fresh) -> None:
    model = wrap(fresh())
    expected = logits(model)
    opt.integrations.use_in_transformers(model)
    model.get_base_model().set_experts_implementation("eager")
    assert_same_bits(logits(model), expected)


def test_a_copy_has_its_own_adapters(opt, fresh) -> None:
    model = wrap(fresh())
    opt.integrations.use_in_transformers(model)
    expected = logits(model)
    twin = copy.deepcopy(model)
    set_random_lora(twin, seed=9)
    assert relative_error(logits(twin), expected) > 0.1
    assert_same_bits(logits(model), expected)


def test_forward_replaced_by_accelerate_is_kept(opt, fresh) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Counting(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            self.calls += 1
            return args, kwargs

    model = wrap(fresh())
    expected = logits(model)
    hook = Counting()
    outer = wrappers_of(model)["0", "down_proj"]
    add_hook_to_module(outer, hook)
    opt.integrations.use_in_transformers(model)
    assert_error_at_most(logits(model), expected, FP32)
    assert hook.calls == 1

    other = wrappers_of(model)["1", "down_proj"]
    other.forward = lambda *args: None
    with pytest.raises(ValueError, match=r"wrapper of down_proj was replaced by"):
        opt.integrations.use_in_transformers(model)


UNSAID = {
    "DoRA": ("use_dora", True),
    "lora_bias": ("lora_bias", True),
    "lora_dropout": ("lora_dropout", nn.Dropout(0.1)),
    "variant": ("lora_variant", object()),
}


@pytest.mark.parametrize("option", UNSAID)
def test_what_the_factors_cannot_say_is_refused(opt, fresh, option: str) -> None:
    model = wrap(fresh())
    opt.integrations.use_in_transformers(model)
    attribute, value = UNSAID[option]
    getattr(wrappers_of(model)["1", "gate_up_proj"], attribute)["default"] = value
    with pytest.raises(ValueError, match=f"'default' on gate_up_proj has .*{option}"):
        logits(model)


def test_batches_of_mixed_adapters_are_refused(opt, device, fresh) -> None:
    model = wrap(fresh())
    opt.integrations.use_in_transformers(model)
    hidden, index, weights = routing(experts_of(model)[0], device)
    outer = wrappers_of(model)["0", "down_proj"]
    with pytest.raises(ValueError, match="cannot mix adapters"):
        outer(hidden, index, weights, adapter_names=["default"] * len(hidden))


def deltas(a: torch.Tensor, b: torch.Tensor, count: int, order: str) -> torch.Tensor:
    """PEFT's definition of all experts' deltas."""
    a, b = a.unflatten(0, (count, -1)), b.unflatten(1, (-1, count))
    return torch.einsum(f"ore,eri->{order}", b, a)


@pytest.mark.sees_defect(
    "A and B change roles by a rule for one version of PEFT, and nobody sees it where 2I == H"
)
@pytest.mark.parametrize("version", ["0.18", "0.19.0", "now"])
@pytest.mark.parametrize("name", ["qwen3_moe_square", "gpt_oss"])
def test_roles_of_a_and_b_follow_the_wrapper_and_not_the_shape(
    opt, device, fresh, name: str, version: str
) -> None:
    """gate_up_proj is square in both: the wrong roles would fit, and give other results."""
    model = wrap(fresh(name, **SQUARE[name]), parameters=BOTH[:1])
    experts = experts_of(model)[0]
    wrapper = wrappers_of(model)["0", "gate_up_proj"]
    assert experts.gate_up_proj.shape[1] == experts.gate_up_proj.shape[2]
    if version == "0.18":  # it had no such attribute
        vars(wrapper).pop("_did_swap_in_out_features", None)
        swapped = False
    elif version == "0.19.0":
        swapped = wrapper._did_swap_in_out_features = experts.is_transposed
    else:
        swapped = getattr(wrapper, "_did_swap_in_out_features", False)
    a, b = wrapper.lora_A["default"].weight, wrapper.lora_B["default"].weight
    plain = copy.deepcopy(experts)
    with torch.no_grad():  # the parameter's own dimensions 1 and 2
        order = "eoi" if swapped else "eio"
        plain.gate_up_proj += 7 / 3 * deltas(a, b, experts.num_experts, order)
    inputs = routing(experts, device)
    expected = gradients_of(plain, plain, *inputs)
    opt.integrations.use_in_transformers(model)
    ours = gradients_of(experts, wrapper, *inputs)
    for key in ("output", "hidden", "weights"):
        assert relative_error(ours[key], expected[key]) <= FP32, key


def test_adapter_that_transformers_itself_adds(opt, fresh) -> None:
    model = fresh()
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=[], target_parameters=list(BOTH))
    model.add_adapter(config)
    set_random_lora(model)
    expected = logits(model)
    opt.integrations.use_in_transformers(model)
    assert_error_at_most(logits(model), expected, FP32)
    model.disable_adapters()
    assert relative_error(logits(model), expected) > 0.1


SUFFIXES = ["experts.down_proj", "experts.gate_up_proj"]


@pytest.mark.parametrize("targets", ["suffix", "full path"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v3"])
def test_lora_over_4_bits_is_pefts_over_the_rounded_experts(opt, fresh, name, targets) -> None:
    model = fresh(name)
    twin = rounded(opt, model, "nf4")
    opt.integrations.quantize_experts(model)
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
    ids = tokens().to(parameters[0].device)
    for _ in range(steps):
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()


def test_a_second_adapter_goes_onto_the_same_wrappers(opt, fresh) -> None:
    model = fresh()
    opt.integrations.quantize_experts(model)
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


@pytest.mark.parametrize("kind", ["ours", "ours, after PEFT", "bitsandbytes"])
def test_nothing_is_merged_into_4_bits(opt, fresh, kind: str) -> None:
    """PEFT added to a decoded copy of bitsandbytes' stacks, and the adapter was gone."""
    model = fresh(moe_intermediate_size=64, hidden_size=64)
    parameters = full_paths(model)
    if kind == "ours":
        opt.integrations.quantize_experts(model)
    elif kind == "bitsandbytes":
        parametrize_4_bits(model)
    model = wrap(model, parameters=parameters, modules=["o_proj"])
    if kind == "ours, after PEFT":
        opt.integrations.quantize_experts(model)
    else:
        opt.integrations.use_in_transformers(model)
    expected = logits(model)
    for merge in (model.merge_adapter, lambda: copy.deepcopy(model).merge_and_unload()):
        with pytest.raises(ValueError, match="is in 4 bits: an adapter cannot be merged"):
            merge()
        model.unmerge_adapter()
        assert_error_at_most(logits(model), expected, FP32)


@pytest.mark.parametrize("quantize", [None, "nf4"])
def test_a_wrapped_model_is_pickled_whole(opt, fresh, tmp_path, quantize) -> None:
    model = attached(opt, fresh(), target_modules=["q_proj"], quantize=quantize)
    torch.save(model, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    if not quantize:  # as where PEFT wraps a model that is on our experts already
        with pytest.raises(RuntimeError, match=r"use_in_transformers\(model\) again, after PEFT"):
            logits(loaded)
    opt.integrations.use_in_transformers(loaded)
    assert_same_bits(logits(loaded), logits(model))
    set_random_lora(loaded, seed=3)
    assert relative_error(logits(loaded), logits(model)) > 0.1
    if quantize:
        with pytest.raises(ValueError, match="is in 4 bits"):
            loaded.merge_adapter()


def test_only_peft_is_told_of_the_stacks(opt, fresh) -> None:
    """fully_shard and DDP ask in the same words, and would take the bytes twice."""
    model = fresh()
    opt.integrations.quantize_experts(model)
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
def test_experts_that_peft_missed_are_refused(opt, fresh, parameters, named) -> None:
    """bitsandbytes' stacks are found by their full path alone, and a wrong name by none."""
    model = fresh(moe_intermediate_size=64, hidden_size=64)
    parametrize_4_bits(model)
    model = wrap(model, parameters=parameters, modules=["q_proj"])
    assert not wrappers_of(model)
    with pytest.raises(ValueError, match=f"adapter 'default' has '{named}', and no LoRA is on"):
        opt.integrations.use_in_transformers(model)
    assert model.config._experts_implementation == "eager"


def test_layers_that_peft_did_not_reach_are_refused(opt, fresh) -> None:
    model = wrap(fresh(), modules=["q_proj"])
    layer = model.get_base_model().model.layers[1].mlp
    layer.experts = layer.experts.base_layer.base_layer
    with pytest.raises(ValueError, match=r"no LoRA is on .*layers\.1\.mlp\.experts\.down_proj"):
        opt.integrations.use_in_transformers(model)


def test_a_model_inside_a_prompt_of_peft_is_refused(opt, fresh, tmp_path) -> None:
    """It has no layers of PEFT, but another name for everything."""
    inner = fresh()
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
def test_peft_refuses_experts_with_lora_of_ours(opt, fresh, how: str) -> None:
    """It froze them, and its file left them out."""
    model = fresh()
    opt.integrations.attach_lora(model, 3, 7)
    before = {name: p.requires_grad for name, p in model.named_parameters()}
    config = peft.LoraConfig(target_modules=["q_proj"])
    with pytest.raises(ValueError, match="PEFT would freeze and leave out of its file"):
        peft.get_peft_model(model, config) if how == "get_peft_model" else model.add_adapter(config)
    assert {name: p.requires_grad for name, p in model.named_parameters()} == before
    opt.integrations.detach_lora(model)
    peft.get_peft_model(model, config)


KILLED_AFTER = 8


def test_a_killed_run_goes_on_as_if_it_had_not_been(opt, device, forks, tmp_path) -> None:
    pytest.importorskip("trl")
    whole = trainer_of(opt, tmp_path / "whole", device)
    whole.train()
    expected = losses(whole)
    assert sorted(expected) == list(range(1, STEPS + 1))
    assert expected[STEPS] < expected[1] - 0.3

    killed = forks.run(
        *("-m", "tests.integrations._trainers", tmp_path / "killed", KILLED_AFTER),
        folder=ROOT,
        environment=os.environ | {"TRAINER_DEVICE": device.type, "OMP_NUM_THREADS": "1"},
    )
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    last = tmp_path / "killed" / f"checkpoint-{KILLED_AFTER // SAVE_EVERY * SAVE_EVERY}"
    kept = load_file(last / "adapter_model.safetensors")
    assert any("experts" in key for key in kept) and any("q_proj" in key for key in kept)

    resumed = trainer_of(opt, tmp_path / "killed", device)
    resumed.train(resume_from_checkpoint=str(last))
    assert losses(resumed) == expected
    theirs = load_file(tmp_path / "whole" / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
    ours = load_file(tmp_path / "killed" / f"checkpoint-{STEPS}" / "adapter_model.safetensors")
    assert_same_tensors(ours, theirs)
