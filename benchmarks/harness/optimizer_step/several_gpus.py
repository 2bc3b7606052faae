"""Cases of `optimizer_step.json` on several GPUs: a step over shards, or over unreduced gradients.

fsdp2: parameters, gradients and state are rows of each matrix, as FSDP2 leaves them. unreduced:
every rank has all parameters and its own contribution to their gradients, which travel in float32
or float16. The baseline is AdamW in the same situation: over the shards, or after an all-reduce.
"""

from __future__ import annotations

import dataclasses
import gc
import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from ..built_package import Built
from ..device import added_mb
from ..lazy import torch
from ..report import FLOOR_TBPS, FLOOR_TFLOPS, Line, Rows, failed, passed
from ..timer import Times, burst
from .one_gpu import DECAY, LR, SHAPES, TIMED, WARMUP, Model

LINK_TBPS = 0.45  # out of one GPU: 18 links of NVLink 4 at 25 GB/s
FORMS = {"fsdp2": 2, "unreduced-fp32": 4, "unreduced-fp16": 2}  # -> bytes of an element on the wire
MUON_LR = 0.02  # of MuonAdamW
IN_BURST = 4  # steps between two waits
ROWS = 64  # of an AdamW parameter that the gate compares
# Long enough for the first step of the largest set; a rank that fails must not hold up the others.
TIMEOUT = timedelta(seconds=120)


@dataclasses.dataclass(frozen=True)
class Problem:
    """A set of parameters, and how the ranks hold it."""

    model: str
    form: str

    @property
    def case(self) -> str:
        return f"{self.model}/{self.form}"

    @property
    def shapes(self) -> tuple[tuple[tuple[int, ...], ...], ...]:
        """Of the matrices, and of the parameters for AdamW."""
        return SHAPES[self.model]

    @property
    def shared(self) -> bool:
        """Whether every rank holds a shard; else all of everything."""
        return self.form == "fsdp2"

    def wire_bytes(self, ranks: int) -> float:
        """What a rank sends, both ways together."""
        matrices, others = (sum(map(math.prod, shapes)) for shapes in self.shapes)
        size, away = FORMS[self.form], (ranks - 1) / ranks
        if self.shared:
            return 2 * size * matrices / ranks * away
        return (2 * size * matrices + (size + 4) * others) * away  # new rows come back in float32

    def floor_ms(self, ranks: int) -> float:
        """Operations and bytes of one of equal ranks, one after the other, or the wire if longer.

        Unreduced: a rank reads its contributions and applies all updates (12 bytes per element of
        a matrix and the update's), keeps the momentum of its own matrices (12), copies new rows of
        AdamW (8) and steps its own (24).
        """
        matrices, others = (sum(map(math.prod, shapes)) for shapes in self.shapes)
        alone = Model(self.model)
        moved = alone.bytes_moved / ranks
        if not self.shared:
            moved = matrices * (12 + FORMS[self.form] + 12 / ranks) + others * (8 + 24 / ranks)
        computed = alone.flops / ranks / FLOOR_TFLOPS + moved / FLOOR_TBPS
        return max(computed, self.wire_bytes(ranks) / LINK_TBPS) / 1e9


LISTED = tuple(Problem(model, form) for form in FORMS for model in ("nanochat-d20", "llama-1B"))
SMALL = tuple(Problem("tiny", form) for form in FORMS)  # for a run on CPUs


@dataclasses.dataclass(frozen=True)
class Ranks:
    """This process among those of torchrun; alone without it."""

    count: int
    rank: int
    device: Any  # torch.device of this rank

    @property
    def first(self) -> bool:
        return self.rank == 0

    def largest(self, value: float) -> float:
        """The largest of every rank's values."""
        found = torch.tensor(value, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(found, torch.distributed.ReduceOp.MAX)
        return found.item()

    def milliseconds(self, call: Callable[[], object]) -> float:
        """Of a call that all ranks begin together, on the rank that takes longest."""
        torch.distributed.barrier()
        return self.largest(_device_time(call) if self.device.type == "cuda" else _time(call))

    def synchronize(self) -> None:
        """Wait for this rank's device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def held_mb(self) -> float:
        """Device memory of this rank's tensors, and what its CUDA graphs keep; 0 on CPUs."""
        if self.device.type != "cuda":
            return 0.0
        gc.collect()
        torch.cuda.synchronize()
        kept = kept_by_graphs(torch.cuda.memory_snapshot())
        return (torch.cuda.memory_allocated() + kept) / 1e6


def kept_by_graphs(segments: Iterable[Mapping[str, Any]]) -> int:
    """Bytes of the pools of CUDA graphs in which no tensor is: nobody else can have them."""
    return sum(
        segment["total_size"] - segment["allocated_size"]
        for segment in segments
        if tuple(segment["segment_pool_id"]) != (0, 0)
    )


@contextmanager
def joined(device: str) -> Iterator[Ranks]:
    """The ranks of torchrun in a group, NCCL on GPUs and gloo on CPUs, for as long as it lasts.

    A group that is there already stays as it is.
    """
    here, arguments = torch.device("cpu"), {}
    if device == "cuda":
        here = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(here)
        arguments = {"device_id": here}
    started = torch.distributed.is_initialized()
    if not started:
        backend = "nccl" if device == "cuda" else "gloo"
        torch.distributed.init_process_group(backend, timeout=TIMEOUT, **arguments)
    try:
        yield Ranks(torch.distributed.get_world_size(), torch.distributed.get_rank(), here)
    finally:
        if not started:
            torch.distributed.destroy_process_group()


def _time(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _device_time(call: Callable[[], object]) -> float:
    """Between two events on an idle device, so that the host's share counts as in training."""
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop)


class RankCase:
    """Parameters as this rank holds them, ours over them and AdamW over copies."""

    def __init__(self, problem: Problem, built: Built, ranks: Ranks) -> None:
        from torch.distributed.device_mesh import init_device_mesh

        self.problem, self.package, self.ranks = problem, built.package, ranks
        self.own, self.common = (
            torch.Generator(ranks.device).manual_seed(seed) for seed in (1 + ranks.rank, 0)
        )
        self.mesh = init_device_mesh(ranks.device.type, (ranks.count,))
        self.matrices, self.others = (
            [self._parameter(shape) for shape in shapes] for shapes in problem.shapes
        )
        self.ours = self._optimizer(self.matrices, self.others, alone=False)
        self._make_baseline()
        self._held_before = ranks.held_mb()

    def _parameter(self, shape: tuple[int, ...]):
        """With a gradient: rows of a DTensor, or a whole parameter and this rank's contribution."""
        from torch.distributed.tensor import DTensor, Shard

        def normal(shape, scale: float, generator):
            made = torch.randn(shape, device=self.ranks.device, generator=generator)
            return made.mul_(scale)

        if not self.problem.shared:
            param = torch.nn.Parameter(normal(shape, 0.02, self.common))
            param.grad = normal(shape, 1e-3, self.own)
            return param
        rows, columns = shape
        assert rows % self.ranks.count == 0

        def placed(scale: float):
            local = normal((rows // self.ranks.count, columns), scale, self.own)
            return DTensor.from_local(local, self.mesh, [Shard(0)], run_check=False)

        param = torch.nn.Parameter(placed(0.02))
        param.grad = placed(1e-3)
        return param

    def _optimizer(self, matrices, others, *, alone: bool, dtype=None):
        """Ours, for all ranks; `alone`, as one process would do the same."""
        if self.problem.shared:
            groups = [
                {"params": matrices, "use_muon": True, "dtype": dtype},
                {"params": others, "use_muon": False},
            ]
            # One process rounds to the wire of GPUs if asked: then nothing is left to differ.
            wire = torch.float16 if alone and self.ranks.device.type == "cuda" else None
            config = self.package.DistributedConfig(wire_dtype=wire)
            options = {"lr": LR, "weight_decay": DECAY, "none_grad": False, "distributed": config}
            return self.package.Muon(groups, **options)
        shared = {"weight_decay": DECAY}
        groups = [
            {"kind": "muon", "params": matrices, "lr": MUON_LR, "dtype": dtype, **shared},
            {"kind": "adamw", "params": others, "lr": LR, **shared},
        ]
        if alone:
            return self.package.MuonAdamW(groups, gradients="reduced")
        half = torch.float16 if self.problem.form.endswith("fp16") else None
        config = self.package.DistributedConfig(wire_dtype=half)
        return self.package.DistMuonAdamW(groups, distributed=config)

    def _make_baseline(self) -> None:
        """AdamW over what this rank holds; for unreduced gradients with one bucket of them."""
        params = [*self.matrices, *self.others]
        tensors = [_local(param.detach()) for param in params]
        copies = [torch.nn.Parameter(tensor) for tensor in tensors]
        self.bucket = None
        for copied, param in zip(copies, params, strict=True):
            copied.grad = _local(param.grad)
        if not self.problem.shared:  # as DistributedDataParallel keeps them: views of one buffer
            self.bucket = torch.cat([param.grad.flatten() for param in params])
            pieces = self.bucket.split([param.numel() for param in params])
            for copied, piece in zip(copies, pieces, strict=True):
                copied.grad = piece.view(copied.shape)
        self.adamw = torch.optim.AdamW(copies, lr=LR, weight_decay=DECAY, fused=True)
        before = "" if self.problem.shared else "all-reduce of the gradients, "
        held = "shards of all parameters" if self.problem.shared else "all parameters"
        self.baseline_name = f"torch {torch.__version__}, {before}AdamW(fused=True) on {held}"

    def baseline(self) -> None:
        if self.bucket is not None:
            # gloo has no mean; over CPUs the sum takes as long
            mean = self.ranks.device.type == "cuda"
            torch.distributed.all_reduce(
                self.bucket, getattr(torch.distributed.ReduceOp, "AVG" if mean else "SUM")
            )
        self.adamw.step()

    def compare(self) -> tuple[bool, float, float]:
        """(gate, error of the first step, error of one process that iterates in bfloat16).

        Both against one process with the mean gradients and the default iteration, of the first and
        the last matrix of each shape, relative to their updates. The gate: at most a quarter of the
        latter. Rows of AdamW must be those of one process up to float32, but where contributions
        are rounded to float16, which turns the sign of elements near zero.
        """
        ends = ({p.shape: p for p in order} for order in (self.matrices[::-1], self.matrices))
        chosen = [param for of_shape in ends for param in of_shape.values()]
        samples = [(_whole(param.detach()).clone(), self._mean(param.grad)) for param in chosen]
        table = self.others[0]
        rows = [_local(t)[:ROWS].clone() for t in (table.detach(), table.grad)]
        if not self.problem.shared:
            rows[1] = self._mean(rows[1])
        self.ours.step()
        expected, rows_expected = self._alone(samples, rows)
        coarse, _ = self._alone(samples, rows, dtype=torch.bfloat16)
        found = [_whole(param.detach()) for param in chosen]
        moves = [(new - old) for new, (old, _) in zip(expected, samples, strict=True)]
        norm = _norm(moves)
        error = _distance(found, expected) / norm
        error_coarse = _distance(coarse, expected) / norm
        rows_found = _local(table.detach())[:ROWS]
        rows_error = _distance([rows_found], [rows_expected]) / _norm([rows_expected - rows[0]])
        allowed = 0.05 if self.problem.form.endswith("fp16") else 1e-5
        equal = [*map(torch.equal, [*found, rows_found], [*expected, rows_expected])]
        self.verdict = (
            f"{sum(equal)} of {len(equal)} tensors equal to the bit, error {error:.1e} (bfloat16 "
            f"{error_coarse:.1e}), AdamW's {rows_error:.1e}; by {self._transports()}"
        )
        wrong = not (error <= error_coarse / 4 and rows_error <= allowed)
        return not self.ranks.largest(float(wrong)), self.ranks.largest(error), error_coarse

    def _transports(self) -> str:
        """What moved the messages of the last step."""
        return " and ".join(sorted({row["transport"] for row in self.ours.comm_report()}))

    def _mean(self, contribution):
        """The gradient that one process would have: added up in the order of the ranks."""
        if self.problem.shared:
            return _whole(contribution)
        parts = [torch.empty_like(contribution) for _ in range(self.ranks.count)]
        torch.distributed.all_gather(parts, contribution.contiguous())
        total = parts[0].clone()
        for part in parts[1:]:
            total += part
        return total.mul_(1 / self.ranks.count)

    def _alone(self, samples, rows, dtype=None):
        """The sample after a step of one process."""
        params = []
        for value, grad in [*samples, rows]:
            param = torch.nn.Parameter(value.clone())
            param.grad = grad.clone()
            params.append(param)
        self._optimizer(params[:-1], params[-1:], alone=True, dtype=dtype).step()
        return [param.detach() for param in params[:-1]], params[-1].detach()

    def extra_mb(self) -> float:
        """Device memory beyond parameters, gradients and state, on the rank where that is most.

        What stays between steps, blocks of messages, memory that ranks share and pools of graphs,
        and the peak above it.
        """
        for _ in range(WARMUP):
            self.ours.step()
        state = [value for kept in self.ours.state.values() for value in kept.values()]
        tensors = [_local(value) for value in state if hasattr(value, "element_size")]
        in_state = sum(t.numel() * t.element_size() for t in tensors if t.device.type == "cuda")
        shared = max(row["arena_bytes"] for row in self.ours.comm_report())
        extra = self.ranks.held_mb() - self._held_before + (shared - in_state) / 1e6
        if self.ranks.device.type == "cuda":
            extra += added_mb(self.ours.step)
        return self.ranks.largest(extra)

    def times(self, rounds: int) -> dict[str, Times]:
        """A step of ours and of the baseline, by turns, on the slowest rank."""
        calls = {"ours": self.ours.step, "baseline": self.baseline}
        found: dict[str, list[tuple[float, ...]]] = {name: [] for name in calls}
        for _ in range(WARMUP + rounds):
            for name, call in calls.items():
                torch.distributed.barrier()
                clock = burst(
                    lambda _, call=call: call(), 0, IN_BURST, 1, synchronize=self.ranks.synchronize
                )
                device_ms = self.ranks.milliseconds(call)
                found[name].append((device_ms, *map(self.ranks.largest, clock)))
        return {
            name: Times(*map(statistics.median, zip(*taken[WARMUP:], strict=True)))
            for name, taken in found.items()
        }


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _whole(tensor):
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def _norm(tensors) -> float:
    return math.sqrt(sum(tensor.double().square().sum().item() for tensor in tensors))


def _distance(found, expected) -> float:
    pairs = zip(found, expected, strict=True)
    return _norm([a.double() - b.double() for a, b in pairs])


def measure(problem: Problem, built: Built, ranks: Ranks, rounds: int = TIMED) -> Line:
    """The row of one problem and its printed line."""
    case = RankCase(problem, built, ranks)
    good, *errors = case.compare()
    if not good:
        row = failed(problem.case)
        return row, f"{row.case:<30} WRONG RESULTS, not timed: {case.verdict}"
    peak_mb = case.extra_mb()
    found, least = case.times(rounds), problem.floor_ms(ranks.count)
    row = passed(problem.case, found, case.baseline_name, least, errors=errors, peak_mb=peak_mb)
    line = (
        f"{row.case:<30}{row.wall_ms:>8.2f}{row.host_ms:>8.2f}{row.ms:>8.2f}{row.floor_ms:>8.2f}"
        f"{row.fraction_of_floor:>8.1%}{row.baseline_wall_ms:>9.2f}{row.speedup:>7.2f}x"
        f"{peak_mb:>9.0f}  {case.verdict}"
    )
    return row, line


HEADING = (
    f"{'case':<30}{'wall ms':>8}{'host':>8}{'device':>8}{'floor':>8}{'% floor':>8}{'AdamW':>9}"
    f"{'x base':>8}{'peak MB':>9}  against one process"
)


def rows(built: Built, ranks: Ranks, left: list[str], end: float | None = None) -> Rows:
    """Every row of the file; on CPUs those of the tiny set.

    Cases that would begin after `end`, a time of `time.monotonic`, are added to `left` instead, on
    all ranks as soon as one of them is that late.
    """
    on_cpus = ranks.device.type == "cpu"
    for problem in SMALL if on_cpus else LISTED:
        if end is not None and ranks.largest(time.monotonic() - end) > 0:
            left.append(problem.case)
            continue
        yield measure(problem, built, ranks, rounds=1 if on_cpus else TIMED)
        if not on_cpus:
            torch.cuda.empty_cache()
