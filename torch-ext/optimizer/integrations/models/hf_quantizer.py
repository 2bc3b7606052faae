"""What transformers asks about experts in 4 bits, or with our LoRA: how they are saved and loaded.

`save_pretrained`, and with it Trainer and `push_to_hub`, asks `model.hf_quantizer` for the tensors;
`from_pretrained` asks the quantizer that config.json names. Both are transformers' own interfaces.
Over 16-bit experts config.json alone names the quantizer, which attaches the adapters again: the
tensors are those of `model.state_dict()`, or of the `state_dict` that a trainer has gathered.
In the file the packed bytes have the name that the 16-bit stack had: where this package is not
loaded, `from_pretrained` finds another shape there and raises; it would draw the experts at random
if it missed the name.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ...moe.quantized.quantized_experts import QuantizedExperts
from ..adapters import peft
from ..sharded_models import mesh_of
from .checkpoint_names import ModelNames, spelling
from .experts import ATTACHED, experts_modules, put, stacks

METHOD = "quantized_experts"  # config.json's quantization_config.quant_method


def is_described(config: Any) -> bool:
    """Whether a model's configuration says what its experts are in, or what LoRA is on them."""
    own = getattr(config, "quantization_config", None)
    method = own.get("quant_method") if isinstance(own, dict) else getattr(own, "quant_method", "")
    return method == METHOD


def mark(model: nn.Module) -> None:
    """Let every transformers model in `model` be saved with its 4-bit experts and its adapters."""
    from transformers import PreTrainedModel

    quantizer, config = register()
    described = set()
    for inner in model.modules():
        if not isinstance(inner, PreTrainedModel):
            continue
        other, lora = getattr(inner, "hf_quantizer", None), _adapters(inner)
        known = inner._load_state_dict_pre_hooks.values()
        if lora is not None and all(entry.hook is not _accept_file_names for entry in known):
            inner.register_load_state_dict_pre_hook(_accept_file_names)
        if isinstance(other, quantizer):
            continue
        first = id(inner.config) not in described  # which a whole model and its parts share
        described.add(id(inner.config))
        if _is_packed(inner) or (lora is not None and other is not None):
            inner.hf_quantizer = quantizer(config(experts={}), other=other)
        elif other is None and first:
            if lora is not None:
                inner.config.quantization_config = config(experts={}, lora=lora)
            elif is_described(inner.config):
                del inner.config.quantization_config


def _accept_file_names(model: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Trainer hands over the tensors of a checkpoint by the names that they have in the file.

    Of Mixtral these are older ones, and `load_state_dict` would pass over adapters among them.
    """
    adapters = [key for key in state if ATTACHED in key.split(".")]
    if not prefix and adapters:
        for source in ModelNames(model).sources(adapters):
            (key,) = source.all_keys()
            state[source.name] = state.pop(key)


def _is_packed(model: nn.Module) -> bool:
    """Whether some experts are in 4 bits of ours."""
    return any(isinstance(e._modules.get(t), QuantizedExperts) for _, e, t in stacks(model))


def attach_described(model: nn.Module, described: dict[str, Any]) -> None:
    """Attach the adapters that `_adapters` found, for their tensors to be loaded."""
    from ..adapters.lora import AdapterOptions, add_adapter, check_addable

    known = dict(experts_modules(model)).__contains__
    options = {spelling(model, n, known): targets for n, targets in described["options"].items()}
    each = [adapters for targets in options.values() for adapters in targets.values()]
    for adapter in dict.fromkeys(name for adapters in each for name in adapters):
        wanted = {
            name: {
                t: AdapterOptions(**own[adapter]) for t, own in targets.items() if adapter in own
            }
            for name, targets in options.items()
        }
        check_addable(model, adapter)
        add_adapter(model, adapter, wanted)
    _activate(model, described)


def _activate(model: nn.Module, described: dict[str, Any]) -> None:
    """Train the adapter that was active, and nothing else; nothing at all if none was."""
    from ..adapters.lora import set_lora

    model.requires_grad_(False)
    set_lora(model, described["active"], trainable=True)


def _adapters(model: nn.Module) -> dict[str, Any] | None:
    """Our LoRA on a model's experts, as `attach_described` takes it; None without any."""
    from ..adapters.lora import active_adapter, attached_modules

    options = {
        name: {
            target: {adapter: dataclasses.asdict(o) for adapter, o in adapters.items()}
            for target, adapters in attached.options.items()
        }
        for name, attached in attached_modules(model).items()
    }
    return {"active": active_adapter(model), "options": options} if options else None


def restore(model: nn.Module, experts: dict[str, Any], lora: dict[str, Any] | None) -> None:
    """Put empty 4-bit stacks, where there are any, and adapters into an empty model's experts."""
    places = {name: (module, target) for name, module, target in stacks(model)}
    known = places.__contains__
    wanted = {spelling(model, name, known): options for name, options in experts.items()}
    if experts and wanted.keys() != places.keys():
        own, other = sorted(places.keys() - wanted.keys()), sorted(wanted.keys() - places.keys())
        raise ValueError(
            f"the checkpoint lacks 4-bit experts {own[:3]} of {type(model).__name__}, and its "
            f"{other[:3]} have no place; load it with the class and the configuration it is of"
        )
    for name, options in wanted.items():
        module, target = places[name]
        stack = QuantizedExperts(**options, device="meta")
        if tuple(getattr(module, target).shape) != tuple(stack.shape):
            raise ValueError(
                f"the checkpoint holds {name} of shape {tuple(stack.shape)}, the configuration "
                f"asks for {tuple(getattr(module, target).shape)}"
            )
        stack._is_hf_initialized = True  # for the model's _init_weights, which fills parameters
        put(module, target, stack)
    if lora is not None:
        attach_described(model, lora)


def check_model(model: nn.Module) -> None:
    """Raise ValueError unless `from_pretrained` and `load_quantized` could read all of it."""
    kind = type(model).__name__
    if mesh_of(model.parameters()) is not None:
        raise ValueError(
            f"{kind} is sharded over ranks, and its experts are in 4 bits, which nothing trains; "
            "save the model before fully_shard, and what trains with save_peft_adapter"
        )
    if hasattr(model, "peft_config") or next(peft.wrappers(model), None) is not None:
        raise ValueError(f"model ({kind}) is wrapped by PEFT; save model.unload() and the adapter")
    other = getattr(model.config, "quantization_config", None)
    if other is not None and not is_described(model.config):
        raise ValueError(
            f"model ({kind}) is quantised by {other} beside its experts, and no file holds both; "
            "save LoRA with save_peft_adapter, or load the model with load_quantized and save that"
        )
    for name, experts, target in stacks(model):
        if not isinstance(experts._modules.get(target), QuantizedExperts):
            raise ValueError(
                f"{name} is not in 4 bits as QuantizedExperts; call quantize_experts, or put there "
                f"QuantizedExperts.from_quantized(expert_weight(experts, {target!r}))"
            )


def _check_loaded(model: nn.Module) -> None:
    """Raise ValueError if a stack or an adapter of the description was not loaded.

    Nothing fills an adapter that was missed: it has whatever lay in its memory.
    """
    packed = tuple(
        f"{n}." for n, e, t in stacks(model) if isinstance(e._modules.get(t), QuantizedExperts)
    )
    for name, tensor in model.named_parameters():
        ours = name.startswith(packed) or ATTACHED in name.split(".")
        if not ours or getattr(tensor, "_is_hf_initialized", False):
            continue
        if tensor.is_meta:
            raise ValueError(f"device_map keeps {name} on the disk; experts stay on a device")
        lacking = f"the checkpoint lacks {name}, which its config.json describes"
        remedy = "; if it was saved from a model without it, take quantization_config out of it"
        raise ValueError(lacking if packed else lacking + remedy)


def check_one_device(device_map: Mapping[str, Any]) -> None:
    """Raise ValueError unless a device_map names a single device."""
    devices = set(map(str, device_map.values()))
    if len(devices) != 1:
        raise ValueError(
            f"device_map spreads the model over {sorted(devices)}; quantised experts need one "
            "device per rank: name one, and start one process per GPU"
        )


def __getattr__(name: str) -> Any:
    """The classes by name, which pickle asks for."""
    for made in register() if name.startswith("Experts") else ():
        if made.__name__ == name:
            return made
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@functools.cache
def register() -> tuple[type, type]:
    """The quantizer and its configuration; from the first call on `from_pretrained` knows them."""
    from transformers.core_model_loading import WeightRenaming
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin

    @dataclasses.dataclass(kw_only=True, repr=False)
    class ExpertsConfig(QuantizationConfigMixin):
        """config.json's `quantization_config`: every stack's format, and the adapters on them."""

        experts: dict[str, Any]
        lora: dict[str, Any] | None = None
        quant_method: str = METHOD

    class ExpertsQuantizer(HfQuantizer):
        """4-bit experts in a model; `other` is the quantizer of everything else, or None."""

        def __init__(self, quantization_config: Any, other: Any = None, **options: Any) -> None:
            super().__init__(quantization_config, **options)
            self.other = other

        def is_serializable(self) -> bool:
            return True  # what cannot be written is refused below, with the way out

        @property
        def is_trainable(self) -> bool:
            return self.other is None or self.other.is_trainable

        @property
        def is_qat_trainable(self) -> bool:
            """Training needs no PEFT: all but the experts is dense, and they take attach_lora."""
            return self.other is None

        def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor] | None, dict]:
            if getattr(model, "_hf_peft_config_loaded", False):
                return None, {}  # the adapter alone is written
            if self.other is not None and not _is_packed(model) and _adapters(model) is None:
                return self.other.get_state_dict_and_metadata(model)
            check_model(model)
            model._weight_conversions = []  # the file has the model's own names
            experts = {name: e._modules[target].options() for name, e, target in stacks(model)}
            self.quantization_config = ExpertsConfig(experts=experts, lora=_adapters(model))
            model.config.quantization_config = self.quantization_config
            packed = {f"{name}.packed": name for name in experts}
            state = model.state_dict()
            return {packed.get(n, n): tensor.contiguous() for n, tensor in state.items()}, {}

        def validate_environment(self, device_map: Any = None, **_: Any) -> None:
            if self.quantization_config.experts and isinstance(device_map, dict):
                check_one_device(device_map)

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
            restore(model, self.quantization_config.experts, self.quantization_config.lora)

        def update_weight_conversions(self, conversions: list, model: Any = None) -> list:
            experts = self.quantization_config.experts
            renamed = [WeightRenaming(f"{re.escape(name)}$", f"{name}.packed") for name in experts]
            return renamed or conversions

        def _process_model_after_weight_loading(self, model: Any, **_: Any) -> None:
            from .transformers import use_in_transformers

            packed = list(stacks(model)) if self.quantization_config.experts else []
            _check_loaded(model)
            for _, experts, target in packed:
                experts._modules[target].requires_grad_(False)
            if packed:
                model.is_quantized = False  # it would keep half() and PEFT's input gradients away
            else:
                self.remove_quantization_config(model)  # and `mark` describes the adapters again
            if self.quantization_config.lora is not None:
                _activate(model, self.quantization_config.lora)
            use_in_transformers(model)

    for made in (ExpertsQuantizer, ExpertsConfig):
        made.__qualname__ = made.__name__  # found by `__getattr__` of this module
    register_quantization_config(METHOD)(ExpertsConfig)
    register_quantizer(METHOD)(ExpertsQuantizer)
    return ExpertsQuantizer, ExpertsConfig
