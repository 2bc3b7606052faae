"""What this machine's GPU reaches, how much memory a call adds, and the DRAM bytes of kernels.

Bytes are counted by Nsight Compute, in a process that it has started and with rights that not every
machine gives: callers say in their row what is missing instead of a number.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable

from .lazy import torch
from .sources import ROOT
from .timer import medians

COPY_BYTES = 1 << 33  # read plus written
SIZE = 8192  # of the square matrix products
METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")


def copy_call(bytes_moved: int) -> Callable[[int], object]:
    """A device copy that moves so many bytes, half of them read and half of them written."""
    source = torch.randint(0, 256, (bytes_moved // 2,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda _: target.copy_(source)


def ceilings() -> dict[str, float]:
    """`copy_tbps` counts bytes read plus bytes written; zeros would run faster than random data."""
    ms = medians({"copy": copy_call(COPY_BYTES)}, sets=1, rounds=10)["copy"]
    found = {"copy_tbps": COPY_BYTES / ms / 1e9}
    for name, dtype in (("bf16_tflops", torch.bfloat16), ("fp16_tflops", torch.float16)):
        a, b = (torch.randn(SIZE, SIZE, device="cuda", dtype=dtype) for _ in range(2))
        ms = medians({"matmul": lambda _, a=a, b=b: a @ b}, sets=1, rounds=10)["matmul"]
        found[name] = 2 * SIZE**3 / ms / 1e9
    return {name: round(value, 3) for name, value in found.items()}


def driver() -> str:
    """Version of the NVIDIA driver."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    lines = subprocess.run(query, capture_output=True, text=True, check=True).stdout.splitlines()
    return lines[0].strip()


def added_mb(call: Callable[[], object]) -> float:
    """Device memory that one call adds at its peak, its result included."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def peak_mb(call: Callable[[], object], before_it: Callable[[], object] = lambda: None) -> float:
    """`added_mb` of a call behind one that is not counted; `before_it` drops what that left."""
    call()
    before_it()
    return added_mb(call)


class NotCountedError(Exception):
    """Why there are no counts."""


def counted(module: str, *options: str, limit: int = 60) -> tuple[list[float], str]:
    """Runs ``python -m module`` under ncu: DRAM bytes of every kernel it counted, and its output.

    Only what lies between `torch.cuda.profiler.start()` and `stop()` is counted, as it runs: caches
    and clocks stay as they are.

    Args:
        module: Child, such as "harness.orthogonalize".
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
