"""What may happen to an optimizer between two steps, and what must be true afterwards.

An event gets the episode. What changes the problem it does to both runs; everything else it does to
`episode.run` alone, which must not differ from `episode.twin` afterwards.
"""

from __future__ import annotations

import copy
import io
import pickle
import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from torch import nn

from ._problem import DifferenceError, adamw_options, assert_unchanged, halved, muon_options

if TYPE_CHECKING:
    from ._episode import Episode
    from ._together import Together

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
    opt, folder = episode.opt, episode.new_folder()
    opt.save_optimizer(episode.run.optimizer, folder)
    fresh = episode.run.again()
    opt.load_optimizer(fresh.optimizer, folder)
    episode.replace_run(fresh)


@event
def save_async_and_restart(episode: Episode) -> None:
    folder = episode.new_folder()
    pending = episode.opt.save_optimizer_async(episode.run.optimizer, folder)
    fresh = episode.run.again()
    if episode.generator.random() < 0.5:
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
    if missing and all(p.grad is not None for p in episode.run.params.values()):
        raise DifferenceError(f"report() has no line for {missing}")
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
        raise DifferenceError("a hook after the step was not called")
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
    optimizer = episode.run.optimizer
    for call, action in {
        "step": optimizer.step,
        "state_dict": optimizer.state_dict,
        "save_optimizer": lambda: episode.opt.save_optimizer(optimizer, episode.new_folder()),
        "save_optimizer_async": lambda: episode.opt.save_optimizer_async(
            optimizer, episode.new_folder()
        ),
    }.items():
        episode.refused(f"{call} after {what} left half a step", action, RuntimeError)


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
    episode.step(f"{value} in {name}", checked=False)
    for other, tensor in run.params.items():
        if other != name and not tensor.isfinite().all():
            raise DifferenceError(f"{value} in the gradient of {name} reached {other}")
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


@event
def scheduled(episode: Episode) -> None:
    kind = episode.generator.choice(["lambda", "one cycle", "cosine"])
    episode.schedule(kind)


@event
def zeroed(episode: Episode) -> None:
    to_none = episode.generator.random() < 0.5
    for run in (episode.run, episode.twin):
        run.optimizer.zero_grad(set_to_none=to_none)


# Of several ranks, too.
ALIKE = (tensor_learning_rate, add_group, deep_copied, offload_off)
ALIKE += (closure_raises, pre_hook_raises, change_options, state_dict_and_restart)


def draw(generator: random.Random) -> str:
    return generator.choice([*EVENTS])
