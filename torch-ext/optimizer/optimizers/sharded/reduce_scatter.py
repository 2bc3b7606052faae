"""The step with unreduced gradients: reduce to the owner, compute there, send what it made to all.

Matrices travel in bands, each under the computation of another: `ReduceScatter` is what `step.py`
does to a band between ranks. Rows of large parameters for AdamW go to the rank that owns them and
come back new; small parameters are added up on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...distributed import Future, Message, Phases, Team
from ...kernels import momentum as momentum_kernel
from ...kernels.step.tensor_lists import written
from ..groups.options import AdamWOptions, MuonOptions
from ..groups.parameters import local
from ..report import stage
from ..update_rules import Rate, adamw_on
from .buffers import Block
from .chunks import Bands, SharedChunk, SliceChunk, SmallChunk
from .cuda_graphs import StepRun, places, places_of_numbers, while_alive
from .exchange import (
    apply,
    apply_own,
    copy_all,
    evened_out,
    exponents_of,
    kept_statistics,
    launch_scatter,
    scales_of,
    statistics_of,
    write_to_holders,
)

# Computations between Newton-Schulz and the first transfer of what it makes: it runs beside them,
# so that messages do not wait for it.
LATER = 1
# Bytes of a part, on average, from which on parts are pushed from where they are, if the transport
# can: a copy takes the host 2.5 us, in which a GPU packs 4 MiB.
PUSHED = 4 * 2**20


class Batch:
    """Matrices of one shape that are orthogonalized together, and travel in bands, in one step."""

    def __init__(
        self, bands: Bands, number: int, factor: float, options: MuonOptions, run: StepRun
    ) -> None:
        """`number`: of the group; `factor`: of the sum of the contributions."""
        self.bands, self.number, self.factor = bands, number, factor
        self.options, self.run = options, run
        members = bands.whole.members
        # Of the matrices of this rank, by their slots.
        self.present = [members[job].param.grad is not None for job in bands.whole.route.owned]
        self.directions: Block | None = None  # (B, m, n) with a gradient, filled band by band
        self.updates: Block | None = None  # (B, m, n), sent band by band
        self._wait: Callable[[], None] | None = None  # for the updates, which are on their way

    def before(self, slot: int) -> int:
        """Matrices with a gradient before a slot."""
        return sum(self.present[:slot])

    @property
    def shape(self) -> tuple[int, ...]:
        return sum(self.present), *self.bands.whole.matrix

    def orthogonalize(self, iteration: Callable[..., Tensor]) -> None:
        """The updates of this rank's matrices as everyone applies them: (B, m, n), of the wire."""
        assert self.directions is not None
        whole, shape, run, beta2 = self.bands.whole, self.shape, self.run, self.options.beta2
        self.updates = run.take(whole, "updates", math.prod(shape) * whole.wire.itemsize)
        directions = self.directions.of(whole.dtype, shape)
        updates = self.updates.of(whole.wire, shape)
        slots = zip(whole.route.owned, self.present, strict=True)
        owned = [job for job, here in slots if here]

        def body() -> None:
            if beta2 is None:
                iteration(directions, out=updates)
            else:
                moments = [statistics_of(whole, job, run.state) for job in owned]
                evened_out(whole, iteration(directions), moments, self.options, updates)

        def key() -> Any:
            where = directions.data_ptr(), updates.data_ptr(), shape
            rule = *self.options.orthogonalization, beta2
            return where, rule, kept_statistics(whole, owned, self.options, run.state)

        self._wait = run.stage_beside("newton_schulz", whole, key, body)

    def arrive(self) -> None:
        """Wait until the updates are there."""
        if self._wait is not None:
            self._wait()
            self.run.give(self.directions)
            self._wait = self.directions = None

    def end(self) -> None:
        """All bands have sent their updates and used them."""
        self.run.give(self.updates)
        self.updates = None


class ReduceScatter:
    """One band in one step: matrices, or rows of them, every one of which has its owner's state."""

    prepares, gathers = "launch_reduce", "reduce"  # what a trace calls the way to the owners
    communicates = True

    def __init__(self, batch: Batch, band: int) -> None:
        self._batch, self._band = batch, band
        self.chunk = chunk = batch.bands.parts[band]
        bands_to_come = len(batch.bands.parts) - 1 - band
        self._last = not bands_to_come
        self.later = bands_to_come + LATER
        self._present = [member.param.grad is not None for member in chunk.members]
        self._owned = [job for job in chunk.route.owned if self._present[job]]
        self._mine: Tensor | None = None  # updates of this rank's matrices

    def prepare(self) -> None:
        run, chunk = self._batch.run, self.chunk
        begun = run.begun.pop(id(chunk), None)
        self._contributions = begun or Contributions(chunk, self._present, self._owned, run)

    def launch_gather(self) -> None:
        self._contributions.launch()

    def wait_gather(self) -> None:
        """Until the contributions are here; then the owner's momentum advances."""
        self._contributions.wait()
        if self._owned:
            with stage("muon::momentum"):
                self._momentum()
        self._contributions.give()
        del self._contributions

    def orthogonalize(self, iteration: Callable[..., Tensor]) -> None:
        """All matrices of the batch, when its last band is here."""
        if self._batch.directions is not None and self._last:
            self._batch.orthogonalize(iteration)

    def launch_scatter(self) -> None:
        batch, chunk, run = self._batch, self.chunk, self._batch.run
        batch.arrive()
        if self._owned and batch.updates is not None:
            updates = batch.updates.of(chunk.wire, batch.shape)
            first = batch.before(batch.bands.first[self._band])
            rows = batch.bands.rows[self._band]
            self._mine = updates.narrow(0, first, len(self._owned)).narrow(1, *rows)
        owned, mine, route = self._owned, self._mine, chunk.route

        def pieces() -> list[Tensor]:
            of_jobs = dict(zip(owned, mine.unbind(), strict=True))
            return [of_jobs[part.job].view(part.box.shape) for part in route.answered.parts]

        if mine is not None and len(owned) == len(route.owned):
            found = in_place(chunk, route.answered, route.scattered, pieces)
            if found is not None:
                self._scattering = launch_scatter(chunk, found, run)
                return
        message = run.take(chunk, "message", chunk.route.answered.size)

        def body() -> None:
            if mine is None:
                message.bytes.zero_()
            else:
                write_to_holders(chunk, owned, mine, message.bytes, {})

        def key() -> Any:
            where = None if mine is None else (mine.data_ptr(), mine.shape, mine.stride())
            return message.bytes.data_ptr(), where, owned

        if message.bytes.numel():
            run.stage("updates", chunk, key, body)
        self._scattering = launch_scatter(chunk, message, run)

    def wait_scatter(self) -> None:
        self._arrived = self._scattering.wait(self._batch.run)

    def update(self, rate: Rate) -> None:
        """p <- p - decay p - rate u, of what other ranks own and of what this one does."""
        batch, chunk, run = self._batch, self.chunk, self._batch.run
        options, number = batch.options, batch.number
        apply(chunk, self._arrived, number, rate, options, self._present, run)
        if self._mine is not None:
            apply_own(chunk, self._owned, self._mine, number, rate, options, run)
        self._scattering.give(run)
        if self._last:
            batch.end()

    def _momentum(self) -> None:
        """Of this rank's matrices; the directions go to their rows of the batch."""
        batch, chunk, contributions = self._batch, self.chunk, self._contributions
        whole, run, options, owned = batch.bands.whole, batch.run, batch.options, self._owned
        shape, factor = batch.shape, batch.factor
        if batch.directions is None:
            size = math.prod(shape) * whole.dtype.itemsize
            batch.directions = run.take(whole, "directions", size)
        directions = batch.directions.of(whole.dtype, shape)
        kept = [run.state[chunk.members[job].param]["momentum_buffer"] for job in owned]
        first, rows = batch.before(batch.bands.first[self._band]), batch.bands.rows[self._band]
        rule = options.momentum_rule

        def body() -> None:
            here = directions.narrow(0, first, len(owned)).narrow(1, *rows)
            whole_ones = rows[1] == whole.matrix[0]
            momentum_kernel(
                contributions.sums(factor),
                [chunk.boxes[job].view(buffer) for job, buffer in zip(owned, kept, strict=True)],
                here if whole_ones else here.view(-1, *chunk.region(owned[0])).unbind(),
                **rule,
            )
            written(kept, kept)

        def key() -> Any:
            where = directions.data_ptr(), shape, first, places(kept)
            return where, rule, factor, owned, contributions.key()

        run.stage("momentum", chunk, key, body, kept)


class Contributions:
    """This rank's gradients on their way to the owners, and those of all ranks added up.

    In float16 every part has a power of two as its scale, by the sender's largest element. The
    scales travel beside the message, and the owner undoes each. What this rank owns stays here.
    """

    def __init__(
        self, chunk: SharedChunk, present: Sequence[bool], owned: Sequence[int], run: StepRun
    ) -> None:
        self._chunk, self._run = chunk, run
        self.owned, self.present = owned, any(present)
        self._outbox: Block | None = None
        self._inbox: Block | None = None
        self._rounds = chunk.wire == torch.float16
        self._every = all(present)
        self._own = [_grad(chunk, job) for job in owned]
        self._here = here = [held for held in chunk.held_for_others if present[held.job]]
        sent = [_grad(chunk, held.job) for held in here]

        def pieces() -> list[Tensor]:
            return [held.box.view(grad) for held, grad in zip(here, sent, strict=True)]

        found = None
        if self._every and not self._rounds:
            found = in_place(chunk, chunk.route.sent, chunk.route.gathered, pieces)
        if found is not None:
            self._leaving: Tensor | Sequence[Tensor] = found
            return
        outbox = self._outbox = run.take(chunk, "message", chunk.route.sent.size)
        self._leaving = outbox.bytes

        def body() -> None:
            self._write(outbox.bytes, pieces())

        def key() -> Any:
            return outbox.bytes.data_ptr(), places(sent)

        run.stage("contribute", chunk, key if self._every else None, body)

    def _write(self, outbox: Tensor, grads: Sequence[Tensor]) -> None:
        """The message, and in float16 the scales."""
        chunk, wire = self._chunk, self._chunk.wire
        alike = chunk.route.sent.stacked(outbox, wire) if self._every else None
        if alike is not None:
            targets = list(alike.unbind())
        else:
            present = {held.job for held in self._here}
            parts = [(held.job, held.part.of(outbox, wire)) for held in chunk.held_for_others]
            targets = [part for job, part in parts if job in present]
            for part in (part for job, part in parts if job not in present):
                part.zero_()
        if not self._rounds:
            copy_all(targets, grads)
            return
        if not grads:
            chunk.scales.fill_(1)
            return
        jobs = chunk.jobs_for_others
        if not self._every:
            jobs = torch.tensor([held.job for held in self._here])
            jobs = jobs.to(chunk.device, non_blocking=True)
        largest = torch.stack(torch._foreach_norm(list(grads), torch.inf)).to(chunk.dtype)
        scales = scales_of(exponents_of(chunk, largest, jobs))
        chunk.scales.copy_(scales)
        factors = scales.index_select(0, jobs)
        if alike is not None:
            wide = torch.empty_like(alike, dtype=chunk.dtype)
            copy_all(wide.unbind(), grads)
            torch.mul(wide, factors.view(-1, *(1 for _ in alike.shape[1:])), out=alike)
            return
        for place, grad, scale in zip(targets, grads, factors.unbind(), strict=True):
            torch.mul(grad.to(chunk.dtype), scale, out=place)

    def launch(self) -> None:
        """Send the message, once."""
        chunk, run, transport = self._chunk, self._run, self._chunk.team.transport
        route = chunk.route
        if self._inbox is not None:
            return
        if self._rounds:
            self._collecting: Future = transport.collect(chunk.scales, chunk.all_scales)
        inbox = self._inbox = run.inbox(chunk, route.gathered)
        leaving = self._leaving
        self._reducing = transport.exchange(route.sent, leaving, route.gathered, inbox.bytes)

    def wait(self) -> None:
        """Until the contributions of others are here; the memory of what left is free then."""
        if self._rounds:
            self._collecting.wait()
        self._reducing.wait()
        self._run.give(self._outbox)

    def give(self) -> None:
        """The contributions of others have been used."""
        self._run.give(self._inbox)

    def key(self) -> Any:
        """What `sums` depends on."""
        assert self._inbox is not None
        where = self._inbox.bytes.data_ptr(), places(self._own)
        return self.present, tuple(self.owned), where

    def sums(self, factor: float) -> list[Tensor]:
        """The reduced gradients of what this rank owns, added up in the order of the ranks."""
        chunk = self._chunk
        own = [chunk.boxes[job].view(g) for job, g in zip(self.owned, self._own, strict=True)]
        if not own:
            return []
        summands: list[Sequence[Tensor]] = [*self._received()]
        if not summands:
            total = [grad.to(chunk.dtype, copy=True) for grad in own]
        else:
            # Before the second summand or behind it: the sum of the first two is the same.
            summands.insert(max(1, chunk.team.rank), own)
            total = [*summands[0]]  # in place in the message, if that is its dtype
            for summand in summands[1:]:
                torch._foreach_add_(total, [*summand])
        if factor != 1:
            torch._foreach_mul_(total, factor)
        return total

    def _received(self) -> Iterator[Sequence[Tensor]]:
        """What every other rank contributed to what this rank owns, without its scale."""
        assert self._inbox is not None
        chunk, gathered, inbox = self._chunk, self._chunk.route.gathered, self._inbox.bytes
        scales = chunk.all_scales.reciprocal() if self._rounds else None  # (W, J)
        others = [rank for rank in range(chunk.team.size) if rank != chunk.team.rank]
        stacked = gathered.stacked(inbox, chunk.wire)
        if stacked is not None and chunk.contributors and len(self._own) == len(chunk.route.owned):
            by_rank = stacked.view(len(others), len(self._own), *stacked.shape[1:])
            for sender, found in zip(others, by_rank.unbind(), strict=True):
                if scales is None:
                    yield found.to(chunk.dtype).unbind()
                    continue
                factors = scales[sender].index_select(0, chunk.owned_here)
                yield (found * factors.view(-1, *(1 for _ in found.shape[1:]))).unbind()
            return
        slots = {job: number for number, job in enumerate(self.owned)}
        columns = {rank: [torch.empty(0)] * len(slots) for rank in others}
        for part, sender in zip(gathered.parts, gathered.ranks(), strict=True):
            if part.job in slots:
                found = part.of(inbox, chunk.wire).to(chunk.dtype)
                if scales is not None:
                    found *= scales[sender, part.job]  # a power of two: exact
                columns[sender][slots[part.job]] = found
        yield from columns.values()


def in_place(
    chunk: SharedChunk, going: Message, coming: Message, pieces: Callable[[], list[Tensor]]
) -> list[Tensor] | None:
    """The parts of a message, if they are pushed from where they are; None if they are packed.

    The bytes that arrive are the same, so that each rank decides for itself.
    """
    parts = going.parts
    if not (parts and chunk.team.transport.pushes(coming)) or going.size < PUSHED * len(parts):
        return None
    found = pieces()
    pairs = zip(found, parts, strict=True)
    fit = all(p.is_contiguous() and p.nbytes == part.stop - part.start for p, part in pairs)
    return found if fit else None


def step_slices(
    slices: SliceChunk, number: int, factor: float, options: AdamWOptions, run: StepRun
) -> Phases:
    """reduce every rank's rows to it -> AdamW on them -> the new rows to all."""
    chunk = slices.chunk
    param = chunk.members[0].param
    present = param.grad is not None
    with stage("muon::launch_reduce"):
        owned = chunk.route.owned if present else ()
        contributions = run.begun.pop(id(chunk), None)
        if contributions is None:
            contributions = Contributions(chunk, [present] * len(chunk.members), owned, run)
    yield
    with stage("muon::launch_reduce"):
        contributions.launch()
    yield
    with stage("muon::wait_reduce"):
        contributions.wait()
    with stage("muon::adamw"):
        parts, message = chunk.route.answered.parts, None
        leaving: Any = in_place(
            chunk,
            chunk.route.answered,
            chunk.route.scattered,
            lambda: [part.box.view(param) for part in parts if part.box is not None],
        )
        if leaving is None:
            leaving = message = run.take(chunk, "message", chunk.route.answered.size)
        _adamw_on_rows(slices, number, contributions, factor, options, message, run)
        contributions.give()
        del contributions
    yield
    with stage("muon::launch_scatter"):
        scattering = launch_scatter(chunk, leaving, run)
        del message, leaving
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
        found = [part.of(rows, param.dtype) for part in parts]
        if (alive := chunk.team.transport.alive) is not None:
            pairs = zip(found, targets, strict=True)
            found = [torch.where(alive > 0, new, old) for new, old in pairs]
        copy_all(targets, found)

    def key() -> Any:
        return rows.data_ptr(), places([param])

    run.stage("rows", chunk, key, body, [param])


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
        number: run.on_device(number, options[number], small)
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


def _adamw_on_rows(
    slices: SliceChunk,
    number: int,
    contributions: Contributions,
    factor: float,
    options: AdamWOptions,
    message: Block | None,
    run: StepRun,
) -> None:
    """AdamW on this rank's rows, which are written to a message, if there is one.

    The counter advances with the last rows of the parameter.
    """
    chunk = slices.chunk
    param = chunk.members[0].param
    state, owned = run.state[param], contributions.owned
    given = run.on_device(number, options, chunk)

    def body() -> None:
        grads = contributions.sums(factor)
        for job, grad in zip(owned, grads, strict=True):
            first, length = chunk.members[job].job.region[0]
            averages = {key: _rows(state[key], first, length) for key in ("exp_avg", "exp_avg_sq")}
            counter = {"step": state["step"].clone()}
            now = while_alive(given, chunk)
            adamw_on([chunk.boxes[job].view(param)], [grad], [averages | counter], now)
        if contributions.present and slices.last:
            state["step"].add_(1)
        if message is not None:
            _write_rows(chunk, param, message.bytes)

    def key() -> Any:
        kept = places([param, *map(local, state.values())])
        rule = tuple(options.betas), options.eps, factor, places_of_numbers(given)
        where = None if message is None else message.bytes.data_ptr()
        return kept, rule, where, contributions.key()

    run.stage("adamw", chunk, key, body, [param])


def _rows(average: Tensor, first: int, length: int) -> Tensor:
    """Rows of the whole parameter in this rank's slice of its state."""
    here = average.to_local()
    ranks = average.device_mesh.size()
    each = max(1, -(-average.shape[0] // ranks))  # as torch.chunk
    return here.narrow(0, first % each, length)


def _grad(chunk: SharedChunk, job: int) -> Tensor:
    """The gradient of a job's parameter: of which the box of `chunk.boxes` is the job's."""
    grad = chunk.members[job].param.grad
    assert grad is not None
    return grad
