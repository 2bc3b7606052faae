"""no_variant: what `get_kernel` says in a checkout that has nothing for this system."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from ._checkout import ROOT, tool

CPU, CUDA = (f"torch-stable-abi211-{name}-x86_64-linux" for name in ("cpu", "cu130"))


@pytest.fixture(scope="module")
def no_variant() -> ModuleType:
    spec = spec_from_file_location("remedy", ROOT / "no_variant/remedy.py")
    module = sys.modules["remedy"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["remedy"]


# (what differs from Linux with a CPU build of torch 2.13, variants, parts of the sentence)
SENTENCES = {
    "macos": ({"os": "Darwin"}, [], ["no compiled variant of optimizer for Darwin", "on Linux"]),
    "windows": ({"os": "Windows"}, [CPU], ["for Windows", "WSL 2"]),
    "free-threaded": ({"free_threaded": True}, [CPU], ["free-threaded Python is not supported"]),
    "no torch": ({"torch": None}, [CPU], ["`pip install torch`"]),
    "old torch": ({"torch": "2.9.1+cu128"}, [CPU], ["torch 2.9.1+cu128 is too old", "2.11"]),
    "unbuilt": ({}, [], ["nothing is built for the CPU", "`make build` in /checkout"]),
    "other machine": ({"machine": "aarch64"}, [CPU], ["nothing is built for the CPU"]),
    "only cuda": ({}, [CUDA], ["nothing is built for the CPU"]),
    "cuda torch, no gpu": (
        {"built_for": "cuda 13.0"},
        [CPU],
        ["is built for CUDA 13.0, and there is no GPU", 'backend="cpu")` takes the CPU variant'],
    ),
    "cuda torch, no gpu, unbuilt": (
        {"built_for": "cuda 13.0"},
        [],
        ['backend="cpu")`', "once `make build BACKEND=cpu` in /checkout has made it"],
    ),
    "gpu, cpu variant": (
        {"built_for": "cuda 13.0", "gpu": True},
        [CPU],
        ["and built is cpu: run `make build BACKEND=cuda`", "nvcc of CUDA 13.0 to 13.0"],
    ),
    "gpu, newer toolkit": (
        {"built_for": "cuda 12.6", "gpu": True},
        [CPU, CUDA],
        ["and built is cpu and cu130", "nvcc of CUDA 12.0 to 12.6"],
    ),
    "amd": ({"built_for": "hip 6.4"}, [CPU], ["no variant for hip 6.4", 'backend="cpu"']),
}


@pytest.mark.parametrize("name", SENTENCES)
def test_the_sentence_names_reason_and_remedy(no_variant, name: str) -> None:
    system, variants, parts = SENTENCES[name]
    usual = {"os": "Linux", "machine": "x86_64", "torch": "2.13.0"}
    text = no_variant.remedy(no_variant.System(**usual | system), variants, Path("/checkout"))
    assert all(part in text for part in parts), text


def load(forks, checkout: Path, repo_id: str, cuda: str | None) -> str:
    """What the client ends with under a torch that was built for `cuda`, without a GPU."""
    code = (
        f"import torch; torch.version.cuda = {cuda!r}\n"
        f"from kernels import get_kernel; get_kernel({repo_id!r}, version=1)"
    )
    local = {"LOCAL_KERNELS": f"{repo_id}={checkout}", "CUDA_VISIBLE_DEVICES": ""}
    done = forks.run("-c", code, environment=os.environ | local)
    assert done.returncode == 1
    return done.stderr


@pytest.fixture
def unbuilt(tmp_path: Path) -> Path:
    """What of a checkout the client reads before anything is built."""
    shutil.copyfile(ROOT / "metadata.json", tmp_path / "metadata.json")
    shutil.copytree(ROOT / "no_variant", tmp_path / "no_variant")
    return tmp_path


def test_the_client_is_told_to_build(forks, unbuilt: Path, repo_id: str) -> None:
    text = load(forks, unbuilt, repo_id, None)
    assert f"ImportError: nothing is built for the CPU: run `make build` in {unbuilt}" in text


def test_a_cuda_build_of_torch_without_a_gpu_is_told_of_the_backend(
    forks, unbuilt: Path, repo_id: str
) -> None:
    (unbuilt / "build" / CPU).mkdir(parents=True)
    (unbuilt / "build" / CPU / "metadata.json").write_text("{}")
    text = load(forks, unbuilt, repo_id, "13.0")
    assert "ImportError: torch 2" in text
    assert 'there is no GPU: `get_kernel(..., backend="cpu")` takes' in text


def test_a_version_is_not_looked_at_in_a_checkout(opt, repo_id: str) -> None:
    """The client's rule, which docs/troubleshooting.md tells; what was loaded says its version."""
    from kernels import get_kernel

    loaded = get_kernel(repo_id, version=2, backend="cpu")
    assert loaded.__version__ == opt.__version__ == "1"


@pytest.mark.parametrize("system", ["Darwin", "MINGW64_NT-10.0"])
def test_set_up_says_at_once_that_it_needs_linux(tmp_path: Path, system: str) -> None:
    """Before pip, which would end at a package that has no wheel there."""
    (tmp_path / "uname").write_text(f"#!/bin/sh\necho {system}\n")
    (tmp_path / "uname").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for target, code in (("setup", 2), ("demo", 2), ("build", 2), ("help", 0)):
        done = subprocess.run(
            ["make", "--dry-run", target],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
        )
        assert done.returncode == code, done.stderr
        said = f"optimizer has no compiled variant for {system}" in done.stderr
        assert said == (target != "help") and "pip" not in done.stdout


def test_the_build_tool_says_the_same(monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    build_local = tool("build_local")
    monkeypatch.setattr(sys, "platform", "darwin")
    assert build_local.main(["--backend", "cpu"]) == 1
    assert "error: there is no variant for darwin" in capsys.readouterr().err
