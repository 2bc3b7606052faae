"""Orthogonalizing optimizers and quantized-expert kernels for training.

    gradient -> momentum -> gather -> orthogonalize -> scatter -> update

`Muon` and `MuonAdamW` are that sentence; `orthogonalize` and the methods behind it are its verb.
`nf4_quantize` makes and `nf4_dequant` decodes the 4-bit experts of a mixture-of-experts model.
`explain` says which path an operation takes on a device, and why.
"""

from . import layers, moe
from .explain import explain
from .integrations.checkpoint import load_optimizer, save_optimizer
from .kernels import nf4_dequant, nf4_quantize
from .optimizers import (
    DistMuonAdamW,
    Muon,
    MuonAdamW,
    default_is_muon,
    get_default_muon_param_groups,
    muon,
)
from .orthogonalize import (
    COEFFICIENT_SETS,
    gram_newton_schulz,
    newton_schulz,
    orthogonalize,
    polar_express,
    polar_express_coefficients,
)

__all__ = [
    "COEFFICIENT_SETS",
    "DistMuonAdamW",
    "Muon",
    "MuonAdamW",
    "default_is_muon",
    "explain",
    "get_default_muon_param_groups",
    "gram_newton_schulz",
    "layers",
    "load_optimizer",
    "moe",
    "muon",
    "newton_schulz",
    "nf4_dequant",
    "nf4_quantize",
    "orthogonalize",
    "polar_express",
    "polar_express_coefficients",
    "save_optimizer",
]
