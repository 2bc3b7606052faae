"""p2p without a GPU: arenas in memory that processes of one machine, or threads of one, share."""

import contextlib
import copy
import dataclasses
import itertools
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed

from .test_partition import module_of

_NUMBERS = itertools.count()


class SharedMemory:
    """What `SymmetricMemory` is on a GPU: files that every rank maps."""

    device_type = "cpu"

    @staticmethod
    def facts(device: torch.device, **options: bool) -> dict[str, Any]:
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

    On CPUs in shared memory. `before` is called ahead of every exchange with its number. One arena
    per group serves all of them, if `kept` is given: of such a call before.
    """

    def __init__(
        self,
        opt: Any,
        before: Callable[[int], None] = lambda number: None,
        kept: dict[Any, Any] | None = None,
        **options: Any,
    ) -> None:
        self.transport = module_of(opt, "distributed.transport").GroupTransport
        self.engine = module_of(opt, "distributed.p2p").PeerToPeer
        self.team = module_of(opt, "distributed.process_groups")
        self.options = {"transport": "p2p", "strict": True, "min_bytes": 0, **options}
        self.before, self.kept, self.counted = before, kept, Counter()

    def __enter__(self) -> Counter[str]:
        self.patch = pytest.MonkeyPatch()
        real_settle, real_exchange = self.transport.settle, self.engine.exchange
        if os.environ["RANKS_DEVICE"] == "cpu":
            self.patch.setattr(self.transport, "memory", SharedMemory)

        def settle(transport, traffic, options, *, together):
            options = dataclasses.replace(options, **self.options)
            return real_settle(transport, traffic, options, together=together)

        def exchange(engine, *arguments):
            self.counted["p2p"] += 1
            self.before(self.counted["p2p"])
            done = real_exchange(engine, *arguments)
            self.counted["barriers"] = engine.barriers
            without = sum(kept.without for kept in engine._kept.values())
            self.counted["without"] = max(self.counted["without"], without)
            return done

        def transport_of(group):
            ranks = tuple(distributed.get_process_group_ranks(group))
            if ranks not in self.kept:
                self.kept[ranks] = self.transport(group)
            return self.kept[ranks]

        self.patch.setattr(self.transport, "settle", settle)
        self.patch.setattr(self.engine, "exchange", exchange)
        if self.kept is not None:
            self.patch.setattr(self.team, "GroupTransport", transport_of)
        return self.counted

    def __exit__(self, *error: object) -> None:
        self.patch.undo()


@contextlib.contextmanager
def arenas_on_threads(opt: Any, seed: int) -> Iterator[None]:
    """On CPUs every arena exchanges on a thread meanwhile, as it does on a stream on GPUs.

    Nobody waits for another rank before he must, and some exchanges are late, so that what is read
    or written too early shows in the bits.
    """
    module = module_of(opt, "distributed.arena")
    arena, done, at_once = module.Arena, module.Done, module.Arena.exchange
    dice, threads = random.Random(seed + distributed.get_rank()), {}

    def on_thread(one: Any, call: Callable[..., Any], *arguments: Any) -> Any:
        if one not in threads:
            threads[one], one._seen = ThreadPoolExecutor(1), one._status.clone()
        return threads[one].submit(call, *arguments)

    @torch.no_grad()
    def run(one: Any, pause: float, arguments: tuple[Any, ...]) -> None:
        time.sleep(pause)
        at_once(one, *arguments)

    def exchange(one: Any, targets, sources, own, arriving, timed=None) -> Any:
        given = [*targets], [*sources], own, arriving, timed
        pause, now = dice.choice((0, 0, 0.003)), copy.copy(one)
        one.launched += 1
        return done(on_thread(one, run, now, pause, given))

    def note_status(one: Any) -> None:
        one._noted = on_thread(one, lambda: one._seen.copy_(one._status))

    def late_rank(one: Any) -> int | None:
        if one._noted is None:
            one.note_status()
        noted, one._noted = one._noted, None
        noted.result()
        return one.noted_late_rank()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arena, "exchange", exchange)
        patch.setattr(arena, "note_status", note_status)
        patch.setattr(arena, "late_rank", late_rank)
        patch.setattr(arena, "order", lambda one: on_thread(one, int).result())
        patch.setattr(done, "wait", lambda one: one.event and one.event.result())
        yield
    for thread in threads.values():
        thread.shutdown()


@contextlib.contextmanager
def staged(opt: Any) -> Iterator[None]:
    """Collectives of gloo that take no CUDA tensors go through host memory meanwhile."""
    module = module_of(opt, "distributed.transport")
    collectives, future = module.AllToAll, module.Future
    real = collectives.exchange, collectives.collect, collectives._reduce

    def exchange(transport, going, outbox, coming, inbox):
        there = torch.empty(inbox.shape, dtype=inbox.dtype)
        real[0](transport, going, outbox.cpu(), coming, there).wait()
        return future(inbox.copy_(there))

    def collect(transport, values, found):
        there = torch.empty(found.shape, dtype=found.dtype)
        real[1](transport, values.cpu(), there).wait()
        return future(found.copy_(there))

    def reduce(transport, values, op):
        there = values.cpu()
        real[2](transport, there, op).wait()
        return future(values.copy_(there))

    with pytest.MonkeyPatch.context() as patch:
        if os.environ["RANKS_DEVICE"] != "cpu" and distributed.get_backend() == "gloo":
            patch.setattr(collectives, "exchange", exchange)
            patch.setattr(collectives, "collect", collect)
            patch.setattr(collectives, "_reduce", reduce)
        yield
