"""All-gather and product in one kernel: copy engines bring the rows of other ranks under it.

Every rank keeps two buffers for the gathered matrix, which all ranks of its host map. In call n it
copies its own rows into buffer n mod 2 and sends them to that buffer of every other rank, each
time followed by the word n. `progress_matmul` begins with the rows that are here, and takes those
of another rank once its word has reached n.

Nobody says that a buffer has been read. A rank sends in call n after its product of call n - 1,
and so a word n - 1 says that its product n - 2, the last one to read the buffer of call n, is over.
A rank that gave up says so at all others before it sends anything more (`Arena`), and
every product has a status that looks at that behind it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, distributed

from ..distributed import CommUnavailable
from ..distributed.arena import HIGH, WORD, Arena, Done, check_not_captured
from ..distributed.transport import GroupTransport
from ..kernels.checks import check_device, check_shape, check_tensor
from ..kernels.communication import progress_matmul, push, stream_write_value32, wait_signals
from ..kernels.products.matmul_add import HALF_PRECISION

BUFFERS = 2
EPOCHS = 1 << 32  # words begin again at 0; a multiple of BUFFERS


class PipelinedAllGatherMatmul:
    """Gathers the rows of all ranks of a group and multiplies them while they arrive.

    A call has the result of `all_gather_matmul(a_shard, [b], 0)`, without gradients. Where
    `progress_matmul` has no kernel, torch multiplies after all rows have come. All ranks of the
    group make it together, and call it equally often. Call `close()` before you drop it: without
    that its end waits for the last call, on the host.

    Args:
        group: ProcessGroup of ranks on one host, or None for all ranks.
        rows: Of each rank's part.
        inner: K, the columns of the gathered matrix.
        dtype: float16 or bfloat16.
        device: Of the tensors.
        timeout_ms: How long a call waits for another rank, on the device.
        blocks: Multiprocessors for the product, as `progress_matmul` takes them.

    Raises:
        TypeError: dtype is another one.
        ValueError: A size is not positive, or the ranks give different ones.
        CommUnavailable: The ranks cannot write into each other's memory; on all of them.
    """

    def __init__(
        self,
        group: Any,
        rows: int,
        inner: int,
        dtype: torch.dtype,
        device: torch.device | str,
        *,
        timeout_ms: int = 30_000,
        blocks: int | None = None,
    ) -> None:
        if dtype not in HALF_PRECISION:
            raise TypeError(f"dtype must be one of {HALF_PRECISION}, got {dtype}")
        if rows < 1 or inner < 1:
            raise ValueError(f"rows and inner must be positive, got {rows} and {inner}")
        group = distributed.group.WORLD if group is None else group
        said: list[Any] = [None] * group.size()
        distributed.all_gather_object(said, (rows, inner, str(dtype)), group=group)
        if len({*said}) > 1:
            raise ValueError(f"rows, inner and dtype must be the same on all ranks, got {said}")
        size = slot_bytes(group.size(), rows, inner)
        made = GroupTransport(group).arena_for(torch.device(device), BUFFERS, size, timeout_ms)
        if not isinstance(made, Arena):
            raise CommUnavailable(f"a pipelined all-gather cannot be had: {made}")
        self._take(made, rows, inner, dtype, blocks)

    @classmethod
    def over(
        cls, arena: Arena, rows: int, inner: int, dtype: torch.dtype, blocks: int | None = None
    ) -> PipelinedAllGatherMatmul:
        """On an arena of BUFFERS slots of `slot_bytes`, after its handshake and for this alone."""
        made = cls.__new__(cls)
        made._take(arena, rows, inner, dtype, blocks)
        return made

    def _take(
        self, arena: Arena, rows: int, inner: int, dtype: torch.dtype, blocks: int | None
    ) -> None:
        self._arena, self._blocks, self.rank, self.calls = arena, blocks, arena.rank, 0
        ranks, size = range(arena.ranks), arena.ranks * rows * inner * dtype.itemsize
        self._part = slice(self.rank * rows, (self.rank + 1) * rows)
        self._buffers = [  # by buffer and rank, (W rows, inner)
            [arena.slot(rank, n)[:size].view(dtype).view(-1, inner) for rank in ranks]
            for n in range(BUFFERS)
        ]
        words = [arena.slot(rank, 0)[-arena.ranks * WORD :].view(torch.uint32) for rank in ranks]
        self._words = words[self.rank]  # (W,), one per sender
        # A rank begins with the one behind it, which takes its rows first.
        self._others = [(self.rank - step) % arena.ranks for step in ranks[1:]]
        self._words_of_me = [words[rank][self.rank : self.rank + 1] for rank in self._others]
        device = self._words.device
        self._sent = torch.zeros(1, dtype=torch.int32, device=device).view(torch.uint32)
        self._last, self._stream = Done(), None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device, priority=HIGH)
        # Which rank was late, plus 1: the host reads it without a wait.
        self._status = torch.zeros(1, dtype=torch.int32, pin_memory=self._stream is not None)

    def __call__(self, a_shard: Tensor, b: Tensor) -> Tensor:
        """Gather and multiply. The host does not wait: a later call or `check` says what failed.

        Args:
            a_shard: (rows, inner), contiguous: this rank's rows.
            b: (inner, N): contiguous, or the transpose of a linear layer's weight. N may differ
                from rank to rank.

        Returns:
            (W rows, N); worthless if a rank was late.

        Raises:
            TypeError, ValueError: A tensor does not fit. Nothing has been sent then.
            RuntimeError: A rank did not come to an earlier call within the timeout, or a CUDA graph
                is captured, all of whose replays would wait for the words of one call.
        """
        here = self._buffers[0][self.rank]
        for name, x in (("a_shard", a_shard), ("b", b)):
            check_tensor(name, x, 2, (here.dtype,))
            check_device(name, x, here, "the buffers")
        check_shape("a_shard", a_shard, here[self._part].shape, "(rows, inner)")
        check_shape("b", b, (here.shape[1], b.shape[1]), "(inner, N)")
        if not a_shard.is_contiguous():
            raise ValueError(f"a_shard must be contiguous, got strides {a_shard.stride()}")
        self.check()
        a_shard, b = a_shard.detach(), b.detach()
        if self._stream is None:
            self._begin()
            self._send(a_shard)
            return self._multiply(a_shard, b)
        with torch.cuda.device_of(a_shard):
            return self._beside(a_shard, b)

    def _beside(self, a_shard: Tensor, b: Tensor) -> Tensor:
        """Rows travel on the stream of this object, and the product is on the current one."""
        check_not_captured()
        current = torch.cuda.current_stream()
        out = a_shard.new_empty((self._buffers[0][self.rank].shape[0], b.shape[1]))
        self._last.wait()
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            self._begin()
            begun = Done.on(self._stream)
            self._send(a_shard)
        begun.wait()  # the product may fill the device, and nothing that sends may be behind it
        self._multiply(a_shard, b, out)
        current.wait_stream(self._stream)  # which reads a_shard
        self._last = Done.on(current)
        return out

    def _begin(self) -> None:
        """Advance what is sent to the number of this call, unless an earlier one has failed.

        All words of the call before are here, since its product has waited for them.
        """
        before, self.calls = self.calls % EPOCHS, self.calls + 1
        timeout = self._arena.timeout_ms
        told = self._arena.word_at_all
        wait_signals(self._words, before, timeout, self._status, next=self._sent, clear=told)

    def _send(self, a_shard: Tensor) -> None:
        buffers = self._buffers[self.calls % BUFFERS]
        written, read = [], []
        for rank, word in zip(self._others, self._words_of_me, strict=True):
            written += [buffers[rank][self._part], word]
            read += [a_shard, self._sent]
        push(written, read)

    def _multiply(self, a_shard: Tensor, b: Tensor, out: Tensor | None = None) -> Tensor:
        gathered, epoch = self._buffers[self.calls % BUFFERS][self.rank], self.calls % EPOCHS
        push([gathered[self._part]], [a_shard])
        stream_write_value32(self._words, self.rank, epoch)
        product = progress_matmul(
            gathered,
            b,
            self._words,
            self.rank,
            epoch=epoch,
            timeout_ms=self._arena.timeout_ms,
            status=self._status,
            out=out,
            blocks=self._blocks,
        )
        wait_signals(self._arena.living, 1, 0, self._status)
        return product

    def check(self, *, wait: bool = False) -> None:
        """Raise RuntimeError if a rank was late; `wait` waits for the calls that are under way.

        There is no way on from there: this object sends nothing that other ranks would take for
        good, so they come to the same error. Make another one with all ranks.
        """
        if wait and self._stream is not None:
            self._last.wait()
            torch.cuda.current_stream(self._stream.device).synchronize()
        if late := int(self._status):
            raise RuntimeError(
                f"rank {late - 1} of the group sent no rows within {self._arena.timeout_ms} ms, or "
                "had given up; its own error says why, and all ranks must make this object anew"
            )

    def __del__(self) -> None:
        if (last := getattr(self, "_last", None)) is not None and last.event is not None:
            last.event.synchronize()  # it writes to the status, and others to the buffers

    def close(self) -> None:
        """Let go of the memory of all ranks, after what was launched here."""
        if self._stream is not None:
            self._stream.synchronize()
            self._last.wait()
            torch.cuda.current_stream(self._stream.device).synchronize()
        self._buffers, self._words_of_me = [], []
        self._words = self._words.new_empty(0)
        self._arena.close()


def slot_bytes(ranks: int, rows: int, inner: int) -> int:
    """Bytes of a buffer of half precision, and of a word per rank behind it."""
    return -(-ranks * rows * inner * 2 // WORD) * WORD + ranks * WORD
