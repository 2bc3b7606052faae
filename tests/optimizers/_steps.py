"""Muon's step, restated plainly in float64, and small models and parameters to step.

Then inputs of each class, torch's own for Muon and AdamW among them, and one of every scheduler.
"""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedulers
from torch.optim.swa_utils import SWALR

from .._compare import assert_all_same_bits, capture

CLASSES = pytest.mark.parametrize("name", ["Muon", "MuonAdamW"])


def polar_express(opt, x: Tensor, steps: int, rows=None, prefactor: float = 1.0) -> Tensor:
    """The schedule `opt` derives, or `rows`, applied in float64 with dense products."""
    x = x.double() / ((prefactor if rows else 1.02) * x.double().norm())
    for a, b, c in rows or opt.polar_express_coefficients(steps):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x


@dataclass
class PlainMuon:
    """Muon's rule for one matrix, in float64; its defaults are those of `Muon`."""

    param: Tensor
    lr: float
    momentum: float = 0.95
    nesterov: bool = True
    momentum_form: str = "heavy_ball"
    ns_steps: int = 5
    rows: list | None = None
    prefactor: float = 1.0
    row_equilibration: bool = False
    renormalize: bool = False
    beta2: float | None = None
    adjust_lr_fn: str | Callable = "match_rms_adamw"
    weight_decay: float = 0.1
    cautious: bool = False
    shaped_decay: bool = False
    iterate: Callable[[Tensor], Tensor] | None = None  # instead of Polar Express
    state: dict[str, Tensor] = field(default_factory=dict)

    def step(self, opt, grad: Tensor) -> tuple[Tensor, float, float]:
        """The update that it took off, the rate and the decay."""
        mu = self.momentum
        new = 1 - mu if self.momentum_form == "ema" else 1
        buffer = self.state.setdefault("momentum", torch.zeros_like(self.param))
        buffer.mul_(mu).add_(new * grad)
        direction = new * grad + mu * buffer if self.nesterov else buffer
        if self.row_equilibration:
            direction = direction / direction.norm(dim=1, keepdim=True)
        if self.iterate is not None:
            update = self.iterate(direction)
        else:
            update = polar_express(opt, direction, self.ns_steps, self.rows, self.prefactor)
        if self.renormalize:
            update *= math.sqrt(min(self.param.shape)) / update.norm()
        if self.beta2 is not None:
            update = self._evened_out(update)
        rate = self._rate(*self.param.shape)
        mask = (update * self.param >= 0) | (not self.cautious)
        decay = (rate if self.shaped_decay else self.lr) * self.weight_decay
        self.param -= rate * update + decay * self.param * mask
        return update, rate, decay

    def _rate(self, rows: int, columns: int) -> float:
        if callable(self.adjust_lr_fn):
            return float(self.adjust_lr_fn(self.lr, rows, columns))
        original = math.sqrt(max(1.0, rows / columns))
        rms = 0.2 * math.sqrt(max(rows, columns))
        spectral = math.sqrt(rows / columns)
        factors = {"original": original, "match_rms_adamw": rms, "spectral": spectral, "none": 1.0}
        return self.lr * factors[self.adjust_lr_fn]

    def _evened_out(self, update: Tensor) -> Tensor:
        """NorMuon's variance reduction: along the longer side, keeping the norm."""
        rows, columns = self.param.shape
        mean = update.pow(2).mean(1 if rows >= columns else 0, keepdim=True)
        second = self.state.setdefault("second", torch.zeros_like(mean))
        second.mul_(self.beta2).add_((1 - self.beta2) * mean)
        scaled = update / second.clamp_min(1e-10).sqrt()
        return scaled * (update.norm() / scaled.norm().clamp_min(1e-10))


# What MuonAdamW does where a group says nothing: nanochat's rule.
NANOCHAT = {"momentum_form": "ema", "adjust_lr_fn": "original", "beta2": 0.95}
NANOCHAT |= {"weight_decay": 0.0, "cautious": True, "shaped_decay": True}


def parameters(
    shapes, *, dtype=torch.float32, device="cpu", seed: int = 0, scale: float = 0.1
) -> list[nn.Parameter]:
    """Seeded parameters with gradients; equal seeds give equal values in every dtype and device."""
    generator = torch.Generator().manual_seed(seed)
    params = []
    for shape in shapes:
        value = torch.randn(shape, generator=generator, dtype=torch.float64) * scale
        param = nn.Parameter(value.to(device=device, dtype=dtype))
        params.append(param)
    new_gradients(params, seed=seed + 1)
    return params


def new_gradients(params, *, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for param in params:
        grad = torch.randn(param.shape, generator=generator, dtype=torch.float64)
        param.grad = grad.to(device=param.device, dtype=param.dtype)


def train(optimizer, params, steps: int, *, seed: int = 100) -> None:
    """`steps` steps on seeded gradients that do not depend on the parameters."""
    for index in range(steps):
        new_gradients(params, seed=seed + index)
        optimizer.step()


def marked(params, count: int, **options) -> list[dict]:
    """A group of the first `count` parameters for Muon, with these options, and one for AdamW."""
    muon, adamw = params[:count], params[count:]
    return [{"params": muon, "use_muon": True, **options}, {"params": adamw, "use_muon": False}]


# Every way of cutting a parameter for Muon, empty and one-row ones among them; and some for AdamW.
CUTS = {"experts.w": (3, 6, 4), "experts.v": (4, 8, 4), "experts.u": (3, 6, 4)}
CUTS |= {"qkv": (12, 4), "fused": (8, 4), "conv": (4, 3, 2, 2)}
MATRICES = {"a": (6, 4), "b": (4, 6), "c": (6, 4), "empty": (0, 4), "row": (1, 5), **CUTS}
EVERY_SHAPE = {**MATRICES, "bias": (5,), "scale": (), "table": (7, 3), "nothing": (0,)}
PARTS = {"qkv": (4, 4, 4), "fused": (2, 6), "experts.w": (2, 4), "experts.v": (4, 4)}
FOR_BOTH = ("lr", "weight_decay", "none_grad", "rounding", "rounding_seed")


def of_every_shape(dtype=torch.bfloat16, device="cpu") -> list[nn.Parameter]:
    return parameters(EVERY_SHAPE.values(), dtype=dtype, device=device)


def every_cut(opt, name, params, **options):
    """One optimizer of `of_every_shape`'s parameters: a Muon group and one for AdamW."""
    named = list(zip(EVERY_SHAPE, params, strict=True))
    options = {"lr": 0.02, "weight_decay": 0.1, **options}
    muon, adamw = marked(named, len(MATRICES), expert_keys=["experts"], split_sizes=PARTS)
    adamw |= {key: value for key, value in options.items() if key in FOR_BOTH}
    return getattr(opt, name)([{**muon, **options}, adamw])


def channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def reversed_in_memory(x: Tensor) -> Tensor:
    """Seven dimensions of which no two can be merged, one more than the kernels walk."""
    order = list(reversed(range(x.ndim)))
    return x.permute(order).contiguous().permute(order)


def both(opt, name, params, **options):
    """One Muon group of the first half of `params` and one AdamW group of the others."""
    groups = marked(params, len(params) // 2)
    if name == "Muon":
        return opt.Muon(groups, **options)
    return opt.MuonAdamW([{**group, "lr": 0.02, **options} for group in groups])


def values(params) -> list[Tensor]:
    return [param.detach().clone() for param in params]


@contextlib.contextmanager
def nothing_written(optimizer) -> Iterator[None]:
    """Fails where a bit of the parameters or of their state changes in the block."""
    optimizer.fit_state()  # as the first step would
    params = [param for group in optimizer.param_groups for param in group["params"]]
    before, state = values(params), copy.deepcopy(optimizer.state_dict()["state"])
    yield
    assert_all_same_bits(params, before)
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)


class TinyTransformer(nn.Module):
    """The parts of a language model whose parameters must be told apart."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(32, 8)
        self.layers = nn.ModuleList([TinyLayer() for _ in range(2)])
        self.norm = nn.LayerNorm(8)
        self.lm_head = nn.Linear(8, 32, bias=False)
        if tied:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed_tokens(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.norm(x))


class TinyLayer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(8, 24)
        self.output = nn.Linear(8, 8)
        self.input_layernorm = nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.input_layernorm(x)).chunk(3, -1)
        return x + self.output(q.sigmoid() * k + v)


def language_loss(model: nn.Module, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    tokens = torch.randint(0, 32, (4, 16), generator=generator).to(device)
    logits = model(tokens[:, :-1])
    return nn.functional.cross_entropy(logits.reshape(-1, 32), tokens[:, 1:].reshape(-1))


def in_place(optimizer, params, captured: bool, **options) -> Callable[[int], None]:
    """`run(seed)`: one step by fresh gradients in the same memory, eager or as a graph's replay."""
    start, static = values(params), [param.grad for param in params]
    step = functools.partial(optimizer.step, **options)
    if captured:
        graph, _ = capture(step, 1)
        with torch.no_grad():  # the warm-up changed parameters and state, which began as zeros
            for param, value in zip(params, start, strict=True):
                param.copy_(value)
                for state in optimizer.state[param].values():
                    state.zero_()
        step = graph.replay

    def run(seed: int) -> None:
        new_gradients(params, seed=seed)
        for kept, param in zip(static, params, strict=True):
            kept.copy_(param.grad)
            param.grad = kept
        step()

    return run


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
    "CosineAnnealingWarmRestarts": functools.partial(schedulers.CosineAnnealingWarmRestarts, T_0=4),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, max_lr=[0.02, 0.01], total_steps=12),
    "PolynomialLR": lambda o: schedulers.PolynomialLR(o, total_iters=8, power=2.0),
    "SWALR": lambda o: SWALR(o, swa_lr=1e-3, anneal_epochs=4),
}


def make(opt, name: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    """The class over torch's kind of `params`, whose groups without a mark go by shape."""
    params = list(params)
    groups = params if params and isinstance(params[0], dict) else [{"params": params}]
    if name == "Muon":
        own = {"betas": "adamw_betas", "eps": "adamw_eps"}
        return opt.Muon(groups, **{own.get(key, key): value for key, value in options.items()})
    return opt.MuonAdamW([{"lr": 0.02, **options, **group} for group in groups])


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
