"""Load a transformers model with its experts packed, one by one as they are read.

The 16-bit stack of experts exists nowhere, neither on the host nor on the device: an expert is read
from its memory-mapped file, moved, quantised and dropped. One that the file holds quantised keeps
its bits. Everything else has 16 bits, decoded where the file has fewer.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...moe.quantized.expert_weights import Format, format_of
from ...moe.quantized.quantized_experts import QuantizedExperts
from .checkpoint_names import ModelNames, Source
from .experts import ATTACHED, DEQUANTIZE, pack, put, stacks, supported_experts
from .hf_quantizer import attach_described, check_one_device, is_described
from .prequantized_checkpoints import PACKINGS, PackedFiles
from .safetensors_reader import TRUE, ModelFiles
from .transformers import use_in_transformers

_logger = logging.getLogger(__name__)

OTHER_NAMES = {  # of what from_pretrained takes
    "torch_dtype": "it is called dtype",
    "load_in_4bit": "experts become NF4 without it",
    "quantization_config": "pass quant_type, blocksize and nested",
    "attn_implementation": "call model.set_attn_implementation(...) afterwards",
    "token": "log in with `hf auth login`, or set HF_TOKEN",
}


def placement(
    device_map: str | torch.device | Mapping[str, Any] | None = "auto",
    environ: Mapping[str, str] = os.environ,
) -> torch.device:
    """The one device of `load_quantized`'s `device_map`, and a log line that says why.

    transformers' "auto" would size the layers by their 16 bits and move some of them to the CPU.
    """
    if isinstance(device_map, Mapping):
        check_one_device(device_map)
        device_map = next(iter(device_map.values()))
    if device_map not in (None, "auto"):
        name = f"cuda:{device_map}" if isinstance(device_map, int) else device_map
        try:
            return torch.device(name)
        except (RuntimeError, TypeError) as error:
            raise ValueError(f"device_map={device_map!r:.99} names no device: {error}") from error
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
    dtype: torch.dtype | str = torch.bfloat16,
    blocksize: int | None = None,
    quant_type: str | None = None,
    nested: bool | None = None,
    strategy: str = "auto",
    config: Any = None,
    model_class: Any = None,
    **unknown: Any,
) -> nn.Module:
    """Build a transformers model whose experts are quantised while they are read.

    Args:
        source: a folder with safetensors, or a Hub id.
        revision: of a Hub id; name a commit to load the same files always.
        local_files_only: do not ask the network (`HF_HUB_OFFLINE=1` does the same).
        device_map: a device, or {"": device}, of all of the model, as quantised experts live whole
            on one. "auto" or None is the local rank's GPU, where there is one; under FSDP and
            ZeRO-3 it is the CPU, from which the wrapper moves the shards.
        dtype: of everything but the experts, and but for what the model keeps in float32; a dtype
            or its name, "auto" for the checkpoint's own.
        quant_type: "nf4", "fp4", "mxfp4" or "fp8"; None for that of the files, "nf4" where they are
            not quantised.
        blocksize: elements per scale of NF4 and FP4; None for 64.
        nested: quantise the scales of NF4 and FP4 too; None for not.
        strategy: of the products; see `moe.choose_strategy`.
        config: None for the checkpoint's own.
        model_class: a class of transformers for this configuration, or one of its auto classes;
            None for AutoModelForCausalLM.
        **unknown: refused, with what takes its place here.

    Returns:
        The model in eval mode, on one device, on our experts implementation. Experts that the files
        hold quantised are taken as they are: by `save_pretrained`, bitsandbytes in 4 bits, MXFP4 as
        of gpt-oss, or FP8 (e4m3). Other matrices are decoded to dtype.

    Raises:
        FileNotFoundError: there is no such checkpoint, or none in safetensors.
        TypeError: an unknown keyword, or a model_class that is none.
        ValueError: names or shapes of the files and of the model differ; the model has no experts;
            the files are quantised in another way, or in another than was asked for; or device_map
            names several devices, or none.
    """
    from transformers import AutoConfig, GenerationConfig

    for name in unknown:
        remedy = OTHER_NAMES.get(name, "what configures the model goes into config=")
        raise TypeError(f"load_quantized() got an unexpected keyword argument {name!r}; {remedy}")
    builders = ("from_config", "_from_config")  # of an auto class, of any other
    if model_class is not None and not any(hasattr(model_class, name) for name in builders):
        raise TypeError(
            f"model_class must be a class of transformers' models, got {model_class!r:.99}"
        )
    device = placement(device_map)
    wanted = {"quant_type": quant_type, "blocksize": blocksize, "nested": nested}
    wanted = {name: value for name, value in wanted.items() if value is not None}
    format_of(**wanted)  # raises before a file is read
    with ModelFiles(source, revision=revision, local_files_only=local_files_only) as files:
        if config is None:
            config = AutoConfig.from_pretrained(files.path("config.json").parent)
        dtype = _dtype(dtype, config)
        model = _skeleton(config, model_class, dtype)
        supported_experts(model)
        loading = _Loading(model, _matrices(files, model, device, dtype), wanted, strategy)
        if any(name.endswith("._extra_state") for name in files.names()):
            loading.read_saved()
        else:
            loading.read()
        loading.finish()
        if model.can_generate():
            with contextlib.suppress(FileNotFoundError):
                defaults = files.path("generation_config.json").parent
                model.generation_config = GenerationConfig.from_pretrained(defaults)
    use_in_transformers(model)
    return model.eval()


class _ParametersOnMeta(TorchFunctionMode):
    """Weights, which modules make by torch.empty, take no memory; computed buffers stay real."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def _dtype(dtype: torch.dtype | str, config: Any) -> torch.dtype:
    """A dtype by itself, by its name, or by "auto"; a ValueError for one that has no fractions."""
    given = dtype
    if dtype == "auto":
        dtype = getattr(config, "dtype", None) or torch.bfloat16
    dtype = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ValueError(f'dtype must be "auto", a floating torch.dtype or its name, got {given!r}')
    return dtype


def _skeleton(config: Any, model_class: Any, dtype: torch.dtype) -> nn.Module:
    """The model without its weights."""
    import transformers

    kind = model_class or transformers.AutoModelForCausalLM
    build = getattr(kind, "from_config", None) or kind._from_config  # only the auto classes have it
    with _ParametersOnMeta(), torch.no_grad():
        return build(config, dtype=dtype)


def _matrices(
    files: ModelFiles, model: nn.Module, device: torch.device, dtype: torch.dtype
) -> PackedFiles:
    """What somebody else may have quantised; the model, which will not be that, forgets it."""
    other = getattr(model.config, "quantization_config", None)
    if other is None or is_described(model.config):
        return PackedFiles(files, dtype, device)
    other = other if isinstance(other, dict) else other.to_dict()
    try:
        matrices = PACKINGS[other["quant_method"]](files, dtype, device, other)
    except (KeyError, TypeError, ValueError) as error:
        why = "" if isinstance(error, KeyError) else f": {error}"
        known = f"only {', '.join(PACKINGS)} are read"
        raise ValueError(
            f"{files.source} is quantised already, by {other}{why}; {known}; {DEQUANTIZE}"
        ) from error
    del model.config.quantization_config
    return matrices


class _Loading:
    """A model, its parameters on the meta device, and what of it has come from the files."""

    def __init__(
        self, model: nn.Module, files: PackedFiles, wanted: dict[str, Any], strategy: str
    ) -> None:
        self.model, self.files, self.wanted = model, files, wanted
        self.options = {"device": files.device, "strategy": strategy}
        self.names = ModelNames(model)
        self.stacks = {
            name: (experts, target, tuple(getattr(experts, target).shape))
            for name, experts, target in stacks(model)
        }
        self.loaded: set[str] = set()
        for tensor in (*model.buffers(), *model.parameters()):
            if tensor.device.type != "meta":
                tensor.data = tensor.data.to(files.device)

    def read(self) -> None:
        """Read what from_pretrained reads, and pack the experts on the way."""
        for source in self.names.sources(self.files.names()):
            if source.name in self.stacks and self._take_experts(source):
                self.loaded.add(source.name)
            elif self._has(source):
                read = {p: [self.files.read(k) for k in keys] for p, keys in source.keys.items()}
                for name, value in source.convert(self.model, read).items():
                    self._set(name, value)

    def read_saved(self) -> None:
        """Read what save_pretrained made of 4-bit experts."""
        files, config = self.files.files, self.model.config
        lora = config.quantization_config["lora"] if is_described(config) else None
        key_of = {self.names.of(key): key for key in files.names()}
        for name, (experts, target, shape) in self.stacks.items():
            fields = {key for key in key_of if key.startswith(f"{name}.")}
            state = {key: files.read(key_of[key]) for key in fields}
            if name in key_of:  # the packed bytes, under the name of the stack
                state[f"{name}.packed"] = files.read(key_of[name])
            stack = QuantizedExperts.from_state_dict(state, f"{name}.", self.options["strategy"])
            self._check_shape(name, stack, shape)
            put(experts, target, stack.to(self.files.device))
            self.loaded |= fields | {name}
        if lora is not None:
            attach_described(self.model, lora)
            self.names = ModelNames(self.model)  # with those of the adapters
        for name, key in key_of.items():
            if name not in self.loaded and self._has(Source(name, keys={"": [key]})):
                self._set(name, files.read(key))

    def finish(self) -> None:
        """Tie weights as from_pretrained does; refuse a model of which something is missing."""
        model, packed = self.model, tuple(f"{name}." for name in self.stacks)
        missing = {n for n in model.state_dict() if not n.startswith(packed)} - self.loaded
        model.tie_weights(missing_keys=missing, recompute_mapping=False)
        lacking = [name for name, tensor in model.state_dict().items() if name in missing]
        if lacking:
            raise ValueError(
                f"{self.files.source} lacks {len(lacking)} tensors of {type(model).__name__}: "
                f"{', '.join(lacking[:5])}"
            )

    def _take_experts(self, source: Source) -> bool:
        """Take a stack expert by expert; False if it can only be made as a whole."""
        experts, target, shape = self.stacks[source.name]
        packed = [key in self.files.parts for key in source.all_keys()]
        alone = source.per_expert(shape[0], self.files.shape)
        if any(packed):
            if not (all(packed) and alone and source.joins_rows()):
                raise ValueError(
                    f"{self.files.source} has {source.name} in {len(packed)} tensors, of which "
                    f"{sum(packed)} are packed; experts are taken as they are from packed "
                    f"tensors that lie below each other, from no others; {DEQUANTIZE}"
                )
            turned = self.files.by_outputs and getattr(experts, "is_transposed", False)
            put(experts, target, self._packed_stack(source, shape, turned))
        elif alone:
            each = self._dense_experts(source, shape)
            pack(experts, target, each, shape, **self.wanted, **self.options)
        return alone

    def _packed_stack(
        self, source: Source, shape: tuple[int, int, int], turned: bool
    ) -> QuantizedExperts:
        """A stack whose experts the files hold packed, seen the other way round if `turned`."""
        if turned:
            shape = shape[0], shape[2], shape[1]
        first = self.files.packed(*next(iter(source.of_expert(0, shape[0]).values())))
        where, format = f"{source.name} in {self.files.source}", first.format
        if any(tensor.ndim == 1 for tensor in first.tensors.values()):
            raise ValueError(
                f"{where} is {format.text}, whose blocks straddle experts of {first.shape}; "
                f"{DEQUANTIZE}"
            )
        other = {k: v for k, v in self.wanted.items() if format.options().get(k) != v}
        if other:
            raise ValueError(
                f"{', '.join(f'{k}={v!r}' for k, v in other.items())}: {where} is {format.text} "
                "and is taken as it is; leave that out"
            )
        experts = self._packed_experts(source, shape, format)
        options = self.options | format.options()
        return QuantizedExperts.from_packed(experts, shape, transposed=turned, **options)

    def _packed_experts(
        self, source: Source, shape: tuple[int, int, int], format: Format
    ) -> Iterator[dict[str, Tensor]]:
        """The tensors of one expert after another."""
        count, *sizes = shape
        checked = None

        def join(parts: dict[str, Tensor]) -> Tensor:
            """What transformers makes of one expert's matrices, or of one tensor of each."""
            stacked = {p: [part if source.apart else part[None]] for p, part in parts.items()}
            return source.convert_expert(self.model, stacked)

        for expert in range(count):
            places = source.of_expert(expert, count).items()
            found = {p: self.files.packed(*place) for p, place in places}
            formats = {format.text} | {matrix.format.text for matrix in found.values()}
            if len(formats) > 1:
                raise ValueError(f"{source.name} mixes {sorted(formats)} in {self.files.source}")
            shapes = {p: matrix.shape for p, matrix in found.items()}
            if shapes != checked:  # those of the expert before
                whole = {p: torch.empty(shape, device="meta") for p, shape in shapes.items()}
                self._check_shape(source.name, join(whole), (1, *sizes))
                checked = shapes
            names = format.layout(shape)
            yield {name: join({p: m.tensors[name] for p, m in found.items()}) for name in names}
            del found

    def _dense_experts(self, source: Source, shape: tuple[int, int, int]) -> Iterator[Tensor]:
        """The experts of a stack, one (N, K) at a time."""
        for expert in range(shape[0]):
            places = source.of_expert(expert, shape[0]).items()
            tensors = {p: [self.files.files.share(*place)] for p, place in places}
            converted = source.convert_expert(self.model, tensors)
            self._check_shape(source.name, converted, (1, *shape[1:]))
            yield converted[0]
            del converted

    def _has(self, source: Source) -> bool:
        """Whether the model has this; False for what its class leaves out; else a ValueError."""
        if source.name in self.names.tensors:
            return True
        for key in source.all_keys():
            if not self.names.ignored(source.name) and not self.names.ignored(key):
                remedy = ""
                if f".{ATTACHED}." in key:
                    remedy = "; save LoRA with save_peft_adapter, detach_lora, and save the model"
                kind = type(self.model).__name__
                raise ValueError(f"{self.files.source} has {key}, which {kind} has not{remedy}")
        return False

    def _set(self, name: str, value: Tensor) -> None:
        """Pack a stack; move another tensor to the device and the dtype of its place."""
        old = self.names.tensors[name]
        self._check_shape(name, value, tuple(old.shape))
        self.loaded.add(name)
        if name in self.stacks:
            experts, target, shape = self.stacks[name]
            pack(experts, target, value, shape, **self.wanted, **self.options)
            return
        value = value.to(self.files.device)
        if value.is_floating_point():
            value = value.to(self.names.dtype(name, self.files.dtype))
        parent, _, leaf = name.rpartition(".")
        owner = self.model.get_submodule(parent)
        if leaf in owner._parameters:
            owner._parameters[leaf] = nn.Parameter(value, requires_grad=old.requires_grad)
        else:
            owner._buffers[leaf] = value

    def _check_shape(
        self, name: str, value: Tensor | QuantizedExperts, shape: tuple[int, ...]
    ) -> None:
        if tuple(value.shape) != shape:
            found = tuple(value.shape)
            raise ValueError(f"{name} is {found} in {self.files.source}, the model has {shape}")
