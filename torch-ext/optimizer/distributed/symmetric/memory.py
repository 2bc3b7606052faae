"""Memory of a GPU that the other ranks of its host map, by torch's symmetric memory.

The only place that asks torch for it. What may keep ranks from sharing memory is found before any
is allocated: a rank that fails in the middle would leave the others waiting.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

BACKEND = "CUDA"
OVERLAPPING = "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"

Facts = Mapping[str, Any]


class SymmetricMemory:
    """Allocates and maps it."""

    device_type = "cuda"

    @staticmethod
    def facts(device: torch.device, *, sets_backend: bool = True) -> Facts:
        """What decides whether this rank can share memory of a device with others.

        `sets_backend`: torch's symmetric memory may be set to the backend that this needs.
        """
        found: dict[str, Any] = {"host": _host(), "device": None, "reached": (), "missing": ""}
        found["overlap"] = os.environ.get(OVERLAPPING) == "1"
        if device.type != "cuda":
            return {**found, "missing": no_peers(device)}
        number = torch.cuda.current_device() if device.index is None else device.index
        uuids = [_uuid(k) for k in range(torch.cuda.device_count())]
        reached = [
            uuid
            for k, uuid in enumerate(uuids)
            if k == number or torch.cuda.can_device_access_peer(number, k)
        ]
        found |= {"device": uuids[number], "seen": uuids, "reached": reached}
        return {**found, "missing": _missing(torch.device("cuda", number), sets_backend)}

    @staticmethod
    def allocate(size: int, device: torch.device) -> Tensor:
        """Memory that others can map: uint8, zeros.

        Not from torch's pool for it, in which what is reused may belong to another rendezvous
        (pytorch #190977).
        """
        from torch._C._distributed_c10d import _SymmetricMemory

        memory = _SymmetricMemory.empty_strided_p2p((size,), (1,), torch.uint8, device)
        memory.zero_()
        torch.cuda.synchronize(device)
        return memory

    @staticmethod
    def mapped(memory: Tensor, group: Any) -> tuple[list[Tensor], Any]:
        """The memory of every rank of a group, and what keeps it mapped; every rank calls it."""
        from torch.distributed import _symmetric_memory

        handle = _symmetric_memory.rendezvous(memory, group.group_name)
        size = (memory.numel(),)
        buffers = [handle.get_buffer(rank, size, torch.uint8) for rank in range(handle.world_size)]
        return buffers, (handle, memory)


def no_peers(device: torch.device) -> str:
    """Why no rank can share memory of a device that is none of CUDA's."""
    return f"no CUDA peers: the parameters are on {device.type}"


def why_not_shared(facts: Sequence[Facts]) -> str | None:
    """Why ranks cannot write into each other's memory, by what all of them said; None if they can.

    The same on every rank.
    """
    if len(facts) == 1:
        return "single rank: nothing is sent"
    for rank, one in enumerate(facts):
        if one["missing"]:
            return f"rank {rank}: {one['missing']}"
    if len({one["host"] for one in facts}) > 1:
        return "multi-node: the ranks are on several hosts, and p2p needs one"
    devices = [one["device"] for one in facts]
    if len({*devices}) < len(devices) and not all(one["overlap"] for one in facts):
        return f"overlapping devices: two ranks use one GPU; {OVERLAPPING}=1 allows it, for tests"
    for rank, one in enumerate(facts):
        for other, device in enumerate(devices):
            if device in one["seen"] and device not in one["reached"]:
                return f"no peer access: the GPU of rank {rank} cannot reach that of rank {other}"
    return None


def _host() -> str:
    """The same on ranks of one host and boot."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot.read_text().strip() if boot.is_file() else ''}"


def _uuid(number: int) -> str:
    return str(torch.cuda.get_device_properties(number).uuid)


def _missing(device: torch.device, sets_backend: bool) -> str:
    """What of torch's symmetric memory is missing on a device; empty if nothing is."""
    try:
        from torch._C._distributed_c10d import _SymmetricMemory
        from torch.distributed import _symmetric_memory
    except ImportError:
        return f"torch too old: {torch.__version__} has no symmetric memory"
    if not hasattr(_SymmetricMemory, "empty_strided_p2p") or not hasattr(
        _symmetric_memory, "rendezvous"
    ):
        return f"torch too old: the symmetric memory of {torch.__version__} has no rendezvous"
    backend = _symmetric_memory.get_backend(device)
    if backend not in (None, BACKEND):
        if not sets_backend:
            return f"another backend: symmetric memory of this process is {backend}'s"
        try:
            _symmetric_memory.set_backend(BACKEND)
        except RuntimeError:
            return (
                f"backend frozen: symmetric memory of this process is {backend}'s; p2p needs "
                f"{BACKEND}'s, chosen before anything is allocated"
            )
    return ""
