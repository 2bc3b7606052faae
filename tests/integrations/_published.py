"""Tiny checkpoints as others publish them: written by bitsandbytes' own code."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from ._models import build

# Multiples of 64, as in every model that is published: where a row is no multiple of the blocksize
# bitsandbytes decodes wrongly on CPUs with AVX512.
SIZES = {"hidden_size": 64, "head_dim": 32}
EXPERTS = {
    "qwen3_moe": {"moe_intermediate_size": 64},
    "mixtral": {"intermediate_size": 64},
    "deepseek_v3": {
        "moe_intermediate_size": 64,
        "intermediate_size": 64,
        "kv_lora_rank": 64,
        "v_head_dim": 32,
    },
    "gpt_oss": {"intermediate_size": 64},
}


def tiny(name: str, **changes: Any) -> torch.nn.Module:
    sizes = SIZES if name != "deepseek_v3" else {"hidden_size": 64}
    return build(name, dtype=torch.bfloat16, **sizes | EXPERTS[name] | changes)


def write(
    model: torch.nn.Module,
    folder: Path,
    quantization: dict[str, Any] | None,
    change: Callable[[str, Tensor], dict[str, Tensor]],
) -> Path:
    """The files of save_pretrained, every tensor of them changed to what replaces it."""
    model.save_pretrained(folder)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    changed = {k: v for name, tensor in tensors.items() for k, v in change(name, tensor).items()}
    save_file(changed, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = quantization
    (folder / "config.json").write_text(json.dumps(config))
    return folder


BNB = {
    "quant_method": "bitsandbytes",
    "load_in_4bit": True,
    "load_in_8bit": False,
    "_load_in_4bit": True,
    "_load_in_8bit": False,
    "bnb_4bit_quant_type": "nf4",
    "bnb_4bit_use_double_quant": True,
    "bnb_4bit_compute_dtype": "bfloat16",
    "bnb_4bit_quant_storage": "uint8",
}
LINEAR = re.compile(r"(_proj|\.w[123]|_proj_with_mqa|kv_b_proj|mlp\.gate)\.weight$")


def bnb_state(name: str, weight: Tensor, storage: torch.dtype = torch.uint8, **options: Any):
    """What a state dict of `Linear4bit` holds of a weight."""
    import bitsandbytes.functional as F

    packed, state = F.quantize_4bit(weight, quant_storage=storage, **options)
    return {name: packed, **{f"{name}.{k}": v for k, v in state.as_dict(packed=True).items()}}


def write_bnb(
    model: torch.nn.Module,
    folder: Path,
    *,
    nested: bool = True,
    quant_type: str = "nf4",
    storage: torch.dtype = torch.uint8,
    blocksize: int = 64,
) -> Path:
    """Every Linear in 4 bits, each expert's too, as transformers 4 has them."""
    options = {"compress_statistics": nested, "quant_type": quant_type, "blocksize": blocksize}

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not LINEAR.search(name):
            return {name: tensor}
        return bnb_state(name, tensor, storage, **options)

    return write(model, folder, BNB, change)


def bnb_decoded(tensors: dict[str, Tensor], name: str) -> Tensor:
    """By bitsandbytes, on the CPU."""
    import bitsandbytes.functional as F

    sides = {k.removeprefix(f"{name}."): v for k, v in tensors.items() if k.startswith(f"{name}.")}
    if not sides:
        return tensors[name]
    state = F.QuantState.from_dict(sides, device=torch.device("cpu"))
    return F.dequantize_4bit(tensors[name], state)
