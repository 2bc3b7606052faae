"""use_in_transformers: the models' own results on our experts, with everything else left alone."""

import copy
import functools
import inspect
from importlib.metadata import version
from pathlib import Path

import pytest
import torch
import transformers
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import FP8Experts
from transformers.integrations.moe import ExpertsInterface
from transformers.integrations.mxfp4 import Mxfp4GptOssExperts
from transformers.models import deepseek_v4, nemotron_h, openai_privacy_filter

from .._compare import assert_error_at_most, assert_same_bits, assert_same_tensors
from ._models import FP32, MODELS, assert_close_tensors, build, experts_of, step, tokens
from ._moe_table import PAGE, classes, committed, page, row, tiny, written_for

ROUTER_LOSS = {name: {"output_router_logits": True} for name in MODELS if name != "deepseek_v3"}


@pytest.fixture
def calls(opt, submodule, monkeypatch):
    """The experts modules that ran through our function, in order."""
    ours = submodule("integrations.models.transformers").experts_function
    seen: list[torch.nn.Module] = []

    def spy(experts, *args, **kwargs):
        seen.append(experts)
        return ours(experts, *args, **kwargs)

    name = opt.integrations.use_in_transformers()
    monkeypatch.setitem(ExpertsInterface._global_mapping, name, spy)
    monkeypatch.setattr(ExpertsInterface, "register", lambda *_: None)  # would replace the spy
    return seen


@pytest.mark.sees_defect("routing, gates and layouts are written again for every model")
@pytest.mark.sees_defect("a list of model types decides; text backbones need an entry of their own")
@pytest.mark.parametrize("name", MODELS)
def test_logits_losses_and_gradients_are_eagers(opt, fresh, calls, name: str) -> None:
    model = fresh(name)
    options = ROUTER_LOSS.get(name, {})
    logits, gradients = step(model, **options)
    assert not calls

    opt.integrations.use_in_transformers(model)
    ours, our_gradients = step(model, **options)
    assert calls == experts_of(model)
    assert_error_at_most(ours, logits, FP32)
    assert_close_tensors(our_gradients, gradients)


@pytest.mark.sees_defect(
    "the router is bypassed: its LoRA, hooks, logits and auxiliary loss are lost"
)
@pytest.mark.parametrize("name", ROUTER_LOSS)
def test_router_is_untouched(opt, device, fresh, name: str) -> None:
    model = fresh(name)
    ids = tokens().to(device)
    with torch.no_grad():
        eager = model(input_ids=ids, labels=ids, output_router_logits=True)
        opt.integrations.use_in_transformers(model)
        hooked = []
        for experts_name, module in model.named_modules():
            if experts_name.endswith((".mlp.gate", ".mlp.router")):
                module.register_forward_hook(lambda *_: hooked.append(1))
        ours = model(input_ids=ids, labels=ids, output_router_logits=True)
    assert len(ours.router_logits) == len(eager.router_logits) == len(hooked) == 2
    for mine, theirs in zip(ours.router_logits, eager.router_logits, strict=True):
        assert_error_at_most(mine, theirs, FP32)
    assert ours.aux_loss.item() == pytest.approx(eager.aux_loss.item(), rel=1e-5)
    assert ours.aux_loss.item() > 0.5


def gradients_of(experts, forward, hidden, index, weights):
    """Output and gradients of one experts module, for a fixed direction."""
    experts.zero_grad()
    hidden, weights = (t.detach().clone().requires_grad_() for t in (hidden, weights))
    output = forward(hidden, index, weights)
    generator = torch.Generator().manual_seed(4)
    direction = torch.randn(output.shape, generator=generator).to(output)
    output.backward(direction)
    found = {name: p.grad for name, p in experts.named_parameters()}
    return {"output": output.detach(), "hidden": hidden.grad, "weights": weights.grad, **found}


def routing(experts, device, dtype=torch.float32):
    """Hidden states, indices and weights; the last expert gets no token."""
    generator = torch.Generator().manual_seed(3)
    size = experts.down_proj.shape[2 if experts.is_transposed else 1]
    hidden = torch.randn(23, size, generator=generator)
    scores = torch.rand(23, experts.num_experts - 1, generator=generator)
    weights, index = scores.topk(2)
    return hidden.to(device, dtype), index.to(device), weights.to(device, dtype)


def stand_alone(name: str) -> torch.nn.Module:
    """An experts module of a layout that no model above has, with random parameters."""
    kinds = {
        "nemotron_h": (  # no gate, relu squared
            nemotron_h.modeling_nemotron_h.NemotronHExperts,
            nemotron_h.NemotronHConfig,
            {"n_routed_experts": 5, "moe_intermediate_size": 20},
        ),
        "openai_privacy_filter": (  # gpt_oss's transposed weights and gate, but concatenated
            openai_privacy_filter.modeling_openai_privacy_filter.OpenAIPrivacyFilterExperts,
            openai_privacy_filter.OpenAIPrivacyFilterConfig,
            {"num_local_experts": 5, "intermediate_size": 20},
        ),
        "deepseek_v4": (  # a clamped gate of its own
            deepseek_v4.modeling_deepseek_v4.DeepseekV4Experts,
            deepseek_v4.DeepseekV4Config,
            {"n_routed_experts": 5, "moe_intermediate_size": 20, "swiglu_limit": 0.7},
        ),
    }
    kind, config, sizes = kinds[name]
    experts = kind(
        config(hidden_size=24, num_attention_heads=2, experts_implementation="eager", **sizes)
    )
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return experts


@pytest.mark.sees_defect("ids of experts on other ranks reach the kernels")
def test_expert_parallel_sentinels_are_skipped(opt, device, fresh) -> None:
    experts = experts_of(fresh())[0]
    experts._is_expert_parallel = True  # as transformers marks a rank that holds some experts
    hidden, index, weights = routing(experts, device)
    sentinel = torch.zeros_like(index, dtype=torch.bool)
    sentinel[::3, 0] = sentinel[1::5, 1] = sentinel[4] = True
    clean = gradients_of(
        experts, experts, hidden, index.masked_fill(sentinel, 0), weights.masked_fill(sentinel, 0)
    )
    experts.config._experts_implementation = opt.integrations.use_in_transformers()
    # the id and the weight of a sentinel slot say nothing, whatever they are
    ids = index.masked_fill(sentinel, experts.num_experts)
    ids[4, 1] = experts.num_experts + 3
    ours = gradients_of(experts, experts, hidden, ids, weights)
    assert ours["output"][4].count_nonzero() == 0
    assert ours["weights"][sentinel].count_nonzero() == 0
    clean["weights"] = clean["weights"].masked_fill(sentinel, 0)
    assert_close_tensors(ours, clean)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(opt, fresh, reentrant: bool) -> None:
    model = fresh().train()
    opt.integrations.use_in_transformers(model)
    logits, gradients = step(model)
    # 5.23 has the new name, 5.17 the old one
    new, old = "activation_checkpointing_enable", "gradient_checkpointing_enable"
    getattr(model, new if hasattr(model, new) else old)({"use_reentrant": reentrant})
    if reentrant:
        model.enable_input_require_grads()
    again, recomputed = step(model)
    assert_same_bits(again, logits)
    assert_same_tensors(recomputed, gradients)


def test_generation_token_by_token(opt, device, fresh) -> None:
    model = fresh("mixtral").eval()
    ids = tokens(batch=1, length=5).to(device)
    options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    eager = model.generate(ids, **options)
    opt.integrations.use_in_transformers(model)
    assert torch.equal(model.generate(ids, **options), eager)


def test_model_is_loaded_with_our_experts(opt, device, calls, tmp_path) -> None:
    model = build("olmoe")
    model.save_pretrained(tmp_path)
    name = opt.integrations.use_in_transformers()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, experts_implementation=name).to(device)
    logits, _ = step(loaded)
    assert calls == experts_of(loaded)
    assert_error_at_most(logits.cpu(), step(model)[0], FP32)


@pytest.mark.sees_defect("what cannot run is patched anyway, or left out in silence")
def test_models_that_cannot_run_are_refused_and_unchanged(opt, monkeypatch) -> None:
    model = build("qwen3_moe")
    experts_of(model)[1].has_post_expert_norm = True
    with pytest.raises(ValueError, match=r"model\.layers\.1\.mlp\.experts.*normalizes"):
        opt.integrations.use_in_transformers(model)
    assert model.config._experts_implementation == "eager"
    outside = torch.nn.ModuleList([experts_of(build("qwen3_moe"))[0]])
    with pytest.raises(ValueError, match="did not set the experts implementation"):
        opt.integrations.use_in_transformers(outside)
    for name in ("qwen3_moe", "qwen3_5_moe_vlm"):
        apart = build(name)
        experts = experts_of(apart)[-1]
        experts.config = copy.deepcopy(experts.config)  # out of the model's reach
        with pytest.raises(ValueError, match="did not set the experts implementation"):
            opt.integrations.use_in_transformers(apart)
        configs = [module.config for module in apart.modules() if hasattr(module, "config")]
        assert {c._experts_implementation for c in configs} == {"eager"}


def test_models_inside_other_modules_are_found(opt, calls, device) -> None:
    holder = torch.nn.ModuleDict({"policy": build("qwen3_moe"), "value": build("mixtral")})
    opt.integrations.use_in_transformers(holder.to(device))
    for model in holder.values():
        step(model)
    assert calls == experts_of(holder["policy"]) + experts_of(holder["value"])


def test_experts_in_fp8_are_refused_at_once(opt) -> None:
    """Before, the first call raised a KeyError of transformers' FP8 interface."""
    model = build("qwen3_moe")
    for layer in model.model.layers:
        layer.mlp.experts = FP8Experts(model.config, block_size=(8, 8))
    for change in (opt.integrations.use_in_transformers, opt.integrations.quantize_experts):
        with pytest.raises(ValueError, match=r"FP8Experts.*float8_e4m3fn.*dequantize=True"):
            change(model)
    assert model.config._experts_implementation == "eager"


def test_what_has_no_experts_interface_is_told_what_it_is(opt) -> None:
    """It used to be told that it must be a mixture of experts, which it is."""
    use = opt.integrations.use_in_transformers
    with pytest.raises(ValueError, match=r"Llama4TextExperts, which transformers runs in one way"):
        use(tiny("Llama4ForCausalLM"))
    packed = build("gpt_oss")
    for layer in packed.model.layers:
        layer.mlp.experts = Mxfp4GptOssExperts(packed.config)
    with pytest.raises(ValueError, match=r"Mxfp4GptOssExperts, quantised to torch\.uint8; read"):
        use(packed)
    config = transformers.LlamaConfig(
        vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2
    )
    with pytest.raises(ValueError, match="LlamaForCausalLM has no experts"):
        use(transformers.LlamaForCausalLM(config))


@pytest.mark.parametrize("act", [torch.nn.SiLU(), torch.nn.Tanh()])
def test_experts_without_their_own_gate(submodule, act) -> None:
    """transformers' decorator would have given them act_fn(gate) * up."""

    class Experts(torch.nn.Module):
        act_fn = act

    layout = submodule("moe.layout").module_layout
    if isinstance(act, torch.nn.SiLU):
        assert layout(Experts()).activation == "silu"
    else:
        with pytest.raises(ValueError, match=r"Experts has no `_apply_gate`.*give the class one"):
            layout(Experts())


SAME_VERSION = version("transformers") == written_for()


def test_the_page_has_every_class() -> None:
    if SAME_VERSION:
        assert list(committed()) == classes()
        assert page(committed(), written_for()) == PAGE.read_text()
    else:
        assert set(committed()) & set(classes())


@pytest.mark.parametrize("name", committed())
def test_a_class_does_what_its_row_says(opt, tmp_path, name: str) -> None:
    if name not in classes():
        assert not SAME_VERSION
        return
    found = row(opt, name, tmp_path)
    if SAME_VERSION:
        assert found == committed()[name]
    else:
        assert found[1] == "works" or found[1].startswith(("refused by", "not tried"))


# Experts of transformers, what is changed of them, and the activation that is read off them: None
# where their own gate is called as it is.
KINDS = {
    "silu": ("qwen3_moe", {}, "silu"),
    "tanh": ("qwen3_moe", {"act_fn": nn.GELU(approximate="tanh")}, "gelu_tanh"),
    "unknown activation": ("qwen3_moe", {"act_fn": nn.Hardswish()}, None),
    "gpt_oss": ("gpt_oss", {}, "gpt_oss"),
    "other constants": ("gpt_oss", {"alpha": 1.0, "limit": 0.5}, None),
    "no gate": ("nemotron_h", {}, "relu2"),
    "clamped": ("deepseek_v4", {}, None),
    "transposed, not interleaved": ("openai_privacy_filter", {}, None),
}


def made(kind: str, device: torch.device) -> nn.Module:
    name, changes, _ = KINDS[kind]
    experts = experts_of(build(name))[0] if name in MODELS else stand_alone(name)
    for attribute, value in changes.items():
        setattr(experts, attribute, value)
    return experts.to(device, torch.float64)


@pytest.mark.sees_defect("routing is written again for every model")
@pytest.mark.parametrize("kind", KINDS)
def test_forward_equals_the_eager_one(opt, submodule, device, kind):
    """By the layout that is read off the attributes."""
    experts, activation = made(kind, device), KINDS[kind][2]
    layout = submodule("moe.layout").module_layout(experts)
    assert (layout.transposed, layout.gated) == (experts.is_transposed, experts.has_gate)
    assert layout.interleaved == (experts.has_gate and not experts.is_concatenated)
    assert callable(layout.activation) if activation is None else layout.activation == activation
    inputs = routing(experts, device, torch.float64)
    ours = functools.partial(opt.layers.ScatterMoEExperts.forward, experts)
    found, expected = (gradients_of(experts, forward, *inputs) for forward in (ours, experts))
    budget = FP32 if kind == "transposed, not interleaved" else 1e-13  # it multiplies in float32
    for name, gradient in expected.items():
        assert_error_at_most(found[name], gradient, budget)


def test_attached_lora_is_added(opt, device):
    experts = made("silu", device)
    inputs = routing(experts, device, torch.float64)
    adapters = opt.moe.ExpertAdapters(5, 24, 20, opt.moe.ExpertsLayout()).to(device)
    adapters.add_adapter(r=2, alpha=4, dtype=torch.float64, device=device)
    for projection in adapters.values():
        nn.init.normal_(projection.lora_B["default"].weight)
    base = opt.layers.ScatterMoEExperts.forward(experts, *inputs)
    experts.expert_lora = adapters
    found = opt.layers.ScatterMoEExperts.forward(experts, *inputs)
    with adapters.disabled():
        assert_same_bits(opt.layers.ScatterMoEExperts.forward(experts, *inputs), base)
    adapters.merge({"gate_up": experts.gate_up_proj, "down": experts.down_proj})
    assert_error_at_most(found, experts(*inputs), 1e-12)


def test_kernelize_swaps_the_forward(opt, device):
    """As a trainer does it, from the built folder, for training and for a compiled graph."""
    from kernels import (
        LocalLayerRepository,
        Mode,
        kernelize,
        replace_kernel_forward_from_hub,
        use_kernel_mapping,
    )

    experts = made("silu", device)
    inputs = routing(experts, device, torch.float64)
    expected = experts(*inputs)

    class Experts(type(experts)):
        pass

    replace_kernel_forward_from_hub(Experts, "OptimizerExperts")
    experts.__class__ = Experts
    model = nn.ModuleDict({"experts": experts})
    variant = Path(opt.__file__).parent  # named, or a CUDA build of torch asks for a CUDA variant
    layer = LocalLayerRepository(repo_path=variant, layer_name="ScatterMoEExperts")
    with use_kernel_mapping({"OptimizerExperts": {device.type: layer}}):
        kernelize(model, mode=Mode.TRAINING | Mode.TORCH_COMPILE, device=device)
    found = model["experts"](*inputs)
    assert_error_at_most(found, expected, 1e-13)
    found.sum().backward()
    assert model["experts"].gate_up_proj.grad is not None
    assert "experts_forward" in inspect.getsource(model["experts"].forward)
