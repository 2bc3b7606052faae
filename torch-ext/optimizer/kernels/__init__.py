"""Tensors in, tensors out: one file per op, no state, no parameter groups, no model names."""

from ._lists import StochasticRounding
from .adamw import adamw
from .apply_update import apply_update
from .momentum import momentum
from .nf4_dequant import explain_nf4_dequant, nf4_dequant
from .nf4_quantize import explain_nf4_quantize, nf4_quantize
from .symmetric_matmul import explain_symmetric_matmul, symmetric_matmul

__all__ = [
    "StochasticRounding",
    "adamw",
    "apply_update",
    "explain_nf4_dequant",
    "explain_nf4_quantize",
    "explain_symmetric_matmul",
    "momentum",
    "nf4_dequant",
    "nf4_quantize",
    "symmetric_matmul",
]
