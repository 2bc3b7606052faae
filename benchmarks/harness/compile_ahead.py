"""Compile what a benchmark will launch, in parallel processes, before the first timing.

Triton compiles one kernel at a time in a process, seconds each; its cache on disk is shared. An
entry of run.py that defines `compile_jobs(built)`, a list of calls, has them spread over processes,
and what they compile is found in the cache afterwards. A call that fails only costs the time of
compiling later, where it is reported.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import time

from .sources import ROOT

LIMIT = 90  # seconds, of all processes together
MEMORY = 8e9  # of the device, bytes per process


def run(entry: str) -> int:
    """Run the jobs of an entry; returns the number of processes that it took (0: too few cores)."""
    import torch

    free, _ = torch.cuda.mem_get_info()
    count = min((os.cpu_count() or 1) - 2, 16, int(free // MEMORY))
    if count < 2:
        return 0
    command = [sys.executable, "-m", "harness.compile_ahead", entry]
    # Their own reports would stand between the rows.
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    started = [
        subprocess.Popen(
            [*command, str(number), str(count)],
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


def main(entry: str, number: int, count: int) -> None:
    """One process: every `count`-th job."""
    import torch

    from . import package

    for job in importlib.import_module(f"harness.{entry}").compile_jobs(package.load())[
        number::count
    ]:
        try:
            job()
            torch.cuda.synchronize()
        except (RuntimeError, ValueError) as error:
            print(f"{entry} {number}: {error}", file=sys.stderr)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
