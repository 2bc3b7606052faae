"""`make test-symm`: every test is of a part that runs, and what the parts count is added up."""

import subprocess

import pytest

from ._checkout import tool
from ._project import ROOT, write_files

COPIED = ("pytest.ini", "tests/__init__.py", "tests/conftest.py", "tests/distributed/__init__.py")
COPIED += ("tests/distributed/conftest.py", "tests/distributed/_ranks.py")
TESTS = """
import pytest
pytestmark = pytest.mark.part("faults")
def test_one(): pass
@pytest.mark.parametrize("part", [2, pytest.param(4, marks=pytest.mark.part("four ranks"))])
def test_two(part, record_property):
    record_property("random cases", 10)
    record_property("exchanges", part)
"""


def test_a_part_is_the_tests_marked_so(forks, tmp_path) -> None:
    suite = "tests/distributed/test_it.py"
    write_files(tmp_path, {file: (ROOT / file).read_text() for file in COPIED} | {suite: TESTS})

    def run(part: str, parts: str) -> tuple[int, str]:
        done = forks.pytest(suite, folder=tmp_path, SYMM_PART=part, SYMM_PARTS=parts)
        return done.returncode, done.stdout + done.stderr

    status, output = run("faults", "faults,four ranks")
    assert status == 0 and "2 passed, 1 deselected" in output
    assert "\n10 random cases, 2 exchanges of soaks\n" in output
    status, output = run("faults", "faults,two ranks")
    assert status != 0 and "has no part ['four ranks']" in output


@pytest.mark.parametrize("failing", (None, "products", "all"))
def test_parts_see_one_gpu_and_are_added_up(monkeypatch, capsys, tmp_path, failing) -> None:
    """A run of no tests fails, too."""
    parts, seen = tool("symm_parts"), {}

    def run(command, env, stdout, stderr):
        seen[env["SYMM_PART"]] = env["CUDA_VISIBLE_DEVICES"]
        if failing == "all":
            return subprocess.CompletedProcess(command, parts.NO_TESTS)
        stdout.write("10 random cases, 3 exchanges of soaks\n")
        failed = env["SYMM_PART"] == failing
        stdout.write("1 failed, " * failed + "2 passed, 9 skipped, 7 deselected in 5.00s (0:05)\n")
        return subprocess.CompletedProcess(command, 1 if failed else 0)

    monkeypatch.setattr(parts.subprocess, "run", run)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    monkeypatch.setenv("OUT", str(tmp_path))
    assert parts.main(["-q"]) == (failing is not None)
    output = capsys.readouterr().out
    assert set(seen) == set(parts.PARTS) and set(seen.values()) == {"4", "6", "4,6"}
    assert seen["random cases of four ranks"] == "4" and seen["several GPUs"] == "4,6"
    if failing == "all":
        assert "no tests; " in output
        return
    counts = "18 exchanges of soaks, " + "1 failed, " * bool(failing)
    assert f"{counts}12 passed, 60 random cases, 54 skipped; " in output
    assert ("failed: products" in output) == bool(failing)
