"""The step of matrices that several ranks share: the same sentence, with something to wait for."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...distributed import Future, Phases, Ready
from ...kernels import momentum as momentum_kernel
from ...orthogonalize import orthogonalize
from ..groups.options import MuonOptions
from ..groups.parameters import locals_of
from ..layout import written
from ..stages.update import Rate
from ..state.device_state import OnDevice
from ..timing import stage
from .buffers import Block, lasting
from .chunks import Held, SharedChunk
from .cuda_graphs import StepRun, places
from .exchange import Sent, answer, apply, copy_all, in_words, kept_statistics, launch_scatter

# float16 ends below 2^16; a matrix travels with its largest element in [2^14, 2^15).
TOP = 15
# Exponents of float32 as they are stored: the largest, of inf and NaN, and that of 0.5.
NOT_FINITE, HALF = 255, 126


def step_shared(
    chunk: SharedChunk, number: int, rate: Rate, options: MuonOptions, run: StepRun
) -> Phases:
    """momentum -> gather -> orthogonalize -> scatter -> update for one chunk.

    It yields as `run_pipeline` says, and not at all if nothing crosses ranks. The messages have the
    same layout whichever gradients exist: a matrix without gradient travels as zeros, and nothing
    of it is written.

    Args:
        chunk: the matrices.
        number: of their group.
        rate: of their shape.
        options: of their group.
        run: the step.
    """
    present = [member.param.grad is not None for member in chunk.members]
    with stage("muon::momentum"):
        directions = Directions(chunk, options, present, run)
        if options.none_grad:
            run.release(chunk)
    if chunk.communicates:
        yield
    with stage("muon::launch_gather"):
        gathering = _gather(chunk, directions, run)
        del directions
    if chunk.communicates:
        yield
    with stage("muon::wait_gather"):
        inbox = gathering.wait(run)
    with stage("muon::newton_schulz"):
        message = run.take(chunk, "message", chunk.route.answered.size)
        _orthogonalized(chunk, inbox, message, options, present, run)
        gathering.give(run)
        del gathering, inbox
    if chunk.communicates:
        yield
    with stage("muon::launch_scatter"):
        scattering = launch_scatter(chunk, message, run)
        del message
    if chunk.communicates:
        yield
    with stage("muon::wait_scatter"):
        answers = scattering.wait(run)
    with stage("muon::update_params"):
        apply(chunk, answers, number, rate, options, present, run)
        scattering.give(run)


def _orthogonalized(
    chunk: SharedChunk,
    inbox: Tensor,
    message: Block,
    options: MuonOptions,
    present: Sequence[bool],
    run: StepRun,
) -> None:
    """The answers of this rank, out of what was sent to it."""
    owned = chunk.route.owned
    if not any(present[job] for job in owned):
        if message.bytes.numel():
            run.stage("answer", chunk, message.bytes.data_ptr, message.bytes.zero_)
        return

    def body() -> None:
        orthogonal = orthogonalize(
            _batch(chunk, inbox),  # (B, m, n)
            method=options.method,
            steps=options.ns_steps,
            dtype=options.dtype,
        )
        answer(chunk, owned, orthogonal, options, run.state, message.bytes)

    def key() -> Any:
        iteration = options.method, options.ns_steps, options.dtype
        where = inbox.data_ptr(), message.bytes.data_ptr()
        return where, iteration, options.beta2, kept_statistics(chunk, owned, options, run.state)

    run.stage("newton_schulz", chunk, key, body)


class Directions:
    """The directions of what this rank holds; their buffers advance when it is made.

    Where the wire rounds, the ranks exchange exponents before the message can be written.
    """

    def __init__(
        self, chunk: SharedChunk, options: MuonOptions, present: Sequence[bool], run: StepRun
    ) -> None:
        sent = chunk.route.sent
        self._chunk, self._run, self._rounds = chunk, run, chunk.wire != chunk.dtype
        self.outbox = run.take(chunk, "message", sent.size)
        self._here = [held for held in chunk.held if present[held.job]]
        self._all_here = len(self._here) == len(chunk.held)
        self._wide: Block | None = None
        if chunk.wide_bytes:
            self._wide = run.take(chunk, "directions", chunk.wide_bytes)
        self._exponents: Future | None = None
        if self._rounds:
            exponents = chunk.exponents
            self._advance(options, exponents)
            self._exponents = Ready(exponents)
            if chunk.route.gathers:
                transport = chunk.team.transport
                self._exponents = transport.maximum(exponents)
        else:
            self._advance(options, None)

    def _advance(self, options: MuonOptions, exponents: Tensor | None) -> None:
        """Momentum of all that is held, and the exponents of its matrices here."""
        chunk, run, here = self._chunk, self._run, self._here
        if not here:
            empty = self._clear_absent if exponents is None else exponents.zero_
            run.stage("momentum", chunk, self.outbox.bytes.data_ptr, empty)
            return
        run.kept.enter(chunk)
        params = chunk.params_of(here)
        grads = chunk.views(here, locals_of([param.grad for param in params]))
        buffers = run.kept.boxes(chunk, here, "momentum_buffer")
        rule = float(options.momentum), options.nesterov, options.momentum_form

        def body() -> None:
            mu, nesterov, form = rule
            largest = momentum_kernel(
                grads, buffers, self._out(), mu=mu, nesterov=nesterov, form=form
            )[:, 0]
            if exponents is not None:
                jobs = chunk.jobs_here if self._all_here else [held.job for held in here]
                exponents.copy_(exponents_of(chunk, largest, jobs))
            elif not self._all_here:
                self._clear_absent()
            written(buffers, buffers)

        def key() -> Any:
            where = self.outbox.bytes.data_ptr()
            wide = None if self._wide is None else self._wide.bytes.data_ptr()
            return rule, where, wide, places(grads), places(buffers)

        usual = self._all_here and isinstance(run.kept, OnDevice)
        run.stage("momentum", chunk, key if usual else None, body, buffers)
        run.kept.leave(chunk)

    def _out(self) -> Any:
        """Where the directions are written: in the message, unless they are rounded for it."""
        chunk = self._chunk
        if self._all_here and chunk.sends_all_alike:
            where = self.outbox if self._wide is None else self._wide
            dtype = chunk.wire if self._wide is None else chunk.dtype
            return where.bytes.view(dtype)
        return [
            held.part.of(self.outbox.bytes, chunk.wire)
            if held.part is not None and not self._rounds
            else self._wide_of(held)
            for held in self._here
        ]

    def _wide_of(self, held: Held) -> Tensor:
        assert self._wide is not None
        first = self._chunk.wide_places[held]
        flat = self._wide.bytes[first : first + held.box.numel * self._chunk.dtype.itemsize]
        return flat.view(self._chunk.dtype).view(held.box.shape)

    def _clear_absent(self) -> None:
        here = set(map(id, self._here))
        for held in self._chunk.held:
            if held.part is not None and id(held) not in here:
                held.part.of(self.outbox.bytes, self._chunk.wire).zero_()

    def message(self) -> Tensor:
        """The message for the owners, when the exponents are here."""
        if self._exponents is not None:
            exponents = self._exponents.wait()

            def key() -> Any:
                assert self._wide is not None
                return self.outbox.bytes.data_ptr(), self._wide.bytes.data_ptr()

            if self._wide is not None:
                usual = key if self._all_here else None
                self._run.stage("round", self._chunk, usual, lambda: self._round(exponents))
        self._run.give(self._wide)
        return self.outbox.bytes

    def _round(self, exponents: Tensor) -> None:
        chunk = self._chunk
        scales = scales_of(exponents)  # (J,)
        if self._all_here and chunk.sends_all_alike:
            alike = chunk.route.sent.stacked(self.outbox.bytes, chunk.wire)
            assert alike is not None
            factors = scales.index_select(0, chunk.jobs_here)
            factors = factors.view(-1, *(1 for _ in alike.shape[1:]))
            torch.mul(self._out().view(alike.shape), factors, out=alike)
            return
        self._clear_absent()
        for held in self._here:
            if held.part is not None:
                place = held.part.of(self.outbox.bytes, chunk.wire)
                torch.mul(self._wide_of(held), scales[held.job], out=place)


def exponents_of(
    chunk: SharedChunk, largest: Tensor | None, jobs: Sequence[int] | Tensor
) -> Tensor:
    """The exponent of each matrix's largest element here (J,), as float32 stores it.

    Args:
        chunk: the matrices.
        largest: float32, of what is here of them.
        jobs: which matrix each is of.
    """
    found = None
    if largest is not None:
        found = largest.view(torch.int32).bitwise_right_shift(23).bitwise_and_(255)
    if found is not None and jobs is chunk.jobs_here and chunk.places_of_jobs is not None:
        return found.index_select(0, chunk.places_of_jobs)
    exponents = torch.zeros(len(chunk.members), dtype=torch.int32, device=chunk.device)
    if found is not None:
        if not isinstance(jobs, Tensor):
            jobs = torch.tensor(jobs).to(chunk.device, non_blocking=True)
        exponents.scatter_reduce_(0, jobs, found, "amax")
    return exponents


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


def _gather(chunk: SharedChunk, directions: Directions, run: StepRun) -> Sent:
    outbox, route = directions.outbox, chunk.route
    message = directions.message()
    if not route.gathers:
        return Sent(Ready(message), outbox)
    inbox, transport = run.take(chunk, "message", route.gathered.size), chunk.team.transport
    future = transport.gather(route.sent, message, route.gathered, inbox.bytes)
    return Sent(future, inbox, outbox)


def _batch(chunk: SharedChunk, inbox: Tensor) -> Tensor:
    """The matrices of this rank, put together: (B, m, n) in the dtype of the wire."""
    shape = (len(chunk.route.owned), *chunk.matrix)
    if chunk.fits:
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
