"""LoRA that PEFT put on a stack of experts, read where it lies.

PEFT wraps an experts module once per targeted parameter: `ParamWrapper(down_proj)` around
`ParamWrapper(gate_up_proj)` around the experts. Its forward registers a parametrization that forms
W + delta for all experts, on every call; 0.21.2 forgets to remove it where the parameter was
parametrized before (4-bit experts), so that deltas pile up. Here the factors are handed to the
experts instead. Everything is read off the wrappers' attributes; PEFT itself is not imported.
"""

from __future__ import annotations

import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from ...moe import ExpertsLora, LoraFactors
from ...moe.lora import PeftFactors
from ...moe.quantized.expert_weights import as_quantized
from ..models.experts import ATTACHED, is_ours, projections, stacks
from .adapter_config import ends, plain

WRAPPER = "ParamWrapper"  # peft.tuners.lora.layer
LAYERS = {"BaseTunerLayer", "AuxiliaryTrainingWrapper"}  # what PEFT puts around modules
PROXIES = ("_LoraFactorsProxy", "_LoraParameterProxy")  # its parametrizations


def is_wrapper(module: nn.Module) -> bool:
    """Whether this is PEFT's wrapper around one parameter."""
    return type(module).__name__ == WRAPPER and hasattr(module, "parameter_name")


def chain(wrapper: nn.Module) -> Iterator[nn.Module]:
    """The wrapper and those below it, outermost first."""
    module = wrapper
    while is_wrapper(module):
        yield module
        module = module.base_layer


def base_of(wrapper: nn.Module) -> nn.Module:
    """The module below all wrappers."""
    *_, innermost = chain(wrapper)
    return innermost.base_layer


def wrappers(model: nn.Module) -> Iterator[nn.Module]:
    """The outermost wrapper of every wrapped module."""
    inner: set[int] = set()
    for module in model.modules():  # parents come first
        if is_wrapper(module) and id(module) not in inner:
            inner.update(id(below) for below in chain(module))
            yield module


def is_layer(module: nn.Module) -> bool:
    """Whether PEFT put this in the place of a module."""
    return any(kind.__name__ in LAYERS for kind in type(module).__mro__)


def first_layer(model: nn.Module) -> str | None:
    """Name and class of a layer that PEFT put into a model, or around it; None if there is none."""
    found = None
    for name, module in model.named_modules():
        if is_layer(module):
            return f"{name} ({type(module).__name__})"
        if any(kind.__name__ == "PeftModel" for kind in type(module).__mro__):
            found = f"{name or 'the model'} ({type(module).__name__})"
    return found


class ParameterListing:
    """`named_parameters` of one experts module, which answers PEFT in PEFT's terms.

    PEFT wraps what `module.named_parameters(recurse=False)` names, and a stack in 4 bits is a
    module, which is never named there. PEFT alone is told of it, under the parameter's name: FSDP2,
    DDP and accelerate ask in the same words, and would shard or move its bytes a second time. The
    only thing that tells the askers apart is who calls.
    """

    def __init__(self, experts: nn.Module) -> None:
        self.experts = experts
        self.__func__ = type(experts).named_parameters  # torch.compile asks for it, as of a method

    def __call__(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As `nn.Module.named_parameters`; refuses PEFT where `attach_lora` has put LoRA."""
        experts = self.experts
        found = self.__func__(experts, prefix, recurse, remove_duplicate)
        caller = sys._getframe(1).f_globals.get("__name__", "")
        if recurse or caller.partition(".")[0] != "peft":
            return found
        if ATTACHED in experts._modules:
            raise ValueError(
                "the experts of this model have LoRA of attach_lora, which PEFT would freeze and "
                "leave out of its file; detach_lora(model) and name the other modules in "
                "attach_lora(target_modules=[...]), or the experts in PEFT's configuration: "
                "target_parameters=['experts.gate_up_proj', 'experts.down_proj']"
            )
        packed = (
            (f"{prefix}.{name}" if prefix else name, stack.packed)
            for name in projections(experts)
            if as_quantized(stack := experts._modules.get(name)) is not None
        )
        return itertools.chain(packed, found)


def wrapped_parameters(model: nn.Module) -> dict[str, set[str]]:
    """Names of the parameters that PEFT has wrapped, by adapter."""
    wrapped: dict[str, set[str]] = {}
    for name, module in model.named_modules():
        if not is_wrapper(module):
            continue
        place = f"{plain(name)}.{module.parameter_name}"
        for adapter in module.lora_A:
            wrapped.setdefault(adapter, set()).add(place)
    return wrapped


def check_targets(model: nn.Module) -> None:
    """Raise ValueError if PEFT's configuration names experts that PEFT did not wrap."""
    wrapped = wrapped_parameters(model)
    experts = {plain(name) for name, _, _ in stacks(model)}
    configs = (item for one in config_dicts(model) for item in one.items())
    for adapter, config in configs:
        done = wrapped.get(adapter, set())
        for target in sorted(getattr(config, "target_parameters", None) or ()):
            named = {place for place in experts | done if ends(place, plain(target))}
            missed = sorted(named - done)
            if missed or (not named and "experts" in target.split(".")):
                raise ValueError(
                    f"target_parameters of PEFT's adapter {adapter!r} has {target!r}, and no LoRA "
                    f"is on {missed[0] if missed else 'any parameter of that name'}; quantise the "
                    "experts first (quantize_experts, load_quantized), then call get_peft_model "
                    "with the end of a parameter's name, such as 'experts.down_proj'"
                )


def config_dicts(model: nn.Module) -> Iterator[dict[str, Any]]:
    """Configurations by adapter, as PEFT, or transformers through it, keeps them on modules."""
    configs = (getattr(module, "peft_config", None) for module in model.modules())
    return (entry for entry in configs if isinstance(entry, dict))


def bypass(wrapper: nn.Module) -> None:
    """Make the outermost wrapper of an experts module run `_forward` instead of PEFT's.

    Over 4 bits `merge` is replaced too: PEFT's adds to a decoded copy and counts the adapter as
    merged, or finds no tensor after it has merged others.
    """
    setattr(wrapper, _slot(wrapper), types.MethodType(_forward, wrapper))
    experts = base_of(wrapper)
    for entry in chain(wrapper):
        stack = experts._modules.get(entry.parameter_name)
        computed = entry.parameter_name in getattr(experts, "parametrizations", {})
        if computed or as_quantized(stack) is not None:
            entry.merge = types.MethodType(_refuse_merge, entry)


def _refuse_merge(wrapper: nn.Module, *_: Any, **__: Any) -> None:
    raise ValueError(
        f"{wrapper.parameter_name} is in 4 bits: an adapter cannot be merged into it without "
        "rounding it away; keep it, or load the model in 16 bits to merge. "
        "model.unmerge_adapter() takes back what other modules have merged"
    )


def check_bypass(wrapper: nn.Module) -> None:
    """Raise ValueError if another library replaced the wrapper's forward; change nothing."""
    present = vars(wrapper).get("forward")
    usual = (_forward, type(wrapper).forward)  # the class's own comes from pickle
    replaced = present is not None and getattr(present, "__func__", None) not in usual
    if _slot(wrapper) == "forward" and replaced:
        raise ValueError(
            f"the forward of PEFT's wrapper of {wrapper.parameter_name} was replaced by "
            f"{present!r:.99}; undo that, then call use_in_transformers"
        )


def _slot(wrapper: nn.Module) -> str:
    """The attribute that runs as the wrapper's forward."""
    return "_old_forward" if hasattr(wrapper, "_hf_hook") else "forward"  # accelerate's hooks


def _forward(wrapper: nn.Module, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Call the experts with the factors instead of with new weights.

    They are called as a module, so that their hooks run. Where they were set back to another
    implementation, PEFT's forward runs.
    """
    experts = base_of(wrapper)
    if not is_ours(experts):
        return type(wrapper).forward(wrapper, hidden_states, *args, **kwargs)
    if kwargs.pop("adapter_names", None) is not None:
        raise ValueError("adapter_names: one batch cannot mix adapters on experts; split it")
    lora = active_lora(wrapper)
    if lora is not None:
        kwargs["lora"] = lora
    return experts(hidden_states, *args, **kwargs)


# Pickle looks for a bound method by its name, and finds PEFT's own; use_in_transformers puts these
# back. (Other callables torch.compile would compile anew for every layer.)
_forward.__name__, _refuse_merge.__name__ = "forward", "merge"


def check_bypassed(experts: nn.Module) -> None:
    """Raise RuntimeError inside PEFT's own forward, which has put W + delta in place of W."""
    for name, parametrizations in experts._modules.get("parametrizations", {}).items():
        if any(type(entry).__name__ in PROXIES for entry in parametrizations):
            raise RuntimeError(
                f"PEFT wrapped {name} after use_in_transformers(model), and its forward formed "
                "W + delta for every expert; call use_in_transformers(model) again, after PEFT"
            )


def active_lora(wrapper: nn.Module) -> ExpertsLora | None:
    """The factors that a module's wrappers add now: views of parameters; None if none is active."""
    found = {}
    for entry in chain(wrapper):
        factors = _active_factors(entry)
        if factors is not None:
            found[entry.parameter_name] = factors
    if not found:
        return None
    down = found.pop("down_proj", None)
    gate_up = found.pop("gate_up_proj", None) or found.pop("up_proj", None)
    if found:
        raise ValueError(
            f"LoRA on {sorted(found)} of experts is not supported; target gate_up_proj, down_proj"
        )
    return ExpertsLora(gate_up, down)


def contracts_input(*, swapped: bool, transposed: bool) -> bool:
    """Whether a wrapper's A meets the layer's input, and not its output.

    A has the size of the parameter's dimension 1, or 2 if the wrapper swapped them. Dimension 2 is
    the input of (E, out, in), dimension 1 that of a transposed (E, in, out). PEFT up to 0.18 never
    swaps, 0.19.0 swaps the transposed ones, later ones the others.
    """
    return swapped != transposed


def _active_factors(wrapper: nn.Module) -> LoraFactors | None:
    """The factors of one wrapper, in the sense of PEFT's own forward."""
    if wrapper.disable_adapters:
        if wrapper.merged:
            wrapper.unmerge()  # as PEFT does: disabled means the base
        return None
    if wrapper.merged:
        return None
    active = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    if len(active) > 1:
        raise ValueError(
            f"{active} are active on {wrapper.parameter_name}; one adapter can be: "
            "model.set_adapter(name)"
        )
    if not active:
        return None
    (name,) = active
    _check_plain(wrapper, name)
    transposed = getattr(base_of(wrapper), "is_transposed", False)
    swapped = getattr(wrapper, "_did_swap_in_out_features", False)  # no such attribute up to 0.18
    of_input = contracts_input(swapped=swapped, transposed=transposed)
    a, b = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    return PeftFactors(a, b, wrapper.num_experts, wrapper.scaling[name], swapped=not of_input)


def _check_plain(wrapper: nn.Module, name: str) -> None:
    """Refuse what changes the meaning of the factors; PEFT refuses most of it at construction."""
    dropouts = wrapper.lora_dropout  # a ModuleDict, which has no get
    dropout = dropouts[name] if name in dropouts else None  # noqa: SIM401
    for option, present in (
        ("DoRA", wrapper.use_dora.get(name, False)),
        ("lora_bias", wrapper.lora_bias.get(name, False)),
        ("lora_dropout", getattr(dropout, "p", 0.0) > 0),
        ("a LoRA variant", name in getattr(wrapper, "lora_variant", {})),
    ):
        if present:
            raise ValueError(
                f"adapter {name!r} on {wrapper.parameter_name} has {option}; train it without"
            )
