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

from ..optimizers.test_groups import ADAMW_OPTIONS, MUON_OPTIONS
from ._problem import DifferenceError, adamw_options, assert_unchanged, bits, halved, muon_options

if TYPE_CHECKING:
    from ._episode import Episode
    from ._together import Together

REFUSALS = (ValueError, TypeError)
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


# What is wrong in any group for AdamW and for Muon, and looked at by a step.
WRONG = [
    [
        (option, value)
        for option, value, _, message in table
        if option != "ns_coefficients" and "got -1.0" not in message
    ]
    for table in (ADAMW_OPTIONS, MUON_OPTIONS)
]


@event
def wrong_option(episode: Episode | Together) -> None:
    number = episode.generator.randrange(len(episode.run.given))
    muon, group = episode.run.given[number].muon, episode.run.optimizer.param_groups[number]
    option, value = episode.generator.choice(WRONG[muon])
    renamed = option in ("betas", "eps") and not muon and episode.run.front == "Muon"
    key = f"adamw_{option}" if renamed else option
    kept, group[key] = group[key], value
    step = episode.run.optimizer.step
    episode.refused(f"{key}={value!r}", step, *REFUSALS, names=option)
    group[key] = kept


@event
def add_group(episode: Episode | Together) -> None:
    if len(episode.run.params) <= 25:
        episode.add(episode.source.group())


@event
def wrong_group(episode: Episode | Together) -> None:
    run, generator = episode.run, episode.generator
    given = episode.source.group(muon=True)
    params = [nn.Parameter(episode.placed(one.name, one.value())) for one in given.params]
    group = given.make(run.front, params)
    name, held = generator.choice([*run.params.items()])
    cases: dict[str, dict[str, Any]] = {
        "a parameter that is held": {"params": [*params, held], "names": [*group["names"], "z"]},
        "a name that is taken": {"names": [*group["names"][:-1], name]},
        "an unknown key": {"learning_rate": 0.1},
        "a vector": {
            "params": [*params, nn.Parameter(torch.ones(3))],
            "names": [*group["names"], "vector"],
        },
        "integers": {
            "params": [*params, torch.ones(3, 3, dtype=torch.int64)],
            "names": [*group["names"], "integers"],
        },
        "no names enough": {"names": group["names"][:-1]},
        "momentum": {"momentum": 2.0},
        "split_sizes": {"split_sizes": {group["names"][0]: (10**6,)}, "num_heads": None},
        "num_heads": {"num_heads": {"nobody": 3}, "split_sizes": None},
        "params": {"params": set(params)},
        "two kinds": {"use_muon": False, "kind": "muon"},
    }
    what = generator.choice([*cases])
    count = len(run.optimizer.param_groups)
    add = run.optimizer.add_param_group
    named = "vector" if what == "a vector" else ""
    episode.refused(
        f"a group with {what}", lambda: add(group | cases[what]), *REFUSALS, names=named
    )
    if len(run.optimizer.param_groups) != count:
        raise DifferenceError(f"a refused group with {what} was added")
    if generator.random() < 0.5:  # the right one can still be added
        episode.add(given)


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
    episode.count(f"step_is_interrupted in {stage}")
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
def state_is_cleared(episode: Episode) -> None:
    """Refused by name, or made anew; not half a step."""
    name, param = episode.generator.choice([*episode.run.params.items()])
    before = episode.run.snapshot()
    episode.run.optimizer.state[param].clear()
    try:
        episode.run.optimizer.step()
    except (ValueError, RuntimeError) as error:
        for other, param in episode.run.params.items():
            if bits(param) != bits(before.tensors[other]):
                raise DifferenceError(f"{other} changed though the step raised: {error}") from error
    except Exception as error:
        raise DifferenceError(
            f"cleared state of {name}: {type(error).__name__}: {error}"
        ) from error
    episode.run.load_from(episode.twin)
    before.give_grads(episode.run.params)


@event
def wrong_state_dict(episode: Episode) -> None:
    optimizer, generator = episode.run.optimizer, episode.generator
    saved = copy.deepcopy(optimizer.state_dict())
    with_state = [key for key, value in saved["state"].items() if value]
    if not with_state:
        return
    state = saved["state"][generator.choice(with_state)]
    tensors = [key for key in state if not key.startswith("rounding")]
    key = generator.choice(tensors)

    def swap(value: Any) -> None:
        state[key] = value

    step = state.get("step")
    cases: dict[str, Callable[[], Any]] = {
        "a missing entry": lambda: state.pop(key),
        "an unknown entry": lambda: state.update(unknown=torch.ones(3)),
        "another shape": lambda: swap(torch.zeros(3, 1, 7)),
        "integers": lambda: swap(torch.zeros(state[key].shape, dtype=torch.int64)),
        "complex numbers": lambda: swap(torch.zeros(state[key].shape, dtype=torch.complex64)),
        "float8": lambda: swap(torch.zeros(state[key].shape).to(torch.float8_e4m3fn)),
        "no tensor": lambda: swap("text"),
        "one group too many": lambda: saved["param_groups"].append({"params": []}),
        "a group of another size": lambda: saved["param_groups"][0]["params"].append(10**6),
        "a misspelt option": lambda: saved["param_groups"][0].update(weight_decays=3),
        "an invalid option": lambda: saved["param_groups"][0].update(lr=-1.0),
        "state that no group lists": lambda: saved["state"].update({10**6: {}}),
    }
    if step is not None:
        cases["a negative step"] = lambda: state.update(step=torch.tensor(-3.0))
        cases["a step that is NaN"] = lambda: state.update(step=torch.tensor(float("nan")))
        if state["exp_avg_sq"].numel():
            cases["a negative second moment"] = lambda: state["exp_avg_sq"].fill_(-1.0)
    what = generator.choice([*cases])
    cases[what]()
    episode.refused(f"loading {what}", lambda: optimizer.load_state_dict(saved), *REFUSALS)


@event
def damaged_file(episode: Episode) -> None:
    folder, generator = episode.new_folder(), episode.generator
    episode.opt.save_optimizer(episode.run.optimizer, folder)
    path = folder / "optimizer.safetensors"
    data = bytearray(path.read_bytes())
    kind = generator.choice(["a flipped bit", "a cut file", "an empty file", "no file"])
    if kind == "a flipped bit":
        data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
        path.write_bytes(data)
    elif kind == "a cut file":
        path.write_bytes(data[: generator.randrange(len(data))])
    elif kind == "an empty file":
        path.write_bytes(b"")
    else:
        path.unlink()
    error = FileNotFoundError if kind == "no file" else ValueError
    load = episode.opt.load_optimizer
    episode.refused(f"loading {kind}", lambda: load(episode.run.optimizer, folder), error)


@event
def sparse_gradient(episode: Episode) -> None:
    candidates = [p for p in episode.run.params.values() if p.ndim == 2 and p.numel()]
    if not candidates:
        return
    param = episode.generator.choice(candidates)
    kept, param.grad = param.grad, None
    param.grad = torch.ones_like(param).to_sparse()
    before = episode.run.snapshot()
    try:
        episode.run.optimizer.step()
    except REFUSALS as error:
        if "gradient" not in str(error):
            raise DifferenceError(f"a sparse gradient: {error}") from error
    else:
        raise DifferenceError("a sparse gradient was accepted")
    assert_unchanged(episode.run, before, "after a sparse gradient", grads=False)
    param.grad = kept


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
ALIKE = (tensor_learning_rate, add_group, wrong_option, deep_copied, offload_off, wrong_group)
ALIKE += (closure_raises, pre_hook_raises, change_options, state_dict_and_restart)


def draw(generator: random.Random) -> str:
    return generator.choice([*EVENTS])
