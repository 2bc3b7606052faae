"""The step with unreduced gradients: reduce, compute, answer, each under another's computation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributed import Future, Phases, Team
from ..kernels import momentum as momentum_kernel
from ..orthogonalize import orthogonalize
from .adamw import adamw_on
from .layout import written
from .options import AdamWOptions, MuonOptions
from .shared import SharedChunk
from .shared_step import (
    apply,
    copy_all,
    evened_out,
    exponents_of,
    launch_scatter,
    release,
    scales_of,
    write_answer,
)
from .timing import stage
from .unreduced import Bands, SliceChunk, SmallChunk
from .update import Rate

State = Mapping[Tensor, Mapping[str, Tensor]]


@dataclass(eq=False)
class _Made:
    """What the bands of matrices make together."""

    directions: Tensor | None = None  # (B, m, n), filled band by band
    updates: Tensor | None = None  # (B, m, n), sent band by band


def step_bands(
    bands: Bands,
    factor: float,
    rate: Rate,
    options: MuonOptions,
    state: State,
    remaining: Counter[Tensor],
) -> Iterator[Phases]:
    """reduce to the owner -> momentum -> orthogonalize -> scatter -> update for some matrices.

    Args:
        bands: of matrices, every one of which has its owner's state.
        factor: of the sum of the contributions.
        rate: of their shape.
        options: of their group.
        state: of the optimizer.
        remaining: as of `step_shared`.

    Returns:
        What `run_pipeline` takes, for every band.
    """
    made = _Made()
    for number in range(len(bands.parts)):
        yield _step_band(bands, number, made, factor, rate, options, state, remaining)


def _step_band(
    bands: Bands,
    number: int,
    made: _Made,
    factor: float,
    rate: Rate,
    options: MuonOptions,
    state: State,
    remaining: Counter[Tensor],
) -> Phases:
    chunk, later = bands.parts[number], len(bands.parts) - 1 - number
    present = [member.param.grad is not None for member in chunk.members]
    owned = [job for job in chunk.route.owned if present[job]]
    with stage("muon::launch_reduce"):
        contributions = _Contributions(chunk, present)
        if options.none_grad:
            release(chunk, remaining)
    yield
    with stage("muon::launch_reduce"):
        contributions.launch()
    yield
    with stage("muon::wait_reduce"):
        grads = contributions.sums(factor)
        del contributions
    if owned:
        with stage("muon::momentum"):
            _momentum(bands, number, made, owned, grads, options, state)
    del grads
    if owned and not later:
        with stage("muon::newton_schulz"):
            orthogonal = orthogonalize(
                made.directions, method=options.method, steps=options.ns_steps, dtype=options.dtype
            )  # (B, m, n)
            made.directions = None
            made.updates = evened_out(bands.whole, owned, orthogonal, options, state)
            del orthogonal
    yield later
    with stage("muon::launch_scatter"):
        message = chunk.route.answered.empty(chunk.device)
        if made.updates is None:
            message.zero_()
        else:
            updates = made.updates.narrow(1, *bands.rows[number])
            write_answer(chunk, owned, updates, message, {})
            if not later:
                made.updates = None
            del updates
        scattering = launch_scatter(chunk, message)
        del message
    yield
    with stage("muon::wait_scatter"):
        answers = scattering.wait()
    with stage("muon::update_params"):
        apply(chunk, answers, rate, options, state, present)


def step_slices(
    slices: SliceChunk,
    factor: float,
    options: AdamWOptions,
    state: State,
    remaining: Counter[Tensor],
) -> Phases:
    """reduce every rank's rows to it -> AdamW on them -> the new rows to all."""
    chunk = slices.chunk
    param = chunk.members[0].param
    present = param.grad is not None
    with stage("muon::launch_reduce"):
        contributions = _Contributions(chunk, [present] * len(chunk.members))
        if options.none_grad:
            release(chunk, remaining)
    yield
    with stage("muon::launch_reduce"):
        contributions.launch()
    yield
    with stage("muon::wait_reduce"):
        grads = contributions.sums(factor)
        del contributions
    with stage("muon::adamw"):
        if present:
            _adamw_on_rows(slices, grads, options, state[param])
        del grads
    yield
    with stage("muon::launch_scatter"):
        message = chunk.route.answered.empty(chunk.device)
        _write_rows(chunk, param, message)
        scattering = launch_scatter(chunk, message)
        del message
    yield
    with stage("muon::wait_scatter"):
        rows = scattering.wait()
    if present:
        parts = chunk.route.scattered.parts
        targets = [part.box.view(param) for part in parts if part.box is not None]
        copy_all(targets, [part.of(rows, param.dtype) for part in parts])


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
    state: State,
) -> Phases:
    """One all-reduce of all small gradients, then AdamW on every rank."""
    params = [param for _, param in small.params]
    present = [param.grad is not None for param in params]
    sizes = [param.numel() for param in params]
    with stage("muon::launch_reduce"):
        flat = torch.zeros(sum(sizes), dtype=small.dtype, device=small.device)
        places = [
            place.view(param.shape) for place, param in zip(flat.split(sizes), params, strict=True)
        ]
        for place, param in zip(places, params, strict=True):
            if param.grad is not None:
                place.copy_(param.grad)
        for number, param in small.params:
            if options[number].none_grad:
                param.grad = None
    yield
    with stage("muon::launch_reduce"):
        reducing = team.transport.sum(flat)
    yield
    with stage("muon::wait_reduce"):
        reducing.wait().mul_(factor)
    with stage("muon::adamw"):
        for wanted in dict.fromkeys(number for number, _ in small.params):
            group = options[wanted]
            assert isinstance(group, AdamWOptions)
            chosen = [
                (param, place)
                for (number, param), place, here in zip(small.params, places, present, strict=True)
                if number == wanted and here
            ]
            if chosen:
                taken, grads = (list(column) for column in zip(*chosen, strict=True))
                adamw_on(taken, grads, [dict(state[param]) for param in taken], group)


class _Contributions:
    """This rank's gradients on their way to the owners, and those of all ranks added up.

    In float16 every part has a power of two as its scale, by the sender's largest element. The
    scales travel beside the message, and the owner undoes each.
    """

    def __init__(self, chunk: SharedChunk, present: Sequence[bool]) -> None:
        self._chunk = chunk
        sent, wire = chunk.route.sent, chunk.wire
        outbox = self._outbox = sent.empty(chunk.device)
        self._scales: Tensor | None = None  # (J,) of this rank
        alike = sent.stacked(outbox, wire) if all(present) else None
        here = [held for held in chunk.held if present[held.job]]
        grads = [held.view(chunk.members[held.job].param.grad) for held in here]
        if alike is not None:
            places = list(alike.unbind())
        else:
            places = [held.part.of(outbox, wire) for held in here if held.part is not None]
            for held in chunk.held:
                if held.part is not None and not present[held.job]:
                    held.part.of(outbox, wire).zero_()
        if wire != torch.float16:
            copy_all(places, grads)
            return
        jobs = chunk.jobs_here if all(present) else [held.job for held in here]
        found = _largest(grads, chunk.dtype) if grads else None
        self._scales = scales_of(exponents_of(chunk, found, jobs))
        of_jobs = self._scales.unbind()
        for place, grad, held in zip(places, grads, here, strict=True):
            torch.mul(grad.to(chunk.dtype), of_jobs[held.job], out=place)

    def launch(self) -> None:
        """Send the message."""
        route, transport = self._chunk.route, self._chunk.team.transport
        if self._scales is not None:
            self._collecting: Future = transport.collect(self._scales)
        self._reducing = transport.gather(route.sent, self._outbox, route.gathered)
        del self._outbox

    def sums(self, factor: float) -> dict[int, Tensor]:
        """The reduced gradients of this rank's jobs, added up in the order of the ranks."""
        chunk = self._chunk
        inverse = None if self._scales is None else self._collecting.wait().reciprocal()  # (W, J)
        inbox = self._reducing.wait()
        stacked = chunk.route.gathered.stacked(inbox, chunk.wire)
        if stacked is not None and chunk.contributors is not None:
            owned = chunk.route.owned
            parts = stacked.view(chunk.contributors, len(owned), *stacked.shape[1:])
            if inverse is not None:
                inverse = inverse.index_select(1, chunk.owned_here)
                inverse = inverse.view(*parts.shape[:2], *(1 for _ in stacked.shape[1:]))
            total = _added_up(parts, inverse, chunk.dtype)
            total *= factor
            return dict(zip(owned, total.unbind(), strict=True))
        sums: dict[int, Tensor] = {}
        for part, sender in zip(
            chunk.route.gathered.parts, chunk.route.gathered.ranks(), strict=True
        ):
            contribution = part.of(inbox, chunk.wire).to(chunk.dtype)
            if inverse is not None:
                contribution *= inverse[sender, part.job]  # a power of two: exact
            if part.job in sums:
                sums[part.job] += contribution
            else:
                sums[part.job] = contribution  # of the first rank; in place in the message
        for total in sums.values():
            total *= factor
        return sums


def _largest(grads: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The largest magnitude of each."""
    return torch.stack(torch._foreach_norm(list(grads), torch.inf)).to(dtype)


def _added_up(parts: Tensor, inverse: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The sum over the first dimension in its order, of what was multiplied by 1 / inverse."""
    first, *others = parts.unbind()
    if inverse is None:
        total = first.to(dtype)  # in place in the message, if that is its dtype
        for contribution in others:
            total += contribution
        return total
    total = first * inverse[0]  # powers of two: exact
    for contribution, scale in zip(others, inverse[1:], strict=True):
        total.addcmul_(contribution, scale)
    return total


def _momentum(
    bands: Bands,
    number: int,
    made: _Made,
    owned: Sequence[int],
    grads: Mapping[int, Tensor],
    options: MuonOptions,
    state: State,
) -> None:
    """Momentum of a band; its directions go to their rows of the batch."""
    chunk, whole = bands.parts[number], bands.whole
    if made.directions is None:
        shape = (len(owned), *whole.matrix)
        made.directions = torch.empty(shape, dtype=chunk.dtype, device=chunk.device)
    boxes = {held.job: held.box for held in chunk.held}
    buffers = [boxes[job].view(state[chunk.members[job].param]["momentum_buffer"]) for job in owned]
    rows = made.directions.narrow(1, *bands.rows[number]).unbind()
    momentum_kernel(
        [grads[job] for job in owned],
        buffers,
        [place.view(chunk.region(job)) for place, job in zip(rows, owned, strict=True)],
        mu=float(options.momentum),
        nesterov=options.nesterov,
        form=options.momentum_form,
    )
    written(buffers, buffers)


def _adamw_on_rows(
    slices: SliceChunk,
    grads: Mapping[int, Tensor],
    options: AdamWOptions,
    state: Mapping[str, Tensor],
) -> None:
    """AdamW on this rank's rows. The counter advances with the last rows of the parameter."""
    chunk = slices.chunk
    param = chunk.members[0].param
    boxes = {held.job: held.box for held in chunk.held}
    for job in chunk.route.owned:
        first, length = chunk.members[job].job.region[0]
        averages = {key: _rows(state[key], first, length) for key in ("exp_avg", "exp_avg_sq")}
        counter = {"step": state["step"].clone()}
        adamw_on([boxes[job].view(param)], [grads[job]], [averages | counter], options)
    if slices.last:
        state["step"].add_(1)


def _rows(average: Tensor, first: int, length: int) -> Tensor:
    """Rows of the whole parameter in this rank's slice of its state."""
    here = average.to_local()
    ranks = average.device_mesh.size()
    each = max(1, -(-average.shape[0] // ranks))  # as torch.chunk
    return here.narrow(0, first % each, length)
