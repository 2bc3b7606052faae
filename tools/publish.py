"""Send built variants to the Hub: repository type "kernel", branch ``v<version>``.

``make publish DRY_RUN=1`` lists what would be sent and runs every check without a network. Of a
variant go exactly the files that its metadata.json has digests of, that file itself and its
signature; whatever else lies there is refused. The repository comes from build.toml.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hub_card import render_card
from local_build import BuildError
from local_build.audit import audit_library
from local_build.package import LOCAL_BUILD_MARKER, PREBUILT, python_digest
from local_build.project import Project, load_project, read_identity

ROOT = Path(__file__).resolve().parent.parent
REPO_TYPE = "kernel"
METADATA = "metadata.json"
SIGNATURE = "metadata.json.sigstore"
# e_machine, the 16-bit number at byte 18 of an ELF file (System V ABI, its processor supplements).
ELF_MACHINES = {"x86_64": 62, "aarch64": 183}


@dataclass(frozen=True)
class File:
    """One file to send.

    Attributes:
        path: Where it goes in the repository.
        content: A file on disk, or the bytes themselves.
        digest: Its digest in metadata.json, in base64, which it was compared with.
    """

    path: str
    content: Path | bytes
    digest: str | None = None

    @property
    def size(self) -> int:
        """Bytes."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.stat().st_size


@dataclass(frozen=True)
class Plan:
    """Everything one upload does.

    Attributes:
        branch: ``v<version>``; holds the variants and the benchmark scripts.
        variants: Folder names below ``build/`` that are replaced as a whole.
        unsigned: Variants without a signature.
        files: Sent to `branch`.
        card: Sent to ``main``, where the Hub looks for its page.
    """

    repo_id: str
    branch: str
    variants: tuple[str, ...]
    unsigned: tuple[str, ...]
    files: tuple[File, ...]
    card: File


def make_plan(project: Project, allow_local_build: bool) -> Plan:
    """Check every variant in build/ and list what is to be sent.

    Args:
        project: The checkout that the variants were built from.
        allow_local_build: Accept variants of tools/build_local.py.

    Raises:
        BuildError: Listing every reason against publishing.
    """
    if not project.repo_id:
        raise BuildError("build.toml: [general.hub] has no repo-id, so there is nowhere to publish")
    folders = sorted(path.parent for path in project.build_dir.glob(f"*/{METADATA}"))
    if not folders:
        raise BuildError(
            f"no variant in {project.build_dir}: run `make build` or the official build first"
        )
    head = read_identity(project.root).commit
    problems = [
        f"{folder.name}: {problem}"
        for folder in folders
        for problem in check_variant(project, folder, head, allow_local_build)
    ]
    if changed := uncommitted(project.root):
        problems.append(
            f"the checkout, whose card and benchmarks are sent too, differs from its commit in "
            f"{', '.join(changed)}: commit or remove these"
        )
    benchmarks = sorted((project.root / "benchmarks").glob("benchmark*.py"))
    problems += [f"{path} is a symbolic link" for path in benchmarks if path.is_symlink()]
    if problems:
        raise BuildError("not publishable:\n  " + "\n  ".join(problems))
    files = [file for folder in folders for file in files_of(folder)]
    return Plan(
        repo_id=project.repo_id,
        branch=f"v{project.version}",
        variants=tuple(folder.name for folder in folders),
        unsigned=tuple(f.name for f in folders if not (f / SIGNATURE).is_file()),
        files=(*files, *(File(f"benchmarks/{path.name}", path) for path in benchmarks)),
        card=File("README.md", render_card(project).encode()),
    )


def files_of(folder: Path) -> list[File]:
    """metadata.json, its signature if there is one, and what metadata.json has digests of."""
    digests = listed_digests(folder) or {}
    names = sorted({METADATA, *digests} | {SIGNATURE} & set(os.listdir(folder)))
    return [File(f"build/{folder.name}/{name}", folder / name, digests.get(name)) for name in names]


def listed_digests(folder: Path) -> dict[str, str] | None:
    """Path -> digest in a variant's metadata.json; None where it has none."""
    from kernels._rust import Metadata

    digest = Metadata.read_from_file(folder / METADATA).digest
    return None if digest is None else dict(digest.files)


def uncommitted(root: Path) -> list[str]:
    """Files below `root` that are not as HEAD has them; ignored ones do not count."""
    command = ["git", "status", "--porcelain", "--untracked-files=all", "--no-renames", "-z"]
    status = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    return [entry[3:] for entry in status.split("\0") if entry]


def check_variant(
    project: Project, folder: Path, head: str | None, allow_local_build: bool
) -> list[str]:
    """Reasons against publishing one variant; empty when there are none."""
    from kernels._rust import Metadata

    try:
        metadata = Metadata.read_from_file(folder / METADATA)
        problems = check_name(folder, str(metadata.backend.backend_type))
    except (ValueError, OSError) as error:
        return [str(error)]
    if (str(metadata.name), metadata.version) != (project.name, project.version):
        problems.append(
            f"is {metadata.name} version {metadata.version}, but build.toml says "
            f"{project.name} version {project.version}; build again"
        )
    problems += verify_digest(folder)
    problems += check_listed(folder)
    problems += check_binaries(folder)
    if str(metadata.backend.backend_type) == "cuda":
        problems += check_prebuilt(folder)
    provenance = metadata.provenance
    if provenance is None or provenance.kernel is None:
        return [*problems, "provenance names no commit: commit the sources and build again"]
    if provenance.kernel.commit != head:
        problems.append(
            f"was built from commit {provenance.kernel.commit}, but the checkout is at {head}: "
            "check out that commit or build again"
        )
    if provenance.dirty:
        problems.append(
            f"was built from a dirty tree on {provenance.kernel.commit}: commit and build again"
        )
    if LOCAL_BUILD_MARKER in provenance.kernel_builder.version and not allow_local_build:
        problems.append(
            "was built by tools/build_local.py, not by the official builder; upload such builds "
            "for tests only, with --allow-local-build"
        )
    return problems


def check_name(folder: Path, backend: str) -> list[str]:
    """Compare the name of a variant, which clients choose by, with what the folder holds.

    Raises:
        ValueError: It is no name of a variant.
    """
    from kernels.variants import ArchVariant, parse_variant

    variant = parse_variant(folder.name)
    if not isinstance(variant, ArchVariant):
        return ["names a variant without compiled code, which this package has"]
    arch, problems = variant.arch, []
    if arch.backend.name != backend:
        problems.append(f"names the backend {arch.backend.name}, but metadata.json says {backend}")
    for library in sorted(folder.glob("*.so")):
        with library.open("rb") as file:
            machine = int.from_bytes(file.read(20)[18:], "little")
        if machine != ELF_MACHINES.get(arch.platform):
            problems.append(f"{library.name} is not for {arch.platform} (ELF machine {machine})")
    return problems


def check_binaries(folder: Path) -> list[str]:
    """What the libraries of a variant need and not every user has; local builds may need it."""
    problems = []
    for library in sorted(folder.glob("*.so")):
        try:
            problems += audit_library(library, torch=None)
        except BuildError as error:
            problems.append(str(error))
    return problems


def check_prebuilt(folder: Path) -> list[str]:
    """Whether the machine code of Triton's kernels is there, whole and of these sources."""
    try:
        with zipfile.ZipFile(folder / PREBUILT) as archive:
            made_for = archive.comment.decode(errors="replace")
    except (OSError, zipfile.BadZipFile):
        return [f"brings no {PREBUILT.name}, so first calls compile: make prebuilt"]
    if made_for != python_digest(folder):
        return [
            f"{PREBUILT.name} was made for other Python files or for a part of the layers, so "
            "first calls compile: make prebuilt"
        ]
    return []


def verify_digest(folder: Path) -> list[str]:
    """Compare the files of a variant with the digest in its metadata.json."""
    from kernels._rust import Digest, DigestValidationError, Metadata

    expected = Metadata.read_from_file(folder / METADATA).digest
    if expected is None:
        return ["metadata.json has no digest (official builds: `kernel-builder hash`)"]
    try:
        expected.validate(Digest.hash_variant(expected.algorithm, folder))
    except DigestValidationError as error:
        return [f"digest: {violation}" for violation in error.violations]
    return []


def check_listed(folder: Path) -> list[str]:
    """Everything below a variant that no digest vouches for, whatever its name."""
    listed = {METADATA, SIGNATURE, *(listed_digests(folder) or ())}
    problems = []
    for path in (folder, *sorted(folder.rglob("*"))):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            problems.append(f"{name} is a symbolic link: copy what it points to (`cp -rL`)")
        elif "__pycache__" in path.parts[len(folder.parts) :]:
            if path.is_dir():
                problems.append(f"{name} holds bytecode, which has no digest: build again")
        elif not path.is_dir() and name not in listed:
            problems.append(f"{name} has no digest in {METADATA}: remove it or build again")
    return problems


def upload(plan: Plan, api: Any) -> None:
    """Send `plan` as one commit to the version branch, then the card to ``main``.

    Args:
        plan: From `make_plan`.
        api: A `huggingface_hub.HfApi`, or anything with the same methods.
    """
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    where = {"repo_id": plan.repo_id, "repo_type": REPO_TYPE}
    api.create_repo(**where, exist_ok=True)
    branches = {ref.name for ref in api.list_repo_refs(**where).branches}
    new_branch = plan.branch not in branches
    if new_branch:
        api.create_branch(**where, branch=plan.branch)
    # A variant is replaced as a whole, others on the branch stay. A new branch starts as a copy of
    # main, so there every old build goes.
    sent = {file.path for file in plan.files}
    replaced = ("build/",) if new_branch else tuple(f"build/{name}/" for name in plan.variants)
    stale = [
        path
        for path in api.list_repo_files(**where, revision=plan.branch)
        if path.startswith((*replaced, "benchmarks/benchmark")) and path not in sent
    ]
    operations = [
        *(CommitOperationDelete(path_in_repo=path) for path in stale),
        *(_addition(CommitOperationAdd, file) for file in plan.files),
    ]
    message = f"Build of version {plan.branch[1:]}"
    api.create_commit(**where, operations=operations, revision=plan.branch, commit_message=message)
    card = [_addition(CommitOperationAdd, plan.card)]
    api.create_commit(**where, operations=card, revision="main", commit_message="Kernel card")


def _addition(operation: type, file: File) -> Any:
    content = file.content if isinstance(file.content, bytes) else str(file.content)
    return operation(path_in_repo=file.path, path_or_fileobj=content)


def print_plan(plan: Plan) -> None:
    print(f"{REPO_TYPE} repository {plan.repo_id}, branch {plan.branch}:")
    for file in plan.files:
        print(f"{file.size:>12,}  {'verified ' if file.digest else 'no digest'}  {file.path}")
    print(f"{REPO_TYPE} repository {plan.repo_id}, branch main:")
    print(f"{plan.card.size:>12,}  no digest  {plan.card.path}")
    files = (*plan.files, plan.card)
    verified = sum(file.digest is not None for file in files)
    print(
        f"{sum(file.size for file in files):>12,}  bytes in {len(files)} files; {verified} digests "
        f"verified; {METADATA} carries these, the benchmarks and the card are those of the commit"
    )
    for name in plan.unsigned:
        print(f"unsigned: {name} has no {SIGNATURE}")


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dry-run", action="store_true", help="check and list, send nothing")
    parser.add_argument(
        "--allow-local-build", action="store_true", help="accept variants of tools/build_local.py"
    )
    parser.add_argument("--root", type=Path, default=ROOT, help="checkout to publish")
    options = parser.parse_args(arguments)
    try:
        plan = make_plan(load_project(options.root), options.allow_local_build)
    except BuildError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print_plan(plan)
    if options.dry_run:
        print("dry run: nothing was sent")
        return 0
    from huggingface_hub import HfApi

    upload(plan, HfApi())
    print(f"sent to https://hf.co/kernels/{plan.repo_id}/tree/{plan.branch}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
