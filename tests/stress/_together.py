"""The soak over several ranks: every rank plays the same episode and compares it with a twin."""

from __future__ import annotations

import contextlib
import copy
import logging
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from ..distributed._cases import mesh_of, spread
from ._episode import ALIKE, PlannedError, raises
from ._problem import Pair, Run, Source, bits, options_of

HELD = ("sharded", "sharded", "replicated", "unreduced")
MESHES = {1: [(1,)], 2: [(2,), (1, 2)], 4: [(4,), (2, 2), (1, 4), (4, 1)]}
EVENT_RATE = 0.6
EVENTS: dict[str, Callable[[Together], None]] = {}


def event(function: Callable[[Together], None]) -> Callable[[Together], None]:
    EVENTS[function.__name__] = function
    return function


class Together(Pair):
    """The optimizer of this rank, and the twin that works alone."""

    def __init__(self, opt: Any, seed: int) -> None:
        super().__init__()
        self.opt, self.rank = opt, distributed.get_rank()
        self.world = distributed.get_world_size()
        self.generator = generator = random.Random(seed)
        self.held = generator.choice(HELD)
        self.mesh = mesh_of(generator.choice(MESHES[self.world]))
        self.places: dict[str, tuple[str, ...]] = {}
        roundings = ("nearest",) if self.held == "unreduced" else ("nearest", "residual")
        self.source = Source(generator, roundings=roundings)
        arguments: dict[str, Any] = {}
        if self.held == "unreduced":
            arguments = {"gradients": "unreduced"}
        elif self.held == "replicated":
            arguments = {"process_group": distributed.group.WORLD}
        if self.held != "sharded" or generator.random() < 0.5:
            limit = generator.choice([2**28, 4096, 1])
            arguments["distributed"] = opt.DistributedConfig(in_flight_bytes=limit)
        front = "MuonAdamW"
        if self.held != "unreduced":
            front = generator.choice(["Muon", "MuonAdamW"])
        given = [self.source.group(muon=muon) for muon in (True, False)]
        values = {one.name: one.value() for group in given for one in group.params}
        placed = {name: self.placed(name, value) for name, value in values.items()}
        options = [{} for _ in given]
        self.twin = Run(opt, front, list(given), {}).make(values, options)
        self.run = Run(opt, front, list(given), arguments).make(placed, options)
        self.happened = [f"{self.held} on {tuple(self.mesh.mesh.shape)}, {arguments}"]

    def placed(self, name: str, value: Tensor) -> Tensor:
        """What this rank holds of a tensor."""
        if self.held != "sharded":
            return value
        if name not in self.places:
            choices = ["R", *(f"S{k}" for k in range(min(value.ndim, 2)))]
            chosen = [self.generator.choice(choices) for _ in self.mesh.mesh.shape]
            if len(chosen) == 2 and chosen[1] == "S0" and self.generator.random() < 0.5:
                chosen[0] = f"T{self.mesh.mesh.shape[1]}"
            self.places[name] = tuple(chosen)
        return spread(value, self.mesh, *self.places[name])

    def fill_gradients(self) -> None:
        """Whole numbers: sums over ranks and their mean over two or four are exact."""
        rate = self.generator.choice([0.0, 0.0, 0.1, 1.0])
        for name, param in self.twin.params.items():
            missing = self.generator.random() < rate
            seed = self.generator.randrange(10**9)
            parts = [None] if missing else [_whole(param, seed + k) for k in range(self.world)]
            if missing:
                param.grad = self.run.params[name].grad = None
            elif self.held == "unreduced":
                param.grad = torch.stack(parts).sum(0).div(self.world)
                self.run.params[name].grad = parts[self.rank]
            else:
                param.grad = parts[0]
                self.run.params[name].grad = self.placed(name, parts[0].clone())

    def compare(self, what: str, *, state: bool = False) -> None:
        for name, param in self.run.params.items():
            self._compare_one(f"{what}: {name}", param, self.twin.params[name])
            if self.held == "unreduced" or not state:
                continue
            own = self.run.optimizer.state[param]
            for key, value in self.twin.optimizer.state[self.twin.params[name]].items():
                assert key in own, f"{what}: {name} has no {key}"
                self._compare_one(f"{what}: {name}: {key}", own[key], value)
        options = [options_of(run.optimizer) for run in (self.run, self.twin)]
        assert options[0] == options[1], f"{what}: options differ"

    def _compare_one(self, what: str, tensor: Tensor, other: Tensor) -> None:
        found = whole(tensor.detach())
        other = other.detach()
        missing = found.isnan(), other.isnan()  # a NaN may have any sign and payload
        same_nan = torch.equal(*missing)
        if not same_nan or bits(found[~missing[0]]) != bits(other[~missing[1]]):
            shape = tuple(found.shape)
            away = (found.double() - other.detach().double()).abs().max().item()
            raise AssertionError(f"{what} {shape} {found.dtype} differs by {away}")

    def tick(self) -> None:
        self.fill_gradients()
        if self.generator.random() < EVENT_RATE:
            name = self.generator.choice([*EVENTS])
            self.happened.append(name)
            EVENTS[name](self)
            self.compare(f"after {name}")
        self.happened.append("step")
        self.run.optimizer.step()
        self.twin.optimizer.step()
        self.compare("step", state=self.generator.random() < 0.2)

    def outcomes(self, action: Callable[[], Any]) -> list[str]:
        """What became of an action on every rank."""
        try:
            action()
            outcome = ""
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}"
        found: list[Any] = [None] * self.world
        distributed.all_gather_object(found, outcome)
        return found

    def refused(self, what: str, action: Callable[[], Any], *errors: type, names: str = "") -> None:
        """All ranks raise one of the errors."""
        found = self.outcomes(action)
        kinds = [error.__name__ for error in errors]
        refused = all(one.split(":")[0] in kinds and names in one for one in found)
        assert refused, f"{what}: {found}"

    def load(self, saved: dict[str, Any]) -> None:
        """As a trainer loads a checkpoint: parameters, which are the twin's, and state."""
        with torch.no_grad():
            for name, param in self.run.params.items():
                param.copy_(self.placed(name, self.twin.params[name].detach()))
        self.run.optimizer.load_state_dict(saved)


def _whole(param: Tensor, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 9, param.shape, generator=generator).to(param.dtype)


def whole(tensor: Any) -> Tensor:
    if not hasattr(tensor, "full_tensor"):
        return tensor
    if tensor.dtype == torch.int16:  # which gloo cannot gather
        return tensor.int().full_tensor().to(torch.int16)
    return tensor.full_tensor()


@event
def save_optimizer(episode: Together) -> None:
    """Whole state is saved and loaded; parts are refused by name."""
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        optimizer = episode.run.optimizer

        def save() -> None:
            episode.opt.save_optimizer(optimizer, Path(folder))

        sharded = episode.held == "unreduced" or any(
            text != "R" and size > 1
            for name in episode.run.params
            for text, size in zip(
                episode.places.get(name, ()), episode.mesh.mesh.shape, strict=False
            )
        )
        if sharded:
            episode.refused("save_optimizer of parts", save, TypeError, names="checkpoint")
            return
        save()
        fresh = episode.run.again()
        episode.opt.load_optimizer(fresh.optimizer, Path(folder))
        episode.replace_run(fresh)


@event
def offload_on(episode: Together) -> None:
    if episode.held == "unreduced":
        turn_on = episode.run.optimizer.turn_on_cpu_offload
        episode.refused("offload of parts", turn_on, ValueError)
    else:
        episode.run.optimizer.turn_on_cpu_offload()


for _alike in ALIKE:
    event(_alike)


@event
def looked_at(episode: Together) -> None:
    episode.run.optimizer.report()
    episode.run.optimizer.state_dict()


@event
def rule_raises(episode: Together) -> None:
    """The function of a group with work raises on all ranks before anything is written."""
    group = episode.run.optimizer.param_groups[0]
    if not any(p.grad is not None and p.numel() for p in group["params"]):
        return
    kept, group["adjust_lr_fn"] = group["adjust_lr_fn"], raises
    found = episode.outcomes(episode.run.optimizer.step)
    group["adjust_lr_fn"] = kept
    raised = all("PlannedError" in one for one in found)
    assert raised, f"an adjust_lr_fn that raises, on some ranks: {found}"


def has_whole_experts(param: nn.Parameter) -> bool:
    """Whether every expert of a stack is on one rank, which then steps or skips it alone."""
    if not isinstance(param, DTensor) or param.ndim != 3:
        return False
    sizes = zip(param.placements, param.device_mesh.shape, strict=True)
    # A _StridedShard, of which torch's is_shard says no, has a dim too.
    return all(size == 1 or getattr(placement, "dim", None) == 0 for placement, size in sizes)


@event
def gradient_missing_on_one(episode: Together) -> None:
    """Every rank raises before anything is written; then state is loaded."""
    candidates = [
        name
        for name, param in episode.run.params.items()
        if param.grad is not None and param.numel() and not has_whole_experts(param)
    ]
    if not candidates:
        return
    name = episode.generator.choice(candidates)
    rank = episode.generator.randrange(episode.world)
    saved = copy.deepcopy(episode.run.optimizer.state_dict())
    if episode.rank == rank:
        episode.run.params[name].grad = None
    step = episode.run.optimizer.step
    episode.refused(f"no gradient of {name} on rank {rank}", step, RuntimeError)
    episode.load(saved)
    episode.fill_gradients()


@event
def not_a_number(episode: Together) -> None:
    """NaN reaches its own parameter on all ranks, and no other; then both go back."""
    candidates = [n for n, p in episode.twin.params.items() if p.grad is not None and p.numel()]
    if not candidates:
        return
    name = episode.generator.choice(candidates)
    saved = copy.deepcopy(episode.run.optimizer.state_dict())
    before = episode.twin.snapshot()
    for run in (episode.run, episode.twin):
        grad = run.params[name].grad
        run.params[name].grad = grad * float("nan")
    with contextlib.suppress(PlannedError):
        episode.run.optimizer.step()
    episode.twin.optimizer.step()
    episode.compare(f"NaN in {name}")
    episode.twin.restore(before)
    episode.load(saved)
    episode.fill_gradients()


def play(opt: Any, seed: int, steps: int) -> None:
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # of how it gathers
    torch.distributed.barrier()
    Together(opt, seed).play(steps)
