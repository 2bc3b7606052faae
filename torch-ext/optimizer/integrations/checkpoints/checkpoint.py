"""Optimizer checkpoints, written at once or by a thread: tensors in safetensors, the rest as JSON.

`optimizer.safetensors` is the checkpoint: its header carries the JSON, so that one rename commits
both and no crash can pair the tensors of one step with the options of another. `optimizer.json` is
a copy of that JSON for people to read; loading ignores it.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...optimizers.groups.parameters import components
from ...optimizers.step import MuonBase
from .checkpoint_file import TENSORS, SavedGroup, encoded, read, write

logger = logging.getLogger(__name__)


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
    """What is written of an optimizer, whose own the tensors are; raises as saving does."""
    check_class(optimizer)
    optimizer.check_whole()
    state_dict = optimizer.state_dict()
    groups = []
    for number, group in enumerate(state_dict["param_groups"]):
        states = [state_dict["state"].pop(entry, {}) for entry in group.pop("params")]
        groups.append(SavedGroup(group, optimizer.parameter_names(number), states))
    if state_dict["state"]:
        raise TypeError(f"state without a parameter cannot be saved: {list(state_dict['state'])}")
    return encoded(type(optimizer).__name__, groups)


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
