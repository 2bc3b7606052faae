"""Loading, as users do it: fresh interpreters that only have torch, `kernels` and the variant."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from ._checkout import ROOT, built_checkout

USE = """
packed = torch.arange(64, dtype=torch.uint8)  # two experts of 4 x 16, packed two to a byte
absmax = torch.tensor([0.5, 2.0])
arguments = packed, absmax, torch.tensor([1, 0]), (4, 16), 64, torch.float32
expected = opt.reference.nf4.nf4_dequant(*arguments)
assert torch.equal(opt.nf4_dequant(*arguments), expected)
assert opt.orthogonalize(torch.randn(4, 8)).shape == (4, 8)
"""


def run(code: str, **environment: str | None) -> str:
    """Run `code` in a new interpreter outside the checkout; None removes a variable."""
    variables = {
        name: value
        for name, value in (os.environ | environment).items()
        if value is not None and name not in {"PYTHONPATH", "PYTHONWARNINGS"}
    }
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        cwd="/",
        env=variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def local(repo_id: str) -> dict[str, str]:
    """The environment of someone who develops the package."""
    return {"LOCAL_KERNELS": f"{repo_id}={ROOT}", "CUDA_VISIBLE_DEVICES": ""}


def load(repo_id: str, arguments: str = 'version=1, backend="cpu"') -> str:
    return (
        "import torch\n"
        "from kernels import get_kernel\n"
        f"opt = get_kernel({repo_id!r}, {arguments})\n"
    )


def default_backend_arguments() -> str:
    """README's arguments, or with the backend named where build/ lacks the one of this torch.

    A CUDA build of torch makes the client look for CUDA variants alone, GPU or not.
    """
    import torch

    arguments = "version=1, trust_remote_code=True"
    if torch.version.cuda is None or any((ROOT / "build").glob("torch*-cu*")):
        return arguments
    return arguments + ', backend="cpu"'


def test_loads_from_the_checkout_without_a_cuda_device(repo_id: str, local: dict[str, str]):
    output = run(load(repo_id) + USE + "print(opt.__name__)\nprint(*opt.__all__)\n", **local)
    name, public = output.splitlines()
    assert name.startswith("_optimizer_cpu_")
    assert {"Muon", "MuonAdamW", "nf4_dequant", "orthogonalize"} <= set(public.split())


@pytest.mark.artifacts
def test_loads_offline_from_the_hugging_face_cache(repo_id: str, tmp_path: Path):
    from huggingface_hub.file_download import repo_folder_name

    commit = "0123456789abcdef0123456789abcdef01234567"
    repository = tmp_path / "hub" / repo_folder_name(repo_id=repo_id, repo_type="kernel")
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "v1").write_text(commit)
    for variant in (ROOT / "build").glob("torch*"):
        shutil.copytree(variant, repository / "snapshots" / commit / "build" / variant.name)
    output = run(
        load(repo_id, default_backend_arguments()) + USE + "print(opt.__file__)\n",
        HF_HOME=str(tmp_path),
        HF_HUB_CACHE=None,
        KERNELS_CACHE=None,
        HF_HUB_OFFLINE="1",
        LOCAL_KERNELS=None,
    )
    assert Path(output.strip()).is_relative_to(repository / "snapshots" / commit / "build")


def test_an_unknown_version_is_refused_offline(repo_id: str, tmp_path: Path):
    code = f"""
    from kernels import get_kernel
    try:
        get_kernel({repo_id!r}, version=1, trust_remote_code=True)
    except ValueError as error:
        print(error)
    """
    output = run(code, HF_HOME=str(tmp_path), HF_HUB_OFFLINE="1", LOCAL_KERNELS=None)
    assert "not available in the local cache" in output


def test_works_without_triton_and_numpy(repo_id: str, local: dict[str, str]):
    """CPU builds of torch bring no Triton, and the package may import torch alone."""
    hide = """
    import importlib.machinery, sys
    absent = {"triton", "numpy", "dill", "safetensors", "bitsandbytes", "transformers", "peft"}
    find_spec = importlib.machinery.PathFinder.find_spec
    def find_other_spec(name, path=None, target=None):
        return None if name.partition(".")[0] in absent else find_spec(name, path, target)
    importlib.machinery.PathFinder.find_spec = find_other_spec
    """
    output = run(
        textwrap.dedent(hide) + load(repo_id) + USE + "print(absent & set(sys.modules))\n",
        **local,
        TRITON_INTERPRET=None,
    )
    assert output.strip() == "set()"


def test_import_touches_no_device_and_none_of_our_triton_modules(
    repo_id: str, local: dict[str, str]
):
    """The Hub imports the package in a sandbox without a GPU; autotuning there would fail."""
    inspect = """
    import sys
    names = [name for name in sys.modules if name.startswith(opt.__name__)]
    print(len(names) > 1, torch.cuda.is_initialized(), [n for n in names if n.endswith("_triton")])
    """
    output = run(load(repo_id) + textwrap.dedent(inspect), **local)
    assert output.strip() == "True False []"


def test_two_builds_live_side_by_side(
    repo_id: str, local: dict[str, str], tmp_path_factory: pytest.TempPathFactory
):
    other = built_checkout(tmp_path_factory.getbasetemp())
    code = f"""
    from pathlib import Path
    from kernels import get_local_kernel
    first = opt
    second = opt = get_local_kernel(Path({str(other)!r}), backend="cpu")
    assert first.__name__ != second.__name__ and first.Muon is not second.Muon
    """
    run(
        load(repo_id) + USE + textwrap.dedent(code) + USE + "opt = first\n" + USE,
        **local,
        PYTHONDONTWRITEBYTECODE="1",  # other tests compare the files of that build
    )
