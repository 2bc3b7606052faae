"""Imports follow the arrows of the design. No torch, no build."""

import ast
from pathlib import Path

import pytest

from .static import layering
from .static.project import PACKAGE, ROOT, assert_found, assert_none, parse, place, write_files

pytestmark = pytest.mark.static

ARROW, ABSOLUTE = layering.arrow_findings, layering.absolute_findings
FOREIGN, TRITON = layering.foreign_findings, layering.triton_findings
COLLECTIVE = layering.collective_findings
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


def build(folder: Path, changes: dict[str, str]) -> layering.Tree:
    write_files(folder / "optimizer", GOOD | changes)
    return layering.Tree(folder / "optimizer")


@pytest.fixture(scope="module")
def package() -> layering.Tree:
    return layering.Tree(PACKAGE)


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
