"""The package keeps the Hub's rules. No torch, no build."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import tomllib

from .static import hub_rules as rules
from .static.project import PACKAGE, ROOT, committed_files, project_files, report

pytestmark = pytest.mark.static

PACKAGE_CHECKS = (
    rules.facade_findings,
    rules.nested_name_findings,
    rules.op_prefix_findings,
    rules.import_time_findings,
    rules.syntax_findings,
)

GOOD = {
    "__init__.py": (
        '"""The package."""\nfrom . import layers\nfrom .muon import Muon as Muon\n'
        '__all__ = ["Muon", "layers"]\n'
    ),
    "layers.py": (
        '"""Layers."""\nimport torch\nfrom torch import nn\n'
        "class Gated(nn.Module):\n"
        '    """A gated MLP."""\n'
        "    has_backward: bool = True\n"
        "    can_torch_compile = True\n"
        "    weight: torch.Tensor\n"
        "    def forward(self, x):\n        return x\n"
    ),
    "muon.py": (
        "from __future__ import annotations\n"
        "import torch\nfrom torch.library import triton_op\n"
        "from ._ops import add_op_namespace_prefix, ops\n"
        "Muon = torch.optim.Optimizer\n"
        '@torch.library.custom_op(add_op_namespace_prefix("sum"), mutates_args=())\n'
        "def sum_op(x: torch.Tensor) -> torch.Tensor:\n    return x\n"
        '@torch.library.register_fake(add_op_namespace_prefix("sum"))\n'
        "def sum_fake(x):\n    return torch.cuda.current_device()\n"
        '@triton_op(add_op_namespace_prefix("cat"), mutates_args=(), schema="(Tensor[] x) -> ()")\n'
        "def cat(x: list[torch.Tensor]) -> None:\n    return x\n"
        'torch.library.register_autograd(add_op_namespace_prefix("sum"), print)\n'
    ),
}


def build(folder: Path, changes: dict[str, str]) -> Path:
    package = folder / "optimizer"
    for name, text in {**GOOD, **changes}.items():
        path = package / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return package


@pytest.mark.parametrize("check", PACKAGE_CHECKS, ids=lambda check: check.__name__)
def test_package_keeps_the_rule(check) -> None:
    findings = check(PACKAGE)
    assert not findings, report(findings)


@pytest.mark.parametrize("check", PACKAGE_CHECKS, ids=lambda check: check.__name__)
def test_good_package_has_no_findings(tmp_path: Path, check) -> None:
    findings = check(build(tmp_path, {}))
    assert not findings, report(findings)


OPS = "from ._ops import add_op_namespace_prefix\nimport torch\nfrom torch import library as lib\n"
DEF = "def f(x):\n    return x\n"
NAMES = "from .muon import Muon\n"


BREAKS = [
    (rules.facade_findings, "__init__.py", NAMES, "no literal __all__"),
    (rules.facade_findings, "__init__.py", NAMES + "__all__ = list('ab')\n", "literal list"),
    (rules.facade_findings, "__init__.py", NAMES + "__all__ = ['Muon', 1]\n", "literal list"),
    (rules.facade_findings, "__init__.py", NAMES + "__all__ = ['Muon', 'Muon']\n", "once"),
    (rules.facade_findings, "__init__.py", NAMES + "__all__ = ['Adam']\n", "no import binds"),
    (rules.facade_findings, "__init__.py", NAMES + "__all__ = ['Muon']\n", "must list layers"),
    (
        rules.facade_findings,
        "__init__.py",
        NAMES + "x = 1\n__all__ = ['Muon']\n",
        "only imports",
    ),
    (
        rules.facade_findings,
        "__init__.py",
        "from .muon import Muon as _m\n__all__ = ['_m']\n",
        "private name",
    ),
    (rules.nested_name_findings, "optimizer.py", "", "layout check"),
    (rules.nested_name_findings, "optimizer/__init__.py", "", "layout check"),
    (rules.op_prefix_findings, "a.py", OPS + "@lib.custom_op('optimizer::f')\n" + DEF, "begin"),
    (rules.op_prefix_findings, "a.py", OPS + "@lib.triton_op(NAME)\n" + DEF, "a.py:4"),
    (
        rules.op_prefix_findings,
        "a.py",
        OPS + "@lib.custom_op(add_op_namespace_prefix(NAME))\n" + DEF,
        "must begin with add_op_namespace_prefix",
    ),
    (
        rules.op_prefix_findings,
        "a.py",
        OPS + "@lib.custom_op(name=add_op_namespace_prefix('f'))\n" + DEF,
        "must begin with add_op_namespace_prefix",
    ),
    (rules.op_prefix_findings, "a.py", OPS + "@f.register_fake\n" + DEF, "decorator must"),
    (rules.op_prefix_findings, "a.py", OPS + "lib.register_fake(NAME, f)\n", "call must begin"),
    (
        rules.op_prefix_findings,
        "a.py",
        "try:\n    from ._ops import ops\nexcept ImportError:\n    ops = None\n",
        "without try",
    ),
    (
        rules.op_prefix_findings,
        "a.py",
        "from ._ops import add_op_namespace_prefix as prefix\n",
        "must keep its name",
    ),
    (
        rules.op_prefix_findings,
        "a.py",
        "def add_op_namespace_prefix(name):\n    return name\n",
        "do not define it",
    ),
    (rules.op_prefix_findings, "a.py", "add_op_namespace_prefix = str\n", "do not bind it"),
    (
        rules.op_prefix_findings,
        "a.py",
        "from __future__ import annotations\n"
        + OPS
        + "@lib.custom_op(add_op_namespace_prefix('f'), mutates_args=())\n"
        + "def f(x: list[int]) -> None: ...\n",
        "pass schema=",
    ),
    (
        rules.import_time_findings,
        "a.py",
        "import torch\nFAST = torch.cuda.is_available()\n",
        "a.py:2: calls torch.cuda.is_available",
    ),
    (
        rules.import_time_findings,
        "a.py",
        "from torch.cuda import get_device_capability as g\ndef f(x=g()): ...\n",
        "calls torch.cuda.get_device_capability",
    ),
    (
        rules.import_time_findings,
        "a.py",
        "import torch\nclass A:\n    n = [torch.accelerator.device_count()]\n",
        "a.py:3: calls torch.accelerator",
    ),
    (
        rules.import_time_findings,
        "a_triton.py",
        "import triton\n@triton.autotune(configs=[1, 2], key=[])\n" + DEF,
        "autotunes at run time",
    ),
    (
        rules.import_time_findings,
        "a_triton.py",
        "import triton\ndef g():\n    return triton.autotune(CONFIGS, [])\n",
        "autotunes at run time",
    ),
    (rules.syntax_findings, "a.py", "try: ...\nexcept* ValueError: ...\n", "a.py:"),
    (rules.syntax_findings, "a.py", "def first[T](x: T) -> T: ...\n", "a.py:"),
]


@pytest.mark.parametrize(("check", "file", "text", "expected"), BREAKS)
def test_package_rule_can_fail(tmp_path: Path, check, file: str, text: str, expected: str) -> None:
    findings = check(build(tmp_path, {file: text}))
    assert any(expected in finding for finding in findings), report(findings)


def test_single_autotune_config_is_allowed(tmp_path: Path) -> None:
    text = "import triton\n@triton.autotune(configs=[1], key=[])\n" + DEF
    assert not rules.import_time_findings(build(tmp_path, {"a_triton.py": text}))


def test_layers_are_pure() -> None:
    path = PACKAGE / "layers.py"
    findings = rules.layer_findings(path) if path.is_file() else []
    assert not findings, report(findings)


def test_good_layers_have_no_findings(tmp_path: Path) -> None:
    findings = rules.layer_findings(build(tmp_path, {}) / "layers.py")
    assert not findings, report(findings)


FORWARD = "    def forward(self, x):\n        return x\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("class A(nn.Module):\n    def __init__(self): ...\n" + FORWARD, "A.__init__"),
        ("class A(nn.Module):\n    def helper(self): ...\n" + FORWARD, "A.helper"),
        ("class A(nn.Module):\n    scale = 2\n" + FORWARD, "A sets scale"),
        ("class A(nn.Module):\n    scale: int = 2\n" + FORWARD, "A sets scale"),
        ("class A(nn.Module):\n    print()\n" + FORWARD, "runs code"),
        ("class A(nn.Module):\n    has_backward = True\n", "A has no forward"),
        ("class A:\n" + FORWARD, "must derive from nn.Module"),
        ("CACHE = {}\n", "only layer classes"),
        ("def helper(x):\n    return x\n", "only layer classes"),
    ],
)
def test_layer_rule_can_fail(tmp_path: Path, text: str, expected: str) -> None:
    path = tmp_path / "layers.py"
    path.write_text("from torch import nn\n" + text)
    findings = rules.layer_findings(path)
    assert any(expected in finding for finding in findings), report(findings)


def test_no_generated_file_is_committed() -> None:
    findings = rules.generated_file_findings(committed_files() or [])
    assert not findings, report(findings)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("setup.py", True),
        ("cmake/kernel.cmake", True),
        ("build/torch-stable-abi211-cpu-x86_64-linux/metadata.json", True),
        ("metadata-cuda.json", True),
        ("torch-ext/registration.h", True),
        ("torch-ext/optimizer/_ops.py", True),
        ("tools/setup.py", False),
        ("build.toml", False),
        ("torch-ext/optimizer/kernels/quant/nf4_dequant.py", False),
    ],
)
def test_generated_files_are_recognised(name: str, found: bool) -> None:
    assert bool(rules.generated_file_findings([Path(name)])) is found


def test_benchmarks_follow_the_hub_convention() -> None:
    findings = rules.benchmark_findings(ROOT / "benchmarks")
    assert not findings, report(findings)


BENCHMARK = "from kernels.benchmark import Benchmark\nclass Sum(Benchmark): ...\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import torch\n" + BENCHMARK, None),
        ("import torch\nclass Sum: ...\n", "no subclass"),
        (BENCHMARK + "from harness import timer\n", "sibling harness"),
        (BENCHMARK + "import benchmarks.run\n", "sibling benchmarks.run"),
        (BENCHMARK + "from .run import main\n", "sibling .run"),
        (BENCHMARK + "def f():\n    from run import main\n", "benchmark_sum.py:4"),
    ],
)
def test_benchmark_rule_can_fail(tmp_path: Path, text: str, expected: str | None) -> None:
    folder = tmp_path / "benchmarks"
    (folder / "harness").mkdir(parents=True)
    (folder / "run.py").touch()
    (folder / "benchmark_sum.py").write_text(text)
    findings = rules.benchmark_findings(folder)
    if expected is None:
        assert not findings, report(findings)
    else:
        assert any(expected in finding for finding in findings), report(findings)


def test_missing_benchmarks_are_a_finding(tmp_path: Path) -> None:
    assert rules.benchmark_findings(tmp_path)


def test_repo_id_is_stated_once() -> None:
    build_toml = tomllib.loads((ROOT / "build.toml").read_text())
    repo_id = build_toml["general"]["hub"]["repo-id"]
    findings = rules.repo_id_findings(ROOT, project_files(), repo_id)
    assert not findings, report(findings)


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
    assert bool(rules.repo_id_findings(tmp_path, [Path(name)], "team/pack")) is found


@pytest.mark.parametrize("with_git", [True, False])
def test_project_files_leave_out_what_was_made_here(tmp_path: Path, with_git: bool) -> None:
    if with_git:
        subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    for name in (".gitignore", "tools/a.py", "build/b.py", ".venv/c.py", "tools/__pycache__/d.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("build/\n.venv/\n__pycache__/\n")
    assert project_files(tmp_path) == [Path(".gitignore"), Path("tools/a.py")]
    assert committed_files(tmp_path) == ([] if with_git else None)
