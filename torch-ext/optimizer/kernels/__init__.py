"""Tensors in, tensors out: one file per op, no state, no parameter groups, no model names."""

from ._lists import StochasticRounding
from .adamw import adamw
from .apply_update import apply_update
from .combine import combine
from .expert_sort import expert_sort
from .glu import glu
from .grouped_lora_dab import grouped_lora_dab
from .grouped_lora_dw import grouped_lora_dw
from .grouped_lora_dx import grouped_lora_dx
from .grouped_lora_forward import grouped_lora_forward
from .grouped_lora_linear import grouped_lora_linear
from .matmul_add import explain_matmul_add, matmul_add
from .momentum import momentum
from .nf4_dequant import explain_nf4_dequant, nf4_dequant
from .nf4_quantize import explain_nf4_quantize, nf4_quantize
from .normalize import explain_normalize, normalize
from .symmetric_matmul import explain_symmetric_matmul, symmetric_matmul

__all__ = [
    "StochasticRounding",
    "adamw",
    "apply_update",
    "combine",
    "expert_sort",
    "explain_matmul_add",
    "explain_nf4_dequant",
    "explain_nf4_quantize",
    "explain_normalize",
    "explain_symmetric_matmul",
    "glu",
    "grouped_lora_dab",
    "grouped_lora_dw",
    "grouped_lora_dx",
    "grouped_lora_forward",
    "grouped_lora_linear",
    "matmul_add",
    "momentum",
    "nf4_dequant",
    "nf4_quantize",
    "normalize",
    "symmetric_matmul",
]
