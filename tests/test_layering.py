"""Who may import whom, and how large anything may be, read off the sources. No torch, no build."""

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ._checkout import run_command, tool
from ._project import (
    PACKAGE,
    ROOT,
    aliases,
    assert_finds_what_is_marked,
    assert_none,
    dotted,
    in_functions,
    parse,
    place,
    write_files,
)

pytestmark = pytest.mark.static

# A layer is a sub-package, or a module that lies directly in the package. It may import itself and
# what stands here; `reference` is open to all. "kernels.communication" opens that of a layer alone.
ARROWS: dict[str, frozenset[str]] = {
    "version": frozenset(),
    "_ops": frozenset(),  # generated: the namespace of the compiled ops
    "reference": frozenset(),
    "dispatch": frozenset({"_ops"}),
    "kernels": frozenset({"_ops", "dispatch"}),
    # _ops: newton_schulz, gram_newton_schulz and gram_polynomial are registered ops themselves
    "orthogonalize": frozenset({"kernels", "dispatch", "_ops"}),
    "distributed": frozenset({"kernels.communication"}),
    # _ops: its products that communicate are registered ops; dispatch: what is said once
    "tensor_parallel": frozenset({"distributed", "orthogonalize", "kernels", "dispatch", "_ops"}),
    "optimizers": frozenset(
        {"orthogonalize", "distributed", "kernels", "tensor_parallel", "dispatch"}
    ),
    "moe": frozenset({"kernels", "dispatch"}),
    "integrations": frozenset({"moe", "optimizers"}),
    "layers": frozenset({"moe"}),
    "explain": frozenset({"orthogonalize", "kernels", "dispatch"}),
}
FACADE = "__init__"  # the package's own __init__.py, which may import every layer

# Users of a layer that see its __init__ only, so that its modules can be rearranged.
PACKAGE_ONLY: frozenset[tuple[str, str]] = frozenset({("optimizers", "distributed")})

COLLECTIVES_ALLOWED = (
    "distributed.arena",
    "distributed.low_contention",
    "distributed.nccl_ce",
    "distributed.transport",
    "tensor_parallel",
)
# Each with all its variants, such as all_gather_into_tensor.
COLLECTIVES = re.compile(
    r"(?:all_gather|all_reduce|all_to_all|broadcast|gather|reduce|scatter|i?send|i?recv"
    r"|barrier|monitored_barrier|batch_isend_irecv|distribute_tensor)(?:_\w+)?|\*"
)
COMMUNICATION_MODULES = (
    "torch.distributed._functional_collectives",
    "torch.distributed._symmetric_memory",
    "torch.distributed.nn",
    "torch.ops._c10d_functional",
    "torch.ops.c10d",
    "torch.ops.c10d_functional",
    "torch.ops.symm_mem",
)
# Methods of DTensor and ProcessGroup that communicate, under names that nothing else uses.
COLLECTIVE_METHODS = frozenset(
    {
        "_allgather_base",
        "_reduce_scatter_base",
        "allgather",
        "allgather_coalesced",
        "allreduce",
        "allreduce_coalesced",
        "alltoall",
        "alltoall_base",
        "full_tensor",
        "redistribute",
    }
)

FOREIGN_ALLOWED = "integrations"
OWN_IMPORTS = frozenset({"torch", "triton"})


@dataclass(frozen=True)
class Import:
    """One imported module. `target` is dotted; for our own modules it starts after the package."""

    importer: str  # "optimizers.muon"; "__init__" for the package itself
    where: str  # "optimizers/muon.py:12"
    target: str
    own: bool
    lazy: bool  # runs only when a function is called


class Tree:
    """The modules of a package folder, by dotted name, parsed once."""

    def __init__(self, package: Path) -> None:
        self.package = package
        self.files: dict[str, Path] = {}
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            self.files[name or FACADE] = path
        self.sources = {name: parse(path) for name, path in self.files.items()}
        self.imports = [found for name in self.files for found in self._imports_of(name)]

    def knows(self, module: str) -> bool:
        return module in self.files or module == "_ops"

    def layers(self) -> set[str]:
        return {name.split(".")[0] for name in self.files} | {"_ops"}

    def where(self, module: str, node: ast.AST) -> str:
        return place(self.files[module], self.package, node.lineno)

    def _imports_of(self, module: str) -> Iterator[Import]:
        source = self.sources[module]
        deferred = in_functions(source)
        for node in ast.walk(source):
            if isinstance(node, ast.Import):
                targets = [(name.name, False) for name in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                targets = [(f"{node.module}.{name.name}", False) for name in node.names]
            elif isinstance(node, ast.ImportFrom):
                targets = [(target, True) for target in self._relative(module, node)]
            else:
                continue
            where = self.where(module, node)
            for target, own in targets:
                yield Import(module, where, target, own, lazy=node in deferred)

    def _relative(self, module: str, node: ast.ImportFrom) -> Iterator[str]:
        """The modules of ours that `from ..folder import a, b` names."""
        parts = [] if module == FACADE else module.split(".")
        is_package = self.files[module].name == "__init__.py"
        parents = parts if is_package else parts[:-1]
        climb = node.level - 1
        base = [*parents[: len(parents) - climb], *(node.module or "").split(".")]
        base_name = ".".join(part for part in base if part)
        for name in node.names:
            inner = f"{base_name}.{name.name}".lstrip(".")
            yield inner if self.knows(inner) else base_name or FACADE


def arrow_findings(tree: Tree) -> list[str]:
    """Imports against the arrows, and modules in no layer."""
    findings = []
    for layer in sorted(tree.layers() - set(ARROWS) - {FACADE}):
        findings.append(f"{layer}: belongs to no layer; add it to ARROWS and to the drawing")
    for found in tree.imports:
        source, target = found.importer.split(".")[0], found.target.split(".")[0]
        if not found.own or source == FACADE or target in (source, "reference"):
            continue
        allowed = ARROWS.get(source, frozenset())
        if target == FACADE:
            findings.append(f"{found.where}: {source} imports the package's __init__")
        elif not _covered(found.target, allowed):
            may = ", ".join(sorted(allowed | {"reference"}))
            findings.append(f"{found.where}: {source} imports {found.target}; it may import {may}")
        elif (source, target) in PACKAGE_ONLY and found.target != target:
            findings.append(
                f"{found.where}: {source} reaches into {found.target}; import from {target} itself"
            )
    return findings


def foreign_findings(tree: Tree) -> list[str]:
    """Imports of anything but the standard library, torch and triton.

    `integrations` may make them inside functions. Imports by a computed name are refused outside
    of it, because no test could read them.
    """
    findings = []
    for found in tree.imports:
        top = found.target.split(".")[0]
        known = found.own or top in OWN_IMPORTS or top in sys.stdlib_module_names
        if known:
            continue
        if found.importer.split(".")[0] != FOREIGN_ALLOWED:
            findings.append(f"{found.where}: imports {top}; only {FOREIGN_ALLOWED} may")
        elif not found.lazy:
            findings.append(f"{found.where}: imports {top} at module level; do it in a function")
    for module, source in tree.sources.items():
        if module.split(".")[0] == FOREIGN_ALLOWED:
            continue
        known_names = aliases(source)
        findings += [
            f"{tree.where(module, node)}: imports by a computed name"
            for node in ast.walk(source)
            if isinstance(node, ast.Call)
            and dotted(node.func, known_names) in ("importlib.import_module", "__import__")
        ]
    return findings


def collective_findings(tree: Tree) -> list[str]:
    """Communication outside of the two places that may communicate."""
    findings = []
    for module, source in tree.sources.items():
        if _covered(module, COLLECTIVES_ALLOWED):
            continue
        known = aliases(source)
        for node in ast.walk(source):
            names, method = [], None
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [f"{node.module}.{entry.name}" for entry in node.names]
            elif isinstance(node, ast.Import):
                names = [entry.name for entry in node.names]
            elif isinstance(node, ast.Attribute):
                names = [dotted(node, known) or ""]
                method = f".{node.attr}" if node.attr in COLLECTIVE_METHODS else None
            if name := next(filter(_is_collective, names), method):
                findings.append(f"{tree.where(module, node)}: {name} communicates")
    return findings


def _is_collective(name: str) -> bool:
    if _covered(name, COMMUNICATION_MODULES):
        return True
    inside = name.startswith("torch.distributed.")
    return inside and bool(COLLECTIVES.fullmatch(name.rsplit(".", 1)[1]))


def _covered(name: str, allowed: frozenset[str] | tuple[str, ...]) -> bool:
    return any(name == entry or name.startswith(f"{entry}.") for entry in allowed)


CHECKS = (arrow_findings, foreign_findings, collective_findings)

# Both forms of import, and every rule; where one is broken, a mark says so.
TREE = {
    "__init__.py": "from . import layers\nfrom .optimizers import Muon",
    "layers.py": "from .moe import sort\nfrom .kernels import push  #! layers imports kernels",
    "reference/nf4.py": """
import math
import torch
from .._ops import ops  #! reference imports _ops
from .. import Muon  #! imports the package's __init__
""",
    "kernels/__init__.py": "",
    "kernels/communication.py": "from .._ops import ops\nfrom ..reference import nf4\npush = 1",
    "kernels/sum.py": """
import kernels  #! imports kernels; only integrations
import triton
from ..optimizers.muon import Muon  #! imports optimizers.muon
def launch():
    from . import communication
    from .. import moe  #! kernels imports moe
""",
    "distributed/__init__.py": "from .transport import gather",
    "distributed/transport.py": """
import torch.distributed as dist
from ..kernels.communication import push
from ..kernels import sum  #! distributed imports kernels.sum
def gather(x):
    dist.all_gather_into_tensor(x, x)
    return x.full_tensor()
""",
    "tensor_parallel/__init__.py": """
from torch.distributed import all_reduce
from ..distributed.transport import gather
""",
    "optimizers/__init__.py": "from .muon import Muon",
    "optimizers/muon.py": """
import torch
from ..distributed import gather
from .. import kernels
from ..distributed.transport import gather  #! reaches into
class Muon(torch.optim.Optimizer):
    def step(self):
        return torch.distributed.is_initialized(), torch.distributed.get_rank()
    def whole(self, x):
        return x.redistribute()  #! .redistribute
""",
    "moe/__init__.py": "from ..kernels import sum as s",
    "moe/sort.py": """
import optimizer.moe  #! imports optimizer; only integrations
from importlib import import_module as load
load('a')  #! computed
__import__('numpy')  #! computed
def f():
    from einops import rearrange  #! imports einops; only integrations
""",
    "moe/talk.py": """
import torch
import torch.distributed as d
from torch.distributed import all_to_all_single as a  #! all_to_all_single communicates
from torch.distributed import *  #! communicates
import torch.distributed.nn  #! communicates
d.send(x)  #! send communicates
torch.ops._c10d_functional.wait_tensor  #! communicates
d.new_group([0])
""",
    "integrations/adapters/peft.py": """
import importlib
from ...kernels import push  #! integrations imports kernels
from peft import LoraConfig  #! imports peft at module level
def attach():
    import peft
    return importlib.import_module('x')
""",
    "utils/__init__.py": "",
}


@pytest.fixture(scope="module")
def package() -> Tree:
    return Tree(PACKAGE)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_package_follows_the_rule(check, package) -> None:
    assert package.files, f"no Python file in {PACKAGE}"
    assert_none(check(package))


def test_rules_find_what_breaks_them_and_nothing_else(tmp_path: Path) -> None:
    write_files(tmp_path / "optimizer", TREE)
    tree = Tree(tmp_path / "optimizer")
    findings = [finding for check in CHECKS for finding in check(tree)]
    assert_finds_what_is_marked(findings, TREE, utils="belongs to no layer")


# Folders of scripts, each of which is on the path of its own, and of the package.
FOLDERS = ("benchmarks", "examples", "tools", "torch-ext")


def missing_name_findings(folder: Path) -> list[str]:
    """Imports of a folder's own modules and names that do not exist, those inside functions too:
    what only a GPU's path imports would be missed there alone.
    """
    found = []
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(parse(path)):
            if not isinstance(node, ast.ImportFrom):
                continue
            start = path.parents[node.level - 1] if node.level else folder
            target = start.joinpath(*(node.module or "").split("."))
            first = start / (node.module or "").split(".")[0]
            if not node.level and not (first.is_dir() or first.with_suffix(".py").is_file()):
                continue  # of a library
            if target.name == "_ops":  # generated
                continue
            for alias in node.names:
                if not names(target, alias.name):
                    line = place(path, folder, node.lineno)
                    found.append(f"{line}: no {alias.name} in {node.module or '.'}")
    return found


def names(module: Path, name: str) -> bool:
    """Whether a module, named without a suffix, has a name at its top, or such a submodule."""
    if (module / f"{name}.py").is_file() or (module / name).is_dir():
        return True
    file = module / "__init__.py" if module.is_dir() else module.with_suffix(".py")
    body = list(parse(file).body) if file.is_file() else []
    defined = {getattr(node, "name", None) for node in body}
    for node in body:
        defined |= {
            part.id if isinstance(part, ast.Name) else (part.asname or part.name).split(".")[0]
            for part in ast.walk(node)
            if (isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store))
            or (isinstance(part, ast.alias) and part.name != "*")
        }
    return name in defined


@pytest.mark.parametrize("folder", FOLDERS)
def test_modules_import_what_exists(folder: str) -> None:
    assert_none(missing_name_findings(ROOT / folder))


def test_an_import_of_nothing_is_found(tmp_path: Path) -> None:
    files = {
        "run.py": "from rows import line\nfrom torch import nn\n",
        "rows.py": "import os\n\ndef line():\n    from deep.cases import CASES, MORE\n",
        "deep/__init__.py": "",
        "deep/cases.py": "from ..rows import os, rounds\nfrom . import gone\nCASES = 1\n",
    }
    write_files(tmp_path, files)
    assert missing_name_findings(tmp_path) == [
        "deep/cases.py:1: no rounds in rows",
        "deep/cases.py:2: no gone in .",
        "rows.py:4: no MORE in deep.cases",
    ]


LIMIT = tool("sizes").FOLDER_LIMIT


def sizes(root: Path) -> subprocess.CompletedProcess[str]:
    return run_command(sys.executable, ROOT / "tools" / "sizes.py", "--root", root)


def function(lines: int, decorator: str = "") -> str:
    """A function of so many lines, its decorator included."""
    head = [decorator] if decorator else []
    return "\n".join([*head, "def f():", *["    x = 1"] * (lines - 1 - len(head))])


def test_project_keeps_the_limits() -> None:
    result = sizes(ROOT)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("tools/a.py", function(100), None),
        ("tools/a.py", function(101), "tools/a.py:1 f: 101 lines, limit 100"),
        ("tools/a.py", function(101, "@other"), "101 lines, limit 100"),
        ("tools/a.py", function(120, "@triton.jit"), None),
        ("tools/a.py", function(121, "@triton.jit"), "121 lines, limit 120"),
        ("tools/a.py", function(121, "@jit(debug=True)"), "121 lines, limit 120"),
        ("kernels-src/a.cu", "//\n" * 800, None),
        ("kernels-src/a.cu", "//\n" * 801, "kernels-src/a.cu: 801 lines, limit 800"),
        ("torch-ext/a/b.py", "x = 1\n" * 801, "torch-ext/a/b.py: 801 lines, limit 800"),
    ],
)
def test_limits(tmp_path: Path, name: str, text: str, complaint: str | None) -> None:
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_text(text)
    result = sizes(tmp_path)
    assert result.returncode == (0 if complaint is None else 1)
    assert (complaint or "") in result.stderr


def test_files_side_by_side_in_the_package_are_limited(tmp_path: Path) -> None:
    folder = tmp_path / "torch-ext/optimizer/kernels"
    elsewhere = tmp_path / "tests"
    for parent in (folder, folder / "quant", elsewhere):
        parent.mkdir(parents=True, exist_ok=True)
        for number in range(LIMIT):
            (parent / f"a{number}.py").write_text("")
    (folder / "tiles.json").write_text("{}")
    assert sizes(tmp_path).returncode == 0
    (elsewhere / "one_more.py").write_text("")
    assert sizes(tmp_path).returncode == 0
    (folder / "one_more.py").write_text("")
    complaint = f"torch-ext/optimizer/kernels: {LIMIT + 1} files, limit {LIMIT}\n"
    assert sizes(tmp_path).stderr == f"TOO LARGE: {complaint}"
