"""A program in a fork ends, prints and finds things as in an interpreter of its own."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

SCRIPT = """
import os, sys, helper
print(sys.argv[1:], os.getcwd(), os.environ["COLOUR"], "HOME" in os.environ, __name__)
print(helper.WORD, file=sys.stderr)
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Beside a module that only this folder has."""
    path = tmp_path / "scripts" / "script.py"
    path.parent.mkdir()
    path.write_text(SCRIPT)
    path.with_name("helper.py").write_text("WORD = 'told'\n")
    return path


@pytest.mark.parametrize("status", [0, 3])
def test_as_in_an_interpreter_of_its_own(forks, script: Path, tmp_path: Path, status: int) -> None:
    arguments = (str(script), str(status), "two words")
    environment = {"COLOUR": "blue"}
    expected = subprocess.run(
        [sys.executable, *arguments],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    found = forks.run(*arguments, folder=tmp_path, environment=environment)
    assert expected.returncode == status and "told" in expected.stderr
    for name in ("returncode", "stdout", "stderr"):
        assert getattr(found, name) == getattr(expected, name)


def test_nothing_stays_from_one_program_to_the_next(forks) -> None:
    code = "import builtins, torch; assert not hasattr(builtins, 'left'); builtins.left = 1"
    assert [forks.run("-c", code).returncode for _ in range(2)] == [0, 0]


def test_ways_to_end(forks) -> None:
    """An exception, a signal, and what other threads still do."""
    failed = forks.run("-c", "raise ValueError('planted')")
    assert failed.returncode == 1 and "ValueError: planted" in failed.stderr
    assert forks.run("-c", "import os; os.kill(os.getpid(), 9)").returncode == -signal.SIGKILL
    code = """
    import threading, time
    threading.Thread(target=lambda: (time.sleep(0.2), print("written"))).start()
    """
    assert forks.run("-c", textwrap.dedent(code)).stdout == "written\n"


def test_one_that_hangs_is_killed(forks) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        forks.run("-c", "import time; time.sleep(200)", timeout=1)
    assert forks.run("-m", "this").stdout.startswith("The Zen of Python")
