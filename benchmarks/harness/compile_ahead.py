"""Compile what a benchmark will launch, in parallel processes, before the first timing.

A process compiles one kernel after the other, seconds each; the caches on disk of Triton and of
torch.compile are shared. An entry of run.py that defines `compile_jobs(built, measured)`, name ->
call without those of cases that are measured already, has them spread over processes, and what they
compile is found in the cache afterwards. Commands that measure the same file share the jobs. A call
that fails only costs the time of compiling later, where it is reported.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time
from collections.abc import Callable, Collection

from .built_package import Built
from .lazy import torch
from .progress import Claims
from .sources import ROOT

LIMIT = 90  # seconds, of all processes together
MEMORY = 8e9  # of the device, bytes per process
Jobs = dict[str, Callable[[], object]]


def jobs_of(entry: str, function: str, built: Built, measured: Collection[str]) -> Jobs:
    """The jobs of a function of an entry, without those of cases that are measured already."""
    return getattr(importlib.import_module(entry), function)(built, measured)


def run(
    entry: str, built: Built, measured: Collection[str], function: str = "compile_jobs"
) -> None:
    """Run the jobs, and say how long that took; nothing where there are too few cores, or jobs."""
    start = time.monotonic()
    jobs = len(jobs_of(entry, function, built, measured))
    if jobs < 2:
        return
    free, _ = torch.cuda.mem_get_info()
    count = min(len(os.sched_getaffinity(0)) - 1, 16, int(free // MEMORY), jobs)
    if count < 2:
        return
    command = [sys.executable, "-m", "harness.compile_ahead", entry, function, *sorted(measured)]
    # Their own reports would stand between the rows.
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHINDUCTOR_COMPILE_THREADS": "1"}
    started = [
        subprocess.Popen(command, cwd=ROOT / "benchmarks", env=environment, **quiet)
        for _ in range(count)
    ]
    for process in started:
        try:
            process.wait(max(0.0, start + LIMIT - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    print(f"[{time.monotonic() - start:.0f} s] compiled by {count} processes", flush=True)


def main(entry: str, function: str, measured: Collection[str]) -> None:
    """One process: job after job that no other one has begun."""
    from . import built_package

    built = built_package.load()
    claims = Claims(f"{entry} {function} {built.commit}")
    for name, job in jobs_of(entry, function, built, measured).items():
        if not claims.take(name):
            continue
        try:
            job()
            torch.cuda.synchronize()
            built_package.settle(built.package)
        except (RuntimeError, ValueError) as error:
            print(f"{entry} {name}: {error}", file=sys.stderr)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
