"""Say what `make demo` is going to do here, and about how long each part takes.

It runs before the environment exists, so with the standard library alone.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

from local_build.toolchain import cuda_device_count

ROOT = Path(__file__).resolve().parent.parent

# Seconds on two cores that do nothing else, of what the demo imports, with a CPU build of torch;
# pip uses one of them and waits for the network. Measured: 43.
ENVIRONMENT = 45
# Core seconds of a build from nothing, and seconds of both runs with two cores or a GPU.
COMPILATION = {"cpu": 30, "cuda": 1200}
TRAINING = {"cpu": 290, "cuda": 60}
VARIANTS = {"cpu": "torch*-cpu-*", "cuda": "torch*-cu[0-9]*"}


def parts(environment: Path | None, backend: str, cores: int, root: Path) -> dict[str, float]:
    """What is still to be done -> about how many seconds it takes.

    Args:
        environment: File that `make setup` leaves when it is done; None where it installs nothing.
        backend: ``"cpu"`` or ``"cuda"``.
        cores: Processors to use.
        root: The checkout.
    """
    needed: dict[str, float] = {}
    requirements = root / "tools" / "requirements.txt"
    if environment is not None and (
        not environment.exists() or environment.stat().st_mtime < requirements.stat().st_mtime
    ):
        needed["install the environment"] = ENVIRONMENT
    if not any((root / "build").glob(VARIANTS[backend])):
        needed[f"compile the {backend} variant"] = COMPILATION[backend] / cores
    threads = min(cores, 8) if backend == "cpu" else 2
    needed["train two models"] = TRAINING[backend] * 2 / threads
    return needed


def announcement(needed: dict[str, float], cores: int) -> str:
    """One line for a person."""
    listed = ", ".join(f"{what} {_minutes(seconds)}" for what, seconds in needed.items())
    total = _minutes(sum(needed.values()))
    return f"make demo takes about {total} on {cores} idle cores: {listed}"


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.1f} min"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--environment", type=Path, help="file that marks a finished environment")
    parser.add_argument("--backend", help="cpu, cuda or all (default: cuda where there is a GPU)")
    options = parser.parse_args(arguments)
    backend = options.backend
    if backend not in ("cpu", "cuda"):
        found = cuda_device_count() > 0 and shutil.which("nvcc") is not None
        backend = "cuda" if backend == "all" or found else "cpu"
    cores = len(os.sched_getaffinity(0))
    print(announcement(parts(options.environment, backend, cores, ROOT), cores), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
