"""What owners answer, and what everyone does with it: updates into messages, and to parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...distributed import Future, Ready
from ...kernels import apply_update
from ...reference import update as reference
from ..groups.options import MuonOptions
from ..groups.parameters import local, locals_of
from ..layout import written
from ..stages.update import Rate
from ..state.rounding import RESIDUAL
from ..state.state import STATISTICS
from .buffers import Block
from .chunks import SharedChunk
from .cuda_graphs import State, StepRun, places, places_of_numbers


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


def answer(
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
        statistics = {job: _statistics(chunk, job, state) for job in owned}
        if any(part.box is None for part in chunk.route.answered.parts):
            # Several ranks keep them: they advance together, when the answers are there.
            statistics = {job: kept.clone() for job, kept in statistics.items()}
        orthogonal = _evened_out(chunk, orthogonal, [*statistics.values()], options.beta2)
    write_answer(chunk, owned, orthogonal, message, statistics)


def evened_out(
    chunk: SharedChunk,
    owned: Sequence[int],
    orthogonal: Tensor,  # (B, m, n)
    beta2: float,
    state: State,
    out: Tensor,  # (B, m, n) of the wire
) -> None:
    """The updates of owned jobs, whose statistics no other rank keeps."""
    statistics = [_statistics(chunk, job, state) for job in owned]
    _evened_out(chunk, orthogonal, statistics, beta2, out)


def _evened_out(
    chunk: SharedChunk,
    orthogonal: Tensor,
    statistics: Sequence[Tensor],
    beta2: float,
    out: Tensor | None = None,
) -> Tensor:
    m, n = chunk.matrix
    kept = (m, 1) if m >= n else (1, n)
    reduced = torch.empty_like(orthogonal, dtype=chunk.wire) if out is None else out
    reduced.zero_()
    apply_update(  # 0 - (-1) u', in which u' is u with its rows or columns evened out
        reduced.unbind(),
        orthogonal,
        lr=1.0,
        factors=[-1.0] * len(reduced),
        weight_decay=0.0,
        second_moments=[moment.view(kept) for moment in statistics],
        beta2=beta2,
    )
    return reduced


def write_answer(
    chunk: SharedChunk,
    owned: Sequence[int],
    updates: Tensor,  # (B, m, n) or the chunk's rows of it
    message: Tensor,
    statistics: Mapping[int, Tensor],
) -> None:
    """Write updates of owned jobs to all who hear of them, with new statistics."""
    stacked = chunk.route.answered.stacked(message, chunk.wire)
    if stacked is not None and len(owned) == len(chunk.route.owned):
        if chunk.hearers is not None:
            by_job = updates.reshape(len(owned), chunk.hearers, -1)
            places = stacked.view(chunk.hearers, len(owned), -1)
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


def launch_scatter(chunk: SharedChunk, message: Block, run: StepRun) -> Sent:
    """Send the answers to all who hold a part."""
    route = chunk.route
    if not route.scatters:
        return Sent(Ready(message.bytes), message)
    inbox, transport = run.take(chunk, "message", route.scattered.size), chunk.team.transport
    future = transport.scatter(route.answered, message.bytes, route.scattered, inbox.bytes)
    return Sent(future, inbox, message)


def kept_statistics(
    chunk: SharedChunk, owned: Sequence[int], options: MuonOptions, state: State
) -> tuple[Any, ...]:
    """Where the statistics of owned jobs are: of the key of a stage that uses them."""
    if options.beta2 is None:
        return ()
    return places([local(state[chunk.members[job].param][STATISTICS]) for job in owned])


def apply(
    chunk: SharedChunk,
    answers: Tensor,
    number: int,
    rate: Rate,
    options: MuonOptions,
    present: Sequence[bool],
    run: StepRun,
) -> None:
    """p <- p - decay p - rate u for what this rank holds, with one rounding each."""
    state = run.state
    rate = run.rate(number, rate, chunk)
    params = locals_of(chunk.params_of_answers)

    def body() -> None:
        _apply_answers(chunk, answers, params, rate, options, state, present)

    def key() -> Any:
        rule = rate.factor, rate.shaped_decay, options.cautious, options.rounding, options.beta2
        numbers = places_of_numbers(rate)
        return answers.data_ptr(), numbers, rule, places(params), _moments(chunk, options, state)

    plain = options.rounding != "residual" and rate.decay is None and all(present)
    run.stage("update_params", chunk, key if plain else None, body, params)


def _moments(chunk: SharedChunk, options: MuonOptions, state: State) -> tuple[Any, ...]:
    """Where the statistics are that come with the answers."""
    jobs = [part.job for part in chunk.route.scattered.parts if part.box is None]
    return kept_statistics(chunk, jobs, options, state)


def _apply_answers(
    chunk: SharedChunk,
    answers: Tensor,
    whole: list[Tensor],  # the parameter of every part, as it is stored here
    rate: Rate,
    options: MuonOptions,
    state: State,
    present: Sequence[bool],
) -> None:
    stacked = chunk.route.scattered.stacked(answers, chunk.wire) if all(present) else None
    if stacked is not None and options.rounding != "residual" and rate.decay is None:
        _apply(chunk.views_of_answers(whole), stacked, rate, options)
        return
    params, updates, residuals = [], [], []
    for part, stored in zip(chunk.route.scattered.parts, whole, strict=True):
        if not present[part.job]:
            continue
        if part.box is None:
            moments = part.of(answers, chunk.statistics_dtype)
            _statistics(chunk, part.job, state).copy_(moments)
        else:
            param = chunk.members[part.job].param
            params.append(part.box.view(stored))
            updates.append(part.of(answers, chunk.wire))
            kept = state[param].get(RESIDUAL) if options.rounding == "residual" else None
            residuals.append(None if kept is None else part.box.view(local(kept)))
    if params:
        _apply(params, updates, rate, options, residuals)


def apply_own(
    chunk: SharedChunk,
    owned: Sequence[int],
    updates: Tensor,  # (B, m, n), or the chunk's rows of it
    number: int,
    rate: Rate,
    options: MuonOptions,
    run: StepRun,
) -> None:
    """`apply` for jobs of this rank, whose updates did not travel."""
    rate = run.rate(number, rate, chunk)
    held = [(chunk.boxes[job], chunk.members[job].param) for job in owned]
    whole = locals_of([param for _, param in held])
    residuals: list[Tensor | None] = [None] * len(held)
    if options.rounding == "residual":
        kept = [run.state[param].get(RESIDUAL) for _, param in held]
        pairs = zip(held, kept, strict=True)
        residuals = [None if r is None else box.view(local(r)) for (box, _), r in pairs]

    def body() -> None:
        of_jobs = updates.view(-1, *chunk.region(owned[0]))
        params = [box.view(stored) for (box, _), stored in zip(held, whole, strict=True)]
        together = of_jobs if of_jobs.is_contiguous() else of_jobs.unbind()
        _apply(params, together, rate, options, residuals)

    def key() -> Any:
        rule = rate.factor, rate.shaped_decay, options.cautious, options.rounding
        numbers = places_of_numbers(rate)
        return updates.data_ptr(), updates.shape, numbers, rule, places(whole)

    plain = options.rounding != "residual" and rate.decay is None
    run.stage("update_own", chunk, key if plain else None, body, whole)


def _apply(
    params: Sequence[Tensor],
    updates: Sequence[Tensor] | Tensor,
    rate: Rate,
    options: MuonOptions,
    stored: Sequence[Tensor | None] = (),  # residuals, perhaps in host memory
) -> None:
    residuals = [None if s is None else _beside(s, p) for s, p in zip(stored, params, strict=False)]
    if rate.decay is not None:
        for param, update, residual in zip(params, updates, residuals, strict=True):
            reference.apply_update(
                param,
                update,
                lr=rate.lr,
                decay=rate.decay,
                cautious=options.cautious,
                residual=residual,
            )
    else:
        apply_update(
            params,
            updates,
            lr=rate.lr,
            factors=[rate.factor] * len(params),
            weight_decay=rate.weight_decay,
            shaped_decay=rate.shaped_decay,
            cautious=options.cautious,
            residuals=residuals if any(kept is not None for kept in residuals) else None,
        )
    written(params, params)
    for residual, kept in zip(residuals, stored, strict=True):
        if kept is not None and residual is not kept:
            kept.copy_(residual, non_blocking=True)


def _beside(residual: Tensor, param: Tensor) -> Tensor:
    """A residual where its parameter is, itself unless it is kept in host memory."""
    return residual.to(param.device, non_blocking=True)


def _statistics(
    chunk: SharedChunk, job: int, state: Mapping[Tensor, Mapping[str, Tensor]]
) -> Tensor:
    """This rank's second moment of a matrix, flat."""
    member = chunk.members[job]
    kept: Any = local(state[member.param][STATISTICS])
    return kept.view(-1).narrow(0, *member.statistics)
