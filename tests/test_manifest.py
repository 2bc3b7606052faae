"""build.toml, kernel sources, bindings, Python, tests and documents agree. No torch, no build."""

from pathlib import Path

import pytest

from .static import manifest
from .static.manifest import Project
from .static.project import ROOT, assert_found, assert_none, write_files

pytestmark = pytest.mark.static


def op_table_findings(project: Project) -> list[str]:
    return manifest.op_table_findings(project, "docs/dev/ops.md")


SOURCE, COMPONENT = manifest.source_findings, manifest.component_findings
BIND, PYTHON = manifest.binding_findings, manifest.python_findings
DOCUMENT = manifest.document_findings
TABLES = op_table_findings
CHANGES = manifest.changelog_findings
PIN = manifest.pin_findings
CHECKS = (SOURCE, COMPONENT, BIND, PYTHON, DOCUMENT, TABLES, CHANGES, PIN)

TABLE = """
| requested name | op | CUDA source | Triton source |
|---|---|---|---|
| `sum` | `sum` | `kernels-src/sum/sum.cu` | `torch-ext/toy/kernels/sum_triton.py` |
| `chain` | `chain` | | |
"""

GOOD = {
    "build.toml": """
[general]
name = "toy"
version = 3
[torch]
src = ["torch-ext/torch_binding.cpp", "torch-ext/torch_binding.h"]
[kernel.sum]
backend = "cuda"
cuda-capabilities = ["8.0+PTX", "9.0"]
src = ["kernels-src/sum/sum.cu", "kernels-src/common/io.cuh"]
[kernel.sum_sm90]
backend = "cuda"
cuda-capabilities = ["9.0a"]
src = ["kernels-src/sum/sum_sm90.cu", "kernels-src/common/io.cuh"]
[kernel.sum_cpu]
backend = "cpu"
src = ["kernels-src/cpu/sum.cpp"]
""",
    "torch-ext/torch_binding.h": "",
    "torch-ext/torch_binding.cpp": """
// ops.def("ghost(Tensor x) -> Tensor");
STABLE_TORCH_LIBRARY_EXPAND(TORCH_EXTENSION_NAME, ops) {
  ops.def(
      "sum(Tensor x) -> Tensor");
}
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CUDA, ops) {
  ops.impl("sum", TORCH_BOX(&sum_cuda));
}
STABLE_TORCH_LIBRARY_IMPL_EXPAND(TORCH_EXTENSION_NAME, CPU, ops) {
  ops.impl("sum", TORCH_BOX(&sum_cpu));
}
""",
    "kernels-src/common/io.cuh": "",
    "kernels-src/sum/sum.cu": "",
    "kernels-src/sum/sum_sm90.cu": "",
    "kernels-src/cpu/sum.cpp": "",
    "torch-ext/toy/__init__.py": "from .chain import chain\n__all__ = ['chain']\n",
    "torch-ext/toy/chain.py": (
        "@custom_op(add_op_namespace_prefix('chain'), mutates_args=())\ndef chain(x): ...\n"
    ),
    "torch-ext/toy/kernels/__init__.py": "",
    "torch-ext/toy/kernels/_launch.py": "",
    "torch-ext/toy/kernels/sum.py": "y = ops.sum(x)\n",
    "torch-ext/toy/kernels/sum_triton.py": "",
    "torch-ext/toy/reference/math.py": "def sum(x): ...\n",
    "tests/kernels/test_sum.py": "sum(x)\n",
    "README.md": "Call `chain`.\n",
    "docs/dev/ops.md": TABLE.replace("sum.cu`", "sum.cu`, `kernels-src/sum/sum_sm90.cu`"),
    "CHANGELOG.md": "# Changes\n\n## Version 3\n\n## Version 2\n",
    ".pre-commit-config.yaml": "additional_dependencies: [ruff==1.2.3]\n",
    "tools/requirements.txt": "torch==9\nruff==1.2.3\n",
}


def build(folder: Path, name: str = "", old: str | None = None, new: str | None = "") -> Project:
    """GOOD with one file that lacks `old`, or as a whole is `new`, or is gone."""
    files = dict(GOOD)
    assert old is None or old in files[name]
    if old is not None:
        new = files[name].replace(old, new)
    if new is None:
        del files[name]
    elif name:
        files[name] = new
    write_files(folder, files)
    return Project(folder)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_project_agrees(check) -> None:
    assert_none(check(Project(ROOT)))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_good_project_has_no_findings(tmp_path: Path, check) -> None:
    assert_none(check(build(tmp_path)))


BUILD, BINDING, PAGE = "build.toml", "torch-ext/torch_binding.cpp", "docs/dev/ops.md"
CPU, CU, SM90 = (f"kernels-src/{name}" for name in ("cpu/sum.cpp", "sum/sum.cu", "sum/sum_sm90.cu"))
TRITON = "torch-ext/toy/kernels/sum_triton.py"

BREAKS = [  # the rule, a file, its old text (None: all of it), the new (None: no file), a finding
    (SOURCE, "kernels-src/sum/extra.cuh", None, "", "no src of build.toml"),
    (SOURCE, "torch-ext/extra.cpp", None, "", "no src of build.toml"),
    (SOURCE, BUILD, "sum/sum_sm90.cu", "sum/sum.cu", "compiled more than once for cuda"),
    (COMPONENT, "kernels-src/new/new.cu", None, "", "no component"),
    (COMPONENT, BUILD, "[kernel.sum]", "[kernel.total]", "kernels-src/total/ does not exist"),
    (COMPONENT, BUILD, "[kernel.sum_cpu]", "[kernel.sum_sm80]", "exactly if the backend is cpu"),
    (COMPONENT, BUILD, '"9.0a"', '"8.0"', "are not sm90's"),
    (COMPONENT, BUILD, "8.0+PTX", "8.0", "needs the capability"),
    (COMPONENT, BUILD, CPU, "kernels-src/sum/sum.cpp", "outside of kernels-src/cpu/"),
    (
        BIND,
        BINDING,
        'ops.impl("sum", TORCH_BOX(&sum_cpu))',
        "",
        "a source for cpu, but no ops.impl",
    ),
    (BIND, BUILD, CPU, "kernels-src/cpu/total.cpp", "sum: has an ops.impl for cpu, but no source"),
    (BIND, BINDING, '"sum(', '"total(', "implements sum, which"),
    (BIND, "kernels-src/sum/add.cu", None, "", "add.cu: its stem"),
    (PYTHON, "torch-ext/toy/kernels/sum.py", None, None, "calls ops.sum"),
    (PYTHON, "tests/kernels/test_sum.py", None, None, "test_*.py names it"),
    (PYTHON, "torch-ext/toy/reference/math.py", None, None, "no function sum"),
    (DOCUMENT, "README.md", None, None, "README.md is missing"),
    (DOCUMENT, "README.md", None, "Call chain.", "chain: is in __all__"),
    (DOCUMENT, "torch-ext/toy/__init__.py", "chain", "fold", "fold: is in __all__"),
    (TABLES, PAGE, None, None, "docs/dev/ops.md is missing"),
    (TABLES, PAGE, None, "Call `chain`.", "has no table"),
    (TABLES, PAGE, "| `chain` | `chain`", "| `chain` | `fold`", "lacks chain"),
    (TABLES, PAGE, "| `chain` | `chain`", "| `chain` | `fold`", "names fold, no op"),
    (TABLES, PAGE, CU, "kernels-src/sum/old.cu", "old.cu, which does not exist"),
    (TABLES, PAGE, f"`{TRITON}`", "-", f"the row of sum lacks {TRITON}"),
    (TABLES, PAGE, f", `{SM90}`", "", f"docs/dev/ops.md: the row of sum lacks {SM90}"),
    (TABLES, PAGE, f"`{CU}`", "`kernels-src/sum/total*.cu`", "total*.cu, which does not exist"),
    (CHANGES, "CHANGELOG.md", None, None, "CHANGELOG.md is missing"),
    (CHANGES, BUILD, "version = 3", "version = 4", "Version 4"),
    (PIN, "tools/requirements.txt", "ruff==1.2.3", "ruff==1.2.4", "ruff==1.2.3 is not the pin"),
]


@pytest.mark.parametrize(("check", "name", "old", "new", "expected"), BREAKS)
def test_rule_can_fail(tmp_path: Path, check, name, old, new, expected: str) -> None:
    assert_found(expected, check(build(tmp_path, name, old, new)))


def test_a_pattern_names_the_sources_of_every_architecture(tmp_path: Path) -> None:
    both = f"`{CU}`, `{SM90}`"
    assert_none(op_table_findings(build(tmp_path, PAGE, both, "`kernels-src/sum/sum*.cu`")))
