"""build.toml, kernel sources, bindings, Python, tests and documents agree. No torch, no build."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from .static import manifest
from .static.manifest import Project
from .static.project import ROOT, report

pytestmark = pytest.mark.static


def op_table_findings(project: Project) -> list[str]:
    return manifest.op_table_findings(project, "docs/dev/ops.md")


CHECKS = (
    manifest.source_findings,
    manifest.component_findings,
    manifest.binding_findings,
    manifest.python_findings,
    manifest.document_findings,
    op_table_findings,
    manifest.changelog_findings,
    manifest.pin_findings,
)

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


def build(folder: Path, edit: Callable[[dict[str, str]], object] = lambda files: None) -> Project:
    files = dict(GOOD)
    edit(files)
    for name, text in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return Project(folder)


def without(name: str) -> Callable[[dict[str, str]], object]:
    return lambda files: files.pop(name)


def adding(name: str, text: str = "") -> Callable[[dict[str, str]], object]:
    return lambda files: files.update({name: text})


def replacing(name: str, old: str, new: str) -> Callable[[dict[str, str]], object]:
    def edit(files: dict[str, str]) -> None:
        assert old in files[name]
        files[name] = files[name].replace(old, new)

    return edit


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_project_agrees(check) -> None:
    findings = check(Project(ROOT))
    assert not findings, report(findings)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_good_project_has_no_findings(tmp_path: Path, check) -> None:
    findings = check(build(tmp_path))
    assert not findings, report(findings)


BUILD, BINDING = "build.toml", "torch-ext/torch_binding.cpp"


BREAKS = [
    (manifest.source_findings, without("kernels-src/sum/sum.cu"), "does not exist"),
    (manifest.source_findings, adding("kernels-src/sum/extra.cuh"), "no src of build.toml"),
    (manifest.source_findings, adding("torch-ext/extra.cpp"), "no src of build.toml"),
    (
        manifest.source_findings,
        replacing(BUILD, "sum/sum_sm90.cu", "sum/sum.cu"),
        "compiled more than once for cuda",
    ),
    (
        manifest.source_findings,
        replacing(BUILD, '["kernels-src/cpu', '["kernels-src/cpu/sum.cpp", "kernels-src/cpu'),
        "twice",
    ),
    (manifest.component_findings, adding("kernels-src/new/new.cu"), "no component"),
    (
        manifest.component_findings,
        replacing(BUILD, "[kernel.sum]", "[kernel.total]"),
        "kernels-src/total/ does not exist",
    ),
    (
        manifest.component_findings,
        replacing(BUILD, "[kernel.sum_cpu]", "[kernel.sum_sm80]"),
        "exactly if the backend is cpu",
    ),
    (manifest.component_findings, replacing(BUILD, '"9.0a"', '"8.0"'), "are not sm90's"),
    (manifest.component_findings, replacing(BUILD, "8.0+PTX", "8.0"), "needs the capability"),
    (
        manifest.component_findings,
        replacing(BUILD, "kernels-src/cpu/sum.cpp", "kernels-src/sum/sum.cpp"),
        "outside of kernels-src/cpu/",
    ),
    (
        manifest.binding_findings,
        replacing(BINDING, 'ops.impl("sum", TORCH_BOX(&sum_cpu))', ""),
        "sum: has a source for cpu, but no ops.impl",
    ),
    (
        manifest.binding_findings,
        replacing(BUILD, "kernels-src/cpu/sum.cpp", "kernels-src/cpu/total.cpp"),
        "sum: has an ops.impl for cpu, but no source",
    ),
    (
        manifest.binding_findings,
        replacing(BINDING, '"sum(', '"total('),
        "implements sum, which",
    ),
    (manifest.binding_findings, replacing(BINDING, "ops.def", "ops.fed"), "no ops.def found"),
    (
        manifest.binding_findings,
        replacing(BINDING, "  ops.def(", '  ops.def("sum(Tensor x) -> Tensor");\n  ops.def('),
        "defines sum twice",
    ),
    (manifest.binding_findings, adding("kernels-src/sum/add.cu"), "add.cu: its stem"),
    (manifest.python_findings, without("torch-ext/toy/kernels/sum.py"), "calls ops.sum"),
    (manifest.python_findings, without("tests/kernels/test_sum.py"), "test_*.py names it"),
    (manifest.python_findings, without("torch-ext/toy/reference/math.py"), "no function sum"),
    (manifest.document_findings, without("README.md"), "README.md is missing"),
    (manifest.document_findings, adding("README.md", "Call chain."), "chain: is in __all__"),
    (
        manifest.document_findings,
        adding("torch-ext/toy/__init__.py", "from .a import fold\n__all__ = ['fold']\n"),
        "fold: is in __all__",
    ),
    (op_table_findings, without("docs/dev/ops.md"), "docs/dev/ops.md is missing"),
    (op_table_findings, adding("docs/dev/ops.md", "Call `chain`."), "has no table"),
    (
        op_table_findings,
        replacing("docs/dev/ops.md", "| `chain` | `chain`", "| `chain` | `fold`"),
        "lacks chain",
    ),
    (
        op_table_findings,
        replacing("docs/dev/ops.md", "| `chain` | `chain`", "| `chain` | `fold`"),
        "names fold, no op",
    ),
    (
        op_table_findings,
        replacing("docs/dev/ops.md", "kernels-src/sum/sum.cu", "kernels-src/sum/old.cu"),
        "old.cu, which does not exist",
    ),
    (
        op_table_findings,
        replacing("docs/dev/ops.md", "`torch-ext/toy/kernels/sum_triton.py`", "-"),
        "the row of sum lacks torch-ext/toy/kernels/sum_triton.py",
    ),
    (
        op_table_findings,
        replacing("docs/dev/ops.md", ", `kernels-src/sum/sum_sm90.cu`", ""),
        "docs/dev/ops.md: the row of sum lacks kernels-src/sum/sum_sm90.cu",
    ),
    (
        op_table_findings,
        replacing("docs/dev/ops.md", "`kernels-src/sum/sum.cu`", "`kernels-src/sum/total*.cu`"),
        "total*.cu, which does not exist",
    ),
    (manifest.changelog_findings, without("CHANGELOG.md"), "CHANGELOG.md is missing"),
    (manifest.changelog_findings, replacing(BUILD, "version = 3", "version = 4"), "Version 4"),
    (
        manifest.pin_findings,
        replacing("tools/requirements.txt", "ruff==1.2.3", "ruff==1.2.4"),
        "ruff==1.2.3 is not the pin",
    ),
]


@pytest.mark.parametrize(("check", "edit", "expected"), BREAKS)
def test_rule_can_fail(tmp_path: Path, check, edit, expected: str) -> None:
    findings = check(build(tmp_path, edit))
    assert any(expected in finding for finding in findings), report(findings)


def test_a_pattern_names_the_sources_of_every_architecture(tmp_path: Path) -> None:
    named = "`kernels-src/sum/sum.cu`, `kernels-src/sum/sum_sm90.cu`"
    project = build(tmp_path, replacing("docs/dev/ops.md", named, "`kernels-src/sum/sum*.cu`"))
    assert not op_table_findings(project)
