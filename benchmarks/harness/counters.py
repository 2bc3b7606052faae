"""DRAM bytes of what a child process runs on the device, counted by Nsight Compute.

Counters need a process that ncu has started, and rights that not every machine gives: callers say
in their row what is missing instead of a number.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import signal
import subprocess
import sys

from .sources import ROOT

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")


class NotCountedError(Exception):
    """Why there are no counts."""


def counted(module: str, *options: str, limit: int = 60) -> tuple[list[float], str]:
    """Runs ``python -m module`` under ncu: DRAM bytes of every kernel it counted, and its output.

    Only what lies between `torch.cuda.profiler.start()` and `stop()` is counted, as it runs: caches
    and clocks stay as they are.

    Args:
        module: Child, such as "harness.orthogonalize_traffic".
        options: More options of ncu, such as a filter of kernel names.
        limit: Seconds.

    Raises:
        NotCountedError: No ncu, no rights, the child failed, or nothing was counted.
    """
    ncu = shutil.which("ncu")
    if ncu is None:
        raise NotCountedError("no ncu on this machine")
    as_it_runs = (
        "--profile-from-start",
        "off",
        "--cache-control",
        "none",
        "--clock-control",
        "none",
    )
    asked = ("--csv", "--print-units", "base", "--metrics", ",".join(METRICS))
    try:
        text = output_of([ncu, *asked, *as_it_runs, *options, sys.executable, "-m", module], limit)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotCountedError(f"ncu failed: {type(error).__name__}") from error
    return parsed(text), text


def output_of(command: list[str], limit: float) -> str:
    """What a command prints; past `limit` seconds it is killed with its own children.

    Raises:
        subprocess.SubprocessError: it failed or took too long.
    """
    child = subprocess.Popen(
        command,
        cwd=ROOT / "benchmarks",
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = child.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        # ncu's child would hold the pipe, and the device while others are timed.
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        raise
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return text


def parsed(text: str) -> list[float]:
    """Bytes read and written per kernel, from ncu's CSV, in the order that they ran.

    Raises:
        NotCountedError: There is no table, or another unit in it.
    """
    lines = text.splitlines()
    heads = [number for number, line in enumerate(lines) if line.startswith('"ID"')]
    if not heads:
        raise NotCountedError("ncu printed no table")
    per_kernel: dict[int, float] = {}
    for entry in csv.DictReader(io.StringIO("\n".join(lines[heads[0] :]))):
        if entry["Metric Name"] in METRICS:
            if entry["Metric Unit"] != "byte":
                raise NotCountedError(f"ncu counted in {entry['Metric Unit']}")
            number, value = int(entry["ID"]), float(entry["Metric Value"].replace(",", ""))
            per_kernel[number] = per_kernel.get(number, 0.0) + value
    return [per_kernel[number] for number in sorted(per_kernel)]
