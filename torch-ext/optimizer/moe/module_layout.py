"""The experts modules of transformers 5, read by their attributes and never by their class.

Its decorator leaves `has_gate`, `has_bias`, `is_transposed` and `is_concatenated` on every experts
module and gives it `_apply_gate`; the parameters are `gate_up_proj` (`up_proj` without a gate),
`down_proj` and their `_bias`es.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from ..reference.glu import GPT_OSS_ALPHA, GPT_OSS_LIMIT
from .experts import experts_forward
from .layout import ExpertsLayout
from .quantized.expert_weights import expert_weight

# Classes of activation functions, of torch and of transformers' table, that have a name with us.
NAMES = {
    "SiLU": "silu",
    "SiLUActivation": "silu",
    "ReLU": "relu",
    "ReLUSquaredActivation": "relu2",
}
# Where transformers' decorator defines the gate of modules that have none of their own.
DEFAULT_GATE = "transformers.integrations.moe"
# Its clamped gate has no name of its own: it is told by interleaved columns and these two numbers.
GPT_OSS = (GPT_OSS_ALPHA, GPT_OSS_LIMIT)


def module_layout(module: nn.Module) -> ExpertsLayout:
    """The layout of an experts module.

    Args:
        module: made by that decorator, or alike; an attribute that is missing has the decorator's
            default.

    Returns:
        The layout. A gate or activation that has no name with us is called as the module has it.

    Raises:
        ValueError: the module normalizes each expert's output, which the kernels would leave out;
            or its activation is missing.
    """
    if getattr(module, "has_post_expert_norm", False):
        raise ValueError(
            f"{type(module).__name__} normalizes every expert's output before it is weighted, "
            "which these kernels do not compute; keep its own experts implementation"
        )
    gated = getattr(module, "has_gate", True)
    return ExpertsLayout(
        activation=_activation(module, gated),
        transposed=getattr(module, "is_transposed", False),
        interleaved=gated and not getattr(module, "is_concatenated", True),
        gated=gated,
    )


def module_forward(
    module: nn.Module, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor
) -> Tensor:
    """`experts_forward` of an experts module, with its own weights.

    Args:
        module: see `module_layout`. LoRA is taken from `module.expert_lora`, an
            `ExpertAdapters`, if there is one.
        hidden_states: (..., H).
        top_k_index: (..., k).
        top_k_weights: (..., k).

    Returns:
        (..., H) in the dtype of hidden_states.
    """
    layout = module_layout(module)
    adapters = getattr(module, "expert_lora", None)
    first = "gate_up_proj" if layout.gated else "up_proj"
    biased = getattr(module, "has_bias", False)
    return experts_forward(
        hidden_states,
        top_k_index,
        top_k_weights,
        expert_weight(module, first),
        expert_weight(module, "down_proj"),
        layout=layout,
        lora=adapters.factors() if adapters is not None else None,
        gate_up_bias=getattr(module, f"{first}_bias") if biased else None,
        down_bias=module.down_proj_bias if biased else None,
    )


def _activation(module: nn.Module, gated: bool) -> str | Callable[[Tensor], Tensor]:
    """A name where we know the function, else the module's own."""
    named = _elementwise_name(module.act_fn) if hasattr(module, "act_fn") else None
    kind = type(module)
    if not gated:
        if not hasattr(module, "act_fn"):
            raise ValueError(f"{kind.__name__} has no gate and no `act_fn`; give it the activation")
        return named or module.act_fn
    gate = getattr(kind, "_apply_gate", None)
    concatenated = getattr(module, "is_concatenated", True)
    default = gate is None or gate.__module__ == DEFAULT_GATE
    if default and concatenated and named is not None:
        return named
    if gate is None:
        raise ValueError(
            f"{kind.__name__} has no `_apply_gate`; without it only concatenated columns and an "
            "`act_fn` that has a name here are known: give the class one, from gate_up (M, 2I) to "
            "(M, I)"
        )
    constants = (getattr(module, "alpha", None), getattr(module, "limit", None))
    if gate.__module__ != DEFAULT_GATE and not concatenated and constants == GPT_OSS:
        return "gpt_oss"
    return module._apply_gate


def _elementwise_name(function: object) -> str | None:
    """The name of an activation of torch or of transformers' table, by its class and its inner."""
    kind, inner = type(function).__name__, getattr(function, "act", None)
    if kind == "GELU":
        return "gelu_tanh" if function.approximate == "tanh" else "gelu"
    if kind == "GELUActivation":
        return "gelu" if inner is F.gelu else None
    if kind in ("GELUTanh", "PytorchGELUTanh"):
        return "gelu_tanh" if getattr(inner, "func", F.gelu) is F.gelu else None
    return NAMES.get(kind)
