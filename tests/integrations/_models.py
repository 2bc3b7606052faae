"""Tiny random models of transformers, one of each kind of experts, and what tests do with them.

Sizes are small primes and their multiples where the architecture allows, so that no two meanings
of a dimension agree by chance; `SQUARE` has 2I == H on purpose.
"""

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as t

from .._compare import assert_error_at_most, assert_same_bits, relative_error

FP32 = 1e-5  # of a whole model: tens of float32 roundings, each 6e-8
STACKS = ("gate_up_proj", "down_proj")
OPTIONS = {"dtype": torch.float32, "device_map": "cpu"}  # of load_quantized

COMMON = {
    "vocab_size": 61,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 12,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
EXPERTS = {"num_experts": 5, "num_experts_per_tok": 2, "moe_intermediate_size": 20}
OLMOE = {"num_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20}
LOCAL = {"num_local_experts": 5, "num_experts_per_tok": 2, "intermediate_size": 20}
QWEN3 = EXPERTS | {"intermediate_size": 32}
LINEAR_ATTENTION = EXPERTS | {
    "linear_num_key_heads": 1,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "layer_types": ["linear_attention", "full_attention"],
    "shared_expert_intermediate_size": 28,
}
DEEPSEEK = {
    "num_key_value_heads": 2,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 20,
    "intermediate_size": 32,
    "q_lora_rank": None,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
VISION = {
    "depth": 1,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_heads": 2,
    "out_hidden_size": 24,
}
MODELS: dict[str, tuple[type, dict[str, Any]]] = {
    "qwen3_moe": (t.Qwen3MoeForCausalLM, QWEN3),
    # 2I == H: nothing about gate_up_proj can be told from its shape.
    "qwen3_moe_square": (t.Qwen3MoeForCausalLM, QWEN3 | {"moe_intermediate_size": 12}),
    "qwen3_5_moe": (t.Qwen3_5MoeForCausalLM, LINEAR_ATTENTION),
    # A vision-language model: its experts sit in the text backbone, which has its own config.
    "qwen3_5_moe_vlm": (t.Qwen3_5MoeForConditionalGeneration, LINEAR_ATTENTION),
    "qwen3_next": (t.Qwen3NextForCausalLM, LINEAR_ATTENTION | {"intermediate_size": 32}),
    "olmoe": (t.OlmoeForCausalLM, OLMOE),
    "mixtral": (t.MixtralForCausalLM, LOCAL),
    # Transposed, interleaved and biased, with a clamped gate.
    "gpt_oss": (t.GptOssForCausalLM, LOCAL),
    # Sigmoid router with groups and correction bias, a dense first layer, shared experts.
    "deepseek_v3": (t.DeepseekV3ForCausalLM, DEEPSEEK),
}


# One of each way in which paths to experts, layouts and routers differ.
DISTINCT = ("qwen3_moe_square", "qwen3_5_moe_vlm", "mixtral", "gpt_oss", "deepseek_v3")


def model_of(name: str, **changes: Any) -> torch.nn.Module:
    """A model as its class initialises it, of a configuration with some changes."""
    kind, own = MODELS[name]
    options = COMMON | own | changes
    if name == "deepseek_v3":
        del options["head_dim"]  # three other sizes make it
    if name == "qwen3_5_moe_vlm":
        options = {"text_config": options, "vision_config": VISION, "tie_word_embeddings": False}
    model = kind(kind.config_class(**options))
    if name == "gpt_oss":
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if parameter_name.endswith("_proj_bias"):  # zero otherwise: a test could not see
                    parameter.normal_()
    return model


def build(name: str, *, dtype: torch.dtype = torch.float32, **changes: Any) -> torch.nn.Module:
    """A model with the same weights on every call, on transformers' eager experts."""
    torch.manual_seed(0)
    model = model_of(name, **changes).to(dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # of 0.02: deltas and routers must matter
    model.set_experts_implementation("eager")
    return model


def tokens(*, batch: int = 2, length: int = 11) -> torch.Tensor:
    """(B, T) token ids, the same for every model."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(61, (batch, length), generator=generator)


def set_random_lora(model: torch.nn.Module, *, seed: int = 2) -> None:
    """Fill every LoRA factor, PEFT's or ours, in the order of the parameters' names."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters(), key=lambda entry: entry[0]):
            if ".lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))


def attached(opt: Any, model: torch.nn.Module, **options: Any) -> torch.nn.Module:
    """A random adapter of ours; modules that are trained whole are other ones, too."""
    model = opt.integrations.attach_lora(model, **{"r": 3, "lora_alpha": 7} | options)
    set_random_lora(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter.mul_(1.5)
    return model


def assert_read_everywhere(
    opt: Any,
    model: torch.nn.Module,
    folder: Path,
    fresh: Callable[..., torch.nn.Module],
    name: str = "qwen3_moe",
) -> None:
    """What is saved of the model gives its results in PEFT alone, and its bits in ours."""
    import peft

    opt.integrations.save_peft_adapter(model, folder)
    expected = logits(model)
    loaded = peft.PeftModel.from_pretrained(fresh(name), folder)
    assert_error_at_most(logits(loaded), expected, FP32)
    again = fresh(name)
    opt.integrations.load_peft_adapter(again, folder)
    assert_same_bits(logits(again), expected)


def step(model: torch.nn.Module, **options: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits of the tokens, and the gradient of every parameter that has one."""
    model.zero_grad()
    ids = tokens().to(next(model.parameters()).device)
    output = model(input_ids=ids, labels=ids, **options)
    output.loss.backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return output.logits.detach(), gradients


def logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=tokens().to(next(model.parameters()).device)).logits


def experts_of(model: torch.nn.Module) -> list[torch.nn.Module]:
    return [module for module in model.modules() if "is_transposed" in vars(module)]


def trained(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def parametrize_4_bits(model: torch.nn.Module) -> None:
    """The experts in 4 bits, as bitsandbytes keeps them."""
    from bitsandbytes.nn.parametrize import replace_parameter_4bit

    for experts in experts_of(model):
        for target in STACKS:
            replace_parameter_4bit(experts, target, quant_type="nf4")


def rounded(opt: Any, model: torch.nn.Module, quant_type: str) -> torch.nn.Module:
    """A dense copy whose experts hold what their 4 bits decode to."""
    result = copy.deepcopy(model)
    for experts in experts_of(result):
        for target in STACKS:
            weight = getattr(experts, target)
            stack = opt.moe.QuantizedExperts.from_weight(weight, quant_type=quant_type)
            with torch.no_grad():
                weight.copy_(stack.decode(dtype=weight.dtype))
    return result


def set_stacks(dense: torch.nn.Module, other: torch.nn.Module) -> None:
    """Give a model the experts of another one, in float32 where they are packed."""
    with torch.no_grad():
        for experts, theirs in zip(experts_of(dense), experts_of(other), strict=True):
            for target in STACKS:
                stack = getattr(theirs, target)
                packed = hasattr(stack, "decode")
                value = stack.decode(dtype=torch.float32) if packed else stack
                getattr(experts, target).copy_(value)


def assert_close_tensors(
    found: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    """The same names, and under each of them at most FP32 of relative error."""
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert relative_error(found[name], tensor) <= FP32, name
