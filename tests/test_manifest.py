"""One name per operation: build.toml, sources, bindings, Python, tests and the op table agree."""

import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import tomllib

from ._project import ROOT, assert_found, assert_none, write_files
from .test_hub_rules import defined_ops

pytestmark = pytest.mark.static

DEVICE_SOURCES = frozenset({".cu", ".cpp", ".cc"})
HEADERS = frozenset({".cuh", ".h", ".hpp"})
NO_REFERENCE = frozenset({"launch_plan", "nf4_product"})
# What may follow an op's name: an architecture, and a format before it.
SUFFIX = re.compile(r"(?:_(?:mxfp4|fp8))*_(cpu|sm\d+a?)$")
OP_TABLE_COLUMNS = ("requested name", "op", "cuda source", "triton source")


@dataclass(frozen=True)
class Project:
    """A checkout, and the facts that several checks read."""

    root: Path

    @cached_property
    def build(self) -> dict:
        return tomllib.loads((self.root / "build.toml").read_text(encoding="utf-8"))

    @property
    def package(self) -> Path:
        return self.root / "torch-ext" / self.build["general"]["name"].replace("-", "_")

    @cached_property
    def binding(self) -> str:
        """torch_binding.cpp without comments."""
        text = (self.root / "torch-ext" / "torch_binding.cpp").read_text(encoding="utf-8")
        return re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.DOTALL)

    @cached_property
    def compiled_ops(self) -> list[str]:
        """Names in `ops.def("name(...")`, in order."""
        return re.findall(r'\bops\.def\(\s*"(\w+)\s*\(', self.binding)

    @cached_property
    def implementations(self) -> set[tuple[str, str]]:
        """(op, "cuda" or "cpu") of every `ops.impl`."""
        found = set()
        block = re.compile(
            r"STABLE_TORCH_LIBRARY_IMPL_EXPAND\(\s*\w+\s*,\s*(\w+)\s*,\s*ops\s*\)\s*\{(.*?)\n\}",
            re.DOTALL,
        )
        for key, body in block.findall(self.binding):
            found |= {(op, key.lower()) for op in re.findall(r'\bops\.impl\(\s*"(\w+)"', body)}
        return found

    def sources_of(self, op: str, suffixes: frozenset[str]) -> list[str]:
        """Listed files below kernels-src whose stem is the op, or the op with an architecture."""
        listed = {name for part in self.build.get("kernel", {}).values() for name in part["src"]}
        return sorted(
            name
            for name in listed
            if Path(name).suffix in suffixes and SUFFIX.sub("", Path(name).stem) == op
        )

    def text(self, name: str) -> str | None:
        path = self.root / name
        return path.read_text(encoding="utf-8") if path.is_file() else None


def source_findings(project: Project) -> list[str]:
    """Every source and header is listed in build.toml, and compiled once per backend."""
    findings = []
    lists = {"torch": ("all", project.build["torch"]["src"])}
    for name, part in project.build.get("kernel", {}).items():
        lists[f"kernel.{name}"] = (part["backend"], part["src"])
    known = {source for _, listed in lists.values() for source in listed}
    for folder in ("kernels-src", "torch-ext"):
        for path in sorted((project.root / folder).rglob("*")):
            name = path.relative_to(project.root).as_posix()
            if path.suffix in DEVICE_SOURCES | HEADERS and name not in known:
                findings.append(f"{name}: no src of build.toml lists it")
    for backend in sorted({backend for backend, _ in lists.values()} - {"all"}):
        compiled = [
            source
            for kind, listed in lists.values()
            if kind in (backend, "all")
            for source in set(listed)
            if Path(source).suffix in DEVICE_SOURCES
        ]
        for source in sorted({entry for entry in compiled if compiled.count(entry) > 1}):
            findings.append(f"{source}: compiled more than once for {backend}")
    return findings


def binding_findings(project: Project) -> list[str]:
    """The compiled ops: implemented where there is a source, named like it."""
    findings = []
    ops = project.compiled_ops
    backends = {part["backend"] for part in project.build.get("kernel", {}).values()}
    for op in ops:
        for backend, suffixes in (
            ("cuda", frozenset({".cu"})),
            ("cpu", frozenset({".cpp", ".cc"})),
        ):
            has_source = bool(project.sources_of(op, suffixes))
            has_impl = (op, backend) in project.implementations
            if has_source and not has_impl:
                findings.append(f"{op}: has a source for {backend}, but no ops.impl")
            if has_impl and not has_source:
                findings.append(f"{op}: has an ops.impl for {backend}, but no source")
        if not any((op, backend) in project.implementations for backend in backends):
            findings.append(f"{op}: torch_binding.cpp implements it for no backend")
    for op, _ in sorted(project.implementations):
        if op not in ops:
            findings.append(f"torch_binding.cpp: implements {op}, which it does not define")
    for path in sorted((project.root / "kernels-src").rglob("*")):
        if path.suffix in DEVICE_SOURCES and SUFFIX.sub("", path.stem) not in ops:
            name = path.relative_to(project.root).as_posix()
            findings.append(f"{name}: its stem is not the name of an op of torch_binding.cpp")
    return findings


def python_findings(project: Project) -> list[str]:
    """Each compiled op is called below kernels/, has a reference of its name, and a test of it."""
    findings = []
    kernels = [path.read_text() for path in (project.package / "kernels").rglob("*.py")]
    tests = [path.read_text() for path in (project.root / "tests" / "kernels").rglob("test_*.py")]
    reference = "".join(path.read_text() for path in (project.package / "reference").glob("*.py"))
    references = re.findall(r"^def (\w+)", reference, re.MULTILINE)
    for op in project.compiled_ops:
        word = re.compile(rf"\b{re.escape(op)}\b")
        call = re.compile(rf"""\b_?ops\.{re.escape(op)}\b|["']{re.escape(op)}["']""")
        if not any(call.search(text) for text in kernels):
            findings.append(f"{op}: nothing below kernels/ calls ops.{op}")
        # A slice is defined by the whole, a product over 4 bits by the layer around it; launches
        # are those of other ops.
        if op.removesuffix("_slice") not in references and op not in NO_REFERENCE:
            findings.append(f"{op}: reference/ defines no function {op}")
        if not any(word.search(text) for text in tests):
            findings.append(f"{op}: no file tests/kernels/test_*.py names it")
    return findings


def op_table_findings(project: Project) -> list[str]:
    """The table requested name | op | CUDA source | Triton source names all that exists."""
    text = project.text(document := "docs/dev/ops.md")
    if text is None:
        return [f"{document} is missing"]
    rows = op_table(text)
    if rows is None:
        columns = " | ".join(OP_TABLE_COLUMNS)
        return [f"{document}: has no table with the columns {columns}"]
    findings = []
    ops = [*project.compiled_ops, *sorted(defined_ops(project.package))]
    described = [op for row in rows for op in _cells(row["op"])]
    findings += [f"{document}: the op table lacks {op}" for op in ops if op not in described]
    findings += [f"{document}: the op table names {op}, no op" for op in described if op not in ops]
    for row in rows:
        sources = {
            column: _sources(project.root, cell)
            for column, cell in row.items()
            if column.endswith("source")
        }
        for op in _cells(row["op"]):
            twins = (project.package / "kernels").rglob(f"{op}_triton.py")
            triton = [twin.relative_to(project.root).as_posix() for twin in twins]
            expected = {
                "cuda source": project.sources_of(op, frozenset({".cu"})),
                "triton source": triton,
            }
            for column, names in expected.items():
                missing = sorted(set(names) - set(sources[column]))
                findings += [f"{document}: the row of {op} lacks {name}" for name in missing]
    return findings


def op_table(text: str) -> list[dict[str, str]] | None:
    """The rows of the document's op table by lower-case column name; None where it has none."""
    lines = text.splitlines()
    for number, line in enumerate(lines):
        header = [cell.strip().strip("`").lower() for cell in line.strip().strip("|").split("|")]
        if not set(OP_TABLE_COLUMNS) <= set(header):
            continue
        rows = []
        for row in lines[number + 2 :]:
            if not row.lstrip().startswith("|"):
                break
            rows.append(dict(zip(header, row.strip().strip("|").split("|"), strict=False)))
        return [row for row in rows if set(OP_TABLE_COLUMNS) <= set(row)]
    return None


def _cells(cell: str) -> list[str]:
    """The names in backticks; a link's text counts, its address does not."""
    return re.findall(r"`([^`]+)`", cell)


def _sources(root: Path, cell: str) -> list[str]:
    """The files that a cell names, by patterns too; test_pages.py asks that all of them exist."""
    return [
        found.relative_to(root).as_posix() for name in _cells(cell) for found in root.glob(name)
    ]


def changelog_findings(project: Project) -> list[str]:
    """The first entry of the changelog is the version of build.toml."""
    text = project.text("CHANGELOG.md")
    if text is None:
        return ["CHANGELOG.md is missing"]
    entries = re.findall(r"^## Version (\d+)\b", text, re.MULTILINE)
    version = str(project.build["general"]["version"])
    if not entries or entries[0] != version:
        return [f"CHANGELOG.md: the first entry must be '## Version {version}', found {entries}"]
    return []


SOURCE, BIND, PYTHON = source_findings, binding_findings, python_findings
TABLES = op_table_findings
CHANGES = changelog_findings
CHECKS = (SOURCE, BIND, PYTHON, TABLES, CHANGES)

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
    "torch-ext/toy/__init__.py": "",
    "torch-ext/toy/chain.py": (
        "@custom_op(add_op_namespace_prefix('chain'), mutates_args=())\ndef chain(x): ...\n"
    ),
    "torch-ext/toy/kernels/__init__.py": "",
    "torch-ext/toy/kernels/_launch.py": "",
    "torch-ext/toy/kernels/sum.py": "y = ops.sum(x)\n",
    "torch-ext/toy/kernels/sum_triton.py": "",
    "torch-ext/toy/reference/math.py": "def sum(x): ...\n",
    "tests/kernels/test_sum.py": "sum(x)\n",
    "docs/dev/ops.md": TABLE.replace("sum.cu`", "sum.cu`, `kernels-src/sum/sum_sm90.cu`"),
    "CHANGELOG.md": "# Changes\n\n## Version 3\n\n## Version 2\n",
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
    (TABLES, PAGE, None, None, "docs/dev/ops.md is missing"),
    (TABLES, PAGE, None, "Call `chain`.", "has no table"),
    (TABLES, PAGE, "| `chain` | `chain`", "| `chain` | `fold`", "lacks chain"),
    (TABLES, PAGE, "| `chain` | `chain`", "| `chain` | `fold`", "names fold, no op"),
    (TABLES, PAGE, f"`{TRITON}`", "-", f"the row of sum lacks {TRITON}"),
    (TABLES, PAGE, f", `{SM90}`", "", f"docs/dev/ops.md: the row of sum lacks {SM90}"),
    (CHANGES, "CHANGELOG.md", None, None, "CHANGELOG.md is missing"),
    (CHANGES, BUILD, "version = 3", "version = 4", "Version 4"),
]


@pytest.mark.parametrize(("check", "name", "old", "new", "expected"), BREAKS)
def test_rule_can_fail(tmp_path: Path, check, name, old, new, expected: str) -> None:
    assert_found(expected, check(build(tmp_path, name, old, new)))


def test_a_pattern_names_the_sources_of_every_architecture(tmp_path: Path) -> None:
    both = f"`{CU}`, `{SM90}`"
    assert_none(op_table_findings(build(tmp_path, PAGE, both, "`kernels-src/sum/sum*.cu`")))


def test_sources_look_no_op_up_by_name() -> None:
    """An allocation or a view by the dispatcher takes the host 3 us: `allocate` and `viewed`."""
    by_name = re.compile(
        r"torch::stable::(?:new_)?(?:empty|empty_like|zeros|narrow|transpose|view|select)\("
    )
    sources = [p for p in (ROOT / "kernels-src").rglob("*") if p.suffix in DEVICE_SOURCES | HEADERS]
    assert sources
    found = [str(p) for p in sources if by_name.search(p.read_text(encoding="utf-8"))]
    assert not found
