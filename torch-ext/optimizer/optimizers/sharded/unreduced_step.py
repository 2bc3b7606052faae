"""The step with unreduced gradients: reduce, compute, answer, each under another's computation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...distributed import Phases, Team
from ...kernels import momentum as momentum_kernel
from ...orthogonalize import orthogonalize
from ..groups.options import AdamWOptions, MuonOptions
from ..groups.parameters import local
from ..layout import written
from ..stages.adamw import adamw_on
from ..stages.update import Rate
from ..timing import stage
from .buffers import Block
from .chunks import Bands, SharedChunk, SliceChunk, SmallChunk
from .cuda_graphs import StepRun, places, places_of_numbers
from .exchange import (
    apply,
    apply_own,
    copy_all,
    evened_out,
    kept_statistics,
    launch_scatter,
    write_answer,
)
from .reduce_scatter import Contributions

# Computations between Newton-Schulz and the first transfer of what it makes: it runs beside them,
# so that messages do not wait for it.
LATER = 1


@dataclass(eq=False)
class _Made:
    """What the bands of matrices make together."""

    present: Sequence[bool]  # of the matrices of this rank, by their slots
    directions: Block | None = None  # (B, m, n) of those with a gradient, filled band by band
    updates: Block | None = None  # (B, m, n), sent band by band
    wait: Callable[[], None] | None = None  # for the updates, which are on their way

    def before(self, slot: int) -> int:
        """Matrices with a gradient before a slot."""
        return sum(self.present[:slot])

    def shape(self, whole: SharedChunk) -> tuple[int, ...]:
        return sum(self.present), *whole.matrix

    def arrive(self, run: StepRun) -> None:
        """The updates are there."""
        if self.wait is not None:
            self.wait()
            run.give(self.directions)
            self.wait = self.directions = None


def step_bands(
    bands: Bands, number: int, factor: float, rate: Rate, options: MuonOptions, run: StepRun
) -> Iterator[Phases]:
    """reduce to the owner -> momentum -> orthogonalize -> scatter -> update for some matrices.

    Args:
        bands: of matrices, every one of which has its owner's state.
        number: of their group.
        factor: of the sum of the contributions.
        rate: of their shape.
        options: of their group.
        run: the step.

    Returns:
        What `run_pipeline` takes, for every band.
    """
    members = bands.whole.members
    made = _Made([members[job].param.grad is not None for job in bands.whole.route.owned])
    for band in range(len(bands.parts)):
        yield _step_band(bands, band, made, number, factor, rate, options, run)


def _step_band(
    bands: Bands,
    band: int,
    made: _Made,
    number: int,
    factor: float,
    rate: Rate,
    options: MuonOptions,
    run: StepRun,
) -> Phases:
    chunk, later = bands.parts[band], len(bands.parts) - 1 - band
    present = [member.param.grad is not None for member in chunk.members]
    owned = [job for job in chunk.route.owned if present[job]]
    with stage("muon::launch_reduce"):
        contributions = Contributions(chunk, present, owned, run)
        if options.none_grad:
            run.release(chunk)
    yield
    with stage("muon::launch_reduce"):
        contributions.launch()
    yield
    with stage("muon::wait_reduce"):
        contributions.wait()
    if owned:
        with stage("muon::momentum"):
            _momentum(bands, band, made, owned, contributions, factor, options, run)
    contributions.give()
    del contributions
    if made.directions is not None and not later:
        with stage("muon::newton_schulz"):
            _updates(bands.whole, made, options, run)
    yield later + LATER
    mine = None
    with stage("muon::launch_scatter"):
        made.arrive(run)
        message = run.take(chunk, "message", chunk.route.answered.size)
        if owned and made.updates is not None:
            updates = made.updates.of(chunk.wire, made.shape(bands.whole))
            first = made.before(bands.first[band])
            mine = updates.narrow(0, first, len(owned)).narrow(1, *bands.rows[band])
        _write_updates(chunk, owned, mine, message, run)
        scattering = launch_scatter(chunk, message, run)
        del message
    yield
    with stage("muon::wait_scatter"):
        answers = scattering.wait(run)
    with stage("muon::update_params"):
        apply(chunk, answers, number, rate, options, present, run)
        if mine is not None:
            apply_own(chunk, owned, mine, number, rate, options, run)
    scattering.give(run)
    if not later:
        run.give(made.updates)
        made.updates = None


def _write_updates(
    chunk: SharedChunk, owned: Sequence[int], mine: Tensor | None, message: Block, run: StepRun
) -> None:
    """Updates of owned jobs to all other ranks."""

    def body() -> None:
        if mine is None:
            message.bytes.zero_()
        else:
            write_answer(chunk, owned, mine, message.bytes, {})

    def key() -> Any:
        where = None if mine is None else (mine.data_ptr(), mine.shape, mine.stride())
        return message.bytes.data_ptr(), where, owned

    if message.bytes.numel():
        run.stage("answer", chunk, key, body)


def _updates(whole: SharedChunk, made: _Made, options: MuonOptions, run: StepRun) -> None:
    """The updates of this rank's matrices as everyone applies them: (B, m, n), of the wire."""
    assert made.directions is not None
    shape = made.shape(whole)
    made.updates = run.take(whole, "updates", math.prod(shape) * whole.wire.itemsize)
    directions, updates = made.directions.of(whole.dtype, shape), made.updates.of(whole.wire, shape)
    slots = zip(whole.route.owned, made.present, strict=True)
    owned = [job for job, here in slots if here]
    iteration = {"method": options.method, "steps": options.ns_steps, "dtype": options.dtype}
    beta2 = options.beta2

    def body() -> None:
        if beta2 is None:
            orthogonalize(directions, **iteration, out=updates)
        else:
            orthogonal = orthogonalize(directions, **iteration)
            evened_out(whole, owned, orthogonal, beta2, run.state, updates)

    def key() -> Any:
        where = directions.data_ptr(), updates.data_ptr(), shape
        return where, iteration, beta2, kept_statistics(whole, owned, options, run.state)

    made.wait = run.stage_beside("newton_schulz", whole, key, body)


def step_slices(
    slices: SliceChunk, number: int, factor: float, options: AdamWOptions, run: StepRun
) -> Phases:
    """reduce every rank's rows to it -> AdamW on them -> the new rows to all."""
    chunk = slices.chunk
    param = chunk.members[0].param
    present = param.grad is not None
    with stage("muon::launch_reduce"):
        owned = chunk.route.owned if present else ()
        contributions = Contributions(chunk, [present] * len(chunk.members), owned, run)
        if options.none_grad:
            run.release(chunk)
    yield
    with stage("muon::launch_reduce"):
        contributions.launch()
    yield
    with stage("muon::wait_reduce"):
        contributions.wait()
    with stage("muon::adamw"):
        message = run.take(chunk, "message", chunk.route.answered.size)
        _adamw_on_rows(slices, number, contributions, factor, options, message, run)
        contributions.give()
        del contributions
    yield
    with stage("muon::launch_scatter"):
        scattering = launch_scatter(chunk, message, run)
        del message
    yield
    with stage("muon::wait_scatter"):
        rows = scattering.wait(run)
        if present:
            _take_rows(chunk, param, rows, run)
        scattering.give(run)


def _take_rows(chunk: SharedChunk, param: Tensor, rows: Tensor, run: StepRun) -> None:
    """The new rows of other ranks."""

    def body() -> None:
        parts = chunk.route.scattered.parts
        targets = [part.box.view(param) for part in parts if part.box is not None]
        copy_all(targets, [part.of(rows, param.dtype) for part in parts])

    run.stage("rows", chunk, lambda: (rows.data_ptr(), places([param])), body, [param])


def _write_rows(chunk: SharedChunk, param: Tensor, message: Tensor) -> None:
    """This rank's rows, for every rank."""
    parts = chunk.route.answered.parts
    rows = [part.box.view(param) for part in parts if part.box is not None]
    stacked = chunk.route.answered.stacked(message, param.dtype)
    if stacked is not None and chunk.replicas is not None:
        stacked.copy_(rows[0])  # one run, which all of them get
        return
    copy_all([part.of(message, param.dtype) for part in parts], rows)


def step_small(
    small: SmallChunk,
    team: Team,
    factor: float,
    options: Sequence[MuonOptions | AdamWOptions],
    run: StepRun,
) -> Phases:
    """One all-reduce of all small gradients, then AdamW on every rank."""
    params = [param for _, param in small.params]
    present = [param.grad is not None for param in params]
    flat = small.flat
    with stage("muon::launch_reduce"):
        given = [(k, param.grad) for k, param in enumerate(params) if param.grad is not None]

        def pack() -> None:
            flat.zero_()
            copy_all([small.places[k] for k, _ in given], [grad for _, grad in given])

        grads = [grad for _, grad in given]
        run.stage("contribute", small, lambda: (present, places(grads)), pack)
        taken = [param for number, param in small.params if options[number].none_grad]
        for param in taken:
            param.grad = None
    yield
    with stage("muon::launch_reduce"):
        reducing = team.transport.sum(flat)
    yield
    with stage("muon::wait_reduce"):
        reducing.wait()
    with stage("muon::adamw"):
        _adamw_on_small(small, factor, present, options, run)


def _adamw_on_small(
    small: SmallChunk,
    factor: float,
    present: Sequence[bool],
    options: Sequence[MuonOptions | AdamWOptions],
    run: StepRun,
) -> None:
    given = {
        number: run.rate_of_adamw(number, options[number], small)
        for number in dict.fromkeys(number for number, _ in small.params)
    }
    params = [param for _, param in small.params]

    def body() -> None:
        small.flat.mul_(factor)
        for wanted, group in given.items():
            chosen = [
                (param, place)
                for (number, param), place, here in zip(
                    small.params, small.places, present, strict=True
                )
                if number == wanted and here
            ]
            if chosen:
                taken, grads = (list(column) for column in zip(*chosen, strict=True))
                adamw_on(taken, grads, [dict(run.state[param]) for param in taken], group)

    def key() -> Any:
        rules = [(tuple(g.betas), g.eps, places_of_numbers(g)) for g in given.values()]
        kept = [value for param in params for value in run.state[param].values()]
        return rules, factor, present, places(params), places(kept)

    run.stage("adamw", small, key, body, params)


def _momentum(
    bands: Bands,
    band: int,
    made: _Made,
    owned: Sequence[int],
    contributions: Contributions,
    factor: float,
    options: MuonOptions,
    run: StepRun,
) -> None:
    """Momentum of a band; its directions go to their rows of the batch."""
    chunk, whole = bands.parts[band], bands.whole
    shape = made.shape(whole)
    if made.directions is None:
        size = math.prod(shape) * whole.dtype.itemsize
        made.directions = run.take(whole, "directions", size)
    batch = made.directions.of(whole.dtype, shape)
    kept = [run.state[chunk.members[job].param]["momentum_buffer"] for job in owned]
    first, rows = made.before(bands.first[band]), bands.rows[band]
    rule = float(options.momentum), options.nesterov, options.momentum_form

    def body() -> None:
        here = batch.narrow(0, first, len(owned)).narrow(1, *rows)
        whole_ones = rows[1] == whole.matrix[0]
        mu, nesterov, form = rule
        momentum_kernel(
            contributions.sums(factor),
            [chunk.boxes[job].view(buffer) for job, buffer in zip(owned, kept, strict=True)],
            here if whole_ones else here.view(-1, *chunk.region(owned[0])).unbind(),
            mu=mu,
            nesterov=nesterov,
            form=form,
        )
        written(kept, kept)

    def key() -> Any:
        where = batch.data_ptr(), shape, first, places(kept)
        return where, rule, factor, owned, contributions.key()

    run.stage("momentum", chunk, key, body, kept)


def _adamw_on_rows(
    slices: SliceChunk,
    number: int,
    contributions: Contributions,
    factor: float,
    options: AdamWOptions,
    message: Block,
    run: StepRun,
) -> None:
    """AdamW on this rank's rows. The counter advances with the last rows of the parameter."""
    chunk = slices.chunk
    param = chunk.members[0].param
    state, owned = run.state[param], contributions.owned
    given = run.rate_of_adamw(number, options, chunk)

    def body() -> None:
        grads = contributions.sums(factor)
        for job, grad in zip(owned, grads, strict=True):
            first, length = chunk.members[job].job.region[0]
            averages = {key: _rows(state[key], first, length) for key in ("exp_avg", "exp_avg_sq")}
            counter = {"step": state["step"].clone()}
            adamw_on([chunk.boxes[job].view(param)], [grad], [averages | counter], given)
        if contributions.present and slices.last:
            state["step"].add_(1)
        _write_rows(chunk, param, message.bytes)

    def key() -> Any:
        kept = places([param, *map(local, state.values())])
        rule = tuple(options.betas), options.eps, factor, places_of_numbers(given)
        return kept, rule, message.bytes.data_ptr(), contributions.key()

    run.stage("adamw", chunk, key, body, [param])


def _rows(average: Tensor, first: int, length: int) -> Tensor:
    """Rows of the whole parameter in this rank's slice of its state."""
    here = average.to_local()
    ranks = average.device_mesh.size()
    each = max(1, -(-average.shape[0] // ranks))  # as torch.chunk
    return here.narrow(0, first % each, length)
