"""One adapter on experts, attention and whole modules: PEFT injects it, our kernels run experts.

PEFT changes a model in place, and may refuse half-way; `undone_on_failure` puts every module back
as it was. All functions take the PeftModel or the model inside it. PEFT is imported when a function
is called.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
import re
import warnings
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ...moe.lora import check_factor_dtype
from ...moe.quantized.expert_weights import check_module
from ...optimizers.groups.parameters import WRAPPERS, components, is_dtensor
from ..models.experts import ATTACHED, experts_modules, is_experts, stacks
from ..models.quantize_in_memory import quantize_experts
from ..models.transformers import use_in_transformers
from . import peft
from .adapter_config import PLAIN, AdapterOptions, ends, plain

PREFIX = "base_model.model."  # of every key that PEFT writes
# What a LoraConfig may say: PEFT does it for experts as for other modules.
HONOURED = {
    *("r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "init_lora_weights"),
    *("target_modules", "target_parameters", "modules_to_save", "exclude_modules"),
    *("task_type", "peft_type", "peft_version", "auto_mapping", "inference_mode", "revision"),
    *("base_model_name_or_path", "ensure_weight_tying", "runtime_config"),
}
INITS = (True, False, "gaussian")  # the others decompose the weight of a Linear


def config_of(model: nn.Module, peft_config: Any, options: dict[str, Any]) -> Any:
    """The LoraConfig of what `attach_lora` was given: a copy of `peft_config`, or of `options`."""
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise ImportError(
            "target_modules, modules_to_save and peft_config are PEFT's work, which is not "
            "installed: pip install peft; LoRA on the experts alone needs none of them"
        ) from error
    if peft_config is None:
        causal = type(model).__name__.endswith("ForCausalLM")
        modules = options["target_modules"] or []  # None would be the model type's attention
        kind = "CAUSAL_LM" if causal else None
        config = LoraConfig(**options | {"target_modules": modules, "task_type": kind})
    elif isinstance(peft_config, LoraConfig):
        config = copy.deepcopy(peft_config)
    else:
        raise TypeError(f"peft_config must be a peft.LoraConfig, got {peft_config!r:.99}")
    _check_options(config, "peft_config")
    if config.target_parameters is None:
        config.target_parameters = _both_projections(model)
    _exclude_stacks(model, config)
    return config


def _check_options(config: Any, source: str) -> None:
    """Raise ValueError if PEFT would refuse a configuration on experts, or hold it for others."""
    AdapterOptions(config.r, config.lora_alpha, config.use_rslora)  # raises
    default = type(config)()
    others = {
        field.name: value
        for field in dataclasses.fields(config)
        if field.name not in HONOURED
        and (value := getattr(config, field.name)) != getattr(default, field.name)
        and value not in PLAIN.get(field.name, ())
    }
    if config.init_lora_weights not in INITS:
        others["init_lora_weights"] = config.init_lora_weights
    if others:
        raise ValueError(f"{source}: LoRA on experts has no support for {others}; leave it out")
    if config.target_parameters is not None and not config.target_parameters:
        raise ValueError(
            f"{source}: nothing to put LoRA on: target_parameters is empty; None means both"
        )


def _exclude_stacks(model: nn.Module, config: Any) -> None:
    """Keep PEFT from our 4-bit stacks where `target_modules` has their name too: "down_proj"."""
    targets, excluded = config.target_modules or (), config.exclude_modules or ()
    packed = {plain(name) for name, experts, target in stacks(model) if target in experts._modules}
    hit = {s for s in packed if isinstance(targets, str) or any(ends(s, t) for t in targets)}
    if hit and not isinstance(excluded, str):
        config.exclude_modules = {*excluded, *(".".join(s.split(".")[-2:]) for s in hit)}


def _both_projections(model: nn.Module) -> list[str]:
    """Names by which PEFT finds the projections of all experts."""
    names: dict[str, None] = {}
    for name, experts, _ in stacks(model):
        computed = hasattr(experts, "parametrizations")  # PEFT goes by their whole names alone
        names[plain(name) if computed else ".".join(plain(name).split(".")[-2:])] = None
    return list(names)


def attach(
    model: nn.Module, config: Any, adapter: str, *, quantize: str | None, dtype: torch.dtype
) -> nn.Module:
    """Inject an adapter, and run its part on the experts on our kernels.

    An adapter that PEFT has put on other modules alone is extended to the experts. Arguments,
    result and errors are those of `attach_lora`; `config` is of `config_of`.
    """
    _check_addition(model, config, adapter)
    _check_modules(model, config)
    with undone_on_failure(model, quantized=quantize is not None):
        wrapped = _inject(model, config, adapter, dtype)
        if quantize is not None:
            quantize_experts(model, quantize)
            _exclude_stacks(model, configurations(wrapped)[adapter])  # for who loads the file
        use_in_transformers(wrapped)
    return wrapped


def _check_modules(model: nn.Module, config: Any) -> None:
    """Raise ValueError for a name that no module has, which PEFT passes over beside others.

    Whole modules with experts in them, too, which would have LoRA and train themselves.
    """
    names = [plain(name) for name, _ in _unwrapped(model).named_modules()]
    for key in ("target_modules", "modules_to_save"):
        wanted = getattr(config, key) or ()
        if isinstance(wanted, str):
            try:
                re.compile(wanted)
            except re.error as error:
                raise ValueError(f"{key}={wanted!r:.99} is no pattern: {error}") from error
            continue
        missed = [one for one in sorted(wanted) if not any(ends(name, one) for name in names)]
        if missed:
            raise ValueError(
                f"{key}: {missed} are names of no modules; a model's experts are stacks that have "
                "LoRA without being named here, so name the other modules alone"
            )
    whole = config.modules_to_save or ()
    if isinstance(whole, str):  # PEFT would take its letters for names
        raise ValueError(f"modules_to_save must be a sequence of names, got {whole!r:.99}")
    stacked = [f"{plain(name)}." for name, _ in experts_modules(model)]
    for one in sorted(whole):
        if any(s.startswith(f"{name}.") for s in stacked for name in names if ends(name, one)):
            raise ValueError(
                f"modules_to_save: {one!r} has experts in it, which have LoRA and are not trained "
                "whole; name the router, 'lm_head' and other modules beside them"
            )


def _check_addition(model: nn.Module, config: Any, adapter: str) -> None:
    """Raise ValueError if an adapter cannot stand beside what is in the model."""
    configs = configurations(model)
    kinds = [
        str(own.peft_type).rpartition(".")[2] for own in configs.values() if own.peft_type != "LORA"
    ]
    if kinds or (not configs and peft.first_layer(model) is not None):
        raise ValueError(
            f"PEFT has put {(kinds or [peft.first_layer(model)])[0]} into this model, and experts "
            "can have LoRA alone; call attach_lora on model.unload()"
        )
    attached = [name for name, experts in experts_modules(model) if ATTACHED in experts._modules]
    if attached:
        raise ValueError(
            f"{attached[0]} has LoRA that attach_lora put on the experts alone; detach_lora(model) "
            "first, then name everything that shall train in one call"
        )
    wrapped = peft.wrapped_parameters(model)
    taken = {part for name, _ in model.named_modules() for part in name.split(".")}
    if adapter in taken and adapter not in configs:
        raise ValueError(f"adapter_name={adapter!r} is part of a module's name; take another")
    if adapter in configs:
        if adapter in wrapped or config.target_modules or config.modules_to_save:
            raise ValueError(
                f"adapter {adapter!r} is attached already; give the new one another name"
            )
        _check_options(
            dataclasses.replace(configs[adapter], target_parameters=None), f"adapter {adapter!r}"
        )
        if config.rank_pattern or config.alpha_pattern:
            raise ValueError(
                f"adapter {adapter!r} is extended to the experts, with one r and one lora_alpha; "
                "leave rank_pattern and alpha_pattern out, or give the new adapter another name"
            )
        if configs[adapter].use_rslora != config.use_rslora:
            raise ValueError(
                f"use_rslora={config.use_rslora}: adapter {adapter!r} has another for all its parts"
            )
    places = [plain(name) for name, _, _ in stacks(model)]
    wanted = {p for p in places if any(ends(p, name) for name in config.target_parameters)}
    for other, found in wrapped.items():
        if (found := found.intersection(places)) and found != wanted:
            raise ValueError(
                f"PEFT wants all adapters of a model on the same target_parameters: {other!r} is "
                f"on {sorted(found)[:2]}, {adapter!r} would be on {sorted(wanted)[:2]}"
            )


def _inject(model: nn.Module, config: Any, adapter: str, dtype: torch.dtype) -> nn.Module:
    """Have PEFT put an adapter into a model; what was active stays so."""
    from peft import PeftModel, get_peft_model, inject_adapter_in_model

    for _, experts in experts_modules(model):
        experts.named_parameters = peft.ParameterListing(experts)  # with stacks that are in 4 bits
    before = {id(parameter): parameter.requires_grad for parameter in model.parameters()}
    configs, active, whole = configurations(model), active_adapter(model), _unwrapped(model)
    with warnings.catch_warnings():
        # Of a second adapter, which is what was asked for, and of patterns that PEFT itself adds.
        for message in ("Already found a `peft_config`", "The following .*_pattern keys did not"):
            warnings.filterwarnings("ignore", message=message)
        if not configs:
            model = get_peft_model(model, config, adapter_name=adapter)
        elif adapter not in configs and isinstance(whole, PeftModel):
            whole.add_adapter(adapter, config)
        else:
            entry = _joined(configs[adapter], config) if adapter in configs else config
            inner = whole.get_base_model() if isinstance(whole, PeftModel) else whole
            inject_adapter_in_model(config, inner, adapter)
            configs[adapter] = entry
            if active is not None:
                set_adapter(model, active)
                for parameter in model.parameters():  # PEFT has made the other one train
                    parameter.requires_grad_(before.get(id(parameter), adapter == active))
    for name, parameter in model.named_parameters():
        if id(parameter) not in before and ".lora_" in name:
            parameter.data = parameter.data.to(dtype)
    return model


def _joined(own: Any, experts: Any) -> Any:
    """The configuration of an adapter with that of its part on the experts."""
    joined = copy.deepcopy(own)
    joined.target_parameters = {*(own.target_parameters or ()), *experts.target_parameters}
    names = [re.escape(name) for name in sorted(experts.target_parameters)]  # first match counts
    joined.rank_pattern = dict.fromkeys(names, experts.r) | own.rank_pattern
    joined.alpha_pattern = dict.fromkeys(names, experts.lora_alpha) | own.alpha_pattern
    return joined


@contextlib.contextmanager
def undone_on_failure(model: nn.Module, *, quantized: bool = False) -> Iterator[None]:
    """Put every module, and what trains, back as it was if the block raises.

    With `quantized` what lies in the experts is left as it is: their stacks may be in 4 bits by
    then, one by one, and the wide ones are gone.
    """
    modules = [m for m in model.modules() if not (quantized and is_experts(m))]
    states = [(module, dict(vars(module))) for module in modules]
    values = (value for _, state in states for value in state.values())
    held = {id(value): value for value in values if isinstance(value, (dict, list, set))}
    contents = [(container, copy.copy(container)) for container in held.values()]
    # no references: a stack that is in 4 bits by then must not be kept alive here
    flags = [(weakref.ref(parameter), parameter.requires_grad) for parameter in model.parameters()]
    try:
        yield
    except BaseException:
        for module, state in states:
            vars(module).clear()
            vars(module).update(state)
        for container, content in contents:
            container.clear()
            (container.extend if isinstance(container, list) else container.update)(content)
        for reference, flag in flags:
            if (parameter := reference()) is not None:
                parameter.requires_grad_(flag)
        raise


@contextlib.contextmanager
def _flags_kept(model: nn.Module) -> Iterator[None]:
    """Leave what trains as it is, which PEFT sets with every switch."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    yield
    for parameter, flag in before:
        parameter.requires_grad_(flag)


def _unwrapped(model: nn.Module) -> nn.Module:
    """The model inside of what torch.compile and data parallelism put around it."""
    while len(model._modules) == 1 and model._modules.keys() <= {*WRAPPERS, "module"}:
        (model,) = model._modules.values()
    return model


def configurations(model: nn.Module) -> dict[str, Any]:
    """PEFT's own dictionary of LoraConfigs by adapter; an empty one if there is none."""
    return next(peft.config_dicts(model), {})


def is_injected(model: nn.Module) -> bool:
    """Whether PEFT has put layers into a model; TypeError for what is no model."""
    check_module(model)
    return any(peft.is_layer(module) for module in model.modules())


def layers(model: nn.Module) -> list[tuple[str, Any]]:
    """What PEFT put in the place of modules, by name."""
    return [(n, m) for n, m in model.named_modules() if n and peft.is_layer(m)]


def adapter_of(parameter: str) -> str | None:
    """The adapter that a parameter belongs to, PEFT's or ours, by its name."""
    parts = parameter.split(".")
    for kind, name in itertools.pairwise(parts):
        if kind.startswith("lora_") or kind == "modules_to_save":
            return name
    return None


def active_adapter(model: nn.Module) -> str | None:
    """The adapter in use, enabled or not; None if PEFT has put none into the model."""
    found = (name for _, layer in layers(model) for name in layer.active_adapters)
    return next(found, None)


def set_adapter(model: nn.Module, adapter: str) -> None:
    """Use another adapter; what trains is left as it is."""
    from peft import PeftModel
    from peft.functional import set_adapter as switch

    whole = _unwrapped(model)
    with _flags_kept(model):
        if isinstance(whole, PeftModel):
            whole.set_adapter(adapter)
        else:
            switch(whole, adapter)


def enable(model: nn.Module, enabled: bool) -> None:
    """Switch all adapters on or off; what trains is left as it is."""
    with _flags_kept(model):
        for _, layer in layers(model):
            layer.enable_adapters(enabled)


def merged_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """The layers, by name, whose adapter is part of the weights now."""
    return [(name, layer) for name, layer in layers(model) if layer.merged_adapters]


@torch.no_grad()
def merge(model: nn.Module, *, keep_on: torch.device | str | None) -> None:
    """Add the active adapter to the weights, by PEFT's arithmetic; see `merge_lora`."""
    work = []
    for name, layer in layers(model):
        factors = [
            parameter
            for n, parameter in layer.named_parameters()
            if not n.startswith("base_layer.") and adapter_of(n) in layer.active_adapters
        ]
        if not hasattr(layer, "merge") or not factors:
            continue
        if layer.disable_adapters:
            raise ValueError(f"the adapter of {name} is switched off; enable_lora(model) first")
        weight = _weight(name, layer)
        if not all(factor.isfinite().all() for factor in factors):
            raise ValueError(f"the adapter of {name} has NaN or inf; nothing was merged")
        work.append((layer, weight))
    if not work:
        raise ValueError("no adapter is active; attach_lora or set_lora first")
    try:
        for layer, weight in work:
            layer.weight_before_merge = weight.detach().to(keep_on or weight.device, copy=True)
            layer.merge()
    except BaseException:
        for layer, weight in work:
            kept = vars(layer).pop("weight_before_merge", None)
            if kept is not None:
                layer.merged_adapters.clear()
                weight.copy_(kept)
        raise


def _weight(name: str, layer: Any) -> Tensor:
    """The tensor that a layer's adapter is merged into."""
    base = layer.get_base_layer()
    target = getattr(layer, "parameter_name", "weight")
    weight = base._parameters.get(target)
    if weight is None or not weight.is_floating_point() or weight.element_size() < 2:
        raise ValueError(
            f"{name} ({type(base).__name__}) holds {target} in few bits: an adapter cannot be "
            "merged into it without rounding it away; keep it attached, or load the model in 16 "
            "bits to merge"
        )
    if is_dtensor(weight):
        raise ValueError(
            f"{name} is sharded over ranks, where PEFT does not merge; save_peft_adapter, load the "
            "model in one process and merge there"
        )
    return weight


@torch.no_grad()
def unmerge(model: nn.Module) -> None:
    """Put the weights back as they were before `merge`."""
    for name, layer in merged_layers(model):
        layer.unmerge()
        kept = vars(layer).pop("weight_before_merge", None)
        if kept is not None:
            _weight(name, layer).copy_(kept)


def detach(model: nn.Module) -> nn.Module:
    """Take PEFT's layers out again; what is merged stays, whole modules that were trained too."""
    whole = _unwrapped(model)
    inner = whole.get_base_model() if hasattr(whole, "get_base_model") else whole
    merged = merged_layers(inner)
    done: list[str] = []
    for name, layer in layers(inner):
        if name.startswith(tuple(f"{outer}." for outer in done)):
            continue
        done.append(name)
        if hasattr(layer, "get_base_layer"):
            module = peft.base_of(layer) if peft.is_wrapper(layer) else layer.get_base_layer()
        else:
            trained = getattr(layer, "modules_to_save", {})
            names = [n for n in layer.active_adapters if merged and n in trained]
            module = trained[names[0]] if names else layer.original_module
        parent, _, child = name.rpartition(".")
        setattr(inner.get_submodule(parent), child, module)
    for module in inner.modules():
        for key in ("peft_config", "_hf_peft_config_loaded"):
            vars(module).pop(key, None)
    return inner


def contents(model: nn.Module, adapter: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and configuration of an adapter, as PEFT writes them."""
    from peft import get_peft_model_state_dict

    # By default PEFT asks the Hub for the base model, on every rank, to compare vocabularies.
    found = get_peft_model_state_dict(
        _unwrapped(model), adapter_name=adapter, save_embedding_layers=False
    )
    names = {key: ".".join(components(key)) for key in found}  # of compiled layers, too
    tensors = {PREFIX + names[key].removeprefix(PREFIX): found[key] for key in found}
    config = configurations(model)[adapter].to_dict() | {"inference_mode": True}
    return tensors, {k: sorted(v) if isinstance(v, set) else v for k, v in config.items()}


def load(
    model: nn.Module, config: dict[str, Any], tensors: dict[str, Tensor], adapter: str, file: Any
) -> nn.Module:
    """Inject the adapter of a file, frozen, with its tensors, whose roles are those of PEFT today.

    A ValueError says that it does not fit the model; nothing has changed then.
    """
    from peft import LoraConfig

    fields = {field.name for field in dataclasses.fields(LoraConfig)} & HONOURED
    fields -= {"peft_version", "peft_type", "auto_mapping", "runtime_config", "init_lora_weights"}
    options = {key: value for key, value in config.items() if key in fields and value is not None}
    options |= {"target_modules": options.get("target_modules", []), "inference_mode": False}
    own = config_of(model, LoraConfig(**options), {})
    dtype = _check_tensors(config, tensors, file)
    _check_addition(model, own, adapter)
    flags = {id(parameter): parameter.requires_grad for parameter in model.parameters()}
    with undone_on_failure(model):
        wrapped = _inject(model, own, adapter, dtype)
        expected, _ = contents(wrapped, adapter)
        sizes = [{k: tuple(t.shape) for k, t in one.items()} for one in (tensors, expected)]
        wrong = sorted({key for key, _ in sizes[0].items() ^ sizes[1].items()})
        if wrong:
            there, here = (one.get(wrong[0], "missing") for one in sizes)
            raise ValueError(
                f"{file} does not fit the model: {wrong[0]} is {there} there, {here} here "
                f"({len(wrong)} such tensors)"
            )
        with torch.no_grad():
            for key, place in expected.items():  # PEFT would rename the keys of some classes
                place.copy_(tensors[key])
        use_in_transformers(wrapped)
    for parameter in wrapped.parameters():
        parameter.requires_grad_(flags.get(id(parameter), False))
    return wrapped


def _check_tensors(config: dict[str, Any], tensors: dict[str, Tensor], file: Any) -> torch.dtype:
    """The dtype of a file's factors, or ValueError where ranks or alphas do not fit them.

    For a rank that is larger than all of them PEFT would take the memory first.
    """
    dtype = dtype_of(tensors, file)
    largest = max(max(t.shape, default=0) for key, t in tensors.items() if ".lora_" in key)
    ranks = [config["r"], *(config.get("rank_pattern") or {}).values()]
    alphas = [config["lora_alpha"], *(config.get("alpha_pattern") or {}).values()]
    try:
        for r, alpha in [(r, 1.0) for r in ranks] + [(1, alpha) for alpha in alphas]:
            AdapterOptions(r, alpha)
    except ValueError as error:
        raise ValueError(f"the configuration of {file}: {error}") from error
    if (r := max(ranks)) > largest:
        raise ValueError(f"{file} holds no factor of rank {r}, which its configuration names")
    return dtype


def dtype_of(tensors: dict[str, Tensor], file: Any) -> torch.dtype:
    """The one dtype of a file's factors; ValueError for several, or for one that cannot train."""
    dtypes = {tensor.dtype for key, tensor in tensors.items() if ".lora_" in key}
    if len(dtypes) != 1:
        raise ValueError(f"{file} mixes {sorted(map(str, dtypes))}; save it in one dtype")
    (dtype,) = dtypes
    try:
        check_factor_dtype(dtype)
    except ValueError as error:
        raise ValueError(f"{file}: {error}; save it as one of these") from error
    return dtype
