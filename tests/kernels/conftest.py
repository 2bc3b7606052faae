"""Fixtures that reach an op of one path directly."""

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ..conftest import ROOT, module_fixture

kernels = module_fixture("kernels")
ops = module_fixture("_ops", "ops")
moe = module_fixture("moe")
push = module_fixture("kernels.communication.push", "push")
signals = module_fixture("kernels.communication.signals")


@pytest.fixture(scope="session")
def nf4_op(submodule, ops):
    """`nf4_op(path)` is the op of one path."""
    submodule("kernels.quant.dequant_triton")
    return lambda path: getattr(ops, "nf4_dequant" + f"_{path}" * (path != "compiled"))


@pytest.fixture(scope="session")
def run_nf4(nf4_op):
    """`run_nf4(path, arguments, ids, dtype)` calls the op of one path."""

    def call(path: str, arguments: dict, ids: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        return nf4_op(path)(active_experts=ids, dtype=dtype, **arguments)

    return call


@pytest.fixture(scope="session")
def host_build(tmp_path_factory) -> Callable[[str], ctypes.CDLL]:
    """`host_build("chain_probe")`: that .cpp of this folder, which includes headers of kernels."""

    def build(name: str) -> ctypes.CDLL:
        compiler = shutil.which("g++")
        assert compiler, "the host build of the kernels' arithmetic needs g++"
        library = tmp_path_factory.mktemp("probe") / f"{name}.so"
        command = [compiler, "-std=c++17", "-O2", "-Wall", "-shared", "-fPIC"]
        command += [f"-I{ROOT / 'kernels-src'}", f"-isystem{Path(torch.__file__).parent}/include"]
        command += [str(Path(__file__).with_name(f"{name}.cpp"))]
        subprocess.run([*command, "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))

    return build
