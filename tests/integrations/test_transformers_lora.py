"""attach_lora, its switches and quantize_experts: the results of PEFT, without PEFT."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from .._compare import assert_error_at_most, assert_same_bits, fail_at, relative_error
from ._models import MODELS, build, set_random_lora, step, tokens
from .test_transformers import FP32, experts_of, routing, stand_alone

SHORT = torch.OutOfMemoryError("CUDA out of memory")


def logits(model: nn.Module) -> torch.Tensor:
    ids = tokens(model).to(next(model.parameters()).device)
    with torch.no_grad():
        return model(input_ids=ids).logits


def attached(opt, device, name: str = "qwen3_moe", **options) -> nn.Module:
    """A model with a random adapter of ours."""
    model = build(name).to(device)
    opt.integrations.attach_lora(model, **{"r": 3, "lora_alpha": 7} | options)
    set_random_lora(model)
    return model


def folded(model: nn.Module, adapter: str, scaling: float) -> nn.Module:
    """An eager copy whose weights hold the adapter, by PEFT's definition of the delta."""
    result = copy.deepcopy(model)
    for experts in experts_of(result):
        for target, name in (("gate_up_proj", "gate_up"), ("down_proj", "down")):
            entry = experts.expert_lora[name]
            a, b = entry.lora_A[adapter].weight, entry.lora_B[adapter].weight
            order = "eio" if experts.is_transposed else "eoi"
            a = a.unflatten(0, (experts.num_experts, -1))
            b = b.unflatten(1, (-1, experts.num_experts))
            with torch.no_grad():
                getattr(experts, target).add_(scaling * torch.einsum(f"ore,eri->{order}", b, a))
        del experts._modules["expert_lora"]
        experts._forward_pre_hooks.clear()
    result.set_experts_implementation("eager")
    return result


@pytest.mark.parametrize("rslora", [False, True], ids=["alpha/r", "alpha/sqrt(r)"])
@pytest.mark.parametrize("name", ["qwen3_moe_square", "qwen3_5_moe_vlm", "gpt_oss", "deepseek_v3"])
def test_logits_are_those_of_the_sum(opt, device, name: str, rslora: bool) -> None:
    model = attached(opt, device, name, use_rslora=rslora)
    expected = folded(model, "default", 7 / 3**0.5 if rslora else 7 / 3)
    assert_error_at_most(logits(model), logits(expected), FP32)
    assert relative_error(logits(model), logits(build(name).to(device))) > 0.1


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_pefts(opt, device, name: str) -> None:
    import peft

    model = attached(opt, device, name)
    _, ours = step(model)
    targets = ["experts.gate_up_proj", "experts.down_proj"]
    config = peft.LoraConfig(r=3, lora_alpha=7, target_modules=[], target_parameters=targets)
    reference = peft.get_peft_model(build(name).to(device), config)
    ours_by_place = {}
    for key, parameter in model.named_parameters():
        if ".lora_" in key:
            layer, rest = key.split(".experts.expert_lora.")
            projection, factor = rest.split(".", 1)
            inner = ".base_layer" if projection == "gate_up" else ""
            ours_by_place[f"base_model.model.{layer}.experts{inner}.{factor}"] = key, parameter
    with torch.no_grad():
        for key, parameter in reference.named_parameters():
            if ".lora_" in key:
                parameter.copy_(ours_by_place[key][1])
    _, gradients = step(reference)
    assert len(gradients) == len(ours) == len(ours_by_place)  # LoRA alone is trained
    for key, gradient in gradients.items():
        assert relative_error(ours[ours_by_place[key][0]], gradient) <= FP32, key


def test_a_new_adapter_changes_nothing_and_trains_alone(opt, device) -> None:
    model = build("mixtral").to(device)
    opt.integrations.use_in_transformers(model)
    before = logits(model)
    opt.integrations.attach_lora(model, 4, 8, dtype=torch.float64)
    assert_same_bits(logits(model.float()), before)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 8 and all(".expert_lora." in name for name in trained)
    assert all(p.is_contiguous() for n, p in model.named_parameters() if n in trained)


def test_it_learns_and_leaves_the_base_alone(opt, device) -> None:
    model = build("qwen3_moe").to(device)
    opt.integrations.attach_lora(model, 4, 8)
    base = {n: p.clone() for n, p in model.named_parameters() if not p.requires_grad}
    parameters = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=3e-2, weight_decay=0.0)
    ids = tokens(model).to(device)
    losses = []
    for _ in range(25):
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 1
    for name, parameter in model.named_parameters():
        if name in base:
            assert_same_bits(parameter, base[name])


@pytest.mark.parametrize("target", ["gate_up_proj", "down_proj"])
def test_one_projection(opt, device, target: str) -> None:
    model = attached(opt, device, "gpt_oss", target_parameters=[target])
    (entry,) = {n.split(".")[6] for n, _ in model.named_parameters() if ".lora_A" in n}
    assert entry == {"gate_up_proj": "gate_up", "down_proj": "down"}[target]
    assert relative_error(logits(model), logits(build("gpt_oss").to(device))) > 0.05


def test_experts_without_a_gate(opt, device) -> None:
    experts = stand_alone("nemotron_h").to(device)
    experts.config._experts_implementation = opt.integrations.use_in_transformers()
    inputs = routing(experts, device)
    holder = nn.ModuleDict({"experts": experts})
    with torch.no_grad():
        opt.integrations.attach_lora(holder, 3, 7, target_parameters=("up_proj", "down_proj"))
        set_random_lora(holder)
        ours = experts(*inputs)
        with pytest.raises(ValueError, match=r"has \['gate_up_proj'\].*they have .*'up_proj'"):
            opt.integrations.attach_lora(
                holder, 3, 7, target_parameters=["gate_up_proj"], adapter_name="other"
            )
        opt.integrations.merge_lora(holder)
        assert_error_at_most(ours, experts(*inputs), FP32)


def test_several_adapters(opt, device) -> None:
    model = attached(opt, device)
    first = logits(model)
    opt.integrations.attach_lora(model, 2, 3, target_parameters=["down_proj"], adapter_name="other")
    assert_same_bits(logits(model), first)  # the first one stays active, and trains
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 8 and all(".default." in name for name in trained)

    opt.integrations.set_lora(model, "other")
    base = build("qwen3_moe").to(device)
    opt.integrations.use_in_transformers(base)
    assert_same_bits(logits(model), logits(base))  # B is zero still
    opt.integrations.set_lora(model, "other", trainable=True)
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert len(trained) == 4 and all(".down." in name and ".other." in name for name in trained)
    opt.integrations.set_lora(model, None)
    assert_same_bits(logits(model), logits(base))
    opt.integrations.set_lora(model, "default")
    assert_same_bits(logits(model), first)
    with pytest.raises(ValueError, match=r"\['default', 'other'\].*is not attached.*one can"):
        opt.integrations.set_lora(model, ["default", "other"])
    with pytest.raises(ValueError, match="adapter_name='missing' is not attached"):
        opt.integrations.set_lora(model, "missing")


def test_4_bit_experts_are_decoded_and_never_merged(opt, device, tmp_path) -> None:
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    sizes = {"moe_intermediate_size": 64, "hidden_size": 64}
    model, dense = (build("qwen3_moe", **sizes).to(device) for _ in range(2))
    for four_bit, experts in zip(experts_of(model), experts_of(dense), strict=True):
        for name in ("gate_up_proj", "down_proj"):
            replace_parameter_4bit(four_bit, name, quant_type="nf4")
            with torch.no_grad():
                getattr(experts, name).copy_(getattr(four_bit, name))
    for entry in (model, dense):
        opt.integrations.attach_lora(entry, 3, 7)
        set_random_lora(entry)
    assert_same_bits(logits(model), logits(dense))
    with pytest.raises(ValueError, match="quantized"):
        opt.integrations.merge_lora(model)
    opt.integrations.save_peft_adapter(model, tmp_path)  # in the order that PEFT uses over 4 bits
    again = build("qwen3_moe", **sizes).to(device)
    with pytest.raises(ValueError, match="saved over quantized experts"):
        opt.integrations.load_peft_adapter(again, tmp_path)


def test_a_broken_adapter_is_not_merged_anywhere(opt, device) -> None:
    model = attached(opt, device)
    with torch.no_grad():
        experts_of(model)[1].expert_lora["down"].lora_B["default"].weight[0, 0] = float("nan")
    weights = {n: p.clone() for n, p in model.named_parameters()}
    with pytest.raises(ValueError, match="NaN or inf"):
        opt.integrations.merge_lora(model)
    for name, parameter in model.named_parameters():
        assert_same_bits(parameter, weights[name])


def test_detached_models_are_clean(opt, device) -> None:
    model = attached(opt, device)
    keys = build("qwen3_moe").state_dict().keys()
    adapted = logits(model)
    opt.integrations.merge_lora(model)
    opt.integrations.detach_lora(model)
    assert model.state_dict().keys() == keys
    assert_error_at_most(logits(model), adapted, FP32)
    model.set_experts_implementation("eager")
    logits(model)
    opt.integrations.attach_lora(model, 1, 1)
    assert len(experts_of(model)[0]._forward_pre_hooks) == 1


def test_state_dict_round_trip(opt, device) -> None:
    model = attached(opt, device)
    other = build("qwen3_moe").to(device)
    opt.integrations.attach_lora(other, 3, 7)
    other.load_state_dict(model.state_dict())
    assert_same_bits(logits(other), logits(model))


def test_other_implementations_do_not_drop_lora_in_silence(opt, device) -> None:
    model = attached(opt, device)
    model.set_experts_implementation("eager")
    with pytest.raises(RuntimeError, match="implementation is 'eager'; use_in_transformers"):
        logits(model)
    opt.integrations.disable_lora(model)
    assert_same_bits(logits(model), logits(build("qwen3_moe").to(device)))


def test_refusals_come_before_any_change(opt, device) -> None:
    attach = opt.integrations.attach_lora
    model = build("qwen3_moe").to(device)
    before = set(model.state_dict())

    def targets(names: object) -> None:
        attach(model, 1, 1, target_parameters=names)

    for error, words, call in (
        (ValueError, "one of .*, got 'int4'", lambda: attach(model, 1, 1, quantize="int4")),
        (ValueError, "r must be an integer", lambda: attach(model, 0, 1)),
        (ValueError, "r must be an integer", lambda: attach(model, True, 1)),
        (ValueError, "alpha must be", lambda: attach(model, 1, float("nan"))),
        (ValueError, "has .'q_proj'.*they have .'down_proj'", lambda: targets(["q_proj"])),
        (ValueError, "sequence of names", lambda: targets("down_proj")),
        (ValueError, "target_parameters is empty", lambda: targets([])),
        (ValueError, "without dots", lambda: attach(model, 1, 1, adapter_name="a.b")),
        (ValueError, "adapter_name='keys'", lambda: attach(model, 1, 1, adapter_name="keys")),
        (ValueError, "no experts", lambda: attach(nn.Linear(2, 2), 1, 1)),
        (ValueError, "attach_lora first", lambda: opt.integrations.disable_lora(model)),
        (ValueError, "no adapter is active", lambda: opt.integrations.merge_lora(model)),
    ):
        with pytest.raises(error, match=words):
            call()
        assert set(model.state_dict()) == before
        assert model.config._experts_implementation == "eager"
        assert all(parameter.requires_grad for parameter in model.parameters())
    attach(model, 1, 1)
    with pytest.raises(ValueError, match="'default' is attached already"):
        attach(model, 1, 1)
    experts_of(model)[0]._is_expert_parallel = True
    with pytest.raises(ValueError, match="split over ranks"):
        attach(model, 1, 1, adapter_name="b")
    biased = build("gpt_oss").to(device)
    with pytest.raises(ValueError, match=r"has LoRA on .*, not 'down_proj_bias'"):
        attach(biased, 1, 1, target_parameters=["experts.down_proj_bias"])


TARGETS = ("gate_up_proj", "down_proj")


def logits_quantize(model: nn.Module) -> torch.Tensor:
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
    attach(model, r=3, lora_alpha=7, quantize=quant_type)
    attach(twin, r=3, lora_alpha=7)
    for one in (model, twin):
        set_random_lora(one)
    found, expected = logits_quantize(model), logits_quantize(twin)
    assert_error_at_most(found, expected, FP32)
    assert relative_error(found, logits_quantize(build(name).to(device))) > 0.05
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
    expected = logits_quantize(rounded(opt, build("qwen3_moe").to(device), "nf4"))
    opt.integrations.quantize_experts(model)
    assert_error_at_most(logits_quantize(model), expected, FP32)
    with pytest.raises(ValueError, match="Linear has no experts"):
        opt.integrations.quantize_experts(nn.Linear(2, 2))


def test_a_refused_or_failed_attachment_leaves_no_adapter(
    opt, device, submodule, monkeypatch
) -> None:
    attach, wide = opt.integrations.attach_lora, build("qwen3_moe").to(device).double()
    with pytest.raises(ValueError, match=r"gate_up_proj is torch\.float64; 4 bits are made of"):
        attach(wide, r=2, lora_alpha=4, quantize="nf4")
    assert not any(".lora_" in name for name in wide.state_dict())
    assert all(parameter.requires_grad for parameter in wide.parameters())
    assert wide.config._experts_implementation == "eager"
    with pytest.raises(ValueError, match="blocksize must be one of"):
        opt.integrations.quantize_experts(build("qwen3_moe"), blocksize=48)

    model = build("qwen3_moe").to(device)
    formats = submodule("kernels.quant.formats")
    fail_at(monkeypatch, formats, "nf4_quantize", 8, SHORT)  # within the second stack
    with pytest.raises(torch.OutOfMemoryError):
        attach(model, r=2, lora_alpha=4, quantize="nf4")
    assert not any(".lora_" in name for name in model.state_dict())
    assert all(p.requires_grad for n, p in model.named_parameters() if ".experts." not in n)
    logits_quantize(model)  # half quantised, it runs
    attach(model, r=2, lora_alpha=4, quantize="nf4")
    logits_quantize(model)
    assert not any(key.endswith(TARGETS) for key in model.state_dict())


def test_memory_that_is_too_short_for_the_factors(opt, device, submodule, monkeypatch) -> None:
    model = build("qwen3_moe").to(device)
    kind = submodule("moe.lora").LoraProjection
    calls = fail_at(monkeypatch, kind, "add_adapter", 3, SHORT)
    before = list(model.state_dict())
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError):
            opt.integrations.attach_lora(model, r=2, lora_alpha=4)
        assert list(model.state_dict()) == before
        assert all(parameter.requires_grad for parameter in model.parameters())
        assert not any(module._forward_pre_hooks for module in experts_of(model))
        calls.clear()
    with pytest.raises(ValueError, match=r"r must be an integer from 1 to 65536"):
        opt.integrations.attach_lora(model, r=2**63, lora_alpha=4, quantize="nf4")
    assert list(model.state_dict()) == before


def test_refusals_change_nothing(opt, device) -> None:
    model = build("qwen3_moe").to(device)
    before = set(model.state_dict())
    with pytest.raises(ValueError, match=r"one of \('nf4', 'fp4'.*, got 'int4'"):
        opt.integrations.quantize_experts(model, "int4")
    last = experts_of(model)[-1]
    kept = last.down_proj
    last.down_proj = nn.Parameter(kept.detach().to("meta"), requires_grad=False)
    for call in (
        lambda: opt.integrations.quantize_experts(model),
        lambda: opt.integrations.attach_lora(model, r=2, lora_alpha=4, quantize="nf4"),
    ):
        with pytest.raises(ValueError, match="down_proj is on the meta device; quantise a model"):
            call()
    assert set(model.state_dict()) == before


@pytest.mark.parametrize("reentrant", [False, True])
def test_experts_in_host_memory(opt, device, tmp_path, reentrant) -> None:
    """Gradient checkpointing over offloaded experts: the same bits, and they can be saved."""
    model = build("qwen3_moe", num_hidden_layers=3).to(device)
    opt.integrations.attach_lora(model, r=3, lora_alpha=7, quantize="nf4")
    set_random_lora(model)
    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})

    def gradients() -> dict[str, torch.Tensor]:
        model.zero_grad()
        logits_quantize(model).square().sum().backward()
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
    assert_same_bits(logits_quantize(loaded), logits_quantize(model))
