"""One of two ranks on one GPU: what the ops do to memory of a peer, for test_communication_gpu.py.

    RANK=0 STORE=/tmp/store python -m tests.kernels.peer_memory

Prints the names of what held; the first thing that does not hold is an AssertionError.
"""

import importlib
import os

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem

from .sanitizer_cases import loaded

ROWS, COLS = 256, 512
DATA = 4 * ROWS * COLS  # bytes
WORDS = 64  # uint32 signals behind them
TIMEOUT = 10_000


class Rank:
    """This rank's symmetric memory and its peer's."""

    def __init__(self) -> None:
        self.rank = int(os.environ["RANK"])
        self.peer = 1 - self.rank
        torch.cuda.set_device(0)
        store = f"file://{os.environ['STORE']}"
        dist.init_process_group("gloo", store, rank=self.rank, world_size=2)
        package = loaded().__name__
        self.ops = importlib.import_module(f"{package}.kernels.communication")
        self.momentum = importlib.import_module(f"{package}.kernels").momentum
        buffer = symm_mem.empty(DATA + 4 * WORDS, dtype=torch.uint8, device="cuda:0")
        self.handle = symm_mem.rendezvous(buffer, dist.group.WORLD.group_name)
        buffer.zero_()
        self.status = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.settle()

    def slot(self, of: int, dtype: torch.dtype) -> torch.Tensor:
        return self.handle.get_buffer(of, (ROWS, COLS), dtype)

    def words(self, of: int) -> torch.Tensor:
        return self.handle.get_buffer(of, (WORDS,), torch.uint32, storage_offset=DATA // 4)

    def given(self, of: int) -> torch.Tensor:
        """Small integers of a rank, which both know."""
        generator = torch.Generator().manual_seed(of)
        return torch.randint(-3, 3, (ROWS, COLS), generator=generator).float().cuda()

    def settle(self) -> None:
        torch.cuda.synchronize()
        dist.barrier()
        assert self.status.item() == 0, self.status.item()


def momentum(x: Rank) -> None:
    """Momentum, Nesterov, the cast and the store to the owner, in one launch."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        buffers, out = [torch.ones(ROWS, COLS, device="cuda")], [x.slot(x.peer, dtype)]
        x.momentum([x.given(x.rank)], buffers, out, mu=0.5, nesterov=True, form="heavy_ball")
        x.settle()
        direction = x.given(x.peer) + 0.5 * (0.5 + x.given(x.peer))
        assert torch.equal(x.slot(x.rank, dtype), direction.to(dtype))
        x.settle()


def push(x: Rank) -> None:
    """Columns, then the word that says so; the reader waits on its stream."""
    for epoch in range(1, 6):
        source, target = x.given(x.rank) + epoch, x.slot(x.peer, torch.float32)
        x.ops.push([target[:, :7], target[:, 7:]], [source[:, :7], source[:, 7:]])
        x.ops.stream_write_value32(x.words(x.peer), x.rank, epoch)
        x.ops.wait_signals(x.words(x.rank)[x.peer :][:1], epoch, TIMEOUT, x.status)
        seen = x.slot(x.rank, torch.float32).clone()
        x.settle()
        assert torch.equal(seen, x.given(x.peer) + epoch)
        x.settle()


def signals(x: Rank) -> None:
    """Words of a memset, and turns: what a wait hands out is what the peer waits for next."""
    x.ops.memset32(x.words(x.peer), 8, 9, 4)
    x.ops.wait_signals(x.words(x.rank)[8:12], 9, TIMEOUT, x.status)
    turn = torch.full((1,), 100, dtype=torch.int32, device="cuda").view(torch.uint32)
    x.ops.stream_write_value32(x.words(x.peer), 20, 100)
    for _ in range(5):
        x.ops.wait_signals(x.words(x.rank)[20:21], turn, TIMEOUT, x.status, next=turn)
        x.ops.push([x.words(x.peer)[20:21]], [turn])
    x.settle()
    assert x.words(x.rank)[20].item() == turn.item() == 105


def progress_matmul(x: Rank) -> None:
    """The peer's half of the rows arrives while the product runs."""
    a, half = x.slot(x.rank, torch.bfloat16), ROWS // 2
    b = torch.randint(-3, 3, (COLS, 320), device="cuda").bfloat16()
    for epoch in range(1, 6):
        a.fill_(torch.nan)
        x.settle()
        parts = [(x.given(of)[:half] + epoch).bfloat16() for of in range(2)]
        for of in (x.rank, x.peer):
            x.ops.push([x.slot(of, a.dtype)[x.rank * half :][:half]], [parts[x.rank]])
            x.ops.stream_write_value32(x.words(of), 30 + x.rank, epoch)
        here = x.words(x.rank)[30:32]
        options = {"epoch": epoch, "timeout_ms": TIMEOUT, "status": x.status, "blocks": 100}
        out = x.ops.progress_matmul(a, b, here, x.rank, **options)
        x.settle()
        exact = torch.cat(parts).double() @ b.double()
        assert torch.equal(out, exact.to(a.dtype))
        x.settle()


if __name__ == "__main__":
    here = Rank()
    for case in (momentum, push, signals, progress_matmul):
        case(here)
        print(case.__name__, flush=True)
    dist.destroy_process_group()
