"""Tensors in, tensors out: one file per op, no state, no parameter groups, no model names."""

from .nf4_dequant import explain_nf4_dequant, nf4_dequant

__all__ = ["explain_nf4_dequant", "nf4_dequant"]
