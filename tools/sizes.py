"""The tail of file and function sizes, and the limits that it must keep.

Good files in this field have a median function of 12 to 18 lines; hard ones share that median and
differ in the tail. So the ten largest of each are shown on every `make check`.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("torch-ext", "kernels-src", "tests", "benchmarks", "examples", "tools")
SUFFIXES = frozenset({".py", ".cu", ".cuh", ".cpp", ".h"})
FILE_LIMIT = 800
FUNCTION_LIMIT = 100
KERNEL_LIMIT = 120  # a Triton kernel is one function by nature
SHOWN = 10


@dataclass(frozen=True)
class Size:
    """One file or function."""

    name: str
    lines: int
    limit: int

    @property
    def too_long(self) -> bool:
        return self.lines > self.limit


def file_sizes(root: Path) -> list[Size]:
    """Every source file below the project's folders, largest first."""
    sizes = [
        Size(path.relative_to(root).as_posix(), len(path.read_text().splitlines()), FILE_LIMIT)
        for path in _sources(root)
    ]
    return sorted(sizes, key=lambda size: -size.lines)


def function_sizes(root: Path) -> list[Size]:
    """Every Python function and method, longest first; decorators count, nested ones twice."""
    sizes = []
    for path in _sources(root):
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                start = min(entry.lineno for entry in [node, *node.decorator_list])
                name = f"{path.relative_to(root).as_posix()}:{start} {node.name}"
                limit = KERNEL_LIMIT if _is_jit(node) else FUNCTION_LIMIT
                sizes.append(Size(name, node.end_lineno - start + 1, limit))
    return sorted(sizes, key=lambda size: -size.lines)


def _sources(root: Path) -> Iterator[Path]:
    for folder in FOLDERS:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix in SUFFIXES and path.is_file():
                yield path


def _is_jit(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {
        ast.unparse(entry.func if isinstance(entry, ast.Call) else entry).split(".")[-1]
        for entry in node.decorator_list
    }
    return "jit" in names


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    root = parser.parse_args(arguments).root
    files, functions = file_sizes(root), function_sizes(root)
    for title, sizes in (("largest files", files), ("longest functions", functions)):
        print(f"{title} of {len(sizes)}")
        for size in sizes[:SHOWN]:
            print(f"{size.lines:5d}  {size.name}")
    too_long = [size for size in files + functions if size.too_long]
    for size in too_long:
        print(f"TOO LONG: {size.name}: {size.lines} lines, limit {size.limit}", file=sys.stderr)
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
