"""Defects that no test saw once, planted in a copy of the sources: each one's test must fail.

They do not touch one another, so all are planted at once: one build, in C++ and in Python, and one
run of their tests, which pass without them wherever the whole suite passes.
"""

from __future__ import annotations

import os
import re
import shutil
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
    "what one stream writes shares memory with what another reads": Defect(
        "torch-ext/optimizer/kernels/launch/plan_memory.py",
        "        in_order = self.stream is not None and self.stream == other.stream\n",
        "        in_order = True\n",
        "kernels/test_launch_plan.py::test_two_streams_keep_their_memory_until_they_meet",
    ),
    "a copy by torch passes as a view": Defect(
        "torch-ext/optimizer/kernels/launch/launch_plan.py",
        "        if not _is_view(func, args, kwargs):\n",
        "        if not func.is_view:\n",
        "kernels/test_launch_plan.py::test_a_copy_is_no_view",
    ),
    "an early launch may write what its predecessor reads": Defect(
        "torch-ext/optimizer/kernels/launch/launch_plan.py",
        "                ends[at] = ends[following]  #",
        "                pass  #",
        "kernels/test_launch_plan.py::test_an_early_launch_writes_nowhere_its_predecessor_reads",
    ),
    "gradients of swapped factors are exchanged": Defect(
        "torch-ext/optimizer/moe/lora.py",
        '    return wants[::-1] if kind == "swapped" else wants\n',
        "    return wants\n",
        "moe/test_eager_layer.py::test_swapped_factors_want_their_own_gradients",
    ),
    "the folder is not flushed after a rename": Defect(
        "torch-ext/optimizer/integrations/checkpoints/tensor_file.py",
        "        os.fsync(folder)  #",
        "        pass  #",
        "integrations/test_checkpoint.py::test_a_rename_reaches_the_disk",
    ),
    "only the first team's answer is checked": Defect(
        "torch-ext/optimizer/optimizers/sharded/consistency.py",
        "        for number, question in enumerate(questions):\n",
        "        for number, question in enumerate(questions[:1]):\n",
        "distributed/test_sharing.py::test_every_teams_answer_counts",
    ),
    "a refused group leaves its names": Defect(
        "torch-ext/optimizer/optimizers/base.py",
        "        check_names(options, names, where)\n        self.param_groups.append(group)\n"
        "        self._names.append(names)\n",
        "        self._names.append(names)\n        check_names(options, names, where)\n"
        "        self.param_groups.append(group)\n",
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
        "const double square = static_cast<float>(means[i]) *",
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


def test_planted_defects_are_seen(checkout, forks) -> None:
    for defect in DEFECTS.values():
        path = checkout / defect.file
        text = path.read_text()
        assert text.count(defect.old) == 1, f"{defect.old!r} is not in {defect.file} exactly once"
        path.write_text(text.replace(defect.old, defect.new))
    built = run_build(checkout, "--backend", "cpu")
    assert built.returncode == 0, built.stderr
    # Options for this run, such as the workers of pytest-xdist, are not those of the inner one.
    kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
    done = forks.run(
        *("-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line"),
        *(f"tests/{defect.test}" for defect in DEFECTS.values()),
        folder=checkout,
        environment={**kept, "OMP_NUM_THREADS": "1"},
    )
    # Tests that failed, not ones that could not be collected or set up.
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert not re.search(r"^ERROR ", done.stdout, re.M), done.stdout
    failed = re.findall(r"^FAILED tests/([^\s\[]+)", done.stdout, re.M)
    missed = {what for what, defect in DEFECTS.items() if defect.test not in failed}
    assert missed == set(), done.stdout
