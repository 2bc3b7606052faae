"""Token ids of this machine's Python files: a byte-level BPE, trained once and kept in a folder.

Files are told apart by content: copies of one file are one file, which is either trained on or held
out. The vocabulary is trained on train text alone.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

HELD_OUT_SHARE = 16  # one file in 16 is held out
LARGEST_FILE = 1 << 18  # bytes; larger ones are tables that a program wrote
BETWEEN = "<|file|>"  # a token that stands before every file
BATCH = 1024  # files encoded at once


@dataclass(frozen=True)
class Recipe:
    """What decides the token ids, beside the files."""

    vocabulary: int = 16384  # number of tokens
    train_bytes: int = 56 << 20  # train text to read at most
    held_out_bytes: int = 3 << 20  # held-out text to read at most
    vocabulary_bytes: int = 16 << 20  # of the train text, what the vocabulary is trained on


@dataclass(frozen=True)
class Tokens:
    """Token ids of both parts, (N,) and (M,) uint16, and the SHA-256 of both."""

    train: np.ndarray
    held_out: np.ndarray
    digest: str


def prepare(folder: Path, recipe: Recipe, roots: Sequence[Path] | None = None) -> Tokens:
    """The token ids that `folder` keeps, made first if it has none of this recipe.

    Args:
        folder: where they are kept.
        recipe: vocabulary and sizes.
        roots: folders with *.py files; None for the standard library and the installed packages.

    Raises:
        ValueError: the files do not give text of both parts.
    """
    name = "-".join(map(str, vars(recipe).values()))
    kept = folder / f"python-{name}"
    if not (kept / "about.json").is_file():
        train, held_out = split(_default_roots() if roots is None else roots, recipe)
        if not train or not held_out:
            raise ValueError(f"{len(train)} train and {len(held_out)} held-out files; need some")
        tokenizer = _trained(train, recipe)
        folder.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=folder))
        digest = hashlib.sha256()
        for part, texts in (("train", train), ("held_out", held_out)):
            ids = encode(tokenizer, texts)
            digest.update(ids.tobytes() + b"\0")
            np.save(made / f"{part}.npy", ids)
        tokenizer.save(str(made / "tokenizer.json"))
        about = {"digest": digest.hexdigest(), "files": [len(train), len(held_out)]}
        (made / "about.json").write_text(json.dumps(about) + "\n")
        shutil.rmtree(kept, ignore_errors=True)
        made.rename(kept)
    about = json.loads((kept / "about.json").read_text())
    parts = (np.load(kept / f"{part}.npy") for part in ("train", "held_out"))
    return Tokens(*parts, digest=about["digest"])


def split(roots: Sequence[Path], recipe: Recipe) -> tuple[list[str], list[str]]:
    """Train and held-out texts; no content is in both.

    Files come in the order of the hash of their path below the root, so that the sizes of `recipe`
    cut a random sample. The hash of the content says which part a file belongs to.
    """
    parts: dict[bool, list[str]] = {False: [], True: []}
    room = {False: recipe.train_bytes, True: recipe.held_out_bytes}
    seen = set()
    for path in sorted(_files(roots)):
        if max(room.values()) <= 0:
            break
        content = path[1].read_bytes()
        digest = hashlib.sha256(content).digest()
        held_out = digest[0] % HELD_OUT_SHARE == 0
        if room[held_out] <= 0 or digest in seen or not content.strip():
            continue
        try:
            text = content.decode()
        except UnicodeDecodeError:
            continue
        seen.add(digest)
        parts[held_out].append(text)
        room[held_out] -= len(content)
    return parts[False], parts[True]


def encode(tokenizer: Any, texts: Sequence[str]) -> np.ndarray:
    """Ids of all texts, one behind the other, each after the token BETWEEN; (N,) uint16."""
    between = tokenizer.token_to_id(BETWEEN)
    found = []
    for first in range(0, len(texts), BATCH):
        for encoding in tokenizer.encode_batch_fast(list(texts[first : first + BATCH])):
            found.append(np.array([between, *encoding.ids], dtype=np.uint16))
    return np.concatenate(found)


def _trained(texts: Sequence[str], recipe: Recipe) -> Any:
    """A byte-level BPE of these texts, as far as the recipe reads them."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    if recipe.vocabulary > 1 << 16:
        raise ValueError(f"vocabulary must fit 16 bits, got {recipe.vocabulary}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=recipe.vocabulary,
        special_tokens=[BETWEEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_head(texts, recipe.vocabulary_bytes), trainer)
    return tokenizer


def _head(texts: Sequence[str], size: int) -> Iterator[str]:
    for text in texts:
        if size <= 0:
            return
        yield text
        size -= len(text)


def _default_roots() -> list[Path]:
    paths = sysconfig.get_paths()
    found = dict.fromkeys(Path(paths[name]) for name in ("stdlib", "purelib", "platlib"))
    return [path for path in found if path.is_dir()]


def _files(roots: Sequence[Path]) -> Iterator[tuple[bytes, Path]]:
    """(hash of the path below its root, path) of every *.py file of an ordinary size."""
    for root in roots:
        for folder, _, names in os.walk(root):
            for name in names:
                path = Path(folder, name)
                if path.suffix != ".py" or not path.is_file():
                    continue
                if path.stat().st_size <= LARGEST_FILE:
                    below = path.relative_to(root).as_posix()
                    yield hashlib.sha256(below.encode()).digest(), path
