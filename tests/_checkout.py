"""Throw-away checkouts for the tests of the build, and the tools of this one as modules."""

import functools
import importlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

from ._project import ROOT

SOURCES = ("build.toml", "CARD.md", ".gitignore", "torch-ext", "kernels-src")
# Commits must not depend on the settings of whoever runs the tests.
GIT_ENVIRONMENT = {
    **{f"GIT_{who}_NAME": "test" for who in ("AUTHOR", "COMMITTER")},
    **{f"GIT_{who}_EMAIL": "test@localhost" for who in ("AUTHOR", "COMMITTER")},
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_SYSTEM": os.devnull,
}


def tool(name: str) -> ModuleType:
    """A module below ``tools/``, such as ``"local_build.audit"``.

    Imported on use: the official builder collects these tests without the tools folder.
    """
    if str(ROOT / "tools") not in sys.path:
        sys.path.insert(0, str(ROOT / "tools"))
    return importlib.import_module(name)


def run_command(*command: str | Path, **options) -> subprocess.CompletedProcess[str]:
    """A program, with its output captured; options are those of `subprocess.run`."""
    return subprocess.run(command, capture_output=True, text=True, **options)


def git(root: Path, *arguments: str) -> str:
    environment = os.environ | GIT_ENVIRONMENT
    return run_command("git", *arguments, cwd=root, env=environment, check=True).stdout.strip()


def copy_from_root(target: Path, *names: str) -> None:
    """Files and folders of this checkout."""
    for name in names:
        if (ROOT / name).is_dir():
            shutil.copytree(
                ROOT / name, target / name, ignore=shutil.ignore_patterns("__pycache__")
            )
        else:
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, target / name)


def copy_checkout(target: Path) -> Path:
    """The sources of this checkout as a clean git work tree with one commit.

    The object cache of the CPU comes along, as in a checkout that was built before: objects do not
    depend on the folder, so only what differs is compiled.
    """
    copy_from_root(target, *SOURCES)
    cache = tool("local_build.compilation").object_folder("cpu")
    if (ROOT / cache).is_dir():
        shutil.copytree(ROOT / cache, target / cache)
    git(target, "init", "--quiet")
    git(target, "add", "--all")
    git(target, "commit", "--quiet", "--message", "sources")
    return target


def run_build(root: Path, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Run tools/build_local.py on `root`, never raising."""
    command = (sys.executable, ROOT / "tools" / "build_local.py", "--root", root, *arguments)
    return run_command(*command, env=os.environ | GIT_ENVIRONMENT | environment)


@functools.lru_cache(maxsize=1)
def built_checkout(folder: Path) -> Path:
    """A clean checkout with its CPU variant; shared, so tests copy it before they change it.

    Args:
        folder: pytest's base folder of this run, `tmp_path_factory.getbasetemp()`.
    """
    root = copy_checkout(folder / "built_checkout")
    done = run_build(root, "--backend", "cpu")
    assert done.returncode == 0, done.stderr
    return root


def metadata_of(variant: Path) -> dict:
    return json.loads((variant / "metadata.json").read_text())


def variant_of(root: Path) -> Path:
    """The CPU variant below `root`."""
    (folder,) = (root / "build").glob("torch-stable-abi211-cpu-*")
    return folder
