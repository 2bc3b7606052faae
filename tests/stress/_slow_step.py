"""One step of one parameter in float64, with dense products and nothing shared.

It restates from the documentation how a parameter is cut into matrices and takes the arithmetic
from the package's `reference/`, which the optimizers do not use where they have kernels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class Expected:
    """What a step should leave behind."""

    value: Tensor  # float64, before it is rounded to the parameter's dtype
    slack: Tensor | float  # what the iteration's dtype may change
    state: dict[str, Tensor]


class SlowStep:
    """The step of a package `opt`."""

    def __init__(self, opt: Any, submodule: Any) -> None:
        self.opt = opt
        self.update = submodule("reference.update")
        self.rounding = submodule("reference.rounding")
        self.iteration = submodule("reference.orthogonalize")
        self.polynomials = submodule("orthogonalize.gram_polynomial")
        self.choose = submodule("orthogonalize.choose").choose

    def value(self, param: Tensor, state: dict[str, Tensor]) -> Tensor:
        """A parameter with what rounding kept of it, in float64."""
        return self.rounding.load(param, state.get("rounding_residual")).double().contiguous()

    def adamw(self, param: Tensor, state: dict[str, Tensor], options: dict[str, Any]) -> Expected:
        value = self.value(param, state)
        kept = {key: state[key].double() for key in ("exp_avg", "exp_avg_sq", "step")}
        old = value.clone()
        self.update.adamw(
            value,
            param.grad.double(),
            *(kept[key] for key in ("exp_avg", "exp_avg_sq", "step")),
            lr=number(options["lr"]),
            betas=options["betas"],
            eps=options["eps"],
            weight_decay=number(options["weight_decay"]),
        )
        slack = 1e-4 * (value - old).abs() + 1e-5 * number(options["lr"]) + 1e-6 * old.abs()
        return Expected(value, slack, kept)

    def muon(
        self, name: str, param: Tensor, state: dict[str, Tensor], options: dict[str, Any]
    ) -> Expected:
        value, buffer = self.value(param, state), state["momentum_buffer"].double().contiguous()
        direction = self.update.momentum(
            param.grad.double().contiguous(),
            buffer,
            options["momentum"],
            nesterov=options["nesterov"],
            ema=options["momentum_form"] == "ema",
        )
        kept = {"momentum_buffer": buffer}
        moments = state.get("second_momentum_buffer")
        if options["beta2"] is not None:
            kept["second_momentum_buffer"] = moments = moments.double()
        slack = torch.zeros_like(value)
        at = 0
        for block in blocks_of(name, value, options):
            m, n = block(value).shape
            if not m * n:
                continue
            update = self.orthogonal(block(direction), options, param.dtype)
            loose = update.abs().max() * (1e-3 if options["dtype"] not in HALF else 0.1)
            if options["beta2"] is not None:
                size = max(m, n)
                place = moments.view(-1)[at : at + size].view((m, 1) if m >= n else (1, n))
                update = self.update.variance_reduction(update, place, options["beta2"])
                loose = update.abs().max() * 1e-2
                at += size
            rate, decay = rates(options, m, n)
            self.update.apply_update(
                block(value), update, lr=rate, decay=decay, cautious=options["cautious"]
            )
            old = block(self.value(param, state))
            block(slack).copy_(rate * loose + 1e-6 * old.abs())
            if options["cautious"]:  # the sign of an update near zero decides the decay
                block(slack).add_(decay * old.abs() * (update.abs() <= loose))
        return Expected(value, slack, kept)

    def orthogonal(self, matrix: Tensor, options: dict[str, Any], dtype: torch.dtype) -> Tensor:
        m, n, steps = *matrix.shape, options["ns_steps"]
        method = self.choose(
            m,
            n,
            dtype=torch.float64 if dtype == torch.float64 else torch.float32,
            device="cpu",
            steps=steps,
            method=options["method"],
            iterate_dtype=options["dtype"],
        ).method
        wide = matrix if m <= n else matrix.mT
        if method == "gram_polynomial":
            found = self.iteration.gram_polynomial(
                wide, self.polynomials.POLYNOMIALS, self.polynomials.SAFETY
            )
        elif method == "newton_schulz":
            found = self.iteration.newton_schulz(wide, [(3.4445, -4.7750, 2.0315)] * steps)
        else:
            rows = self.opt.polar_express_coefficients(steps)
            found = self.iteration.newton_schulz(wide, rows, 1.02)
        return found if m <= n else found.mT


def blocks_of(name: str, value: Tensor, options: dict[str, Any]) -> list[Any]:
    """Functions that take the matrices out of a tensor shaped like the parameter, as views."""
    stack = value.ndim == 3 and any(
        key in name.split(".") for key in options.get("expert_keys") or ()
    )
    tops = [lambda t, e=e: t[e] for e in range(len(value))] if stack else [_flat]
    rows = value.shape[1] if stack else value.shape[0]
    heads, parts = ((options.get(key) or {}) for key in ("num_heads", "split_sizes"))
    sizes = (rows,)
    if name in heads:
        sizes = (rows // heads[name],) * heads[name]
    elif name in parts:
        sizes = tuple(parts[name])
    starts = [sum(sizes[:k]) for k in range(len(sizes))]
    # With split_sizes the statistics of a part of all experts stand together.
    pairs = [(top, k) for top in tops for k in range(len(sizes))]
    if name in parts:
        pairs.sort(key=lambda pair: pair[1])
    return [lambda t, top=top, k=k: top(t).narrow(0, starts[k], sizes[k]) for top, k in pairs]


def _flat(tensor: Tensor) -> Tensor:
    return tensor if tensor.ndim == 2 else tensor.view(len(tensor), math.prod(tensor.shape[1:]))


def rates(options: dict[str, Any], m: int, n: int) -> tuple[float, float]:
    """(learning rate, decay) of a matrix."""
    lr, rule = number(options["lr"]), options["adjust_lr_fn"]
    factor = {
        None: 1.0,
        "match_rms_adamw": 0.2 * math.sqrt(max(m, n)),
        "original": math.sqrt(max(1.0, m / n)),
        "spectral": math.sqrt(m / n),
    }
    rate = float(rule(lr, m, n)) if callable(rule) else lr * factor[rule]
    return rate, (rate if options["shaped_decay"] else lr) * number(options["weight_decay"])


def number(value: Any) -> float:
    return float(value)
