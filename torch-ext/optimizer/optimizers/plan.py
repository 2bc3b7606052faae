"""What a step works through, and what it was made for; looked at in every step.

A step of hundreds of parameters must not call Python once per parameter: what tensors looked like
when the plan was made is compared in a few passes over lists by functions of C.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .chunks import Chunk
from .groups.options import FLOATING
from .groups.parameters import check_gradient, is_dtensor, is_plain
from .sharded.plan import Shared
from .stages.qk_clip import Batch
from .state.device_state import OnDevice

_form = operator.attrgetter("shape", "dtype", "device")
_layout = operator.attrgetter("layout")
# Of a DTensor, as its properties of these names give them, without a call of Python for each.
_placing = operator.attrgetter("_spec.placements", "_spec.mesh")


def same_objects(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects; `==` would compare tensors by their elements."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


@dataclass(frozen=True, eq=False)
class Forms:
    """The parameters of a group, and what they and their gradients are compared with."""

    named: list[tuple[str, Tensor]]  # (name for messages, parameter)
    params: list[Tensor]
    kinds: list[type]
    forms: list[tuple[Any, ...]]  # shape, dtype, device
    devices: frozenset[torch.device]
    placements: list[tuple[Any, ...]]  # of those that are not plain
    usual: bool  # all are plain, dense and of a supported dtype
    placed: bool  # all are DTensors of a supported dtype

    @classmethod
    def of(cls, named: list[tuple[str, Tensor]]) -> Forms:
        params = [param for _, param in named]
        return cls(
            named=named,
            params=params,
            kinds=[*map(type, params)],
            forms=[*map(_form, params)],
            devices=frozenset(param.device for param in params),
            placements=_placements(params),
            usual=all(
                is_plain(param) and param.layout is torch.strided and param.dtype in FLOATING
                for param in params
            ),
            placed=all(is_dtensor(param) and param.dtype in FLOATING for param in params),
        )

    def hold(self, params: Sequence[Tensor]) -> bool:
        """Whether these are the parameters, and still look as they did."""
        return (
            same_objects(params, self.params)
            and [*map(type, params)] == self.kinds
            and [*map(_form, params)] == self.forms
            and (self.usual or _placements(params) == self.placements)
        )

    def check_gradients(self) -> bool:
        """`check_gradient` of every parameter, fast where nothing is unusual.

        Returns:
            Whether every parameter is plain and has a plain gradient, float64 only where it is.
        """
        grads = [param.grad for param in self.params]
        given = [grad for grad in grads if grad is not None]
        complete = len(given) == len(grads)
        forms = self.forms
        if not complete:
            forms = [form for form, grad in zip(forms, grads, strict=True) if grad is not None]
        found = [*map(_form, given)]
        kinds, dense = {*map(type, given)}, {*map(_layout, given)} <= {torch.strided}
        if self.placed and dense and kinds <= {*self.kinds} and found == forms:
            places = self.placements
            if not complete:
                places = [p for p, grad in zip(places, grads, strict=True) if grad is not None]
            if _placements(given) == places:
                return False
        if self.usual and dense and kinds <= {Tensor}:
            if found == forms:
                return complete
            if all(map(_fits, found, forms)):
                return complete and not any(map(_widens, found, forms))
        for where, param in self.named:
            check_gradient(param, where)
        return False

    def check_rate(self, option: str, value: Any) -> None:
        """Raise ValueError if a Tensor option cannot be used on the devices of all parameters."""
        if not isinstance(value, Tensor) or value.device.type == "cpu":
            return
        if self.devices <= {value.device}:
            return
        for where, param in self.named:
            if value.device != param.device:
                raise ValueError(
                    f"{where}: {option} is on {value.device}, the parameter on {param.device}; "
                    f"move {option} there, or to the CPU, or put the parameters into one group per "
                    "device"
                )


@dataclass(frozen=True, eq=False)
class Plan:
    """The work of a step, per group where it is a list, and the groups and the state it is for."""

    layouts: list[tuple[Any, ...]]  # options that decide what is cut how
    forms: list[Forms]
    keys: list[Any]  # of the optimizer's state
    states: list[Any]
    filled: list[Mapping[str, Tensor]]  # those of parameters
    sizes: list[int]  # entries of each of these
    numbers: dict[Tensor, int]  # of every parameter in the optimizer, over all groups
    chunks: list[list[Chunk]]  # none for AdamW
    empty: list[
        list[Tensor]
    ]  # parameters without elements, whose gradients are let go all the same
    clips: list[Batch]  # what QK-clip scales
    rows: dict[Tensor, Tensor | None]  # of each of its parameters, those that are here
    shared: Shared  # what several ranks work on
    on_device: OnDevice

    @property
    def labelled(self) -> list[list[tuple[str, Tensor]]]:
        """(name for messages, parameter), per group."""
        return [forms.named for forms in self.forms]

    def fits(
        self,
        layouts: list[tuple[Any, ...]],
        params: Sequence[Sequence[Tensor]],
        state: Mapping[Any, Any],
    ) -> bool:
        """Whether groups, parameters, the options of their layout and the state are the same."""
        return (
            layouts == self.layouts
            and same_objects([*state.values()], self.states)
            and same_objects([*state], self.keys)
            and self.finds_all_state()
            and all(
                forms.hold(of_group) for forms, of_group in zip(self.forms, params, strict=True)
            )
        )

    def finds_all_state(self) -> bool:
        """Whether no entry of a parameter's state was taken away."""
        return [*map(len, self.filled)] == self.sizes


def _fits(grad: tuple[Any, ...], param: tuple[Any, ...]) -> bool:
    """Whether a gradient differs from its parameter in its dtype at most."""
    return grad[0] == param[0] and grad[1] in FLOATING and grad[2] == param[2]


def _widens(grad: tuple[Any, ...], param: tuple[Any, ...]) -> bool:
    """Whether a gradient is float64 and its parameter is not, or the other way round."""
    return (grad[1] is torch.float64) is not (param[1] is torch.float64)


def _placements(params: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """What a plan depends on besides the form, of tensors that are not plain."""
    try:
        return [*map(_placing, params)]  # all are DTensors
    except AttributeError:
        pass
    return [
        (param.placements, param.device_mesh) if is_dtensor(param) else ()
        for param in params
        if not is_plain(param)
    ]
