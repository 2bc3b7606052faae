"""docs/concepts/moe-models.md: what happens to every mixture-of-experts class of transformers.

`python -m tests.integrations._moe_table` writes the page; the test of the same name compares each
row with what the class does today.

The classes are those of transformers' auto classes for language models whose modeling file defines
experts. Each is tried at tiny size: its configuration is the class's own default with every size
that has a name in `SIZES` made small; `OWN` says what a class needs beside that.
"""

import functools
import re
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers.models.auto import modeling_auto

from .._compare import relative_error
from ..conftest import ROOT
from ._models import set_random_lora

NAMES_BY_SIZE: dict[Any, str] = {
    64: "vocab_size unpadded_vocab_size vocab_size_per_layer_input max_position_embeddings "
    "rel_extent",
    32: "hidden_size d_model out_hidden_size text_hidden_size projector_hidden_size "
    "output_proj_dims projection_hidden_dim",
    24: "intermediate_size d_ff ffn_dim encoder_ffn_dim decoder_ffn_dim mlp_dim "
    "moe_intermediate_size expert_ffn_hidden_size shared_intermediate_size "
    "shared_expert_intermediate_size moe_shared_expert_intermediate_size",
    16: "q_lora_rank kv_lora_rank qk_head_dim image_size output_channels position_embedding_size",
    8: "head_dim swa_head_dim global_head_dim d_kv d_rel sliding_window chunk_size patch_size "
    "hidden_size_per_layer_input qk_rope_head_dim qk_nope_head_dim v_head_dim o_lora_rank "
    "index_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim mamba_head_dim "
    "mamba_n_heads mamba_d_head mamba_d_state mamba_dt_rank ssm_state_size",
    4: "num_attention_heads num_key_value_heads swa_num_attention_heads swa_num_key_value_heads "
    "encoder_attention_heads decoder_attention_heads linear_num_heads mamba_num_heads "
    "num_experts num_local_experts n_routed_experts moe_num_experts index_topk posemb_grid_size",
    2: "num_hidden_layers num_layers num_decoder_layers num_experts_per_tok num_experts_per_token "
    "top_k top_k_experts moe_topk moe_top_k moe_k index_n_heads linear_num_value_heads num_heads "
    "mamba_expand eos_token_id",
    1: "encoder_layers decoder_layers encoder_layers_audio depth first_k_dense_replace "
    "num_dense_layers n_group topk_group n_shared_experts num_shared_experts n_groups "
    "linear_num_key_heads mamba_n_groups bos_token_id",
    0: "moe_layer_start_index pad_token_id",
}
SIZES = {name: size for size, names in NAMES_BY_SIZE.items() for name in names.split()}
SIZES["tie_word_embeddings"] = False
SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
MOE_GEMMA4 = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
MOE_GEMMA4 |= {"moe_intermediate_size": 24}
SECTIONS = {"rope_theta": 1e4, "rope_type": "default", "mrope_section": [1, 1, 2]}
OWN: dict[str, dict[str, Any]] = {
    "BeamForCausalLM": SPARSE,
    "DbrxForCausalLM": {"attn_config": {"rope_theta": 1e4, "clip_qkv": 8, "kv_n_heads": 2}},
    "DeepseekOcr2ForConditionalGeneration": {"text_config": SPARSE},
    "Dots3NoteForConditionalGeneration": {
        "vision_config": {
            "mlp_layer_types": ["dense"] * 2,
            "adapter_in_dim": 32,
            "adapter_out_dim": 32,
        },
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "Ernie4_5_VLMoeForConditionalGeneration": {
        "text_config": {"rope_parameters": SECTIONS, "moe_intermediate_size": [24, 24]}
    },
    "FlintForCausalLM": {"mlp_only_layers": []},
    "Gemma4ForCausalLM": MOE_GEMMA4,
    "Gemma4ForConditionalGeneration": {"text_config": MOE_GEMMA4},
    "Glm4vMoeForConditionalGeneration": {
        "text_config": {"rope_parameters": SECTIONS | {"partial_rotary_factor": 1.0}}
    },
    "Glm5NextForConditionalGeneration": {
        "text_config": {"index_topk": 16, "qk_rope_head_dim": 0, **SPARSE}
    },
    "Lfm2MoeForCausalLM": {"layer_types": ["conv", "full_attention"]},
    "Mistral4ForCausalLM": {"head_dim": 16},
    "MiMoV2FlashForCausalLM": {"num_key_value_heads": 2},
    "MuseSparkForConditionalGeneration": {
        "audio_config": {"num_hidden_layers": 4, "hidden_sizes": [8] * 4, "out_hidden_size": 32}
    },
    "NllbMoeForConditionalGeneration": {"encoder_sparse_step": 1, "decoder_sparse_step": 1},
    "Step3p7ForConditionalGeneration": {"text_config": SPARSE},
    "SwitchTransformersForConditionalGeneration": {
        "num_sparse_encoder_layers": 1,
        "num_sparse_decoder_layers": 1,
    },
    "ZayaForCausalLM": {"num_experts_per_tok": 1},
}
NOT_TRIED = {
    "InklingForConditionalGeneration": "its vision tower asks for scipy, which the tests have not",
    "Qwen3OmniMoeForConditionalGeneration": "has no forward of its own; its thinker has a row",
}
MAPPINGS = (
    "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
)
HEADS = re.compile(r"^class (\w+For(?:CausalLM|ConditionalGeneration))\(", re.MULTILINE)
EXPERTS = re.compile(r"^class \w*Experts\(", re.MULTILINE)


PAGE = ROOT / "docs/concepts/moe-models.md"
HEAD = """# Mixture-of-experts models of transformers

transformers {version} has {count} language models with experts in its auto classes; {works} of
them work here. Each was built at tiny size with random weights, and it works if all of this is
right:

- `quantize_experts` gives the logits of transformers' own experts with the rounded weights;
- `load_quantized` reads what `save_pretrained` wrote of the dense model, to the same logits;
- `attach_lora` on the 4-bit experts has a gradient on every factor and on nothing else;
- what `save_pretrained` writes of that model is read by `load_quantized` and by `from_pretrained`,
  adapters included, to the same logits.

A refusal is a `ValueError` with the message that stands here.

<!-- written by TRITON_INTERPRET=1 python -m tests.integrations._moe_table -->
"""
HEADER = "| class | experts | result |"
ROW = re.compile(r"^\| `(\w+)` \| (.*) \| (.*) \|$", re.MULTILINE)


@functools.cache
def classes() -> list[str]:
    known: set[str] = set()
    for mapping in MAPPINGS:
        for entry in getattr(modeling_auto, mapping).values():
            known |= {entry} if isinstance(entry, str) else set(entry)
    sources = Path(transformers.__file__).parent.glob("models/*/modeling_*.py")
    texts = (source.read_text(encoding="utf-8") for source in sources)
    return sorted({n for t in texts if EXPERTS.search(t) for n in HEADS.findall(t)} & known)


def tiny(name: str) -> torch.nn.Module:
    """The class with the same random weights on every call, on transformers' eager experts."""
    kind = getattr(transformers, name)
    config = kind.config_class(**_small(kind.config_class, OWN.get(name, {})))
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4)  # of 0.02: experts and routers must matter
    return model


def inputs(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Token ids (2, 7) for its forward."""
    ids = torch.randint(5, 60, (2, 7), generator=torch.Generator().manual_seed(1))
    made = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        made["decoder_input_ids"] = ids
    if "Ernie4_5_VL" in type(model).__name__:  # the second half goes to the experts for images
        made["moe_mm_token_type_ids"] = (torch.arange(7) > 3).long().expand(2, 7)
    return made


def _small(kind: Any, own: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a configuration class that make it small, those of its parts included."""
    default = kind()
    values = default.to_dict()
    values |= {
        alias: values.get(name) for alias, name in getattr(kind, "attribute_map", {}).items()
    }
    sized = {name for name, value in values.items() if not isinstance(value, (list, tuple, dict))}
    made = {name: size for name, size in SIZES.items() if name in sized}
    for part in getattr(kind, "sub_configs", {}):
        inner = getattr(default, part, None)
        if inner is not None:
            made[part] = _small(type(inner), own.get(part) or {})
            made[part]["model_type"] = inner.model_type
    return made | {k: v for k, v in own.items() if not (isinstance(v, dict) and k in made)}


def committed() -> dict[str, tuple[str, str]]:
    """(experts, result) of every class as the page has them."""
    return {name: (experts, result) for name, experts, result in ROW.findall(PAGE.read_text())}


def written_for() -> str:
    """The version of transformers that the page speaks of."""
    return re.search(r"transformers (\d+\.\d+\.\d+)", PAGE.read_text())[1]


def row(opt: Any, name: str, folder: Path) -> tuple[str, str]:
    """(experts, result) of a class: every step of the way, or the first refusal.

    Raises:
        AssertionError: a step gave another result than it should.
        Exception: a step failed without a refusal.
    """
    if name in NOT_TRIED:
        return "", f"not tried: {NOT_TRIED[name]}"
    model = tiny(name)
    kinds = dict.fromkeys(
        type(m).__name__ for m in model.modules() if "Experts" in type(m).__name__
    )
    experts = ", ".join(f"`{kind}`" for kind in kinds)
    step = "quantize_experts"
    try:
        opt.integrations.quantize_experts(model)
        logits = _logits(model)
        assert relative_error(logits, _rounded(name, model)) < 1e-4
        step = "load_quantized"
        tiny(name).save_pretrained(folder / "dense")
        loaded = _load(opt, model, folder / "dense")
        assert relative_error(_logits(loaded), logits) < 1e-6
        step = "attach_lora"
        opt.integrations.attach_lora(model, r=2, lora_alpha=4)
        set_random_lora(model)
        _train(model)
        logits = _logits(model)
        step = "save_pretrained"
        model.save_pretrained(folder / "packed")
        loaded = _load(opt, model, folder / "packed")
        assert relative_error(_logits(loaded), logits) < 1e-6
        loaded = type(model).from_pretrained(folder / "packed", dtype=torch.float32)
        assert relative_error(_logits(loaded), logits) < 1e-6
    except ValueError as error:
        return experts, f"refused by `{step}`: {error}".replace("|", "\\|").replace("\n", " ")
    return experts, "works"


def page(rows: dict[str, tuple[str, str]], version: str) -> str:
    works = sum(result == "works" for _, result in rows.values())
    table = "\n".join(f"| `{name}` | {e} | {result} |" for name, (e, result) in rows.items())
    head = HEAD.format(version=version, count=len(rows), works=works)
    return f"{head}\n{HEADER}\n|---|---|---|\n{table}\n"


def _load(opt: Any, model: torch.nn.Module, folder: Path) -> torch.nn.Module:
    options = {"dtype": torch.float32, "device_map": "cpu", "model_class": type(model)}
    return opt.integrations.load_quantized(folder, **options)


def _logits(model: torch.nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(**inputs(model), use_cache=False).logits


def _rounded(name: str, quantized: torch.nn.Module) -> torch.Tensor:
    """Logits of transformers' own experts with the 4-bit weights decoded into them."""
    model = tiny(name)
    model.set_experts_implementation("eager")
    with torch.no_grad():
        for place, stack in quantized.named_modules():
            if type(stack).__name__ == "QuantizedExperts":
                model.get_parameter(place).copy_(stack.decode(dtype=torch.float32))
    return _logits(model)


def _train(model: torch.nn.Module) -> None:
    """Every factor, and nothing else, has a gradient."""
    output = model(**inputs(model), use_cache=False).logits
    output.square().mean().backward()
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    assert trained and all(".lora_" in name for name in trained)
    for name, parameter in trained.items():
        assert parameter.grad is not None and parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name
    model.zero_grad()


def main() -> None:
    import os
    import tempfile

    import tomllib
    from kernels import get_kernel

    repo = tomllib.loads((ROOT / "build.toml").read_text())["general"]["hub"]["repo-id"]
    os.environ["LOCAL_KERNELS"] = f"{repo}={ROOT}"
    opt = get_kernel(repo, version=1, backend="cpu", trust_remote_code=True)
    rows = {}
    for name in classes():
        with tempfile.TemporaryDirectory() as folder:
            rows[name] = row(opt, name, Path(folder))
    PAGE.write_text(page(rows, transformers.__version__))


if __name__ == "__main__":
    main()
