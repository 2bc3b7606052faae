"""Build ``build/<variant>/`` from build.toml without Nix, for development and CI.

The official Nix build (flake.nix) makes what is published; this script gives the same layout,
names and checks with the compilers of this machine. ``python tools/build_local.py --help``.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

from local_build import BuildError, audit, compilation, package
from local_build.project import Identity, Project, load_project, read_identity
from local_build.toolchain import Toolchain, default_backend, find_toolchain

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: list[str] | None = None) -> int:
    try:
        if sys.platform != "linux":  # before anything that Linux alone has
            raise BuildError(f"there is no variant for {sys.platform}: build on Linux")
        options = _parser().parse_args(arguments)
        project = load_project(options.root)
        identity = read_identity(options.root)
        for backend in _backends(options, project):
            with package.build_lock(project, backend):
                _build(project, identity, backend, options)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--backend",
        action="append",
        help="cpu, cuda or all; may be repeated (default: cuda where there are a CUDA device, a "
        "CUDA build of torch and a toolkit whose variant it can load, else cpu)",
    )
    parser.add_argument(
        "--cuda-version",
        help="toolkit to use, such as 13.0, even if the installed torch cannot load its variant",
    )
    cores = len(os.sched_getaffinity(0))
    parser.add_argument("--jobs", type=int, default=cores, help="compilers at once")
    parser.add_argument("--clean", action="store_true", help="build from nothing")
    parser.add_argument(
        "--publishable",
        action="store_true",
        help="fail where the variant runs here but cannot be published",
    )
    parser.add_argument(
        "--no-audit", action="store_true", help="skip the binary checks (reported, never silent)"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to build")
    return parser


def _backends(options: argparse.Namespace, project: Project) -> list[str]:
    asked = options.backend
    if asked is None:
        default = default_backend(options.cuda_version)
        print(f"building the {default.backend} variant, no --backend given: {default.reason}")
        asked = [default.backend]
    backends = list(project.backends) if "all" in asked else list(dict.fromkeys(asked))
    if unknown := [backend for backend in backends if backend not in project.backends]:
        raise BuildError(
            f"--backend {unknown[0]}: build.toml has {', '.join(project.backends)} (or all)"
        )
    return backends


def _audit(library: Path, tools: Toolchain, options: argparse.Namespace) -> str:
    """Check `library`; the words for it in the last line of a build."""
    if options.no_audit:
        print(f"warning: --no-audit: none of {', '.join(audit.CHECKS)} ran", file=sys.stderr)
        return "not audited"
    unpublishable = audit.audit_library(library, tools.torch)
    if not unpublishable:
        return "audit passed"
    words = f"runs here, cannot be published: {', '.join(unpublishable)}"
    if options.publishable:
        raise BuildError(
            f"--publishable: {library.name} {words}. Build with the official builder (flake.nix), "
            "or with a g++ and a glibc that are older"
        )
    return words


def _build(project: Project, identity: Identity, backend: str, options: argparse.Namespace) -> None:
    start = time.perf_counter()
    tools = find_toolchain(backend, options.cuda_version)
    variant = project.variant(backend, tools.cuda.version if tools.cuda else None)
    target = project.build_dir / variant
    if options.clean:
        package.remove_build(project, variant, backend)
    ops_name = f"_{project.package_name}_{backend}_{identity.uid}"
    library = compilation.build_library(project, backend, ops_name, tools, options.jobs)
    with package.staging_folder(project, backend) as staged:
        package.write_variant(staged, project, identity, backend, ops_name, library.path)
        audited = _audit(staged / library.path.name, tools, options)
        current = package.is_current(staged, target)
        if not current:
            package.install(staged, target)
    seconds = time.perf_counter() - start
    print(
        f"{target.relative_to(project.root)}: {'unchanged' if current else 'written'}, "
        f"{library.compiled} compiled, {library.reused} reused, "
        f"{audited}, {seconds:.1f} s"
    )


if __name__ == "__main__":
    sys.exit(main())
