"""Processes that stay up between tests and run functions of the tests as the ranks of one group."""

import functools
import importlib
import inspect
import multiprocessing
import multiprocessing.connection
import os
import shutil
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

# How long a collective may wait for another rank: the loaded machine of a test run is slow.
COLLECTIVE_TIMEOUT = timedelta(seconds=100)
DOOMED_TIMEOUT = timedelta(seconds=8)  # where one is going to die


class RankError(AssertionError):
    """A rank raised; the message has its traceback."""


class Ranks:
    """`world` processes in one group: gloo on CPUs, NCCL on GPUs, gloo where GPUs are fewer."""

    def __init__(
        self, world: int, repo_id: str, root: str, device: str, timeout: timedelta | None = None
    ) -> None:
        context = multiprocessing.get_context("forkserver")
        os.environ |= {
            "LOCAL_KERNELS": f"{repo_id}={root}",
            "RANKS_REPO_ID": repo_id,
            "RANKS_DEVICE": device,
        }
        context.set_forkserver_preload([f"{__package__}._preload"])
        self.world = world
        self.folder = tempfile.mkdtemp(prefix="ranks-")
        self.pipes, self.processes = [], []
        setting = (world, self.folder, device, timeout or COLLECTIVE_TIMEOUT)
        for rank in range(world):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, there, *setting), daemon=True)
            process.start()
            there.close()
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, function: Callable[..., Any], *args: Any, timeout: float = 240) -> list[Any]:
        """What `function(opt, *args)` returned on every rank.

        Raises:
            RankError: it raised on one of them, or took too long; the processes are gone then.
        """
        results = self.outcomes(function, *args, timeout=timeout, patience=3)
        failed = [f"rank {r}: {text}" for r, (done, text) in enumerate(results) if not done]
        if failed:
            self.close()
            raise RankError("\n".join(failed))
        return [value for _, value in results]

    def outcomes(
        self,
        function: Callable[..., Any],
        *args: Any,
        timeout: float = 240,
        patience: float | None = None,
    ) -> list[tuple[bool, Any]]:
        """Per rank (True, result) or (False, traceback or what became of the process).

        With `patience`, the others have so many seconds left when one has failed.
        """
        for pipe in self.pipes:
            pipe.send((function, args))
        results: list[tuple[bool, Any]] = [(False, "no answer in time")] * self.world
        pending, end = set(range(self.world)), time.monotonic() + timeout
        while pending and (left := end - time.monotonic()) > 0:
            ready = multiprocessing.connection.wait([self.pipes[r] for r in pending], left)
            for rank in [r for r in pending if self.pipes[r] in ready]:
                pending.remove(rank)
                try:
                    results[rank] = self.pipes[rank].recv()
                except EOFError:
                    results[rank] = (False, "the process is gone")
                if patience is not None and not results[rank][0]:
                    end = min(end, time.monotonic() + patience)
        return results

    @property
    def alive(self) -> bool:
        return bool(self.processes) and all(process.is_alive() for process in self.processes)

    def close(self) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.join(2)
            if process.is_alive():
                process.kill()
                process.join()
            process.close()
        self.pipes, self.processes = [], []
        shutil.rmtree(self.folder, ignore_errors=True)


def _serve(rank: int, pipe: Any, world: int, folder: str, device: str, timeout: timedelta) -> None:
    import torch
    from torch import distributed

    from . import _preload

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    gpus = torch.cuda.device_count() if device == "cuda" else 0
    if gpus:
        torch.cuda.set_device(rank % gpus)
    opt = _preload.opt or _preload.load()
    distributed.init_process_group(
        "nccl" if gpus >= world else "gloo",
        store=distributed.FileStore(f"{folder}/store", world),
        rank=rank,
        world_size=world,
        timeout=timeout,
    )
    while True:
        try:
            function, args = pipe.recv()
        except (EOFError, OSError):
            break
        try:
            answer = (True, function(opt, *args))
        except Exception:
            answer = (False, traceback.format_exc())
        try:
            pipe.send(answer)
        except (BrokenPipeError, OSError):
            break
    os._exit(0)  # a group whose other ranks are gone would wait for them


class Pools:
    """One set of ranks per world size, started when first asked for, again after a failure."""

    def __init__(self, repo_id: str, root: str, device: str) -> None:
        self.arguments = (repo_id, root, device)
        self.pools: dict[int, Ranks] = {}

    def __call__(self, world: int) -> Ranks:
        pool = self.pools.get(world)
        if pool is None or not pool.alive:
            if pool is not None:
                pool.close()
            pool = self.pools[world] = Ranks(world, *self.arguments)
        return pool

    def close(self) -> None:
        for pool in self.pools.values():
            pool.close()


def on_ranks(count: int | None = None) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A test that runs on so many ranks, or on `world`: each gets what the test is given.

    What it returns, if anything, must be the same on all of them.
    """

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        opt, *names = inspect.signature(test).parameters.values()

        def run(ranks: Any, **given: Any) -> None:
            world = count or given["world"]
            same_everywhere(ranks(world).run(_undecorated, test.__module__, test.__name__, given))

        functools.update_wrapper(run, test)
        run.__signature__ = inspect.Signature([opt.replace(name="ranks"), *names])
        return run

    return decorate


def _undecorated(opt: Any, module: str, name: str, given: dict[str, Any]) -> Any:
    return getattr(importlib.import_module(module), name).__wrapped__(opt, **given)


def same_everywhere(values: Sequence[Any]) -> Any:
    """The one value that all ranks returned."""
    assert all(value == values[0] for value in values), f"ranks differ: {values}"
    return values[0]
