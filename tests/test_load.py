"""Loading, as users do it: fresh interpreters that only have torch, `kernels` and the variant."""

import os
import shutil
import sys
import textwrap
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest

from ._checkout import ROOT, built_checkout, copy_from_root, run_command
from ._project import write_files

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
    done = run_command(sys.executable, "-c", textwrap.dedent(code), cwd="/", env=variables)
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


def test_import_touches_no_device_and_none_of_our_triton_modules(repo_id, local):
    """The Hub imports the package in a sandbox without a GPU; autotuning there would fail."""
    inspect = """
    import sys
    names = [name for name in sys.modules if name.startswith(opt.__name__)]
    print(len(names) > 1, torch.cuda.is_initialized(), [n for n in names if n.endswith("_triton")])
    """
    output = run(load(repo_id) + textwrap.dedent(inspect), **local)
    assert output.strip() == "True False []"


def test_two_builds_live_side_by_side(repo_id, local, tmp_path_factory):
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


CPU, CUDA = (f"torch-stable-abi211-{name}-x86_64-linux" for name in ("cpu", "cu130"))


@pytest.fixture(scope="module")
def no_variant() -> ModuleType:
    spec = spec_from_file_location("error_message", ROOT / "no_variant/error_message.py")
    module = sys.modules["error_message"] = module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    del sys.modules["error_message"]


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
    text = no_variant.error_message(
        no_variant.System(**usual | system), variants, Path("/checkout")
    )
    assert all(part in text for part in parts), text


@pytest.mark.parametrize("cuda", [None, "13.0"])
def test_the_client_ends_with_the_sentence(forks, repo_id: str, cuda, tmp_path: Path) -> None:
    """Of a checkout without a variant, or under a CUDA build of torch without a GPU."""
    copy_from_root(tmp_path, "metadata.json", "no_variant")
    if cuda:
        write_files(tmp_path, {f"build/{CPU}/metadata.json": "{}"})
    code = (
        f"import torch; torch.version.cuda = {cuda!r}\n"
        f"from kernels import get_kernel; get_kernel({repo_id!r}, version=1)"
    )
    local = {"LOCAL_KERNELS": f"{repo_id}={tmp_path}", "CUDA_VISIBLE_DEVICES": ""}
    done = forks.run("-c", code, environment=os.environ | local)
    assert done.returncode == 1
    if cuda:
        assert "ImportError: torch 2" in done.stderr
        assert 'there is no GPU: `get_kernel(..., backend="cpu")` takes' in done.stderr
    else:
        text = f"ImportError: nothing is built for the CPU: run `make build` in {tmp_path}"
        assert text in done.stderr


def test_another_version_than_that_of_the_checkout_is_refused(repo_id: str, local: dict[str, str]):
    """Which the client does not look at. The right one loads in the same process afterwards."""
    code = f"""
    from kernels import get_kernel
    try:
        get_kernel({repo_id!r}, version=2, backend="cpu")
    except ValueError as error:
        print(error)
    opt = get_kernel({repo_id!r}, version=1, backend="cpu")
    print(opt.__version__, opt.reference.__name__ == opt.__name__ + ".reference")
    """
    refused, loaded = run(code, **local).splitlines()
    assert refused.startswith(f"version=2 of {repo_id} was asked for, and {ROOT}, which LOCAL")
    assert "has version 1. Write version=1" in refused
    assert loaded == "1 True"


@pytest.mark.parametrize(
    "call",
    [
        'get_kernel({repo_id!r}, revision="main", backend="cpu")',
        "load_here()",
        'above["get_kernel"]("org/above", version=7)',
    ],
)
def test_nobody_asked_for_a_version_of_the_checkout(repo_id, local, call) -> None:
    """But for a revision, for its folder, or for a kernel of another repository that loads it."""
    code = f"""
    from pathlib import Path
    from kernels import get_kernel, get_local_kernel
    def load_here():
        return get_local_kernel(Path({str(ROOT)!r}), backend="cpu")
    above = {{"__name__": "kernels.load", "load_here": load_here}}
    exec("def get_kernel(repo_id, *, version): return load_here()", above)
    print({call.format(repo_id=repo_id)}.__version__)
    """
    assert run(code, **local) == "1\n"


@pytest.mark.parametrize("system", ["Darwin", "MINGW64_NT-10.0"])
def test_set_up_says_at_once_that_it_needs_linux(tmp_path: Path, system: str) -> None:
    """Before pip, which would end at a package that has no wheel there."""
    (tmp_path / "uname").write_text(f"#!/bin/sh\necho {system}\n")
    (tmp_path / "uname").chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for target, code in (("setup", 2), ("demo", 2), ("build", 2), ("help", 0)):
        done = run_command("make", "--dry-run", target, cwd=ROOT, env=environment)
        assert done.returncode == code, done.stderr
        said = f"optimizer has no compiled variant for {system}" in done.stderr
        assert said == (target != "help") and "pip" not in done.stdout
