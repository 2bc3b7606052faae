"""The package keeps the Hub's rules. No torch, no build."""

import subprocess
from pathlib import Path

import pytest
import tomllib

from .static import hub_rules as rules
from .static.project import (
    PACKAGE,
    ROOT,
    assert_found,
    assert_none,
    committed_files,
    project_files,
    write_files,
)

pytestmark = pytest.mark.static

FACADE, NESTED, PREFIX = rules.facade_findings, rules.nested_name_findings, rules.op_prefix_findings
IMPORT = rules.import_time_findings
PACKAGE_CHECKS = (FACADE, NESTED, PREFIX, IMPORT)

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
    write_files(folder / "optimizer", GOOD | changes)
    return folder / "optimizer"


@pytest.mark.parametrize("check", PACKAGE_CHECKS, ids=lambda check: check.__name__)
def test_package_keeps_the_rule(check) -> None:
    assert_none(check(PACKAGE))


@pytest.mark.parametrize("check", PACKAGE_CHECKS, ids=lambda check: check.__name__)
def test_good_package_has_no_findings(tmp_path: Path, check) -> None:
    assert_none(check(build(tmp_path, {})))


OPS = "from ._ops import add_op_namespace_prefix\nimport torch\nfrom torch import library as lib\n"
DEF = "def f(x):\n    return x\n"
BEGIN = "must begin with add_op_namespace_prefix"
TUNED = "import triton\n@triton.autotune(configs=[1, 2], key=[])\n" + DEF
TUNED_CALL = "import triton\ndef g():\n    return triton.autotune(CONFIGS, [])\n"
A = "a.py"

BREAKS = [
    (FACADE, "__init__.py", "x = 1\n__all__ = ['Muon']\n", "x = 1 does not belong here"),
    (FACADE, "layers.py", "CACHE = {}\n", "CACHE = {} does not belong here"),
    (NESTED, "optimizer.py", "", "layout check"),
    (NESTED, "optimizer/__init__.py", "", "layout check"),
    (PREFIX, A, OPS + "@lib.custom_op('optimizer::f')\n" + DEF, "begin"),
    (PREFIX, A, OPS + "@lib.triton_op(NAME)\n" + DEF, "a.py:4"),
    (PREFIX, A, OPS + "@lib.custom_op(add_op_namespace_prefix(NAME))\n" + DEF, BEGIN),
    (PREFIX, A, OPS + "@lib.custom_op(name=add_op_namespace_prefix('f'))\n" + DEF, BEGIN),
    (PREFIX, A, OPS + "@f.register_fake\n" + DEF, "decorator must"),
    (PREFIX, A, OPS + "lib.register_fake(NAME, f)\n", "call must begin"),
    (IMPORT, A, "import torch\nx = torch.cuda.is_available()\n", "a.py:2: calls torch.cuda.is_av"),
    (
        IMPORT,
        A,
        "from torch.cuda import device_count as g\ndef f(x=g()): ...\n",
        "torch.cuda.device",
    ),
    (
        IMPORT,
        A,
        "import torch\nclass B:\n    n = [torch.accelerator.x()]\n",
        "a.py:3: calls torch.a",
    ),
    (IMPORT, "a_triton.py", TUNED, "autotunes at run time"),
    (IMPORT, "a_triton.py", TUNED_CALL, "autotunes at run time"),
]


@pytest.mark.parametrize(("check", "file", "text", "expected"), BREAKS)
def test_package_rule_can_fail(tmp_path: Path, check, file: str, text: str, expected: str) -> None:
    assert_found(expected, check(build(tmp_path, {file: text})))


def test_single_autotune_config_is_allowed(tmp_path: Path) -> None:
    assert not IMPORT(build(tmp_path, {"a_triton.py": TUNED.replace("1, 2", "1")}))


def test_no_generated_file_is_committed() -> None:
    assert_none(rules.generated_file_findings(committed_files() or []))


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
    assert_none(rules.benchmark_findings(ROOT / "benchmarks"))


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
    assert_found(expected, findings) if expected else assert_none(findings)


def test_missing_benchmarks_are_a_finding(tmp_path: Path) -> None:
    assert rules.benchmark_findings(tmp_path)


def test_repo_id_is_stated_once() -> None:
    build_toml = tomllib.loads((ROOT / "build.toml").read_text())
    repo_id = build_toml["general"]["hub"]["repo-id"]
    assert_none(rules.repo_id_findings(ROOT, project_files(), repo_id))


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
    names = (".gitignore", "tools/a.py", "build/b.py", ".venv/c.py", "tools/__pycache__/d.pyc")
    write_files(tmp_path, dict.fromkeys(names, "build/\n.venv/\n__pycache__/\n"))
    assert project_files(tmp_path) == [Path(".gitignore"), Path("tools/a.py")]
    assert committed_files(tmp_path) == ([] if with_git else None)
