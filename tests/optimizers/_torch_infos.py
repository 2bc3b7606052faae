"""torch's own optimizer infos, without the module they are in.

Importing `torch.testing._internal.common_optimizers` needs `expecttest`, and imports
`common_utils`, which forbids the whole process to set flags of `torch.backends` again. So its
source is read instead, and only the definitions named here are evaluated.
"""

from __future__ import annotations

import ast
from enum import Enum
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Union

import torch
from torch.nn import Parameter
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

SOURCE = Path("testing", "_internal", "common_optimizers.py")
DEFINITIONS = {
    "OptimizerInput",
    "OptimizerErrorEnum",
    "ErrorOptimizerInput",
    "OptimizerInfo",
    "_get_device_type",
    "get_error_inputs_for_all_optims",
    "optim_inputs_func_muon",
    "optim_error_inputs_func_muon",
    "optim_inputs_func_adam",
    "optim_inputs_func_adamw",
    "optim_error_inputs_func_adam",
    "optim_error_inputs_func_adamw",
}


def torch_infos() -> SimpleNamespace:
    """torch's OptimizerInfo, OptimizerInput, ..., and its input functions for Muon and AdamW."""
    spec = find_spec("torch")
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin).parent / SOURCE
    tree = ast.parse(path.read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) in DEFINITIONS]
    missing = DEFINITIONS - {node.name for node in tree.body}
    assert not missing, f"{path} of torch {torch.__version__} has no {sorted(missing)}"
    names: dict[str, Any] = {
        "Any": Any,
        "CUDA_CONFIG_GPUS": ["cuda", "xpu"],
        "Enum": Enum,
        "Optimizer": torch.optim.Optimizer,
        "Parameter": Parameter,
        "ReduceLROnPlateau": ReduceLROnPlateau,
        "StepLR": StepLR,
        "Tensor": torch.Tensor,
        "torch": torch,
        "Union": Union,  # in annotations of torch 2.11
    }
    exec(compile(tree, str(path), "exec"), names)
    return SimpleNamespace(**{name: names[name] for name in DEFINITIONS})
