"""Contributions to gradients that leave for their owners while backward still runs.

Hooks on the parameters see when the gradients of a chunk are whole. What leaves are the messages
that a step would send first, in the order of the step: ranks that have begun with fewer of them
when they come to it send the rest there, and all of them make the same exchanges.
"""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .chunks import SharedChunk, parts_of
from .cuda_graphs import StepRun
from .reduce_scatter import Contributions

if TYPE_CHECKING:
    from .shared_plan import Shared


class InBackward:
    """The chunks of a plan that may leave in backward, and how far they are.

    `backwards` passes come before a step, which begins with these chunks in their order. Hooks
    outlive neither this nor the plan, `shared`.
    """

    def __init__(self, chunks: Sequence[SharedChunk], backwards: int, shared: Shared) -> None:
        self.dropped = 0  # how often what had left was of no use
        self._captured = False  # a backward pass, whose replays run no hooks
        self._chunks, self._backwards, self._shared = chunks, backwards, weakref.ref(shared)
        self._lock = threading.Lock()  # autograd has a thread per device
        self._forget()
        here = weakref.ref(self)

        def hook(param: Tensor) -> None:
            if (found := here()) is not None:
                found._accumulated(param)

        params = dict.fromkeys(member.param for chunk in chunks for member in chunk.members)
        self._handles = [param.register_post_accumulate_grad_hook(hook) for param in params]

    def _forget(self) -> None:
        self.run: StepRun | None = None  # of the step that backward has begun
        self._left = 0  # chunks
        self._sent: dict[Tensor, tuple[Tensor, int]] = {}  # gradient and its version, by parameter
        self._counts: dict[Tensor, tuple[weakref.ref[Tensor], int]] = {}  # accumulations, likewise
        self._whole: dict[Tensor, torch.cuda.Stream | None] = {}  # on which streams they are made
        self._ready: torch.cuda.Event | None = None  # the memory of the last step is free

    @torch.no_grad()
    def _accumulated(self, param: Tensor) -> None:
        """A backward pass has added to the gradient of a parameter."""
        grad, cuda = param.grad, param.is_cuda
        self._captured = self._captured or _is_capturing(param)
        if grad is None or self._captured:
            return
        with self._lock:
            if param in self._sent:  # in an earlier pass, which was not the last one
                self._drop()
            before, count = self._counts.get(param, (lambda: None, 0))
            count = count + 1 if before() is grad else 1
            self._counts[param] = weakref.ref(grad), count
            if count >= self._backwards:
                self._whole[param] = torch.cuda.current_stream(grad.device) if cuda else None
                self._send()

    def _send(self) -> None:
        """Let the next chunks leave that are whole."""
        for chunk in self._chunks[self._left :]:
            params = chunk.params
            if not params <= self._whole.keys() or any(param.grad is None for param in params):
                return
            cuda = chunk.device.type == "cuda"
            if self.run is None:
                shared = self._shared()
                self.run = None if shared is None else shared.begin_in_backward()
                if self.run is None:
                    return
                if cuda:
                    self._ready = torch.cuda.current_stream(chunk.device).record_event()
            if cuda:
                here = torch.cuda.current_stream(chunk.device)
                for stream in {self._whole[param] for param in params}:
                    here.wait_stream(stream)
                here.wait_event(self._ready)
            chunk.team.transport.begin_early(chunk.route.gathered)
            everything = [True] * len(chunk.members)
            contributions = Contributions(chunk, everything, [*chunk.route.owned], self.run)
            contributions.launch()
            self.run.begun[id(chunk)] = contributions
            self._sent |= {param: (param.grad, param.grad._version) for param in params}
            self._left += 1

    def _drop(self) -> None:
        """Take back what has left: every rank makes the other exchanges, and sends nothing."""
        assert self.run is not None
        for chunk in self._chunks[self._left :]:
            route, inbox = chunk.route, self.run.inbox(chunk, chunk.route.gathered)
            chunk.team.transport.exchange(route.sent, [], route.gathered, inbox.bytes)
        counts = self._counts
        self._forget()
        self._counts, self.dropped = counts, self.dropped + 1

    def take_back_captured(self) -> None:
        """Begin a step: what had left before a capture is of no use, as nothing leaves any more."""
        if self._captured and self.run is not None:
            self._drop()

    def check(self, labelled: Sequence[tuple[str, Tensor]]) -> None:
        """Raise RuntimeError if a gradient is not what has left."""
        for where, param in labelled:
            if param not in self._sent:
                continue
            grad, version = self._sent[param]
            if grad is not param.grad or grad._version != version:
                raise RuntimeError(
                    f"{where}: its gradient was changed or taken away after it had left for its "
                    "owner in backward, by zero_grad, clipping, GradScaler.unscale_ or a hook; "
                    "change it in a hook of the tensor (Tensor.register_hook), which comes "
                    "before, give reduce_in_backward the number of backward passes of a step, or "
                    "0 to send gradients in the step. Another backward pass sends anew"
                )

    def taken(self) -> StepRun | None:
        """What backward has begun of the step that begins now; None if nothing has left."""
        run = self.run
        self._forget()
        return run

    def close(self) -> None:
        """No more chunks leave."""
        for handle in self._handles:
            handle.remove()


def _is_capturing(param: Tensor) -> bool:
    return param.is_cuda and torch.cuda.is_current_stream_capturing()


def sent_first(order: Sequence[tuple[int, object]], ahead: int) -> list[SharedChunk]:
    """What a step launches before it sends anything back, of what may leave by pushes.

    It ends before a chunk that cannot leave in backward: one with a frozen parameter, which has no
    gradient to wait for, and one in float16, whose scales go by a collective of the step. `ahead`
    chunks are launched before the first is computed.
    """
    opened = [part for _, chunk in order for part in parts_of(chunk) or (None,)][: ahead + 1]
    pushed = [c for c in opened if c is not None and c.team.transport.pushes(c.route.gathered)]
    return [*itertools.takewhile(_may_leave, pushed)]


def _may_leave(chunk: SharedChunk) -> bool:
    return chunk.wire != torch.float16 and all(param.requires_grad for param in chunk.params)
