"""Episodes, and one step of one parameter in float64, with dense products and nothing shared.

It restates from the documentation how a parameter is cut into matrices. Their rule is PlainMuon's;
AdamW's arithmetic is the package's `reference/`, which the optimizers do not use where they have
kernels.

An episode is steps of one optimizer to which things happen, beside a twin that is left alone.
"""

import contextlib
import importlib
import math
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import lr_scheduler

from ..optimizers._steps import PlainMuon
from ..orthogonalize._matrices import exact
from . import _events
from ._problem import (
    DifferenceError,
    Pair,
    Run,
    Source,
    assert_same,
    assert_unchanged,
    bits,
    gradient,
)

HALF = (torch.float16, torch.bfloat16)


RULE = ("lr", "momentum", "nesterov", "momentum_form", "beta2", "adjust_lr_fn", "weight_decay")
RULE += ("cautious", "shaped_decay")


class SlowStep:
    """The step of a package `opt`: a parameter's value in float64, and how far off it may be."""

    def __init__(self, opt: Any, submodule: Any) -> None:
        self.opt, self.submodule = opt, submodule
        self.rounding = submodule("reference.rounding")

    def value(self, param: Tensor, state: dict[str, Tensor]) -> Tensor:
        """A parameter with what rounding kept of it, in float64."""
        return self.rounding.load(param, state.get("rounding_residual")).double().contiguous()

    def adamw(
        self, param: Tensor, state: dict[str, Tensor], options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        value = self.value(param, state)
        old = value.clone()
        self.submodule("reference.update").adamw(
            value,
            param.grad.double(),
            *(state[key].double() for key in ("exp_avg", "exp_avg_sq", "step")),
            lr=options["lr"],
            betas=options["betas"],
            eps=options["eps"],
            weight_decay=options["weight_decay"],
        )
        return value, 1e-4 * (value - old).abs() + 1e-5 * options["lr"] + 1e-6 * old.abs()

    def muon(
        self, name: str, param: Tensor, state: dict[str, Tensor], options: dict[str, Any]
    ) -> tuple[Tensor, Tensor]:
        value, grad = self.value(param, state), param.grad.double().contiguous()
        old, slack = value.clone(), torch.zeros_like(value)
        buffer, at = state["momentum_buffer"].double().contiguous(), 0
        rule = {key: options[key] for key in RULE}
        rule["iterate"] = lambda x: self.orthogonal(x, options, param.dtype)
        tolerance = 0.1 if options["dtype"] in HALF else 1e-3
        if options["beta2"] is not None:
            moments, tolerance = state["second_momentum_buffer"].double().view(-1), 1e-2
        for block in blocks_of(name, value, options):
            m, n = block(value).shape
            if not m * n:
                continue
            kept = {"momentum": block(buffer)}
            if options["beta2"] is not None:
                size = max(m, n)
                kept["second"] = moments[at : at + size].view((m, 1) if m >= n else (1, n))
                at += size
            taken = PlainMuon(block(value), state=kept, **rule).step(self.opt, block(grad))
            update, rate, decay = taken
            loose = update.abs().max() * tolerance
            block(slack).copy_(rate * loose + 1e-6 * block(old).abs())
            if options["cautious"]:  # the sign of an update near zero decides the decay
                block(slack).add_(decay * block(old).abs() * (update.abs() <= loose))
        return value, slack

    def orthogonal(self, matrix: Tensor, options: dict[str, Any], dtype: torch.dtype) -> Tensor:
        return exact(
            self.opt,
            self.submodule,
            matrix,
            options["method"],
            options["ns_steps"],
            dtype=torch.float64 if dtype == torch.float64 else torch.float32,
            iterate_dtype=options["dtype"],
        )


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


EVENT_RATE = 0.6
MISSING_RATE = 0.08
ADAMW = ("betas", "eps")


class Episode(Pair):
    """Both runs, what happened to them, and the steps that they take together."""

    def __init__(self, opt: Any, seed: int) -> None:
        super().__init__()
        self.opt = opt
        self.submodule = lambda name: importlib.import_module(f"{opt.__name__}.{name}")
        self.generator = generator = random.Random(seed)
        self.front = generator.choice(["Muon", "MuonAdamW"])
        self.source = Source(generator)
        given = [self.source.group(muon=muon) for muon in (True, False)]
        values = {one.name: one.value() for group in given for one in group.params}
        self.run, self.twin = (
            Run(opt, self.front, list(given), {}).make(values, [{} for _ in given])
            for _ in range(2)
        )
        self.slow = SlowStep(opt, self.submodule)
        self.folder = Path(tempfile.mkdtemp(prefix="soak-"))

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def new_folder(self) -> Path:
        return Path(tempfile.mkdtemp(dir=self.folder))

    def refused(self, what: str, action: Callable[[], Any], *errors: type[BaseException]) -> None:
        """The action must raise one of the errors, and leave all as it was."""
        before = self.run.snapshot()
        try:
            action()
        except errors:
            pass
        except Exception as error:
            raise DifferenceError(f"{what}: {type(error).__name__}: {error}") from error
        else:
            raise DifferenceError(f"{what}: accepted")
        assert_unchanged(self.run, before, f"after {what} was refused")

    def schedule(self, kind: str) -> None:
        make = {
            "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
            "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
            "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=1000),
        }[kind]
        self.schedulers = [make(run.optimizer) for run in (self.run, self.twin)]

    def fill_gradients(self) -> None:
        """The same new gradients for both; some are missing."""
        every = self.generator.random() < 0.5
        rate = 0.0 if every else self.generator.choice([MISSING_RATE, 0.5, 1.0])
        for name, param in self.run.params.items():
            seed = self.generator.randrange(10**9)
            missing = self.generator.random() < rate
            grad = None if missing else gradient(param, self.generator, seed)
            param.grad = grad
            self.twin.params[name].grad = None if grad is None else grad.clone()

    def tick(self) -> None:
        """New gradients, perhaps an event, and a step."""
        self.fill_gradients()
        if self.generator.random() < EVENT_RATE:
            name = _events.draw(self.generator)
            self.happened.append(name)
            _events.EVENTS[name](self)
            assert_same(self.run, self.twin, f"after {name}")
        surroundings = self.generator.choice([*SURROUNDINGS])
        self.happened.append(f"step ({surroundings})")
        with SURROUNDINGS[surroundings]():
            self.step(f"step, {surroundings}")
        for scheduler in self.schedulers:
            scheduler.step()

    def step(self, what: str, *, checked: bool = True) -> None:
        """Both step; the twin outside of whatever surrounds the run."""
        before = self.twin.snapshot()
        random_state = torch.get_rng_state()
        self.run.optimizer.step()
        if not torch.equal(torch.get_rng_state(), random_state):
            raise DifferenceError(f"{what} drew from torch's random numbers")
        with plainly():
            self.twin.optimizer.step()
            assert_same(self.run, self.twin, what)
            self._assert_gradients(before, what)
            if checked:
                self._assert_slow_step(before, what)

    def _assert_gradients(self, before: Any, what: str) -> None:
        """Untouched, or freed where none_grad asks for it."""
        for group, _, name, param in self.twin.entries():
            given = before.grads[name]
            if given is None or group["none_grad"]:
                if param.grad is not None:
                    raise DifferenceError(f"{what}: gradient of {name} is there")
            elif param.grad is None or bits(param.grad) != bits(given):
                raise DifferenceError(f"{what}: gradient of {name} changed")

    def _assert_slow_step(self, before: Any, what: str) -> None:
        for group, given, name, param in self.twin.entries():
            old = before.tensors[name].clone()
            old.grad = before.grads[name]
            state = {
                key.removeprefix(f"{name}: "): value.clone()
                for key, value in before.tensors.items()
                if key.startswith(f"{name}: ")
            }
            options = dict(before.groups[int_of(self.twin, group)])
            options |= {key: float(options[key]) for key in ("lr", "weight_decay")}
            if not given.muon:
                options |= {key: options.get(f"adamw_{key}", options.get(key)) for key in ADAMW}
                cycled = options.get("momentum")  # by a scheduler
                options["betas"] = (cycled or options["betas"][0], options["betas"][1])
            now = self.twin.optimizer.state[param]
            if not state:  # made by this very step, of zeros
                state = {key: torch.zeros_like(value) for key, value in now.items()}
            if old.grad is None:
                if not torch.equal(param, old):
                    raise DifferenceError(f"{what}: {name} moved without a gradient")
                continue
            if options["rounding"] != "residual":
                state.pop("rounding_residual", None)
            elif param.dtype in HALF:
                state.setdefault("rounding_residual", torch.zeros_like(old, dtype=torch.int16))
            if not given.muon:
                expected, slack = self.slow.adamw(old, state, options)
            elif not self._served(state, options):
                continue
            else:
                expected, slack = self.slow.muon(name, old, state, options)
            kept = {k: v for k, v in now.items() if k in state}
            found = self.slow.value(param, kept)
            slack = slack + step_of(param, options) + 1e-30
            away = ((found - expected).abs() - slack).max().item() if param.numel() else 0.0
            if away > 0:
                shown = {k: v for k, v in options.items() if k != "params"}
                self.happened.append(f"options of {name}: {shown}")
                raise DifferenceError(
                    f"{what}: {name} {tuple(param.shape)} {param.dtype} is {away:.3g} farther from "
                    f"float64 than {slack.max().item():.3g}"
                )

    def _served(self, state: dict[str, Tensor], options: dict[str, Any]) -> bool:
        """Not where state is made by this very step, as after beta2 was turned on."""
        return options["beta2"] is None or "second_momentum_buffer" in state


def int_of(run: Run, group: dict[str, Any]) -> int:
    return next(k for k, one in enumerate(run.optimizer.param_groups) if one is group)


def step_of(param: Tensor, options: dict[str, Any]) -> Tensor:
    """What writing a parameter may change: half a unit in the last place, or a whole one."""
    if param.dtype == torch.float64:
        return param.double().abs() * 1e-12
    units = torch.finfo(param.dtype).eps * param.double().abs() + torch.finfo(param.dtype).tiny
    if param.dtype == torch.float32 or options["rounding"] == "residual":
        return units if param.dtype != torch.float16 else units * 0.01 + 2.0**-38
    if param.dtype == torch.float16:
        units = units + 2.0**-24
    return units * (1.05 if options["rounding"] == "stochastic" else 0.55)


@contextlib.contextmanager
def default_float64():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def plainly():
    """Outside of everything in SURROUNDINGS."""
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    with torch.autocast("cpu", enabled=False), torch.inference_mode(False):
        yield
    torch.set_default_dtype(kept)


SURROUNDINGS: dict[str, Callable[[], Any]] = {
    "plain": contextlib.nullcontext,
    "again plain": contextlib.nullcontext,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "float64 by default": default_float64,
}


def play(opt: Any, seed: int, steps: int) -> None:
    episode = Episode(opt, seed)
    try:
        episode.play(steps)
    finally:
        episode.close()
