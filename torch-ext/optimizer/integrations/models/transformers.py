"""Our experts as an implementation of transformers' experts interface.

transformers (5.17 to 5.23 tried) calls `(hidden_states, top_k_index, top_k_weights) -> (T, H)` for
every class under `use_experts_implementation`. Only that call is replaced: the router, its hooks,
its auxiliary loss and shared experts stay the model's own, and no model is listed here by name.
"""

from __future__ import annotations

from torch import Tensor, nn

from ...moe.experts import experts_forward
from ...moe.layout import ExpertsLora, module_layout
from ...moe.quantized.expert_weights import expert_weight
from ..adapters import peft
from .experts import ATTACHED, IMPLEMENTATION, is_experts, is_ours, projections, supported_experts
from .hf_quantizer import mark, register


def use_in_transformers(model: nn.Module | None = None) -> str:
    """Register our experts with transformers, and make a model use them.

    PEFT's wrappers around experts are bypassed: their LoRA goes into the grouped kernels instead of
    into a copy of the weights. Call this again after experts were wrapped (`get_peft_model`,
    `PeftModel.from_pretrained`); a wrapper that was missed raises when it runs.

    Args:
        model: a transformers model, a PEFT model, or a module that holds one; None to register
            only.

    Returns:
        The name for `from_pretrained(..., experts_implementation=name)` and
        `model.set_experts_implementation(name)`.

    Raises:
        TypeError: model is no module.
        ValueError: the model has no experts of transformers' kind, or some that we cannot run, or
            PEFT's configuration names experts that PEFT did not wrap; the message names them.
            The model is unchanged then.
        ImportError: transformers is not installed, or older than 5.
    """
    from transformers import PreTrainedModel
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register(IMPLEMENTATION, experts_function)
    register()
    if model is None:
        return IMPLEMENTATION
    found = supported_experts(model)
    peft.check_targets(model)
    wrappers = [w for w in peft.wrappers(model) if is_experts(peft.base_of(w))]
    for wrapper in wrappers:
        peft.check_bypass(wrapper)
    configs = {id(c): c for m in model.modules() if (c := getattr(m, "config", None)) is not None}
    before = [  # outer ones first
        (config, config._experts_implementation)
        for config in configs.values()
        if hasattr(config, "_experts_implementation")
    ]
    for inner in model.modules():
        if isinstance(inner, PreTrainedModel):
            inner.set_experts_implementation(IMPLEMENTATION)
    missed = [name for name, experts in found.items() if not is_ours(experts)]
    if missed:
        for config, implementation in before:
            config._experts_implementation = implementation
        raise ValueError(
            f"transformers did not set the experts implementation of {missed}; load the model with "
            f"from_pretrained(..., experts_implementation={IMPLEMENTATION!r})"
        )
    for wrapper in wrappers:
        peft.bypass(wrapper)
    for experts in found.values():
        experts.named_parameters = peft.ParameterListing(experts)
    mark(model)
    return IMPLEMENTATION


def experts_function(
    experts: nn.Module,
    hidden_states: Tensor,  # (T, H)
    top_k_index: Tensor,  # (T, k); the ids >= E of expert parallelism are skipped
    top_k_weights: Tensor,  # (T, k)
    lora: ExpertsLora | None = None,  # from PEFT's wrappers
) -> Tensor:  # (T, H) in the dtype of hidden_states
    """What transformers runs in place of the eager loop over experts.

    Raises:
        RuntimeError: PEFT's wrapper put its own weights in place, or both PEFT and `attach_lora`
            have an adapter here.
    """
    peft.check_bypassed(experts)
    attached = experts._modules.get(ATTACHED)
    if attached is not None:
        if lora is not None:
            raise RuntimeError(
                "these experts have LoRA of attach_lora and of PEFT; use one of them: "
                "detach_lora(model), or model.unload() of the PEFT model"
            )
        lora = attached.factors()
    first, down = projections(experts)
    return experts_forward(
        hidden_states,
        top_k_index,
        top_k_weights,
        expert_weight(experts, first),
        expert_weight(experts, down),
        layout=module_layout(experts),
        lora=lora,
        gate_up_bias=getattr(experts, f"{first}_bias") if experts.has_bias else None,
        down_bias=experts.down_proj_bias if experts.has_bias else None,
    )
