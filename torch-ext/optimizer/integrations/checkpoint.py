"""Optimizer checkpoints: tensors in safetensors, everything else as JSON in the same file.

`optimizer.safetensors` is the checkpoint: its header carries the JSON, so that one rename commits
both and no crash can pair the tensors of one step with the options of another. `optimizer.json` is
a copy of that JSON for people to read; loading ignores it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..optimizers.muon import MuonBase
from ..optimizers.param_groups import components
from ..optimizers.parameters import local

FORMAT = 1
TENSORS, TEXT = "optimizer.safetensors", "optimizer.json"
HEADER = "optimizer"  # the key of the JSON in the header of the safetensors file


def save_optimizer(optimizer: MuonBase, folder: str | os.PathLike[str]) -> None:
    """Write the state and the options of an optimizer into a folder, atomically.

    Written are `optimizer.safetensors` and the readable copy `optimizer.json`. Whenever the process
    dies, the folder holds the previous checkpoint or the new one, whole. A function in adjust_lr_fn
    is not saved: loading keeps that of the optimizer it loads into.

    Args:
        optimizer: `Muon` or `MuonAdamW`.
        folder: made if it does not exist.

    Raises:
        TypeError: `optimizer` is not one of ours, or a group holds a value JSON has no form for.
        ImportError: safetensors is not installed.
    """
    from safetensors.torch import save_file

    _check_class(optimizer)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    state_dict = optimizer.state_dict()
    groups = []
    for number, group in enumerate(state_dict["param_groups"]):
        options = {
            key: _encode(value, f"group.{number}.{key}", tensors)
            for key, value in group.items()
            if key != "params"
        }
        groups.append({"options": options, "names": optimizer.parameter_names(number)})
        for index, entry in enumerate(group["params"]):
            for key, value in state_dict["state"].pop(entry).items():
                name = f"state.{number}.{index}.{key}"
                if not isinstance(value, Tensor):
                    raise TypeError(f"{name}: only tensors can be saved, got {value!r}")
                tensors[name] = local(value).detach().contiguous()
    if state_dict["state"]:
        raise TypeError(f"state without a parameter cannot be saved: {list(state_dict['state'])}")
    text = json.dumps(
        {"format": FORMAT, "class": type(optimizer).__name__, "groups": groups}, indent=1
    )
    _replace(folder / TENSORS, lambda path: save_file(tensors, path, {HEADER: text}))
    _replace(folder / TEXT, lambda path: path.write_text(text))


def load_optimizer(optimizer: MuonBase, folder: str | os.PathLike[str]) -> None:
    """Load what `save_optimizer` wrote into an optimizer of the same class and groups, exactly.

    Inside each group parameters are matched by name where both sides have names, in any order and
    whatever wrappers such as torch.compile add, and by position otherwise. Options are
    replaced by the saved ones. Everything is checked before anything changes.

    Args:
        optimizer: constructed like the saved one.
        folder: as given to `save_optimizer`.

    Raises:
        FileNotFoundError: there is no checkpoint.
        ValueError: another format or class, other groups or names, a missing key, a wrong shape.
        ImportError: safetensors is not installed.
    """
    from safetensors import safe_open

    _check_class(optimizer)
    path = Path(folder) / TENSORS
    if not path.is_file():
        raise FileNotFoundError(f"no optimizer checkpoint {path}")
    with safe_open(path, framework="pt") as file:
        header = (file.metadata() or {}).get(HEADER)
        if header is None:
            raise ValueError(f"{path} was not written by save_optimizer: its header has no options")
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 - not a dict
    saved = json.loads(header)
    if saved.get("format") != FORMAT:
        raise ValueError(f"{path} has format {saved.get('format')}, this version reads {FORMAT}")
    if saved["class"] != type(optimizer).__name__:
        raise ValueError(f"{path} is of {saved['class']}, the optimizer {type(optimizer).__name__}")
    if len(saved["groups"]) != len(optimizer.param_groups):
        raise ValueError(
            f"{path} has {len(saved['groups'])} groups, the optimizer {len(optimizer.param_groups)}"
        )
    optimizer.load_state_dict(_state_dict(optimizer, saved["groups"], tensors))


def _state_dict(
    optimizer: MuonBase, saved_groups: list[dict[str, Any]], tensors: Mapping[str, Tensor]
) -> dict[str, Any]:
    """The saved groups as a state_dict with the parameters in the order of the optimizer's."""
    states = _nested(tensors)
    groups: list[dict[str, Any]] = []
    state: dict[int, dict[str, Tensor]] = {}
    for number, (saved, group) in enumerate(zip(saved_groups, optimizer.param_groups, strict=True)):
        names = optimizer.parameter_names(number)
        order = _order(saved["names"], names, f"group {number}")
        options = {key: _decode(value, tensors) for key, value in saved["options"].items()}
        if isinstance(options.get("lr"), Tensor) and isinstance(group["lr"], Tensor):
            options["lr"] = options["lr"].to(group["lr"].device)
        first = len(state)
        groups.append({**options, "params": list(range(first, first + len(order)))})
        state |= {first + i: states.get((number, j), {}) for i, j in enumerate(order)}
    return {"state": state, "param_groups": groups}


def _order(saved: list[str | None], present: list[str | None], where: str) -> list[int]:
    """For each present parameter its index among the saved ones."""
    if len(saved) != len(present):
        raise ValueError(f"{where}: {len(saved)} parameters were saved, {len(present)} are present")
    if None in saved or None in present:
        return list(range(len(saved)))
    index = {".".join(components(name)): i for i, name in enumerate(saved)}
    wanted = [".".join(components(name)) for name in present]
    if len(index) < len(saved) or len(set(wanted)) < len(wanted):
        return list(range(len(saved)))  # names that only wrappers tell apart
    missing = sorted(set(wanted) - set(index))
    if missing:
        raise ValueError(
            f"{where}: nothing was saved for {missing}; saved but not present: "
            f"{sorted(set(index) - set(wanted))}"
        )
    return [index[name] for name in wanted]


def _nested(tensors: Mapping[str, Tensor]) -> dict[tuple[int, int], dict[str, Tensor]]:
    """{(group, index): {key: tensor}} of the names "state.<group>.<index>.<key>"."""
    states: dict[tuple[int, int], dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        kind, group, rest = name.split(".", 2)
        if kind == "state":
            index, key = rest.split(".", 1)
            states.setdefault((int(group), int(index)), {})[key] = tensor
    return states


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A JSON form that `_decode` turns back into the same value; tensors go into `tensors`."""
    if isinstance(value, Tensor):  # cloned: groups may share one lr, which safetensors refuses
        tensors[name] = value.detach().clone()
        return {"tensor": name}
    if isinstance(value, torch.dtype):
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


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(value, list):
        return [_decode(v, tensors) for v in value]
    if not isinstance(value, dict):
        return value
    ((kind, inner),) = value.items()
    if kind == "tensor":
        return tensors[inner]
    if kind == "dtype":
        return getattr(torch, inner)
    if kind == "tuple":
        return tuple(_decode(v, tensors) for v in inner)
    return {key: _decode(v, tensors) for key, v in inner.items()}


def _check_class(optimizer: Any) -> None:
    if not isinstance(optimizer, MuonBase):
        raise TypeError(f"optimizer must be a Muon or a MuonAdamW, got {type(optimizer).__name__}")


def _replace(path: Path, write: Callable[[Path], Any]) -> None:
    """Write beside the file, flush to the disk, then rename over it."""
    temporary = path.with_name(f"{path.name}.tmp")  # left by a crash, it is overwritten next time
    write(temporary)
    _flush(temporary, os.O_RDWR)
    os.replace(temporary, path)
    if os.name == "posix":  # the rename itself must reach the disk too
        _flush(path.parent, os.O_RDONLY)


def _flush(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
