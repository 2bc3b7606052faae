"""The learning-rate sweep of the demo: many runs at a time on one device."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from tqdm import tqdm

from demo.config import OPTIMIZERS, DemoError, RunConfig
from demo.corpus import Corpus, read_corpus
from demo.device import prepare_device
from demo.package import Package, load_package
from demo.training import Trainer, train

EXTENSIONS = 6  # how often a grid may grow at its edge before the sweep gives up


@dataclass(frozen=True)
class Result:
    """One finished run of the sweep.

    Args:
        run: Its configuration.
        held_out: Pairs (steps done, held-out loss).
    """

    run: RunConfig
    held_out: list[tuple[int, float]]

    @property
    def final(self) -> float:
        """Held-out loss at the end; infinite if the run diverged."""
        loss = self.held_out[-1][1]
        return loss if math.isfinite(loss) else math.inf


@dataclass(frozen=True)
class Workplace:
    """What every worker process sets up for itself.

    Args:
        device: Name of the device, shared by all workers.
        threads: CPU threads of each worker.
        corpus: Folder of the text, None for the standard library.
        context: Sequence length.
        max_bytes: Train text to read at most.
    """

    device: str
    threads: int
    corpus: Path | None
    context: int
    max_bytes: int


_worker: tuple[Corpus, torch.device, Package]


def _set_up(place: Workplace) -> None:
    global _worker
    device = prepare_device(place.device, threads=place.threads)
    corpus = read_corpus(
        place.corpus, context=place.context, max_bytes=place.max_bytes, device=device
    )
    _worker = corpus, device, load_package(device)


def _run(run: RunConfig) -> Result:
    corpus, device, package = _worker
    return Result(run, train(Trainer(run, corpus, device, package)).held_out)


def sweep(
    template: RunConfig,
    grids: dict[str, tuple[float, ...]],
    *,
    seeds: int,
    jobs: int,
    place: Workplace,
) -> list[Result]:
    """Train at every learning rate and seed, and widen a grid until its best value is inside.

    Args:
        template: Run whose optimizer, learning rate and seed are replaced.
        grids: Ascending learning rates of each optimizer.
        seeds: Runs per learning rate, with seeds 0, 1, ...
        jobs: Runs at a time, all on one device.
        place: Set-up of the worker processes.

    Returns:
        All results.

    Raises:
        DemoError: If a grid still ends at its best value after `EXTENSIONS` extensions.
    """
    spawn = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
    results: list[Result] = []
    wanted = [(name, lr) for name in reversed(OPTIMIZERS) for lr in grids[name]]  # slow ones first
    pool = ProcessPoolExecutor(jobs, spawn, _set_up, (place,))
    try:
        for _ in range(EXTENSIONS + 1):
            runs = [
                replace(template, optimizer=name, lr=lr, seed=seed)
                for name, lr in wanted
                for seed in range(seeds)
            ]
            results += _finish(pool, runs)
            wanted = [
                (name, lr)
                for name in OPTIMIZERS
                for lr in beyond_the_edge(mean_losses(results, name))
            ]
            if not wanted:
                return results
            for name, lr in wanted:
                print(f"{name}: the best learning rate is at the edge, adding {lr:g}")
    finally:
        pool.shutdown(cancel_futures=True)
    raise DemoError(
        f"no interior best learning rate after {EXTENSIONS} extensions; start from another grid: "
        + ", ".join(f"{name} {mean_losses(results, name)}" for name, _ in wanted)
    )


def _finish(pool: ProcessPoolExecutor, runs: list[RunConfig]) -> list[Result]:
    results = []
    with tqdm(total=len(runs), unit="run") as bar:
        for done in as_completed([pool.submit(_run, run) for run in runs]):
            result = done.result()
            results.append(result)
            run = result.run
            bar.update()
            bar.write(f"{run.optimizer} lr {run.lr:g} seed {run.seed}: {result.final:.4f}")
    return results


def mean_losses(results: Iterable[Result], optimizer: str) -> dict[float, float]:
    """Learning rate, ascending -> final held-out loss, mean over the seeds."""
    losses: dict[float, list[float]] = {}
    for result in results:
        if result.run.optimizer == optimizer:
            losses.setdefault(result.run.lr, []).append(result.final)
    return {lr: sum(values) / len(values) for lr, values in sorted(losses.items())}


def beyond_the_edge(losses: dict[float, float]) -> list[float]:
    """The learning rates to add: none if the best one has a worse neighbour on either side."""
    rates = list(losses)
    best = min(rates, key=losses.get)
    below = [rates[0] ** 2 / rates[1]] if best == rates[0] else []  # the grid goes on evenly
    above = [rates[-1] ** 2 / rates[-2]] if best == rates[-1] else []
    return [float(f"{rate:.2g}") for rate in below + above]
