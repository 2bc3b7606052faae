"""tools/sizes.py counts what the project has, and finds what is too large. No torch, no build."""

import subprocess
import sys
from pathlib import Path

import pytest

from ._checkout import git, tool
from ._project import ROOT

pytestmark = pytest.mark.static

LIMIT = tool("sizes").FOLDER_LIMIT


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


def test_files_side_by_side_in_the_package_are_limited(tmp_path: Path) -> None:
    folder = tmp_path / "torch-ext/optimizer/kernels"
    elsewhere = tmp_path / "tests"
    for parent in (folder, folder / "quant", elsewhere):
        parent.mkdir(parents=True, exist_ok=True)
        for number in range(LIMIT):
            (parent / f"a{number}.py").write_text("")
    (folder / "tiles.json").write_text("{}")
    assert run(tmp_path).returncode == 0
    (elsewhere / "one_more.py").write_text("")
    assert run(tmp_path).returncode == 0
    (folder / "one_more.py").write_text("")
    complaint = f"torch-ext/optimizer/kernels: {LIMIT + 1} files, limit {LIMIT}\n"
    assert run(tmp_path).stderr == f"TOO LARGE: {complaint}"


def test_the_table_counts_what_git_tracks(tmp_path: Path) -> None:
    files = {
        "torch-ext/optimizer/kernels/a.py": "x = 1\ny = [x]\n",  # 3 + 5 tokens
        "torch-ext/optimizer/optimizers/sharded/b.py": "",
        "torch-ext/optimizer/distributed/c.py": "z\n",
        "torch-ext/optimizer/configs.json": "{}\n",
        "docs/page.md": "Two words.\n",
        "docs/weights.bin": "\0",
        "ignored/d.py": "x\n",
        ".gitignore": "ignored/\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    git(tmp_path, "init", "--quiet")
    git(tmp_path, "add", "--all")
    (tmp_path / "torch-ext/optimizer/distributed/c.py").unlink()  # but not from the index
    rows = {
        line[:34].strip(): tuple(map(float, line[34:].split()[:4]))
        for line in run(tmp_path).stdout.partition("\n\n")[0].splitlines()[1:]
    }
    assert rows["torch-ext/optimizer"] == (2, 2, 8, 7.0)
    assert rows["kernels"] == (1, 2, 8, 7.0)
    assert rows["what only several ranks need"][:2] == (1, 0)
    assert rows["docs"] == (1, 1, 3, 11.0)
    assert rows[".py"][:3] == (2, 2, 8)
    assert rows[".json"][:2] == (1, 1)
    assert rows["all"][0] == 4
