"""Tensors in, tensors out: one file per op, no state, no parameter groups, no model names."""

from ._lists import StochasticRounding
from .adamw import adamw
from .apply_update import apply_update
from .matmul_add import explain_matmul_add, matmul_add
from .momentum import momentum
from .nf4_dequant import explain_nf4_dequant, nf4_dequant
from .symmetric_matmul import explain_symmetric_matmul, symmetric_matmul

__all__ = [
    "StochasticRounding",
    "adamw",
    "apply_update",
    "explain_matmul_add",
    "explain_nf4_dequant",
    "explain_symmetric_matmul",
    "matmul_add",
    "momentum",
    "nf4_dequant",
    "symmetric_matmul",
]
