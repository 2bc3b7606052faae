"""The safetensors files of a model: where each tensor lies, read whole or slice by slice.

A folder or a Hub id with its index file. Files are memory-mapped: a tensor exists in memory from
the moment it is asked for, and one expert of a stack can be asked for alone. What the tensors are
in the model is the matter of `checkpoint_names.py`.
"""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path, PurePath
from typing import Any

from torch import Tensor

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
TRUE = ("1", "TRUE", "YES", "ON")  # of a variable of the environment


class MissingFileError(FileNotFoundError):
    """A checkpoint or a repository is there and lacks a file."""


def hub_file(source: str, name: str, revision: str | None, local_files_only: bool) -> Path:
    """A file of a repository on the Hub, downloaded if it has to be, or FileNotFoundError."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import HFValidationError, RemoteEntryNotFoundError

    offline = local_files_only or os.environ.get("HF_HUB_OFFLINE", "").upper() in TRUE
    try:
        return Path(hf_hub_download(source, name, revision=revision, local_files_only=offline))
    except RemoteEntryNotFoundError as error:  # no OSError, unlike its local counterpart
        raise MissingFileError(f"{source} has no {name} on the Hub") from error
    except HFValidationError as error:
        raise FileNotFoundError(
            f"{source!r} is no folder here, and no id of the Hub, which is 'owner/name'"
        ) from error


class ModelFiles:
    """The tensors of a checkpoint, a folder or a Hub id, by the names that the files have for them.

    A revision is refused for a folder, and so is an index that names files which lie elsewhere.
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
        self._file_of = self._listing()

    def __enter__(self) -> ModelFiles:
        return self

    def __exit__(self, *error: object) -> None:
        self._handles.clear()
        self._stack.close()

    def names(self) -> list[str]:
        """Every tensor, file after file."""
        return sorted(self._file_of, key=lambda name: (self._file_of[name], name))

    def path(self, name: str) -> Path:
        """A file of the checkpoint, downloaded if it has to be."""
        if self.folder is not None:
            if not (self.folder / name).is_file():
                raise MissingFileError(f"{self.folder} has no {name}")
            return self.folder / name
        return hub_file(self.source, name, self.revision, self.local_files_only)

    def read(self, name: str) -> Tensor:
        """A whole tensor, on the CPU."""
        return self._file(name).get_tensor(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """Its shape, without reading it."""
        return tuple(self._file(name).get_slice(name).get_shape())

    def share(self, name: str, place: int, count: int) -> Tensor:
        """One of `count` equal shares of a tensor along dimension 0, without reading the others."""
        part = self._file(name).get_slice(name)
        each = part.get_shape()[0] // count
        return part[place * each : (place + 1) * each]

    def _listing(self) -> dict[str, str]:
        """Key -> file: of the index, or of the only file."""
        with contextlib.suppress(FileNotFoundError):
            return self._weight_map(self.path(INDEX))
        try:
            return dict.fromkeys(self._handle(SINGLE).keys(), SINGLE)
        except MissingFileError as error:
            raise FileNotFoundError(
                f"{error}; only safetensors are read: load another kind of file with "
                "from_pretrained, and save_pretrained the model"
            ) from error

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

    def _file(self, name: str) -> Any:
        if name not in self._file_of:
            raise ValueError(f"{self.source} has no tensor {name}")
        return self._handle(self._file_of[name])
