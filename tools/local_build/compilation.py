"""Sources to objects, objects to one shared library.

An object is compiled again when the hash of its command line, the compiler and torch versions, its
source or any header that it included last time differs. The cache lives in ``build/.objects``:
the Hub's loader looks only at folders named like a variant.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shlex
import subprocess
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from . import BuildError
from .project import Component, Project
from .toolchain import Toolchain

# The binding's include. It gives the macros that expand a namespace before pasting it, and the
# module init function that lets `from . import <library>` load it.
REGISTRATION_H = """\
#pragma once
#include <Python.h>

#define STABLE_TORCH_LIBRARY_EXPAND(NAME, MODULE) STABLE_TORCH_LIBRARY(NAME, MODULE)
#define STABLE_TORCH_LIBRARY_IMPL_EXPAND(NAME, DEVICE, MODULE) \\
  STABLE_TORCH_LIBRARY_IMPL(NAME, DEVICE, MODULE)

#define REGISTRATION_CONCAT_(A, B) A##B
#define REGISTRATION_CONCAT(A, B) REGISTRATION_CONCAT_(A, B)
#define REGISTRATION_STRING_(A) #A
#define REGISTRATION_STRING(A) REGISTRATION_STRING_(A)

#define REGISTER_EXTENSION(NAME)                                                              \\
  PyMODINIT_FUNC REGISTRATION_CONCAT(PyInit_, NAME)() {                                       \\
    static struct PyModuleDef module = {                                                      \\
        PyModuleDef_HEAD_INIT, REGISTRATION_STRING(NAME), nullptr, 0, nullptr, nullptr,       \\
        nullptr,               nullptr,                   nullptr};                           \\
    return PyModule_Create(&module);                                                          \\
  }
"""

VERSION_SCRIPT = "{ global: PyInit_*; local: *; };\n"

# manylinux_2_28 stops at GLIBC 2.28, GLIBCXX 3.4.24 and CXXABI 1.3.11. A newer g++ lets shared_ptr
# read __libc_single_threaded (GLIBC 2.32), calls stringstream members of libstdc++ (GLIBCXX 3.4.26
# and 3.4.29), names ios_base_library_init wherever <iostream> is included (g++ 13, GLIBCXX 3.4.32)
# and ends noexcept functions with __cxa_call_terminate (g++ 14, CXXABI 1.3.15). Defining them
# inside the library removes the references; weakly, since a toolchain may bring its own. For local
# builds only, so not in build.toml: the official toolchain targets glibc 2.28 itself.
COMPATIBILITY_CPP = """\
#include <exception>
#include <sstream>

#define LOCAL_STANDIN __attribute__((weak))
extern "C" {
LOCAL_STANDIN char __libc_single_threaded = 0;
// Only named so that the initialisation of the streams is linked; torch's libraries run it.
LOCAL_STANDIN void _ZSt21ios_base_library_initv() {}
[[noreturn]] LOCAL_STANDIN void __cxa_call_terminate(void*) noexcept {
  std::terminate();
}
}
template class std::basic_stringbuf<char>;
template class std::basic_ostringstream<char>;
template class std::basic_stringstream<char>;
"""

HOST_FLAGS = ("-fPIC", "-fno-gnu-unique", "-fvisibility=hidden")


@dataclass(frozen=True)
class Job:
    """One compilation: the command without its outputs, and where the object goes.

    Paths are relative to the project root, which is every command's working directory, so that
    objects do not depend on where the checkout lies.
    """

    source: str
    command: tuple[str, ...]
    object_path: Path

    @property
    def record(self) -> Path:
        """What the object was compiled from."""
        return self.object_path.with_suffix(".json")


@dataclass(frozen=True)
class Library:
    """A linked library and what it took."""

    path: Path
    compiled: int
    reused: int


def object_folder(backend: str) -> Path:
    """The cache of `backend`, relative to the project root."""
    return Path("build", ".objects", backend)


def build_library(
    project: Project, backend: str, ops_name: str, tools: Toolchain, jobs: int
) -> Library:
    """Compile and link the library of one variant.

    Args:
        project: What to build.
        backend: ``"cpu"`` or ``"cuda"``.
        ops_name: Namespace of the operators, also the name of the Python extension module.
        tools: What to build it with.
        jobs: Compilers to run at once.

    Raises:
        BuildError: With the compiler's own message.
    """
    root, cache = project.root, object_folder(backend)
    generated = root / cache / "generated"
    generated.mkdir(parents=True, exist_ok=True)
    for name, text in (
        ("registration.h", REGISTRATION_H),
        ("exports.map", VERSION_SCRIPT),
        ("compatibility.cpp", COMPATIBILITY_CPP),
    ):
        if not (generated / name).is_file() or (generated / name).read_text() != text:
            (generated / name).write_text(text)

    work = _compilations(project, backend, ops_name, tools)
    stale = [job for job in work if not _is_current(job, root, tools)]
    if stale:
        print(f"compiling {len(stale)} of {len(work)} files, {min(jobs, len(stale))} at a time")
    with ThreadPoolExecutor(max_workers=jobs) as pool:
        compiling = [pool.submit(_compile, job, root, tools) for job in stale]
        for done, future in enumerate(as_completed(compiling), start=1):
            print(f"[{done}/{len(stale)}] {future.result()}", flush=True)
    library = cache / f"{ops_name}.abi3.so"
    _link(root, tools, [job.object_path for job in work], library)
    return Library(root / library, compiled=len(stale), reused=len(work) - len(stale))


def _compilations(project: Project, backend: str, ops_name: str, tools: Toolchain) -> list[Job]:
    cache = object_folder(backend)
    major, minor = project.stable_abi[backend].split(".")
    defines = [
        f"-DTORCH_TARGET_VERSION=0x{(int(major) << 56) | (int(minor) << 48):016x}ULL",
        "-DPy_LIMITED_API=0x03090000",
        f"-D{backend.upper()}_KERNEL",
    ]
    if backend == "cuda":
        defines.append("-DUSE_CUDA=1")
    # The namespace changes with every tree, so only the binding may depend on it.
    binding_defines = [*defines, f"-DTORCH_EXTENSION_NAME={ops_name}"]
    include = [f"-I{cache / 'generated'}", "-Itorch-ext"]
    work = []
    for component, component_defines in [
        (project.binding, binding_defines),
        *((component, defines) for component in project.kernels[backend]),
    ]:
        flags = [*component_defines, *include, *(f"-I{folder}" for folder in component.include)]
        for source in component.sources:
            compiler = _nvcc_command if source.endswith(".cu") else _cxx_command
            command = compiler(component, flags, tools)
            stem = f"{component.name}-{source.replace('/', '-')}"
            work.append(Job(source, tuple(command), cache / f"{stem}.o"))
    shim = str(cache / "generated" / "compatibility.cpp")
    shim_command = (tools.cxx, "-O3", "-std=c++17", *HOST_FLAGS)
    return [*work, Job(shim, shim_command, cache / "compatibility.o")]


def _system_include(tools: Toolchain) -> list[str]:
    folders = [tools.torch.include, tools.python_include]
    if tools.cuda is not None:
        folders.append(tools.cuda.home / "include")
    return [word for folder in folders for word in ("-isystem", str(folder))]


def _cxx_command(component: Component, flags: Sequence[str], tools: Toolchain) -> list[str]:
    return [
        *(tools.cxx, "-O3", "-std=c++17", "-Wall", "-Wextra", *HOST_FLAGS),
        *(_anonymous_paths(tools), *component.cxx_flags, *flags, *_system_include(tools)),
    ]


def _nvcc_command(component: Component, flags: Sequence[str], tools: Toolchain) -> list[str]:
    host = ",".join((*HOST_FLAGS, _anonymous_paths(tools)))
    return [
        *(str(tools.cuda.nvcc), "-ccbin", tools.cxx, "-O3", "-std=c++17", "-lineinfo"),
        *("--expt-relaxed-constexpr", "-Xcompiler", host),
        *(flag for c in component.capabilities for flag in gencode_flags(c)),
        *(*component.cuda_flags, *flags, *_system_include(tools)),
    ]


def _anonymous_paths(tools: Toolchain) -> str:
    """Keep this machine's folders out of ``__FILE__``, which torch's error messages embed."""
    return f"-ffile-prefix-map={tools.torch.include}=torch/include"


def gencode_flags(capability: str) -> list[str]:
    """nvcc's words for one entry of ``cuda-capabilities``, such as ``"8.0+PTX"`` or ``"9.0a"``."""
    real, _, ptx = capability.partition("+")
    digits = real.replace(".", "")
    flags = [f"-gencode=arch=compute_{digits},code=sm_{digits}"]
    if ptx == "PTX":
        flags.append(f"-gencode=arch=compute_{digits},code=compute_{digits}")
    elif ptx:
        raise BuildError(f"build.toml: cuda-capabilities entry {capability!r} is not understood")
    return flags


def _is_current(job: Job, root: Path, tools: Toolchain) -> bool:
    """Whether the object on disk is what the compiler would write again."""
    record = root / job.record
    if not (root / job.object_path).is_file() or not record.is_file():
        return False
    last = json.loads(record.read_text())
    return last["key"] == _key(root, [*job.command, *_versions(tools)], last["inputs"])


def _compile(job: Job, root: Path, tools: Toolchain) -> str:
    """Compile; words for the progress."""
    start, depfile = time.perf_counter(), job.object_path.with_suffix(".d")
    (root / job.record).unlink(missing_ok=True)
    outputs = ["-c", job.source, "-o", str(job.object_path), "-MMD", "-MF", str(depfile)]
    _run([*job.command, *outputs], root, f"compiling {job.source}")
    inputs = sorted({job.source, *_read_depfile(root / depfile)})
    key = _key(root, [*job.command, *_versions(tools)], inputs)
    (root / job.record).write_text(json.dumps({"inputs": inputs, "key": key}))
    return f"{job.source}, {time.perf_counter() - start:.0f} s"


def _versions(tools: Toolchain) -> list[str]:
    """What stands for the content of the system headers."""
    cuda = [tools.cuda.version] if tools.cuda is not None else []
    return [platform.machine(), tools.cxx_version, tools.torch.version, *cuda]


def _key(root: Path, context: Sequence[str], inputs: Sequence[str]) -> str:
    digest = hashlib.sha256("\0".join(context).encode())
    for name in inputs:
        path = root / name
        content = path.read_bytes() if path.is_file() else b"missing"
        digest.update(f"\0{name}\0{hashlib.sha256(content).hexdigest()}".encode())
    return digest.hexdigest()


def _read_depfile(path: Path) -> list[str]:
    """The prerequisites of a make rule; -MMD leaves out system headers, versions cover those."""
    _, _, prerequisites = path.read_text().replace("\\\n", " ").partition(": ")
    return shlex.split(prerequisites)


def _link(root: Path, tools: Toolchain, objects: Sequence[Path], library: Path) -> None:
    cache = library.parent
    exports = cache / "generated" / "exports.map"
    command = [tools.cxx, "-shared", "-o", str(library), *map(str, objects)]
    command += ["-Wl,--as-needed", "-Wl,-z,noexecstack", "-Wl,--build-id=none"]
    command += [f"-Wl,--version-script={exports}"]
    # Where g++ finds libstdc++ as a static archive alone, its own -lstdc++ would put half of it
    # into the library, with the newest symbols of this glibc. Torch has brought the shared one.
    command.append("-l:libstdc++.so.6")
    if tools.cuda is not None:
        command += [f"-L{tools.cuda.home / 'lib64'}", f"-l:{tools.cuda.runtime}"]
    # Python loads the library with RTLD_LOCAL and torch does not export its symbols globally, so
    # NEEDED must name libtorch.so although no symbol is resolved from that file itself.
    command += ["-Wl,--no-as-needed", f"-L{tools.torch.lib}", "-ltorch"]
    if tools.cuda is not None:
        if not (tools.torch.lib / "libtorch_cuda.so").exists():
            command.append(f"-L{_torch_cuda_stub(root, cache, tools)}")
        command.append("-ltorch_cuda")
    record = root / cache / "link.json"
    key = _key(root, [*command, *_versions(tools)], [*map(str, objects), str(exports)])
    if (root / library).is_file() and record.is_file() and json.loads(record.read_text()) == key:
        return
    for stale in (root / cache).glob("*.abi3.so"):
        stale.unlink()
    _run(command, root, f"linking {library.name}")
    record.write_text(json.dumps(key))


def _torch_cuda_stub(root: Path, cache: Path, tools: Toolchain) -> Path:
    """An empty libtorch_cuda.so with the right SONAME, to link against beside a CPU torch."""
    stub, empty = cache / "stub" / "libtorch_cuda.so", cache / "stub" / "empty.cpp"
    if not (root / stub).exists():
        (root / stub).parent.mkdir(exist_ok=True)
        (root / empty).write_text("")
        soname = "-Wl,-soname,libtorch_cuda.so"
        command = [tools.cxx, "-shared", "-fPIC", soname, "-o", str(stub), str(empty)]
        _run(command, root, "linking the libtorch_cuda.so stub")
    return stub.parent


def _run(command: Sequence[str], cwd: Path, what: str) -> None:
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{what} failed:\n{shlex.join(command)}\n{done.stderr}{done.stdout}")
    if done.stderr.strip():
        print(done.stderr.rstrip())
