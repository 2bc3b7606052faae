"""Random parameters, groups and options, and two optimizers over equal ones that are compared."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

# Components of names -> shapes; the name decides what a group does with a parameter.
MATRICES = {
    "square": [(8, 8), (3, 3)],
    "wide": [(5, 13), (2, 40)],
    "tall": [(12, 7), (33, 4)],
    "row": [(1, 6)],
    "column": [(6, 1)],
    "heads": [(12, 6), (4, 9)],
    "fused": [(10, 4), (10, 11)],
    "filters": [(6, 3, 2, 2)],
    "experts": [(4, 4, 5), (2, 7, 3)],
    "nothing": [(0, 4)],
}
OTHERS = [(11, 4), (7,), (), (0,), (3, 2, 2), (600, 3)]
DTYPES = (torch.float32, torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64)
ROUNDINGS = ("nearest", "residual", "stochastic")
HEADS, PARTS = 4, (3, 3, 4)


@dataclass(frozen=True)
class Given:
    """One parameter before it exists."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    seed: int
    transposed: bool  # its memory is that of the transposed tensor

    def value(self) -> Tensor:
        generator = torch.Generator().manual_seed(self.seed)
        value = (torch.randn(self.shape, generator=generator, dtype=torch.float64) * 0.1).to(
            self.dtype
        )
        return value.mT.contiguous().mT if self.transposed else value


@dataclass(frozen=True)
class GivenGroup:
    """One group before it exists."""

    muon: bool
    params: tuple[Given, ...]
    options: dict[str, Any]

    def make(self, front: str, params: list[nn.Parameter]) -> dict[str, Any]:
        mark = {"use_muon": self.muon} if front == "Muon" else {"kind": KINDS[self.muon]}
        names = [given.name for given in self.params]
        options = dict(self.options)
        if front == "Muon" and not self.muon:
            for key in ("betas", "eps"):
                options[f"adamw_{key}"] = options.pop(key)
        return {"params": params, "names": names, **mark, **options}


KINDS = {True: "muon", False: "adamw"}


def muon_options(generator: random.Random) -> dict[str, Any]:
    """Options of a group of matrices that need no names."""
    pick = generator.choice
    steps = pick([1, 2, 3, 5, 5, 5])
    method = pick(["auto", "auto", "polar_express", "gram_newton_schulz", "newton_schulz"])
    if steps == 5 and generator.random() < 0.2:
        method = "gram_polynomial"
    return {
        "lr": 10 ** generator.uniform(-3, -1),
        "momentum": pick([0.0, 0.5, 0.9, 0.95, 0.999]),
        "nesterov": pick([True, False]),
        "momentum_form": pick(["heavy_ball", "ema"]),
        "ns_steps": steps,
        "method": method,
        "dtype": pick([None, None, None, torch.float32, torch.float64]),
        "weight_decay": pick([0.0, 0.1, 2.0]),
        "cautious": pick([True, False]),
        "shaped_decay": pick([True, False]),
        "adjust_lr_fn": pick(["match_rms_adamw", "original", "spectral", "none", halved]),
        "beta2": pick([None, 0.9, 0.95]),
        "none_grad": pick([True, False]),
    }


def adamw_options(generator: random.Random) -> dict[str, Any]:
    pick = generator.choice
    return {
        "lr": 10 ** generator.uniform(-3, -1),
        "betas": pick([(0.9, 0.95), (0.9, 0.999), (0.0, 0.0), (0.5, 0.99)]),
        "eps": pick([1e-8, 1e-3]),
        "weight_decay": pick([0.0, 0.1, 2.0]),
        "none_grad": pick([True, False]),
    }


def halved(lr: Any, rows: int, columns: int) -> Any:
    """A learning-rate rule of a user."""
    return lr * 0.5 * max(rows, columns) ** 0.5


class Source:
    """Draws groups; names never repeat."""

    def __init__(self, generator: random.Random, *, roundings: tuple[str, ...] = ROUNDINGS) -> None:
        self.generator = generator
        self.count = 0
        self.roundings = roundings
        self.dtype = generator.choice([None, *DTYPES])  # one for all parameters, mostly

    def group(self, *, muon: bool | None = None) -> GivenGroup:
        generator = self.generator
        muon = generator.random() < 0.6 if muon is None else muon
        if not muon:
            shapes = [("other", generator.choice(OTHERS)) for _ in range(generator.randint(1, 4))]
            options = adamw_options(generator)
        else:
            kinds = [generator.choice([*MATRICES]) for _ in range(generator.randint(1, 5))]
            shapes = [(kind, generator.choice(MATRICES[kind])) for kind in kinds]
            options = muon_options(generator)
        params = tuple(self._given(kind, shape) for kind, shape in shapes)
        options["rounding"] = generator.choice(self.roundings)
        options["rounding_seed"] = generator.choice([0, 17, 2**64 - 1])
        if muon:
            options |= self._options_by_name(params)
        return GivenGroup(muon, params, options)

    def _options_by_name(self, params: tuple[Given, ...]) -> dict[str, Any]:
        options: dict[str, Any] = {}
        kinds = {kind: [p.name for p in params if f".{kind}." in p.name] for kind in MATRICES}
        if kinds["experts"]:
            options["expert_keys"] = ["experts"]
        cut = self.generator.choice(["heads", "fused", None])
        if cut == "heads" and kinds["heads"]:
            options["num_heads"] = dict.fromkeys(kinds["heads"], HEADS)
        if cut == "fused" and kinds["fused"]:
            options["split_sizes"] = dict.fromkeys(kinds["fused"], PARTS)
        return options

    def _given(self, kind: str, shape: tuple[int, ...]) -> Given:
        generator = self.generator
        self.count += 1
        dtype = self.dtype or generator.choice(DTYPES)
        transposed = len(shape) >= 2 and generator.random() < 0.15
        name = f"layers.{self.count}.{kind}.weight"
        return Given(name, shape, dtype, generator.randrange(10**9), transposed)


def gradient(param: Tensor, generator: random.Random, seed: int) -> Tensor:
    """One that training may bring: of any scale, strided, with rows of zeros, or all zeros."""
    numbers = torch.Generator().manual_seed(seed)
    scale = 10.0 ** generator.choice([0, 0, 0, -3, -8, 3])
    if param.dtype == torch.float16:
        scale = min(max(scale, 1e-3), 10.0)
    grad = torch.randn(param.shape, generator=numbers, dtype=torch.float64) * scale
    kind = generator.random()
    if kind < 0.03:
        grad.zero_()
    elif kind < 0.08 and grad.ndim and len(grad):
        grad[0] = 0
    grad = grad.to(param.dtype)
    if kind > 0.9 and grad.ndim >= 2:
        grad = grad.mT.contiguous().mT
    return grad


def bits(tensor: Tensor) -> bytes:
    flat = torch.empty(tensor.numel(), dtype=tensor.dtype)  # of stride 1 also with one element
    flat.copy_(tensor.detach().reshape(-1))
    return flat.view(torch.uint8).numpy().tobytes()


def named_tensors(run: Run) -> dict[str, Tensor]:
    """Every parameter and every tensor of its state."""
    found = {}
    for name, param in run.params.items():
        found[name] = param.detach()
        for key, value in run.optimizer.state[param].items():
            found[f"{name}: {key}"] = value
    return found


def options_of(optimizer: Any) -> list[dict[str, Any]]:
    """Options of every group, with numbers for tensors, and what a scheduler wrote settled."""
    found = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key != "params"}
        optimizer.format.settle(options)
        found.append({key: v.item() if isinstance(v, Tensor) else v for key, v in options.items()})
    return found


@dataclass
class Run:
    """An optimizer and its parameters by name."""

    opt: Any
    front: str
    given: list[GivenGroup]
    arguments: dict[str, Any]
    params: dict[str, nn.Parameter] = field(default_factory=dict)
    optimizer: Any = None

    def make(self, values: dict[str, Tensor], options: list[dict[str, Any]]) -> Run:
        """Construct it; `options` go over those of the groups."""
        self.params = {name: nn.Parameter(value.clone()) for name, value in values.items()}
        groups = []
        for given, changed in zip(self.given, options, strict=True):
            params = [self.params[one.name] for one in given.params]
            groups.append(given.make(self.front, params) | changed)
        self.optimizer = getattr(self.opt, self.front)(groups, **self.arguments)
        return self

    def again(self) -> Run:
        """A new process's optimizer: the parameters' values, and no state.

        Functions are not saved; options that decide the layout are those of the construction.
        """
        options = [
            {k: v for k, v in group.items() if k == "adjust_lr_fn" and callable(v)}
            for group in self.optimizer.param_groups
        ]
        values = {name: param.detach() for name, param in self.params.items()}
        return Run(self.opt, self.front, list(self.given), self.arguments).make(values, options)

    def add(self, given: GivenGroup, values: dict[str, Tensor]) -> None:
        params = {name: nn.Parameter(value.clone()) for name, value in values.items()}
        group = given.make(self.front, [params[one.name] for one in given.params])
        self.optimizer.add_param_group(group)
        self.given.append(given)
        self.params |= params

    def snapshot(self) -> Snapshot:
        tensors = {key: value.detach().clone() for key, value in named_tensors(self).items()}
        grads = {
            name: None if p.grad is None else p.grad.clone() for name, p in self.params.items()
        }
        return Snapshot(tensors, grads)

    def restore(self, before: Snapshot) -> None:
        """The tensors as they were, written in place; state made since then is zero."""
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(before.tensors[name])
                state = self.optimizer.state[param]
                for key in state:
                    old = before.tensors.get(f"{name}: {key}")
                    state[key].zero_() if old is None else state[key].copy_(old)
        before.give_grads(self.params)

    def load_from(self, other: Run) -> None:
        """Parameters and state of another run, as a trainer loads a checkpoint."""
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(other.params[name])
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))


class Pair:
    """A run to which things happen, its twin, and what has happened."""

    opt: Any
    generator: random.Random
    run: Run
    twin: Run

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.schedulers: list[Any] = []

    def placed(self, name: str, value: Tensor) -> Tensor:
        """What the run holds of a tensor."""
        return value

    def fill_gradients(self) -> None:
        raise NotImplementedError

    def add(self, given: GivenGroup) -> None:
        """A group for both, of new parameters; schedulers know of the groups before it only."""
        values = {one.name: one.value() for one in given.params}
        self.schedulers = []
        self.twin.add(given, values)
        self.run.add(given, {name: self.placed(name, value) for name, value in values.items()})
        self.fill_gradients()

    def set_options(self, number: int, options: dict[str, Any]) -> None:
        given = self.run.given[number]
        for run in (self.run, self.twin):
            for key, value in options.items():
                renamed = not given.muon and run.front == "Muon" and key in ("betas", "eps")
                run.optimizer.param_groups[number][f"adamw_{key}" if renamed else key] = value

    def replace_run(self, run: Run) -> None:
        """Another object goes on, with the gradients of this one."""
        for name, param in run.params.items():
            param.grad = self.run.params[name].grad
        self.run = run
        self.schedulers = []

    def take_copy(self, copied: Callable[[Any], Any]) -> None:
        params, optimizer = copied((self.run.params, self.run.optimizer))
        run = self.run
        given = list(run.given)
        self.replace_run(Run(run.opt, run.front, given, run.arguments, params, optimizer))

    def tick(self) -> None:
        raise NotImplementedError

    def play(self, steps: int) -> None:
        """So many steps; an error tells what happened before it."""
        try:
            for _ in range(steps):
                self.tick()
        except Exception as error:
            error.add_note(f"after {', '.join(self.happened[:1] + self.happened[1:][-7:])}")
            raise


@dataclass(frozen=True)
class Snapshot:
    tensors: dict[str, Tensor]
    grads: dict[str, Tensor | None]

    def give_grads(self, params: dict[str, nn.Parameter]) -> None:
        for name, param in params.items():
            grad = self.grads[name]
            param.grad = None if grad is None else grad.clone()


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    """Equal names and bits; state that is not made yet equals zeros."""
    found, expected = found | _unmade(found, expected), expected | _unmade(expected, found)
    names = sorted(found.keys() ^ expected.keys())
    assert not names, f"{what}: tensors that only one side has: {names}"
    for name, tensor in found.items():
        other = expected[name]
        here, there = (tensor.dtype, tensor.shape), (other.dtype, other.shape)
        assert here == there, f"{what}: {name} is {here}, expected {there}"
        if bits(tensor) != bits(other):
            away = (tensor.double() - other.double()).abs().max().item()
            raise AssertionError(f"{what}: {name} differs by {away}")


def _unmade(here: dict[str, Tensor], there: dict[str, Tensor]) -> dict[str, Tensor]:
    """Zeros like the state `there` of each parameter that has no state at all `here`."""
    stateful = {name.partition(": ")[0] for name in here if ": " in name}
    return {
        name: torch.zeros_like(value)
        for name, value in there.items()
        if ": " in name and name.partition(": ")[0] not in stateful
    }


def assert_same(run: Run, twin: Run, what: str) -> None:
    """Two runs with equal parameters, state, gradients and options."""
    assert_equal(named_tensors(run), named_tensors(twin), what)
    for name, param in run.params.items():
        assert_equal(_grad(param), _grad(twin.params[name]), f"{what}: gradient of {name}")
    pairs = zip(options_of(run.optimizer), options_of(twin.optimizer), strict=True)
    for number, (one, other) in enumerate(pairs):
        for key in one.keys() | other.keys():
            here, there = (options.get(key, "nothing") for options in (one, other))
            assert here == there, f"{what}: {key} of group {number}: {here!r}, expected {there!r}"


def assert_unchanged(run: Run, before: Snapshot, what: str, *, grads: bool = True) -> None:
    assert_equal(named_tensors(run), before.tensors, what)
    if grads:
        for name, param in run.params.items():
            grad = before.grads[name]
            expected = {} if grad is None else {"grad": grad}
            assert_equal(_grad(param), expected, f"{what}: gradient of {name}")


def _grad(param: Tensor) -> dict[str, Tensor]:
    return {} if param.grad is None else {"grad": param.grad}
