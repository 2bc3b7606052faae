"""The step with unreduced gradients: reduce, compute, answer, each under another's computation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Generator, Mapping, Sequence

import torch
from torch import Tensor

from ..distributed import Team
from ..kernels import momentum as momentum_kernel
from ..orthogonalize import orthogonalize
from .adamw import adamw_on
from .layout import written
from .options import AdamWOptions, MuonOptions
from .shared import SharedChunk
from .shared_step import answer, apply, copy_all, launch_scatter, release, scales_for
from .timing import stage
from .unreduced import SliceChunk, SmallChunk
from .update import Rate

State = Mapping[Tensor, Mapping[str, Tensor]]


def step_owned(
    chunk: SharedChunk,
    factor: float,
    rate: Rate,
    options: MuonOptions,
    state: State,
    remaining: Counter[Tensor],
) -> Generator[None, None, None]:
    """reduce to the owner -> momentum -> orthogonalize -> scatter -> update for one chunk.

    Args:
        chunk: matrices, every one of which has its owner's state.
        factor: of the sum of the contributions.
        rate: of their shape.
        options: of their group.
        state: of the optimizer.
        remaining: as of `step_shared`.
    """
    present = [member.param.grad is not None for member in chunk.members]
    with stage("muon::launch_reduce"):
        outbox, scales = _contributions(chunk, present)
        reducing = chunk.team.transport.gather(chunk.route.sent, outbox, chunk.route.gathered)
        del outbox
        if options.none_grad:
            release(chunk, remaining)
    yield
    message = chunk.route.answered.empty(chunk.device)
    owned = [job for job in chunk.route.owned if present[job]]
    with stage("muon::wait_reduce"):
        grads = _sums(chunk, reducing.wait(), scales, factor)
        del reducing
    if owned:
        with stage("muon::momentum"):
            direction = _momentum(chunk, owned, grads, options, state)  # (B, m, n)
        with stage("muon::newton_schulz"):
            orthogonal = orthogonalize(
                direction, method=options.method, steps=options.ns_steps, dtype=options.dtype
            )  # (B, m, n)
        with stage("muon::launch_scatter"):
            answer(chunk, owned, orthogonal, options, state, message)
    else:
        message.zero_()
    with stage("muon::launch_scatter"):
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
) -> Generator[None, None, None]:
    """reduce every rank's rows to it -> AdamW on them -> the new rows to all."""
    chunk = slices.chunk
    param = chunk.members[0].param
    present = param.grad is not None
    with stage("muon::launch_reduce"):
        outbox, scales = _contributions(chunk, [present] * len(chunk.members))
        reducing = chunk.team.transport.gather(chunk.route.sent, outbox, chunk.route.gathered)
        del outbox
        if options.none_grad:
            release(chunk, remaining)
    yield
    with stage("muon::wait_reduce"):
        grads = _sums(chunk, reducing.wait(), scales, factor)
    message = chunk.route.answered.empty(chunk.device)
    with stage("muon::adamw"):
        if present:
            _adamw_on_rows(slices, grads, options, state[param])
        for part in chunk.route.answered.parts:
            box = part.box
            assert box is not None
            part.of(message, param.dtype).copy_(box.view(param))
    with stage("muon::launch_scatter"):
        scattering = launch_scatter(chunk, message)
        del message
    yield
    with stage("muon::wait_scatter"):
        rows = scattering.wait()
    if present:
        parts = chunk.route.scattered.parts
        targets = [part.box.view(param) for part in parts if part.box is not None]
        copy_all(targets, [part.of(rows, param.dtype) for part in parts])


def step_small(
    small: SmallChunk,
    team: Team,
    factor: float,
    options: Sequence[MuonOptions | AdamWOptions],
    state: State,
) -> Generator[None, None, None]:
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
        reducing = team.transport.sum(flat)
        for number, param in small.params:
            if options[number].none_grad:
                param.grad = None
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


def _contributions(chunk: SharedChunk, present: Sequence[bool]) -> tuple[Tensor, Tensor | None]:
    """The message with this rank's gradients, and the scales of their matrices in float16."""
    sent = chunk.route.sent
    outbox = sent.empty(chunk.device)
    alike = sent.stacked(outbox, chunk.wire) if all(present) else None
    here = [held for held in chunk.held if present[held.job]]
    grads = [held.view(chunk.members[held.job].param.grad) for held in here]
    if alike is not None:
        places = list(alike.unbind())
    else:
        places = [held.part.of(outbox, chunk.wire) for held in here if held.part is not None]
        for held in chunk.held:
            if held.part is not None and not present[held.job]:
                held.part.of(outbox, chunk.wire).zero_()
    if chunk.wire != torch.float16:
        copy_all(places, grads)
        return outbox, None
    if alike is not None:
        wide = torch.empty_like(alike, dtype=chunk.dtype)
        copy_all(list(wide.unbind()), grads)
        largest = torch.linalg.vector_norm(wide.flatten(1), torch.inf, dim=1)
        scales = scales_for(chunk, largest, chunk.jobs_here, across=True)
        factors = scales[chunk.jobs_here].view(-1, *(1 for _ in alike.shape[1:]))
        torch.mul(wide, factors, out=alike)
        return outbox, scales
    found = None
    if grads:
        found = torch.stack([grad.abs().amax().to(chunk.dtype) for grad in grads])
    scales = scales_for(chunk, found, [held.job for held in here], across=True)
    for place, grad, held in zip(places, grads, here, strict=True):
        torch.mul(grad.to(chunk.dtype), scales[held.job], out=place)
    return outbox, scales


def _sums(
    chunk: SharedChunk, inbox: Tensor, scales: Tensor | None, factor: float
) -> dict[int, Tensor]:
    """The reduced gradients of this rank's jobs, added up in the order of the ranks."""
    stacked = chunk.route.gathered.stacked(inbox, chunk.wire)
    if stacked is not None and chunk.contributors is not None:
        owned = chunk.route.owned
        first, *others = stacked.view(chunk.contributors, len(owned), *stacked.shape[1:]).unbind()
        total = first.to(chunk.dtype)  # in place in the message, if that is its dtype
        for contribution in others:
            total += contribution
        if scales is not None:
            factors = scales[chunk.owned_here].view(-1, *(1 for _ in total.shape[1:]))
            total /= factors  # powers of two: exact
        total *= factor
        return dict(zip(owned, total.unbind(), strict=True))
    sums: dict[int, Tensor] = {}
    for part in chunk.route.gathered.parts:
        contribution = part.of(inbox, chunk.wire).to(chunk.dtype)
        if part.job in sums:
            sums[part.job] += contribution
        else:
            sums[part.job] = contribution  # of the first rank; in place in the message
    for job, total in sums.items():
        if scales is not None:
            total /= scales[job]  # a power of two: exact
        total *= factor
    return sums


def _momentum(
    chunk: SharedChunk,
    owned: Sequence[int],
    grads: Mapping[int, Tensor],
    options: MuonOptions,
    state: State,
) -> Tensor:
    batch = torch.empty((len(owned), *chunk.matrix), dtype=chunk.dtype, device=chunk.device)
    boxes = {held.job: held.box for held in chunk.held}
    buffers = [boxes[job].view(state[chunk.members[job].param]["momentum_buffer"]) for job in owned]
    momentum_kernel(
        [grads[job] for job in owned],
        buffers,
        batch,
        mu=float(options.momentum),
        nesterov=options.nesterov,
        form=options.momentum_form,
    )
    written(buffers, buffers)
    return batch


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
