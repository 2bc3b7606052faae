"""Tiny checkpoints by bitsandbytes' and transformers' own code, or of random bytes."""

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
    tensors = load_file(folder / "model.safetensors")
    changed = {k: v for name, tensor in tensors.items() for k, v in change(name, tensor).items()}
    return write_tensors(model, folder, quantization, changed)


def write_tensors(
    model: torch.nn.Module,
    folder: Path,
    quantization: dict[str, Any] | None,
    tensors: dict[str, Tensor],
) -> Path:
    """Files of a model with these tensors."""
    model.config.save_pretrained(folder)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
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
) -> Path:
    """Every Linear in 4 bits, each expert's too, as transformers 4 has them."""
    options = {"compress_statistics": nested, "quant_type": quant_type}

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


MXFP4 = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
}


def write_mxfp4(model: torch.nn.Module, folder: Path) -> Path:
    """gpt-oss as published: random codes, scales of the size that weights have."""
    generator = torch.Generator().manual_seed(4)

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return {name: tensor}
        experts, inputs, outputs = tensor.shape  # as the model has it
        size = (experts, outputs, inputs // 32)
        blocks = torch.randint(256, (*size, 16), generator=generator, dtype=torch.uint8)
        scales = torch.randint(119, 125, size, generator=generator, dtype=torch.uint8)
        return {f"{name}_blocks": blocks, f"{name}_scales": scales}

    return write(model, folder, MXFP4, change)


def mxfp4_decoded(tensors: dict[str, Tensor], name: str) -> Tensor:
    """By transformers, on the CPU, as the model has it."""
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    if f"{name}_blocks" not in tensors:
        return tensors[name]
    return convert_moe_packed_tensors(tensors[f"{name}_blocks"], tensors[f"{name}_scales"])


FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "dynamic",
    "fmt": "e4m3",
    "weight_block_size": [128, 128],
}
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True},
        }
    },
    "ignore": ["lm_head"],
}


def write_fp8(model: torch.nn.Module, folder: Path, config: dict[str, Any], block) -> Path:
    """Every Linear in e4m3, each expert's too; its scales for blocks of some rows and columns."""
    suffix = "_scale" if config is CHANNELS else "_scale_inv"

    def change(name: str, tensor: Tensor) -> dict[str, Tensor]:
        if not LINEAR.search(name) or name.endswith("mlp.gate.weight"):
            return {name: tensor}
        rows, columns = (size or side for size, side in zip(block, tensor.shape, strict=True))
        tall, wide = (-(-s // b) for s, b in zip(tensor.shape, (rows, columns), strict=True))
        pad = (0, wide * columns - tensor.shape[1], 0, tall * rows - tensor.shape[0])
        parts = torch.nn.functional.pad(tensor.float(), pad).view(tall, rows, wide, columns)
        scales = parts.abs().amax((1, 3)) / 448
        values = (parts / scales[:, None, :, None]).reshape(tall * rows, wide * columns)
        values = values[: tensor.shape[0], : tensor.shape[1]].to(torch.float8_e4m3fn)
        scale = {f"{name}{suffix}": scales if any(block) else scales.reshape(())}
        used = {f"{name.removesuffix('weight')}input_scale": torch.ones(())}
        return {name: values.contiguous(), **scale, **(used if not any(block) else {})}

    return write(model, folder, config, change)


def fp8_decoded(tensors: dict[str, Tensor], name: str) -> Tensor:
    """By transformers, which stretches a grid of scales over its matrix; else in blocks of 128."""
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    scales = tensors.get(f"{name}_scale_inv", tensors.get(f"{name}_scale"))
    if scales is None:
        return tensors[name]
    value = tensors[name]
    blocks = tuple(-(-side // 128) for side in value.shape)
    if tuple(scales.shape) == blocks and any(side % 128 for side in value.shape):
        spread = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        return (value.float() * spread[: value.shape[0], : value.shape[1]]).to(torch.bfloat16)
    return Fp8Dequantize(None)._dequantize_one(value, scales, torch.bfloat16)
