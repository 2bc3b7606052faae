"""4-bit experts in the place of a model's 16-bit ones, in memory."""

from __future__ import annotations

from typing import Any

from torch import nn

from ...moe.quantized.expert_weights import DTYPES, format_of
from ..adapters import peft
from .experts import ATTACHED, is_experts, pack, packed_shape, stacks
from .transformers import use_in_transformers


def check_quantizable(model: nn.Module, quant_type: str, **options: Any) -> None:
    """Raise ValueError unless `quantize_experts` can do it."""
    format = format_of(quant_type, **options)
    _check_unmerged(model)
    for name, experts, target in _dense_stacks(model):
        weight = experts._parameters[target]
        if weight.is_meta or hasattr(weight, "placements"):
            where = "on the meta device" if weight.is_meta else "sharded over ranks"
            raise ValueError(
                f"{name} is {where}; quantise whole experts, or read 4 bits with load_quantized"
            )
        if weight.dtype not in DTYPES:
            kinds = ", ".join(map(str, DTYPES))
            raise ValueError(f"{name} is {weight.dtype}; 4 bits are made of {kinds}")
        try:
            packed_shape(experts, tuple(weight.shape), format)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def _check_unmerged(model: nn.Module) -> None:
    """Raise ValueError if an adapter is part of a stack, which unmerging could not put back."""
    ours = (experts._modules.get(ATTACHED) for _, experts, _ in stacks(model))
    theirs = (w for outer in peft.wrappers(model) for w in peft.chain(outer))
    wrappers = (w for w in theirs if is_experts(peft.base_of(w)))
    if any(adapters is not None and adapters.merged for adapters in (*ours, *wrappers)):
        raise ValueError(
            "an adapter is merged into the experts; unmerge_lora(model) first, or "
            "detach_lora(model), which keeps the sum, and quantise that"
        )


def quantize_experts(
    model: nn.Module, quant_type: str = "nf4", *, blocksize: int | None = None
) -> None:
    """Replace every stack of experts by a packed one, in 4 bits by default, one after another.

    The model is switched to our experts implementation (`use_in_transformers`), the one that runs
    such stacks. Each stack is dropped when its 4 bits are there. Stacks that are quantised already
    are left as they are, so a call that ran out of memory leaves a model that runs, and can be
    repeated. `load_quantized` never holds the 16-bit stacks at all.

    Args:
        model: a transformers model, its experts on their device.
        quant_type: "nf4", "fp4", "mxfp4" or "fp8"; the last two along the sum, as published.
        blocksize: elements per scale of NF4 and FP4; None for 64.

    Raises:
        TypeError: model is no module.
        ValueError: an unknown format or blocksize; an adapter that is merged into the experts; a
            stack that is not whole in this process, or has a size that the format does not pack or
            a dtype that has no 4 bits; no experts, or experts that our kernels do not serve.
            Nothing has changed then.
        ImportError: transformers is not installed.
    """
    options = {} if blocksize is None else {"blocksize": blocksize}
    check_quantizable(model, quant_type, **options)
    use_in_transformers(model)
    for _, experts, target in _dense_stacks(model):
        weight = experts._parameters[target].detach()
        options |= {"quant_type": quant_type, "device": weight.device}
        pack(experts, target, weight.unbind(0), tuple(weight.shape), **options)
        del weight
    use_in_transformers(model)  # again: PEFT's wrappers must not merge into what is packed now


def _dense_stacks(model: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """As `stacks`, of those that are not in 4 bits yet."""
    return [entry for entry in stacks(model) if entry[1]._parameters.get(entry[2]) is not None]
