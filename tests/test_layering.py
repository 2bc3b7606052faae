"""Who may import whom, as data, and the checks that read it off the source. No torch, no build."""

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from ._project import (
    PACKAGE,
    ROOT,
    aliases,
    assert_found,
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
    "distributed.nccl_ce",
    "distributed.symmetric",
    "distributed.transport",
    "tensor_parallel",
)
COLLECTIVES = frozenset(
    {
        "all_gather",
        "all_gather_coalesced",
        "all_gather_into_tensor",
        "all_gather_object",
        "all_reduce",
        "all_reduce_coalesced",
        "all_to_all",
        "all_to_all_single",
        "barrier",
        "batch_isend_irecv",
        "broadcast",
        "broadcast_object_list",
        "distribute_tensor",
        "gather",
        "gather_object",
        "irecv",
        "isend",
        "monitored_barrier",
        "recv",
        "recv_object_list",
        "reduce",
        "reduce_scatter",
        "reduce_scatter_tensor",
        "scatter",
        "scatter_object_list",
        "send",
        "send_object_list",
    }
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
TRITON_SUFFIX = "_triton"


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
        self.faults: list[str] = []  # imports that lead nowhere
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
        if climb > len(parents):
            self.faults.append(f"{self.where(module, node)}: climbs out of the package")
            return
        base = [*parents[: len(parents) - climb], *(node.module or "").split(".")]
        base_name = ".".join(part for part in base if part)
        if base_name and not self.knows(base_name):
            self.faults.append(f"{self.where(module, node)}: there is no module {base_name}")
            return
        for name in node.names:
            inner = f"{base_name}.{name.name}".lstrip(".")
            yield inner if self.knows(inner) else base_name or FACADE


def arrow_findings(tree: Tree) -> list[str]:
    """Imports against the arrows, modules in no layer, and relative imports that lead nowhere."""
    findings = list(tree.faults)
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


def absolute_findings(tree: Tree) -> list[str]:
    """The package's own name in an absolute import: it is loaded under another one."""
    name = tree.package.name
    return [
        f"{found.where}: absolute import of {found.target}; imports inside are relative"
        for found in tree.imports
        if not found.own and found.target.split(".")[0] == name
    ]


def foreign_findings(tree: Tree) -> list[str]:
    """Imports of anything but the standard library, torch and triton.

    `integrations` may make them inside functions. Imports by a computed name are refused outside
    of it, because no test could read them.
    """
    findings = []
    for found in tree.imports:
        top = found.target.split(".")[0]
        known = found.own or top in OWN_IMPORTS or top in sys.stdlib_module_names
        if known or top == tree.package.name:
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


def triton_findings(tree: Tree) -> list[str]:
    """Triton reached while the package is imported: CPU builds of torch come without it."""
    findings = []
    for found in tree.imports:
        if found.lazy or found.importer.endswith(TRITON_SUFFIX):
            continue
        if not found.own and found.target.split(".")[0] == "triton":
            findings.append(f"{found.where}: imports triton outside a function and a *_triton.py")
        elif found.own and found.target.endswith(TRITON_SUFFIX):
            findings.append(f"{found.where}: imports {found.target} outside a function")
    return findings


def collective_findings(tree: Tree) -> list[str]:
    """Communication outside of the two places that may communicate."""
    findings = []
    for module, source in tree.sources.items():
        if _covered(module, COLLECTIVES_ALLOWED):
            continue
        known = aliases(source)
        for node in ast.walk(source):
            name = None
            if isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [f"{node.module}.{entry.name}" for entry in node.names]
                name = next((entry for entry in names if _is_collective(entry)), None)
            elif isinstance(node, ast.Import):
                names = [entry.name for entry in node.names]
                name = next((entry for entry in names if _is_collective(entry)), None)
            elif isinstance(node, ast.Attribute):
                full = dotted(node, known)
                if full and _is_collective(full):
                    name = full
                elif node.attr in COLLECTIVE_METHODS:
                    name = f".{node.attr}"
            if name:
                findings.append(f"{tree.where(module, node)}: {name} communicates")
    return findings


def _is_collective(name: str) -> bool:
    if _covered(name, COMMUNICATION_MODULES):
        return True
    inside = name.startswith("torch.distributed.")
    return inside and name.rsplit(".", 1)[1] in COLLECTIVES | {"*"}


def _covered(name: str, allowed: frozenset[str] | tuple[str, ...]) -> bool:
    return any(name == entry or name.startswith(f"{entry}.") for entry in allowed)


ARROW, ABSOLUTE = arrow_findings, absolute_findings
FOREIGN, TRITON = foreign_findings, triton_findings
COLLECTIVE = collective_findings
CHECKS = (ARROW, ABSOLUTE, FOREIGN, TRITON, COLLECTIVE)

# A tree that breaks no rule: every layer, every allowed arrow, both forms of import.
GOOD = {
    "__init__.py": "from . import layers\nfrom .optimizers import Muon\nfrom .explain import why\n",
    "layers.py": "from .moe import sort\n",
    "explain.py": "from .orthogonalize import choose\nfrom . import kernels\nwhy = 1\n",
    "reference/__init__.py": "from .nf4 import decode\n",
    "reference/nf4.py": "import math\nimport torch\ndecode = 1\n",
    "kernels/__init__.py": "from .communication import push\n",
    "kernels/communication.py": "from .._ops import ops\nfrom ..reference import nf4\npush = 1\n",
    "kernels/sum_triton.py": "import triton.language as tl\nfrom .communication import push\n",
    "kernels/sum.py": "def launch():\n    import triton\n    from . import sum_triton\n",
    "orthogonalize/__init__.py": "from ..kernels import communication\nfrom .._ops import ops\n",
    "orthogonalize/choose.py": "from ..kernels import sum\nimport torch.distributed as dist\n",
    "distributed/__init__.py": "from .transport import gather\n",
    "distributed/transport.py": (
        "import torch.distributed as dist\n"
        "from ..kernels.communication import push\n"
        "from ..kernels import communication as again\n"
        "def gather(x):\n    dist.all_gather_into_tensor(x, x)\n    return x.full_tensor()\n"
    ),
    "tensor_parallel/__init__.py": (
        "from torch.distributed import all_reduce\n"
        "from ..distributed.transport import gather\nfrom .. import orthogonalize\n"
    ),
    "optimizers/__init__.py": "from .muon import Muon\n",
    "optimizers/muon.py": (
        "import torch\n"
        "from ..distributed import gather\nfrom .. import kernels\nfrom .. import tensor_parallel\n"
        "class Muon(torch.optim.Optimizer):\n"
        "    def step(self):\n"
        "        return torch.distributed.is_initialized(), torch.distributed.get_rank()\n"
    ),
    "moe/__init__.py": "from ..kernels import sum as s\n",
    "moe/sort.py": "",
    "integrations/__init__.py": "from ..optimizers import muon\nfrom .. import moe\n",
    "integrations/adapters/peft.py": (
        "import importlib\n"
        "def attach():\n    import peft\n    return importlib.import_module('x')\n"
    ),
}


def build(folder: Path, changes: dict[str, str]) -> Tree:
    write_files(folder / "optimizer", GOOD | changes)
    return Tree(folder / "optimizer")


@pytest.fixture(scope="module")
def package() -> Tree:
    return Tree(PACKAGE)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_package_follows_the_rule(check, package) -> None:
    assert package.files, f"no Python file in {PACKAGE}"
    assert_none(check(package))


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_good_tree_has_no_findings(tmp_path: Path, check) -> None:
    assert_none(check(build(tmp_path, {})))


FUNCTIONAL = "import torch.distributed._functional_collectives as f\n"
PEFT, OUR_MUON = "integrations/adapters/peft.py", "optimizers/muon.py"
BREAKS = [
    # arrows: upwards, sideways, in both forms, from inside a function
    (ARROW, "kernels/sum.py", "from ..optimizers import Muon\n", "kernels imports optimizers"),
    (ARROW, "kernels/sum.py", "from .. import optimizers\n", "kernels imports optimizers"),
    (ARROW, "kernels/sum.py", "from ..optimizers.muon import Muon\n", "optimizers.muon"),
    (ARROW, "kernels/sum.py", "def f():\n    from .. import moe\n", "kernels/sum.py:2"),
    (ARROW, "kernels/__init__.py", "from .. import orthogonalize\n", "imports orthogonalize"),
    (ARROW, "reference/nf4.py", "from .._ops import ops\n", "reference imports _ops"),
    (
        ARROW,
        "reference/nf4.py",
        "from ..kernels import communication\n",
        "reference imports kernels",
    ),
    (ARROW, "optimizers/muon.py", "from ..moe import sort\n", "optimizers imports moe"),
    (ARROW, "optimizers/muon.py", "from .._ops import ops\n", "optimizers imports _ops"),
    (ARROW, "moe/sort.py", "from ..optimizers import muon\n", "moe imports optimizers"),
    (ARROW, "moe/sort.py", "from ..integrations import peft\n", "imports integrations"),
    (ARROW, "distributed/transport.py", "from ..kernels import sum\n", "kernels.sum"),
    (ARROW, "distributed/transport.py", "from .. import kernels\n", "distributed imports"),
    (ARROW, "layers.py", "from .kernels import push\n", "layers imports kernels"),
    (ARROW, "explain.py", "from .optimizers import Muon\n", "explain imports optimizers"),
    (ARROW, PEFT, "from ...kernels import push\n", "integrations imports"),
    (ARROW, "moe/sort.py", "from .. import Muon\n", "imports the package's __init__"),
    (ARROW, "reference/nf4.py", "from .. import Muon\n", "imports the package's __init__"),
    (ARROW, "optimizers/muon.py", "from ..distributed.transport import gather\n", "reaches"),
    (ARROW, "optimizers/muon.py", "from ..distributed import transport\n", "reaches into"),
    (ARROW, "optimizers/muon.py", "from ..kernels.sums import f\n", "no module kernels.sums"),
    (ARROW, "optimizers/muon.py", "from ...other import f\n", "climbs out of the package"),
    (ARROW, "utils/__init__.py", "", "utils: belongs to no layer"),
    (ARROW, "helpers.py", "", "helpers: belongs to no layer"),
    # the package's own name
    (ABSOLUTE, "moe/sort.py", "import optimizer.moe\n", "absolute import"),
    (ABSOLUTE, "moe/sort.py", "from optimizer import Muon\n", "absolute"),
    # foreign libraries
    (FOREIGN, "moe/sort.py", "import numpy as np\n", "imports numpy; only integrations"),
    (FOREIGN, "moe/sort.py", "def f():\n    from einops import rearrange\n", "imports einops"),
    (FOREIGN, "kernels/sum.py", "import kernels\n", "imports kernels; only integrations"),
    (FOREIGN, "integrations/adapters/peft.py", "from peft import LoraConfig\n", "at module level"),
    (FOREIGN, "integrations/adapters/peft.py", "class A:\n    import peft\n", "at module level"),
    (FOREIGN, "moe/sort.py", "import importlib\nimportlib.import_module('a')\n", "computed"),
    (FOREIGN, "moe/sort.py", "from importlib import import_module as f\nf('a')\n", "computed"),
    (FOREIGN, "moe/sort.py", "__import__('numpy')\n", "computed"),
    # triton at import
    (TRITON, "kernels/sum.py", "import triton\n", "kernels/sum.py:1: imports triton"),
    (TRITON, "kernels/sum.py", "from triton import language\n", "imports triton"),
    (TRITON, "kernels/sum.py", "try:\n    import triton\nexcept ImportError: ...\n", ":2:"),
    (TRITON, "kernels/__init__.py", "from . import sum_triton\n", "imports kernels.sum_triton"),
    (TRITON, "kernels/sum.py", "from .sum_triton import launch\n", "kernels.sum_triton"),
    # collectives
    (COLLECTIVE, "moe/sort.py", "import torch\ntorch.distributed.all_reduce(x)\n", ":2:"),
    (COLLECTIVE, "moe/sort.py", "import torch.distributed as d\nd.send(x)\n", "send"),
    (COLLECTIVE, "moe/sort.py", "from torch import distributed as d\nd.barrier()\n", "barrier"),
    (COLLECTIVE, "moe/sort.py", "from torch.distributed import all_to_all_single as a\n", "a"),
    (COLLECTIVE, "moe/sort.py", "from torch.distributed import *\n", "communicates"),
    (COLLECTIVE, "distributed/__init__.py", "import torch.distributed.nn\n", "communicates"),
    (COLLECTIVE, OUR_MUON, "def f(x):\n    return x.full_tensor()\n", ".full_tensor"),
    (COLLECTIVE, "optimizers/muon.py", "def f(x):\n    x.redistribute()\n", ".redistribute"),
    (COLLECTIVE, "moe/sort.py", "import torch\ntorch.ops._c10d_functional.wait_tensor\n", "c10"),
    (COLLECTIVE, "moe/sort.py", FUNCTIONAL + "f.all_reduce(x)\n", "communicates"),
]


@pytest.mark.parametrize(("check", "file", "text", "expected"), BREAKS)
def test_rule_can_fail(tmp_path: Path, check, file: str, text: str, expected: str) -> None:
    findings = check(build(tmp_path, {file: text}))
    assert_found(expected, findings)
    layer = file.split("/")[0].split(".")[0]
    assert_none([finding for finding in findings if not finding.startswith(layer)])


# Folders of scripts, each of which is on the path of its own.
SCRIPTS = ("benchmarks", "examples", "tools")


def script_findings(folder: Path) -> list[str]:
    """Imports of a script's own modules and names that do not exist, those inside functions too."""
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


@pytest.mark.parametrize("folder", SCRIPTS)
def test_scripts_import_what_exists(folder: str) -> None:
    assert_none(script_findings(ROOT / folder))


def test_an_import_of_nothing_is_found(tmp_path: Path) -> None:
    files = {
        "run.py": "from rows import line\nfrom torch import nn\n",
        "rows.py": "import os\n\ndef line():\n    from deep.cases import CASES, MORE\n",
        "deep/__init__.py": "",
        "deep/cases.py": "from ..rows import os, rounds\nfrom . import gone\nCASES = 1\n",
    }
    write_files(tmp_path, files)
    assert script_findings(tmp_path) == [
        "deep/cases.py:1: no rounds in rows",
        "deep/cases.py:2: no gone in .",
        "rows.py:4: no MORE in deep.cases",
    ]
