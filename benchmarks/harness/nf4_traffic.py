"""DRAM bytes of the products over 4-bit experts, counted by Nsight Compute in a child process.

Counters need a process that ncu has started, and rights that not every machine gives: whatever is
missing is said in the row instead of a number.
"""

from __future__ import annotations

import csv
import io
import os
import shutil
import signal
import subprocess
import sys

from .moe_problems import MODELS, Layer
from .nf4_goals import TRAFFIC
from .sources import ROOT

METRICS = ("dram__bytes_read.sum", "dram__bytes_write.sum")
KERNELS = "regex:nf4_product"  # Triton's and the compiled one
LIMIT = 40  # seconds


def least_bytes(layer: Layer, active: int, per_weight: float) -> float:
    """Packed weights, factors and activations of both forward products, each moved once."""
    total = 0.0
    for name, (k, n) in layer.projections().items():
        outer, inner = (k, n) if name == "gate_up" else (n, k)
        rows = layer.tokens if name == "gate_up" else layer.rows  # down leaves a row per slot
        low = layer.rows * layer.rank + active * layer.rank * n
        total += active * k * n * per_weight + 2 * (rows * outer + layer.rows * inner + low)
    return total


def parsed(text: str, launches: int) -> list[float]:
    """Bytes per layer, from ncu's CSV: `launches` kernels of each, in the order that they ran.

    Raises:
        ValueError: other kernels than expected were counted.
    """
    lines = text.splitlines()
    heads = [number for number, line in enumerate(lines) if line.startswith('"ID"')]
    if not heads:
        raise ValueError("ncu printed no table")
    per_kernel: dict[int, float] = {}
    for entry in csv.DictReader(io.StringIO("\n".join(lines[heads[0] :]))):
        if entry["Metric Name"] in METRICS:
            if entry["Metric Unit"] != "byte":
                raise ValueError(f"ncu counted in {entry['Metric Unit']}")
            number, value = int(entry["ID"]), float(entry["Metric Value"].replace(",", ""))
            per_kernel[number] = per_kernel.get(number, 0.0) + value
    values = [per_kernel[number] for number in sorted(per_kernel)]
    if len(values) != launches * len(TRAFFIC):
        raise ValueError(f"ncu counted {len(values)} kernels, not {launches} per layer")
    return [sum(values[at : at + launches]) for at in range(0, len(values), launches)]


def measured() -> dict[str, float | str]:
    """Model -> DRAM bytes over the least that the forward products need, or why there is none."""
    ncu = shutil.which("ncu")
    if ncu is None:
        return dict.fromkeys(TRAFFIC, "no ncu on this machine")
    command = [
        ncu,
        "--csv",
        "--print-units",
        "base",
        "--metrics",
        ",".join(METRICS),
        "--kernel-name",
        KERNELS,
    ]
    try:
        text = output_of([*command, sys.executable, "-m", "harness.nf4_traffic"])
        counted = parsed(text, launches=2)
        printed = [line.split() for line in text.splitlines() if line.startswith("least ")]
        least = {model: float(number) for _, model, number in printed}
        return {model: value / least[model] for model, value in zip(TRAFFIC, counted, strict=True)}
    except Exception as error:  # of any kind: the rows are wanted without these bytes, too
        return dict.fromkeys(TRAFFIC, f"ncu failed: {type(error).__name__} {str(error)[-80:]}")


def output_of(command: list[str]) -> str:
    """What a command prints; past LIMIT it is killed with its own children.

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
        text, _ = child.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        # ncu's child would hold the pipe, and the device while the layers are timed.
        os.killpg(child.pid, signal.SIGKILL)
        child.communicate()
        raise
    if child.returncode:
        raise subprocess.CalledProcessError(child.returncode, command)
    return text


def main() -> None:
    """Forward of each layer once: the child that ncu looks at."""
    import torch

    from . import package
    from .moe_lora import calls_of
    from .nf4 import BYTES, Nf4Case

    built = package.load()
    for model in TRAFFIC:
        layer = Layer(model, *MODELS[model])
        case = Nf4Case(layer, built, 0)
        print(f"least {model} {least_bytes(layer, case.active, BYTES)}", flush=True)
        calls_of(case)["fwd"]["ours"]()
        torch.cuda.synchronize()


if __name__ == "__main__":
    main()
