"""The step with unreduced gradients: reduce, compute, answer, each under another's computation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..distributed import Box, Future, Phases, Team
from ..kernels import momentum as momentum_kernel
from ..orthogonalize import orthogonalize
from .adamw import adamw_on
from .answers import apply, apply_own, copy_all, evened_out, launch_scatter, write_answer
from .layout import written
from .options import AdamWOptions, MuonOptions
from .shared import SharedChunk
from .shared_step import exponents_of, release, scales_of
from .timing import stage
from .unreduced import Bands, SliceChunk, SmallChunk
from .update import Rate

State = Mapping[Tensor, Mapping[str, Tensor]]


@dataclass(eq=False)
class _Made:
    """What the bands of matrices make together."""

    present: Sequence[bool]  # of the matrices of this rank, by their slots
    directions: Tensor | None = None  # (B, m, n) of those with a gradient, filled band by band
    updates: Tensor | None = None  # (B, m, n), sent band by band

    def before(self, slot: int) -> int:
        """Matrices with a gradient before a slot."""
        return sum(self.present[:slot])


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
    members = bands.whole.members
    made = _Made([members[job].param.grad is not None for job in bands.whole.route.owned])
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
        contributions = _Contributions(chunk, present, owned)
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
    if made.directions is not None and not later:
        with stage("muon::newton_schulz"):
            made.updates = _updates(bands.whole, made, options, state)
    yield later
    with stage("muon::launch_scatter"):
        message = chunk.route.answered.empty(chunk.device)
        mine = None
        if owned and made.updates is not None:
            first = made.before(bands.first[number])
            mine = made.updates.narrow(0, first, len(owned)).narrow(1, *bands.rows[number])
        if mine is None:
            message.zero_()
        else:
            write_answer(chunk, owned, mine, message, {})
        if not later:
            made.updates = None
        scattering = launch_scatter(chunk, message)
        del message
    yield
    with stage("muon::wait_scatter"):
        answers = scattering.wait()
    with stage("muon::update_params"):
        apply(chunk, answers, rate, options, state, present)
        if mine is not None:
            apply_own(chunk, owned, mine, rate, options, state)


def _updates(whole: SharedChunk, made: _Made, options: MuonOptions, state: State) -> Tensor:
    """The updates of this rank's matrices as everyone applies them: (B, m, n), of the wire."""
    assert made.directions is not None
    orthogonal = orthogonalize(
        made.directions, method=options.method, steps=options.ns_steps, dtype=options.dtype
    )
    made.directions = None
    slots = zip(whole.route.owned, made.present, strict=True)
    owned = [job for job, here in slots if here]
    return evened_out(whole, owned, orthogonal, options, state).to(whole.wire)


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
        owned = chunk.route.owned if present else ()
        contributions = _Contributions(chunk, [present] * len(chunk.members), owned)
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
    scales travel beside the message, and the owner undoes each. What this rank owns stays here.
    """

    def __init__(self, chunk: SharedChunk, present: Sequence[bool], owned: Sequence[int]) -> None:
        self._chunk, self._owned = chunk, owned
        sent, wire = chunk.route.sent, chunk.wire
        outbox = self._outbox = sent.empty(chunk.device)
        self._scales: Tensor | None = None  # (J,) of this rank
        boxes = chunk.boxes
        self._own = [_grad(chunk.members[job].param, boxes[job]) for job in owned]
        here = [held for held in chunk.held_for_others if present[held.job]]
        grads = [_grad(chunk.members[held.job].param, held.box) for held in here]
        alike = sent.stacked(outbox, wire) if all(present) else None
        if alike is not None:
            places = list(alike.unbind())
        else:
            places = [held.part.of(outbox, wire) for held in here if held.part is not None]
            for held in chunk.held_for_others:
                if held.part is not None and not present[held.job]:
                    held.part.of(outbox, wire).zero_()
        if wire != torch.float16:
            copy_all(places, grads)
            return
        jobs = chunk.jobs_for_others
        if len(here) < len(chunk.held_for_others):
            jobs = torch.tensor([held.job for held in here]).to(chunk.device, non_blocking=True)
        found = _largest(grads, chunk.dtype) if grads else None
        self._scales = scales_of(exponents_of(chunk, found, jobs))
        if not grads:
            return
        factors = self._scales.index_select(0, jobs)
        if alike is not None:
            wide = torch.empty_like(alike, dtype=chunk.dtype)
            copy_all(wide.unbind(), grads)
            torch.mul(wide, factors.view(-1, *(1 for _ in alike.shape[1:])), out=alike)
            return
        for place, grad, scale in zip(places, grads, factors.unbind(), strict=True):
            torch.mul(grad.to(chunk.dtype), scale, out=place)

    def launch(self) -> None:
        """Send the message."""
        route, transport = self._chunk.route, self._chunk.team.transport
        if self._scales is not None:
            self._collecting: Future = transport.collect(self._scales)
        self._reducing = transport.gather(route.sent, self._outbox, route.gathered)
        del self._outbox

    def sums(self, factor: float) -> list[Tensor]:
        """The reduced gradients of what this rank owns, added up in the order of the ranks."""
        chunk, own = self._chunk, self._own
        scales = None if self._scales is None else self._collecting.wait().reciprocal()  # (W, J)
        inbox = self._reducing.wait()
        if not own:
            return []
        summands: list[Sequence[Tensor]] = [*self._received(inbox, scales)]
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

    def _received(self, inbox: Tensor, scales: Tensor | None) -> Iterator[Sequence[Tensor]]:
        """What every other rank contributed to what this rank owns, without its scale."""
        chunk, gathered = self._chunk, self._chunk.route.gathered
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
        places = {job: number for number, job in enumerate(self._owned)}
        columns = {rank: [torch.empty(0)] * len(places) for rank in others}
        for part, sender in zip(gathered.parts, gathered.ranks(), strict=True):
            if part.job in places:
                found = part.of(inbox, chunk.wire).to(chunk.dtype)
                if scales is not None:
                    found *= scales[sender, part.job]  # a power of two: exact
                columns[sender][places[part.job]] = found
        yield from columns.values()


def _grad(param: Tensor, box: Box) -> Tensor:
    assert param.grad is not None
    return box.view(param.grad)


def _largest(grads: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The largest magnitude of each."""
    return torch.stack(torch._foreach_norm(list(grads), torch.inf)).to(dtype)


def _momentum(
    bands: Bands,
    number: int,
    made: _Made,
    owned: Sequence[int],
    grads: Sequence[Tensor],
    options: MuonOptions,
    state: State,
) -> None:
    """Momentum of a band; its directions go to their rows of the batch."""
    chunk, whole = bands.parts[number], bands.whole
    if made.directions is None:
        shape = (sum(made.present), *whole.matrix)
        made.directions = torch.empty(shape, dtype=chunk.dtype, device=chunk.device)
    boxes = chunk.boxes
    buffers = [boxes[job].view(state[chunk.members[job].param]["momentum_buffer"]) for job in owned]
    first, rows = made.before(bands.first[number]), bands.rows[number]
    places = made.directions.narrow(0, first, len(owned)).narrow(1, *rows)
    whole_ones = rows[1] == whole.matrix[0]
    momentum_kernel(
        grads,
        buffers,
        places if whole_ones else places.view(-1, *chunk.region(owned[0])).unbind(),
        mu=float(options.momentum),
        nesterov=options.nesterov,
        form=options.momentum_form,
    )
    written(buffers, buffers)


def _adamw_on_rows(
    slices: SliceChunk,
    grads: Sequence[Tensor],
    options: AdamWOptions,
    state: Mapping[str, Tensor],
) -> None:
    """AdamW on this rank's rows. The counter advances with the last rows of the parameter."""
    chunk = slices.chunk
    param = chunk.members[0].param
    boxes = chunk.boxes
    for job, grad in zip(chunk.route.owned, grads, strict=True):
        first, length = chunk.members[job].job.region[0]
        averages = {key: _rows(state[key], first, length) for key in ("exp_avg", "exp_avg_sq")}
        counter = {"step": state["step"].clone()}
        adamw_on([boxes[job].view(param)], [grad], [averages | counter], options)
    if slices.last:
        state["step"].add_(1)


def _rows(average: Tensor, first: int, length: int) -> Tensor:
    """Rows of the whole parameter in this rank's slice of its state."""
    here = average.to_local()
    ranks = average.device_mesh.size()
    each = max(1, -(-average.shape[0] // ranks))  # as torch.chunk
    return here.narrow(0, first % each, length)
