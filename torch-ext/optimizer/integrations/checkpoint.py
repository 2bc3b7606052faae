"""Optimizer checkpoints, written at once or by a thread: tensors in safetensors, the rest as JSON.

`optimizer.safetensors` is the checkpoint: its header carries the JSON, so that one rename commits
both and no crash can pair the tensors of one step with the options of another. `optimizer.json` is
a copy of that JSON for people to read; loading ignores it.

tensors                          | header, under "optimizer"; "crc32" beside it: see tensor_file.py
state.<group>.<parameter>.<key>  | {"format", "class", "groups": [{"options", "names"}]}
group.<group>.<option>           | options that are Tensors name theirs: {"tensor": name}
"""

from __future__ import annotations

import json
import logging
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..optimizers.groups.parameters import components, local
from ..optimizers.step import MuonBase
from .tensor_file import CHECKSUMS, read_tensors, replacing, write_tensors

logger = logging.getLogger(__name__)

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


class PendingSave:
    """A checkpoint on its way to the disk."""

    def __init__(self, work: Callable[[], None], folder: Path) -> None:
        self.folder = folder
        self.error: BaseException | None = None
        self.told = False  # whether `wait` has returned or raised the error
        self._work = work
        # No daemon: a process that ends in the usual way finishes its checkpoint first.
        self._thread = threading.Thread(target=self._run, name=f"save {folder}", daemon=False)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._work()
        except BaseException as error:
            self.error = error
            logger.exception("saving to %s failed", self.folder)
        finally:
            del self._work  # and the copy of the state with it

    def done(self) -> bool:
        """Whether it has been written, or has failed."""
        return not self._thread.is_alive()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until it is on the disk.

        Args:
            timeout: seconds; None for any time.

        Raises:
            TimeoutError: it took longer; the saving goes on.
            OSError: it could not be written; the folder has what it had before. Other errors of
                the saving are raised here likewise.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"saving to {self.folder} takes longer than {timeout} seconds")
        self.told = True
        if self.error is not None:
            raise self.error


_latest: dict[Path, PendingSave] = {}  # folder -> the save that was started last


def finish(folder: Path) -> None:
    """Wait for the save to a folder that is under way; raise its error if nobody was told."""
    pending = _latest.pop(folder.absolute(), None)
    if pending is not None and not pending.told:
        pending.wait()


def save_optimizer(optimizer: MuonBase, folder: str | os.PathLike[str]) -> None:
    """Write the state and the options of an optimizer into a folder, atomically.

    Written are `optimizer.safetensors`, with a checksum of every tensor and of the options, and the
    readable copy `optimizer.json`. Whenever the process dies, the folder holds the previous
    checkpoint or the new one, whole; a killed process leaves a file `*.tmp` beside them, which
    nothing reads and the next save there removes. Of several ranks with equal state only one
    should save; of savers to one folder the last one wins. State that ranks have parts of is
    refused: `torch.distributed.checkpoint` saves it. A function in adjust_lr_fn is not saved:
    loading keeps that of the optimizer it loads into.

    Args:
        optimizer: `Muon` or `MuonAdamW`.
        folder: made if it does not exist.

    Raises:
        TypeError: `optimizer` is not one of ours, this process has only a part of its state, or a
            group holds a value JSON has no form for.
        RuntimeError: a step went wrong and nothing was loaded since; an older checkpoint stays.
        OSError: it could not be written, as where the disk is full; an older checkpoint stays.
    """
    tensors, text = _encoded(optimizer)
    finish(Path(folder))
    write(tensors, text, Path(folder))


def _encoded(optimizer: MuonBase) -> tuple[dict[str, Tensor], str]:
    """The tensors of a file, which are the optimizer's own, and its header.

    Raises as saving does; a TypeError names what has no form there.
    """
    check_class(optimizer)
    optimizer.check_whole()
    state_dict = optimizer.state_dict()
    states, saved = state_dict["state"], state_dict["param_groups"]
    owned = {entry for group in saved for entry in group["params"]}
    if left := [entry for entry in states if entry not in owned]:
        raise TypeError(f"state without a parameter cannot be saved: {left}")
    tensors: dict[str, Tensor] = {}
    groups = []
    for number, group in enumerate(saved):
        entries = group.pop("params")
        options = {k: _encode(v, f"group.{number}.{k}", tensors) for k, v in group.items()}
        for index, entry in enumerate(entries):
            for key, value in states.get(entry, {}).items():
                name = f"state.{number}.{index}.{key}"
                if not isinstance(value, Tensor):
                    raise TypeError(f"{name}: only tensors can be saved, got {value!r}")
                tensors[name] = local(value).detach().contiguous()
        groups.append({"options": options, "names": optimizer.parameter_names(number)})
    header = {"format": FORMAT, "class": type(optimizer).__name__, "groups": groups}
    return tensors, json.dumps(header, indent=1)


def write(tensors: dict[str, Tensor], text: str, folder: Path) -> None:
    """Write what `_encoded` made: the tensors with their header, then its copy for people.

    After an OSError what was there before still is, unless it was but the copy that failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_tensors(folder / TENSORS, tensors, {HEADER: text})
    with replacing(folder / TEXT) as file:
        file.write(text.encode())


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
        ValueError: the file is damaged or malformed, of another format or class, or holds other
            groups, names, options, keys or shapes, or values that no step leaves behind; the
            message names it.
        TypeError: `optimizer` is not one of ours.
        ImportError: safetensors is not installed.
    """
    check_class(optimizer)
    finish(Path(folder))
    path = Path(folder) / TENSORS
    name, groups = read(path)
    own = type(optimizer).__name__
    if name != own:
        raise ValueError(f"{path} is of {name}, the optimizer {own}")
    count = len(optimizer.param_groups)
    if len(groups) != count:
        raise ValueError(f"{path} has {len(groups)} groups, the optimizer {count}")
    try:
        optimizer.load_state_dict(_state_dict(optimizer, groups))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


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


def _state_dict(optimizer: MuonBase, saved_groups: Sequence[SavedGroup]) -> dict[str, Any]:
    """The saved groups as a state_dict with the parameters in the order of the optimizer's."""
    groups: list[dict[str, Any]] = []
    state: dict[int, dict[str, Tensor]] = {}
    for number, (saved, group) in enumerate(zip(saved_groups, optimizer.param_groups, strict=True)):
        order = order_of(saved.names, optimizer.parameter_names(number), f"group {number}")
        options = dict(saved.options)
        for key in ("lr", "weight_decay"):
            if isinstance(options.get(key), Tensor) and isinstance(group[key], Tensor):
                options[key] = options[key].to(group[key].device)
        if "param_names" in options and None not in saved.names:
            options["param_names"] = [saved.names[j] for j in order]
        first = len(state)
        groups.append({**options, "params": list(range(first, first + len(order)))})
        state |= {first + i: saved.states[j] for i, j in enumerate(order)}
    if not any(state.values()):  # saved before the first step
        state = {}
    return {"state": state, "param_groups": groups}


def order_of(saved: list[str | None], present: list[str | None], where: str) -> list[int]:
    """For each present parameter its index among the saved ones; ValueError if they do not fit."""
    if len(saved) != len(present):
        raise ValueError(f"{where}: {len(saved)} parameters were saved, {len(present)} are present")
    if None in saved or None in present:
        return list(range(len(saved)))
    found = [".".join(components(name)) for name in saved]
    wanted = [".".join(components(name)) for name in present]
    index = {name: i for i, name in enumerate(found)}
    if found == wanted:  # also where wrappers alone tell names apart
        return list(range(len(found)))
    missing = sorted(set(wanted) - set(index))
    times = Counter(found) | Counter(wanted)  # the larger of both
    twice = sorted(name for name in set(wanted) if times[name] > 1)
    if twice and not missing:
        raise ValueError(
            f"{where}: several parameters are {twice} without wrappers; name them apart"
        )
    if missing:
        raise ValueError(
            f"{where}: nothing was saved for {missing}; saved but not present: "
            f"{sorted(set(index) - set(wanted))}"
        )
    return [index[name] for name in wanted]


def check_class(optimizer: Any) -> None:
    """Raise TypeError unless it is one of ours."""
    if not isinstance(optimizer, MuonBase):
        raise TypeError(f"optimizer must be a Muon or a MuonAdamW, got {type(optimizer).__name__}")


def save_optimizer_async(optimizer: MuonBase, folder: str | os.PathLike[str]) -> PendingSave:
    """`save_optimizer` that lets training go on: state is copied now and written by a thread.

    State on CUDA goes to pinned host memory on the current stream: the next step's kernels wait for
    the copies, the host does not, and no more device memory is needed. Of saves to one folder at
    most one is under way: the next save or load there first waits for it, and raises its error if
    `wait` has not. The folder holds the previous checkpoint or the new one, whole, whenever the
    process dies; a process that ends in the usual way finishes first.

    Args:
        optimizer: `Muon` or `MuonAdamW`, offloaded or not. It may be stepped right after the call.
        folder: made if it does not exist.

    Returns:
        The save, with `wait(timeout)` and `done()`.

    Raises:
        TypeError, RuntimeError: as for `save_optimizer`; nothing is written then.
        OSError: the previous save to this folder failed.
    """
    path = Path(folder)
    tensors, text = _encoded(optimizer)
    finish(path)
    copies, events = _copied(tensors)

    def work() -> None:
        for event in events:
            event.synchronize()
        write(copies, text, path)

    pending = _latest[path.absolute()] = PendingSave(work, path)
    return pending


def _copied(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[Any]]:
    """Copies in host memory, and the events after which they are complete."""
    copies, devices = {}, set()
    for name, tensor in tensors.items():
        cuda = tensor.device.type == "cuda"
        copies[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=cuda)
        copies[name].copy_(tensor, non_blocking=cuda)
        if cuda:
            devices.add(tensor.device)
    return copies, [torch.cuda.current_stream(device).record_event() for device in devices]


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """A JSON form that `_decode` turns back into the same value; tensors go into `tensors`."""
    if isinstance(value, Tensor):
        while name in tensors:  # keys with a dot in them
            name += "_"
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
