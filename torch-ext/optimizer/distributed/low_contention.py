"""All-gather and reduce-scatter that leave the multiprocessors to what runs beside them.

Copy engines write every rank's part to its final place in the memory of the others, whatever the
dimension is; of a reduce-scatter one small kernel adds up what arrived, in float32. Alone such
collectives take longer than NCCL's (torch's own on 8 x H200, 32 MiB per rank: 944 beside 823 us,
1077 beside 826 us); products beside them lose less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, distributed

from .arena import Arena, Done, check_not_captured
from .choose_transport import CommUnavailable
from .p2p import Slots
from .transport import GroupTransport

OPS = ("sum", "avg")
SLOTS = 3  # two on their way, one that others may still read
LEAST_BYTES = 2**20
TIMEOUT_MS = 30000  # how long a call waits for the other ranks, on the device
# The arenas of this process, by group (a name may be that of a later one) and device; and how often
# it has called a function of this module, by group.
_KEPT: MutableMapping[Any, dict[torch.device, LowContention]] = WeakKeyDictionary()
_CALLS: MutableMapping[Any, int] = WeakKeyDictionary()


def all_gather_lc(out: Tensor, inp: Tensor, group: Any, dim: int = 0) -> Pending:
    """Every rank's tensor one behind another along a dimension, by copies alone.

    All ranks of the group call it with equal shapes, in one order with their other calls of this
    module. The memory that they share grows with the first call that needs more, which waits for
    the device and finishes the calls that are under way.

    Args:
        out: shaped like `inp` but for `dim`, which is as many times longer as there are ranks;
            contiguous, written by `wait()` of the result, or by a call before that which needs
            more memory.
        inp: contiguous, on a CUDA device; unchanged until `wait()`.
        group: a process group of ranks on one host; None for all ranks.
        dim: the dimension.

    Returns:
        What is under way: `wait()` lets the current stream wait for it, and returns `out`.

    Raises:
        TypeError, ValueError: dtypes, shapes or strides do not fit.
        CommUnavailable: the ranks cannot write into each other's memory; on all of them.
        RuntimeError: a rank did not come to an earlier call within 30 s, whose result is zeros, as
            are those of calls until this is raised: the host learns of it without a wait. The next
            call makes the memory anew, with all ranks. Ranks may have learned of it at different
            calls, of which none is another's: then it raises on all of them, and a new process
            group is the way on. Or: a CUDA graph is captured.
    """
    return _of(group, "out", out).all_gather(out, inp, dim)


def reduce_scatter_lc(out: Tensor, inp: Tensor, op: str, group: Any, dim: int = 0) -> Pending:
    """This rank's part of the sum or the mean of every rank's tensor, along a dimension.

    Args:
        out: shaped like `inp` but for `dim`, of which it has the part of this rank.
        inp: as of `all_gather_lc`; `dim` is a multiple of the number of ranks.
        op: "sum" or "avg", in float32 for narrower dtypes, rounded once.
        group: as there.
        dim: the dimension.

    Returns, Raises: as of `all_gather_lc`.
    """
    return _of(group, "inp", inp).reduce_scatter(out, inp, op, dim)


def _of(group: Any, name: str, whole: object) -> LowContention:
    """The memory of a group for a tensor, made or made larger by all ranks together."""
    if not isinstance(whole, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(whole).__name__}")
    group = distributed.group.WORLD if group is None else group
    if whole.device.type == "cuda":
        check_not_captured()
    _CALLS[group] = _CALLS.get(group, 0) + 1
    kept, size = _KEPT.setdefault(group, {}), whole.numel() * whole.element_size()
    found = kept.get(whole.device)
    if found is not None:
        grows = found.slot_bytes < size
        try:
            found.check(wait=grows)
        except RuntimeError:
            del kept[whole.device]
            found.close()
            raise
        if not grows:
            return found
        del kept[whole.device]
        found.close()
    room = max(LEAST_BYTES, 1 << (size - 1).bit_length())
    kept[whole.device] = made = LowContention(group, whole.device, room)
    return made


def _check_together(group: Any) -> None:
    """Raise RuntimeError on all ranks if they are at different calls."""
    said: list[Any] = [None] * distributed.get_world_size(group)
    distributed.all_gather_object(said, _CALLS.get(group, 0), group=group)
    if len({*said}) > 1:
        raise RuntimeError(
            f"the ranks are at calls {said} of this group's collectives, since each learned at its "
            "own call of a rank that was late; bring them together, and go on with a new group"
        )


class Pending:
    """A collective under way.

    Args:
        done: the end of its exchange.
        inp: what that reads, which stays alive until the current stream waits for it.
        finish: writes the result.
    """

    def __init__(self, done: Done, inp: Tensor, finish: Callable[[], Tensor]) -> None:
        self._done, self._finish = done, finish
        self._inp: Tensor | None = inp
        self._out: Tensor | None = None

    def wait(self) -> Tensor:
        """The result, for which the current stream waits; the host does not."""
        if self._out is None:
            self._done.wait()
            self._out, self._inp = self._finish(), None
        return self._out


class LowContention:
    """The memory that a group shares for these collectives.

    Args:
        group: of ranks on one host.
        device: of the tensors.
        slot_bytes: of the largest tensor that is whole: what an all-gather makes or a
            reduce-scatter takes.

    Raises:
        CommUnavailable: the ranks cannot write into each other's memory; on all of them.
        RuntimeError: the ranks are at different calls; on all of them.
    """

    def __init__(self, group: Any, device: torch.device, slot_bytes: int) -> None:
        _check_together(group)
        made = GroupTransport(group).arena_for(device, SLOTS, slot_bytes, TIMEOUT_MS)
        if not isinstance(made, Arena):
            raise CommUnavailable(f"low-contention collectives cannot be had: {made}")
        self._arena, self._slots = made, Slots(SLOTS)
        self._device = device
        self._open: dict[int, Pending] = {}  # by slot
        self.slot_bytes = slot_bytes

    def all_gather(self, out: Tensor, inp: Tensor, dim: int = 0) -> Pending:
        """See `all_gather_lc`."""
        dim, rank = self._check(out, inp, dim), self._arena.rank
        slot, size = self._take(), inp.shape[dim]

        def whole(of: int) -> Tensor:
            return _as(self._arena.slot(of, slot), out.dtype, out.shape)

        return self._begin(
            slot,
            inp,
            lambda of: (whole(of).narrow(dim, rank * size, size), inp.detach()),
            whole(rank),
            lambda: out.copy_(whole(rank)),
        )

    def reduce_scatter(self, out: Tensor, inp: Tensor, op: str, dim: int = 0) -> Pending:
        """See `reduce_scatter_lc`."""
        if op not in OPS:
            raise ValueError(f"op must be one of {', '.join(map(repr, OPS))}, got {op!r}")
        dim, rank = self._check(inp, out, dim), self._arena.rank
        slot, size = self._take(), out.shape[dim]

        def parts(of: int) -> Tensor:
            return _as(self._arena.slot(of, slot), out.dtype, (self._arena.ranks, *out.shape))

        def finish() -> Tensor:
            reduce = torch.sum if op == "sum" else torch.mean
            reduce(parts(rank), 0, out=out)
            return out

        return self._begin(
            slot,
            inp,
            lambda of: (parts(of)[rank], inp.detach().narrow(dim, of * size, size)),
            parts(rank),
            finish,
        )

    def check(self, *, wait: bool = True) -> None:
        """Raise RuntimeError if a rank did not come to a call in time.

        Args:
            wait: for all calls; else those count whose status has come to the host.
        """
        late = self._arena.late_rank() if wait else self._arena.noted_late_rank()
        if late is not None:
            raise RuntimeError(
                f"rank {late} of the group did not come to a collective within "
                f"{self._arena.timeout_ms} ms, or had given up itself; the result and those of "
                "later ones are zeros"
            )

    def close(self) -> None:
        """Finish all calls and let go of the memory. A second call is none."""
        for pending in [*self._open.values()]:
            pending.wait()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # what is mapped is owned by no tensor
        self._arena.close()

    def _begin(
        self,
        slot: int,
        inp: Tensor,
        pair: Callable[[int], tuple[Tensor, Tensor]],  # target and source of what a rank gets
        arriving: Tensor,
        finish: Callable[[], Tensor],  # writes the result out of the slot
    ) -> Pending:
        arena, pairs = self._arena, [pair(rank) for rank in self._arena.others()]
        targets, sources = ([one[k] for one in pairs] for k in range(2))
        bytes_here = arriving.reshape(-1).view(torch.uint8)
        done = arena.exchange(targets, sources, pair(arena.rank), bytes_here)
        self._arena.note_status()

        def finished() -> Tensor:
            out = finish()
            arena.zeros_unless_alive(out.view(-1).view(torch.uint8))
            self._slots.free(slot, self._arena.launched)
            del self._open[slot]
            return out

        self._open[slot] = pending = Pending(done, inp, finished)
        return pending

    def _check(self, whole: Tensor, part: Tensor, dim: int) -> int:
        """The dimension along which the parts of all ranks make a whole."""
        ranks = self._arena.ranks
        if whole.dtype != part.dtype or not part.is_floating_point():
            raise TypeError(
                f"out and inp must be of one floating-point dtype, got {whole.dtype} and "
                f"{part.dtype}"
            )
        if not -part.ndim <= dim < part.ndim:
            raise ValueError(f"dim must be a dimension of {tuple(part.shape)}, got {dim}")
        dim %= part.ndim
        wanted = list(part.shape)
        wanted[dim] *= ranks
        if list(whole.shape) != wanted:
            raise ValueError(
                f"of {ranks} ranks' parts of shape {tuple(part.shape)} along dimension {dim} the "
                f"whole must have shape {tuple(wanted)}, got {tuple(whole.shape)}"
            )
        if not whole.is_contiguous() or not part.is_contiguous():
            raise ValueError("out and inp must be contiguous; call .contiguous() first")
        return dim

    def _take(self) -> int:
        slot = self._slots.take()
        if slot is None:
            raise ValueError(f"{SLOTS} collectives are under way; wait() for one of them first")
        if not self._slots.is_read(slot, self._arena.launched):
            self._arena.exchange([], [], None, self._arena.slot(self._arena.rank, slot)[:0])
        return slot


def _as(memory: Tensor, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    """The beginning of some memory as a tensor."""
    return memory[: math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
