"""Checkpoints that all ranks write together with `torch.distributed.checkpoint`."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch.distributed.checkpoint as dcp
from torch import distributed, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.optim import Optimizer

METADATA = (
    ".metadata"  # which torch writes last, by a rename, when every rank has written its files
)


class ShardedCheckpoints:
    """The checkpoints of a run, in `folder/step-000123`, for any number of ranks that load them.

    Every rank writes its shards. A folder without metadata was not finished: it is never loaded,
    and an older one is removed only when a newer one is whole.

    Args:
        folder: Of this run alone, on a file system that all ranks share.
        in_background: Copy the state, return, and let a thread write it.
    """

    def __init__(self, folder: Path, *, in_background: bool) -> None:
        self.folder = folder
        # A group of its own: what the thread says must not mix with the collectives of training.
        self._group = distributed.new_group(backend="gloo") if in_background else None
        self._writing: tuple[Any, Path] | None = None

    def newest(self) -> Path | None:
        """The newest whole checkpoint, the same on all ranks; remains of others are removed."""
        found: list[Path | None] = [None]
        if distributed.get_rank() == 0:
            whole = sorted(path.parent for path in self.folder.glob(f"step-*/{METADATA}"))
            found = whole[-1:] or [None]
            self._remove_all_but(found[0])
        distributed.broadcast_object_list(found)
        return found[0]

    def clear(self) -> None:
        """Remove all checkpoints, for a run from the beginning."""
        if distributed.get_rank() == 0:
            self._remove_all_but(None)
        distributed.barrier()

    def save(self, model: nn.Module, optimizer: Optimizer, more: dict[str, Any], step: int) -> None:
        """Save model, optimizer and tensors in `more`; in the background after a copy of them."""
        self.wait()
        weights, state = get_state_dict(model, optimizer)
        content = {"model": weights, "optimizer": state, **more}
        target = self.folder / f"step-{step:06d}"
        if self._group is None:
            dcp.save(content, checkpoint_id=target)
            self._replace_by(target)
        else:
            writing = dcp.async_save(content, checkpoint_id=target, process_group=self._group)
            self._writing = writing, target

    def wait(self) -> None:
        """Wait for a save in the background; raises what went wrong with it."""
        if self._writing is not None:
            (writing, target), self._writing = self._writing, None
            writing.result()
            self._replace_by(target)

    def load(
        self, model: nn.Module, optimizer: Optimizer, more: dict[str, Any], source: Path
    ) -> None:
        """Load model and optimizer, in whatever shards they are now, and the tensors in `more`."""
        weights, state = get_state_dict(model, optimizer)
        content = {"model": weights, "optimizer": state, **more}
        dcp.load(content, checkpoint_id=source)
        set_state_dict(
            model,
            optimizer,
            model_state_dict=content["model"],
            optim_state_dict=content["optimizer"],
        )

    def _replace_by(self, target: Path) -> None:
        if distributed.get_rank() == 0:  # which wrote the metadata, after all ranks had written
            self._remove_all_but(target)

    def _remove_all_but(self, kept: Path | None) -> None:
        for path in self.folder.glob("step-*"):
            if path != kept:
                shutil.rmtree(path)
