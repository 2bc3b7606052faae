"""gradient -> momentum -> gather -> orthogonalize -> scatter -> update."""

from . import muon
from .groups.default_groups import default_is_muon, get_default_muon_param_groups
from .muon import Muon, MuonFactory
from .muon_adamw import DistMuonAdamW, MuonAdamW
from .sharded.buffers import DistributedConfig

__all__ = [
    "DistMuonAdamW",
    "DistributedConfig",
    "Muon",
    "MuonAdamW",
    "MuonFactory",
    "default_is_muon",
    "get_default_muon_param_groups",
    "muon",
]
