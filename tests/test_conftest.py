"""What the tests are run with: the count of those that need a GPU, and programs in forks."""

import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from .conftest import GPU_TESTS, ROOT

TESTS = """
import pytest
pytestmark = [pytest.mark.static]
def test_anywhere(): pass
@pytest.mark.gpu
@pytest.mark.parametrize("size", range({sizes}))
def test_on_a_gpu(size): pass
"""
RIGHT = "tests/one 3\ntests/two 2\n"
COMPLAINT = "tests/gpu_tests.txt COUNTS {} TESTS FOR A GPU in tests/two, FOUND {}"


@pytest.fixture
def project(tmp_path) -> Path:
    """Two folders of tests under this project's conftest, three and two of them for a GPU."""
    for file in ("pytest.ini", "tests/__init__.py", "tests/conftest.py"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text((ROOT / file).read_text())
    for name, sizes in (("one", 3), ("two", 2)):
        (tmp_path / "tests" / name).mkdir()
        (tmp_path / "tests" / name / "__init__.py").touch()
        (tmp_path / "tests" / name / "test_it.py").write_text(TESTS.format(sizes=sizes))
    (tmp_path / "tests" / "gpu_tests.txt").write_text(RIGHT)
    return tmp_path


@pytest.fixture
def run(forks, project):
    """`run(*arguments)`: (exit status, output) of pytest in the project."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}

    def run_pytest(*arguments: str) -> tuple[int, str]:
        options = ("-m", "pytest", "-q", "-p", "no:cacheprovider")
        done = forks.run(*options, *arguments, folder=project, environment=kept)
        return done.returncode, done.stdout + done.stderr

    return run_pytest


@pytest.mark.parametrize("workers", ((), ("-n", "1")), ids=("alone", "workers"))
def test_a_test_for_a_gpu_cannot_vanish(project, run, workers) -> None:
    status, output = run(*workers, "-m", "not artifacts", "tests")
    assert status == 0 and "FOR A GPU" not in output, output
    (project / "tests" / "two" / "test_it.py").write_text(TESTS.format(sizes=1))
    status, output = run(*workers)
    assert status == pytest.ExitCode.TESTS_FAILED and COMPLAINT.format(2, 1) in output
    assert "--collect-only -q --count-gpu-tests" in output and "in tests/one" not in output


def test_a_command_counts_anew(project, run) -> None:
    ledger = project / "tests" / "gpu_tests.txt"
    ledger.unlink()
    status, output = run("tests")
    assert status == pytest.ExitCode.TESTS_FAILED and COMPLAINT.format(0, 2) in output
    assert run("tests", "--collect-only", "--count-gpu-tests")[0] == 0
    assert ledger.read_text() == RIGHT
    status, output = run("tests/one", "--count-gpu-tests")
    assert status == pytest.ExitCode.USAGE_ERROR and "counts a whole run" in output


def test_a_part_of_the_tests_is_not_compared(project, run) -> None:
    (project / "tests" / "gpu_tests.txt").write_text("")
    for part in (["tests/one"], ["tests", "-k", "anywhere"], ["tests", "--ignore", "tests/two"]):
        assert run(*part)[0] == 0


@pytest.mark.static
def test_the_ledger_is_not_empty() -> None:
    counts = dict(line.split() for line in GPU_TESTS.read_text().splitlines())
    assert set(counts) >= {"tests/kernels", "tests/moe", "tests/orthogonalize"}
    assert sum(map(int, counts.values())) > 800


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
