"""Small optimizers with the rules and the state layout of the predecessors, in float64.

Written from their published descriptions.
"""

from __future__ import annotations

import math

import torch

from ..optimizers._steps import polar_express


class Motif(torch.optim.Optimizer):
    """Heavy ball in `momentum_buffer`; AdamW in `moment1`, `moment2`, `step`."""

    def __init__(self, opt, groups, **defaults) -> None:
        self.opt = opt
        options = {"momentum": 0.95, "nesterov": True, "ns_steps": 5, "none_grad": False}
        options |= {"weight_decay": 0.1, "adamw_betas": (0.9, 0.95), "adamw_eps": 1e-8}
        super().__init__(groups, options | defaults)

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                rule = self._matrix if group["use_muon"] else self._vector
                param.mul_(1 - group["lr"] * group["weight_decay"])
                rule(param, self.state[param], group)

    def _matrix(self, param, state, group) -> None:
        buffer = state.setdefault("momentum_buffer", torch.zeros_like(param))
        buffer.mul_(group["momentum"]).add_(param.grad)
        direction = param.grad + group["momentum"] * buffer if group["nesterov"] else buffer
        update = polar_express(self.opt, direction, group["ns_steps"])
        param.sub_(group["lr"] * 0.2 * math.sqrt(max(param.shape)) * update)

    def _vector(self, param, state, group) -> None:
        names = ("moment1", "moment2")
        m, v = (state.setdefault(name, torch.zeros_like(param)) for name in names)
        step = state.setdefault("step", torch.zeros((), dtype=torch.float32))
        adam(param, m, v, step, group["lr"], group["adamw_betas"], group["adamw_eps"])


class Nanochat(torch.optim.Optimizer):
    """A moving average and factored second moments, stacked under the first parameter."""

    def __init__(self, opt, groups) -> None:
        self.opt = opt
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            if group["kind"] == "muon":
                self._stack(group["params"], group)
                continue
            for param in group["params"]:
                state = self.state[param]
                param.mul_(1 - group["lr"] * group["weight_decay"])
                names = ("exp_avg", "exp_avg_sq")
                m, v = (state.setdefault(name, torch.zeros_like(param)) for name in names)
                count = torch.tensor(float(state.get("step", 0)))
                adam(param, m, v, count, group["lr"], group["betas"], group["eps"])
                state["step"] = int(count)

    def _stack(self, params, group) -> None:
        rows, columns = params[0].shape
        axis = -1 if rows >= columns else -2
        grads, state = torch.stack([p.grad for p in params]), self.state[params[0]]
        buffer = state.setdefault("momentum_buffer", torch.zeros_like(grads))
        buffer.lerp_(grads, 1 - group["momentum"])
        directions = grads.lerp(buffer, group["momentum"])
        updates = torch.stack([polar_express(self.opt, d, group["ns_steps"]) for d in directions])
        mean = updates.square().mean(axis, keepdim=True)
        second = state.setdefault("second_momentum_buffer", torch.zeros_like(mean))
        second.lerp_(mean, 1 - group["beta2"])
        scaled = updates * second.clamp_min(1e-10).rsqrt()
        norms = (x.flatten(1).norm(dim=1)[:, None, None] for x in (updates, scaled))
        before, after = norms
        updates = scaled * (before / after.clamp_min(1e-10))
        lr = group["lr"] * math.sqrt(max(1.0, rows / columns))
        for param, update in zip(params, updates, strict=True):
            mask = (update * param >= 0).to(param.dtype)
            param.sub_(lr * update + lr * group["weight_decay"] * param * mask)


def adam(param, m, v, step, lr, betas, eps) -> None:
    """Adam with bias correction, after the decay."""
    step.add_(1)
    count = step.item()
    m.lerp_(param.grad, 1 - betas[0])
    v.lerp_(param.grad.square(), 1 - betas[1])
    denominator = (v / (1 - betas[1] ** count)).sqrt() + eps
    param.sub_(lr * (m / (1 - betas[0] ** count)) / denominator)
