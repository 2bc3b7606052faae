"""The device of the demo, set up so that equal runs give equal bits."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import distributed

from demo.config import DemoError


def prepare_device(name: str | None, *, threads: int | None) -> torch.device:
    """Choose the device and switch the process to deterministic algorithms.

    Args:
        name: Name of a CPU or CUDA device; None takes CUDA where there is one.
        threads: CPU threads of this process; None keeps torch's choice.

    Returns:
        The device.

    Raises:
        DemoError: If the device does not exist.
    """
    # cuBLAS reads this when it starts; without it, its results may depend on the stream's history
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        device = torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:  # no such type, or a malformed index
        raise DemoError(f"--device {name}: the demo runs on cpu or cuda") from error
    if device.type not in ("cpu", "cuda"):
        raise DemoError(f"--device {device}: the demo runs on cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise DemoError(f"--device {device}: torch {torch.__version__} sees no CUDA device here")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        last = torch.cuda.device_count() - 1
        there = f"cuda:0 to cuda:{last}" if last else "only cuda:0"
        raise DemoError(f"--device {device}: there is {there}")
    if threads is not None:
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    # A debugging aid that comes with the line above and writes every new tensor twice.
    torch.utils.deterministic.fill_uninitialized_memory = False
    return device


def has_bfloat16(device: torch.device) -> bool:
    """Whether the device multiplies bfloat16 in hardware worth using (Ampere and later)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def device_name(device: torch.device) -> str:
    """Model of the GPU, or architecture and thread count of the CPU."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{platform.machine()} CPU, {torch.get_num_threads()} threads"


@contextmanager
def joined(kind: str | None, script: str, backend: str) -> Iterator[torch.device]:
    """This rank's device, within a process group: `backend`, or gloo where ranks share a GPU.

    Args:
        kind: "cpu" or "cuda"; None takes CUDA where there is one.
        script: what torchrun should have started.
        backend: of ranks that have a GPU each.
    """
    kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    local, alone = int(os.environ.get("LOCAL_RANK", "0")), False
    if kind == "cuda":
        alone = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) <= torch.cuda.device_count()
    device = prepare_device(f"cuda:{local * alone}" if kind == "cuda" else "cpu", threads=None)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if distributed.is_initialized():  # by the caller, whose it stays
        yield device
        return
    if "RANK" not in os.environ:
        raise DemoError(
            "start it with torchrun, for instance: torchrun --standalone --nproc-per-node 2 "
            f"examples/{script}.py"
        )
    distributed.init_process_group(backend if alone else "gloo")
    try:
        yield device
    finally:
        distributed.destroy_process_group()
