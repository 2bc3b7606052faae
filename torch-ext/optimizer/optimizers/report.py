"""What a step does with every parameter, what that costs and how long it took.

Batches are timed by CUDA events, which nobody waits for, or the clock; `stage` makes their ranges
in a trace.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler

from ..dispatch import pick
from ..orthogonalize.choose import H200_BANDWIDTH, H200_RATE, choose, flop
from ..orthogonalize.products import gram_runs_symmetric, runs_symmetric
from .groups.options import AdamWOptions, MuonOptions
from .groups.parameters import local
from .plan import Chunk
from .sharded.chunks import Bands, SharedChunk, SliceChunk

Timed = Callable[[Hashable, torch.device], AbstractContextManager[None]]
_NOTHING = nullcontext()

# (label and parameter of each, its batches, what several ranks share of it, its options)
Group = tuple[
    Sequence[tuple[str, Tensor]],
    Sequence[Chunk],
    Sequence[Any],
    MuonOptions | AdamWOptions,
]


@dataclass
class Line:
    """One parameter. Its times are its shares of those of its batches."""

    where: str
    param: Tensor
    route: str
    work: list[str] = field(default_factory=list)
    iterations: list[str] = field(default_factory=list)  # the same, without batches and owners
    owners: str = ""  # ranks, where several share it
    kernels: list[str] = field(default_factory=list)
    flop: int = 0
    own_flop: int = 0  # of matrices that this rank orthogonalizes
    moved: int = 0  # bytes that momentum and update, or AdamW, read and write on this rank
    measured: float | None = None  # milliseconds

    @property
    def predicted(self) -> float:
        """Milliseconds of this rank on an H200 if nothing but operations and memory counted."""
        return 1e3 * (self.own_flop / H200_RATE + self.moved / H200_BANDWIDTH)

    def text(self, held: int, owner: str, offloaded: bool) -> str:
        """All of it in one line; `held` is bytes of state."""
        head = f"{self.where} {tuple(self.param.shape)}: {self.route}"
        if self.route == "muon":
            head += f", {'; '.join(self.work) or 'nothing to orthogonalize'}"
        parts = [self.owners or f"owner {owner}"]
        if self.kernels:
            parts.append(f"kernels {', '.join(dict.fromkeys(self.kernels))}")
        parts.append(f"{held} bytes of state{' in host memory' if offloaded else ''}")
        parts.append(f"{self.moved} bytes moved")
        parts.append(f"{self.predicted:.3g} ms predicted")
        if self.measured is not None:
            parts.append(f"{self.measured:.3g} ms measured")
        return f"{head} | {', '.join(parts)}"


def report(
    groups: Sequence[Group],
    state: Mapping[Tensor, Mapping[str, Tensor]],
    measured: Mapping[Hashable, float],  # chunk, or number of an AdamW group -> milliseconds
    *,
    offloaded: bool = False,
    verbose: bool = False,
) -> str:
    """One line per shape, or per parameter if `verbose`, and the sums; see `MuonBase.report`."""
    lines: list[Line] = []
    batches, counts = 0, {"muon": 0, "adamw": 0}
    for number, (parameters, batch, together, options) in enumerate(groups):
        route = "muon" if isinstance(options, MuonOptions) else "adamw"
        counts[route] += len(parameters)
        here = {param: Line(where, param, route) for where, param in parameters}
        if isinstance(options, MuonOptions):
            for index, chunk in enumerate(batch, start=batches):
                _describe(chunk, index, options, here, measured.get(chunk))
            for index, shared in enumerate(together, start=batches + len(batch)):
                whole = shared.whole if isinstance(shared, Bands) else shared
                unreduced = isinstance(shared, Bands)
                _describe_shared(whole, index, options, here, unreduced=unreduced)
            batches += len(batch) + len(together)
        else:
            _describe_adamw(here, measured.get(number))
            for shared in together:
                if isinstance(shared, SliceChunk):
                    _describe_slices(shared, here)
        lines += here.values()
    owner = _owner()
    total, predicted = sum(line.flop for line in lines), sum(line.predicted for line in lines)
    last = (
        f"{counts['muon']} parameters by muon in {batches} batches, {total:.3g} FLOP per step "
        f"with dense products; {counts['adamw']} by adamw; {predicted:.3g} ms predicted for an "
        f"H200 at {H200_RATE / 1e12:.0f} TFLOP/s and {H200_BANDWIDTH / 1e12} TB/s"
    )
    shares = any(of_several for _, _, of_several, _ in groups)
    if shares:
        last += ", of what this rank does"
    if measured:
        last += f", {sum(measured.values()):.3g} ms measured in the last finished step"
        last += " beside what ranks share" if shares else ""
    held = [_held(state.get(line.param, {})) for line in lines]
    if verbose:
        texts = [line.text(size, owner, offloaded) for line, size in zip(lines, held, strict=True)]
    else:
        texts = _table(lines, held, offloaded)
    return "\n".join([*texts, last])


def _held(state: Mapping[str, Tensor]) -> int:
    """Bytes of a parameter's state on this rank."""
    return sum(local(value).numel() * value.element_size() for value in state.values())


def _table(lines: Sequence[Line], held: Sequence[int], offloaded: bool) -> list[str]:
    """Aligned columns, one line for all parameters of a shape that are treated alike."""
    alike: dict[Hashable, list[int]] = {}
    for index, line in enumerate(lines):
        key = line.route, tuple(line.param.shape), tuple(line.iterations)
        alike.setdefault(key, []).append(index)
    timed = any(line.measured is not None for line in lines)
    state = "state in host memory, MB" if offloaded else "state, MB"
    rows = [["route", "shape", "count", "each", state, "predicted ms"]]
    rows[0] += ["measured ms"] if timed else []
    for (route, shape, iterations), members in alike.items():
        chosen = [lines[index] for index in members]
        row = [route, str(shape), str(len(members)), "; ".join(iterations)]
        row.append(f"{sum(held[index] for index in members) / 1e6:.3g}")
        row.append(f"{sum(line.predicted for line in chosen):.3g}")
        times = [line.measured for line in chosen if line.measured is not None]
        row += [f"{sum(times):.3g}" if times else "-"] if timed else []
        rows.append(row)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    left = {0, 1, 3}
    return [
        "  ".join(
            cell.ljust(width) if column in left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def _describe(
    chunk: Chunk,
    number: int,
    options: MuonOptions,
    lines: Mapping[Tensor, Line],
    milliseconds: float | None,
) -> None:
    """Add the chunk's share of each of its parameters."""
    matrices: dict[Tensor, int] = {}
    for member in chunk.members:
        matrices[member.param] = matrices.get(member.param, 0) + member.piece.matrices
    for param, count in matrices.items():
        line = lines[param]
        held = count * chunk.matrix[0] * chunk.matrix[1]
        here = Here(count, held, held)
        _add(line, chunk.matrix, count, here, f"in batch {number}", options)
        if milliseconds is not None:
            line.measured = (line.measured or 0.0) + milliseconds * count / chunk.matrices


def _describe_shared(
    chunk: SharedChunk,
    number: int,
    options: MuonOptions,
    lines: Mapping[Tensor, Line],
    *,
    unreduced: bool,
) -> None:
    """The same for a chunk that several ranks work on."""
    owners: dict[Tensor, list[int]] = {}
    held: dict[Tensor, int] = {}
    rank, (m, n) = chunk.team.rank, chunk.matrix
    for member, owner in zip(chunk.members, chunk.owners, strict=True):
        owners.setdefault(member.param, []).append(owner)
        held[member.param] = held.get(member.param, 0) + member.job.elements()[rank]
    wire = str(chunk.wire).removeprefix("torch.")
    for param, ranks in owners.items():
        plural = "s" if len(set(ranks)) > 1 else ""
        named = f"rank{plural} {', '.join(map(str, sorted(set(ranks))))} of {chunk.team.size}"
        place = f"on {named}, {wire} on the wire, in batch {number}"
        lines[param].owners = f"owner {named}"
        own = ranks.count(rank)
        # With unreduced gradients the owner alone advances the momentum.
        here = Here(own, own * m * n if unreduced else held[param], held[param])
        _add(lines[param], chunk.matrix, len(ranks), here, place, options)


@dataclass(frozen=True)
class Here:
    """This rank's part of some matrices: how many it owns, elements of momentum and of update."""

    owned: int
    momentum: int
    update: int


def _add(
    line: Line,
    matrix: tuple[int, int],
    count: int,
    here: Here,
    place: str,
    options: MuonOptions,
) -> None:
    """`count` matrices of a parameter: how they are orthogonalized, and what that takes."""
    param = line.param
    m, n = matrix
    buffer = options.momentum_dtype or torch.promote_types(param.dtype, torch.float32)
    direction = torch.promote_types(buffer, torch.float32)
    choice = choose(m, n, dtype=direction, device=param.device, **options.iteration)
    each = flop(
        choice.method, m, n, steps=options.ns_steps, restarts=choice.restarts, symmetric=False
    )
    operations = count * each
    by_halves = gram_runs_symmetric(m, n, choice.dtype, param.device) or runs_symmetric(
        min(m, n), choice.dtype, param.device
    )
    dtype = str(choice.dtype).removeprefix("torch.")
    line.work.append(
        f"{count} x ({m}, {n}) {place}, {choice.method} in {dtype}, {operations:.3g} FLOP"
    )
    line.iterations.append(f"{count} x ({m}, {n}) {choice.method} in {dtype}")
    line.kernels += [_path("momentum", param), _path("apply_update", param)]
    line.kernels.append("symmetric_matmul" if by_halves else "torch's products")
    line.flop += operations
    line.own_flop += here.owned * each
    # gradient, buffer twice, direction
    line.moved += here.momentum * (param.element_size() + 2 * buffer.itemsize + direction.itemsize)
    # direction, parameter twice
    line.moved += here.update * (direction.itemsize + 2 * param.element_size())


def _describe_adamw(lines: Mapping[Tensor, Line], total: float | None) -> None:
    """AdamW reads the gradient, and reads and writes the parameter and both moments."""
    for param, line in lines.items():
        line.moved = local(param).numel() * _adamw_bytes(param)
        line.kernels = [_path("adamw", param)]
    everything = sum(line.moved for line in lines.values())
    if total is not None and everything:
        for line in lines.values():
            line.measured = total * line.moved / everything


def _describe_slices(slices: SliceChunk, lines: Mapping[Tensor, Line]) -> None:
    """Rows of a parameter for AdamW: each rank steps its own."""
    chunk = slices.chunk
    line = lines[chunk.members[0].param]
    if not line.owners:
        line.owners = f"rows shared out to {chunk.team.size} ranks"
        line.moved = 0
    own = [
        m.matrix for m, o in zip(chunk.members, chunk.owners, strict=True) if o == chunk.team.rank
    ]
    line.moved += sum(rows * columns for rows, columns in own) * _adamw_bytes(line.param)


def _adamw_bytes(param: Tensor) -> int:
    """Per element: the gradient, and the parameter and both moments twice."""
    moment = torch.promote_types(param.dtype, torch.float32)
    return 3 * param.element_size() + 4 * moment.itemsize


def _path(op: str, param: Tensor) -> str:
    wide = param.dtype == torch.float64
    return f"{op} {'reference' if wide else pick(op, param.device).name}"


def _owner() -> str:
    """Who computes what no ranks share: with several processes each of them does it."""
    from torch import distributed

    several = distributed.is_available() and distributed.is_initialized()
    if several and distributed.get_world_size() > 1:
        return "every rank"
    return "this process"


def stage(name: str) -> AbstractContextManager[Any]:
    """A range of a trace, which costs 8 us and is made only while a profiler of torch runs."""
    # torch's own flag "for fast python checks"; a torch without it pays for every range.
    if getattr(profiler, "_is_profiler_enabled", True):
        return profiler.record_function(name)
    return _NOTHING


@dataclass(eq=False)
class Span:
    """A stretch of time: two events of CUDA, or two times of the host in seconds."""

    start: Any
    end: Any = None

    def over(self) -> bool:
        return self.end is not None and (isinstance(self.end, float) or self.end.query())

    def milliseconds(self) -> float:
        if isinstance(self.end, float):
            return 1e3 * (self.end - self.start)
        return self.start.elapsed_time(self.end)


def untimed(key: Hashable, device: torch.device) -> AbstractContextManager[None]:
    """`StepTimer.of` where nothing is measured."""
    return _NOTHING


class StepTimer:
    """The batches of the last two steps: that which is running, and the one before."""

    def __init__(self) -> None:
        self._steps: list[dict[Hashable, list[Span]]] = []

    def begin(self) -> Timed:
        """Start a step; returns what each of its batches is run under."""
        self._steps = [*self._steps[-1:], {}]
        return self._of

    @contextmanager
    def _of(self, key: Hashable, device: torch.device) -> Iterator[None]:
        cuda = device.type == "cuda"
        if cuda and torch.cuda.is_current_stream_capturing():
            yield  # events in a graph say nothing about its replays
            return
        span = Span(_now(device))
        self._steps[-1].setdefault(key, []).append(span)
        yield
        span.end = _now(device)

    def milliseconds(self) -> dict[Hashable, float]:
        """Key -> time in the last step that the device has finished; empty if there is none."""
        for step in reversed(self._steps):
            spans = [span for of_key in step.values() for span in of_key]
            if spans and all(span.over() for span in spans):
                return {key: sum(s.milliseconds() for s in found) for key, found in step.items()}
        return {}


def _now(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    stream = torch.cuda.current_stream(device)
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event
