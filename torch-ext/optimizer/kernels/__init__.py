"""Tensors in, tensors out: one file per op, no state, no parameter groups, no model names."""

from .experts.expert_sort import expert_sort
from .experts.grouped_lora import (
    grouped_lora_dab,
    grouped_lora_dw,
    grouped_lora_dx,
    grouped_lora_forward,
    grouped_lora_linear,
)
from .experts.rows import combine, glu
from .products.symmetric_matmul import symmetric_matmul
from .quant.formats.fp8 import fp8_dequant, fp8_quantize
from .quant.formats.mxfp4 import mxfp4_dequant, mxfp4_quantize
from .quant.nf4_dequant import nf4_dequant
from .quant.nf4_quantize import nf4_quantize
from .step.adamw import adamw
from .step.apply_update import apply_update
from .step.momentum import momentum
from .step.tensor_lists import StochasticRounding

__all__ = [
    "StochasticRounding",
    "adamw",
    "apply_update",
    "combine",
    "expert_sort",
    "fp8_dequant",
    "fp8_quantize",
    "glu",
    "grouped_lora_dab",
    "grouped_lora_dw",
    "grouped_lora_dx",
    "grouped_lora_forward",
    "grouped_lora_linear",
    "momentum",
    "mxfp4_dequant",
    "mxfp4_quantize",
    "nf4_dequant",
    "nf4_quantize",
    "symmetric_matmul",
]
