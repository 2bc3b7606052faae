"""Names of torch that the package writes out exist in the torch that runs these tests."""

import ast
import pkgutil
import types
from pathlib import Path

import pytest

from ._project import PACKAGE, aliases, assert_none, dotted, parse, place

OF_GPUS = frozenset({"torch.distributed.ProcessGroupNCCL"})  # not in a torch for CPUs


def is_missing(name: str) -> bool:
    """Whether a module or class on the way to a dotted name lacks its next part.

    What instances have, no class tells: behind any other value everything is taken to exist.
    """
    found, *parts = name.split(".")
    for part in parts:
        if not isinstance(pkgutil.resolve_name(found), types.ModuleType | type):
            return False
        found += f".{part}"
        try:
            pkgutil.resolve_name(found)
        except (AttributeError, ImportError):
            return True
    return False


def findings(package: Path) -> list[str]:
    found = []
    for path in sorted(package.rglob("*.py")):
        tree = parse(path)
        known = aliases(tree)
        lines: dict[str, int | None] = dict.fromkeys(known.values())  # None: imported
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and (name := dotted(node, known)) is not None:
                lines[name] = node.lineno
        found += [
            f"{place(path, package, line)}: torch has no {name}"
            for name, line in lines.items()
            if name.startswith("torch.") and name not in OF_GPUS and is_missing(name)
        ]
    return found


def test_every_name_exists() -> None:
    assert_none(findings(PACKAGE))


@pytest.mark.parametrize(
    "text", ("torch._C.no_name()", "torch.cuda.Streams", "torch.Tensor.halves")
)
def test_a_missing_name_is_found(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.py").write_text(f"import torch\n\n\ndef f():\n    return {text}\n")
    ((found,)) = findings(tmp_path)
    assert found.startswith("a.py:5: torch has no torch.")
