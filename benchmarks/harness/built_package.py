"""The built package, loaded as a user loads it, its commit, and the demo's modules."""

from __future__ import annotations

import importlib
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import tomllib

from .sources import ROOT


@dataclass(frozen=True)
class Built:
    """A loaded variant and its provenance."""

    package: ModuleType
    commit: str
    clean: bool


def load(root: Path = ROOT, backend: str | None = None) -> Built:
    """Load `build/` through `get_kernel`; the commit comes from the variant's metadata.json.

    Without a backend it is that of this machine.
    """
    from kernels import get_kernel

    general = tomllib.loads((root / "build.toml").read_text())["general"]
    repo_id = general["hub"]["repo-id"]
    os.environ["LOCAL_KERNELS"] = f"{repo_id}={root}"
    package = get_kernel(
        repo_id, version=general["version"], backend=backend, trust_remote_code=True
    )
    metadata = json.loads((Path(package.__file__).parent / "metadata.json").read_text())
    commit, clean = provenance(metadata)
    return Built(package, commit, clean)


def module(package: ModuleType, name: str) -> ModuleType:
    """A submodule of the loaded package, which imports only what its users need."""
    return importlib.import_module(f"{package.__name__}.{name}")


def settle(package: ModuleType, calls: Iterable[Callable[[], object]] = ()) -> None:
    """Make these calls and let nothing be compiled beside those that follow: before a clock starts.

    Twice, since what runs in the background while the first waits for it may ask for kernels.
    """
    calls = list(calls)
    for _ in range(2):
        for call in calls:
            call()
        module(package, "kernels.launch.triton_compile").settle()


def provenance(metadata: dict) -> tuple[str, bool]:
    """(commit, whether the files were exactly that commit) of a variant's metadata."""
    kernel = metadata.get("provenance", {}).get("kernel", {})
    return kernel.get("commit", "0" * 40), "commit" in kernel and not kernel.get("dirty", True)


def demo_modules() -> dict[str, ModuleType]:
    """The demo's model and corpus."""
    folder = str(ROOT / "examples")
    if folder not in sys.path:
        sys.path.insert(0, folder)
    from demo import corpus, model

    return {"corpus": corpus, "model": model}
