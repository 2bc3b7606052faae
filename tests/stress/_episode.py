"""Episodes: steps of one optimizer to which things happen, beside a twin that is left alone.

An event gets the episode. What changes the problem it does to both runs; everything else it does to
`episode.run` alone, which must not differ from `episode.twin` afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
import io
import pickle
import random
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import lr_scheduler

from ..optimizers.test_numbers import NoHostReads
from ._problem import (
    Pair,
    Run,
    Source,
    adamw_options,
    assert_same,
    assert_unchanged,
    bits,
    gradient,
    halved,
    muon_options,
)

if TYPE_CHECKING:
    from ._together import Together

EVENT_RATE = 0.6
MISSING_RATE = 0.08


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
            raise AssertionError(f"{what}: {type(error).__name__}: {error}") from error
        else:
            raise AssertionError(f"{what}: accepted")
        assert_unchanged(self.run, before, f"after {what} was refused")

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
            name = self.generator.choice([*EVENTS])
            self.happened.append(name)
            EVENTS[name](self)
            assert_same(self.run, self.twin, f"after {name}")
        surroundings = self.generator.choice([*SURROUNDINGS])
        self.happened.append(f"step ({surroundings})")
        with SURROUNDINGS[surroundings]():
            self.step(f"step, {surroundings}")
        for scheduler in self.schedulers:
            scheduler.step()

    def step(self, what: str) -> None:
        """Both step; the twin outside of whatever surrounds the run."""
        before = self.twin.snapshot()
        random_state = torch.get_rng_state()
        with NoHostReads():
            self.run.optimizer.step()
        undrawn = torch.equal(torch.get_rng_state(), random_state)
        assert undrawn, f"{what} drew from torch's random numbers"
        with plainly():
            self.twin.optimizer.step()
            assert_same(self.run, self.twin, what)
            self._assert_gradients(before, what)

    def _assert_gradients(self, before: Any, what: str) -> None:
        """Untouched, or freed where none_grad asks for it."""
        groups = self.twin.optimizer.param_groups
        frees = {param: group["none_grad"] for group in groups for param in group["params"]}
        for name, param in self.twin.params.items():
            given = before.grads[name]
            if given is None or frees[param]:
                assert param.grad is None, f"{what}: gradient of {name} is there"
            else:
                kept = param.grad is not None and bits(param.grad) == bits(given)
                assert kept, f"{what}: gradient of {name} changed"


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


EVENTS: dict[str, Callable[[Episode], None]] = {}


def event(function: Callable[[Episode], None]) -> Callable[[Episode], None]:
    EVENTS[function.__name__] = function
    return function


@event
def change_options(episode: Episode | Together) -> None:
    generator = episode.generator
    number = generator.randrange(len(episode.run.given))
    muon = episode.run.given[number].muon
    options = muon_options(generator) if muon else adamw_options(generator)
    chosen = options if muon else {k: v for k, v in options.items() if generator.random() < 0.5}
    if generator.random() < 0.3:
        chosen["rounding"] = generator.choice(episode.source.roundings)
    episode.set_options(number, chosen)


@event
def tensor_learning_rate(episode: Episode) -> None:
    number = episode.generator.randrange(len(episode.run.given))
    shape = episode.generator.choice([(), (1,)])
    rate = 10 ** episode.generator.uniform(-3, -1)
    for run in (episode.run, episode.twin):
        run.optimizer.param_groups[number]["lr"] = torch.full(shape, rate, dtype=torch.float64)


@event
def add_group(episode: Episode | Together) -> None:
    if len(episode.run.params) <= 25:
        episode.add(episode.source.group())


@event
def save_and_restart(episode: Episode) -> None:
    folder, optimizer = episode.new_folder(), episode.run.optimizer
    wait, asynchronous = (episode.generator.random() < 0.5 for _ in range(2))
    if asynchronous:
        pending = episode.opt.save_optimizer_async(optimizer, folder)
    else:
        episode.opt.save_optimizer(optimizer, folder)
    fresh = episode.run.again()
    if asynchronous and wait:
        pending.wait()
    episode.opt.load_optimizer(fresh.optimizer, folder)
    episode.replace_run(fresh)


@event
def state_dict_and_restart(episode: Episode | Together) -> None:
    file = io.BytesIO()
    torch.save(episode.run.optimizer.state_dict(), file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh = episode.run.again()
    fresh.optimizer.load_state_dict(saved)
    episode.replace_run(fresh)


@event
def state_dict_to_itself(episode: Episode) -> None:
    episode.run.optimizer.load_state_dict(episode.run.optimizer.state_dict())


@event
def older_checkpoint_first(episode: Episode) -> None:
    """A load replaces everything that an earlier one brought."""
    folder = episode.new_folder()
    episode.opt.save_optimizer(episode.run.optimizer, folder)
    before = episode.run.snapshot()
    for param in episode.run.params.values():
        param.grad = torch.ones_like(param)
    episode.run.optimizer.step()
    episode.opt.load_optimizer(episode.run.optimizer, folder)
    with torch.no_grad():
        for name, param in episode.run.params.items():
            param.copy_(before.tensors[name])
    before.give_grads(episode.run.params)


@event
def pickled(episode: Episode) -> None:
    rules = [group.get("adjust_lr_fn") for group in episode.run.optimizer.param_groups]
    if any(callable(rule) and rule is not halved for rule in rules):
        return
    episode.take_copy(lambda pair: pickle.loads(pickle.dumps(pair)))


@event
def deep_copied(episode: Episode) -> None:
    episode.take_copy(copy.deepcopy)


@event
def offload_on(episode: Episode) -> None:
    episode.run.optimizer.turn_on_cpu_offload()


@event
def offload_off(episode: Episode) -> None:
    episode.run.optimizer.turn_off_cpu_offload()


@event
def looked_at(episode: Episode) -> None:
    optimizer, generator = episode.run.optimizer, episode.generator
    text = optimizer.report(verbose=True)
    missing = [name for name in episode.run.params if name not in text]
    partial = any(param.grad is None for param in episode.run.params.values())
    assert partial or not missing, f"report() has no line for {missing}"
    repr(optimizer)
    optimizer.measure_steps(generator.random() < 0.5)
    optimizer.state_dict()


class PlannedError(Exception):
    """Raised by the soak itself."""


def raises(*_: Any, **__: Any) -> Any:
    raise PlannedError("on purpose")


@event
def closure_raises(episode: Episode | Together) -> None:
    step = episode.run.optimizer.step
    episode.refused("a closure that raises", lambda: step(raises), PlannedError)


@event
def pre_hook_raises(episode: Episode | Together) -> None:
    handle = episode.run.optimizer.register_step_pre_hook(raises)
    step = episode.run.optimizer.step
    episode.refused("a hook before the step that raises", step, PlannedError)
    handle.remove()


@event
def post_hook_raises(episode: Episode) -> None:
    """The step is over then: the two are equal after both took it."""
    handle = episode.run.optimizer.register_step_post_hook(raises)
    try:
        episode.run.optimizer.step()
    except PlannedError:
        pass
    else:
        raise AssertionError("a hook after the step was not called")
    handle.remove()
    episode.twin.optimizer.step()
    episode.fill_gradients()


@event
def state_hook_raises(episode: Episode) -> None:
    optimizer = episode.run.optimizer
    kinds = ("state_dict_pre", "state_dict_post", "load_state_dict_pre")
    which = f"register_{episode.generator.choice(kinds)}_hook"
    saved = optimizer.state_dict()
    handle = getattr(optimizer, which)(raises)

    def use() -> None:
        if "load" in which:
            optimizer.load_state_dict(saved)
        elif episode.generator.random() < 0.5:
            optimizer.state_dict()
        else:
            episode.opt.save_optimizer(optimizer, episode.new_folder())

    episode.refused(which, use, PlannedError)
    handle.remove()


@event
def rule_raises(episode: Episode) -> None:
    groups = episode.run.optimizer.param_groups
    numbers = [k for k, given in enumerate(episode.run.given) if given.muon]
    if not numbers or not _has_work(episode, numbers):
        return
    group = groups[episode.generator.choice(numbers)]
    if not any(param.numel() for param in group["params"]):
        return
    kept, group["adjust_lr_fn"] = group["adjust_lr_fn"], raises
    episode.refused("an adjust_lr_fn that raises", episode.run.optimizer.step, PlannedError)
    group["adjust_lr_fn"] = kept


def _has_work(episode: Episode, numbers: list[int]) -> bool:
    groups = episode.run.optimizer.param_groups
    return any(p.grad is not None and p.numel() for k in numbers for p in groups[k]["params"])


INTERRUPTIONS = (PlannedError, MemoryError, KeyboardInterrupt, RuntimeError)
STAGES = ("orthogonalize", "update", "momentum", "adamw")  # of optimizers/step.py


@event
def step_is_interrupted(episode: Episode) -> None:
    """A stage raises at its k-th call: nothing has changed, or nothing goes on until a load."""
    generator = episode.generator
    stage, module = generator.choice(STAGES), episode.submodule("optimizers.step")
    original, calls = getattr(module, stage), iter(range(10**6))
    last, error = generator.randint(0, 3), generator.choice(INTERRUPTIONS)

    def interrupted(*args: Any, **options: Any) -> Any:
        if next(calls) == last:
            raise error("on purpose")
        return original(*args, **options)

    before = episode.run.snapshot()
    with mock.patch.object(module, stage, interrupted):
        try:
            episode.run.optimizer.step()
        except error:
            pass
        else:
            episode.run.restore(before)
            return
    if _locked(episode.run.optimizer):
        _assert_locked(episode, f"{error.__name__} in {stage}")
        episode.run.load_from(episode.twin)
    else:
        assert_unchanged(episode.run, before, f"{stage} was interrupted", grads=False)
    before.give_grads(episode.run.params)


def _locked(optimizer: Any) -> bool:
    try:
        optimizer.state_dict()
    except RuntimeError:
        return True
    return False


def _assert_locked(episode: Episode, what: str) -> None:
    """No way to go on or to save is open, and no closure is asked; a refused load opens none."""
    optimizer, opt, folder = episode.run.optimizer, episode.opt, episode.new_folder()
    model = nn.ParameterList(episode.run.params.values())
    broken = copy.deepcopy(episode.twin.optimizer.state_dict())
    if broken["state"]:
        broken["state"][0] = {}
        load = optimizer.load_state_dict
        episode.refused(f"a broken state after {what}", lambda: load(broken), ValueError)
    for call, action in {
        "step": lambda: optimizer.step(raises),
        "state_dict": optimizer.state_dict,
        "save_optimizer": lambda: opt.save_optimizer(optimizer, folder),
        "save_optimizer_async": lambda: opt.save_optimizer_async(optimizer, folder),
        "torch.distributed.checkpoint": lambda: get_optimizer_state_dict(model, optimizer),
        "pickle": lambda: pickle.dumps(optimizer),
        "deepcopy": lambda: copy.deepcopy(optimizer),
    }.items():
        episode.refused(f"{call} after {what} left half a step", action, RuntimeError)
    assert not [*folder.iterdir()], f"{what} left half a step, which was saved"


@event
def not_a_number(episode: Episode) -> None:
    """NaN reaches its own parameter and no other; then both runs go back."""
    run, generator = episode.run, episode.generator
    name, param = generator.choice([*run.params.items()])
    if param.grad is None or not param.numel():
        return
    value = generator.choice([float("nan"), float("inf"), float("-inf")])
    before, of_twin = run.snapshot(), episode.twin.snapshot()
    for each in (run, episode.twin):
        grad = each.params[name].grad
        (grad.view(-1)[-1:] if grad.is_contiguous() else grad).fill_(value)
    episode.step(f"{value} in {name}")
    for other, tensor in run.params.items():
        alone = other == name or tensor.isfinite().all()
        assert alone, f"{value} in the gradient of {name} reached {other}"
    run.restore(before)
    episode.twin.restore(of_twin)


@event
def swapped_parameter(episode: Episode) -> None:
    """As trainers do that shard a model after the optimizer was made; state starts anew."""
    name = episode.generator.choice([*episode.run.params])
    for run in (episode.run, episode.twin):
        old = run.params[name]
        new = nn.Parameter(old.detach().clone())
        new.grad = None if old.grad is None else old.grad.clone()
        for group in run.optimizer.param_groups:
            group["params"] = [new if param is old else param for param in group["params"]]
        run.params[name] = new
        run.optimizer.fit_state()


def _clear_state(episode: Episode) -> None:
    """All of a parameter's, or one entry: it begins anew with zeros, as with torch's optimizers."""
    name = episode.generator.choice([*episode.run.params])
    run, twin = (one.optimizer.state[one.params[name]] for one in (episode.run, episode.twin))
    episode.run.optimizer.state_dict()  # waits for what is on its way
    for key in [*run][: episode.generator.choice([None, 1])]:
        del run[key]
        twin[key].zero_()


@event
def state_cleared_before_a_step(episode: Episode) -> None:
    _clear_state(episode)
    episode.step("a step with cleared state")
    episode.fill_gradients()


@event
def state_cleared_before_a_save(episode: Episode) -> None:
    _clear_state(episode)
    save_and_restart(episode)


SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=1000),
}


@event
def scheduled(episode: Episode) -> None:
    make = SCHEDULES[episode.generator.choice([*SCHEDULES])]
    episode.schedulers = [make(run.optimizer) for run in (episode.run, episode.twin)]


@event
def zeroed(episode: Episode) -> None:
    to_none = episode.generator.random() < 0.5
    for run in (episode.run, episode.twin):
        run.optimizer.zero_grad(set_to_none=to_none)


# Of several ranks, too.
ALIKE = (tensor_learning_rate, add_group, deep_copied, offload_off)
ALIKE += (closure_raises, pre_hook_raises, change_options, state_dict_and_restart)
