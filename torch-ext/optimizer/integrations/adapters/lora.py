"""LoRA on the experts of a transformers model, without PEFT: attach, switch, merge, detach.

The parameters are registered on every experts module, under `expert_lora`, and run through the
grouped kernels. `adapter_file.py` reads and writes them as PEFT adapters.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...moe.layout import module_layout
from ...moe.lora import ExpertAdapters, LoraProjection, check_factor_dtype
from ...moe.quantized.expert_weights import QuantizedWeight, expert_weight
from ...optimizers.groups.parameters import is_dtensor, local
from ...optimizers.state.saving import gathered, pieces
from ..models.experts import (
    ATTACHED,
    check_supported,
    experts_modules,
    first_projection,
    is_ours,
    operand_shape,
)
from ..models.quantize_in_memory import check_quantizable, quantize_experts
from ..models.transformers import use_in_transformers
from ..sharded_models import fully_sharded, reshard
from . import peft

PROJECTION = {"gate_up_proj": "gate_up", "up_proj": "gate_up", "down_proj": "down"}


@dataclass(frozen=True)
class AdapterOptions:
    """What scales an adapter on one projection: alpha / r, or alpha / sqrt(r) with rslora."""

    r: int
    alpha: float
    rslora: bool = False

    def check(self) -> None:
        """Raise ValueError unless r is a rank and alpha a finite number."""
        if isinstance(self.r, bool) or not isinstance(self.r, int) or self.r < 1:
            raise ValueError(f"r must be an integer of at least 1, got {self.r!r}")
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, (int, float)):
            raise ValueError(f"alpha must be a number, got {self.alpha!r}")
        if not abs(self.alpha) <= torch.finfo(torch.float32).max:  # nor an integer without end
            raise ValueError(f"alpha must be a finite float32, got {self.alpha!r:.99}")


class AttachedLora(ExpertAdapters):
    """The adapters of one experts module, with what PEFT's files need to know of them.

    Args:
        experts: a transformers experts module.

    Attributes:
        options: `AdapterOptions` by name of the parameter and of the adapter.
    """

    def __init__(self, experts: nn.Module) -> None:
        count, hidden, _ = operand_shape(experts, first_projection(experts))
        _, intermediate, _ = operand_shape(experts, "down_proj")
        super().__init__(count, hidden, intermediate, module_layout(experts))
        self.options: dict[str, dict[str, AdapterOptions]] = {}

    @property
    def adapters(self) -> list[str]:
        """Names, in the order they were added."""
        return list(dict.fromkeys(name for entry in self.values() for name in entry.adapters))

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
    r: int,
    alpha: float,
    targets: Sequence[str] | None = None,
    *,
    rslora: bool = False,
    quantize: str | None = None,
    adapter: str = "default",
    dtype: torch.dtype = torch.float32,
) -> None:
    """Put LoRA on the experts of a transformers model and make it their only trainable part.

    The model is switched to our experts implementation (`use_in_transformers`). Every other
    parameter is frozen, as PEFT does it. What else should train, attention or the head, is named in
    PEFT's configuration beside the experts instead (docs/concepts/transformers-peft.md), so
    that one file holds all of it. A first call makes its adapter the active one, a further call
    with another name adds one beside it.

    Args:
        model: a transformers model without PEFT, before `fully_shard` and tensor parallelism.
        r: rank, at least 1.
        alpha: the update is scaled by alpha / r.
        targets: of the experts' parameters "gate_up_proj" ("up_proj" where there is no gate) and
            "down_proj"; None for both.
        rslora: scale by alpha / sqrt(r) instead (arXiv 2312.03732).
        quantize: "nf4" or "fp4": put the experts into 4 bits first (`quantize_experts`), which
            lose precision and cannot be merged into; None leaves them as they are.
        adapter: name, without dots.
        dtype: of the LoRA parameters, floating. float32 is PEFT's choice, over any base.

    Raises:
        ValueError: no experts, an unknown target, a name in use, layers of PEFT in the model, ranks
            that share it out, a dtype that cannot train, or stacks that cannot be quantised here;
            nothing has changed then.
        ImportError: transformers is not installed.
    """
    if quantize is not None:
        check_quantizable(model, quantize)
    if isinstance(targets, str):
        raise ValueError(
            f"targets must be a sequence of names, got {targets!r}; pass ({targets!r},)"
        )
    options = AdapterOptions(r, alpha, rslora)
    found = dict(experts_modules(model))
    wanted = {
        name: dict.fromkeys(
            (first_projection(experts), "down_proj") if targets is None else targets, options
        )
        for name, experts in found.items()
    }
    if quantize is not None:
        _check_addition(model, found, adapter, wanted, dtype)
        quantize_experts(model, quantize)  # first: it can run out of memory
    add_adapter(model, adapter, wanted, dtype=dtype)
    if active_adapter(model) == adapter:
        train_adapter(model, adapter)


def add_adapter(
    model: nn.Module,
    adapter: str,
    wanted: dict[str, dict[str, AdapterOptions]],
    *,
    dtype: torch.dtype = torch.float32,
) -> None:
    """Create an adapter, frozen; all checks come first.

    Args:
        model: a transformers model.
        adapter: name.
        wanted: by name of the experts module and of its parameter.
        dtype: of the parameters.

    Raises:
        ValueError: as `attach_lora`.
    """
    found = dict(experts_modules(model))
    _check_addition(model, found, adapter, wanted, dtype)
    before = attached_modules(model)
    active = active_adapter(model)
    use_in_transformers(model)
    for name, targets in wanted.items():
        experts = found[name]
        if name not in before:
            experts.add_module(ATTACHED, AttachedLora(experts))
            experts.register_forward_pre_hook(_refuse_other_implementations)
        for target, options in targets.items():
            device = expert_weight(experts, target).device
            experts.expert_lora.add(target, adapter, options, dtype=dtype, device=device)
    set_lora(model, active or adapter)


def check_attachable(model: nn.Module) -> None:
    """Raise ValueError if LoRA on a model's experts would be lost, or would not fit its shards."""
    layer = peft.first_layer(model)
    if layer is not None:
        raise ValueError(
            f"PEFT has wrapped this model: {layer} would be frozen, and its file would leave the "
            "experts' LoRA out; name the experts in PEFT's target_parameters and call "
            "use_in_transformers(model), or call attach_lora on model.unload()"
        )
    held = fully_sharded(model)
    if held is not None:
        raise ValueError(
            f"FSDP holds {held} already, and would not shard what is added now; attach LoRA first, "
            "then call fully_shard"
        )
    for name, experts in experts_modules(model):
        if getattr(experts, "_is_expert_parallel", False):
            raise ValueError(f"{name} is split over ranks (expert parallel); attach LoRA before")
        split = [key for key, parameter in experts.named_parameters() if is_dtensor(parameter)]
        if split or getattr(experts, "_hf_tp_plan", None) is not None:
            raise ValueError(
                f"tensor parallelism splits {'.'.join([name, *split[:1]])} over ranks, and LoRA on "
                "experts is computed by one rank alone; leave the experts out of the tp_plan, or "
                "shard the model with fully_shard after attach_lora"
            )


def train_adapter(model: nn.Module, adapter: str) -> None:
    """Freeze every parameter of the model but those of one adapter."""
    model.requires_grad_(False)
    for _, entry in _projections(model):
        if adapter in entry.adapters:
            entry.lora_A[adapter].requires_grad_(True)
            entry.lora_B[adapter].requires_grad_(True)


def attached_modules(model: nn.Module) -> dict[str, AttachedLora]:
    """Our LoRA by name of the experts module."""
    return {
        name: experts._modules[ATTACHED]
        for name, experts in experts_modules(model)
        if isinstance(experts._modules.get(ATTACHED), AttachedLora)
    }


def active_adapter(model: nn.Module) -> str | None:
    """The adapter in use, enabled or not; None if there is none."""
    return next((entry.active for _, entry in _projections(model) if entry.active), None)


def set_lora(model: nn.Module, adapter: str | None, *, trainable: bool = False) -> None:
    """Use another attached adapter, or none.

    Args:
        model: as given to `attach_lora`.
        adapter: its name; a projection that it does not target runs without LoRA.
        trainable: train it, and freeze everything else; False leaves what trains as it is.

    Raises:
        ValueError: no such adapter, several are named, or one is merged.
    """
    entries = _checked_projections(model)
    known = sorted({name for _, entry in entries for name in entry.adapters})
    if adapter is not None and (not isinstance(adapter, str) or adapter not in known):
        raise ValueError(
            f"adapter={adapter!r} is not attached; there are {known}, and one can be active"
        )
    _refuse_merged(entries, "set another adapter")
    for _, entry in entries:
        entry.set_adapter(adapter if adapter in entry.adapters else None)
    if trainable and adapter is not None:
        train_adapter(model, adapter)


def enable_lora(model: nn.Module) -> None:
    """Switch the active adapter on again.

    Raises:
        ValueError: no LoRA is attached.
    """
    for _, entry in _checked_projections(model):
        entry.enabled = True


def disable_lora(model: nn.Module) -> None:
    """Run the base model, bit for bit, until `enable_lora`.

    Raises:
        ValueError: no LoRA is attached, or it is merged into the weights.
    """
    entries = _checked_projections(model)
    _refuse_merged(entries, "disable it")
    for _, entry in entries:
        entry.enabled = False


@contextlib.contextmanager
def lora_disabled(model: nn.Module) -> Iterator[None]:
    """The base model inside the with block, as for the reference model of DPO or GRPO."""
    before = [(entry, entry.enabled) for _, entry in _checked_projections(model)]
    disable_lora(model)
    try:
        yield
    finally:
        for entry, enabled in before:
            entry.enabled = enabled


def merge_lora(model: nn.Module, *, keep_on: torch.device | str | None = None) -> None:
    """Add the active adapter to the experts' weights; `unmerge_lora` restores them bit for bit.

    Of a model under FSDP2 every rank must call it, and writes into its shards.

    Args:
        model: as given to `attach_lora`.
        keep_on: device of the copy of the weights that unmerging puts back; None: theirs.

    Raises:
        ValueError: nothing to merge, merged already, weights that are computed (quantized), or NaN
            or inf in the adapter; no weight has changed then.
    """
    reshard(model)
    work = []
    for experts, attached in _located(model):
        for target, projection in attached.items():
            if projection.active is None:
                continue
            if parametrize.is_parametrized(experts):
                raise ValueError(
                    f"{type(experts).__name__} computes its weights from other parameters "
                    "(quantized); LoRA cannot be merged into them"
                )
            work.append((projection, _weights(experts)[target], attached.layout))
    if not work:
        raise ValueError("no adapter is active; attach_lora or set_lora first")
    for projection, weight, layout in work:
        projection.check_mergeable(weight, layout, _factors(projection))
    for projection, weight, layout in work:
        projection.merge(
            local(weight),
            layout,
            keep_on=keep_on,
            factors=_factors(projection),
            pieces=pieces(weight),
        )


def unmerge_lora(model: nn.Module) -> None:
    """Put the weights back as they were before `merge_lora`.

    Raises:
        ValueError: nothing is merged.
    """
    reshard(model)
    merged = [entry for entry in _located(model) if entry[1].merged]
    if not merged:
        raise ValueError("nothing is merged; merge_lora(model) first")
    for experts, attached in merged:
        attached.unmerge({name: local(weight) for name, weight in _weights(experts).items()})


def detach_lora(model: nn.Module) -> None:
    """Remove all attached LoRA. What is merged stays in the weights."""
    for experts, attached in _located(model):
        attached.discard()
        del experts._modules[ATTACHED]
        hooks = experts._forward_pre_hooks
        for key in [key for key, hook in hooks.items() if hook is _refuse_other_implementations]:
            del hooks[key]


def _factors(projection: LoraProjection) -> tuple[Tensor, Tensor]:
    """A and B of the active adapter, whole."""
    sides = (projection.lora_A, projection.lora_B)
    a, b = (gathered(side[projection.active].weight.detach()) for side in sides)
    return a, b


def _projections(model: nn.Module) -> list[tuple[str, LoraProjection]]:
    return [
        (f"{name}.{target}", entry)
        for name, attached in attached_modules(model).items()
        for target, entry in attached.items()
    ]


def _located(model: nn.Module) -> list[tuple[nn.Module, AttachedLora]]:
    found = dict(experts_modules(model))
    return [(found[name], attached) for name, attached in attached_modules(model).items()]


def _weights(experts: nn.Module) -> dict[str, Tensor]:
    found = {
        target: expert_weight(experts, target)
        for target in (first_projection(experts), "down_proj")
    }
    packed = [target for target, weight in found.items() if isinstance(weight, QuantizedWeight)]
    if packed:
        raise ValueError(
            f"{', '.join(packed)} of {type(experts).__name__} are 4-bit: an adapter cannot be "
            "merged into them without rounding it away; keep it attached, or load the model in 16 "
            "bits to merge"
        )
    return {PROJECTION[target]: weight for target, weight in found.items()}


def _checked_projections(model: nn.Module) -> list[tuple[str, LoraProjection]]:
    entries = _projections(model)
    if not entries:
        raise ValueError(f"model ({type(model).__name__}) has no LoRA of ours; attach_lora first")
    return entries


def _refuse_merged(entries: list[tuple[str, LoraProjection]], doing: str) -> None:
    merged = [name for name, entry in entries if entry.merged]
    if merged:
        raise ValueError(f"cannot {doing}: the adapter is merged into {merged[0]}; unmerge_lora")


def _check_addition(
    model: nn.Module,
    found: dict[str, nn.Module],
    adapter: str,
    wanted: dict[str, dict[str, AdapterOptions]],
    dtype: torch.dtype,
) -> None:
    """Everything `add_adapter` could fail on, before it changes anything."""
    check_factor_dtype(dtype)
    if not any(wanted.values()):
        raise ValueError(
            f"nothing to put LoRA on: model ({type(model).__name__}) has no experts of "
            "transformers' experts interface, or targets is empty"
        )
    check_attachable(model)
    taken = isinstance(adapter, str) and hasattr(nn.ModuleDict(), adapter)  # "keys", "pop", ...
    if not isinstance(adapter, str) or not adapter or "." in adapter or taken:
        raise ValueError(
            f"adapter={adapter!r} must be a string without dots that is no attribute of a module"
        )
    if adapter in {name for _, entry in _projections(model) for name in entry.adapters}:
        raise ValueError(f"adapter {adapter!r} is attached already; give the new one another name")
    _refuse_merged(_projections(model), "add an adapter")
    for name, targets in wanted.items():
        experts = found[name]
        check_supported(experts, name)
        allowed = (first_projection(experts), "down_proj")
        for target, options in targets.items():
            if target not in allowed:
                raise ValueError(f"targets: {name} has no {target!r}; it has {allowed}")
            options.check()


def _refuse_other_implementations(experts: nn.Module, _: tuple) -> None:
    """Without this another experts implementation would leave LoRA out in silence."""
    if not is_ours(experts) and experts.expert_lora.factors() is not None:
        raise RuntimeError(
            "these experts have LoRA of attach_lora, but their implementation is "
            f"{experts.config._experts_implementation!r}; use_in_transformers(model), or "
            "disable_lora(model)"
        )
