"""Compile what a benchmark will launch, in parallel processes, before the first timing.

Triton compiles one kernel at a time in a process, seconds each; its cache on disk is shared. An
entry of run.py that defines `compile_jobs(built, measured)`, a list of calls without those of cases
that are measured already, has them spread over processes, and what they compile is found in the
cache afterwards. A call that fails only costs the time of compiling later, where it is reported.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection

from .package import Built
from .sources import ROOT

LIMIT = 90  # seconds, of all processes together
MEMORY = 8e9  # of the device, bytes per process


def jobs_of(entry: str, built: Built, measured: Collection[str]) -> list[Callable[[], object]]:
    """The jobs of an entry, a module, without those of cases that are measured already."""
    return importlib.import_module(entry).compile_jobs(built, measured)


def run(entry: str, built: Built, measured: Collection[str]) -> int:
    """Run the jobs; returns the number of processes that it took (0: too few cores, or jobs)."""
    import torch

    jobs = len(jobs_of(entry, built, measured))
    if jobs < 2:
        return 0
    free, _ = torch.cuda.mem_get_info()
    count = min((os.cpu_count() or 1) - 2, 16, int(free // MEMORY), jobs)
    if count < 2:
        return 0
    command = [sys.executable, "-m", "harness.compile_ahead", entry]
    # Their own reports would stand between the rows.
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [
        subprocess.Popen(
            [*command, str(number), str(count), *sorted(measured)],
            cwd=ROOT / "benchmarks",
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            **quiet,
        )
        for number in range(count)
    ]
    end = time.monotonic() + LIMIT
    for process in started:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    return count


def main(entry: str, number: int, count: int, measured: Collection[str]) -> None:
    """One process: every `count`-th job."""
    import torch

    from . import package

    built = package.load()
    for job in jobs_of(entry, built, measured)[number::count]:
        try:
            job()
            torch.cuda.synchronize()
            package.settle(built.package)
        except (RuntimeError, ValueError) as error:
            print(f"{entry} {number}: {error}", file=sys.stderr)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
