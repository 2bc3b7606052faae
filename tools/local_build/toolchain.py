"""Which compilers and which torch a build uses."""

from __future__ import annotations

import ctypes
import importlib.metadata
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from . import BuildError


@dataclass(frozen=True)
class Torch:
    """An installed torch, found without importing it (an import costs seconds).

    Attributes:
        cuda: CUDA version it is built with, such as ``"13.0"``; None for a build without CUDA.
    """

    version: str
    root: Path
    cuda: str | None

    @property
    def include(self) -> Path:
        """Headers."""
        return self.root / "include"

    @property
    def lib(self) -> Path:
        """Shared libraries."""
        return self.root / "lib"

    def loads(self, toolkit: str) -> bool:
        """Whether `get_kernel` gives this torch a variant that was built with CUDA `toolkit`.

        It takes variants of torch's own major version that are not newer than torch's CUDA. A torch
        without CUDA takes none: there the variant is for another machine, and nothing is ruled out.
        """
        if self.cuda is None:
            return True
        (major, minor), (own_major, own_minor) = _numbers(toolkit), _numbers(self.cuda)
        return major == own_major and minor <= own_minor


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


@dataclass(frozen=True)
class Default:
    """The backend to build where none is named, and why it is that one."""

    backend: str
    reason: str


def find_toolchain(backend: str, cuda_version: str | None) -> Toolchain:
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
    torch = find_torch()
    return Toolchain(
        cxx=cxx,
        cxx_version=first_line.stdout.splitlines()[0],
        torch=torch,
        python_include=python_include,
        cuda=find_cuda(cuda_version, torch) if backend == "cuda" else None,
    )


def find_torch() -> Torch:
    """The torch of this interpreter."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise BuildError("torch is not installed for this Python: run `make setup`")
    # Without symbolic links: compilers write the folder that a link leads to into `__FILE__`.
    root = Path(spec.origin).resolve().parent
    return Torch(version=importlib.metadata.version("torch"), root=root, cuda=cuda_version_of(root))


def cuda_version_of(root: Path) -> str | None:
    """``torch.version.cuda`` of the torch in folder `root`."""
    return runpy.run_path(str(root / "version.py"))["cuda"]


def find_cuda(version: str | None, torch: Torch) -> Cuda:
    """The first toolkit that fits, of $CUDA_HOME, the nvcc on PATH and /usr/local/cuda.

    Args:
        version: The version it must have, such as ``"13.0"``, whatever torch is installed; None for
            one whose variant `torch` can load.
        torch: The installed torch.

    Raises:
        BuildError: Without nvcc or the runtime library, or when no toolkit has a fitting version.
    """
    candidates = _cuda_homes()
    misfits = []
    for candidate in candidates:
        if not (candidate / "bin" / "nvcc").is_file():
            continue
        cuda = Cuda(home=candidate, version=_release(candidate / "bin" / "nvcc"))
        if misfit := _misfit(cuda, version, torch):
            misfits.append(misfit)
        elif (cuda.home / "lib64" / cuda.runtime).exists():
            return cuda
        else:
            raise BuildError(
                f"{cuda.home / 'lib64' / cuda.runtime} is missing: install the CUDA runtime "
                f"(Debian: cuda-cudart-dev-{cuda.version.replace('.', '-')})"
            )
    if misfits:
        raise BuildError("\n".join(dict.fromkeys(misfits)))
    raise BuildError(
        f"nvcc not found (looked for bin/nvcc in {', '.join(map(str, candidates))}). The CUDA "
        "variant needs a CUDA toolkit with nvcc and the runtime headers (Debian packages "
        "cuda-nvcc-13-0 and cuda-cudart-dev-13-0, or NVIDIA's installer). Set CUDA_HOME to its "
        "root, or build the CPU variant: make build BACKEND=cpu"
    )


def _release(nvcc: Path) -> str:
    text = subprocess.run(
        [str(nvcc), "--version"], capture_output=True, text=True, check=True
    ).stdout
    match = re.search(r"release (\d+\.\d+)", text)
    if match is None:
        raise BuildError(f"cannot read the version of {nvcc} from: {text!r}")
    return match.group(1)


def _misfit(cuda: Cuda, version: str | None, torch: Torch) -> str | None:
    """Why this toolkit is not the one to use, None if it may be."""
    if version is not None:
        if version == cuda.version:
            return None
        return (
            f"--cuda-version {version} but {cuda.nvcc} is {cuda.version}; set CUDA_HOME to the "
            "other toolkit or drop --cuda-version"
        )
    if torch.loads(cuda.version):
        return None
    return (
        f"{cuda.nvcc} is CUDA {cuda.version}, whose variant the installed torch {torch.version} "
        f"(CUDA {torch.cuda}) cannot load: it loads those of CUDA {_numbers(torch.cuda)[0]}.0 to "
        f"{torch.cuda}. Set CUDA_HOME to such a toolkit, install a torch for CUDA {cuda.version}, "
        "build the CPU variant (make build BACKEND=cpu), or, for another machine, run "
        f"tools/build_local.py --backend cuda --cuda-version {cuda.version}"
    )


def _numbers(version: str) -> tuple[int, int]:
    major, minor = version.split(".")[:2]
    return int(major), int(minor)


def _cuda_homes() -> list[Path]:
    homes = [Path(os.environ["CUDA_HOME"])] if os.environ.get("CUDA_HOME") else []
    if nvcc := shutil.which("nvcc"):
        # The nvcc on PATH may be a wrapper script elsewhere, so nvcc itself says where its root is.
        dryrun = subprocess.run(
            [nvcc, "--dryrun", "-E", "-x", "cu", os.devnull], capture_output=True, text=True
        )
        homes += [Path(top).resolve() for top in re.findall(r"TOP=(.+)", dryrun.stderr)]
    return [*homes, Path("/usr/local/cuda")]


def default_backend(cuda_version: str | None) -> Default:
    """cuda where torch has CUDA, there is a device and a toolkit fits, else cpu."""
    torch = find_torch()
    if torch.cuda is None:
        return Default("cpu", f"torch {torch.version} is built without CUDA")
    if cuda_device_count() == 0:
        return Default("cpu", "there is no CUDA device")
    try:
        cuda = find_cuda(cuda_version, torch)
    except BuildError as error:
        return Default("cpu", str(error))
    return Default(
        "cuda", f"a CUDA device, torch for CUDA {torch.cuda}, {cuda.nvcc} {cuda.version}"
    )


def cuda_device_count() -> int:
    """Ask the driver; importing torch for this would take longer than a rebuild."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return 0
    return count.value
