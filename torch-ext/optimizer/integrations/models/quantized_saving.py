"""Save a transformers model with its experts in 4 bits, for `load_quantized`."""

from __future__ import annotations

import copy
import os
import tempfile
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from ...moe.quantized.quantized_experts import QuantizedExperts
from ...optimizers.groups.parameters import is_dtensor
from ..adapters import peft
from ..sharded_models import gathered_on_cpu, mesh_of, reshard, write_once
from .experts import ATTACHED, experts_modules, stacks
from .model_files import INDEX, QUANTIZED, SINGLE

METHOD = "quantized_experts"  # config.json's quantization_config.quant_method, of save_pretrained


def is_described(config: Any) -> bool:
    """Whether a model's configuration says that its experts are in 4 bits of ours."""
    own = getattr(config, "quantization_config", None)
    method = own.get("quant_method") if isinstance(own, dict) else getattr(own, "quant_method", "")
    return method == METHOD


def save_quantized(model: nn.Module, folder: str | Path) -> Path:
    """Write a model with quantised experts, its configuration included, for `load_quantized`.

    The file's name is not the one that transformers looks for: `from_pretrained` raises on the
    folder, where it would draw the experts at random. LoRA of `attach_lora` is left out;
    `save_peft_adapter` writes it. Every file is written beside its place first and then moved
    there, so that a failure leaves an earlier save as it was. Of a model under FSDP2 every rank
    must call it: tensors are gathered one by one, and one rank writes.

    Args:
        model: of `load_quantized` or after `quantize_experts`.
        folder: made if it is missing; it must hold no other checkpoint.

    Returns:
        The file with the tensors. Tied weights are written once.

    Raises:
        ValueError: what `load_quantized` could not read: experts that are not `QuantizedExperts`,
            other modules that are quantised or wrapped by PEFT; or the folder holds a checkpoint of
            save_pretrained. Nothing has been written then.
        OSError: on the other ranks, if the one that writes failed.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    check_model(model)
    reshard(model)
    mesh = mesh_of(model.parameters())
    write_once(mesh, lambda: _check_folder(folder))
    tensors = gathered_on_cpu(tensors_of(model, adapters=False), mesh)

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".saving-", dir=folder) as name:
            draft = Path(name)
            save_file(tensors, draft / QUANTIZED, metadata={"format": "pt"})
            config = copy.deepcopy(model.config)
            if is_described(config):
                del config.quantization_config  # of an earlier save_pretrained
            config.save_pretrained(draft)
            if getattr(model, "generation_config", None) is not None:
                model.generation_config.save_pretrained(draft)
            for file in sorted(draft.iterdir()):
                os.replace(file, folder / file.name)

    write_once(mesh, write)
    return folder / QUANTIZED


def check_model(model: nn.Module) -> None:
    """Raise ValueError unless `load_quantized` could read all of it."""
    kind = type(model).__name__
    if next(stacks(model), None) is None or not hasattr(model, "config"):
        raise ValueError(
            f"model ({kind}) is no transformers model with experts; save it with save_pretrained"
        )
    if getattr(model, "_hf_peft_config_loaded", False) or hasattr(model, "peft_config"):
        raise ValueError(f"model ({kind}) is wrapped by PEFT; save model.unload() and the adapter")
    if next(peft.wrappers(model), None) is not None:
        raise ValueError(f"experts of {kind} are wrapped by PEFT; save model.unload()")
    other = getattr(model.config, "quantization_config", None)
    if other is not None and not is_described(model.config):
        raise ValueError(
            f"model ({kind}) is quantised by {other} beside its experts, which load_quantized "
            "cannot read; load it with load_quantized and save that"
        )
    for name, experts, target in stacks(model):
        if not isinstance(experts._modules.get(target), QuantizedExperts):
            raise ValueError(
                f"{name} is not in 4 bits as QuantizedExperts; call quantize_experts first, or put "
                f"QuantizedExperts.from_quantized(expert_weight(experts, {target!r})) in the place "
                "of what bitsandbytes has parametrized"
            )


def _check_folder(folder: Path) -> None:
    """Raise ValueError if the folder holds a checkpoint that would be mistaken for this one."""
    for other in (INDEX, SINGLE):
        if (folder / other).exists():
            raise ValueError(
                f"{folder} holds another checkpoint ({other}); save to a folder of its own, or "
                "remove that checkpoint first"
            )


def tensors_of(model: nn.Module, *, adapters: bool = True) -> dict[str, Tensor]:
    """What goes into the file: every tensor once."""
    attached = tuple(f"{name}.{ATTACHED}." for name, _ in experts_modules(model))
    seen: set[tuple] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if is_dtensor(tensor):  # alike on all ranks, of which some may hold nothing of it
            place = (id(tensor),)
        else:
            place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        left_out = not adapters and name.startswith(attached)
        if left_out or (tensor.numel() and place in seen):
            continue
        seen.add(place)
        tensors[name] = tensor
    return tensors
