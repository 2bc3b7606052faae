"""How large the project is, where it is largest, and the limits that it must keep.

Good files in this field have a median function of 12 to 18 lines; hard ones share that median and
differ in the tail. So the ten largest files and functions are shown on every `make check`, and the
folders with the most files side by side. Tokens and the mean length of a line stand beside the
lines, so that code which only became denser does not look like less code.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PACKAGE = "torch-ext/optimizer"
FOLDERS = ("torch-ext", "kernels-src", "tests", "benchmarks", "examples", "tools")
SUFFIXES = frozenset({".py", ".cu", ".cuh", ".cpp", ".h"})
FILE_LIMIT = 800
FUNCTION_LIMIT = 100
KERNEL_LIMIT = 120  # a Triton kernel is one function by nature, half of it its parameters
DATA = frozenset({".json", ".svg", ".lock"})  # nobody reads their lines
FOLDER_LIMIT = 12  # source files side by side in one folder of the package
SHOWN = 10
# title: folders, and the files and lines that they may have at most
AREAS: dict[str, tuple[tuple[str, ...], int | None, int | None]] = {
    PACKAGE: ((PACKAGE,), 120, 22_000),
    "  kernels": ((f"{PACKAGE}/kernels",), 34, None),
    "  optimizers": ((f"{PACKAGE}/optimizers",), 26, None),
    "  what only several ranks need": (
        (f"{PACKAGE}/optimizers/sharded", f"{PACKAGE}/distributed"),
        None,
        2_500,
    ),
    "kernels-src": (("kernels-src",), 64, 9_500),
    "tests": (("tests",), 165, 28_000),
    "benchmarks": (("benchmarks",), None, None),
    "examples": (("examples",), None, None),
    "tools": (("tools",), None, None),
    "docs": (("docs",), None, None),
    "all": (("",), None, None),
}


@dataclass(frozen=True)
class Source:
    """One tracked file of text."""

    path: PurePosixPath  # from the root of the project
    text: str

    def is_below(self, folders: tuple[str, ...]) -> bool:
        return any(not folder or self.path.is_relative_to(folder) for folder in folders)

    @property
    def is_code(self) -> bool:
        return self.path.suffix in SUFFIXES and self.is_below(FOLDERS)


@dataclass(frozen=True)
class Size:
    """One file, function or folder."""

    name: str
    size: int
    limit: int
    unit: str = "lines"

    @property
    def is_over(self) -> bool:
        return self.size > self.limit


def sources(root: Path) -> list[Source]:
    """Every file of text that git tracks below `root`; where that is no checkout, every file."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode == 0:
        paths = [root / name for name in listed.stdout.split("\0") if name]
    else:
        paths = list(root.rglob("*"))
    found = []
    for path in sorted(set(paths)):
        if path.is_file() and not path.is_symlink() and b"\0" not in (data := path.read_bytes()):
            relative = PurePosixPath(path.relative_to(root).as_posix())
            found.append(Source(relative, data.decode(errors="replace")))
    return found


def row(title: str, files: list[Source], *limits: str) -> str:
    count = sum(len(file.text.splitlines()) for file in files)
    tokens = sum(len(re.findall(r"\w+|[^\w\s]", file.text)) for file in files)
    length = sum(len(file.text) for file in files) / max(count, 1)
    line = f"{title:34}{len(files):6}{count:8}{tokens:9}{length:12.1f}  {', '.join(limits)}"
    return line.rstrip()


def table(files: list[Source]) -> list[str]:
    """A row for each of AREAS, without files of data, and one for each suffix."""
    lines = [f"{'':34}{'files':>6}{'lines':>8}{'tokens':>9}{'line length':>12}  at most"]
    for title, (folders, most_files, most_lines) in AREAS.items():
        limits = [f"{most_files} files"] if most_files else []
        limits += [f"{most_lines} lines"] if most_lines else []
        read = [f for f in files if f.is_below(folders) and f.path.suffix not in DATA]
        lines.append(row(title, read, *limits))
    by_suffix = defaultdict(list)
    for file in files:
        by_suffix[file.path.suffix or file.path.name].append(file)
    for suffix, chosen in sorted(by_suffix.items(), key=lambda entry: -len(entry[1])):
        lines.append(row(suffix, chosen))
    return lines


def file_sizes(files: list[Source]) -> list[Size]:
    """Every source file below the project's folders."""
    return [
        Size(str(file.path), len(file.text.splitlines()), FILE_LIMIT)
        for file in files
        if file.is_code
    ]


def function_sizes(files: list[Source]) -> list[Size]:
    """Every Python function and method; decorators count, nested ones twice."""
    sizes = []
    for file in files:
        if not file.is_code or file.path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(file.text, filename=str(file.path))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                start = min(entry.lineno for entry in [node, *node.decorator_list])
                limit = KERNEL_LIMIT if _is_jit(node) else FUNCTION_LIMIT
                name = f"{file.path}:{start} {node.name}"
                sizes.append(Size(name, node.end_lineno - start + 1, limit))
    return sizes


def folder_sizes(files: list[Source]) -> list[Size]:
    """How many source files lie side by side in each folder of the package."""
    counts = Counter(str(f.path.parent) for f in files if f.is_code and f.is_below((PACKAGE,)))
    return [Size(name, count, FOLDER_LIMIT, "files") for name, count in counts.items()]


def _is_jit(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    names = {
        ast.unparse(entry.func if isinstance(entry, ast.Call) else entry).split(".")[-1]
        for entry in node.decorator_list
    }
    return "jit" in names


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path(__file__).resolve().parent.parent)
    files = sources(parser.parse_args(arguments).root)
    print(*table(files), sep="\n")
    over = []
    for title, sizes in (
        ("largest files", file_sizes(files)),
        ("longest functions", function_sizes(files)),
        ("fullest folders of the package", folder_sizes(files)),
    ):
        print(f"\n{title} of {len(sizes)}")
        for size in sorted(sizes, key=lambda size: -size.size)[:SHOWN]:
            print(f"{size.size:5d}  {size.name}")
        over += [size for size in sizes if size.is_over]
    for size in over:
        found = f"{size.name}: {size.size} {size.unit}, limit {size.limit}"
        print(f"TOO LARGE: {found}", file=sys.stderr)
    return 1 if over else 0


if __name__ == "__main__":
    sys.exit(main())
