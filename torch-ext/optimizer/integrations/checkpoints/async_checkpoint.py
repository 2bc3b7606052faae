"""`save_optimizer` beside the training: copied at once, written by a thread."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...optimizers.muon import MuonBase
from .checkpoint import checkpoint_of
from .checkpoint_file import encoded, write
from .pending_save import PendingSave, finish, start


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
    tensors, text = encoded(checkpoint_of(optimizer))
    finish(path)
    copies, events = _copied(tensors)

    def work() -> None:
        for event in events:
            event.synchronize()
        write(copies, text, path)

    return start(path, work)


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
