"""Which files a result file measures, and their digest. Needs neither torch nor git.

A result is stale when one of these files has changed since; `run.py plots --check` compares.
"""

from __future__ import annotations

import ast
import hashlib
import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path("benchmarks/results")  # below the root: results/<gpu>/<name>.json

# What a step of the optimizers runs of kernels/.
_STEP_KERNELS = (
    "torch-ext/optimizer/kernels/products/*.py",
    "torch-ext/optimizer/kernels/step/*.py",
)
# What a layer of experts runs whatever its weights are.
_LAYER = (
    "kernels-src/launch/*",
    "torch-ext/optimizer/kernels/experts/*.py",
    "torch-ext/optimizer/kernels/launch/*.py",
    "torch-ext/optimizer/moe/*.py",
)
_STEP = (
    "kernels-src/common/*",
    "kernels-src/products/**/*",
    "kernels-src/sm90/*",
    "kernels-src/step/*",
    *_STEP_KERNELS,
    "torch-ext/optimizer/optimizers/*.py",
    "torch-ext/optimizer/optimizers/sharded/*.py",
    *(
        # Not what runs before or between steps: groups/default_groups.py and state/saving.py.
        f"torch-ext/optimizer/optimizers/{name}.py"
        for name in (
            "groups/blocks",
            "groups/options",
            "groups/param_groups",
            "groups/parameters",
            "state/in_host_memory",
            "state/slots",
        )
    ),
    "torch-ext/optimizer/orthogonalize/*",
)

_SEVERAL = (
    "kernels-src/communication/*",
    "torch-ext/optimizer/distributed/**/*.py",
    "torch-ext/optimizer/kernels/communication/*.py",
    *_STEP,
)

# Result file -> what its times depend on.
SOURCES: dict[str, tuple[str, ...]] = {
    "communication": (
        "kernels-src/common/*",
        "kernels-src/communication/*",
        "kernels-src/sm90/*",
        "kernels-src/step/momentum.*",
        "kernels-src/step/multi_tensor.cuh",
        "torch-ext/optimizer/kernels/communication/*.py",
    ),
    "elementwise": (
        "kernels-src/common/*",
        "kernels-src/quant/nf4_dequant.*",
        "kernels-src/step/*",
        "torch-ext/optimizer/kernels/step/*.py",
        "torch-ext/optimizer/kernels/quant/nf4_dequant*.py",
    ),
    "moe_lora": _LAYER,
    "quant": (
        "kernels-src/common/*",
        "kernels-src/quant/*",
        "kernels-src/sm90/*",
        *_LAYER,
        "torch-ext/optimizer/kernels/quant/**/*.py",
        "torch-ext/optimizer/moe/quantized/*.py",
    ),
    "optimizer_step": _STEP,
    "optimizer_step on several GPUs": _SEVERAL,
    "orthogonalize": (
        "kernels-src/common/*",
        "kernels-src/products/**/*",
        "kernels-src/sm90/*",
        "torch-ext/optimizer/kernels/products/*.py",
        "torch-ext/optimizer/orthogonalize/*",
    ),
}

SOURCES["tensor_parallel"] = ("torch-ext/optimizer/tensor_parallel/*.py", *SOURCES["orthogonalize"])
SOURCES["tensor_parallel on several GPUs"] = SOURCES["tensor_parallel"]
SOURCES["communication on several GPUs"] = _SEVERAL

# A file of two parts, each with sources of its own: an edit of the experts leaves the optimizers'
# rows as they are.
PART = " of experts"
SOURCES["end_to_end"] = SOURCES["optimizer_step"]
SOURCES["end_to_end" + PART] = tuple(
    dict.fromkeys(
        [
            *SOURCES["moe_lora"],
            *SOURCES["quant"],
            *(
                f"torch-ext/optimizer/integrations/{name}.py"
                for name in (
                    "adapters/lora",
                    "models/experts",
                    "models/transformers",
                )
            ),
        ]
    )
)


def entry_of(path: Path) -> str:
    """The entry of SOURCES that a result file <gpu>/<name>.json measures, <gpu> as in "h200x8"."""
    several = re.search(r"x[0-9]+$", path.parent.name)
    return f"{path.stem} on several GPUs" if several else path.stem


def recorded(path: Path, result: dict) -> dict[str, str]:
    """Entries of SOURCES that a result file measures -> the digests that it was measured at."""
    found = {entry_of(path): result["sources"]}
    if "experts" in result:
        found[entry_of(path) + PART] = result["experts"]["sources"]
    return found


def source_files(name: str, root: Path = ROOT) -> list[Path]:
    """The files that result file `name` measures, sorted.

    Raises:
        ValueError: no such result file, or a pattern that matches nothing (a file was renamed).
    """
    if name not in SOURCES:
        raise ValueError(f"{name!r} is no result file; known: {', '.join(SOURCES)}")
    files: set[Path] = set()
    for pattern in SOURCES[name]:
        found = {path for path in root.glob(pattern) if path.is_file()}
        if not found:
            raise ValueError(f"sources of {name!r}: no file matches {pattern} below {root}")
        files |= found
    return sorted(files)


def sources_digest(name: str, root: Path = ROOT) -> str:
    """sha256 over the code of the files of `name`, 64 hexadecimal digits.

    Comments, docstrings, imports and the names of files cannot change a time, so they do not count.
    """
    codes = sorted(code_of(path) for path in source_files(name, root))
    return hashlib.sha256("\0".join(codes).encode()).hexdigest()


def code_of(path: Path) -> str:
    """What of a source file runs: without comments, docstrings and imports."""
    text = path.read_text()
    if path.suffix == ".py":
        return _python_code(text)
    without = _COMMENT.sub(lambda found: found[0] if found[0][0] != "/" else " ", text)
    without = _INCLUDE.sub("", without)
    return "\n".join(" ".join(line.split()) for line in without.splitlines() if line.strip())


_INCLUDE = re.compile(r"^#(?:include|pragma once)[^\n]*$", re.MULTILINE)
_COMMENT = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def _python_code(text: str) -> str:
    """The lines without docstrings, imports and comments.

    They are cut out of the text, since dumps of a syntax tree differ between versions of Python.
    """
    lines = text.encode().splitlines()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(node, ast.Import | ast.ImportFrom):
            _cut(lines, node)
        elif (
            isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            and body
            and ast.get_docstring(node, clean=False) is not None
        ):
            _cut(lines, body[0])
    rest = b"\n".join(lines).decode()
    lines = rest.split("\n")
    for token in tokenize.generate_tokens(io.StringIO(rest).readline):
        if token.type == tokenize.COMMENT:
            row, column = token.start
            lines[row - 1] = lines[row - 1][:column]
    return "\n".join(line.rstrip() for line in lines if line.strip() not in ("", "0"))


def _cut(lines: list[bytes], node: ast.stmt) -> None:
    """Blank the statement out; columns of a tree count bytes."""
    for row in range(node.lineno - 1, node.end_lineno):
        first = node.col_offset if row == node.lineno - 1 else 0
        last = node.end_col_offset if row == node.end_lineno - 1 else len(lines[row])
        lines[row] = lines[row][:first] + b"0" * (row == node.lineno - 1) + lines[row][last:]
