"""Gradients that nobody has reduced yet, on their way to the owners of what they belong to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...distributed import Future
from .buffers import Block
from .chunks import SharedChunk
from .cuda_graphs import StepRun, places
from .exchange import copy_all
from .shared_step import exponents_of, scales_of


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
        self._outbox = run.take(chunk, "message", chunk.route.sent.size)
        self._inbox: Block | None = None
        self._rounds = chunk.wire == torch.float16
        self._every = all(present)
        self._own = [_grad(chunk, job) for job in owned]
        here = [held for held in chunk.held_for_others if present[held.job]]
        sent = [_grad(chunk, held.job) for held in here]

        def body() -> None:
            self._write(
                [held.box.view(grad) for held, grad in zip(here, sent, strict=True)], present
            )

        def key() -> Any:
            return self._outbox.bytes.data_ptr(), places(sent)

        run.stage("contribute", chunk, key if self._every else None, body)

    def _write(self, grads: Sequence[Tensor], present: Sequence[bool]) -> None:
        """The message, and in float16 the scales."""
        chunk, wire, outbox = self._chunk, self._chunk.wire, self._outbox.bytes
        alike = chunk.route.sent.stacked(outbox, wire) if self._every else None
        if alike is not None:
            targets = list(alike.unbind())
        else:
            here = [held for held in chunk.held_for_others if present[held.job]]
            targets = [held.part.of(outbox, wire) for held in here if held.part is not None]
            for held in chunk.held_for_others:
                if held.part is not None and not present[held.job]:
                    held.part.of(outbox, wire).zero_()
        if not self._rounds:
            copy_all(targets, grads)
            return
        jobs = chunk.jobs_for_others
        if not self._every:
            here = [held for held in chunk.held_for_others if present[held.job]]
            jobs = torch.tensor([held.job for held in here]).to(chunk.device, non_blocking=True)
        found = _largest(grads, chunk.dtype) if grads else None
        scales = scales_of(exponents_of(chunk, found, jobs))
        chunk.scales.copy_(scales)
        if not grads:
            return
        factors = scales.index_select(0, jobs)
        if alike is not None:
            wide = torch.empty_like(alike, dtype=chunk.dtype)
            copy_all(wide.unbind(), grads)
            torch.mul(wide, factors.view(-1, *(1 for _ in alike.shape[1:])), out=alike)
            return
        for place, grad, scale in zip(targets, grads, factors.unbind(), strict=True):
            torch.mul(grad.to(chunk.dtype), scale, out=place)

    def launch(self) -> None:
        """Send the message."""
        chunk, run, transport = self._chunk, self._run, self._chunk.team.transport
        route, outbox = chunk.route, self._outbox.bytes
        if self._rounds:
            self._collecting: Future = transport.collect(chunk.scales, chunk.all_scales)
        inbox = self._inbox = run.take(chunk, "message", route.gathered.size)
        self._reducing = transport.gather(route.sent, outbox, route.gathered, inbox.bytes)

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


def _grad(chunk: SharedChunk, job: int) -> Tensor:
    """The gradient of a job's parameter: of which the box of `chunk.boxes` is the job's."""
    grad = chunk.members[job].param.grad
    assert grad is not None
    return grad


def _largest(grads: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """The largest magnitude of each."""
    return torch.stack(torch._foreach_norm(list(grads), torch.inf)).to(dtype)
