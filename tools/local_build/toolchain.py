"""Which compilers and which torch a build uses."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from .errors import BuildError


@dataclass(frozen=True)
class Torch:
    """An installed torch, found without importing it (an import costs seconds)."""

    version: str
    root: Path

    @property
    def include(self) -> Path:
        """Headers."""
        return self.root / "include"

    @property
    def lib(self) -> Path:
        """Shared libraries."""
        return self.root / "lib"


@dataclass(frozen=True)
class Cuda:
    """A CUDA toolkit.

    Attributes:
        version: Such as ``"13.0"``.
    """

    home: Path
    version: str

    @property
    def nvcc(self) -> Path:
        """The compiler."""
        return self.home / "bin" / "nvcc"

    @property
    def runtime(self) -> str:
        """File name of the runtime library that the variant needs; torch ships the same one."""
        return f"libcudart.so.{self.version.split('.')[0]}"


@dataclass(frozen=True)
class Toolchain:
    """Everything outside the checkout that decides what a compilation gives."""

    cxx: str
    cxx_version: str
    torch: Torch
    python_include: Path
    cuda: Cuda | None


def find_toolchain(backend: str, cuda_home: Path | None, cuda_version: str | None) -> Toolchain:
    """Find what `backend` needs.

    Raises:
        BuildError: Naming the missing part and how to get it.
    """
    cxx = shutil.which(os.environ.get("CXX", "g++"))
    if cxx is None:
        raise BuildError("no C++ compiler: install g++ (Debian: apt-get install g++) or set CXX")
    first_line = subprocess.run([cxx, "--version"], capture_output=True, text=True, check=True)
    python_include = Path(sysconfig.get_paths()["include"])
    if not (python_include / "Python.h").is_file():
        raise BuildError(
            f"{python_include / 'Python.h'} is missing: install the headers of this Python "
            "(Debian: apt-get install python3-dev)"
        )
    return Toolchain(
        cxx=cxx,
        cxx_version=first_line.stdout.splitlines()[0],
        torch=find_torch(),
        python_include=python_include,
        cuda=find_cuda(cuda_home, cuda_version) if backend == "cuda" else None,
    )


def find_torch() -> Torch:
    """The torch of this interpreter."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed for this Python: run `make setup`")
    return Torch(version=importlib.metadata.version("torch"), root=Path(spec.origin).parent)


def find_cuda(home: Path | None, version: str | None) -> Cuda:
    """The toolkit in `home`, else of $CUDA_HOME, else of the nvcc on PATH, else /usr/local/cuda.

    Args:
        home: Toolkit root; when given, no other place is tried.
        version: Expected version such as ``"13.0"``, None for whatever is found.

    Raises:
        BuildError: Without nvcc or the runtime library, or with another version than asked for.
    """
    candidates = [home] if home is not None else _default_cuda_homes()
    found = next((c for c in candidates if (c / "bin" / "nvcc").is_file()), None)
    if found is None:
        raise BuildError(
            f"nvcc not found (looked for bin/nvcc in {', '.join(map(str, candidates))}). The CUDA "
            "variant needs a CUDA toolkit with nvcc and the runtime headers (Debian packages "
            "cuda-nvcc-13-0 and cuda-cudart-dev-13-0, or NVIDIA's installer). Name its root with "
            "--cuda-home, or build `--backend cpu`."
        )
    text = subprocess.run(
        [str(found / "bin" / "nvcc"), "--version"], capture_output=True, text=True, check=True
    ).stdout
    match = re.search(r"release (\d+\.\d+)", text)
    if match is None:
        raise BuildError(f"cannot read the version of {found / 'bin' / 'nvcc'} from: {text!r}")
    if version is not None and version != match.group(1):
        raise BuildError(
            f"--cuda-version {version} but {found / 'bin' / 'nvcc'} is {match.group(1)}; name the "
            "other toolkit with --cuda-home or drop --cuda-version"
        )
    cuda = Cuda(home=found, version=match.group(1))
    if not (found / "lib64" / cuda.runtime).exists():
        raise BuildError(
            f"{found / 'lib64' / cuda.runtime} is missing: install the CUDA runtime "
            f"(Debian: cuda-cudart-dev-{cuda.version.replace('.', '-')})"
        )
    return cuda


def _default_cuda_homes() -> list[Path]:
    homes = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    if nvcc := shutil.which("nvcc"):
        # The nvcc on PATH may be a wrapper script elsewhere, so nvcc itself says where its root is.
        dryrun = subprocess.run(
            [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True
        )
        homes += [Path(top).resolve() for top in re.findall(r"TOP=(.+)", dryrun.stderr)]
    return [*homes, Path("/usr/local/cuda")]


def default_backend(cuda_home: Path | None) -> str:
    """``"cuda"`` where there are nvcc, a CUDA device and a CUDA build of torch, else ``"cpu"``."""
    if not (find_torch().lib / "libtorch_cuda.so").exists():
        return "cpu"
    try:
        find_cuda(cuda_home, None)
    except BuildError:
        return "cpu"
    return "cuda" if _cuda_device_count() > 0 else "cpu"


def _cuda_device_count() -> int:
    """Ask the driver; importing torch for this would take longer than a rebuild."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
