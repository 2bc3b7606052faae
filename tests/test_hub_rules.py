"""The Hub's rules for the Python half of a kernel package, read off the source. No torch."""

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import tomllib

from ._project import (
    PACKAGE,
    ROOT,
    aliases,
    assert_finds_what_is_marked,
    assert_none,
    committed_files,
    dotted,
    parse,
    place,
    project_files,
    read_text,
    write_files,
)

pytestmark = pytest.mark.static

REGISTRATIONS = frozenset(
    {
        "custom_op",
        "define",
        "impl",
        "triton_op",
        "register_autograd",
        "register_autocast",
        "register_fake",
        "register_kernel",
        "register_torch_dispatch",
        "register_vmap",
    }
)
DEFINITIONS = ("custom_op", "define", "triton_op")
PREFIX = "add_op_namespace_prefix"

# kernel-builder writes these; committed copies collide with it.
GENERATED = re.compile(
    r"setup\.py|pyproject\.toml|CMakeLists\.txt|cmake/.*|build/.*|metadata-[^/]*\.json"
    r"|torch-ext/registration\.h|torch-ext/[^/]*/_ops\.py"
)


def _files(package: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(package.rglob("*.py")):
        yield path, parse(path)


def facade_findings(package: Path) -> list[str]:
    """__init__.py: imports and `__all__`; layers.py: imports and classes."""
    return [
        f"{place(path, package, node.lineno)}: {ast.unparse(node):.20} does not belong here"
        for path in (package / "__init__.py", package / "layers.py")
        for node in parse(path).body
        if not isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
        and not (isinstance(node, ast.ClassDef) and path.stem == "layers")
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))  # docstring
    ]


def nested_name_findings(package: Path) -> list[str]:
    """Nothing directly inside the package may carry the package's name."""
    return [
        f"{place(path, package)}: the layout check refuses this name inside {package.name}/"
        for path in sorted(package.glob("*"))
        if path.name.split(".")[0] == package.name
    ]


def op_prefix_findings(package: Path) -> list[str]:
    """Every registration names its op by a literal `add_op_namespace_prefix("...")`."""
    findings = []
    for path, tree in _files(package):
        known = aliases(tree)
        for node, decorates in _registrations(tree, known):
            where = place(path, package, node.lineno)
            verb = "decorator" if decorates else "call"
            if not isinstance(node, ast.Call) or not node.args or not _is_prefixed(node.args[0]):
                findings.append(f'{where}: the {verb} must begin with {PREFIX}("...")')
    return findings


def defined_ops(package: Path) -> dict[str, Path]:
    """Ops that Python defines and the file that does."""
    found = {}
    for path, tree in _files(package):
        known = aliases(tree)
        for node, _ in _registrations(tree, known):
            if not isinstance(node, ast.Call) or _last(node.func) not in DEFINITIONS:
                continue
            if node.args and _is_prefixed(node.args[0]):
                found[node.args[0].args[0].value] = path
    return found


def _registrations(tree: ast.Module, known: dict[str, str]) -> Iterator[tuple[ast.expr, bool]]:
    """(node, is it a decorator) of every registration; a decorator may lack its call."""
    decorators = {
        decorator
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        for decorator in node.decorator_list
    }
    for node in ast.walk(tree):
        name = node.func if isinstance(node, ast.Call) else node
        if node in decorators:
            if _last(name) in REGISTRATIONS:
                yield node, True
        elif isinstance(node, ast.Call):
            full = dotted(name, known) or ""
            if full.startswith("torch.library.") and full.rsplit(".", 1)[1] in REGISTRATIONS:
                yield node, False


def _is_prefixed(node: ast.expr) -> bool:
    return bool(re.fullmatch(rf"{PREFIX}\('\w+'\)", ast.unparse(node)))


def autotune_findings(package: Path) -> list[str]:
    """Triton autotuning.

    The choice of a configuration is a table: tuning at run time costs minutes and drifts between
    replicas.
    """
    findings = []
    for path, tree in _files(package):
        known = aliases(tree)
        for node in ast.walk(tree):
            name = dotted(node.func, known) if isinstance(node, ast.Call) else None
            if name and name.rsplit(".", 1)[-1] == "autotune" and not _has_one_config(node):
                where = place(path, package, node.lineno)
                findings.append(
                    f"{where}: autotunes at run time; ship one configuration or a table"
                )
    return findings


def _has_one_config(call: ast.Call) -> bool:
    given = [keyword.value for keyword in call.keywords if keyword.arg == "configs"]
    configs = (given + call.args[:1] or [None])[0]
    return isinstance(configs, ast.List | ast.Tuple) and len(configs.elts) == 1


def repo_id_findings(root: Path, files: Iterable[Path], repo_id: str) -> list[str]:
    """The Hub id is stated in build.toml alone; documents may show it, and then correctly, or as
    the "{{ repo_id }}" that the builder fills in.

    Records of runs (docs/benchmarks/*.json) hold the id that was loaded.
    """
    findings = []
    shown = re.compile(r"""(?:get_kernel\(\s*["']|LOCAL_KERNELS=["']?)([^"'=\s]+)""")
    for path in files:
        text = read_text(root / path)
        if text is None or path.as_posix() == "build.toml" or path.match("docs/benchmarks/*.json"):
            continue
        if path.suffix == ".md":
            others = [hit for hit in shown.finditer(text) if hit[1] not in (repo_id, "{{")]
            message = f"does not show the id of build.toml, {repo_id}"
        else:
            others = list(re.finditer(re.escape(repo_id), text))
            message = f"repeats {repo_id}; read it from build.toml"
        for hit in others:
            line = text.count("\n", 0, hit.start()) + 1
            findings.append(f"{path.as_posix()}:{line}: {message}")
    return findings


def _last(node: ast.AST) -> str:
    """The last name of `a.b.c`."""
    return ast.unparse(node).rpartition(".")[2]


PACKAGE_CHECKS = (facade_findings, nested_name_findings, op_prefix_findings, autotune_findings)

# A package that keeps the rules but where a mark says otherwise.
FILES = {
    "__init__.py": """
'''The package.'''
from . import layers
from .muon import Muon as Muon
x = 1  #! x = 1 does not belong here
__all__ = ["Muon", "layers"]
""",
    "layers.py": """
'''Layers.'''
import torch
from torch import nn
CACHE = {}  #! CACHE = {} does not belong here
class Gated(nn.Module):
    has_backward: bool = True
    weight: torch.Tensor
    def forward(self, x):
        return x
""",
    "optimizer.py": "",
    "optimizer/__init__.py": "",
    "muon.py": """
from __future__ import annotations
import torch
from torch import library as lib
from torch.library import triton_op
from ._ops import add_op_namespace_prefix, ops
@torch.library.custom_op(add_op_namespace_prefix("sum"), mutates_args=())
def sum_op(x): ...
@torch.library.register_fake(add_op_namespace_prefix("sum"))
def sum_fake(x):
    return torch.cuda.current_device()
@triton_op(add_op_namespace_prefix("cat"), mutates_args=(), schema="(Tensor[] x) -> ()")
def cat(x): ...
torch.library.register_autograd(add_op_namespace_prefix("sum"), print)
@lib.custom_op('optimizer::f')  #! the decorator must begin with add_op_namespace_prefix
def f(x): ...
@lib.triton_op(NAME)  #! the decorator must begin with add_op_namespace_prefix
def g(x): ...
@lib.custom_op(name=add_op_namespace_prefix('f'))  #! the decorator must begin
def i(x): ...
lib.register_fake(NAME, f)  #! the call must begin with add_op_namespace_prefix
""",
    "tuned_triton.py": """
import triton
@triton.autotune(configs=[1], key=[])
def f(x): ...
@triton.autotune(configs=[1, 2], key=[])  #! autotunes at run time
def g(x):
    return triton.autotune(CONFIGS, [])  #! autotunes at run time
""",
}


@pytest.mark.parametrize("check", PACKAGE_CHECKS, ids=lambda check: check.__name__)
def test_package_keeps_the_rule(check) -> None:
    assert_none(check(PACKAGE))


def test_rules_find_what_breaks_them_and_nothing_else(tmp_path: Path) -> None:
    package = tmp_path / "optimizer"
    write_files(package, FILES)
    findings = [finding for check in PACKAGE_CHECKS for finding in check(package)]
    named = dict.fromkeys(("optimizer.py", "optimizer"), "the layout check refuses this name")
    assert_finds_what_is_marked(findings, FILES, **named)


def test_no_generated_file_is_committed() -> None:
    names = [path.as_posix() for path in committed_files() or []]
    made = [name for name in names if GENERATED.fullmatch(name)]
    assert_none([f"{name}: is generated by the build and must not be committed" for name in made])


def test_repo_id_is_stated_once() -> None:
    build_toml = tomllib.loads((ROOT / "build.toml").read_text())
    repo_id = build_toml["general"]["hub"]["repo-id"]
    assert_none(repo_id_findings(ROOT, project_files(), repo_id))


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("build.toml", 'repo-id = "team/pack"', False),
        ("README.md", 'get_kernel("team/pack", version=1)', False),
        ("README.md", 'get_kernel(\n  "team/pack", version=1)', False),
        ("CARD.md", 'get_kernel("{{ repo_id }}", version=1)', False),
        ("README.md", 'get_kernel("other/pack", version=1)', True),
        ("README.md", 'get_kernel(\n  "other/pack", version=1)', True),
        ("README.md", "LOCAL_KERNELS=other/pack=$PWD make", True),
        ("tests/conftest.py", 'get_kernel("team/pack")', True),
        ("Makefile", "export LOCAL_KERNELS=team/pack=.", True),
        ("tests/conftest.py", "get_kernel(repo_id)", False),
    ],
)
def test_repo_id_rule_can_fail(tmp_path: Path, name: str, text: str, found: bool) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert bool(repo_id_findings(tmp_path, [Path(name)], "team/pack")) is found


@pytest.mark.parametrize("with_git", [True, False])
def test_project_files_leave_out_what_was_made_here(tmp_path: Path, with_git: bool) -> None:
    if with_git:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    names = (".gitignore", "tools/a.py", "build/b.py", ".venv/c.py", "tools/__pycache__/d.pyc")
    write_files(tmp_path, dict.fromkeys(names, "build/\n.venv/\n__pycache__/\n"))
    assert project_files(tmp_path) == [Path(".gitignore"), Path("tools/a.py")]
    assert committed_files(tmp_path) == ([] if with_git else None)
