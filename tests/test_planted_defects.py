"""Defects that no test saw once: each is planted in a copy of the sources, and its test must fail.

The copy is built again, so that a defect may be in C++ as well as in Python.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from ._checkout import built_checkout, run_build
from .conftest import ROOT


@dataclass(frozen=True)
class Defect:
    """`old`, which must occur once in a file, becomes `new`; `test` must fail then."""

    file: str
    old: str
    new: str
    test: str


DEFECTS = {
    "the folder is not flushed after a rename": Defect(
        "torch-ext/optimizer/integrations/checkpoint_file.py",
        "        _flush(path.parent, os.O_RDONLY)\n",
        "        pass\n",
        "integrations/test_checkpoint.py::test_a_rename_reaches_the_disk",
    ),
    "only the first team's answer is checked": Defect(
        "torch-ext/optimizer/optimizers/agreement.py",
        "        for question in now:\n",
        "        for question in now[:1]:\n",
        "distributed/test_sharing.py::test_every_teams_answer_counts",
    ),
    "a refused group leaves its names": Defect(
        "torch-ext/optimizer/optimizers/base.py",
        "        self.adopt([(where, group, names)])\n",
        "        self._names.append(names)\n        self.adopt([(where, group, names)])\n",
        "optimizers/test_groups.py::test_a_refused_group_leaves_no_names",
    ),
    "a NaN second moment counts as the smallest": Defect(
        "kernels-src/cpu/apply_update.cpp",
        "second[i] < apply_update::kSmallest ? apply_update::kSmallest : second[i];",
        "second[i] > apply_update::kSmallest ? second[i] : apply_update::kSmallest;",
        "kernels/test_apply_update.py::test_a_nan_second_moment_stays_and_spreads_over_its_matrix",
    ),
    "mean squares are rounded to float32": Defect(
        "kernels-src/cpu/apply_update.cpp",
        "const double square = means[i] *",
        "const double square = mean *",
        "kernels/test_apply_update.py::test_mean_squares_are_added_in_double_precision",
    ),
}


@pytest.fixture
def checkout(tmp_path_factory, tmp_path) -> Path:
    """A built checkout with its tests, in a folder of its own."""
    root = shutil.copytree(built_checkout(tmp_path_factory.getbasetemp()), tmp_path / "checkout")
    ignored = shutil.ignore_patterns("__pycache__", "abi")
    shutil.copytree(ROOT / "tests", root / "tests", ignore=ignored, dirs_exist_ok=True)
    shutil.copyfile(ROOT / "pytest.ini", root / "pytest.ini")
    return root


@pytest.fixture
def run(forks, checkout):
    """`run(*tests)`: those tests on the copy, on the CPU, in a process of their own."""

    def run_tests(*tests: str) -> subprocess.CompletedProcess:
        # Options for this run, such as the workers of pytest-xdist, are not those of the inner one.
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        options = ("-q", "-p", "no:cacheprovider", "--tb=line")
        nodes = [f"tests/{test}" for test in tests]
        environment = {**kept, "OMP_NUM_THREADS": "1"}
        return forks.run("-m", "pytest", *options, *nodes, folder=checkout, environment=environment)

    return run_tests


def test_the_tests_pass_without_a_defect(run) -> None:
    """Otherwise the failures below would prove nothing."""
    done = run(*(defect.test for defect in DEFECTS.values()))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("what", DEFECTS)
def test_a_planted_defect_is_seen(checkout, run, what) -> None:
    defect = DEFECTS[what]
    path = checkout / defect.file
    text = path.read_text()
    assert text.count(defect.old) == 1, f"{defect.old!r} is not in {defect.file} exactly once"
    path.write_text(text.replace(defect.old, defect.new))
    built = run_build(checkout, "--backend", "cpu")
    assert built.returncode == 0, built.stderr
    done = run(defect.test)
    summary = done.stdout.rstrip().splitlines()[-1]
    # A test that failed, not one that could not be collected or set up.
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert re.search(r"\d+ failed", summary) and "error" not in summary, done.stdout
