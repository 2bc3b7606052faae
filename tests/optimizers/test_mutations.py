"""A sample of planted defects: the tests that `test_defects.py` maps to them must fail on each.

Every test here copies the built package and the tests into a folder of its own, changes one place
of the copy and runs the mapped test there, in a process of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

from ..static.project import ROOT
from ..test_defects import DEFECTS

NEEDED = ("build.toml", "pytest.ini", "tests/__init__.py", "tests/conftest.py", "tests/_compare.py")


@dataclass(frozen=True)
class Mutation:
    """`old`, which must occur once in a file of the package, becomes `new`."""

    defect: str
    test: str  # the function; DEFECTS has its file
    file: str
    old: str
    new: str

    @property
    def node(self) -> str:
        (node,) = (n for n in DEFECTS[self.defect].tests if n.endswith(f"::{self.test}"))
        return f"tests/{node}"


MUTATIONS = (
    Mutation(
        "M6c",
        "test_state_is_made_for_all_parameters_at_once",
        "optimizers/state/state.py",
        "wide = torch.promote_types(param.dtype, torch.float32)",
        "wide = param.dtype",
    ),
    Mutation(
        "M7a",
        "test_none_grad_means_the_same_on_every_path",
        "optimizers/step.py",
        "                for param in chunk.finished:\n",
        "                for param in (p for p in chunk.finished if p.ndim == 2):\n",
    ),
    Mutation(
        "M9",
        "test_same_shapes_are_orthogonalized_as_one_batch",
        "optimizers/chunks.py",
        "            room = most\n",
        "            room = 0\n",
    ),
    Mutation(
        "M15a",
        "test_expert_keys_match_whole_components_only",
        "optimizers/groups/param_groups.py",
        "return any(parts[i : i + len(wanted)] == wanted for i in range(last + 1))",
        "return last >= 0 and key in name",
    ),
    Mutation(
        "M20b",
        "test_shared_key_heads_are_exact",
        "optimizers/stages/qk_clip.py",
        "QUERY: self._rows(QUERY, query / beside, query)",
        "QUERY: self._rows(QUERY, query.sqrt(), query)",
    ),
    Mutation(
        "M28",
        "test_the_device_is_the_parameters",
        "optimizers/state/state.py",
        "torch.zeros(self.shape, dtype=self.dtype, device=param.device)",
        "torch.zeros(self.shape, dtype=self.dtype)",
    ),
    Mutation(
        "N7a",
        "test_every_step_count_is_honoured",
        "optimizers/step.py",
        "steps=options.ns_steps, dtype=options.dtype",
        "steps=min(options.ns_steps, 5), dtype=options.dtype",
    ),
)


@pytest.fixture
def checkout(opt, tmp_path) -> Path:
    """The build of this session and the tests of the optimizers, alone in a folder."""
    variant = Path(opt.__file__).parent
    shutil.copytree(variant, tmp_path / "build" / variant.name)
    shutil.copytree(ROOT / "tests/optimizers", tmp_path / "tests/optimizers")
    for file in NEEDED:
        shutil.copyfile(ROOT / file, tmp_path / file)
    return tmp_path


@pytest.fixture
def run(forks, checkout, device):
    """`run(*nodes)`: those tests on the copy, in a process of their own."""

    def run_nodes(*nodes: str) -> subprocess.CompletedProcess:
        # Options for this run, such as the workers of pytest-xdist, are not those of the inner one.
        kept = {key: value for key, value in os.environ.items() if not key.startswith("PYTEST_")}
        options = ("-x", "-q", "-p", "no:cacheprovider", "--tb=line", "--device", device)
        environment = {**kept, "OMP_NUM_THREADS": "1"}
        return forks.run("-m", "pytest", *options, *nodes, folder=checkout, environment=environment)

    return run_nodes


def test_the_sampled_tests_pass_on_a_copy_without_a_defect(run) -> None:
    """Otherwise the failures below would prove nothing."""
    done = run(*(mutation.node for mutation in MUTATIONS))
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.defect)
def test_a_planted_defect_is_caught(checkout, run, mutation) -> None:
    (variant,) = (checkout / "build").iterdir()
    path = variant / mutation.file
    text = path.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.old!r} is not in {mutation.file} exactly once"
    path.write_text(text.replace(mutation.old, mutation.new))
    done = run(mutation.node)
    summary = done.stdout.rstrip().splitlines()[-1]
    # A test that failed, not one that could not be collected or set up.
    assert done.returncode == pytest.ExitCode.TESTS_FAILED, done.stdout + done.stderr
    assert re.search(r"\b1 failed\b", summary), done.stdout
    assert "error" not in summary, done.stdout
