"""The step of matrices that several ranks share: the same sentence, with something to wait for."""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..distributed import Future, Phases, Ready
from ..kernels import momentum as momentum_kernel
from ..orthogonalize import orthogonalize
from .answers import answer, apply, copy_all, in_words, launch_scatter
from .device_state import OnDevice
from .host_state import InHostMemory
from .layout import written
from .options import MuonOptions
from .parameters import locals_of
from .shared import Held, SharedChunk
from .timing import stage
from .update import Rate

# float16 ends below 2^16; a matrix travels with its largest element in [2^14, 2^15).
TOP = 15
# Exponents of float32 as they are stored: the largest, of inf and NaN, and that of 0.5.
NOT_FINITE, HALF = 255, 126


def step_shared(
    chunk: SharedChunk,
    rate: Rate,
    options: MuonOptions,
    state: Mapping[Tensor, Mapping[str, Tensor]],
    remaining: Counter[Tensor],
    kept: OnDevice | InHostMemory,
) -> Phases:
    """momentum -> gather -> orthogonalize -> scatter -> update for one chunk.

    It yields as `run_pipeline` says, and not at all if nothing crosses ranks. The messages have the
    same layout whichever gradients exist: a matrix without gradient travels as zeros, and nothing
    of it is written.

    Args:
        chunk: the matrices.
        rate: of their shape.
        options: of their group.
        state: of the optimizer.
        remaining: per parameter of groups with none_grad the chunks that still need its gradient;
            counted down here.
        kept: where the state is.
    """
    present = [member.param.grad is not None for member in chunk.members]
    with stage("muon::momentum"):
        directions = Directions(chunk, options, kept, present)
        if options.none_grad:
            release(chunk, remaining)
    if chunk.communicates:
        yield
    with stage("muon::launch_gather"):
        gathering = _gather(chunk, directions.message())
        del directions
    if chunk.communicates:
        yield
    with stage("muon::wait_gather"):
        batch = _batch(chunk, gathering.wait())  # (B, m, n)
        del gathering  # with both messages: the iteration needs the memory
    orthogonal = None
    if any(present[job] for job in chunk.route.owned):
        with stage("muon::newton_schulz"):
            orthogonal = orthogonalize(
                batch, method=options.method, steps=options.ns_steps, dtype=options.dtype
            )  # (B, m, n)
    del batch
    if chunk.communicates:
        yield
    with stage("muon::launch_scatter"):
        message = chunk.route.answered.empty(chunk.device)
        if orthogonal is None:
            message.zero_()
        else:
            answer(chunk, chunk.route.owned, orthogonal, options, state, message)
        del orthogonal
        scattering = launch_scatter(chunk, message)
        del message
    if chunk.communicates:
        yield
    with stage("muon::wait_scatter"):
        answers = scattering.wait()
    with stage("muon::update_params"):
        apply(chunk, answers, rate, options, state, present)


def release(chunk: SharedChunk, remaining: Counter[Tensor]) -> None:
    """Let go of the gradients that no later chunk needs."""
    for param in chunk.params:
        remaining[param] -= 1
        if not remaining[param]:
            param.grad = None


class Directions:
    """The directions of what this rank holds; their buffers advance when it is made.

    Where the wire rounds, the ranks exchange exponents before the message can be written.
    """

    def __init__(
        self,
        chunk: SharedChunk,
        options: MuonOptions,
        kept: OnDevice | InHostMemory,
        present: Sequence[bool],
    ) -> None:
        sent = chunk.route.sent
        self._chunk, self._rounds = chunk, chunk.wire != chunk.dtype
        self._outbox = sent.empty(chunk.device)
        self._here = [held for held in chunk.held if present[held.job]]
        all_here = len(self._here) == len(chunk.held)
        # (boxes, ...): all places in the message, if nothing else is held
        self._alike: Tensor | None = None
        self._places: list[Tensor | None] = []
        if all_here and len(chunk.held) == len(sent.parts):
            self._alike = sent.stacked(self._outbox, chunk.wire)
        self._out: Any = self._made(present)
        largest = None
        if self._here:
            largest = _advance(chunk, self._here, self._out, options, kept)
        if self._rounds:
            jobs = chunk.jobs_here if all_here else [held.job for held in self._here]
            exponents = exponents_of(chunk, largest, jobs)
            self._exponents: Future = Ready(exponents)
            if chunk.route.gathers:
                self._exponents = chunk.team.transport.maximum(exponents)

    def _made(self, present: Sequence[bool]) -> Any:
        """Where the directions are written: in the message, unless they are rounded for it."""
        chunk = self._chunk
        if self._alike is not None:
            return torch.empty_like(self._alike, dtype=chunk.dtype) if self._rounds else self._alike
        for held in chunk.held:
            if held.part is not None and not present[held.job]:
                held.part.of(self._outbox, chunk.wire).zero_()
        self._places = [
            None if held.part is None else held.part.of(self._outbox, chunk.wire)
            for held in self._here
        ]
        return [
            torch.empty(held.box.shape, dtype=chunk.dtype, device=chunk.device)
            if place is None or self._rounds
            else place
            for held, place in zip(self._here, self._places, strict=True)
        ]

    def message(self) -> Tensor:
        """The message for the owners, when the exponents are here."""
        if not self._rounds:
            return self._outbox
        scales = scales_of(self._exponents.wait())  # (J,)
        if self._alike is not None:
            factors = scales.index_select(0, self._chunk.jobs_here)
            factors = factors.view(-1, *(1 for _ in self._alike.shape[1:]))
            torch.mul(self._out, factors, out=self._alike)
            return self._outbox
        for direction, place, held in zip(self._out, self._places, self._here, strict=True):
            if place is not None:
                torch.mul(direction, scales[held.job], out=place)
        return self._outbox


def _advance(
    chunk: SharedChunk,
    here: Sequence[Held],
    out: Sequence[Tensor] | Tensor,
    options: MuonOptions,
    kept: OnDevice | InHostMemory,
) -> Tensor:
    """Momentum of boxes that are held; the largest element of every direction."""
    kept.enter(chunk)
    grads = locals_of([param.grad for param in chunk.params_of(here)])
    buffers = kept.boxes(chunk, here, "momentum_buffer")
    largest = momentum_kernel(
        chunk.views(here, grads),
        buffers,
        out,
        mu=float(options.momentum),
        nesterov=options.nesterov,
        form=options.momentum_form,
    )[:, 0]
    written(buffers, buffers)
    kept.leave(chunk)
    return largest


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
    return torch.tensor([2.0**shift for shift in (*shifts, 0)], device=device)


def _gather(chunk: SharedChunk, outbox: Tensor) -> Future:
    if not chunk.route.gathers:
        return Ready(outbox)
    return chunk.team.transport.gather(chunk.route.sent, outbox, chunk.route.gathered)


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
