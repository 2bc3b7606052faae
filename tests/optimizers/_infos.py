"""Inputs of each class, torch's own for Muon and AdamW among them, and one of every scheduler."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from ._steps import CLASSES

MUON, ADAMW = "muon", "adamw"
ADAMW_OPTIONS = ("betas", "eps")
SHARED_OPTIONS = ("lr", "weight_decay", "none_grad")

INPUTS: dict[str, dict[str, Any]] = {
    "default": {},
    "another lr": {"lr": 0.01},
    "Tensor lr": {"lr": torch.tensor(0.001)},
    "another momentum": {"momentum": 0.8},
    "more steps": {"ns_steps": 6},
    "coefficients": {"ns_coefficients": (3.4, -4.7, 2.0)},
    "another decay": {"weight_decay": 0.2},
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


# One of every scheduler, as test_there_is_one_of_every_scheduler finds.
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, lambda epoch: 0.9**epoch),
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
    groups = list(_groups(list(params)))
    if name == "Muon":
        own = {key: f"adamw_{key}" for key in ADAMW_OPTIONS}
        return opt.Muon(groups, **{own.get(key, key): value for key, value in options.items()})
    return opt.MuonAdamW([{"lr": 0.02, **_chosen(group, options), **group} for group in groups])


def _groups(params: list[Any]) -> Iterable[dict[str, Any]]:
    if params and isinstance(params[0], dict):
        for group in params:
            yield {"kind": _kind(group["params"]), **group}
        return
    for kind in (MUON, ADAMW):
        if chosen := [entry for entry in params if _kind([entry]) == kind]:
            yield {"params": chosen, "kind": kind}


def _kind(params: Any) -> str:
    (first, *_) = params
    return MUON if (first[1] if isinstance(first, tuple) else first).dim() >= 2 else ADAMW


def _chosen(group: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """The options that are for this group."""
    muon = group["kind"] == MUON
    return {
        key: value
        for key, value in options.items()
        if key in SHARED_OPTIONS or (key not in ADAMW_OPTIONS) == muon
    }


def by_input(test):
    """Every class with every input."""
    return CLASSES(pytest.mark.parametrize("options", INPUTS.values(), ids=INPUTS)(test))


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
