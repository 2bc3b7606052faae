"""Where things are, which files belong to the project, and what the names in them stand for."""

import ast
import functools
import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
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


def assert_none(findings: list[str]) -> None:
    assert not findings, "\n".join(["", *findings])


def assert_found(expected: str, findings: list[str]) -> None:
    """Some finding says so."""
    assert any(expected in finding for finding in findings), "\n".join(["", *findings])


def assert_finds_what_is_marked(findings: list[str], files: dict[str, str], **others: str) -> None:
    """There is a finding where a line ends in `  #! words`, which says these words, and no other.

    `others` are the words of findings that name no line, by the file or layer that they name.
    """
    marked = dict(others)
    for name, text in files.items():
        for number, line in enumerate(text.splitlines(), start=1):
            if "  #! " in line:
                marked[f"{name}:{number}"] = line.split("  #! ")[1]
    found: dict[str, list[str]] = {}
    for finding in findings:
        where, _, said = finding.partition(": ")
        found.setdefault(where, []).append(said)
    assert sorted(found) == sorted(marked)
    for where, words in marked.items():
        assert_found(words, found[where])


def write_files(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


def aliases(tree: ast.Module) -> dict[str, str]:
    """Local name -> dotted name, from every absolute import of the file.

    `import torch.distributed as dist` gives dist -> torch.distributed; `import torch.cuda` binds
    torch; `from torch import library` gives library -> torch.library. Scopes are not told apart.
    """
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                root = name.name.split(".")[0]
                found[name.asname or root] = name.name if name.asname else root
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            for name in node.names:
                found[name.asname or name.name] = f"{node.module}.{name.name}"
    return found


def dotted(node: ast.expr, known: dict[str, str]) -> str | None:
    """`dist.all_reduce` -> "torch.distributed.all_reduce"; None for anything but a chain of names.

    A first name that the file did not import stays as it is written.
    """
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return None
    parts.append(known.get(node.id, node.id))
    return ".".join(reversed(parts))


def in_functions(tree: ast.Module) -> set[ast.AST]:
    """Nodes that run only when a function is called: not decorators and default values."""
    functions = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda
    bodies = [node.body for node in ast.walk(tree) if isinstance(node, functions)]
    parts = [part for body in bodies for part in (body if isinstance(body, list) else [body])]
    return {node for part in parts for node in ast.walk(part)}
