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
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..moe.quantized_experts import QuantizedExperts
from .experts import check_supported, experts_modules, first_projection
from .model_files import SINGLE, ModelFiles
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
        dtype: of everything that is not quantised.
        blocksize: elements per absmax.
        quant_type: "nf4" or "fp4".
        nested: quantise absmax too.
        strategy: of the products; see `moe.choose_strategy`.
        config: None for the checkpoint's own.
        model_class: with `_from_config`; None for AutoModelForCausalLM.

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
        read: set[str] = set()
        for prefix, experts in found.items():
            check_supported(experts, prefix)
            for target in (first_projection(experts), "down_proj"):
                read |= _quantize(files, experts, prefix, target, device, options)
        loaded = _load_dense(files, model, device, dtype, read)
    model.tie_weights()
    _check_complete(model, files, loaded)
    use_in_transformers(model)
    return model.eval()


def save_quantized(model: nn.Module, folder: str | Path) -> Path:
    """Write a model with quantised experts, its configuration included, for `load_quantized`.

    Args:
        model: of `load_quantized`.
        folder: made if it is missing.

    Returns:
        The file with the tensors. Tied weights are written once.
    """
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    seen: set[tuple] = set()
    tensors: dict[str, Tensor] = {}
    for name, tensor in model.state_dict().items():
        place = (tensor.data_ptr(), tuple(tensor.shape), tensor.stride())
        if tensor.numel() and place in seen:
            continue
        seen.add(place)
        tensors[name] = tensor.contiguous()
    save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
    model.config.save_pretrained(folder)
    return folder / SINGLE


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
    build = (model_class or transformers.AutoModelForCausalLM).from_config
    with _ParametersOnMeta(), torch.no_grad():
        return build(config, dtype=dtype)


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
    files: ModelFiles, model: nn.Module, device: torch.device, dtype: torch.dtype, read: set[str]
) -> set[str]:
    """Every other tensor, one at a time, into the place of the model's empty one; their names."""
    loaded: set[str] = set()
    prefix = model.base_model_prefix + "."
    for tensor in (*model.buffers(), *model.parameters()):
        if tensor.device.type != "meta":
            tensor.data = tensor.data.to(device)
    known = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name in files.names():
        if name in read:
            continue
        own = name if name in known else name.removeprefix(prefix)
        own = own if own in known else prefix + name
        if own not in known:
            raise ValueError(f"{files.source} has {name}, which {type(model).__name__} has not")
        value, old = files.read(name), known[own]
        if value.shape != old.shape:
            raise ValueError(
                f"{name} is {tuple(value.shape)} in {files.source}, the model has "
                f"{tuple(old.shape)}"
            )
        loaded.add(own)
        parent, _, leaf = own.rpartition(".")
        owner = model.get_submodule(parent)
        if leaf in owner._parameters:
            value = value.to(device, dtype) if value.is_floating_point() else value.to(device)
            owner._parameters[leaf] = nn.Parameter(value, requires_grad=old.requires_grad)
        else:
            owner._buffers[leaf] = value.to(device)
    return loaded


def _check_complete(model: nn.Module, files: ModelFiles, loaded: set[str]) -> None:
    """Refuse a model of which something was not in the files; tied weights count once."""
    packed = tuple(
        f"{name}." for name, part in model.named_modules() if isinstance(part, QuantizedExperts)
    )
    kept = model.state_dict().keys()
    entries = (*model.named_parameters(), *model.named_buffers())
    wanted = [name for name, _ in entries if name in kept and not name.startswith(packed)]
    missing = [name for name in wanted if name not in loaded]
    if missing:
        raise ValueError(
            f"{files.source} lacks {len(missing)} tensors of {type(model).__name__}: "
            f"{', '.join(missing[:5])}"
        )
