"""Directions of matrices on their way to their owners, and updates on their way back.

`Exchange` is what `step.py` does to a chunk between ranks: momentum into the message for the
owners, orthogonalized there into the message for all who hold a part, and from that to parameters.
The messages have the same layout whichever gradients exist: a matrix without gradient travels as
zeros, and nothing of it is written.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...distributed import Future
from ...kernels import momentum as momentum_kernel
from ...kernels.step.tensor_lists import written
from ..groups.blocks import kept_shape
from ..groups.options import MuonOptions
from ..groups.parameters import local, locals_of
from ..plan import OnDevice
from ..state.slots import RESIDUAL, STATISTICS
from ..update_rules import Rate, apply_at_rate, even_out
from .buffers import Block, lasting
from .chunks import Held, SharedChunk
from .cuda_graphs import (
    State,
    StepRun,
    places,
    places_of_numbers,
    while_alive,
)

# float16 ends below 2^16; a matrix travels with its largest element in [2^14, 2^15).
TOP = 15
# Exponents of float32 as they are stored: the largest, of inf and NaN, and that of 0.5.
NOT_FINITE, HALF = 255, 126


class Exchange:
    """One chunk in one step.

    Its buffers advance in `prepare`. Where the wire rounds, the ranks exchange exponents before the
    message can be written.
    """

    prepares, gathers = "momentum", "gather"  # what a trace calls the way to the owners
    later = None  # updates leave as soon as they are there

    def __init__(self, chunk: SharedChunk, number: int, options: MuonOptions, run: StepRun) -> None:
        """`number`: of the group."""
        self.chunk, self._number, self._options, self._run = chunk, number, options, run
        self.communicates = chunk.communicates
        self._present = [member.param.grad is not None for member in chunk.members]
        self._here = [held for held in chunk.held if self._present[held.job]]
        self._all_here = len(self._here) == len(chunk.held)
        self._rounds = chunk.wire != chunk.dtype
        self._wide: Block | None = None
        self._exponents: Future | None = None

    def prepare(self) -> None:
        """Momentum of all that this rank holds, into the message or rounded for it later."""
        chunk, run = self.chunk, self._run
        self._outbox = run.take(chunk, "message", chunk.route.sent.size)
        if chunk.wide_bytes:
            self._wide = run.take(chunk, "directions", chunk.wide_bytes)
        self._advance(chunk.exponents if self._rounds else None)
        if self._rounds:
            self._exponents = Future(chunk.exponents)
            if chunk.route.gathers:
                self._exponents = chunk.team.transport.maximum(chunk.exponents)
        if not self.communicates:
            self.launch_gather()
            self.wait_gather()

    def launch_gather(self) -> None:
        chunk, run, route, outbox = self.chunk, self._run, self.chunk.route, self._outbox
        if self._wide is not None and self._exponents is not None:
            exponents, wide = self._exponents.wait(), self._wide

            def key() -> Any:
                return outbox.bytes.data_ptr(), wide.bytes.data_ptr()

            usual = key if self._all_here else None
            run.stage("round", chunk, usual, lambda: self._round(exponents))
        elif self._exponents is not None:
            self._exponents.wait()
        run.give(self._wide)
        self._gathering = Sent(Future(outbox.bytes), outbox)
        if route.gathers:
            inbox = run.inbox(chunk, route.gathered)
            future = chunk.team.transport.exchange(
                route.sent, outbox.bytes, route.gathered, inbox.bytes
            )
            self._gathering = Sent(future, inbox, outbox)

    def wait_gather(self) -> None:
        self._inbox = self._gathering.wait(self._run)

    def orthogonalize(self, iteration: Callable[..., Tensor]) -> None:
        """The updates of matrices that this rank owns, into the message for all who hold a part."""
        chunk, run, options, inbox = self.chunk, self._run, self._options, self._inbox
        owned, lease = chunk.route.owned, self._gathering.arriving.lease
        whole = lease is not None and chunk.route.sent.matrices is not None
        message = self._message = run.take(chunk, "message", chunk.route.answered.size)
        if any(self._present[job] for job in owned):

            def body() -> None:
                orthogonal = iteration(batch_of(chunk, inbox, whole=whole))  # (B, m, n)
                write_updates(chunk, owned, orthogonal, options, run.state, message.bytes)

            def key() -> Any:
                rule = *options.orthogonalization, options.beta2
                kept = kept_statistics(chunk, owned, options, run.state)
                return inbox.data_ptr(), message.bytes.data_ptr(), rule, kept

            run.stage("newton_schulz", chunk, key, body)
        elif message.bytes.numel():
            run.stage("updates", chunk, message.bytes.data_ptr, message.bytes.zero_)
        self._gathering.give(run)
        if not self.communicates:
            self.launch_scatter()
            self.wait_scatter()

    def launch_scatter(self) -> None:
        self._scattering = launch_scatter(self.chunk, self._message, self._run)

    def wait_scatter(self) -> None:
        self._arrived = self._scattering.wait(self._run)

    def update(self, rate: Rate) -> None:
        """p <- p - decay p - rate u for what this rank holds."""
        apply(
            self.chunk, self._arrived, self._number, rate, self._options, self._present, self._run
        )
        self._scattering.give(self._run)

    def _advance(self, exponents: Tensor | None) -> None:
        """Momentum of all that is held, and the exponents of its matrices here."""
        chunk, run, here, options = self.chunk, self._run, self._here, self._options
        outbox, wide = self._outbox, self._wide
        if not here:
            empty = self._clear_absent if exponents is None else exponents.zero_
            run.stage("momentum", chunk, outbox.bytes.data_ptr, empty)
            return
        run.kept.enter(chunk)
        params = chunk.params_of(here)
        grads = chunk.views(here, locals_of([param.grad for param in params]))
        buffers = run.kept.boxes(chunk, here, "momentum_buffer")
        rule = options.momentum_rule

        def body() -> None:
            largest = momentum_kernel(grads, buffers, self._out(), **rule)[:, 0]
            if exponents is not None:
                jobs = chunk.jobs_here if self._all_here else [held.job for held in here]
                exponents.copy_(exponents_of(chunk, largest, jobs))
            elif not self._all_here:
                self._clear_absent()
            written(buffers, buffers)

        def key() -> Any:
            second = None if wide is None else wide.bytes.data_ptr()
            return rule, outbox.bytes.data_ptr(), second, places(grads), places(buffers)

        usual = self._all_here and isinstance(run.kept, OnDevice)
        run.stage("momentum", chunk, key if usual else None, body, buffers)
        run.kept.leave(chunk)

    def _out(self) -> Any:
        """Where the directions are written: in the message, unless they are rounded for it."""
        chunk = self.chunk
        if self._all_here and chunk.sends_all_alike:
            where = self._outbox if self._wide is None else self._wide
            dtype = chunk.wire if self._wide is None else chunk.dtype
            return where.bytes.view(dtype)
        return [
            held.part.of(self._outbox.bytes, chunk.wire)
            if held.part is not None and not self._rounds
            else self._wide_of(held)
            for held in self._here
        ]

    def _wide_of(self, held: Held) -> Tensor:
        assert self._wide is not None
        first = self.chunk.wide_places[held]
        flat = self._wide.bytes[first : first + held.box.numel * self.chunk.dtype.itemsize]
        return flat.view(self.chunk.dtype).view(held.box.shape)

    def _clear_absent(self) -> None:
        here = set(map(id, self._here))
        for held in self.chunk.held:
            if held.part is not None and id(held) not in here:
                held.part.of(self._outbox.bytes, self.chunk.wire).zero_()

    def _round(self, exponents: Tensor) -> None:
        chunk = self.chunk
        scales = scales_of(exponents)  # (J,)
        if self._all_here and chunk.sends_all_alike:
            alike = chunk.route.sent.stacked(self._outbox.bytes, chunk.wire)
            assert alike is not None
            factors = scales.index_select(0, chunk.jobs_here)
            factors = factors.view(-1, *(1 for _ in alike.shape[1:]))
            torch.mul(self._out().view(alike.shape), factors, out=alike)
            return
        self._clear_absent()
        for held in self._here:
            if held.part is not None:
                place = held.part.of(self._outbox.bytes, chunk.wire)
                torch.mul(self._wide_of(held), scales[held.job], out=place)


def exponents_of(chunk: SharedChunk, largest: Tensor, jobs: Sequence[int] | Tensor) -> Tensor:
    """The exponent of each matrix's largest element here (J,), as float32 stores it.

    `largest`: float32, of what is here of them; `jobs`: which matrix each is of.
    """
    found = largest.view(torch.int32).bitwise_right_shift(23).bitwise_and_(255)
    if jobs is chunk.jobs_here and chunk.places_of_jobs is not None:
        return found.index_select(0, chunk.places_of_jobs)
    exponents = torch.zeros(len(chunk.members), dtype=torch.int32, device=chunk.device)
    if not isinstance(jobs, Tensor):
        jobs = torch.tensor(jobs).to(chunk.device, non_blocking=True)
    return exponents.scatter_reduce_(0, jobs, found, "amax")


def scales_of(exponents: Tensor) -> Tensor:
    """Per matrix one power of two that brings its largest element (on any rank) below 2^15.

    It is exact: the owner need not undo it, since only the direction of a matrix counts. A matrix
    with an inf or NaN, which all of it becomes, is sent as it is.
    """
    return _scale_of_exponents(exponents.device).index_select(0, exponents)


@functools.cache
def _scale_of_exponents(device: torch.device) -> Tensor:
    """Per stored exponent of a matrix's largest element (256,) the scale that it travels with."""
    shifts = [max(-126, min(126, TOP - (stored - HALF))) for stored in range(NOT_FINITE)]
    with lasting():
        return torch.tensor([2.0**shift for shift in (*shifts, 0)], device=device)


def batch_of(chunk: SharedChunk, inbox: Tensor, *, whole: bool = False) -> Tensor:
    """The matrices of this rank, put together: (B, m, n) in the dtype of the wire.

    `whole`: they are already; what came was written to its place in them.
    """
    shape = (len(chunk.route.owned), *chunk.matrix)
    if chunk.fits or whole:
        return inbox[: math.prod(shape) * chunk.wire.itemsize].view(chunk.wire).view(shape)
    stacked = chunk.route.gathered.stacked(inbox, chunk.wire)
    if stacked is not None and chunk.sources is not None:
        by_rank = in_words(stacked.view(chunk.sources, shape[0], -1))
        return by_rank.transpose(0, 1).contiguous().view(chunk.wire).view(shape)
    batch = torch.empty(shape, dtype=chunk.wire, device=chunk.device)
    places = dict(zip(chunk.route.owned, batch.unbind(), strict=True))
    parts = chunk.route.gathered.parts
    copy_all(
        [places[p.job].view(chunk.region(p.job))[p.box.region] for p in parts],
        [part.of(inbox, chunk.wire) for part in parts],
    )
    return batch


@dataclass(frozen=True, eq=False)
class Sent:
    """A message on its way."""

    future: Future
    arriving: Block
    leaving: Block | None = None

    def wait(self, run: StepRun) -> Tensor:
        """What arrives; the memory of what left is free."""
        found = self.future.wait()
        run.give(self.leaving)
        return found

    def give(self, run: StepRun) -> None:
        """What arrived has been used."""
        run.give(self.arriving)


def launch_scatter(chunk: SharedChunk, message: Block | Sequence[Tensor], run: StepRun) -> Sent:
    """Send the updates to all who hold a part: a message, or its parts from where they are."""
    route, packed = chunk.route, isinstance(message, Block)
    if packed and not route.scatters:
        return Sent(Future(message.bytes), message)
    inbox, transport = run.inbox(chunk, route.scattered), chunk.team.transport
    outbox = message.bytes if packed else message
    future = transport.exchange(route.answered, outbox, route.scattered, inbox.bytes)
    return Sent(future, inbox, message if packed else None)


def in_words(tensor: Tensor) -> Tensor:
    """The bits of a tensor in elements of 16 bytes, if its last dimension holds whole ones.

    A GPU copies what is not contiguous element by element: eight times fewer than in float16.
    """
    lanes = torch.complex128.itemsize // tensor.dtype.itemsize
    return tensor if tensor.shape[-1] % lanes else tensor.view(torch.complex128)


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors to tensors of the same shapes, in few launches."""
    if targets:
        torch._foreach_copy_(list(targets), list(sources))


def write_updates(
    chunk: SharedChunk,
    owned: Sequence[int],
    orthogonal: Tensor,  # (B, m, n)
    options: MuonOptions,
    state: State,
    message: Tensor,
) -> None:
    """Write the updates of owned jobs, evened out if asked for, and the new statistics."""
    statistics: dict[int, Tensor] = {}
    if options.beta2 is not None:
        statistics = {job: statistics_of(chunk, job, state) for job in owned}
        if any(part.box is None for part in chunk.route.answered.parts):
            # Several ranks keep them: they advance together, when the updates are there.
            statistics = {job: kept.clone() for job, kept in statistics.items()}
        orthogonal = evened_out(chunk, orthogonal, [*statistics.values()], options)
    write_to_holders(chunk, owned, orthogonal, message, statistics)


def evened_out(
    chunk: SharedChunk,
    orthogonal: Tensor,  # (B, m, n)
    statistics: Sequence[Tensor],  # of each matrix, advanced in place
    options: MuonOptions,
    out: Tensor | None = None,  # (B, m, n) of the wire
) -> Tensor:
    """The updates with their rows or columns evened out."""
    assert options.beta2 is not None
    kept = kept_shape(*chunk.matrix, transposed=options.transposed)
    reduced = torch.empty_like(orthogonal, dtype=chunk.wire) if out is None else out
    moments = [moment.view(kept) for moment in statistics]
    even_out(reduced.unbind(), orthogonal, moments, options.beta2)
    return reduced


def write_to_holders(
    chunk: SharedChunk,
    owned: Sequence[int],
    updates: Tensor,  # (B, m, n) or the chunk's rows of it
    message: Tensor,
    statistics: Mapping[int, Tensor],
) -> None:
    """Write updates of owned jobs to all who hold a part, with new statistics."""
    stacked = chunk.route.answered.stacked(message, chunk.wire)
    if stacked is not None and len(owned) == len(chunk.route.owned):
        if chunk.receivers is not None:
            by_job = updates.reshape(len(owned), chunk.receivers, -1)
            places = stacked.view(chunk.receivers, len(owned), -1)
            if updates.dtype == chunk.wire:
                by_job, places = in_words(by_job), in_words(places)
            places.copy_(by_job.transpose(0, 1))
            return
        if chunk.replicas is not None:
            stacked.view(chunk.replicas, *updates.shape).copy_(updates)
            return
    of_jobs = dict(zip(owned, updates.unbind(), strict=True))
    sources, places = [], []
    for part in chunk.route.answered.parts:
        if part.job not in of_jobs:
            message[part.start : part.stop].zero_()
        elif part.box is None:
            sources.append(statistics[part.job])
            places.append(part.of(message, chunk.statistics_dtype))
        else:
            update = of_jobs[part.job].view(chunk.region(part.job))
            sources.append(update[part.box.region])
            places.append(part.of(message, chunk.wire))
    copy_all(places, sources)


def kept_statistics(
    chunk: SharedChunk, owned: Sequence[int], options: MuonOptions, state: State
) -> tuple[Any, ...]:
    """Where the statistics of owned jobs are: of the key of a stage that uses them."""
    if options.beta2 is None:
        return ()
    return places([local(state[chunk.members[job].param][STATISTICS]) for job in owned])


def apply(
    chunk: SharedChunk,
    arrived: Tensor,
    number: int,
    rate: Rate,
    options: MuonOptions,
    present: Sequence[bool],
    run: StepRun,
) -> None:
    """p <- p - decay p - rate u for what this rank holds, with one rounding each."""
    route, state, rate = chunk.route.scattered, run.state, run.on_device(number, rate, chunk)
    whole = locals_of(chunk.params_of_updates)  # the parameter of every part, as stored here
    keeps_residuals = options.rounding == "residual"
    usual = not keeps_residuals and rate.decay is None and all(present)

    def body() -> None:
        guarded = while_alive(rate, chunk)
        stacked = route.stacked(arrived, chunk.wire) if usual else None
        if stacked is not None:
            _apply(chunk.views_of_updates(whole), stacked, guarded, options)
            return
        params, updates, residuals = [], [], []
        for part, stored in zip(route.parts, whole, strict=True):
            if not present[part.job]:
                continue
            if part.box is None:
                moments = part.of(arrived, chunk.statistics_dtype)
                statistics_of(chunk, part.job, state).copy_(moments)
                continue
            params.append(part.box.view(stored))
            updates.append(part.of(arrived, chunk.wire))
            kept = state[chunk.members[part.job].param].get(RESIDUAL) if keeps_residuals else None
            residuals.append(None if kept is None else part.box.view(local(kept)))
        if params:
            _apply(params, updates, guarded, options, residuals)

    def key() -> Any:
        rule = rate.factor, rate.shaped_decay, options.cautious, options.rounding, options.beta2
        jobs = [part.job for part in route.parts if part.box is None]
        moments = kept_statistics(chunk, jobs, options, state)
        return arrived.data_ptr(), places_of_numbers(rate), rule, places(whole), moments

    run.stage("update_params", chunk, key if usual else None, body, whole)


def apply_own(
    chunk: SharedChunk,
    owned: Sequence[int],
    updates: Tensor,  # (B, m, n), or the chunk's rows of it
    number: int,
    rate: Rate,
    options: MuonOptions,
    run: StepRun,
) -> None:
    """`apply` for jobs of this rank, whose updates did not travel; they keep no residuals."""
    rate = run.on_device(number, rate, chunk)
    whole = locals_of([chunk.members[job].param for job in owned])

    def body() -> None:
        of_jobs = updates.view(-1, *chunk.region(owned[0]))
        boxes = (chunk.boxes[job] for job in owned)
        params = [box.view(stored) for box, stored in zip(boxes, whole, strict=True)]
        updates_of = of_jobs if of_jobs.is_contiguous() else of_jobs.unbind()
        _apply(params, updates_of, while_alive(rate, chunk), options)

    def key() -> Any:
        rule = rate.factor, rate.shaped_decay, options.cautious
        where = updates.data_ptr(), updates.shape
        return where, places_of_numbers(rate), rule, places(whole)

    run.stage("update_own", chunk, key if rate.decay is None else None, body, whole)


def _apply(
    params: Sequence[Tensor],
    updates: Sequence[Tensor] | Tensor,
    rate: Rate,
    options: MuonOptions,
    stored: Sequence[Tensor | None] = (),  # residuals, perhaps in host memory
) -> None:
    residuals = [
        None if kept is None else kept.to(param.device, non_blocking=True)
        for kept, param in zip(stored, params, strict=False)
    ]
    there = residuals if any(kept is not None for kept in residuals) else None
    apply_at_rate(params, updates, rate, options.cautious, there)
    written(params, params)
    for residual, kept in zip(residuals, stored, strict=True):
        if kept is not None and residual is not kept:
            kept.copy_(residual, non_blocking=True)


def statistics_of(
    chunk: SharedChunk, job: int, state: Mapping[Tensor, Mapping[str, Tensor]]
) -> Tensor:
    """This rank's second moment of a matrix, flat."""
    member = chunk.members[job]
    kept: Any = local(state[member.param][STATISTICS])
    return kept.view(-1).narrow(0, *member.statistics)
