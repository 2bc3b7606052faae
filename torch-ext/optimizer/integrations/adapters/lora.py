"""LoRA on the experts of a transformers model, and with PEFT on the rest of it.

LoRA on experts alone needs no PEFT: the parameters are registered on every experts module, under
`expert_lora`, and run through the grouped kernels. With attention or whole modules beside them the
adapter is PEFT's (`injection.py`). The functions here take both; `adapter_file.py` reads and writes
both.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...moe.layout import module_layout
from ...moe.lora import ExpertAdapters, LoraProjection, check_factor_dtype
from ...moe.quantized.expert_weights import expert_weight
from ...optimizers.groups.parameters import is_dtensor, local
from ...optimizers.state.saving import gathered, pieces
from ..models.experts import (
    ATTACHED,
    check_supported,
    experts_modules,
    is_ours,
    operand_shape,
    projections,
    why_no_experts,
)
from ..models.hf_quantizer import mark
from ..models.quantize_in_memory import check_quantizable, quantize_experts
from ..models.transformers import use_in_transformers
from ..sharded_models import fully_sharded, reshard
from . import injection, peft
from .adapter_config import AdapterOptions, Targets, targeted

PROJECTION = {"gate_up_proj": "gate_up", "up_proj": "gate_up", "down_proj": "down"}


class AttachedLora(ExpertAdapters):
    """The adapters of one experts module of transformers."""

    def __init__(self, experts: nn.Module) -> None:
        (count, hidden, _), (_, intermediate, _) = (
            operand_shape(experts, target) for target in projections(experts)
        )
        super().__init__(count, hidden, intermediate, module_layout(experts))
        self.options: dict[str, dict[str, AdapterOptions]] = {}  # by parameter and adapter

    def projection(self, target: str) -> LoraProjection:
        """The adapters of one parameter, by its name."""
        return self[PROJECTION[target]]

    def add(self, target: str, adapter: str, options: AdapterOptions, **kind: Any) -> None:
        """Create an adapter on one parameter, frozen; `kind` is its dtype and device."""
        projection = self.projection(target)
        projection.add_adapter(adapter, options.r, options.alpha, rslora=options.rslora, **kind)
        projection.lora_A[adapter].requires_grad_(False)
        projection.lora_B[adapter].requires_grad_(False)
        self.options.setdefault(target, {})[adapter] = options


def attach_lora(
    model: nn.Module,
    r: int = 8,
    lora_alpha: float = 8,
    *,
    peft_config: Any = None,
    target_modules: Sequence[str] | str | None = None,
    target_parameters: Sequence[str] | None = None,
    use_rslora: bool = False,
    modules_to_save: Sequence[str] | None = None,
    adapter_name: str = "default",
    quantize: str | None = None,
    dtype: torch.dtype = torch.float32,
    **unknown: Any,
) -> nn.Module:
    """Put LoRA on the experts of a transformers model, and on the modules that are named.

    The model is switched to our experts implementation (`use_in_transformers`). Every other
    parameter is frozen, as PEFT does it. The experts alone need no PEFT. With `target_modules`,
    `modules_to_save` or `peft_config`, or in a model that PEFT has changed already, PEFT injects
    the whole adapter and our kernels run its part on the experts. A first call makes its adapter
    the active one; a further call with another name adds one beside it. With the name of an adapter
    that PEFT has put on other modules alone, the experts are added to that one.

    Args:
        model: a transformers model or a PeftModel, before `fully_shard` and tensor parallelism. It
            is changed in place.
        r: rank, at least 1.
        lora_alpha: the update is scaled by lora_alpha / r.
        peft_config: a peft.LoraConfig that says all of this, in place of the other options up to
            `modules_to_save`. Without target_parameters both projections of the experts are meant.
        target_modules: of other modules than experts, as in PEFT: ends of names, a pattern or
            "all-linear"; None for none.
        target_parameters: of the experts, ends of names: "gate_up_proj" ("up_proj" where there is
            no gate), "down_proj"; None for both.
        use_rslora: scale by lora_alpha / sqrt(r) instead (arXiv 2312.03732).
        modules_to_save: of modules that are trained whole, as in PEFT: "lm_head".
        adapter_name: without dots.
        quantize: a format of `quantize_experts`, "nf4" as a rule: put the experts into it first.
            They lose precision and cannot be merged into; None leaves them as they are.
        dtype: of the LoRA parameters, floating. float32 is PEFT's choice, over any base.
        **unknown: refused, by the name it has here.

    Returns:
        The model; where PEFT was needed a PeftModel around it, for Trainer and TRL.

    Raises:
        ValueError: no experts, an unknown target, a name in use, an option that experts do not
            support, ranks that share the model out, a dtype that cannot train, or stacks that
            cannot be quantised here; nothing has changed then.
        TypeError: an unknown keyword, a LoraConfig in the place of r, peft_config that is none, or
            a model that is no module; nothing has changed then.
        ImportError: transformers is not installed, or PEFT where it is needed.
    """
    for name in unknown:
        remedy = OTHER_NAMES.get(
            name, "if LoraConfig has it, pass peft_config=peft.LoraConfig(...)"
        )
        raise TypeError(f"attach_lora() got an unexpected keyword argument {name!r}; {remedy}")
    if quantize is not None:
        try:
            check_quantizable(model, quantize)
        except ValueError as error:
            raise ValueError(f"quantize={quantize!r:.99}: {error}") from error
    options = {
        "r": r,
        "lora_alpha": lora_alpha,
        "use_rslora": use_rslora,
        "target_modules": target_modules,
        "target_parameters": target_parameters,
        "modules_to_save": modules_to_save,
    }
    _check_options(options, peft_config)
    check_factor_dtype(dtype)
    check_addable(model, adapter_name)
    by_peft = peft_config is not None or target_modules or modules_to_save
    if by_peft or peft.first_layer(model) is not None:
        config = injection.config_of(model, peft_config, options)
        return injection.attach(model, config, adapter_name, quantize=quantize, dtype=dtype)
    if target_parameters is None:
        each = AdapterOptions(r, lora_alpha, use_rslora)
        found = experts_modules(model)
        wanted = {name: dict.fromkeys(projections(experts), each) for name, experts in found}
    else:
        wanted = targeted(model, options, "attach_lora")
    add_adapter(model, adapter_name, wanted, quantize=quantize, dtype=dtype)
    if active_adapter(model) == adapter_name:
        train_adapter(model, adapter_name)
    return model


NO_DROPOUT = (
    "experts have no dropout, since a row of A serves all tokens of an expert; leave it out"
)
OTHER_NAMES = {
    "alpha": "it is called lora_alpha",
    "rank": "it is called r",
    "lora_dropout": NO_DROPOUT,
    "dropout": NO_DROPOUT,
}
DEFAULTS = {"r": 8, "lora_alpha": 8, "use_rslora": False}  # of attach_lora; None for the others


def _check_options(options: dict[str, Any], peft_config: Any) -> None:
    """Raise ValueError for what are no lists of names, and for what peft_config says again."""
    for name in ("target_modules", "target_parameters", "modules_to_save"):
        value = options[name]
        if isinstance(value, str) and name != "target_modules":
            raise ValueError(f"{name} must be a sequence of names, got {value!r}; pass [{value!r}]")
        names = value if isinstance(value, (list, tuple, set)) else [value]
        if value is not None and not all(isinstance(entry, str) for entry in names):
            raise ValueError(f"{name} must be a sequence of names, got {value!r:.99}")
    if hasattr(options["r"], "peft_type"):
        raise TypeError(f"r must be a rank; write peft_config={type(options['r']).__name__}(...)")
    twice = {name: value for name, value in options.items() if value != DEFAULTS.get(name)}
    if twice and peft_config is not None:
        raise ValueError(f"peft_config says it all; leave out {twice}, or set it there")


def add_adapter(
    model: nn.Module,
    adapter: str,
    wanted: Targets,
    *,
    quantize: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Create an adapter on experts that are `check_addable`, frozen, or raise as `attach_lora`."""
    found = dict(experts_modules(model))
    if not any(wanted.values()):
        raise ValueError("nothing to put LoRA on: target_parameters is empty; None means both")
    for name, targets in wanted.items():
        allowed = projections(found[name])
        if others := [target for target in targets if target not in allowed]:
            raise ValueError(f"target_parameters: {name} has LoRA on {allowed}, not {others[0]!r}")
    if quantize is not None:
        quantize_experts(model, quantize)  # first: it can run out of memory
    active = active_adapter(model)
    use_in_transformers(model)
    with injection.undone_on_failure(model):  # as the memory may be too short
        for name, targets in wanted.items():
            experts = found[name]
            if ATTACHED not in experts._modules:
                experts.add_module(ATTACHED, AttachedLora(experts))
                experts.register_forward_pre_hook(_refuse_other_implementations)
            for target, options in targets.items():
                device = expert_weight(experts, target).device
                experts.expert_lora.add(target, adapter, options, dtype=dtype, device=device)
        set_lora(model, active or adapter)


def train_adapter(model: nn.Module, adapter: str) -> None:
    """Freeze every parameter of the model but those of one adapter."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(injection.adapter_of(name) == adapter)


def attached_modules(model: nn.Module) -> dict[str, AttachedLora]:
    """Our LoRA by name of the experts module."""
    return {
        name: experts._modules[ATTACHED]
        for name, experts in experts_modules(model)
        if ATTACHED in experts._modules
    }


def active_adapter(model: nn.Module) -> str | None:
    """The adapter in use, enabled or not; None if there is none."""
    ours = next((entry.active for entry in _projections(model) if entry.active), None)
    return ours or injection.active_adapter(model)


def known_adapters(model: nn.Module) -> list[str]:
    """Names of all adapters, ours and PEFT's."""
    ours = {name for entry in _projections(model) for name in entry.adapters}
    return sorted(ours | injection.configurations(model).keys())


def set_lora(model: nn.Module, adapter_name: str | None, *, trainable: bool = False) -> None:
    """Use another attached adapter, or none.

    Args:
        model: of `attach_lora`.
        adapter_name: a projection that it does not target runs without LoRA. None, for none, where
            the experts alone have LoRA; PEFT keeps one active.
        trainable: train it, and freeze everything else; False leaves what trains as it is.

    Raises:
        ValueError: no such adapter, several are named, or one is merged.
    """
    known, injected = known_adapters(model), injection.is_injected(model)
    entries = _checked_projections(model)
    if adapter_name is None and injected:
        raise ValueError("adapter_name=None: PEFT keeps one adapter active; disable_lora(model)")
    if adapter_name is not None and adapter_name not in known:
        raise ValueError(
            f"adapter_name={adapter_name!r} is not attached; there are {known}, one can be active"
        )
    _refuse_merged(model, "set another adapter")
    if injected:
        injection.set_adapter(model, adapter_name)
    for entry in entries:
        entry.set_adapter(adapter_name if adapter_name in entry.adapters else None)
    mark(model)
    if trainable and adapter_name is not None:
        train_adapter(model, adapter_name)


def enable_lora(model: nn.Module) -> None:
    """Switch the active adapter on again.

    Raises:
        ValueError: no LoRA is attached.
    """
    _enable(model, True)


def disable_lora(model: nn.Module) -> None:
    """Run the base model, bit for bit, until `enable_lora`.

    Raises:
        ValueError: no LoRA is attached, or it is merged into the weights.
    """
    _enable(model, False)


def _enable(model: nn.Module, enabled: bool) -> None:
    entries = _checked_projections(model)
    if not enabled:
        _refuse_merged(model, "disable it")
    injection.enable(model, enabled)
    for entry in entries:
        entry.enabled = enabled


@contextlib.contextmanager
def lora_disabled(model: nn.Module) -> Iterator[None]:
    """The base model inside the with block, as for the reference model of DPO or GRPO."""
    before = any(entry.enabled for entry in _projections(model))
    before |= any(not layer.disable_adapters for _, layer in injection.layers(model))
    disable_lora(model)
    try:
        yield
    finally:
        if before:
            enable_lora(model)


def merge_lora(model: nn.Module, *, keep_on: torch.device | str | None = None) -> None:
    """Add the active adapter to the weights; `unmerge_lora` restores them bit for bit.

    Of a model under FSDP2 every rank must call it, and writes into its shards; LoRA on the experts
    alone can be merged there. Modules that are trained whole stay in the place of the others.

    Args:
        model: of `attach_lora`.
        keep_on: device of the copy of the weights that unmerging puts back; None: theirs.

    Raises:
        ValueError: nothing to merge, merged already, weights that are computed (quantized), or NaN
            or inf in the adapter.

    Whatever is raised, also where memory runs out half-way, no weight has changed then.
    """
    _refuse_merged(model, "merge an adapter")
    if injection.is_injected(model):
        injection.merge(model, keep_on=keep_on)
        return
    reshard(model)
    work = []
    for experts, attached in _located(model):
        for target, weight in _weights(experts).items():
            projection = attached[target]
            if projection.active is None:
                continue
            if not projection.enabled:
                raise ValueError("the adapter is switched off; enable_lora(model) first")
            work.append((projection, weight, attached.layout))
    if not work:
        raise ValueError("no adapter is active; attach_lora or set_lora first")
    for projection, weight, layout in work:
        projection.check_mergeable(weight, layout, _factors(projection))
    try:
        for projection, weight, layout in work:
            parts = {"factors": _factors(projection), "pieces": pieces(weight)}
            projection.merge(local(weight), layout, keep_on=keep_on, **parts)
    except BaseException:  # the memory may be too short half-way
        for projection, weight, _ in work:
            if projection.merged:
                projection.unmerge(local(weight))
        raise


def unmerge_lora(model: nn.Module) -> None:
    """Put the weights back as they were before `merge_lora`.

    Raises:
        ValueError: nothing is merged.
    """
    if not _merged(model):
        raise ValueError("nothing is merged; merge_lora(model) first")
    if injection.is_injected(model):
        injection.unmerge(model)
        return
    reshard(model)
    for experts, attached in _located(model):
        if attached.merged:
            attached.unmerge({name: local(weight) for name, weight in _weights(experts).items()})


def detach_lora(model: nn.Module) -> nn.Module:
    """Remove all attached LoRA. What is merged stays in the weights, modules trained whole too.

    Returns:
        The model that `attach_lora` was given.
    """
    if injection.is_injected(model):
        return injection.detach(model)
    for experts, attached in _located(model):
        attached.discard()
        del experts._modules[ATTACHED]
        hooks = experts._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is _refuse_other_implementations]:
            del hooks[key]
    mark(model)
    return model


def _factors(projection: LoraProjection) -> tuple[Tensor, Tensor]:
    """A and B of the active adapter, whole."""
    sides = (projection.lora_A, projection.lora_B)
    return tuple(gathered(side[projection.active].weight.detach()) for side in sides)


def _projections(model: nn.Module) -> list[LoraProjection]:
    return [entry for attached in attached_modules(model).values() for entry in attached.values()]


def _located(model: nn.Module) -> list[tuple[nn.Module, AttachedLora]]:
    return [(model.get_submodule(name), entry) for name, entry in attached_modules(model).items()]


def _weights(experts: nn.Module) -> dict[str, Tensor]:
    return {PROJECTION[target]: expert_weight(experts, target) for target in projections(experts)}


def _checked_projections(model: nn.Module) -> list[LoraProjection]:
    entries = _projections(model)
    if not entries and not injection.is_injected(model):
        raise ValueError(f"model ({type(model).__name__}) has no LoRA of ours; attach_lora first")
    return entries


def _merged(model: nn.Module) -> list[str]:
    """Names of the experts and of PEFT's layers that an adapter is merged into."""
    ours = [name for name, attached in attached_modules(model).items() if attached.merged]
    return ours + [name for name, _ in injection.merged_layers(model)]


def _refuse_merged(model: nn.Module, doing: str) -> None:
    if merged := _merged(model):
        raise ValueError(f"cannot {doing}: the adapter is merged into {merged[0]}; unmerge_lora")


def check_addable(model: nn.Module, adapter: str) -> None:
    """Raise ValueError if a model can take no further adapter on its experts, or none so named."""
    found = list(experts_modules(model))
    if not found:
        raise ValueError(
            f"nothing to put LoRA on: {why_no_experts(model)}; get_peft_model takes other modules"
        )
    held = fully_sharded(model)
    if held is not None:
        raise ValueError(f"FSDP holds {held} already; attach LoRA first, then call fully_shard")
    for name, experts in found:
        check_supported(experts, name)
        if getattr(experts, "_is_expert_parallel", False):
            raise ValueError(f"{name} is split over ranks (expert parallel); attach LoRA before")
        if hasattr(experts, "_hf_hook") and any(p.is_meta for p in experts.parameters()):
            raise ValueError(
                f"{name} is kept off the device by its device_map, and LoRA would be too; load the "
                "model where it fits, or its experts in 4 bits with load_quantized"
            )
        split = [key for key, parameter in experts.named_parameters() if is_dtensor(parameter)]
        if split or getattr(experts, "_hf_tp_plan", None) is not None:
            raise ValueError(
                f"tensor parallelism splits {'.'.join([name, *split[:1]])} over ranks, and LoRA on "
                "experts is computed by one rank alone; leave the experts out of the tp_plan, or "
                "shard the model with fully_shard after attach_lora"
            )
    taken = isinstance(adapter, str) and hasattr(nn.ModuleDict(), adapter)  # "keys", "pop", ...
    if not isinstance(adapter, str) or not adapter or "." in adapter or taken:
        raise ValueError(
            f"adapter_name={adapter!r} must be a string without dots, no attribute of a module"
        )
    if any(adapter in entry.adapters for entry in _projections(model)):
        raise ValueError(f"adapter {adapter!r} is attached already; give the new one another name")
    _refuse_merged(model, "add an adapter")


def _refuse_other_implementations(experts: nn.Module, _: tuple) -> None:
    """Without this another experts implementation would leave LoRA out in silence."""
    if not is_ours(experts) and experts.expert_lora.factors() is not None:
        raise RuntimeError(
            "these experts have LoRA of attach_lora, but their implementation is "
            f"{experts.config._experts_implementation!r}; use_in_transformers(model), or "
            "disable_lora(model)"
        )
