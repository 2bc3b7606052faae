"""Orthogonalizing optimizers and mixture-of-experts kernels for training.

    gradient -> momentum -> gather -> orthogonalize -> scatter -> update
    tokens -> sort -> grouped linear + LoRA -> activation -> grouped linear + LoRA -> combine
    shard -> all-gather + matmul | matmul + reduce-scatter

`Muon` and `MuonAdamW` are the first sentence; `orthogonalize` and the methods behind it are its
verb. `moe.Experts` is the second; `layers` has its form for `kernelize`, and `integrations` puts it
into models of transformers and PEFT. `tensor_parallel` is the third, for layers cut over ranks.
`nf4_quantize` makes and `nf4_dequant` decodes 4-bit experts; MXFP4 and FP8 have functions of the
same kind. `explain` says which path an operation takes on a device, and why.
"""

from .version import __version__ as __version__  # first: it refuses what was not asked for

# isort: split
from . import integrations, layers, moe, tensor_parallel
from .distributed import CommUnavailable, all_gather_lc, reduce_scatter_lc
from .explain import explain
from .integrations.checkpoint import load_optimizer, save_optimizer, save_optimizer_async
from .integrations.converters import convert_state_dict
from .integrations.profiler import ProfileCallback, profile_steps
from .kernels import (
    fp8_dequant,
    fp8_quantize,
    mxfp4_dequant,
    mxfp4_quantize,
    nf4_dequant,
    nf4_quantize,
)
from .optimizers import (
    DistMuonAdamW,
    DistributedConfig,
    Muon,
    MuonAdamW,
    MuonFactory,
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
    "CommUnavailable",
    "DistMuonAdamW",
    "DistributedConfig",
    "Muon",
    "MuonAdamW",
    "MuonFactory",
    "ProfileCallback",
    "all_gather_lc",
    "convert_state_dict",
    "default_is_muon",
    "explain",
    "fp8_dequant",
    "fp8_quantize",
    "get_default_muon_param_groups",
    "gram_newton_schulz",
    "integrations",
    "layers",
    "load_optimizer",
    "moe",
    "muon",
    "mxfp4_dequant",
    "mxfp4_quantize",
    "newton_schulz",
    "nf4_dequant",
    "nf4_quantize",
    "orthogonalize",
    "polar_express",
    "polar_express_coefficients",
    "profile_steps",
    "reduce_scatter_lc",
    "save_optimizer",
    "save_optimizer_async",
    "tensor_parallel",
]
