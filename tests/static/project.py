"""Where things are, and which files belong to the project."""

from __future__ import annotations

import ast
import functools
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "torch-ext" / "optimizer"

# Made by tools, never part of the project; needed where there is no git to ask.
_MADE_HERE = {".git", ".venv", "build", "demo_out", "__pycache__", "result"}


def project_files(root: Path = ROOT) -> list[Path]:
    """Files under version control or about to be, relative to `root` and sorted.

    Without git (an unpacked archive, a GPU machine) every file outside the made folders counts.
    """
    listed = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard")
    if listed is not None:
        names = {Path(name) for name in listed.split("\0") if name}
        return sorted(name for name in names if (root / name).is_file())
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name
            for name in subfolders
            if name not in _MADE_HERE and not (name.startswith(".") and name.endswith("_cache"))
        ]
        found += [(Path(folder) / name).relative_to(root) for name in names]
    return sorted(found)


def committed_files(root: Path = ROOT) -> list[Path] | None:
    """Files in git's index, relative to `root`; None where `root` is no git checkout."""
    listed = _git(root, "ls-files", "-z", "--cached")
    return None if listed is None else sorted(Path(name) for name in listed.split("\0") if name)


def _git(root: Path, *arguments: str) -> str | None:
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout if done.returncode == 0 else None


def read_text(path: Path) -> str | None:
    """The file's text, or None if it is not text."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        return None


def parse(path: Path) -> ast.Module:
    """The file's tree; all checks read the same one, and none changes it."""
    return _parse(path.read_text(encoding="utf-8"), str(path))


@functools.cache
def _parse(text: str, name: str) -> ast.Module:
    return ast.parse(text, filename=name)


def place(path: Path, root: Path, line: int | None = None) -> str:
    """`folder/file.py:12`, as every finding begins."""
    name = path.relative_to(root).as_posix()
    return name if line is None else f"{name}:{line}"


def report(findings: list[str]) -> str:
    """What a failing test prints."""
    return "\n".join(["", *findings])
