"""LoRA that PEFT put on experts: PEFT's own results, in every state it can be in.

PEFT on eager experts is the reference: it forms W + delta, which is slow and right there.
"""

from __future__ import annotations

import copy

import peft
import pytest
import torch
from torch import nn

from .._compare import assert_error_at_most, assert_same_bits, relative_error
from ._models import (
    FP32,
    MODELS,
    assert_close_tensors,
    build,
    experts_of,
    logits,
    parametrize_4_bits,
    set_random_lora,
    set_stacks,
    step,
)
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
    """PEFT's wrappers around experts, by layer and parameter."""
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
    [(name, WITH_ROUTER) for name in MODELS]
    + [(name, targets) for name in ("qwen3_moe_square", "gpt_oss") for targets in ONE],
    ids=str,
)
def test_logits_and_gradients_are_pefts(opt, device, name: str, targets) -> None:
    model = wrap(build(name).to(device), **targets)
    options = ROUTER_LOSS.get(name, {})
    expected, gradients = step(model, **options)
    wrapped = 2 if targets is WITH_ROUTER else 1
    assert sum(".experts." in key for key in gradients) == 2 * wrapped * len(experts_of(model))

    opt.integrations.use_in_transformers(model)
    found, ours = step(model, **options)
    assert_error_at_most(found, expected, FP32)
    assert_close_tensors(ours, gradients)


@pytest.mark.sees_defect("PEFT forms W + delta for every expert on every forward")
def test_weights_are_never_replaced(opt, device, monkeypatch) -> None:
    model = wrap(build("qwen3_moe").to(device))
    opt.integrations.use_in_transformers(model)

    def refuse(*_, **__):
        raise AssertionError("PEFT formed W + delta")

    monkeypatch.setattr(torch.nn.utils.parametrize, "register_parametrization", refuse)
    before = [entry.gate_up_proj.clone() for entry in experts_of(model)]
    step(model)
    for entry, weight in zip(experts_of(model), before, strict=True):
        assert not hasattr(entry, "parametrizations") and entry.gate_up_proj.grad is None
        assert_same_bits(entry.gate_up_proj, weight)


@pytest.mark.sees_defect("B is copied on every forward; gradients come back in another layout")
def test_factors_are_views_of_the_parameters(opt, device, submodule) -> None:
    model = wrap(build("gpt_oss").to(device))
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
def test_other_models_keep_pefts_forward(opt, device) -> None:
    """Nothing is patched but the model that was given."""
    model, other = (wrap(build("qwen3_moe").to(device)) for _ in range(2))
    expected = logits(other)
    opt.integrations.use_in_transformers(model)
    assert_same_bits(logits(other), expected)
    wrapper = wrappers_of(other)["0", "down_proj"]
    assert "forward" not in vars(wrapper)
    assert type(wrapper).forward.__module__.startswith("peft.")


@pytest.mark.parametrize("lora", ["peft", "attached"])
def test_compiles_without_a_graph_break(opt, device, lora: str) -> None:
    model = build("qwen3_moe").to(device)
    if lora == "peft":
        model = wrap(model)
        opt.integrations.use_in_transformers(model)
        module = wrappers_of(model)["0", "down_proj"]
    else:
        opt.integrations.attach_lora(model, 3, 7)
        set_random_lora(model)
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
def test_disabled_adapters_leave_the_base_bit_for_bit(opt, device) -> None:
    base = build("qwen3_moe").to(device)
    opt.integrations.use_in_transformers(base)
    expected = logits(base)
    model = wrap(base)
    opt.integrations.use_in_transformers(model)
    adapted = logits(model)
    assert relative_error(adapted, expected) > 0.1
    with model.disable_adapter():
        assert_same_bits(logits(model), expected)
    assert_same_bits(logits(model), adapted)
    assert_same_bits(logits(model.unload()), expected)


@pytest.mark.sees_defect("merged adapters count twice")
def test_merged_adapters_count_once(opt, device) -> None:
    model = wrap(build("qwen3_moe").to(device))
    opt.integrations.use_in_transformers(model)
    with model.disable_adapter():
        base = logits(model)
    expected = logits(model)
    model.merge_adapter()
    assert_error_at_most(logits(model), expected, FP32)
    with model.disable_adapter():  # PEFT takes the delta out of the weights for it
        assert_error_at_most(logits(model), base, FP32)
    assert_error_at_most(logits(model), expected, FP32)


@pytest.mark.sees_defect("the first of several active adapters is taken in silence")
def test_active_adapter_is_the_one_that_is_set(opt, device) -> None:
    model = wrap(build("qwen3_moe").to(device))
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
def test_two_forwards_are_bit_equal_over_4_bit_experts(opt, device) -> None:
    """PEFT 0.21.2 leaves its parametrization on quantized experts: each forward adds a delta."""
    sizes = {"moe_intermediate_size": 64, "hidden_size": 64}
    base, model, dense = (build("qwen3_moe", **sizes).to(device) for _ in range(3))
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


def test_wrapping_after_use_in_transformers_is_not_silent(opt, device) -> None:
    model = build("qwen3_moe").to(device)
    opt.integrations.use_in_transformers(model)
    model = wrap(model)
    with pytest.raises(RuntimeError, match="use_in_transformers\\(model\\) again, after PEFT"):
        logits(model)
    opt.integrations.use_in_transformers(model)
    logits(model)


def test_other_implementations_run_pefts_own_forward(opt, device) -> None:
    model = wrap(build("qwen3_moe").to(device))
    expected = logits(model)
    opt.integrations.use_in_transformers(model)
    model.get_base_model().set_experts_implementation("eager")
    assert_same_bits(logits(model), expected)


def test_a_copy_has_its_own_adapters(opt, device) -> None:
    model = wrap(build("qwen3_moe").to(device))
    opt.integrations.use_in_transformers(model)
    expected = logits(model)
    twin = copy.deepcopy(model)
    set_random_lora(twin, seed=9)
    assert relative_error(logits(twin), expected) > 0.1
    assert_same_bits(logits(model), expected)


def test_forward_replaced_by_accelerate_is_kept(opt, device) -> None:
    from accelerate.hooks import ModelHook, add_hook_to_module

    class Counting(ModelHook):
        calls = 0

        def pre_forward(self, module, *args, **kwargs):
            self.calls += 1
            return args, kwargs

    model = wrap(build("qwen3_moe").to(device))
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


@pytest.mark.parametrize("option", ["DoRA", "lora_bias", "lora_dropout", "variant"])
def test_what_the_factors_cannot_say_is_refused(opt, device, option: str) -> None:
    model = wrap(build("qwen3_moe").to(device))
    opt.integrations.use_in_transformers(model)
    wrapper = wrappers_of(model)["1", "gate_up_proj"]
    if option == "DoRA":
        wrapper.use_dora["default"] = True
    elif option == "lora_bias":
        wrapper.lora_bias["default"] = True
    elif option == "lora_dropout":
        wrapper.lora_dropout["default"] = nn.Dropout(0.1)
    else:
        wrapper.lora_variant["default"] = object()
    with pytest.raises(ValueError, match=f"'default' on gate_up_proj has .*{option}"):
        logits(model)


def test_batches_of_mixed_adapters_are_refused(opt, device) -> None:
    model = wrap(build("qwen3_moe").to(device))
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
    opt, device, name: str, version: str
) -> None:
    """gate_up_proj is square in both: the wrong roles would fit, and give other results."""
    model = wrap(build(name, **SQUARE[name]).to(device), parameters=BOTH[:1])
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


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_float32_lora_over_bfloat16_errs_no_more_than_pefts_sum(opt, device, name: str) -> None:
    model = wrap(build(name, dtype=torch.bfloat16).to(device))
    wrapper, experts = wrappers_of(model)["0", "down_proj"], experts_of(model)[0]
    assert wrapper.lora_A["default"].weight.dtype == torch.float32
    hidden, index, weights = routing(experts, device, dtype=torch.bfloat16)
    exact = copy.deepcopy(wrapper).double()
    for entry in (exact, exact.base_layer):  # double() reaches the parameters
        assert entry.lora_A["default"].weight.dtype == torch.float64
    expected = gradients_of(exact, exact, hidden.double(), index, weights.double())
    eager = gradients_of(wrapper, wrapper, hidden, index, weights)
    opt.integrations.use_in_transformers(model)
    ours = gradients_of(wrapper, wrapper, hidden, index, weights)
    for key, value in expected.items():
        if value is None:  # the frozen weights
            assert ours[key] is None
            continue
        assert ours[key].dtype == eager[key].dtype
        assert relative_error(ours[key], value) <= 1.5 * relative_error(eager[key], value), key


def test_adapter_that_transformers_itself_adds(opt, device) -> None:
    model = build("qwen3_moe").to(device)
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=[], target_parameters=list(BOTH))
    model.add_adapter(config)
    set_random_lora(model)
    expected = logits(model)
    opt.integrations.use_in_transformers(model)
    assert_error_at_most(logits(model), expected, FP32)
    model.disable_adapters()
    assert relative_error(logits(model), expected) > 0.1
