"""Why no built variant serves a system, and what to do: a sentence. Standard library alone."""

from __future__ import annotations

import importlib.util
import platform
import re
import sysconfig
from dataclasses import dataclass
from pathlib import Path

LEAST_TORCH = (2, 11)  # whose stable ABI build.toml asks for
_VARIANT = re.compile(r"torch-stable-abi\d+-(cpu|cu\d+)-(\w+)-linux")


@dataclass(frozen=True)
class System:
    """What the client looks at when it chooses a variant.

    Args:
        os: As `platform.system()` says it: "Linux", "Darwin", "Windows".
        machine: Such as "x86_64".
        free_threaded: Of Python.
        torch: Its version; None where it is not installed.
        built_for: "cpu", "cuda 13.0", or another backend of torch.
        gpu: Whether torch sees a CUDA device.
    """

    os: str
    machine: str
    free_threaded: bool = False
    torch: str | None = None
    built_for: str = "cpu"
    gpu: bool = False


def here() -> tuple[System, list[str], Path]:
    """This system, the names of the variants below build/, and the checkout."""
    root = Path(__file__).resolve().parent.parent
    variants = sorted(path.parent.name for path in root.glob("build/torch*/metadata.json"))
    free_threaded = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
    system = System(platform.system(), platform.machine(), free_threaded)
    if importlib.util.find_spec("torch") is None:
        return system, variants, root
    import torch

    built_for = "cpu"
    for name in ("cuda", "hip", "xpu"):
        if version := getattr(torch.version, name, None):
            built_for = f"{name} {version}"
    return (
        System(
            system.os,
            system.machine,
            free_threaded,
            torch.__version__,
            built_for,
            torch.cuda.is_available(),
        ),
        variants,
        root,
    )


def error_message(system: System, variants: list[str], root: Path) -> str:
    """What the user is told, from the most to the least general reason."""
    if system.os != "Linux":
        return (
            f"there is no compiled variant of optimizer for {system.os}, and nothing of it runs "
            "without one. It runs on Linux: in WSL 2, in a container, on a machine with a GPU"
        )
    if system.free_threaded:
        return "free-threaded Python is not supported; use a Python with the global lock"
    if system.torch is None:
        return "torch is not installed for this Python: `pip install torch`"
    if tuple(map(int, re.findall(r"\d+", system.torch)[:2])) < LEAST_TORCH:
        least = ".".join(map(str, LEAST_TORCH))
        return f"torch {system.torch} is too old: install {least} or newer"
    found = [match for name in variants if (match := _VARIANT.fullmatch(name))]
    built = {match[1] for match in found if match[2] == system.machine}
    backend, _, version = system.built_for.partition(" ")
    cpu = '`get_kernel(..., backend="cpu")`' + (
        " takes the CPU variant that is built"
        if "cpu" in built
        else f" takes the CPU variant, once `make build BACKEND=cpu` in {root} has made it"
    )
    if backend == "cpu":
        return f"nothing is built for the CPU: run `make build` in {root}"
    if backend != "cuda":
        return f"there is no variant for {system.built_for}; {cpu}"
    why = f"torch {system.torch} is built for CUDA {version}"
    if not system.gpu:
        return f"{why}, and there is no GPU: {cpu}"
    kinds = " and ".join(sorted(built)) if built else "nothing"
    return (
        f"{why}, and built is {kinds}: run `make build BACKEND=cuda` in {root}, with nvcc of CUDA "
        f"{version.partition('.')[0]}.0 to {version}; or on the CPU, {cpu}"
    )
