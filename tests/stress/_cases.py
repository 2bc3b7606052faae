"""One call of one public function, spoiled perhaps, and judged."""

import contextlib
import math
import random
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ._calls import CALLS, FLOATS, Call, Package
from ._problem import bits

# What torch says itself of an argument of an op, of a device and of memory that is not there.
BY_TORCH = (
    "Expected a value of type",
    "device type at start of device string",
    "accelerator device when none is available",
    "can't allocate memory",
    "Trying to create tensor with negative dimension",
    "SymIntArrayRef expected to contain only concrete integers",
    "Storage size calculation overflowed",
    "Invalid device string",
    "not compiled with CUDA enabled",
    "shapes cannot be multiplied",
    "both arguments to linear",
    "not implemented for sparse tensors",
    "from the 'SparseCPU' backend",
    "index_select(): Expected dtype",
    "out of bounds for dimension",
    "Device string must not be empty",
    "index out of range in self",
    "Only Tensors of floating point",
    'kernel_cpu" not implemented for',
    "is not on the expected device meta",
    "without overflow",
)
VALID_RATE = 0.4
RARE = {"integrations.": 0.15}  # slow: a model is made for each


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


def tensors_in(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    """Every dense tensor of an argument, with its place."""
    if isinstance(value, Tensor):
        if value.layout == torch.strided and not value.is_meta:
            yield path, value.detach()
    elif isinstance(value, dict):
        for key, entry in value.items():
            yield from tensors_in(entry, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for number, entry in enumerate(value):
            yield from tensors_in(entry, f"{path}[{number}]")


def held(call: Call, names: Any) -> dict[str, bytes]:
    return {
        path: bits(tensor)
        for name in names
        for path, tensor in tensors_in(call.arguments.get(name), name)
    }


def judge(call: Call) -> str:
    """What became of a call: "right", "accepted", "refused", or so by torch or Python.

    An object of another kind than documented, such as a list for a tensor, may get what Python says
    of an operation on it: TypeError, OverflowError, or AttributeError of that object; torch speaks
    for its ops.
    """
    read = [name for name in call.arguments if name not in call.written]
    before, written = held(call, read), held(call, call.written)
    try:
        result = call.function(**call.arguments)
    except (ValueError, TypeError, OverflowError, *call.also) as error:
        by_python = isinstance(error, (TypeError, OverflowError)) and not _is_ours(error)
        if not by_python:
            _assert_named(call, error)
        _assert_kept(call, before | written, held(call, call.arguments), "refused")
        return "refused by Python" if by_python and call.spoiled else "refused"
    except (RuntimeError, AssertionError, IndexError) as error:
        if not call.spoiled or not any(words in str(error) for words in BY_TORCH):
            raise
        _assert_kept(call, before | written, held(call, call.arguments), "refused")
        return "refused by torch"
    except AttributeError as error:
        entries = [entry for name in call.spoiled for entry in _all(call, name)]
        kinds = {type(entry).__name__ for entry in entries}
        kinds |= {f"{type(e).__module__}.{type(e).__qualname__}" for e in entries}
        if not any(f"'{kind}' object has no attribute" in str(error) for kind in kinds):
            raise
        _assert_kept(call, before | written, held(call, call.arguments), "refused")
        return "refused by Python"
    _assert_kept(call, before, held(call, read), "accepted")
    if call.spoiled:
        return "accepted"
    if call.check is not None:
        call.check(result)
    return "right"


def _all(call: Call, name: str) -> list[Any]:
    """An argument and what it holds."""
    value = call.arguments[name]
    inside = value.values() if isinstance(value, dict) else value
    return [value, *(inside if isinstance(inside, (list, tuple, type({}.values()))) else [])]


def _is_ours(error: BaseException) -> bool:
    """Whether a `raise` of Python code made the error, and not an operation on a wrong object."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return (last.line or "").startswith("raise ")


def _assert_named(call: Call, error: BaseException) -> None:
    assert call.spoiled or call.also, f"valid arguments were refused: {error}"
    text = str(error)
    if isinstance(error, TypeError) and ("unexpected keyword" in text or "missing" in text):
        return
    named = any(word.lower() in text.lower() for word in (*call.arguments, *call.words))
    assert named, f"{type(error).__name__} names none of {[*call.arguments]}: {text}"


def _assert_kept(call: Call, before: dict[str, bytes], after: dict[str, bytes], how: str) -> None:
    changed = [path for path, value in before.items() if after.get(path, value) != value]
    assert not changed, f"{how}, and changed {changed}"


def shown(value: Any) -> str:
    if isinstance(value, Tensor):
        grad = ", grad" if value.requires_grad else ""
        strides = tuple(value.stride()) if value.layout == torch.strided else value.layout
        return f"{value.dtype} {tuple(value.shape)} strides {strides} on {value.device}{grad}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key!r}: {shown(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, (list, tuple)):
        return f"{type(value).__name__}({', '.join(map(shown, value))})"
    if isinstance(value, nn.Module):
        return type(value).__name__
    return repr(value)[:200]


def play(package: Package, number: int) -> str:
    """What became of the call with that number; an error tells its arguments."""
    generator = random.Random(number)
    weights = [next((w for part, w in RARE.items() if part in name), 1.0) for name in CALLS]
    (name,) = generator.choices([*CALLS], weights)
    told = [name, "while valid arguments were made"]
    try:
        # A path that is "text" is taken, and made where the calls run.
        with warnings.catch_warnings(action="ignore"), contextlib.chdir(package.folder):
            call = CALLS[name](package, generator)
            if generator.random() > VALID_RATE:
                names = [name for name in call.arguments if name not in call.exact]
                for name in generator.sample(names, min(len(names), generator.choice([1, 1, 2]))):
                    call.arguments[name] = spoiled(generator, call.arguments[name])
                    call.spoiled.append(name)
            told = [f"{key} = {shown(value)}" for key, value in call.arguments.items()]
            told = [name, f"spoiled: {call.spoiled}", *told]
            return judge(call)
    except Exception as error:
        error.add_note("\n".join(told))
        raise
