"""Random arguments: valid tensors of every kind, and what someone might pass instead of them."""

import math
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
HALVES = (torch.float16, torch.bfloat16)


@dataclass
class Call:
    """One call of a public function.

    Args:
        name: of the function.
        function: the function.
        arguments: by keyword.
        check: gets the result and raises DifferenceError if it is wrong; None for none.
        written: names of the arguments that the function may write.
        also: documented errors besides ValueError and TypeError.
        words: what a message may name in place of an argument.
        exact: arguments that are left as they are, since only together they mean something.
    """

    name: str
    function: Callable[..., Any]
    arguments: dict[str, Any]
    check: Callable[[Any], None] | None = None
    written: tuple[str, ...] = ()
    also: tuple[type[BaseException], ...] = ()
    words: tuple[str, ...] = ()
    exact: tuple[str, ...] = ()
    spoiled: list[str] = field(default_factory=list)


def draw(
    generator: random.Random,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    *,
    scale: float = 1.0,
    strided: bool = True,
) -> Tensor:
    numbers = torch.Generator().manual_seed(generator.randrange(2**31))
    x = (torch.randn(tuple(shape), generator=numbers, dtype=torch.float64) * scale).to(dtype)
    return restrided(generator, x) if strided else x


def integers(generator: random.Random, low: int, high: int, shape: Sequence[int]) -> Tensor:
    numbers = torch.Generator().manual_seed(generator.randrange(2**31))
    return torch.randint(low, high, tuple(shape), generator=numbers)


def restrided(generator: random.Random, x: Tensor) -> Tensor:
    """The same numbers: contiguous, transposed in memory, with gaps, or at an odd place."""
    kind = generator.choice(["as it is", "as it is", "transposed", "gaps", "offset"])
    if kind == "transposed" and x.ndim >= 2:
        return x.mT.contiguous().mT
    if kind == "gaps" and x.ndim:
        wide = torch.full((*x.shape[:-1], 2 * x.shape[-1] + 1), 7, dtype=x.dtype)
        wide[..., 1::2] = x
        return wide[..., 1::2]
    if kind == "offset":
        flat = torch.zeros(x.numel() + 1, dtype=x.dtype)
        flat[1:] = x.reshape(-1)
        return flat[1:].view(x.shape)
    return x


INTEGERS = [-1, 0, 1, 2**31 - 1, 2**31, 2**63, -(2**63), 10**30, 1.5, "3", None, True]
INTEGERS += [np.int64(5), math.nan, math.inf]
NUMBERS = [0.0, -1.0, math.nan, math.inf, -math.inf, 1e308, 1e-308, "0.1", None, 1j, 10**400]
NUMBERS += [np.float32(0.5), False, 1]
DTYPES = [*FLOATS, torch.int8, torch.complex64, torch.bool, torch.float8_e4m3fn, "float32"]
DTYPES += [None, float]


def spoiled(generator: random.Random, value: Any) -> Any:
    """Something else than a valid argument, or a valid one at the edge."""
    if generator.random() < 0.15:
        return generator.choice([None, "text", 3, 2.5, [], {}, object(), (), True, b"x", 1j, ""])
    if isinstance(value, Tensor):
        return _spoiled_tensor(generator, value)
    if isinstance(value, bool):
        return generator.choice([not value, None, 2, "yes", torch.tensor(True), 0.5])
    if isinstance(value, int):
        return generator.choice([*INTEGERS, torch.tensor(3), value + 1, [value]])
    if isinstance(value, float):
        tensors = torch.tensor(0.5), torch.tensor([0.5, 0.5])
        return generator.choice([*NUMBERS, *tensors, [value]])
    if isinstance(value, str):
        return generator.choice(["nonsense", "", value.upper() + " ", None, 3, b"auto", [value]])
    if isinstance(value, torch.dtype):
        return generator.choice(DTYPES)
    if isinstance(value, torch.device):
        return generator.choice(["nowhere", "meta", "cuda:99", None, 3, "cpu"])
    if isinstance(value, Mapping):
        return _spoiled_mapping(generator, value)
    if isinstance(value, (list, tuple)):
        return _spoiled_sequence(generator, value)
    return generator.choice(
        [None, "text", 3, torch.zeros(2, 3), torch.zeros(0), [], {}, -1, math.nan, object()]
    )


def _spoiled_tensor(generator: random.Random, x: Tensor) -> Any:
    def put(value: float) -> Tensor:
        changed = x.clone(memory_format=torch.contiguous_format)
        if changed.numel() and changed.is_floating_point():
            changed.view(-1)[generator.randrange(changed.numel())] = value
        return changed

    def resized() -> Tensor:
        if not x.ndim:
            return torch.zeros(3, dtype=x.dtype)
        dim, shape = generator.randrange(x.ndim), list(x.shape)
        shape[dim] = generator.choice([0, shape[dim] + 1, 2 * shape[dim], 1])
        return torch.zeros(shape, dtype=x.dtype)

    def extreme() -> Tensor:
        if x.is_floating_point() or x.dtype == torch.bool:
            return x.clone()
        info = torch.iinfo(x.dtype)
        changed = x.clone(memory_format=torch.contiguous_format)
        if changed.numel():
            place = generator.randrange(changed.numel())
            changed.reshape(-1)[place] = generator.choice([info.min, info.max, 100, 0])
        return changed

    return generator.choice(
        [
            lambda: x.to(generator.choice([torch.int32, torch.int64, torch.bool, torch.uint8])),
            lambda: x.to(generator.choice([*FLOATS, torch.complex64])),
            lambda: x.to(torch.float8_e5m2) if x.is_floating_point() else x.to(torch.int8),
            lambda: x.unsqueeze(0),
            lambda: x.reshape(-1),
            lambda: x[0] if x.ndim and len(x) else x.unsqueeze(0),
            lambda: torch.tensor(1.0).to(x.dtype),
            resized,
            resized,
            extreme,
            extreme,
            lambda: torch.zeros(0, dtype=x.dtype),
            lambda: x.to("meta"),
            lambda: x.detach().numpy() if x.dtype != torch.bfloat16 else None,
            lambda: x.tolist(),
            lambda: put(math.nan),
            lambda: put(math.inf),
            lambda: put(torch.finfo(x.dtype).max if x.is_floating_point() else 0),
            lambda: put(1e-40),
            lambda: torch.zeros_like(x),
            lambda: x[:1].expand(x.shape) if x.ndim and len(x) else x,
            lambda: x.clone().requires_grad_() if x.is_floating_point() else x,
            lambda: x.to_sparse() if x.ndim and x.numel() and x.element_size() > 1 else None,
            lambda: torch.nn.Parameter(x.clone(), requires_grad=x.is_floating_point()),
        ]
    )()


def _spoiled_mapping(generator: random.Random, value: Mapping[Any, Any]) -> Any:
    changed = dict(value)
    if not changed or generator.random() < 0.2:
        return generator.choice([None, [], {"nobody": 3}, {3: 4}, "text"])
    key = generator.choice([*changed])
    kind = generator.random()
    if kind < 0.3:
        del changed[key]
    elif kind < 0.5:
        changed["unknown"] = changed[key]
    else:
        changed[key] = spoiled(generator, changed[key])
    return changed


def _spoiled_sequence(generator: random.Random, value: Sequence[Any]) -> Any:
    changed = [*value]
    kind = generator.random()
    if kind < 0.15 or not changed:
        return generator.choice([None, [], (), "ab", 5, [None], set(), [[]]])
    if kind < 0.3:
        changed = changed[:-1]
    elif kind < 0.4:
        changed = [*changed, changed[-1]]
    elif kind < 0.5:
        return iter(changed)
    else:
        place = generator.randrange(len(changed))
        changed[place] = spoiled(generator, changed[place])
    return type(value)(changed) if isinstance(value, (list, tuple)) else changed
