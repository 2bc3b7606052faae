"""tools/build_local.py: what it builds, what it reuses and what it refuses.

The binary rules: every artifact in build/ keeps them, and each check can fail. On one GPU a load of
too small a scope shows in no result, since all that it could miss lies in one L2 cache; so the
machine code of the kernels that wait for other GPUs is looked at: their loads and fences.
"""

import dataclasses
import fcntl
import os
import platform
import re
import shutil
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest
import tomllib

from ._checkout import (
    ROOT,
    copy_from_root,
    git,
    metadata_of,
    run_build,
    run_command,
    tool,
    variant_of,
)
from ._project import aliases, parse

KERNELS = tomllib.loads((ROOT / "build.toml").read_text())["kernel"].values()
# Of the CPU variant: its kernels, the binding, and the stand-ins for a newer g++.
OBJECTS = 2 + sum(
    name.endswith(".cpp") for part in KERNELS if part["backend"] == "cpu" for name in part["src"]
)


@pytest.fixture
def sources(built: Path, tmp_path: Path) -> Path:
    """`checkout` without ``build/``."""
    return shutil.copytree(built, tmp_path / "sources", ignore=shutil.ignore_patterns("build"))


def refused(match: str):
    return pytest.raises(tool("local_build").BuildError, match=match)


def cpu_build(root: Path, *options: str) -> str:
    done = run_build(root, "--backend", "cpu", *options)
    assert done.returncode == 0, done.stderr
    return done.stdout


def append(path: Path, text: str) -> None:
    path.write_text(path.read_text() + text)


def test_build_toml_follows_the_schema():
    from kernels._rust import Backend, Build

    build = Build.open(ROOT)
    assert {str(backend) for backend in build.general.backends} == {"cpu", "cuda"}
    assert build.all_kernel_depends(Backend.CUDA) == []
    project = tool("local_build.project").load_project(ROOT)
    assert project.stable_abi == {"cuda": "2.11", "cpu": "2.11"}
    # a GPU newer than any listed one runs the PTX; an H100 has machine code of its own, which the
    # components of one architecture add to those that serve every GPU
    generic = [part for part in project.kernels["cuda"] if not part.name.endswith("_sm90")]
    assert all({"8.0+PTX", "9.0"} <= set(part.capabilities) for part in generic)
    hopper = [part for part in project.kernels["cuda"] if part not in generic]
    assert [(part.name, list(part.capabilities)) for part in hopper] == [
        ("products_sm90", ["9.0a"]),
        ("quant_sm90", ["9.0a"]),
        ("communication_sm90", ["9.0a"]),
    ]


def test_layout_names_and_metadata(built: Path):
    from kernels._rust import Digest, DigestAlgorithm, Metadata

    variant = variant_of(built)
    assert variant.name == f"torch-stable-abi211-cpu-{platform.machine()}-linux"
    uid = git(built, "rev-parse", "HEAD^{tree}")[:7]
    name = f"_optimizer_cpu_{uid}"
    assert (variant / f"{name}.abi3.so").is_file()
    assert f"torch.ops.{name}" in (variant / "_ops.py").read_text()

    metadata = Metadata.read_from_file(variant / "metadata.json")
    assert (str(metadata.name), metadata.id, metadata.version) == ("optimizer", name, 1)
    assert metadata.provenance.kernel.commit == git(built, "rev-parse", "HEAD")
    assert not metadata.provenance.dirty
    assert metadata.python_depends == []
    assert metadata.digest.files == Digest.hash_variant(DigestAlgorithm.SHA256, variant).files

    package = built / "torch-ext" / "optimizer"
    shipped = {p.relative_to(package) for p in package.rglob("*.py")}
    generated = {Path("_ops.py"), Path(f"{name}.abi3.so"), Path("metadata.json")}
    assert {p.relative_to(variant) for p in variant.rglob("*") if p.is_file()} == (
        shipped | generated
    )


@pytest.mark.parametrize(
    ("capability", "flags"),
    [
        ("9.0", ["-gencode=arch=compute_90,code=sm_90"]),
        ("9.0a", ["-gencode=arch=compute_90a,code=sm_90a"]),
        ("8.0+PTX", [f"-gencode=arch=compute_80,code={what}_80" for what in ("sm", "compute")]),
    ],
)
def test_capabilities_become_nvcc_flags(capability: str, flags: list[str]):
    assert tool("local_build.compilation").gencode_flags(capability) == flags


def test_nothing_changed_compiles_nothing_and_a_build_from_nothing_is_the_same(checkout: Path):
    variant = variant_of(checkout)
    before, metadata = variant.stat(), metadata_of(variant)
    assert f"unchanged, 0 compiled, {OBJECTS} reused" in cpu_build(checkout)
    after = variant.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert f"written, {OBJECTS} compiled, 0 reused" in cpu_build(checkout, "--clean")
    assert metadata_of(variant_of(checkout)) == metadata


def test_python_is_copied_and_only_the_binding_is_compiled(checkout: Path):
    package = checkout / "torch-ext" / "optimizer"
    append(package / "__init__.py", "# changed\n")
    (package / "extra.json").write_text("{}")
    # the tree is dirty now, so the namespace and with it the binding is another
    assert f"written, 1 compiled, {OBJECTS - 1} reused" in cpu_build(checkout)
    variant = variant_of(checkout)
    assert (variant / "__init__.py").read_text().endswith("# changed\n")
    assert (variant / "extra.json").is_file()
    metadata = metadata_of(variant)
    assert metadata["id"].endswith("_dirty") and metadata["provenance"]["kernel"]["dirty"]

    (package / "extra.json").unlink()
    assert f"written, 0 compiled, {OBJECTS} reused" in cpu_build(checkout)
    assert not (variant_of(checkout) / "extra.json").exists()


def test_a_changed_header_compiles_its_includers(checkout: Path):
    append(checkout / "torch-ext" / "optimizer" / "__init__.py", "# changed\n")
    cpu_build(checkout)
    append(checkout / "kernels-src" / "quant" / "nf4_dequant.h", "// changed\n")
    printed = cpu_build(checkout)
    assert f"1 compiled, {OBJECTS - 1} reused" in printed
    progress = printed.splitlines()[:2]
    assert progress[0] == f"compiling 1 of {OBJECTS} files, 1 at a time"
    assert progress[1].startswith("[1/1] kernels-src/cpu/nf4_dequant.cpp, ")


def test_untracked_sources_are_dirty_and_other_untracked_files_are_not(checkout: Path):
    read_identity = tool("local_build.project").read_identity
    (checkout / "notes.txt").write_text("")
    assert not read_identity(checkout).dirty
    (checkout / "kernels-src" / "new.cu").write_text("")
    identity = read_identity(checkout)
    assert identity.dirty and identity.uid.endswith("_dirty")


def test_a_reader_never_misses_a_file_while_variants_are_exchanged(tmp_path: Path):
    package = tool("local_build.package")
    target, staged = tmp_path / "variant", tmp_path / "staged"
    for folder in (target, staged):
        folder.mkdir()
        (folder / "metadata.json").write_text("{}")
    stop, misses = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            if not (target / "metadata.json").exists():
                misses.append(1)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(500):
        package.install(staged, target)
    stop.set()
    reader.join()
    assert not misses


def test_builds_of_two_backends_run_side_by_side(checkout: Path, monkeypatch):
    """Those of one backend do not: the second waits, and leaves the first one's folder alone."""
    package = tool("local_build.package")
    project = tool("local_build.project").load_project(checkout)
    lock = package.build_lock
    with lock(project, "cuda"), package.staging_folder(project, "cuda") as staged:
        cpu_build(checkout)
        assert staged.is_dir()
    flock = fcntl.flock
    monkeypatch.setattr(fcntl, "flock", lambda file, how: flock(file, how | fcntl.LOCK_NB))
    with lock(project, "cpu"), pytest.raises(BlockingIOError), lock(project, "cpu"):
        pass


NEWER_GLIBC = """
#include <pthread.h>
__attribute__((used)) static int newer(pthread_t* thread) { return pthread_join(*thread, nullptr); }
"""


def test_what_needs_a_newer_glibc_runs_here_and_is_not_published(checkout: Path):
    before = metadata_of(variant_of(checkout))
    append(checkout / "kernels-src" / "cpu" / "nf4_dequant.cpp", NEWER_GLIBC)
    finding = "cannot be published: manylinux_2_28: pthread_join@GLIBC_2.34"
    failed = run_build(checkout, "--backend", "cpu", "--publishable")
    assert failed.returncode == 1 and finding in failed.stderr
    assert metadata_of(variant_of(checkout)) == before
    assert f"runs here, {finding}" in cpu_build(checkout)
    publish = tool("publish")
    project = tool("local_build.project").load_project(checkout)
    with refused(r"pthread_join@GLIBC_2\.34"):
        publish.make_plan(project, allow_local_build=True)


def test_a_static_libstdcxx_is_not_linked(checkout: Path, tmp_path: Path):
    """Where g++ has no other one, its own -lstdc++ would bring symbols of this machine's glibc."""
    compilation, toolchain = tool("local_build.compilation"), tool("local_build.toolchain")
    cxx = tmp_path / "g++"
    cxx.write_text('#!/bin/sh\nexec g++ -static-libstdc++ "$@"\n')
    cxx.chmod(0o755)
    tools = dataclasses.replace(toolchain.find_toolchain("cpu", None), cxx=str(cxx))
    cache = compilation.object_folder("cpu")
    objects = [path.relative_to(checkout) for path in sorted((checkout / cache).glob("*.o"))]
    assert len(objects) == OBJECTS
    library = cache / "static.abi3.so"
    compilation._link(checkout, tools, objects, library)
    assert tool("local_build.audit").audit_library(checkout / library, tools.torch) == []


# A make that fails as the real one does where a variant cannot be published and that matters.
MAKE = """#!/bin/sh
case "$1" in build | test) [ -z "$PUBLISHABLE" ] || [ -z "$FINDING" ] || exit 1 ;; esac
"""


@pytest.mark.parametrize(("finding", "status"), [("", 0), ("yes", 1)])
def test_ci_fails_where_a_variant_cannot_be_published(tmp_path: Path, finding, status):
    copy_from_root(tmp_path, ".ci/run")
    for name, text in (("make", MAKE), ("nvcc", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "build" / "torch-cu130").mkdir(parents=True)
    (tmp_path / "build" / "torch-cu130" / "x.abi3.so").touch()
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "FINDING": finding}
    done = run_command("bash", tmp_path / ".ci" / "run", env=environment)
    assert done.returncode == status, done.stdout + done.stderr
    last = done.stdout.splitlines()[-1]
    assert last.endswith("failed: make test, make build BACKEND=cuda" if finding else "passed")


def without_make() -> dict[str, str]:
    """The environment without what the make and the CI around this run hand on."""
    given = {"MAKEFLAGS", "MFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "ARGS", "PUBLISHABLE", "BACKEND"}
    return {name: value for name, value in os.environ.items() if name not in given}


@pytest.mark.parametrize("target", ["build", "test"])
def test_the_makefile_hands_on_what_must_be_publishable(target: str):
    words = ("make", "--dry-run", "NO_VENV=1", target)
    for publishable in ((), ("PUBLISHABLE=1",)):
        told = run_command(*words, *publishable, cwd=ROOT, env=without_make())
        builds = [line for line in told.stdout.splitlines() if "build_local.py" in line]
        assert len(builds) == 1 and ("--publishable" in builds[0]) == bool(publishable)


# A python3 that says what it was to do; only the announcement really runs.
PYTHON = """#!/bin/sh
case "$*" in
  *announce_demo.py*) exec {python} "$@" ;;
  "-m venv "*) mkdir -p "$3/bin" && ln -s "$0" "$3/bin/python" ;;
esac
echo "RAN $*"
"""


@pytest.fixture
def make(sources: Path, tmp_path: Path) -> Callable[..., list[str]]:
    """make in a checkout with a Python that does nothing; returns what it was to do."""
    copy_from_root(sources, "Makefile", "tools")
    python = tmp_path / "python3"
    python.write_text(PYTHON.format(python=sys.executable))
    python.chmod(0o755)

    def run(*words: str) -> list[str]:
        command = ("make", "-C", sources, *words, f"BASE_PYTHON={python}", "BACKEND=cpu")
        done = run_command(*command, env=without_make())
        assert done.returncode == 0, done.stderr
        lines = done.stdout.splitlines()
        return [line for line in lines if line.startswith(("RAN ", "make demo "))]

    return run


@pytest.mark.parametrize("marker", [".ready", ".ready-demo", None])
def test_the_demo_says_how_long_it_takes_before_it_begins(make, sources, tmp_path, marker):
    venv, environment = sources / ".venv", marker is not None
    if environment:
        (venv / "bin").mkdir(parents=True)
        (venv / "bin" / "python").symlink_to(tmp_path / "python3")
        (venv / marker).touch()
    first, *ran = make("demo")
    assert first.startswith("make demo takes about ") and "train two models" in first
    assert ("install the environment" in first) == (not environment)
    assert "compile the cpu variant" in first  # there is no build/
    assert "RAN tools/build_local.py --backend cpu" in [line.rstrip() for line in ran]
    assert ran[-1].rstrip() == "RAN examples/train_demo.py"
    assert any("pip install" in line for line in ran) == (not environment)


def test_the_demo_installs_what_it_imports_and_other_commands_the_rest(make, sources: Path):
    """Its scripts and the modules beside them; dependencies of what is listed do not count. A
    whole environment then serves the demo, too.
    """
    installed = sources / ".venv" / "requirements.txt"

    def pins() -> set[str]:
        return {line for line in installed.read_text().splitlines() if "==" in line}

    assert any("pip install" in line for line in make("demo"))
    few = pins()
    listed = {line.split("==")[0].replace("-", "_") for line in few}
    for folder, scripts in (
        ("tools", ("build_local.py", "announce_demo.py", "local_build/*.py")),
        ("examples", ("train_demo.py", "demo/*.py")),
    ):
        paths = [path for script in scripts for path in sorted((ROOT / folder).glob(script))]
        own = {path.parent.name for path in paths} | {path.stem for path in paths}
        names = [name for path in paths for name in aliases(parse(path)).values()]
        wanted = {name.split(".")[0] for name in names}
        assert wanted - own - set(sys.stdlib_module_names) <= listed
    make("setup")
    everything = set(re.findall(r"^\S+==\S+$", (ROOT / "tools/requirements.txt").read_text(), re.M))
    assert few < pins() == everything
    assert not any("pip install" in line for line in make("demo", "test"))


@pytest.fixture
def toolkits(monkeypatch) -> Callable[..., ModuleType]:
    """The module that finds toolkits, on a machine that has these alone."""

    def found(*homes: Path) -> ModuleType:
        toolchain = tool("local_build.toolchain")
        monkeypatch.setattr(toolchain, "_cuda_homes", lambda: list(homes))
        return toolchain

    return found


def test_the_toolkit_of_cuda_home_comes_first(tmp_path: Path, monkeypatch):
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert tool("local_build.toolchain")._cuda_homes()[0] == tmp_path


def fake_toolkit(home: Path, release: str) -> Path:
    """A folder that looks like a CUDA toolkit, with an nvcc that only knows its version."""
    nvcc = home / "bin" / "nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.1'\n")
    nvcc.chmod(0o755)
    (home / "lib64").mkdir()
    (home / "lib64" / f"libcudart.so.{release.split('.')[0]}").touch()
    return home


def torch_built_with(cuda: str | None):
    version = "2.13.0+cpu" if cuda is None else f"2.13.0+cu{cuda.replace('.', '')}"
    return tool("local_build.toolchain").Torch(version, Path("/nowhere/torch"), cuda)


def test_the_toolkit_that_is_taken(toolkits, tmp_path: Path):
    """One that does not suit is passed over, unless it is named; another than named is refused."""
    homes = [fake_toolkit(tmp_path / release, release) for release in ("12.8", "13.2", "13.0")]
    toolchain, torch = toolkits(*homes), torch_built_with("13.0")
    assert toolchain.find_cuda(None, torch).home == homes[2]
    assert toolchain.find_cuda("13.2", torch).home == homes[1]
    toolchain = toolkits(homes[0])
    with refused(r"--cuda-version 13\.0 but .* is 12\.8"):
        toolchain.find_cuda("13.0", torch)
    (homes[0] / "lib64" / "libcudart.so.12").unlink()
    with refused(r"libcudart\.so\.12 is missing"):
        toolchain.find_cuda(None, torch_built_with("12.8"))


@pytest.mark.parametrize(
    ("toolkit", "torch_cuda", "loads"),
    [
        ("13.0", "13.0", True),
        ("13.0", "13.2", True),
        ("13.2", "13.0", False),
        ("12.8", "13.0", False),
        ("13.0", "12.8", False),
        ("13.2", None, True),  # a CPU build of torch: the variant is for another machine
    ],
)
def test_a_toolkit_must_suit_the_installed_torch(toolkits, tmp_path, toolkit, torch_cuda, loads):
    from kernels.backends import CUDA
    from kernels.variants import _resolve_variant_for_system, parse_variant
    from packaging.version import Version

    toolchain = toolkits(home := fake_toolkit(tmp_path, toolkit))
    torch = torch_built_with(torch_cuda)
    if loads:
        assert toolchain.find_cuda(None, torch).version == toolkit
    else:
        with refused("cannot load") as error:
            toolchain.find_cuda(None, torch)
        major = torch_cuda.split(".")[0]
        loadable = f"{major}.0 to {torch_cuda}"
        for words in (str(home), toolkit, torch.version, loadable, f"--cuda-version {toolkit}"):
            assert words in str(error.value)
        # built all the same when it is named: for another machine
        assert toolchain.find_cuda(toolkit, torch).version == toolkit
    if torch_cuda is not None:  # the client decides likewise
        variant = parse_variant(f"torch-stable-abi211-cu{toolkit.replace('.', '')}-x86_64-linux")
        client = CUDA(version=Version(torch_cuda))
        accepted, _ = _resolve_variant_for_system(
            [variant], client, "x86_64", "linux", Version("2.13"), True, None
        )
        assert bool(accepted) == loads


@pytest.mark.parametrize(
    ("toolkit", "torch_cuda", "devices", "backend", "reason"),
    [
        ("13.0", "13.0", 1, "cuda", "nvcc"),
        ("13.2", "13.0", 1, "cpu", "cannot load"),
        ("12.8", "13.0", 1, "cpu", "cannot load"),
        (None, "13.0", 1, "cpu", "nvcc not found"),
        ("13.0", "13.0", 0, "cpu", "no CUDA device"),
        ("13.0", None, 1, "cpu", "without CUDA"),
    ],
)
def test_default_backend_is_one_that_can_be_loaded(
    toolkits, tmp_path: Path, monkeypatch, capsys, toolkit, torch_cuda, devices, backend, reason
):
    home = tmp_path if toolkit is None else fake_toolkit(tmp_path, toolkit)
    toolchain, build_local = toolkits(home), tool("build_local")
    monkeypatch.setattr(toolchain, "find_torch", lambda: torch_built_with(torch_cuda))
    monkeypatch.setattr(toolchain, "cuda_device_count", lambda: devices)
    default = toolchain.default_backend(None)
    assert default.backend == backend and reason in default.reason

    project = tool("local_build.project").load_project(ROOT)
    options = build_local._parser().parse_args([])
    assert build_local._backends(options, project) == [backend]
    printed = capsys.readouterr().out
    assert f"{backend} variant" in printed and reason in printed


@pytest.mark.parametrize(("line", "cuda"), [("'13.0'", "13.0"), ("None", None)])
def test_the_cuda_version_of_torch_is_read_without_importing_it(tmp_path: Path, line, cuda):
    (tmp_path / "version.py").write_text(
        f"from typing import Optional\n__version__ = '2.13.0'\ncuda: Optional[str] = {line}\n"
    )
    assert tool("local_build.toolchain").cuda_version_of(tmp_path) == cuda
    import torch

    assert tool("local_build.toolchain").find_torch().cuda == torch.version.cuda


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"kernels-src/cpu/nf4_dequant.cpp"', '"kernels-src/cpu/gone.cpp"', "does not exist"),
        ("edition = 5", 'edition = 5\ntriton = "3"', "breaks the kernel-builder schema"),
        ('license = "apache-2.0"\n', "", "breaks the kernel-builder schema"),
        ('depends = ["torch"]', 'depends = ["torch", "cutlass_4_0"]', "cutlass_4_0"),
        ("version = 1", 'version = 1\npython-depends = ["einops"]', None),
        ('cpu = "2.11"\n', "", "no stable-abi for 'cpu'"),
        ('"torch-ext/torch_binding.h"]', '"torch-ext/torch_binding.cpp"]', "twice"),
    ],
)
def test_build_toml_mistakes(sources: Path, old: str, new: str, message: str | None):
    project = tool("local_build.project")
    text = (sources / "build.toml").read_text()
    assert old in text
    (sources / "build.toml").write_text(text.replace(old, new))
    if message is None:
        assert project.load_project(sources).python_depends == ("einops",)
        return
    with refused(message):
        project.load_project(sources)


def test_a_compiler_error_is_shown_and_keeps_the_old_variant(checkout: Path):
    before = metadata_of(variant_of(checkout))
    append(checkout / "kernels-src" / "cpu" / "nf4_dequant.cpp", "int broken = undeclared_name;\n")
    done = run_build(checkout, "--backend", "cpu")
    assert done.returncode == 1
    assert "compiling kernels-src/cpu/nf4_dequant.cpp failed" in done.stderr
    assert "undeclared_name" in done.stderr
    assert metadata_of(variant_of(checkout)) == before


def test_without_git_the_error_says_what_to_do(sources: Path):
    shutil.rmtree(sources / ".git")
    done = run_build(sources, "--backend", "cpu", GIT_CEILING_DIRECTORIES=str(sources.parent))
    assert done.returncode == 1
    assert "not a git repository" in done.stderr and "copy its build/ folder" in done.stderr


def test_cuda_variant_is_named_after_the_toolkit_and_lists_its_architectures():
    project = tool("local_build.project").load_project(ROOT)
    name = project.variant("cuda", "13.0")
    assert name == f"torch-stable-abi211-cu130-{platform.machine()}-linux"
    metadata = tool("local_build.package").describe_variant(
        project, tool("local_build.project").Identity("0", None, True), "cuda", "ops", {}
    )
    assert metadata["backend"] == {"type": "cuda", "archs": ["8.0+PTX", "9.0", "9.0a"]}
    assert "kernel" not in metadata["provenance"]


def test_a_committed_ops_file_is_refused(sources: Path):
    (sources / "torch-ext" / "optimizer" / "_ops.py").write_text("")
    with refused(r"_ops\.py exists: it is generated"):
        tool("local_build.project").load_project(sources)


def test_missing_checker_is_an_error_unless_asked_for(checkout: Path, tmp_path: Path):
    hidden = tmp_path / "hidden" / "kernel_abi_check"
    hidden.mkdir(parents=True)
    (hidden / "__init__.py").write_text("raise ImportError('not installed')\n")
    hide = {"PYTHONPATH": str(hidden.parent)}
    done = run_build(checkout, "--backend", "cpu", **hide)
    assert done.returncode == 1
    assert "kernel-abi-check is not installed" in done.stderr and "--no-audit" in done.stderr
    done = run_build(checkout, "--backend", "cpu", "--no-audit", **hide)
    assert done.returncode == 0
    assert "manylinux_2_28" in done.stderr and "not audited" in done.stdout


@pytest.mark.artifacts
def test_every_artifact_passes_every_check():
    """None embeds a path of this torch: `__FILE__` in its headers carries the builder's folder."""
    audit, torch = tool("local_build.audit"), tool("local_build.toolchain").find_torch()
    libraries = sorted((ROOT / "build").glob("torch*/*.abi3.so"))
    assert libraries, "no variant in build/: run `make build`"
    for library in libraries:
        audit.audit_library(library, torch)  # what cannot be published runs here all the same
        assert audit.check_headers(library) == []


def test_a_linked_environment_leaves_no_path_of_torch(tmp_path: Path, monkeypatch):
    """Compilers follow links: the folder behind one would stand in the library."""
    import torch

    (tmp_path / "torch").symlink_to(Path(torch.__file__).parent)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch")
    root = tool("local_build.toolchain").find_torch().root
    assert root == Path(torch.__file__).resolve().parent


@pytest.mark.parametrize(("folder", "found"), [("/home/me/include", 1), ("/nix/store/t", 0)])
def test_a_header_of_this_machine_is_found(tmp_path: Path, folder: str, found: int):
    library = tmp_path / "x.so"
    library.write_bytes(f"\0torch/include/torch/csrc/a.h\0{folder}/torch/csrc/a.h\0".encode())
    assert len(tool("local_build.audit").check_headers(library)) == found


def link(folder: Path, name: str, code: str, *flags: str) -> Path:
    source, library = folder / f"{name}.c", folder / name
    source.write_text(code)
    command = ("gcc", "-shared", "-fPIC", "-nostdlib", "-o", library, source, *flags)
    run_command(*command, check=True)
    return library


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A library that breaks every rule at once."""
    versions = tmp_path / "versions.map"
    versions.write_text("GLIBCXX_3.4.99 { global: too_new; };\n")
    stub_flags = (f"-Wl,--version-script={versions}", "-Wl,-soname,libstdc++.so.6")
    link(tmp_path, "libtoonew.so", "void too_new(void) {}\n", *stub_flags)
    link(tmp_path, "libforeign.so", "void foreign(void) {}\n", "-Wl,-soname,libforeign.so")
    code = """
        void too_new(void); void foreign(void);
        void aoti_torch_invented(void); void forgotten_source(void);
        void _ZN2at5emptyEv(void); void PyUnicode_AsUTF8AndSize(void);
        void all(void) {
          too_new(); foreign(); aoti_torch_invented(); forgotten_source();
          _ZN2at5emptyEv(); PyUnicode_AsUTF8AndSize();
        }
    """
    flags = (f"-L{tmp_path}", "-ltoonew", "-lforeign", "-Wl,-rpath,/somewhere")
    return link(tmp_path, "planted.abi3.so", code, *flags)


def test_each_check_can_fail(planted: Path):
    audit = tool("local_build.audit")
    assert audit.check_manylinux(planted) == ["manylinux_2_28: too_new@GLIBCXX_3.4.99"]
    with refused("libforeign.so") as caught:
        audit.audit_library(planted, tool("local_build.toolchain").find_torch())
    message = str(caught.value)
    for finding in (
        "PyUnicode_AsUTF8AndSize",  # part of abi3 since 3.10, one version too new
        "torch-abi-audit",
        "RPATH or RUNPATH '/somewhere'",
        "NEEDED libforeign.so",
        "NEEDED lacks libtorch.so",
        "aoti_torch_invented is not declared by torch 2.11",
        "forgotten_source is undefined and no library provides it",
    ):
        assert finding in message, f"{finding!r} is missing from:\n{message}"


def test_the_oldest_torch_has_no_later_symbol():
    """torch 2.13 added random number generators to the stable ABI."""
    audit = tool("local_build.audit")
    listed = audit.symbols_of_release(audit.OLDEST_TORCH)
    assert {"torch_call_dispatcher", "aoti_torch_get_current_cuda_stream"} <= listed
    assert not any("generator_" in name for name in listed if name.startswith("torch_"))


SPACE = "_ZN9optimizer13communication"
# Kernel -> architectures that have code of its own.
WAITING = {
    f"{SPACE}11wait_kernelENS0_4WaitE": ("sm_80", "sm_90"),
    f"{SPACE}12fence_kernelEv": ("sm_80", "sm_90"),
    f"{SPACE}11rows_kernelENS0_8RowsListE": ("sm_80", "sm_90"),
    **{
        f"{SPACE}15progress_kernelI{dtype}Lb{columns}EEEvNS0_17ProgressArgumentsE": ("sm_90a",)
        for dtype in ("13__nv_bfloat16", "6__half")
        for columns in (0, 1)
    },
}
ACQUIRE = re.compile(r"\bLDG?\.E\.STRONG\.SYS\b")  # behind it the L1 cache is dropped
NEAR = 400  # characters
PROXY = "FENCE.VIEW.ASYNC.G"


def findings(kernel: str, code: str) -> list[str]:
    """What is wrong with the disassembly of one kernel for one architecture."""
    found = [f"{scope} scope" for scope in ("STRONG.GPU", "STRONG.SM", "SC.GPU") if scope in code]
    if "fence_kernel" in kernel or "rows_kernel" in kernel:
        return found + ["no fence of the system"] * ("MEMBAR.SC.SYS" not in code)
    acquires = [at.start() for at in ACQUIRE.finditer(code)]
    if not any("CCTL.IVALL" in code[at : at + NEAR] for at in acquires):
        found.append("no load that acquires at the scope of the system")
    if "progress_kernel" in kernel and PROXY not in code:
        found.append("no fence between the signal and the copies of TMA")
    return found


def disassembled(library: Path) -> dict[tuple[str, str], str]:
    """(kernel, architecture) -> instructions, of the kernels of WAITING."""
    triton = Path(find_spec("triton").origin).parent
    tool = triton / "backends" / "nvidia" / "bin" / "cuobjdump"
    done = run_command(tool, "-sass", "-fun", ",".join(WAITING), library, check=True)
    found, architecture = {}, ""
    for part in re.split(r"^(?=arch = |\s*Function : )", done.stdout, flags=re.MULTILINE):
        head, _, rest = part.strip().partition("\n")
        if head.startswith("arch = "):
            architecture = head.removeprefix("arch = ")
        elif head.startswith("Function : "):
            code = re.sub(r"/\*.*?\*/", "", rest)  # addresses, and the bits of instructions
            found[head.removeprefix("Function : "), architecture] = " ".join(code.split())
    return found


@pytest.mark.artifacts
def test_waits_acquire_from_the_whole_system():
    for library in sorted((ROOT / "build").glob("torch*-cu*/*.abi3.so")):
        found = disassembled(library)
        wanted = {(kernel, arch) for kernel, archs in WAITING.items() for arch in archs}
        assert found.keys() == wanted
        wrong = {key: faults for key, code in found.items() if (faults := findings(key[0], code))}
        assert not wrong, wrong


GOOD_CODE = "LDG.E.STRONG.SYS R3, desc[UR4][R4.64] ;\nCCTL.IVALL ;\nFENCE.VIEW.ASYNC.G ;\nEXIT ;"


@pytest.mark.parametrize(
    ("kernel", "old", "new", "finding"),
    [
        ("progress_kernel", "SYS", "GPU", "STRONG.GPU scope"),
        ("progress_kernel", "SYS", "GPU", "no load that acquires"),
        ("wait_kernel", "CCTL.IVALL", "NOP", "no load that acquires"),
        ("progress_kernel", PROXY, "NOP", "no fence between"),
        ("fence_kernel", "", "", "no fence of the system"),
        ("rows_kernel", "", "", "no fence of the system"),
    ],
)
def test_each_finding_can_appear(kernel, old, new, finding):
    assert findings("wait_kernel", GOOD_CODE) == findings("progress_kernel", GOOD_CODE) == []
    for fenced in ("fence_kernel", "rows_kernel"):
        assert findings(fenced, "MEMBAR.SC.SYS ;") == []
    assert any(finding in fault for fault in findings(kernel, GOOD_CODE.replace(old, new)))
