"""Plants the defects that tests are marked with, in a copy of the sources: each test must fail.

`@pytest.mark.sees_defect(behaviour)` says which wrong behaviour a test sees, mostly one that a
predecessor has; with `old` and `new` behind it, this file replaces the one place of the package
that reads `old` and runs the test, in a process of its own.
"""

import ast
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from ._checkout import built_checkout, run_build, variant_of
from .conftest import ROOT


@dataclass(frozen=True)
class Defect:
    """`old`, which must occur once in the package, becomes `new`; the test must fail then."""

    node: str
    behaviour: str
    old: str
    new: str


def planted() -> list[Defect]:
    """What the markers below tests/ say."""
    found = []
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        text = path.read_text()
        if "mark.sees_defect(" not in text:
            continue
        for function in ast.parse(text).body:
            for mark in getattr(function, "decorator_list", ()):
                if ast.unparse(mark).startswith("pytest.mark.sees_defect("):
                    behaviour, *change = map(ast.literal_eval, mark.args)
                    node = f"{path.relative_to(ROOT).as_posix()}::{function.name}"
                    found += [Defect(node, behaviour, *change)] if change else []
    return found


DEFECTS = planted()


@pytest.fixture(scope="module")
def checkout(tmp_path_factory) -> Path:
    """A built checkout with its tests, in a folder of its own."""
    root = tmp_path_factory.mktemp("planted") / "checkout"
    shutil.copytree(built_checkout(tmp_path_factory.getbasetemp()), root)
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "tests", root / "tests", ignore=ignored, dirs_exist_ok=True)
    shutil.copyfile(ROOT / "pytest.ini", root / "pytest.ini")
    return root


@pytest.fixture
def run(forks, checkout):
    """`run(*nodes)`: those tests on the copy, in a process of their own."""

    def run_nodes(*nodes: str) -> subprocess.CompletedProcess:
        return forks.pytest("--tb=line", *nodes, folder=checkout, OMP_NUM_THREADS="1")

    return run_nodes


def test_marked_tests_pass_on_a_copy_without_a_defect(run) -> None:
    """Otherwise the failures below would prove nothing."""
    done = run(*(defect.node for defect in DEFECTS))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("defect", DEFECTS, ids=lambda defect: defect.behaviour)
def test_a_planted_defect_is_seen(checkout, run, defect) -> None:
    variant = variant_of(checkout)
    sources = [path for path in (checkout / "kernels-src").rglob("*") if path.is_file()]
    places = [
        path
        for path in [*variant.rglob("*.py"), *sources]
        for _ in range(path.read_text().count(defect.old))
    ]
    assert len(places) == 1, f"{defect.old!r} is not in the package exactly once: {places}"
    path = places[0]
    before = {file: file.read_bytes() for file in (path, *variant.glob("*.so"))}
    path.write_text(path.read_text().replace(defect.old, defect.new))
    if path in sources:
        built = run_build(checkout, "--backend", "cpu")
        assert built.returncode == 0, built.stderr
    done = run(defect.node)
    for file, content in before.items():
        file.write_bytes(content)
    # A test that failed, not one that could not be collected or set up.
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert not re.search(r"^ERROR ", done.stdout, re.M), done.stdout
