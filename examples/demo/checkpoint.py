"""Checkpoints of a run in safetensors and JSON, written whole or not at all."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.optim import AdamW, Optimizer

from demo.config import DemoError


@dataclass(frozen=True)
class Checkpoints:
    """The checkpoints of one run: `folder/step_000123/{model.safetensors, optimizer/, run.json}`.

    Args:
        folder: Folder of this run alone.
        every: Steps between checkpoints.
        identity: What decides the numbers of the run, JSON values only. A checkpoint of another
            identity is refused.
        package: The loaded kernel package, which stores its own optimizers.
    """

    folder: Path
    every: int
    identity: dict[str, Any]
    package: ModuleType

    def newest(self) -> Path | None:
        """Folder of the newest checkpoint, None if there is none."""
        return max(self.folder.glob("step_" + "[0-9]" * 6), default=None)

    def read_history(self) -> dict[str, Any] | None:
        """History in the newest checkpoint, None if there is none.

        Raises:
            DemoError: If the checkpoint belongs to a different run or cannot be read.
        """
        newest = self.newest()
        if newest is None:
            return None
        with _readable(newest):
            saved = json.loads((newest / "run.json").read_text())
            saved = {key: dict(saved[key]) for key in ("identity", "history")}
        different = list(differences(saved["identity"], self.identity))
        if different:
            raise DemoError(
                f"cannot resume: {newest} belongs to a different run\n  "
                + "\n  ".join(different)
                + "\npass the options it was started with, or start again without --resume"
            )
        return saved["history"]

    def save(self, model: nn.Module, optimizer: Optimizer, history: dict[str, Any]) -> None:
        """Write a checkpoint, then remove the older one.

        The folder gets its final name only when it is complete, so an interruption at any moment
        leaves the older or the newer checkpoint whole.
        """
        final = self.folder / f"step_{len(history['train']):06d}"
        partial = self.folder / "partial"
        shutil.rmtree(partial, ignore_errors=True)
        (partial / "optimizer").mkdir(parents=True)
        save_file(model.state_dict(), partial / "model.safetensors")
        if isinstance(optimizer, AdamW):
            _save_adamw(optimizer, partial / "optimizer")
        else:
            self.package.save_optimizer(optimizer, partial / "optimizer")
        (partial / "run.json").write_text(
            json.dumps({"identity": self.identity, "history": history})
        )
        shutil.rmtree(final, ignore_errors=True)
        partial.rename(final)
        for older in self.folder.glob("step_*"):
            if older != final:
                shutil.rmtree(older)

    def load(self, model: nn.Module, optimizer: Optimizer) -> dict[str, Any] | None:
        """Restore model and optimizer from the newest checkpoint and return its history.

        Raises:
            DemoError: If the checkpoint belongs to a different run or cannot be read.
        """
        history = self.read_history()
        if history is None:
            return None
        newest = self.newest()
        with _readable(newest):
            model.load_state_dict(load_file(newest / "model.safetensors"))
            if isinstance(optimizer, AdamW):
                _load_adamw(optimizer, newest / "optimizer")
            else:
                self.package.load_optimizer(optimizer, newest / "optimizer")
        return history

    def clear(self) -> None:
        """Remove all checkpoints of this run."""
        shutil.rmtree(self.folder, ignore_errors=True)


@contextmanager
def _readable(folder: Path) -> Iterator[None]:
    """Turn what reading a damaged checkpoint raises into a DemoError that names it."""
    try:
        yield
    # JSON and our files: ValueError; a missing key or tensor: KeyError, TypeError, RuntimeError
    except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
        raise DemoError(
            f"cannot resume: {folder} is damaged ({type(error).__name__}: {error}); start again "
            "without --resume"
        ) from error


def _save_adamw(optimizer: AdamW, folder: Path) -> None:
    """State of torch.optim.AdamW as tensors named `<parameter index>.<key>`."""
    state = optimizer.state_dict()["state"]
    save_file(
        {f"{index}.{key}": value for index, entry in state.items() for key, value in entry.items()},
        folder / "state.safetensors",
    )


def _load_adamw(optimizer: AdamW, folder: Path) -> None:
    state: dict[int, dict[str, torch.Tensor]] = {}
    for name, value in load_file(folder / "state.safetensors").items():
        index, key = name.split(".")
        state.setdefault(int(index), {})[key] = value
    groups = optimizer.state_dict()["param_groups"]  # the learning rate is set before every step
    optimizer.load_state_dict({"state": state, "param_groups": groups})


def differences(saved: Any, current: Any, name: str = "") -> list[str]:
    """Lines `name: <saved> in the checkpoint, <current> now` for every leaf that differs."""
    if isinstance(saved, dict) and isinstance(current, dict):
        keys = sorted(saved.keys() | current.keys())
        return [
            line
            for key in keys
            for line in differences(saved.get(key), current.get(key), f"{name}.{key}".strip("."))
        ]
    return [] if saved == current else [f"{name}: {saved} in the checkpoint, {current} now"]
