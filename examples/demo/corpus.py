"""Text to train on: Python source files that are already on the machine, split by file."""

from __future__ import annotations

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from demo.config import DemoError

# Installed packages and tests come and go with the distribution; codec tables and the generated
# help topics are data, not programs.
EXCLUDED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
)
HELD_OUT_SHARE = 16  # one file in 16 is held out


@dataclass(frozen=True)
class Corpus:
    """Train and held-out bytes.

    Args:
        train: (N,) uint8, on the training device.
        held_out: (M,) uint8, on the training device.
        files: Number of train and of held-out files.
        digest: SHA-256 of all bytes; two corpora of one digest give the same batches.
    """

    train: Tensor
    held_out: Tensor
    files: tuple[int, int]
    digest: str

    def train_starts(self, *, seed: int, steps: int, batch: int, context: int) -> Tensor:
        """First bytes of every sequence of every step, (steps, B) int64.

        Drawn at once and looked up by step: a resumed run needs no generator state, and no step
        waits for a copy to the device.
        """
        generator = torch.Generator().manual_seed(seed)
        starts = torch.randint(len(self.train) - context, (steps, batch), generator=generator)
        return starts.to(self.train.device)

    def held_out_batch(self, *, sequences: int, context: int) -> tuple[Tensor, Tensor]:
        """Tokens and targets, both (B, T) int64, spread evenly over the held-out text."""
        starts = torch.linspace(0, len(self.held_out) - context - 1, sequences, dtype=torch.float64)
        return windows(self.held_out, starts.long().to(self.held_out.device), context)


def windows(text: Tensor, starts: Tensor, context: int) -> tuple[Tensor, Tensor]:
    """Tokens and targets, both (B, T) int64: the windows of `text` (N,) at `starts` (B,)."""
    offsets = torch.arange(context + 1, device=text.device)
    window = text[starts[:, None] + offsets].long()  # (B, T + 1)
    return window[:, :-1], window[:, 1:]


def read_corpus(
    folder: Path | None, *, context: int, max_bytes: int, device: torch.device
) -> Corpus:
    """Read the *.py files below a folder and split them by the hash of their relative path.

    Args:
        folder: Where to look; None means the standard library of the running Python.
        context: Sequence length the corpus has to serve.
        max_bytes: Stop reading train text there. Files are taken in the order of their hash, so
            the cut is a random sample of the library and not the alphabet's first letters.
        device: Where the bytes are kept.

    Returns:
        The corpus.

    Raises:
        DemoError: If either part holds fewer than 8 sequences.
    """
    root = folder or Path(sysconfig.get_paths()["stdlib"])
    if not root.is_dir():
        raise DemoError(f"corpus folder {root} does not exist; pass --corpus DIR")
    parts: dict[bool, list[bytes]] = {True: [], False: []}
    room = {True: max_bytes // (HELD_OUT_SHARE - 1), False: max_bytes}
    for key, path in sorted((_hash(path, root), path) for path in _sources(root)):
        held_out = key % HELD_OUT_SHARE == 0
        text = path.read_bytes()[: room[held_out]]
        if text:
            parts[held_out].append(text)
            room[held_out] -= len(text)
    train, held_out = b"".join(parts[False]), b"".join(parts[True])
    if min(len(train), len(held_out)) < 8 * (context + 1):
        raise DemoError(
            f"corpus {root} is too small: {len(train)} train and {len(held_out)} held-out bytes of "
            f"*.py files, at least {8 * (context + 1)} of each are needed; "
            "pass --corpus DIR with more source text"
        )
    return Corpus(
        train=_to_tensor(train, device),
        held_out=_to_tensor(held_out, device),
        files=(len(parts[False]), len(parts[True])),
        digest=hashlib.sha256(train + b"\0" + held_out).hexdigest(),
    )


def _sources(root: Path) -> Iterator[Path]:
    for folder, below, names in os.walk(root):
        below[:] = [name for name in below if name not in EXCLUDED_FOLDERS]
        paths = (Path(folder, name) for name in names if name.endswith(".py"))
        yield from (path for path in paths if path.is_file())  # a link may lead nowhere


def _hash(path: Path, root: Path) -> int:
    """A number that depends on the path below `root` only: the same split on every machine."""
    name = path.relative_to(root).as_posix().encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big")


def _to_tensor(text: bytes, device: torch.device) -> Tensor:
    return torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy()).to(device)
