"""The experts modules of a transformers model: found by what its decorator leaves on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ...moe.layout import module_layout
from ...moe.quantized.expert_weights import (
    Format,
    as_quantized,
    check_module,
    expert_weight,
    format_of,
)
from ...moe.quantized.quantized_experts import QuantizedExperts

IMPLEMENTATION = "scattermoe_lora"  # what `set_experts_implementation` is told
ATTACHED = "expert_lora"  # our own LoRA, a submodule of the experts
LAYOUT_ATTRIBUTES = ("has_gate", "has_bias", "is_transposed", "is_concatenated", "config")

DEQUANTIZE = (
    "load it in 16 bits, with from_pretrained(quantization_config=...(dequantize=True)) of its "
    "format, then quantize_experts"
)
READ = f"read its files with load_quantized, or {DEQUANTIZE}"


def is_experts(module: nn.Module) -> bool:
    """Whether transformers' `use_experts_implementation` made this module."""
    return all(name in vars(module) for name in LAYOUT_ATTRIBUTES)


def is_ours(experts: nn.Module) -> bool:
    """Whether this module's configuration sends it to `experts_function`."""
    return experts.config._experts_implementation == IMPLEMENTATION


def experts_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every experts module with its name, in the model's order; TypeError for what is no model."""
    check_module(model)
    return ((name, module) for name, module in model.named_modules() if is_experts(module))


def projections(experts: nn.Module) -> tuple[str, str]:
    """The parameters before and after the activation."""
    return "gate_up_proj" if experts.has_gate else "up_proj", "down_proj"


def stacks(model: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """(name of the stack, experts module, parameter) of every stack of experts."""
    for name, experts in experts_modules(model):
        for target in projections(experts):
            yield f"{name}.{target}", experts, target


def packed_shape(
    experts: nn.Module, shape: tuple[int, int, int], format: Format
) -> tuple[tuple[int, int, int], bool]:
    """The shape in which a format packs a stack, or cannot, and whether that is transposed."""
    turned = format.by_outputs and module_layout(experts).transposed
    stored = (shape[0], shape[2], shape[1]) if turned else shape
    format.layout(stored)
    return stored, turned


def pack(
    experts: nn.Module,
    target: str,
    each: Iterable[torch.Tensor],
    shape: tuple[int, int, int],
    **options: Any,
) -> None:
    """Quantise a parameter's experts one by one, and give the module the stack.

    `options` are those of `QuantizedExperts.from_experts`; `shape` is that of all experts.
    """
    of_format = {k: v for k, v in options.items() if k not in ("device", "strategy")}
    shape, turned = packed_shape(experts, shape, format_of(**of_format))
    if turned:
        each = (expert.mT for expert in each)
    put(experts, target, QuantizedExperts.from_experts(each, shape, transposed=turned, **options))


def put(experts: nn.Module, target: str, stack: QuantizedExperts) -> None:
    """Give an experts module a 4-bit stack for a parameter."""
    del experts._parameters[target]
    experts.add_module(target, stack)
    experts.register_load_state_dict_pre_hook(_accept_file_names)


def _accept_file_names(experts: nn.Module, state: dict[str, Any], prefix: str, *_: object) -> None:
    """Trainer hands the tensors of a checkpoint over by the names they have in the file."""
    for target, stack in experts.named_children():
        if isinstance(stack, QuantizedExperts) and f"{prefix}{target}" in state:
            state[f"{prefix}{target}.packed"] = state.pop(f"{prefix}{target}")


def parameter_names(experts: nn.Module) -> list[str]:
    """The parameters in the order of the dense module; `QuantizedExperts` keep their place."""
    packed = {name for name, part in experts.named_children() if as_quantized(part) is not None}
    dense = [name for name, _ in experts.named_parameters(recurse=False)]
    return [name for name in projections(experts) if name in packed] + dense


def supported_experts(model: nn.Module) -> dict[str, nn.Module]:
    """The experts modules by name; ValueError if there are none or one is not supported."""
    found = dict(experts_modules(model))
    if not found:
        raise ValueError(why_no_experts(model))
    for name, experts in found.items():
        check_supported(experts, name)
    return found


def check_supported(experts: nn.Module, name: str) -> None:
    """Raise ValueError for experts that compute what our kernels have no place for, or packed."""
    try:
        module_layout(experts)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from error
    wanted = projections(experts)
    # not hasattr, which would decode a parametrized stack
    present = experts._parameters.keys() | experts._modules.keys()
    present |= getattr(experts, "parametrizations", {}).keys()
    missing = [target for target in wanted if target not in present]
    if missing:
        raise ValueError(
            f"{name} ({type(experts).__name__}) has no {missing}; keep "
            'experts_implementation="eager" for this model'
        )
    for target in wanted:
        weight = experts._parameters.get(target)
        if weight is not None and not _is_dense(weight):
            raise ValueError(
                f"{name}.{target} ({type(experts).__name__}) is quantised to {weight.dtype}; {READ}"
            )


def why_no_experts(model: nn.Module) -> str:
    """What a model is that has no experts modules, for the message that refuses it."""
    kind = type(model).__name__
    others = ((n, m) for n, m in model.named_modules() if "Experts" in type(m).__name__)
    name, module = next(others, ("", None))
    if module is None:
        return f"{kind} has no experts: load and train it as it is"
    what = f"the experts of {kind} ({name}) are {type(module).__name__}"
    packed = [p.dtype for p in module.parameters() if not _is_dense(p)]
    if packed:
        return f"{what}, quantised to {packed[0]}; {READ}"
    return (
        f"{what}, which transformers runs in one way only, without its experts interface "
        "(use_experts_implementation); train this model as it is"
    )


def _is_dense(weight: torch.Tensor) -> bool:
    """Whether a weight is of a format that the kernels take without decoding."""
    return weight.dtype.is_floating_point and weight.element_size() > 1


def operand_shape(experts: nn.Module, target: str) -> tuple[int, int, int]:
    """(E, in, out) of a parameter of an experts module."""
    return tuple(module_layout(experts).operand(expert_weight(experts, target)).shape)
