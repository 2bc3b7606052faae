"""Mixture-of-experts layers with LoRA.

    tokens -> sort -> grouped linear + LoRA -> activation -> grouped linear + LoRA -> combine

`experts_forward` is that sentence; `Experts` is the module around it and `MoEBlock` adds the router
and the shared experts.
"""

from ..kernels.experts.expert_sort import ExpertOrder, expert_sort
from ..kernels.experts.grouped_lora import LoraFactors
from ..kernels.experts.rows import glu
from .block import MoEBlock, SharedExperts
from .experts import Experts, experts_forward
from .grouped_linear import grouped_lora_linear
from .layout import ExpertsLayout, ExpertsLora
from .lora import ExpertAdapters, LoraProjection, factor_views, selective_lora_weights
from .quantized.expert_offload import ExpertOffload
from .quantized.expert_weights import (
    ActiveExperts,
    QuantizedWeight,
    active_experts,
    expert_weight,
    selective_expert_weights,
)
from .quantized.quantized_experts import QuantizedExperts
from .quantized.strategy import choose_strategy, explain_quantized
from .routers import Router, RouterRule, group_top_k, select_experts, softmax_top_k
from .scattermoe import parallel_linear_lora

__all__ = [
    "ActiveExperts",
    "ExpertAdapters",
    "ExpertOffload",
    "ExpertOrder",
    "Experts",
    "ExpertsLayout",
    "ExpertsLora",
    "LoraFactors",
    "LoraProjection",
    "MoEBlock",
    "QuantizedExperts",
    "QuantizedWeight",
    "Router",
    "RouterRule",
    "SharedExperts",
    "active_experts",
    "choose_strategy",
    "expert_sort",
    "expert_weight",
    "experts_forward",
    "explain_quantized",
    "factor_views",
    "glu",
    "group_top_k",
    "grouped_lora_linear",
    "parallel_linear_lora",
    "select_experts",
    "selective_expert_weights",
    "selective_lora_weights",
    "softmax_top_k",
]
