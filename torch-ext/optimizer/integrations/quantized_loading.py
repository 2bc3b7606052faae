"""Load a transformers model with its experts in 4 bits, quantised one by one as they are read.

The 16-bit stack of experts exists nowhere, neither on the host nor on the device: an expert is read
from its memory-mapped file, moved, quantised and dropped. Everything else keeps its 16 bits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from ..moe.quantized_experts import QuantizedExperts
from .checkpoint_names import ModelNames
from .experts import check_supported, experts_modules, first_projection
from .model_files import ModelFiles
from .quantize import put
from .transformers import use_in_transformers

_logger = logging.getLogger(__name__)

TRUE = ("1", "TRUE", "YES", "ON")


def placement(
    device_map: str | torch.device | Mapping[str, Any] | None = "auto",
    environ: Mapping[str, str] = os.environ,
) -> torch.device:
    """The one device that a rank's model goes to, and a log line that says why.

    Quantised experts live whole on one device. transformers' "auto" would size the layers by their
    16 bits and move some of them to the CPU, so it means the local rank's GPU here.

    Args:
        device_map: "auto" or None for that GPU; a device; or {"": device}.
        environ: variables of the launcher.

    Returns:
        The device. Under FSDP and ZeRO-3 "auto" is the CPU: there the wrapper moves the shards.

    Raises:
        ValueError: a map over several devices.
    """
    if isinstance(device_map, Mapping):
        devices = set(map(str, device_map.values()))
        if len(devices) != 1:
            raise ValueError(
                f"device_map spreads the model over {sorted(devices)}; quantised experts need one "
                'device per rank: pass device_map="auto" and start one process per GPU'
            )
        device_map = next(iter(device_map.values()))
    if device_map not in (None, "auto"):
        return torch.device(f"cuda:{device_map}" if isinstance(device_map, int) else device_map)
    if _shards(environ):
        chosen, reason = torch.device("cpu"), "FSDP or ZeRO-3 moves the shards itself"
    elif torch.cuda.is_available():
        rank = int(environ.get("LOCAL_RANK", 0))
        chosen, reason = torch.device("cuda", rank), f"local rank {rank}"
    else:
        chosen, reason = torch.device("cpu"), "there is no CUDA device"
    _logger.info("device_map=%r: the whole model goes to %s: %s", device_map, chosen, reason)
    return chosen


def _shards(environ: Mapping[str, str]) -> bool:
    """Whether the launcher says FSDP or DeepSpeed's ZeRO-3."""
    if environ.get("ACCELERATE_USE_FSDP", "").upper() in TRUE:
        return True
    deepspeed = environ.get("ACCELERATE_USE_DEEPSPEED", "").upper() in TRUE
    return deepspeed and environ.get("ACCELERATE_DEEPSPEED_ZERO_STAGE") == "3"


def load_quantized(
    source: str | Path,
    *,
    revision: str | None = None,
    local_files_only: bool = False,
    device_map: str | torch.device | Mapping[str, Any] | None = "auto",
    dtype: torch.dtype = torch.bfloat16,
    blocksize: int = 64,
    quant_type: str = "nf4",
    nested: bool = False,
    strategy: str = "auto",
    config: Any = None,
    model_class: Any = None,
) -> nn.Module:
    """Build a transformers model whose experts are quantised while they are read.

    Args:
        source: a folder with safetensors, or a Hub id.
        revision: of a Hub id; name a commit to load the same files always.
        local_files_only: do not ask the network (`HF_HUB_OFFLINE=1` does the same).
        device_map: see `placement`.
        dtype: of everything that is not quantised, but for what the model keeps in float32.
        blocksize: elements per absmax.
        quant_type: "nf4" or "fp4".
        nested: quantise absmax too.
        strategy: of the products; see `moe.choose_strategy`.
        config: None for the checkpoint's own.
        model_class: a class of transformers for this configuration, or one of its auto classes;
            None for AutoModelForCausalLM.

    Returns:
        The model in eval mode, on one device, on our experts implementation. Experts that the files
        hold quantised by `save_quantized` are taken as they are.

    Raises:
        ValueError: names or shapes of the files and of the model differ; the model has no experts;
            or what `placement` refuses.
    """
    device = placement(device_map)
    options = {
        "blocksize": blocksize,
        "quant_type": quant_type,
        "nested": nested,
        "strategy": strategy,
    }
    with ModelFiles(source, revision=revision, local_files_only=local_files_only) as files:
        model = _skeleton(files, config, model_class, dtype)
        found = dict(experts_modules(model))
        if not found:
            raise ValueError(
                f"{type(model).__name__} has no experts of transformers' experts interface; load "
                "dense models with from_pretrained"
            )
        names = ModelNames(model)
        files.rename(names.of)
        read: set[str] = set()
        for prefix, experts in found.items():
            check_supported(experts, prefix)
            for target in (first_projection(experts), "down_proj"):
                read |= _quantize(files, experts, prefix, target, device, options)
        loaded = _load_dense(files, model, names, device, dtype, read)
    _tie(model, files, names.tensors.keys() - loaded)
    _load_generation_config(files, model)
    use_in_transformers(model)
    return model.eval()


class _ParametersOnMeta(TorchFunctionMode):
    """Weights, which modules make by torch.empty, take no memory; computed buffers stay real."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _skeleton(files: ModelFiles, config: Any, model_class: Any, dtype: torch.dtype) -> nn.Module:
    """The model without its weights."""
    import transformers

    if config is None:
        folder = files.path("config.json").parent
        config = transformers.AutoConfig.from_pretrained(folder)
    kind = model_class or transformers.AutoModelForCausalLM
    build = getattr(kind, "from_config", None) or kind._from_config  # only the auto classes have it
    with _ParametersOnMeta(), torch.no_grad():
        return build(config, dtype=dtype)


def _load_generation_config(files: ModelFiles, model: nn.Module) -> None:
    """The checkpoint's defaults of `generate`, where it has some."""
    from transformers import GenerationConfig

    try:
        path = files.path("generation_config.json")
    except FileNotFoundError:
        return
    if model.can_generate():
        model.generation_config = GenerationConfig.from_pretrained(path.parent)


def _quantize(
    files: ModelFiles,
    experts: nn.Module,
    prefix: str,
    target: str,
    device: torch.device,
    options: dict[str, Any],
) -> set[str]:
    """Put 4-bit experts in the place of a parameter; returns the names that were read."""
    shape = tuple(getattr(experts, target).shape)
    saved = f"{prefix}.{target}."
    names = {name for name in files.names() if name.startswith(saved)}
    if f"{saved}_extra_state" in names:
        state = {name: files.read(name) for name in names}
        module = QuantizedExperts.from_state_dict(state, saved, options["strategy"]).to(device)
        if module.stored != shape:
            raise ValueError(f"{saved[:-1]} holds experts {module.stored}, the model has {shape}")
    else:
        names = set(files.experts_names(prefix, target, shape[0]))
        experts_read = files.experts(prefix, target, shape)
        module = QuantizedExperts.from_experts(experts_read, shape, device=device, **options)
    put(experts, target, module)
    return names


def _load_dense(
    files: ModelFiles,
    model: nn.Module,
    names: ModelNames,
    device: torch.device,
    dtype: torch.dtype,
    read: set[str],
) -> set[str]:
    """Every other tensor, one at a time, into the place of the model's empty one; their names."""
    loaded: set[str] = set()
    for tensor in (*model.buffers(), *model.parameters()):
        if tensor.device.type != "meta":
            tensor.data = tensor.data.to(device)
    for name in files.names():
        if name in read:
            continue
        if name not in names.tensors:
            if names.ignored(name):
                continue
            raise ValueError(f"{files.source} has {name}, which {type(model).__name__} has not")
        value, old = files.read(name), names.tensors[name]
        if value.shape != old.shape:
            raise ValueError(
                f"{name} is {tuple(value.shape)} in {files.source}, the model has "
                f"{tuple(old.shape)}"
            )
        loaded.add(name)
        value = value.to(device)
        if value.is_floating_point():
            value = value.to(names.dtype(name, dtype))
        parent, _, leaf = name.rpartition(".")
        owner = model.get_submodule(parent)
        if leaf in owner._parameters:
            owner._parameters[leaf] = nn.Parameter(value, requires_grad=old.requires_grad)
        else:
            owner._buffers[leaf] = value
    return loaded


def _tie(model: nn.Module, files: ModelFiles, missing: set[str]) -> None:
    """Tie weights as from_pretrained does, then refuse a model of which something is missing."""
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    lacking = [name for name in model.state_dict() if name in missing]
    if lacking:
        raise ValueError(
            f"{files.source} lacks {len(lacking)} tensors of {type(model).__name__}: "
            f"{', '.join(lacking[:5])}"
        )
