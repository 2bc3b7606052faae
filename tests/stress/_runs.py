"""Two optimizers over equal parameters, and what must be equal between them."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ._problem import GivenGroup


class DifferenceError(AssertionError):
    """Something is not as the documentation says."""


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

    def entries(self) -> list[tuple[dict[str, Any], GivenGroup, str, nn.Parameter]]:
        """(options, group, name, parameter) of all parameters."""
        return [
            (group, given, one.name, self.params[one.name])
            for group, given in zip(self.optimizer.param_groups, self.given, strict=True)
            for one in given.params
        ]

    def snapshot(self) -> Snapshot:
        tensors = {key: value.detach().clone() for key, value in named_tensors(self).items()}
        grads = {
            name: None if p.grad is None else p.grad.clone() for name, p in self.params.items()
        }
        groups = [dict(group) for group in self.optimizer.param_groups]
        return Snapshot(tensors, grads, groups, options_of(self.optimizer))

    def restore(self, before: Snapshot) -> None:
        """The tensors as they were, written in place."""
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(before.tensors[name])
                state = self.optimizer.state[param]
                for key in state:
                    state[key].copy_(before.tensors[f"{name}: {key}"])
                grad = before.grads[name]
                param.grad = None if grad is None else grad.clone()

    def load_from(self, other: Run) -> None:
        """Parameters and state of another run, as a trainer loads a checkpoint."""
        with torch.no_grad():
            for name, param in self.params.items():
                param.copy_(other.params[name])
        self.optimizer.load_state_dict(copy.deepcopy(other.optimizer.state_dict()))


@dataclass(frozen=True)
class Snapshot:
    """What a run held at a time."""

    tensors: dict[str, Tensor]
    grads: dict[str, Tensor | None]
    groups: list[dict[str, Any]]
    options: list[dict[str, Any]]


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor], what: str) -> None:
    """Equal names and bits."""
    if found.keys() != expected.keys():
        names = sorted(found.keys() ^ expected.keys())
        raise DifferenceError(f"{what}: tensors that only one side has: {names}")
    for name, tensor in found.items():
        other = expected[name]
        if tensor.dtype != other.dtype or tensor.shape != other.shape:
            raise DifferenceError(
                f"{what}: {name} is {tensor.dtype} {tuple(tensor.shape)}, expected {other.dtype} "
                f"{tuple(other.shape)}"
            )
        if bits(tensor) != bits(other):
            away = (tensor.double() - other.double()).abs().max().item()
            raise DifferenceError(f"{what}: {name} differs by {away}")


def assert_same(run: Run, twin: Run, what: str) -> None:
    """Two runs with equal parameters, state, gradients and options."""
    assert_equal(named_tensors(run), named_tensors(twin), what)
    for name, param in run.params.items():
        assert_equal(_grad(param), _grad(twin.params[name]), f"{what}: gradient of {name}")
    pairs = zip(options_of(run.optimizer), options_of(twin.optimizer), strict=True)
    for number, (one, other) in enumerate(pairs):
        for key in one.keys() | other.keys():
            if one.get(key, "nothing") != other.get(key, "nothing"):
                raise DifferenceError(
                    f"{what}: {key} of group {number} is {one.get(key, 'nothing')!r}, expected "
                    f"{other.get(key, 'nothing')!r}"
                )


def assert_unchanged(run: Run, before: Snapshot, what: str, *, grads: bool = True) -> None:
    assert_equal(named_tensors(run), before.tensors, what)
    if grads:
        for name, param in run.params.items():
            grad = before.grads[name]
            expected = {} if grad is None else {"grad": grad}
            assert_equal(_grad(param), expected, f"{what}: gradient of {name}")


def _grad(param: Tensor) -> dict[str, Tensor]:
    return {} if param.grad is None else {"grad": param.grad}
