"""The count of the tests that need a GPU: that none vanishes from a run without one."""

from pathlib import Path

import pytest

from ._project import ROOT, write_files

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
    kept = ("pytest.ini", "tests/__init__.py", "tests/conftest.py")
    files = {file: (ROOT / file).read_text() for file in kept}
    for name, sizes in (("one", 3), ("two", 2)):
        files[f"tests/{name}/__init__.py"] = ""
        files[f"tests/{name}/test_it.py"] = TESTS.format(sizes=sizes)
    write_files(tmp_path, files | {"tests/gpu_tests.txt": RIGHT})
    return tmp_path


@pytest.fixture
def run(forks, project):
    """`run(*arguments)`: (exit status, output) of pytest in the project."""

    def run_pytest(*arguments: str) -> tuple[int, str]:
        done = forks.pytest(*arguments, folder=project)
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
