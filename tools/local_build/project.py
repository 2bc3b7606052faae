"""What is to be built: build.toml, the files it names, and the identity git gives them."""

from __future__ import annotations

import platform
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tomllib

from . import BuildError

COMPILED_SUFFIXES = {".cpp", ".cc", ".cu"}
BUILD_INPUTS = ("build.toml", "torch-ext", "kernels-src")

# Keys this script acts on. Any other key is valid for the official builder but would be ignored
# here, so it is an error: a local build must not differ from build.toml in silence.
KNOWN_KEYS = {
    "general": {
        *("name", "version", "edition", "license", "backends", "upstream", "source"),
        *("python-depends", "hub"),
    },
    "torch": {"src", "pyext", "stable-abi", "include", "cxx-flags"},
    "kernel": {"backend", "depends", "src", "include", "cxx-flags"},
    "cuda kernel": {"cuda-capabilities", "cuda-flags"},
}


@dataclass(frozen=True)
class Component:
    """One group of sources compiled with the same flags: ``[torch]`` or a ``[kernel.<id>]``.

    Attributes:
        name: The kernel id, or ``"torch"`` for the binding.
        sources: Files to compile, relative to the project root. Headers are not among them.
        include: Include folders relative to the project root.
        capabilities: CUDA architectures such as ``"8.0+PTX"``; empty for C++ only.
    """

    name: str
    sources: tuple[str, ...]
    include: tuple[str, ...]
    cxx_flags: tuple[str, ...]
    cuda_flags: tuple[str, ...] = ()
    capabilities: tuple[str, ...] = ()


@dataclass(frozen=True)
class Project:
    """A validated build.toml."""

    root: Path
    name: str
    version: int
    license: str
    backends: tuple[str, ...]
    repo_id: str
    upstream: str | None
    source: str | None
    python_depends: tuple[str, ...]
    pyext: tuple[str, ...]
    stable_abi: dict[str, str]
    binding: Component
    kernels: dict[str, tuple[Component, ...]]

    @property
    def package_name(self) -> str:
        """Folder below ``torch-ext/``."""
        return self.name.replace("-", "_")

    @property
    def package_dir(self) -> Path:
        """The Python sources."""
        return self.root / "torch-ext" / self.package_name

    @property
    def build_dir(self) -> Path:
        """Where variants are written."""
        return self.root / "build"

    def variant(self, backend: str, cuda_version: str | None) -> str:
        """Folder name of the variant in the Hub's official scheme."""
        abi = self.stable_abi[backend].replace(".", "")
        device = backend if cuda_version is None else "cu" + cuda_version.replace(".", "")
        return f"torch-stable-abi{abi}-{device}-{platform.machine()}-linux"


@dataclass(frozen=True)
class Identity:
    """Which state of the sources a build comes from.

    Attributes:
        uid: First seven digits of HEAD's tree id, with ``_dirty`` when the files differ from it.
        commit: Full id of HEAD, None before the first commit.
        dirty: Whether the files differ from HEAD.
    """

    uid: str
    commit: str | None
    dirty: bool


def load_project(root: Path) -> Project:
    """Read ``build.toml`` below `root` and check it against the schema and the files on disk.

    Raises:
        BuildError: For a schema error, a key this script does not act on, or a listed file that
            does not exist.
    """
    from kernels._rust import Build

    path = root / "build.toml"
    if not path.is_file():
        raise BuildError(f"{path} does not exist: run this script from a checkout of the package")
    try:
        Build.open(root)
    except (ValueError, OSError) as error:
        raise BuildError(f"build.toml breaks the kernel-builder schema: {error}") from error
    with path.open("rb") as file:
        table = tomllib.load(file)
    general, torch = table["general"], table.get("torch")
    if torch is None:
        raise BuildError("build.toml has no [torch] table: this script builds Torch kernels only")
    _refuse_unknown_keys("general", general, KNOWN_KEYS["general"] | set(general["backends"]))
    _refuse_unknown_keys("torch", torch, KNOWN_KEYS["torch"])
    kernels: dict[str, list[Component]] = {backend: [] for backend in general["backends"]}
    for kernel_id, kernel in table.get("kernel", {}).items():
        kernels.setdefault(kernel["backend"], []).append(_kernel_component(kernel_id, kernel))
    abi = torch.get("stable-abi")
    project = Project(
        root=root,
        name=general["name"],
        version=general["version"],
        license=general["license"],
        backends=tuple(general["backends"]),
        repo_id=general.get("hub", {}).get("repo-id", ""),
        upstream=general.get("upstream"),
        source=general.get("source"),
        python_depends=tuple(general.get("python-depends", ())),
        pyext=tuple(torch.get("pyext", ("py", "pyi"))),
        stable_abi=dict.fromkeys(general["backends"], abi) if isinstance(abi, str) else abi or {},
        binding=_component("torch", torch),
        kernels={backend: tuple(parts) for backend, parts in kernels.items()},
    )
    _check_files(project, table)
    return project


def _refuse_unknown_keys(where: str, table: dict[str, Any], known: set[str]) -> None:
    if unknown := sorted(set(table) - known):
        raise BuildError(
            f"build.toml: [{where}] has {', '.join(unknown)}, which tools/build_local.py does not "
            "act on; teach it the key or build with the official builder"
        )


def _component(name: str, table: dict[str, Any]) -> Component:
    return Component(
        name=name,
        sources=tuple(s for s in table["src"] if Path(s).suffix in COMPILED_SUFFIXES),
        include=tuple(table.get("include", ())),
        cxx_flags=tuple(table.get("cxx-flags", ())),
        cuda_flags=tuple(table.get("cuda-flags", ())),
        # The official builder takes every architecture it knows when the key is absent.
        capabilities=tuple(table.get("cuda-capabilities", ("8.0", "9.0"))),
    )


def _kernel_component(kernel_id: str, table: dict[str, Any]) -> Component:
    known = KNOWN_KEYS["kernel"]
    if table["backend"] == "cuda":
        known = known | KNOWN_KEYS["cuda kernel"]
    _refuse_unknown_keys(f"kernel.{kernel_id}", table, known)
    if extra := sorted(set(table["depends"]) - {"torch"}):
        raise BuildError(
            f"build.toml: [kernel.{kernel_id}] depends on {', '.join(extra)}, which a local build "
            "does not provide; build with the official builder"
        )
    return _component(kernel_id, table)


def _check_files(project: Project, table: dict[str, Any]) -> None:
    """Every listed file must exist, once, and every backend needs a component."""
    tables = {"torch": table["torch"]}
    tables |= {f"kernel.{key}": value for key, value in table.get("kernel", {}).items()}
    for where, part in tables.items():
        missing = [s for s in part["src"] if not (project.root / s).is_file()]
        if missing:
            raise BuildError(
                f"build.toml: [{where}] lists {', '.join(missing)}, which does not exist; "
                "correct `src` or add the file"
            )
        if len(set(part["src"])) != len(part["src"]):
            raise BuildError(f"build.toml: [{where}] lists a file twice in `src`")
    for backend in project.backends:
        if not project.kernels.get(backend):
            raise BuildError(
                f"build.toml: backend {backend!r} has no [kernel.*]; remove it from `backends`"
            )
        if backend not in project.stable_abi:
            raise BuildError(
                f"build.toml: [torch] sets no stable-abi for {backend!r}; this script builds "
                "stable-ABI variants only"
            )
    if not (project.package_dir / "__init__.py").is_file():
        raise BuildError(f"{project.package_dir / '__init__.py'} does not exist")
    if (project.package_dir / "_ops.py").exists():
        raise BuildError(
            f"{project.package_dir / '_ops.py'} exists: it is generated into the variant, delete it"
        )


def read_identity(root: Path) -> Identity:
    """Ask git which state of the sources this is.

    Raises:
        BuildError: Without git or outside a work tree. Such a copy has no identity to put into
            the operator namespace, so it must use a variant that was built elsewhere.
    """
    top = _git(root, "rev-parse", "--show-toplevel")
    if Path(top).resolve() != root.resolve():
        raise BuildError(f"{root} is not the top folder of its git work tree ({top} is)")
    changed = _git(root, "status", "--porcelain", "--untracked-files=no")
    # A source that git does not know yet is part of the build all the same.
    untracked = _git(root, "status", "--porcelain", "--untracked-files=all", "--", *BUILD_INPUTS)
    dirty = bool(changed or untracked)
    try:
        commit = _git(root, "rev-parse", "--verify", "HEAD^{commit}")
        tree = _git(root, "rev-parse", "--verify", "HEAD^{tree}")
    except BuildError:
        # Before the first commit HEAD stands for the empty tree, whose id git computes.
        commit, tree = None, _git(root, "hash-object", "-t", "tree", "/dev/null")
    return Identity(uid=tree[:7] + ("_dirty" if dirty else ""), commit=commit, dirty=dirty)


def _git(root: Path, *arguments: str) -> str:
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
        )
    except FileNotFoundError as error:
        raise BuildError("git is not installed; the name of a build comes from git") from error
    except subprocess.CalledProcessError as error:
        raise BuildError(
            f"`git {' '.join(arguments)}` failed in {root}: {error.stderr.strip()}\nThe name of a "
            "build comes from the git tree. In a copy without .git use variants that were built in "
            "a checkout (copy its build/ folder)."
        ) from error
    return done.stdout.strip()
