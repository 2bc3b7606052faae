"""A library and the Python sources to ``build/<variant>/``, in the Hub's layout."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from . import BuildError
from .compilation import object_folder
from .project import Identity, Project

# kernels 0.14.0 is the first client with this metadata; the official builder computes the same.
KERNELS_MINVER = "0.14.0"
# Marks variants of tools/build_local.py in `provenance.kernel-builder.version`. The official
# builder writes its plain version there, so tools/publish.py can tell the two apart.
LOCAL_BUILD_MARKER = "+build-local"
STAGING_PREFIX = ".staging-"
# In a CUDA variant: machine code of Triton's kernels, of tools/prebuild.py. Its comment is the
# `python_digest` of the variant that it was made for.
PREBUILT = Path("kernels", "launch", "prebuilt_sm90.zip")

OPS_PY = '''\
import torch

from . import {ops}

ops = torch.ops.{ops}


def add_op_namespace_prefix(op_name: str) -> str:
    """Prefix `op_name` with the namespace of this build."""
    return f"{ops}::{{op_name}}"
'''


@contextmanager
def build_lock(project: Project, backend: str) -> Iterator[None]:
    """Let one build of `backend` at a time write below ``build/``; a second one waits."""
    path = project.build_dir / ".objects" / f"{backend}.lock"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


@contextmanager
def staging_folder(project: Project, backend: str) -> Iterator[Path]:
    """A folder beside the variants, on the same file system, removed at the end.

    The caller holds `build_lock`: a folder of `backend` found here is an interrupted build's.
    """
    prefix = f"{STAGING_PREFIX}{backend}-"
    for interrupted in project.build_dir.glob(f"{prefix}*"):
        shutil.rmtree(interrupted)
    folder = Path(tempfile.mkdtemp(prefix=prefix, dir=project.build_dir))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def write_variant(
    folder: Path,
    project: Project,
    identity: Identity,
    backend: str,
    ops_name: str,
    library: Path,
) -> None:
    """Fill `folder` with everything one variant consists of."""
    from kernels._rust import Digest, DigestAlgorithm, Metadata

    suffixes = {f".{ext}" for ext in project.pyext}
    for source in sorted(project.package_dir.rglob("*")):
        relative = source.relative_to(project.package_dir)
        if source.is_file() and source.suffix in suffixes and "__pycache__" not in relative.parts:
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, folder / relative)
    (folder / "_ops.py").write_text(OPS_PY.format(ops=ops_name))
    shutil.copyfile(library, folder / f"{ops_name}.abi3.so")

    files = Digest.hash_variant(DigestAlgorithm.SHA256, folder).files
    metadata = describe_variant(project, identity, backend, ops_name, files)
    path = folder / "metadata.json"
    path.write_text(json.dumps(metadata, indent=2, sort_keys=True) + "\n")
    Metadata.read_from_file(path)  # raises for anything that a client would refuse


def describe_variant(
    project: Project, identity: Identity, backend: str, ops_name: str, files: dict[str, str]
) -> dict:
    """The content of metadata.json; `files` maps each shipped file to its digest."""
    from kernels import __version__ as kernels_version

    device: dict = {"type": backend}
    if backend == "cuda":
        device["archs"] = sorted(
            {c for part in project.kernels[backend] for c in part.capabilities}
        )
    builder = {"kernel-builder": {"version": kernels_version + LOCAL_BUILD_MARKER}}
    kernel = {"kernel": {"commit": identity.commit, "dirty": identity.dirty}}
    metadata = {
        "name": project.name,
        "id": ops_name,
        "version": project.version,
        "kernels-minver": KERNELS_MINVER,
        "license": project.license,
        "upstream": project.upstream,
        "source": project.source,
        "python-depends": list(project.python_depends),
        "kernel-depends": [],
        "backend": device,
        "digest": {"algorithm": "sha256", "files": files},
        # Before the first commit there is no kernel commit to name.
        "provenance": builder | (kernel if identity.commit else {}),
    }
    return {key: value for key, value in metadata.items() if value is not None}


def python_digest(variant: Path) -> str:
    """sha256 of a variant's Python files and their names, 64 hexadecimal digits."""
    digest = hashlib.sha256()
    for path in sorted(variant.rglob("*.py")):
        name, content = path.relative_to(variant).as_posix(), path.read_bytes()
        digest.update(f"{name}\0{hashlib.sha256(content).hexdigest()}\0".encode())
    return digest.hexdigest()


def is_current(staged: Path, installed: Path) -> bool:
    """Whether `installed` already holds exactly the bytes of `staged`."""
    from kernels._rust import Digest, DigestAlgorithm

    if not (installed / "metadata.json").is_file():
        return False
    if (staged / "metadata.json").read_bytes() != (installed / "metadata.json").read_bytes():
        return False
    digests = [Digest.hash_variant(DigestAlgorithm.SHA256, f).files for f in (staged, installed)]
    return digests[0] == digests[1]


def install(staged: Path, target: Path) -> None:
    """Put `staged` in the place of `target` in one step; `staged` then holds the old content.

    A process that loads the variant meanwhile sees the old folder or the new one, never a mixture.
    """
    os.chmod(staged, 0o755)  # mkdtemp makes folders private
    if not target.exists():
        os.rename(staged, target)
        return
    at_fdcwd, rename_exchange = -100, 2  # <fcntl.h>, <linux/fs.h>
    libc = ctypes.CDLL(None, use_errno=True)
    paths = (os.fsencode(staged), os.fsencode(target))
    if libc.renameat2(at_fdcwd, paths[0], at_fdcwd, paths[1], rename_exchange) != 0:
        code = ctypes.get_errno()
        raise BuildError(f"cannot exchange {staged} and {target}: {os.strerror(code)}")


def remove_build(project: Project, variant: str, backend: str) -> None:
    """Delete the variant and the cached objects of `backend`."""
    for folder in (project.build_dir / variant, project.root / object_folder(backend)):
        shutil.rmtree(folder, ignore_errors=True)
