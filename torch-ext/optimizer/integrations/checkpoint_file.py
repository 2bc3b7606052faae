"""The checkpoint as a file: safetensors whose header carries groups and options as JSON.

tensors                          | header, under "optimizer"
state.<group>.<parameter>.<key>  | {"format", "class", "groups": [{"options", "names"}]}
group.<group>.<option>           | options that are Tensors name theirs: {"tensor": name}
"""

from __future__ import annotations

import json
import os
import re
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

FORMAT = 1
TENSORS, TEXT = "optimizer.safetensors", "optimizer.json"
HEADER = "optimizer"  # the key of the JSON in the header of the safetensors file
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "float64": torch.float64,
}
_Kind = TypeVar("_Kind")


@dataclass(frozen=True)
class SavedGroup:
    """One parameter group; names and states are parallel to its parameters."""

    options: dict[str, Any]
    names: list[str | None]
    states: list[dict[str, Tensor]]


@dataclass(frozen=True)
class Checkpoint:
    """What a file holds; `optimizer` is the name of the class."""

    optimizer: str
    groups: list[SavedGroup]


def encoded(checkpoint: Checkpoint) -> tuple[dict[str, Tensor], str]:
    """The tensors of a file, those of options copied, and its header.

    Raises:
        TypeError: an option has no form in JSON.
    """
    tensors: dict[str, Tensor] = {}
    groups = []
    for number, group in enumerate(checkpoint.groups):
        options = {
            key: _encode(value, f"group.{number}.{key}", tensors)
            for key, value in group.options.items()
        }
        groups.append({"options": options, "names": group.names})
        for index, state in enumerate(group.states):
            tensors |= {f"state.{number}.{index}.{key}": value for key, value in state.items()}
    header = {"format": FORMAT, "class": checkpoint.optimizer, "groups": groups}
    return tensors, json.dumps(header, indent=1)


def write(tensors: dict[str, Tensor], text: str, folder: Path) -> None:
    """Write what `encoded` made: the tensors with their header, then its copy for people.

    Raises:
        ImportError: safetensors is not installed.
        OSError: the file could not be written; what was there before still is.
    """
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / TENSORS, lambda path: save_file(tensors, path, {HEADER: text}))
    _replace(folder / TEXT, lambda path: path.write_text(text))


def read(path: Path) -> Checkpoint:
    """Read and check a whole file.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is damaged, of another format, or not what `write` writes.
        ImportError: safetensors is not installed.
    """
    from safetensors import SafetensorError, safe_open

    if not path.is_file():
        raise FileNotFoundError(f"no optimizer checkpoint {path}")
    try:
        with safe_open(path, framework="pt") as file:
            header = (file.metadata() or {}).get(HEADER)
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - no dict
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file: {error}") from error
    if header is None:
        raise ValueError(f"{path} was not written by save_optimizer: its header has no options")
    try:
        return _parsed(json.loads(header), tensors)
    except ValueError as error:  # of json too
        raise ValueError(f"{path}: {error}") from error


def _parsed(header: Any, tensors: dict[str, Tensor]) -> Checkpoint:
    """The checkpoint of a header. Every tensor must have its place, and leaves `tensors`."""
    _expect(dict, header, "header")
    if header.get("format") != FORMAT:
        raise ValueError(f"it has format {header.get('format')!r}, this version reads {FORMAT}")
    optimizer = _expect(str, header.get("class"), "class")
    groups = [
        _group(group, f"groups[{number}]", tensors)
        for number, group in enumerate(_expect(list, header.get("groups"), "groups"))
    ]
    for name in sorted(tensors):
        match = re.fullmatch(r"state\.([0-9]+)\.([0-9]+)\.(.+)", name)
        number, index = (int(match[1]), int(match[2])) if match else (len(groups), 0)
        if number >= len(groups) or index >= len(groups[number].names):
            raise ValueError(f"tensor {name!r} belongs to no parameter and no option of the header")
        groups[number].states[index][match[3]] = tensors.pop(name)
    return Checkpoint(optimizer, groups)


def _group(saved: Any, where: str, tensors: dict[str, Tensor]) -> SavedGroup:
    _expect(dict, saved, where)
    names = _expect(list, saved.get("names"), f"{where}.names")
    if not all(name is None or isinstance(name, str) for name in names):
        raise ValueError(f"{where}.names must hold strings and null, got {names!r:.80}")
    options = {
        key: _decode(value, f"{where}.options.{key}", tensors)
        for key, value in _expect(dict, saved.get("options"), f"{where}.options").items()
    }
    return SavedGroup(options, names, [{} for _ in names])


def _expect(kind: type[_Kind], value: Any, where: str) -> _Kind:
    if not isinstance(value, kind):
        raise ValueError(f"{where} must be a {kind.__name__}, got {value!r:.80}")
    return value


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A JSON form that `_decode` turns back into the same value; tensors go into `tensors`."""
    if isinstance(value, Tensor):  # cloned: groups may share one lr, which safetensors refuses
        tensors[name] = value.detach().clone()
        return {"tensor": name}
    if isinstance(value, torch.dtype) and value in DTYPES.values():
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, tuple):
        return {"tuple": [_encode(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]}
    if isinstance(value, list):
        return [_encode(v, f"{name}.{i}", tensors) for i, v in enumerate(value)]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {"dict": {k: _encode(v, f"{name}.{k}", tensors) for k, v in value.items()}}
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Real):  # numpy's numbers, which schedulers may leave in a group
        return int(value) if isinstance(value, Integral) else float(value)
    raise TypeError(f"{name}: a {type(value).__name__} cannot be saved, got {value!r}")


def _decode(value: Any, where: str, tensors: dict[str, Tensor]) -> Any:
    """The value of a JSON form; its tensors are taken out of `tensors`."""
    if isinstance(value, list):
        return [_decode(v, where, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    kind, inner = next(iter(value.items())) if len(value) == 1 else (None, None)
    if kind == "tensor" and isinstance(inner, str) and inner in tensors:
        return tensors.pop(inner)
    if kind == "dtype" and isinstance(inner, str) and inner in DTYPES:
        return DTYPES[inner]
    if kind == "tuple" and isinstance(inner, list):
        return tuple(_decode(v, where, tensors) for v in inner)
    if kind == "dict" and isinstance(inner, dict):
        return {key: _decode(v, where, tensors) for key, v in inner.items()}
    raise ValueError(f"{where}: {value!r:.80} is no value that save_optimizer writes")


def _replace(path: Path, write_to: Callable[[Path], Any]) -> None:
    """Write beside the file under a name of its own, flush to the disk, then rename over it."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(8)}.tmp")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        write_to(temporary)
        _flush(temporary, os.O_RDWR)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    if os.name == "posix":  # the rename itself must reach the disk too
        _flush(path.parent, os.O_RDONLY)


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
