"""The binary rules of a Hub kernel, checked on a finished shared library.

Nothing here loads the library, so a CUDA variant is checked on a machine without CUDA.
"""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from . import BuildError
from .toolchain import Torch

CHECKS = (
    *("manylinux_2_28", "abi3 3.9", "torch stable ABI", "RPATH", "NEEDED", "undefined symbols"),
    "paths of headers",
)
MANYLINUX, PYTHON_ABI = "manylinux_2_28", "3.9"
OLDEST_TORCH = "2.11"

# torch brings libtorch*, its CUDA build brings libcudart; the rest is part of manylinux_2_28.
ALLOWED_NEEDED = re.compile(
    r"libtorch\.so|libtorch_cuda\.so|libcudart\.so\.1[23]|libstdc\+\+\.so\.6|libgcc_s\.so\.1"
    r"|libc\.so\.6|libm\.so\.6|libpthread\.so\.0|libdl\.so\.2|librt\.so\.1|ld-linux-.*\.so\.[12]"
)
SHIM_PREFIXES = ("aoti_", "torch_")  # of the C functions of torch's stable ABI
# A declaration is AOTI_TORCH_EXPORT <return type> <name>( ; the macro's own #define is not one.
_DECLARATION = re.compile(r"AOTI_TORCH_EXPORT\s+[\w:*&\s]*?\b((?:aoti|torch)_\w+)\s*\(")
# `__FILE__` in a header of torch as the compiler found it; the official builder has its own below
# /nix/store, equal for everyone.
HEADER = re.compile(rb"\0(/(?!nix/store/)[!-~]*/torch/csrc/[!-~]*)")


@dataclass(frozen=True)
class Dynamic:
    """The dynamic section and the undefined symbols of an ELF file.

    Attributes:
        needed: Libraries in NEEDED entries.
        runpaths: RPATH and RUNPATH entries.
        undefined: Name to symbol version; the version is "" for a symbol without one.
    """

    needed: tuple[str, ...]
    runpaths: tuple[str, ...]
    undefined: dict[str, str]


def audit_library(path: Path, torch: Torch | None) -> list[str]:
    """Run every check on the shared library `path`.

    Args:
        path: A finished library; it is read, never loaded.
        torch: Installation whose headers must declare every torch symbol, as the oldest release
            must.

    Returns:
        What keeps it from being published and lets it run on this machine: symbols of a newer glibc
        or libstdc++ than every user has, and folders of whoever built it.

    Raises:
        BuildError: Listing every finding that keeps it from running, or naming a checker that is
            not installed.
    """
    try:
        known = {f"torch {OLDEST_TORCH}": symbols_of_release(OLDEST_TORCH)}
    except ImportError as error:
        raise _missing("torch-abi-audit", "torch stable ABI") from error
    if torch is not None:
        known[f"torch {torch.version}"] = declared_symbols(torch.include)
    dynamic = read_dynamic(path)
    findings = [
        *check_python_abi(path),
        *check_torch_abi(path),
        *check_dynamic(dynamic),
        *check_undefined(dynamic.undefined, known),
    ]
    if findings:
        raise BuildError(f"{path.name} breaks binary rules:\n  " + "\n  ".join(findings))
    return [*check_manylinux(path), *check_headers(path)]


def check_headers(path: Path) -> list[str]:
    """Absolute paths of torch's headers, which every error message of theirs would show."""
    found = {match.decode() for match in HEADER.findall(path.read_bytes())}
    return [f"embeds the path {min(found)}, one of {len(found)}"] if found else []


def check_manylinux(path: Path) -> list[str]:
    """Symbols of a newer glibc or libstdc++ than manylinux has, by the official checker."""
    return [
        f"{MANYLINUX}: {finding.name}@{finding.dep}_{finding.version}"
        for finding in _object_file(path).check_manylinux(MANYLINUX)
    ]


def check_python_abi(path: Path) -> list[str]:
    """Symbols outside of CPython's stable ABI, by the official checker."""
    found = _object_file(path).check_python_abi(PYTHON_ABI)
    return [f"abi3 {PYTHON_ABI}: {finding!r}" for finding in found]


def _object_file(path: Path) -> Any:
    try:
        from kernel_abi_check import ObjectFile
    except ImportError as error:
        raise _missing("kernel-abi-check", "manylinux and abi3") from error
    return ObjectFile(path)


def check_torch_abi(path: Path) -> list[str]:
    """What ``torch-abi-audit --check both`` reports."""
    from torch_abi_audit.inspect import inspect_package
    from torch_abi_audit.report import CheckPolicy, collect_violations, format_violations

    report = inspect_package(str(path))
    if report.has_error:
        return [f"torch-abi-audit could not inspect {path}"]
    policy = CheckPolicy.BOTH
    violations = collect_violations([report], policy)
    return [f"torch-abi-audit: {format_violations(violations, policy)}"] if violations else []


def check_dynamic(dynamic: Dynamic) -> list[str]:
    """No search path, and no library beyond torch and what comes with it."""
    findings = [f"RPATH or RUNPATH {entry!r} (must have none)" for entry in dynamic.runpaths]
    for name in dynamic.needed:
        if not ALLOWED_NEEDED.fullmatch(name):
            findings.append(f"NEEDED {name}: not part of torch, its CUDA runtime or manylinux")
    if "libtorch.so" not in dynamic.needed:
        findings.append("NEEDED lacks libtorch.so: its symbols would not be found when loading")
    return findings


def check_undefined(undefined: dict[str, str], known: dict[str, frozenset[str]]) -> list[str]:
    """Every undefined symbol has a provider.

    Args:
        undefined: As in `Dynamic.undefined`.
        known: Name of a torch release to the symbols its stable headers declare.
    """
    findings = []
    for name, version in sorted(undefined.items()):
        if name.startswith(SHIM_PREFIXES):
            findings += [
                f"{name} is not declared by {t}" for t, s in known.items() if name not in s
            ]
        elif not version and not name.startswith(("Py", "_Py")):
            findings.append(f"{name} is undefined and no library provides it; a source is missing")
    return findings


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


def read_dynamic(path: Path) -> Dynamic:
    """Read `path` with readelf.

    Raises:
        BuildError: When readelf is missing or cannot read the file.
    """
    try:
        done = subprocess.run(
            ["readelf", "--wide", "--dynamic", "--dyn-syms", str(path)],
            capture_output=True,
            text=True,
            check=True,
            env={"LC_ALL": "C", "PATH": "/usr/local/bin:/usr/bin:/bin"},
        )
    except FileNotFoundError as error:
        raise _missing("readelf", "RPATH, NEEDED and undefined symbols") from error
    except subprocess.CalledProcessError as error:
        raise BuildError(f"readelf cannot read {path}: {error.stderr.strip()}") from error
    text = done.stdout
    undefined = {}
    for line in text.splitlines():
        # Num: Value Size Type Bind Vis Ndx Name@VERSION (index); weak ones may stay undefined
        words = line.split()
        if len(words) >= 8 and words[6] == "UND" and words[4] == "GLOBAL":
            name, _, version = words[7].partition("@")
            undefined[name] = version.lstrip("@")
    return Dynamic(
        needed=tuple(re.findall(r"\(NEEDED\).*\[(.*)\]", text)),
        runpaths=tuple(re.findall(r"\((?:RPATH|RUNPATH)\).*\[(.*)\]", text)),
        undefined=undefined,
    )


def _missing(tool: str, checks: str) -> BuildError:
    return BuildError(
        f"{tool} is not installed, so the {checks} checks cannot run: `make setup` installs it, or "
        "tools/build_local.py --no-audit builds a variant that was not checked"
    )
