"""p2p without a GPU: arenas in memory that processes of one machine, or threads of one, share."""

from __future__ import annotations

import dataclasses
import itertools
import os
import tempfile
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from .test_sharing import module_of

_NUMBERS = itertools.count()


class SharedMemory:
    """What `SymmetricMemory` is on a GPU: files that every rank maps."""

    @staticmethod
    def facts(device: torch.device) -> dict[str, Any]:
        pid = os.getpid()
        return {"host": "", "device": pid, "seen": (), "reached": (), "missing": "", "overlap": 0}

    @staticmethod
    def allocate(size: int, device: torch.device) -> torch.Tensor:
        path = Path(tempfile.gettempdir()) / f"arena-{os.getpid()}-{next(_NUMBERS)}"
        path.write_bytes(bytes(size))
        memory = torch.from_file(str(path), shared=True, size=size, dtype=torch.uint8)
        memory.path = path
        return memory

    @staticmethod
    def mapped(memory: torch.Tensor, group: Any) -> tuple[list[torch.Tensor], Any]:
        paths: list[Any] = [None] * distributed.get_world_size(group)
        distributed.all_gather_object(paths, str(memory.path), group=group)
        size, here = memory.numel(), distributed.get_rank(group)
        buffers = [
            memory
            if rank == here
            else torch.from_file(path, shared=True, size=size, dtype=torch.uint8)
            for rank, path in enumerate(paths)
        ]
        distributed.barrier(group)
        memory.path.unlink()
        return buffers, None


class Direct:
    """Every optimizer exchanges by p2p meanwhile; counts the exchanges of this rank.

    On CPUs in shared memory. `before` is called ahead of every exchange with its number.
    """

    def __init__(
        self, opt: Any, before: Callable[[int], None] = lambda number: None, **options: Any
    ) -> None:
        self.transport = module_of(opt, "distributed.transport").GroupTransport
        self.engine = module_of(opt, "distributed.p2p").PeerToPeer
        self.options = {"transport": "p2p", "strict": True, "min_bytes": 0, **options}
        self.before, self.counted = before, Counter()
        self.lock = threading.Lock()

    def __enter__(self) -> Counter[str]:
        self.originals = self.transport.memory, self.transport.settle, self.engine.exchange
        if os.environ["RANKS_DEVICE"] == "cpu":
            self.transport.memory = SharedMemory

        def settle(transport, traffic, options):
            return self.originals[1](
                transport, traffic, dataclasses.replace(options, **self.options)
            )

        def exchange(engine, *arguments):
            self.counted["p2p"] += 1
            self.before(self.counted["p2p"])
            done = self.originals[2](engine, *arguments)
            self.counted["barriers"] = engine.barriers
            return done

        self.transport.settle, self.engine.exchange = settle, exchange
        return self.counted

    def __exit__(self, *error: object) -> None:
        self.transport.memory, self.transport.settle, self.engine.exchange = self.originals
