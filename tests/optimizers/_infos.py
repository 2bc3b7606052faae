"""Inputs of each class: torch's own for Muon and AdamW, right and wrong, and ours."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from enum import Enum
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Union

import pytest
import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

SOURCE = Path("testing", "_internal", "common_optimizers.py")
DEFINITIONS = {
    "OptimizerInput",
    "OptimizerErrorEnum",
    "ErrorOptimizerInput",
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
    """torch's OptimizerInput, ..., and its input functions for Muon and AdamW."""
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
        "Tensor": torch.Tensor,
        "torch": torch,
        "Union": Union,  # in annotations of torch 2.11
    }
    exec(compile(tree, str(path), "exec"), names)
    return SimpleNamespace(**{name: names[name] for name in DEFINITIONS})


TORCH = torch_infos()
NAMES = ("Muon", "MuonAdamW")
MUON, ADAMW = "muon", "adamw"
# The keywords that choose one of torch's implementations, and options of its AdamW alone.
TORCH_ONLY = {"foreach", "fused", "capturable", "differentiable", "maximize", "amsgrad"}
ADAMW_OPTIONS = ("betas", "eps")
SHARED_OPTIONS = ("lr", "weight_decay", "none_grad")

OWN_KWARGS: dict[str, dict[str, Any]] = {
    "Tensor lr with one dimension": {"lr": torch.tensor([0.01])},
    "float64 Tensor lr": {"lr": torch.tensor(0.01, dtype=torch.float64)},
    "passing betas and eps": {"betas": (0.8, 0.9), "eps": 1e-6},
    "no momentum": {"momentum": 0.0, "nesterov": False, "betas": (0.0, 0.9)},
    "heavy ball": {"momentum_form": "heavy_ball", "nesterov": False},
    "moving average": {"momentum_form": "ema"},
    "bfloat16 momentum": {"momentum_dtype": torch.bfloat16},
    "rows and matrices rescaled": {"row_equilibration": True, "renormalize": True},
    "transposed": {"transposed": True, "adjust_lr_fn": "original"},
    "variance reduction": {"beta2": 0.9},
    "no variance reduction": {"beta2": None},
    "cautious decay by the raw rate": {"weight_decay": 0.1, "cautious": True},
    "plain decay by the shaped rate": {"weight_decay": 0.1, "shaped_decay": True},
    "rate of spectral norms": {"adjust_lr_fn": "spectral"},
    "rate as given": {"adjust_lr_fn": "none"},
    "Gram form in float32": {"method": "gram_newton_schulz", "dtype": torch.float32},
    "heads": {"num_heads": 2},
    "split rows": {"split_sizes": (6, 4)},
    "gradients dropped": {"none_grad": True},
    "gradients kept": {"none_grad": False},
}


def all_torch_inputs(device: torch.device) -> list[Any]:
    """torch's inputs for Muon and for AdamW: both classes take both, one description once."""
    inputs = [
        *TORCH.optim_inputs_func_muon(device, torch.float32),
        *TORCH.optim_inputs_func_adamw(torch.device("cuda"), torch.float32),  # adds capturable
    ]
    return list({entry.desc: entry for entry in inputs}.values())


def inputs(device: torch.device) -> list[Any]:
    """What both classes can be constructed with."""
    supported = [entry for entry in all_torch_inputs(device) if not TORCH_ONLY & set(entry.kwargs)]
    own = [TORCH.OptimizerInput(None, dict(kw), desc) for desc, kw in OWN_KWARGS.items()]
    return [*supported, *own]


def refused_inputs(device: torch.device) -> list[Any]:
    return [entry for entry in all_torch_inputs(device) if TORCH_ONLY & set(entry.kwargs)]


# torch's error inputs by description -> the error and message here.
UNKNOWN = (TypeError, "unexpected keyword argument '{0}'")
ERRORS: dict[str, tuple[Any, str]] = {
    "invalid param type": (TypeError, "iterable of|an iterable of Tensors"),
    "a param group cannot have duplicate parameters": (ValueError, "this parameter is already"),
    "duplicate parameters should not occur across param groups either": (
        ValueError,
        "group 1, parameter 0: this parameter is already group 0, parameter 0",
    ),
    "Tensor lr must be 1-element": (ValueError, "a Tensor lr must hold one floating-point number"),
    "all optimizer params should be with/without names": (ValueError, "a name with every param"),
    "only support 2D parameters": (ValueError, r"shape \(2, 3, 4\) is 3-D"),
    "only support `original` and `match_rms_adamw`": (ValueError, "adjust_lr_fn must be one of"),
    "does not support complex parameters": (ValueError, "must be real, got torch.complex64"),
    "beta1 should be between 0 and 1": (ValueError, r"betas must lie in \[0, 1\), got 1.0"),
    "weight_decay should > 0": (ValueError, "weight_decay must be finite and at least 0, got -1"),
    "betas must be either both floats or both Tensors": (TypeError, "betas must be a number"),
    # a flag of torch's implementations is no option here
    "lr as Tensor doesn't work with foreach & not capturable": UNKNOWN,
    r"betas\[0\] as a Tensor is not supported for capturable=False and foreach=True": UNKNOWN,
    r"betas\[1\] as a Tensor is not supported for capturable=False and foreach=True": UNKNOWN,
}
# Names belong to groups here: a named and an unnamed group go together.
ACCEPTED = {"all optimizer param groups should be with/without names."}


def torch_error_inputs() -> list[Any]:
    """torch makes most of them for the CPU only, whatever the device."""
    cpu = torch.device("cpu")
    return [
        *TORCH.optim_error_inputs_func_muon(cpu, torch.float32),
        *TORCH.optim_error_inputs_func_adamw(cpu, torch.float32),
    ]


def error_inputs(device: torch.device, dtype: torch.dtype) -> list[Any]:
    """torch's error inputs with the errors of this package, and gradients refused by a step."""
    found = []
    for entry in torch_error_inputs():
        given = entry.optimizer_error_input
        if given.desc in ACCEPTED:
            continue
        error, message = ERRORS[given.desc]
        flags = sorted(TORCH_ONLY & set(given.kwargs))
        found.append(_error(given, error, message.format(*flags)))
    for shape in [(4, 3), (3,)]:
        param = nn.Parameter(torch.ones(shape, device=device, dtype=dtype))
        param.grad = torch.ones_like(param).detach().to_sparse()
        sparse = TORCH.OptimizerInput([param], {}, f"sparse gradient of shape {shape}")
        message = "group 0, parameter 0: gradient: must be dense"
        found.append(_error(sparse, ValueError, message, TORCH.OptimizerErrorEnum.STEP_ERROR))
        dense = nn.Parameter(torch.ones(shape, device=device, dtype=dtype).to_sparse())
        sparse = TORCH.OptimizerInput([dense], {}, f"sparse parameter of shape {shape}")
        found.append(_error(sparse, ValueError, "group 0, parameter 0: must be dense"))
        whole = torch.ones(shape, device=device, dtype=torch.complex64, requires_grad=True)
        given = TORCH.OptimizerInput([whole], {}, f"complex parameter of shape {shape}")
        found.append(_error(given, ValueError, "must be real, got torch.complex64"))
    return found


def _error(given: Any, error: Any, message: str, error_on: Any = None) -> Any:
    return TORCH.ErrorOptimizerInput(
        given,
        error_on=error_on or TORCH.OptimizerErrorEnum.CONSTRUCTION_ERROR,
        error_type=error,
        error_regex=message,
    )


def _lambdas(optimizer) -> list[Callable[[int], float]]:
    return [lambda epoch: 0.9**epoch for _ in optimizer.param_groups]


# One of every scheduler, as test_there_is_one_of_every_scheduler finds.
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, _lambdas(o)),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, lambda epoch: 0.95),
    "StepLR": lambda o: schedulers.StepLR(o, step_size=3, gamma=0.5),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, milestones=[2, 5], gamma=0.5),
    "ConstantLR": lambda o: schedulers.ConstantLR(o, factor=0.4, total_iters=4),
    "LinearLR": lambda o: schedulers.LinearLR(o, start_factor=0.4, total_iters=4),
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, gamma=0.9),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o,
        [schedulers.ConstantLR(o, 0.5, total_iters=3), schedulers.ExponentialLR(o, 0.9)],
        milestones=[4],
    ),
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, T_max=8),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.ExponentialLR(o, 0.9), schedulers.StepLR(o, step_size=3, gamma=0.5)]
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, base_lr=1e-3, max_lr=1e-2, step_size_up=3),
    "CosineAnnealingWarmRestarts": partial(schedulers.CosineAnnealingWarmRestarts, T_0=4),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=[0.02, 0.01], total_steps=12),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=8, power=2.0),
    "SWALR": lambda o: SWALR(o, swa_lr=1e-3, anneal_epochs=4),
}


def make(opt, name: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    """The class over torch's kind of `params`: matrices for Muon, the rest for AdamW."""
    if isinstance(params, Tensor):
        return getattr(opt, name)(params)
    groups = list(_groups(list(params)))
    if name == "Muon":
        own = {key: f"adamw_{key}" for key in ADAMW_OPTIONS}
        return opt.Muon(groups, **{own.get(key, key): value for key, value in options.items()})
    flags = {key: options.pop(key) for key in TORCH_ONLY & options.keys()}
    marked = [{"lr": 0.02, **_chosen(group, options), **group} for group in groups]
    return opt.MuonAdamW(marked, **flags)


def _groups(params: list[Any]) -> Iterable[dict[str, Any]]:
    if params and isinstance(params[0], dict):
        for group in params:
            yield {"kind": _kind(group["params"]), **group}
        return
    for kind in (MUON, ADAMW):
        if chosen := [entry for entry in params if _kind([entry]) == kind]:
            yield {"params": chosen, "kind": kind}


def _kind(params: Any) -> str:
    first = params if isinstance(params, Tensor) else params[0]
    return MUON if (first[1] if isinstance(first, tuple) else first).dim() >= 2 else ADAMW


def _chosen(group: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options that are for this group."""
    muon = group["kind"] == MUON
    return {
        key: value
        for key, value in options.items()
        if key in SHARED_OPTIONS or (key not in ADAMW_OPTIONS) == muon
    }


def by_class(argument: str = "name"):
    return pytest.mark.parametrize(argument, NAMES)


def by_input():
    """Every class with every input it supports."""
    cpu = torch.device("cpu")
    pairs = [(name, entry) for name in NAMES for entry in inputs(cpu)]
    ids = [f"{name}-{entry.desc.replace(' ', '_')}" for name, entry in pairs]
    return pytest.mark.parametrize(("name", "entry"), pairs, ids=ids)


class LeastSquares:
    """torch's problem for these tests: |W x + b|^2 of a (10, 5) weight and a bias, seeded."""

    def __init__(self, device, dtype=torch.float32, *, seed: int = 0):
        generator = torch.Generator().manual_seed(seed)

        def tensor(*shape: int) -> Tensor:
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            return value.to(device=device, dtype=dtype)

        self.weight, self.bias = nn.Parameter(tensor(10, 5)), nn.Parameter(tensor(10))
        self.input = tensor(5)

    @property
    def params(self) -> list[nn.Parameter]:
        return [self.weight, self.bias]

    def loss(self, scale: Callable[[Tensor], Tensor] = lambda loss: loss) -> Tensor:
        """The loss, with the gradients of its scaled value in the parameters."""
        for param in self.params:
            param.grad = None
        loss = (self.weight.mv(self.input) + self.bias).square().sum()
        scale(loss).backward()
        return loss

    def copy(self) -> LeastSquares:
        other = object.__new__(LeastSquares)
        other.weight = nn.Parameter(self.weight.detach().clone())
        other.bias = nn.Parameter(self.bias.detach().clone())
        other.input = self.input
        return other
