"""What the machine reaches at all: a large copy and large matrix products, on random data."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

from .timer import medians

COPY_BYTES = 1 << 33  # read plus written
SIZE = 8192  # of the square matrix products


def copy_call(bytes_moved: int) -> Callable[[int], object]:
    """A device copy that moves so many bytes, half of them read and half of them written."""
    import torch

    source = torch.randint(0, 256, (bytes_moved // 2,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda _: target.copy_(source)


def measure() -> dict[str, float]:
    """`copy_tbps` counts bytes read plus bytes written; zeros would run faster than random data."""
    import torch

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
