"""The safetensors files of a model: where each tensor lies, read whole or expert by expert.

A folder or a Hub id with its index file. Files are memory-mapped: a tensor exists in memory from
the moment it is asked for, and one expert of a stack can be asked for alone.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Any

import torch
from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
QUANTIZED = "model-quantized.safetensors"  # of save_quantized; transformers looks for no such name
# Parts of names that checkpoints and transformers 5 spell differently.
RENAMES = ((".block_sparse_moe.", ".mlp."),)
# The tensors of one expert in checkpoints that store them apart, in the order of the rows of ours.
APART = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "up_proj": (("up_proj",), ("w1",)),
    "down_proj": (("down_proj",), ("w2",)),
}


class ModelFiles:
    """The tensors of a checkpoint by the names that the model has for them.

    Args:
        source: a folder, or a Hub id.
        revision: branch, tag or commit of a Hub id; name a commit to get the same files always.
        local_files_only: take a Hub id from the cache alone.

    Raises:
        FileNotFoundError: no safetensors there, or a file of the index is missing.
        ValueError: revision was given for a folder, or the index cannot be read or names files
            that lie elsewhere.
    """

    def __init__(
        self, source: str | Path, *, revision: str | None = None, local_files_only: bool = False
    ) -> None:
        self.source, self.revision = str(source), revision
        self.local_files_only = local_files_only
        self.folder = Path(source) if Path(source).is_dir() else None
        if self.folder is not None and revision is not None:
            raise ValueError(f"revision={revision!r} belongs to a Hub id, but {source} is a folder")
        self._handles: dict[str, Any] = {}
        self._stack = contextlib.ExitStack()
        self._file_of = {_renamed(key): (file, key) for key, file in self._listing().items()}

    def __enter__(self) -> ModelFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._handles.clear()
        self._stack.close()

    def __contains__(self, name: str) -> bool:
        return name in self._file_of

    def names(self) -> list[str]:
        """Every tensor, file after file."""
        return sorted(self._file_of, key=lambda name: (self._file_of[name][0], name))

    def rename(self, name_of: Callable[[str], str]) -> None:
        """Spell every name as the model does.

        Raises:
            ValueError: two tensors would have one name.
        """
        renamed: dict[str, tuple[str, str]] = {}
        for name, place in self._file_of.items():
            if name_of(name) in renamed:
                _, other = renamed[name_of(name)]
                raise ValueError(f"{self.source} has {name_of(name)} twice: {other} and {place[1]}")
            renamed[name_of(name)] = place
        self._file_of = renamed

    def path(self, name: str) -> Path:
        """A file of the checkpoint, downloaded if it has to be."""
        if self.folder is not None:
            if not (self.folder / name).is_file():
                raise FileNotFoundError(f"{self.folder} has no {name}")
            return self.folder / name
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import RemoteEntryNotFoundError

        offline = self.local_files_only or _offline()
        try:
            path = hf_hub_download(
                self.source, name, revision=self.revision, local_files_only=offline
            )
        except RemoteEntryNotFoundError as error:  # no OSError, unlike its local counterpart
            raise FileNotFoundError(f"{self.source} has no {name} on the Hub") from error
        return Path(path)

    def read(self, name: str) -> Tensor:
        """A whole tensor, on the CPU."""
        handle, key = self._open(name)
        return handle.get_tensor(key)

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, without reading it."""
        handle, key = self._open(name)
        return tuple(handle.get_slice(key).get_shape())

    def experts(self, prefix: str, target: str, shape: tuple[int, int, int]) -> Iterator[Tensor]:
        """The experts of a projection, one (N, K) at a time.

        Args:
            prefix: name of the experts module.
            target: "gate_up_proj", "up_proj" or "down_proj".
            shape: (E, N, K), as the model has it.

        Yields:
            E tensors; the files hold them as one stack, or every expert apart.

        Raises:
            ValueError: the files have neither, or another shape.
        """
        stacked = f"{prefix}.{target}"
        if stacked in self:
            if self.shape(stacked) != tuple(shape):
                raise ValueError(
                    f"{stacked} is {self.shape(stacked)} in {self.source}, the model has {shape}"
                )
            handle, key = self._open(stacked)
            part = handle.get_slice(key)
            for expert in range(shape[0]):
                yield part[expert : expert + 1][0]
            return
        names = self._apart(prefix, target)
        for expert in range(shape[0]):
            parts = [self.read(f"{prefix}.{expert}.{name}.weight") for name in names]
            whole = parts[0] if len(parts) == 1 else torch.cat(parts)
            del parts
            yield whole
            del whole

    def _apart(self, prefix: str, target: str) -> tuple[str, ...]:
        """What the files call the parts of one expert's projection."""
        for names in APART.get(target, ()):
            if all(f"{prefix}.0.{name}.weight" in self for name in names):
                return names
        raise ValueError(
            f"{self.source} has neither {prefix}.{target} nor {prefix}.0.<name>.weight for one of "
            f"{APART.get(target)}; convert the checkpoint with transformers' save_pretrained"
        )

    def experts_names(self, prefix: str, target: str, count: int) -> list[str]:
        """The names that `experts` reads."""
        if f"{prefix}.{target}" in self:
            return [f"{prefix}.{target}"]
        names = self._apart(prefix, target)
        return [f"{prefix}.{e}.{name}.weight" for e in range(count) for name in names]

    def _listing(self) -> dict[str, str]:
        """Key -> file: of `save_quantized`'s only file, of the index, or of the only file."""
        with contextlib.suppress(FileNotFoundError):
            return dict.fromkeys(self._handle(QUANTIZED).keys(), QUANTIZED)
        with contextlib.suppress(FileNotFoundError):
            return self._weight_map(self.path(INDEX))
        return dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)

    def _weight_map(self, index: Path) -> dict[str, str]:
        """Key -> file of an index, whose files must lie in the checkpoint's own folder.

        A link may lead out of it where the Hub's cache puts its files: from `snapshots/<revision>`
        to the `blobs` of the same repository.
        """
        try:
            weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            files = {key: PurePath(file) for key, file in weight_map.items()}
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise ValueError(
                f"{index} is no index of safetensors, {{'weight_map': {{name: file}}}}: {error!r}"
            ) from error
        for key, file in files.items():
            outside = file.is_absolute() or ".." in file.parts or "\\" in str(file)
            if outside or not self._holds(file):
                raise ValueError(
                    f"{index} puts {key} into {str(file)!r}, which leads out of the folder; put "
                    "the file itself there"
                )
        return weight_map

    def _holds(self, file: PurePath) -> bool:
        """Whether a file lies in the folder when all links are followed."""
        if self.folder is None:
            return True  # huggingface_hub's own links
        folder, target = self.folder.resolve(), (self.folder / file).resolve()
        homes = [folder]
        for parent in (folder, *folder.parents):
            if parent.parent.name == "snapshots" and parent.parents[1].name.startswith("models--"):
                homes.append(parent.parents[1] / "blobs")
        return any(target.is_relative_to(home) for home in homes)

    def _handle(self, file: str) -> Any:
        if file not in self._handles:
            from safetensors import safe_open

            opened = safe_open(str(self.path(file)), framework="pt", device="cpu")
            self._handles[file] = self._stack.enter_context(opened)
        return self._handles[file]

    def _open(self, name: str) -> tuple[Any, str]:
        if name not in self._file_of:
            raise ValueError(f"{self.source} has no tensor {name}")
        file, key = self._file_of[name]
        return self._handle(file), key


def _renamed(key: str) -> str:
    for theirs, ours in RENAMES:
        key = key.replace(theirs, ours)
    return key


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
