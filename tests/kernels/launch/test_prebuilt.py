"""Machine code that comes with the package: tools/prebuild.py makes it, a first call takes it."""

# ruff: noqa: F811 - tests take the imported fixtures as arguments
import importlib.util
import json
import shutil
from pathlib import Path

import pytest
import torch

from ..._checkout import ROOT, tool
from ...conftest import module_fixture
from .test_triton_compile import arguments, asked, kernel, order, run_compiling  # noqa: F401

GPU = torch.device("cuda", 0)  # whose driver no test here asks

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

compiler = module_fixture("kernels.launch.triton_compile")
prebuilt = module_fixture("kernels.launch.prebuilt")


@pytest.fixture
def archive(prebuilt, monkeypatch, tmp_path):
    """Where the package looks for an archive, which is not there yet."""
    path = tmp_path / "prebuilt_sm90.zip"
    monkeypatch.setattr(prebuilt, "ARCHIVE", path)
    prebuilt._archive.cache_clear()
    yield path
    prebuilt._archive.cache_clear()


@pytest.fixture
def found(compiler, kernel):
    """What `asked` asks for."""
    return compiler.specialization(kernel, arguments(), {"BLOCK": 64})


@pytest.fixture
def came(compiler, prebuilt, archive, kernel, found):
    """The machine code that came for `asked(compiler, kernel, 7)`."""
    made = prebuilt.Compiled(b"code", "scaled_copy", 96, 5)
    archive.write_bytes(
        prebuilt.archive_of([(prebuilt.key_of(kernel, found, {"number": 7}), made)])
    )
    compiler._takes_prebuilt.cache_clear()
    yield made
    compiler._takes_prebuilt.cache_clear()


@pytest.mark.parametrize("capability", [(9, 0), (8, 0)])
def test_what_came_is_not_compiled(compiler, came, kernel, order, monkeypatch, capability) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    found = [asked(compiler, kernel, number, GPU) for number in (7, 7)]
    assert compiler.compiles() == (capability != compiler.CAPABILITY)
    found.append(asked(compiler, kernel, 8, GPU))
    assert compiler.compiles()
    compiler._turn.release()
    serves = capability == compiler.CAPABILITY
    threads = came.threads if serves else 64
    assert [one.loaded().threads for one in found] == [threads, threads, 64]
    assert order.found == ([8] if serves else [7, 8])
    assert found[0] is found[1]


def test_code_that_the_driver_refuses_is_compiled_instead(
    compiler, came, kernel, order, monkeypatch, caplog
) -> None:
    def in_memory(found, device):
        if found.code == came.code:
            raise RuntimeError("cuModuleLoadData failed with CUDA error 209")
        return 1

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: compiler.CAPABILITY)
    monkeypatch.setattr(compiler, "_in_memory", in_memory)
    refused = asked(compiler, kernel, 7, GPU)
    for _ in range(2):
        assert refused.loaded() == compiler.Loaded(1, 64, 7)
    assert order.found == [7] and caplog.text.count("is compiled instead") == 1


def test_code_of_other_sources_is_none(
    compiler, prebuilt, came, kernel, found, monkeypatch
) -> None:
    assert prebuilt.prebuilt(kernel, found, {"number": 7}) == came
    assert prebuilt.prebuilt(kernel, found, {"number": 8}) is None
    other = compiler.specialization(kernel, arguments(), {"BLOCK": 32})
    assert prebuilt.prebuilt(kernel, other, {"number": 7}) is None
    monkeypatch.setattr(prebuilt, "sources_digest", lambda: "other")
    assert prebuilt.prebuilt(kernel, found, {"number": 7}) is None


def test_numbers_that_are_compiled_in_are_sources(prebuilt) -> None:
    """Kernels read constants of their own modules and of those below."""
    package = prebuilt.ARCHIVE.parents[2]
    names = {path.relative_to(package).as_posix() for path in prebuilt.sources(package)}
    assert {"reference/glu.py", "reference/nf4.py"} < names
    assert {p.relative_to(package).as_posix() for p in package.rglob("*_triton.py")} < names


def test_without_an_archive_there_is_none(prebuilt, archive) -> None:
    assert not archive.exists() and prebuilt.prebuilt(None, None, {}) is None


def test_a_damaged_archive_is_said_and_compiled_instead(
    prebuilt, submodule, archive, came, kernel, found, caplog
) -> None:
    """Whatever is damaged, none of it becomes code, and no call fails."""
    whole, said = archive.read_bytes(), submodule("dispatch")
    flipped = [whole[:at] + bytes([whole[at] ^ 255]) + whole[at + 1 :] for at in range(len(whole))]
    outcomes = set()
    for content in (b"", whole[: len(whole) // 2], whole[100:], *flipped):
        archive.write_bytes(content)
        prebuilt._archive.cache_clear()
        said.say_once.cache_clear()
        caplog.clear()
        taken = prebuilt.prebuilt(kernel, found, {"number": 7})
        assert taken in (came, None)
        outcomes.add((taken is None, "is damaged" in caplog.text))
    assert outcomes == {(True, True), (True, False), (False, False)}, "names, and dates, too"
    said.say_once.cache_clear()


MADE = """
import sys
sys.path.insert(0, {tools!r})
import prebuild

prebuild.layers = lambda: [prebuild.Layer(prebuild.MODELS["OLMoE-1B-7B"], 16)]
prebuild.MEANS = (256,)
prebuild.TRITON = prebuild.triton.__version__
prebuild.BUILD = prebuild.Path({build!r})
sys.exit(prebuild.main([]))
"""
FIRST_CALL = """
import torch
from kernels import get_kernel

moe = get_kernel({repo_id!r}, version=1, trust_remote_code=True).moe
kind = dict(device="cuda", dtype=torch.bfloat16)
layer = moe.Experts(64, 2048, 1024, **kind)
layer.add_adapter(r=16, alpha=32, dtype=torch.bfloat16)
x = torch.randn(2048, 2048, **kind, requires_grad=True)
top = torch.topk(torch.rand(2048, 64, device="cuda"), 8, -1)
gates = top.values.bfloat16().requires_grad_()
layer(x, top.indices, gates).backward(torch.ones_like(x))
assert torch.isfinite(x.grad).all() and torch.isfinite(gates.grad).all()
"""


def test_a_layer_of_the_list(repo_id, device, tmp_path, prebuilt) -> None:
    """The archive is the same twice and has digests; on capability 9.0 a call compiles nothing."""
    source = prebuilt.ARCHIVE.parents[2]
    root = tmp_path / "root"
    variant = root / "build" / f"{source.name.partition('-stable')[0]}-stable-cu130"
    if device.type == "cuda":
        variant = root / "build" / source.name
    shutil.copytree(source, variant, ignore=shutil.ignore_patterns("__pycache__", "*.zip"))
    contents = []
    for _ in range(2):
        run_compiling("-c", MADE.format(tools=str(ROOT / "tools"), build=str(root / "build")))
        contents.append((variant / prebuilt.ARCHIVE.relative_to(source)).read_bytes())
    assert contents[0] == contents[1]
    assert str(ROOT).encode() not in contents[0]
    assert tool("publish").verify_digest(variant) == []
    assert json.loads((variant / "metadata.json").read_text())["digest"]["files"]
    if device.type == "cuda" and torch.cuda.get_device_capability() == prebuilt.CAPABILITY:
        cache = tmp_path / "cache"
        places = {"LOCAL_KERNELS": f"{repo_id}={root}", "TRITON_CACHE_DIR": str(cache)}
        run_compiling("-c", FIRST_CALL.format(repo_id=repo_id), **places)
        assert not cache.exists() or not list(cache.rglob("*.cubin"))


def test_a_layer_launches_what_is_compiled_for_it() -> None:
    """Dense, packed and frozen layers at loads between those of the tool."""
    script = Path(__file__).with_name("layers_of_the_list.py")
    run_compiling(str(script), str(ROOT / "tools"))


def test_another_checkouts_variant_is_refused(tmp_path) -> None:
    variant = tmp_path / "torch-cu130"
    variant.mkdir()
    with pytest.raises(SystemExit, match="is not as in this checkout; build torch-cu130 again"):
        tool("prebuild").check_sources(variant)
