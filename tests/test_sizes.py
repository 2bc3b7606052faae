"""tools/sizes.py finds what is too long. No torch, no build."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from .static.project import ROOT

pytestmark = pytest.mark.static


def run(root: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "tools" / "sizes.py"), "--root", str(root)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def function(lines: int, decorator: str = "") -> str:
    """A function of so many lines, its decorator included."""
    head = [decorator] if decorator else []
    return "\n".join([*head, "def f():", *["    x = 1"] * (lines - 1 - len(head))])


def test_project_keeps_the_limits() -> None:
    result = run(ROOT)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("tools/a.py", function(100), None),
        ("tools/a.py", function(101), "tools/a.py:1 f: 101 lines, limit 100"),
        ("tools/a.py", function(101, "@other"), "101 lines, limit 100"),
        ("tools/a.py", function(120, "@triton.jit"), None),
        ("tools/a.py", function(121, "@triton.jit"), "121 lines, limit 120"),
        ("tools/a.py", function(121, "@jit(debug=True)"), "121 lines, limit 120"),
        ("kernels-src/a.cu", "//\n" * 800, None),
        ("kernels-src/a.cu", "//\n" * 801, "kernels-src/a.cu: 801 lines, limit 800"),
        ("torch-ext/a/b.py", "x = 1\n" * 801, "torch-ext/a/b.py: 801 lines, limit 800"),
        ("docs/a.md", "text\n" * 1000, None),
    ],
)
def test_limits(tmp_path: Path, name: str, text: str, complaint: str | None) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    result = run(tmp_path)
    assert result.returncode == (0 if complaint is None else 1)
    assert (complaint or "") in result.stderr


def test_the_ten_largest_are_shown_in_order(tmp_path: Path) -> None:
    folder = tmp_path / "tools"
    folder.mkdir()
    for lines in range(1, 13):
        (folder / f"a{lines}.py").write_text("x = 1\n" * lines)
    shown = [line.split() for line in run(tmp_path).stdout.splitlines() if "tools/" in line]
    assert shown == [[str(lines), f"tools/a{lines}.py"] for lines in range(12, 2, -1)]
