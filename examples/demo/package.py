"""Loads the kernel package as any user does, from this checkout's build/ folder."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import tomllib
import torch

from demo.config import DemoError

ROOT = Path(__file__).resolve().parents[2]


class MissingVariantError(DemoError):
    """Nothing that fits the device has been built."""


@dataclass(frozen=True)
class Package:
    """The loaded package and where it came from.

    Args:
        module: What `get_kernel` returned.
        repo_id: Hub id, from build.toml.
        version: Version, from build.toml.
        variant: Build variant that was chosen for this machine.
        commit: Commit the variant was built from, "" if its metadata has none.
        dirty: Whether the sources differed from that commit.
        build: First digits of the SHA-256 of its metadata, which lists the digest of every file.
    """

    module: ModuleType
    repo_id: str
    version: int
    variant: str
    commit: str
    dirty: bool
    build: str

    def describe(self) -> dict[str, Any]:
        """All fields but the module, for JSON."""
        return {name: value for name, value in vars(self).items() if name != "module"}


def load_package(device: torch.device) -> Package:
    """Load the variant for `device` with `get_kernel`; LOCAL_KERNELS is set if the user did not.

    Args:
        device: Decides between the CPU and the CUDA variant.

    Returns:
        The package.

    Raises:
        MissingVariantError: If no variant for this machine has been built.
    """
    from kernels import get_kernel

    general = tomllib.loads((ROOT / "build.toml").read_text())["general"]
    repo_id, version = general["hub"]["repo-id"], general["version"]
    os.environ.setdefault("LOCAL_KERNELS", f"{repo_id}={ROOT}")
    try:
        module = get_kernel(repo_id, version=version, backend=device.type, trust_remote_code=True)
    except (FileNotFoundError, ImportError) as error:  # a checkout itself raises the latter
        raise MissingVariantError(
            f"no {device.type} variant for this machine under "
            f"LOCAL_KERNELS={os.environ['LOCAL_KERNELS']}; "
            f"run `make build BACKEND={device.type}` first\n{error}"
        ) from error
    folder = Path(module.__file__).parent
    metadata_text = (folder / "metadata.json").read_bytes()
    metadata = json.loads(metadata_text)
    built_from = metadata.get("provenance", {}).get("kernel", {})
    return Package(
        module=module,
        repo_id=repo_id,
        version=version,
        variant=folder.name,
        commit=built_from.get("commit", ""),
        dirty=built_from.get("dirty", True),
        build=hashlib.sha256(metadata_text).hexdigest()[:16],
    )


def load_first(devices: Sequence[torch.device]) -> tuple[Package, torch.device]:
    """Load the variant for the first of `devices` that has one.

    Args:
        devices: In the order of preference, at least one.

    Returns:
        The package and its device.

    Raises:
        MissingVariantError: If there is none for any of them; it speaks of the first.
    """
    preferred, *others = devices
    try:
        return load_package(preferred), preferred
    except MissingVariantError:
        for device in others:
            with contextlib.suppress(MissingVariantError):
                return load_package(device), device
        raise
