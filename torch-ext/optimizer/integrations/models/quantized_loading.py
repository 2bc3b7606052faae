"""Load a transformers model with its experts in 4 bits, quantised one by one as they are read.

The 16-bit stack of experts exists nowhere, neither on the host nor on the device: an expert is read
from its memory-mapped file, moved, quantised and dropped. Everything else keeps its 16 bits.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...moe.quantized.quantized_experts import QuantizedExperts
from .checkpoint_names import ModelNames, OneExpert, Source
from .experts import DEQUANTIZE, check_supported, experts_modules, put, why_no_experts
from .hf_quantizer import attach_described, stacks
from .model_files import ModelFiles
from .quantized_saving import is_described
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
    blocksize: int | None = None,
    quant_type: str = "nf4",
    nested: bool | None = None,
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
        blocksize: elements per scale; None for what is usual of the format, 64 for NF4 and FP4.
        quant_type: "nf4" or "fp4".
        nested: quantise the scales too; None for what is usual of the format, not for NF4 and FP4.
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
    options = {"blocksize": blocksize, "nested": nested}
    options = {name: value for name, value in options.items() if value is not None}
    options |= {"quant_type": quant_type, "strategy": strategy}
    with ModelFiles(source, revision=revision, local_files_only=local_files_only) as files:
        model = _skeleton(files, config, model_class, dtype)
        found = dict(experts_modules(model))
        if not found:
            raise ValueError(f"{why_no_experts(model)}; load it with from_pretrained")
        for prefix, experts in found.items():
            check_supported(experts, prefix)
        other = getattr(model.config, "quantization_config", None)
        if other is not None and not is_described(model.config):
            raise ValueError(f"{source} is quantised already, by {other}; {DEQUANTIZE}")
        if any(name.endswith("._extra_state") for name in files.names()):
            loaded = _take_quantized(files, model, device, dtype, strategy)
        else:
            loaded = _quantize(files, model, device, dtype, options)
    _tie(model, files, loaded)
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
    model: nn.Module,
    device: torch.device,
    dtype: torch.dtype,
    options: dict[str, Any],
) -> set[str]:
    """Read what from_pretrained reads, and quantise the experts on the way; the names that came."""
    dense = _Dense(files, model, device, dtype)
    places = {name: (experts, target) for name, experts, target in stacks(model)}
    for source in dense.names.sources(files.names()):
        if source.name in places:
            experts, target = places[source.name]
            shape = tuple(getattr(experts, target).shape)
            if source.per_expert(shape[0], files.shape):
                read = _experts(files, model, source, shape)
                stack = QuantizedExperts.from_experts(read, shape, device=device, **options)
                put(experts, target, stack)
                dense.loaded.add(source.name)
                continue
        if not dense.wanted(source):
            continue
        tensors = {p: [files.read(key) for key in keys] for p, keys in source.keys.items()}
        for name, value in source.convert(model, tensors).items():
            if name in places:
                experts, target = places[name]
                shape = tuple(getattr(experts, target).shape)
                _check_shape(name, value, shape, files)
                stack = QuantizedExperts.from_experts(value, shape, device=device, **options)
                put(experts, target, stack)
                dense.loaded.add(name)
            else:
                dense.set(name, value)
    return dense.loaded


def _experts(
    files: ModelFiles, model: nn.Module, source: Source, shape: tuple[int, int, int]
) -> Iterator[Tensor]:
    """The experts of a stack, one (N, K) at a time."""
    apart = any(len(keys) > 1 for keys in source.keys.values())
    for expert in range(shape[0]):
        tensors = {
            pattern: [files.read(keys[expert]) if apart else files.part(keys[0], expert)]
            for pattern, keys in source.keys.items()
        }
        converted = source.convert(OneExpert(model), tensors)[source.name]
        _check_shape(source.name, converted, (1, *shape[1:]), files)
        yield converted[0]
        del converted


def _take_quantized(
    files: ModelFiles, model: nn.Module, device: torch.device, dtype: torch.dtype, strategy: str
) -> set[str]:
    """Read what save_pretrained or save_quantized made of 4-bit experts; the names that came."""
    lora = model.config.quantization_config["lora"] if is_described(model.config) else None
    dense = _Dense(files, model, device, dtype)
    key_of = {dense.names.of(key): key for key in files.names()}
    taken: set[str] = set()
    for name, experts, target in list(stacks(model)):
        shape = tuple(getattr(experts, target).shape)
        fields = {key for key in key_of if key.startswith(f"{name}.")}
        state = {key: files.read(key_of[key]) for key in fields}
        if name in key_of:  # the packed bytes, under the name of the stack
            state[f"{name}.packed"] = files.read(key_of[name])
        stack = QuantizedExperts.from_state_dict(state, f"{name}.", strategy).to(device)
        if stack.stored != shape:
            raise ValueError(f"{name} holds experts {stack.stored}, the model has {shape}")
        put(experts, target, stack)
        taken |= fields | {name}
    if lora is not None:
        attach_described(model, lora)
        dense = _Dense(files, model, device, dtype)  # their tensors are the model's now
    for name, key in key_of.items():
        if name not in taken and dense.wanted(Source(name, keys={"": [key]})):
            dense.set(name, files.read(key))
    return dense.loaded | taken


class _Dense:
    """Puts tensors into the places of a model's empty ones.

    Args:
        files: the checkpoint, for messages.
        model: with parameters on the meta device.
        device: of the model.
        dtype: that the model is loaded in.
    """

    def __init__(
        self, files: ModelFiles, model: nn.Module, device: torch.device, dtype: torch.dtype
    ) -> None:
        self.files, self.model, self.device, self.dtype = files, model, device, dtype
        self.names = ModelNames(model)
        self.loaded: set[str] = set()
        for tensor in (*model.buffers(), *model.parameters()):
            if tensor.device.type != "meta":
                tensor.data = tensor.data.to(device)

    def wanted(self, source: Source) -> bool:
        """Whether the model has this; False for what its class says to leave out.

        Raises:
            ValueError: neither.
        """
        if source.name in self.names.tensors:
            return True
        for key in source.all_keys():
            if not self.names.ignored(source.name) and not self.names.ignored(key):
                kind = type(self.model).__name__
                raise ValueError(f"{self.files.source} has {key}, which {kind} has not")
        return False

    def set(self, name: str, value: Tensor) -> None:
        """Move a tensor to the device and the dtype of its place.

        Raises:
            ValueError: it has another shape.
        """
        old = self.names.tensors[name]
        _check_shape(name, value, tuple(old.shape), self.files)
        self.loaded.add(name)
        value = value.to(self.device)
        if value.is_floating_point():
            value = value.to(self.names.dtype(name, self.dtype))
        parent, _, leaf = name.rpartition(".")
        owner = self.model.get_submodule(parent)
        if leaf in owner._parameters:
            owner._parameters[leaf] = nn.Parameter(value, requires_grad=old.requires_grad)
        else:
            owner._buffers[leaf] = value


def _check_shape(name: str, value: Tensor, shape: tuple[int, ...], files: ModelFiles) -> None:
    if tuple(value.shape) != shape:
        raise ValueError(f"{name} is {tuple(value.shape)} in {files.source}, the model has {shape}")


def _tie(model: nn.Module, files: ModelFiles, loaded: set[str]) -> None:
    """Tie weights as from_pretrained does, then refuse a model of which something is missing."""
    packed = tuple(f"{name}." for name, _, _ in stacks(model))
    missing = {n for n in model.state_dict() if n not in loaded and not n.startswith(packed)}
    model.tie_weights(missing_keys=missing, recompute_mapping=False)
    lacking = [name for name, tensor in model.state_dict().items() if name in missing]
    if lacking:
        raise ValueError(
            f"{files.source} lacks {len(lacking)} tensors of {type(model).__name__}: "
            f"{', '.join(lacking[:5])}"
        )
