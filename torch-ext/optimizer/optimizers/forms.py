"""What the tensors of a group looked like when a plan was made, compared anew at every step.

A step of hundreds of parameters must not call Python once per parameter: everything here is a few
passes over lists by functions of C.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .options import FLOATING
from .parameters import check_gradient, is_dtensor, is_plain

_dtype = operator.attrgetter("dtype")
_place = operator.attrgetter("shape", "device", "layout")


def same_objects(one: Sequence[Any], other: Sequence[Any]) -> bool:
    """Whether two sequences hold the same objects; `==` would compare tensors by their elements."""
    return len(one) == len(other) and all(map(operator.is_, one, other))


@dataclass(frozen=True, eq=False)
class Forms:
    """The parameters of a group, and what they and their gradients are compared with."""

    named: list[tuple[str, Tensor]]  # (name for messages, parameter)
    params: list[Tensor]
    kinds: list[type]
    dtypes: list[torch.dtype]
    places: list[tuple[Any, ...]]  # shape, device, layout
    devices: frozenset[torch.device]
    placements: list[tuple[Any, ...]]  # of those that are not plain
    usual: bool  # all are plain, dense and of a supported dtype

    @classmethod
    def of(cls, named: list[tuple[str, Tensor]]) -> Forms:
        params = [param for _, param in named]
        dtypes, places = [*map(_dtype, params)], [*map(_place, params)]
        dense = all(layout is torch.strided for *_, layout in places)
        return cls(
            named=named,
            params=params,
            kinds=[*map(type, params)],
            dtypes=dtypes,
            places=places,
            devices=frozenset(device for _, device, _ in places),
            placements=_placements(params),
            usual=dense and {*dtypes} <= {*FLOATING} and all(map(is_plain, params)),
        )

    def hold(self, params: Sequence[Tensor]) -> bool:
        """Whether these are the parameters, and still look as they did."""
        return (
            same_objects(params, self.params)
            and [*map(type, params)] == self.kinds
            and [*map(_dtype, params)] == self.dtypes
            and [*map(_place, params)] == self.places
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
        places = self.places
        if not complete:
            places = [place for place, grad in zip(places, grads, strict=True) if grad is not None]
        dtypes = [*map(_dtype, given)]
        if not (
            self.usual
            and {*map(type, given)} <= {Tensor}
            and {*dtypes} <= {*FLOATING}
            and [*map(_place, given)] == places
        ):
            for where, param in self.named:
                check_gradient(param, where)
            return False
        return complete and (torch.float64 not in dtypes or dtypes == self.dtypes)

    def check_rate(self, lr: Any) -> None:
        """Raise ValueError if a Tensor lr cannot be used on the devices of all parameters."""
        if not isinstance(lr, Tensor) or lr.device.type == "cpu" or self.devices <= {lr.device}:
            return
        for where, param in self.named:
            if lr.device != param.device:
                raise ValueError(
                    f"{where}: lr is on {lr.device}, the parameter on {param.device}; move lr "
                    "there, or to the CPU, or put the parameters into one group per device"
                )


def _placements(params: Sequence[Tensor]) -> list[tuple[Any, ...]]:
    """What a plan depends on besides the form, of tensors that are not plain."""
    return [
        (param.placements, param.device_mesh) if is_dtensor(param) else ()
        for param in params
        if not is_plain(param)
    ]
