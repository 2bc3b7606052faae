"""The checkpoint as a file: safetensors whose header carries groups and options as JSON.

tensors                          | header, under "optimizer"; "crc32" beside it: see tensor_file.py
state.<group>.<parameter>.<key>  | {"format", "class", "groups": [{"options", "names"}]}
group.<group>.<option>           | options that are Tensors name theirs: {"tensor": name}
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...optimizers.groups.parameters import local
from .tensor_file import CHECKSUMS, read_tensors, replacing, write_tensors

FORMAT = 1
TENSORS, TEXT = "optimizer.safetensors", "optimizer.json"
HEADER = "optimizer"  # the key of the JSON in the header of the safetensors file
DTYPES = {name: getattr(torch, name) for name in ("float16", "bfloat16", "float32", "float64")}


@dataclass(frozen=True)
class SavedGroup:
    """One parameter group; names and states are parallel to its parameters."""

    options: dict[str, Any]
    names: list[str | None]
    states: list[dict[str, Tensor]]


def encoded(optimizer: str, groups: Iterable[SavedGroup]) -> tuple[dict[str, Tensor], str]:
    """The tensors of a file, none copied, and its header, of a class of that name.

    A TypeError names what has no form there.
    """
    tensors: dict[str, Tensor] = {}
    described = []
    for number, group in enumerate(groups):
        options = {
            key: _encode(value, f"group.{number}.{key}", tensors)
            for key, value in group.options.items()
        }
        described.append({"options": options, "names": group.names})
        for index, state in enumerate(group.states):
            for key, value in state.items():
                name = f"state.{number}.{index}.{key}"
                if not isinstance(value, Tensor):
                    raise TypeError(f"{name}: only tensors can be saved, got {value!r}")
                tensors[name] = local(value).detach().contiguous()
    header = {"format": FORMAT, "class": optimizer, "groups": described}
    return tensors, json.dumps(header, indent=1)


def write(tensors: dict[str, Tensor], text: str, folder: Path) -> None:
    """Write what `encoded` made: the tensors with their header, then its copy for people.

    After an OSError what was there before still is, unless it was but the copy that failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / TENSORS, tensors, {HEADER: text})
    with replacing(folder / TEXT) as file:
        file.write(text.encode())


def read(path: Path) -> tuple[str, list[SavedGroup]]:
    """Name of the class and groups of a file; ValueError if `write` did not leave it so."""
    if not path.is_file():
        raise FileNotFoundError(f"no optimizer checkpoint {path}")
    tensors, texts = read_tensors(path)
    if HEADER not in texts:
        raise ValueError(f"{path} was not written by save_optimizer: its header has no options")
    try:
        header = json.loads(texts[HEADER])
        saved = _expect(dict, header, "header").get("format")
        if saved != FORMAT:
            raise ValueError(f"it has format {saved!r}, this version reads {FORMAT}")
        if CHECKSUMS not in texts:
            raise ValueError("it is damaged: its checksums are gone; use another checkpoint")
        return _parsed(header, tensors)
    except (ValueError, RecursionError) as error:  # of json too
        raise ValueError(f"{path}: {error}") from error


def _parsed(header: Any, tensors: dict[str, Tensor]) -> tuple[str, list[SavedGroup]]:
    """What a header says. Every tensor must have its place, and leaves `tensors`."""
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
    return optimizer, groups


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


def _expect(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, kind):
        raise ValueError(f"{where} must be a {kind.__name__}, got {value!r:.80}")
    return value


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A JSON form that `_decode` turns back into the same value; tensors go into `tensors`."""
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
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
