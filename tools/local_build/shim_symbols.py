"""The C functions of torch's stable ABI, as its headers declare them."""

from __future__ import annotations

import re
from pathlib import Path

from .errors import BuildError

# A declaration is AOTI_TORCH_EXPORT <return type> <name>( ; the macro's own #define is not one.
_DECLARATION = re.compile(r"AOTI_TORCH_EXPORT\s+[\w:*&\s]*?\b((?:aoti|torch)_\w+)\s*\(")


def declared_symbols(include: Path) -> frozenset[str]:
    """Names of all exported shim functions below the include folder of a torch installation.

    Functions behind ``#ifdef USE_CUDA`` and version guards are included: the question is whether
    the release has the symbol, not whether this build may call it.
    """
    csrc = include / "torch" / "csrc"
    names: set[str] = set()
    for folder in ("inductor/aoti_torch", "stable"):
        for header in sorted((csrc / folder).rglob("*.h")):
            names.update(_DECLARATION.findall(header.read_text(encoding="utf-8")))
    if not names:
        raise BuildError(f"no shim declarations below {csrc}: is torch installed with its headers?")
    return frozenset(names)


def symbols_of_release(release: str) -> frozenset[str]:
    """Names of the shim functions that a torch release has, by torch-abi-audit's tables."""
    from torch_abi_audit.torch_versions import parse_version, stable_shim_versions

    last = parse_version(f"{release}.0")
    return frozenset(name for name, since in stable_shim_versions().items() if since <= last)
