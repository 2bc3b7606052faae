"""push and signals on a GPU: order between streams, graphs, what is launched, memory of a peer."""

import importlib
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
import torch.distributed._symmetric_memory as symmetric
from torch import distributed

from .._compare import capture, no_waits
from ..conftest import ROOT

pytestmark = pytest.mark.gpu


TIMEOUT = 5_000


@pytest.fixture
def words(device):
    return torch.zeros(64, dtype=torch.uint32, device=device)


@pytest.fixture
def status():
    return torch.zeros(1, dtype=torch.int32, pin_memory=True)


# Rows, bytes of a row, columns before and behind: for the kernel, around the sides of its tiles.
ROWS = (
    (65536, 16, 16, 0), (4096, 272, 0, 32), (1024, 2048, 64, 64), (513, 5008, 16, 16),
    (33, 65536, 0, 16), (3, 1048592, 32, 0), (2, 16777216, 16, 16),
)  # fmt: skip


def columns(rows, width, before, behind, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns, and all that they are columns of."""
    whole = torch.zeros(rows, before + width + behind, dtype=torch.uint8, device=device)
    return whole[:, before : before + width], whole


def random_bytes(shape, device) -> torch.Tensor:
    return torch.randint(1, 255, shape, dtype=torch.uint8, device=device)


@pytest.mark.parametrize("blocks", (None, 0, 1, 7, 300))
def test_rows_within_the_device(push, device, blocks):
    """One by one, and all in one launch; the columns beside them stay."""
    dsts, srcs, wholes = [], [], []
    for rows, width, before, behind in ROWS:
        src, held = columns(rows, width, behind, before + 16, device)
        held.copy_(random_bytes(held.shape, device))
        dst, whole = columns(rows, width, before, behind, device)
        push([dst], [src], blocks=blocks)
        assert torch.equal(dst, src) and whole.count_nonzero() == dst.count_nonzero()
        whole.zero_()
        for kept, one in ((dsts, dst), (srcs, src), (wholes, whole)):
            kept.append(one)
    push(dsts, srcs, blocks=blocks)
    for dst, src, whole in zip(dsts, srcs, wholes, strict=True):
        assert torch.equal(dst, src) and whole.count_nonzero() == dst.count_nonzero()


def test_pairs_are_copied_in_their_order(push, device):
    """What one pair writes the next one reads, overwrites, or tells of."""
    a = random_bytes((1024, 4096), device)
    b, c = (columns(1024, 2048, 16, 16, device)[0] for _ in range(2))
    word, sent = (torch.full((1,), x, device=device) for x in (0, 9))
    for _ in range(20):
        b.zero_(), c.zero_(), word.zero_()
        push([b, c, word, b], [a[:, :2048], b, sent, a[:, 2048:]])
        assert torch.equal(c, a[:, :2048]) and torch.equal(b, a[:, 2048:]) and word.item() == 9
    many = [columns(512, 2048, 0, 16, device)[0] for _ in range(70)]
    push(many, [a[:512, :2048]] * 70)
    assert all(torch.equal(x, a[:512, :2048]) for x in many)


def test_a_graph_copies_rows_and_a_wait_sees_them(push, signals, device, words, status):
    src = random_bytes((2048, 1024), device)
    dst, seen = columns(2048, 1024, 16, 0, device)[0], torch.zeros_like(src)
    graph, _ = capture(lambda: push([dst, words[:1]], [src, words[1:2]]), warm_up=1)
    graph.replay()
    seen.copy_(dst)  # no kernel may be loaded behind a wait: loading waits for what runs
    signals.wait_signals(words[:1], 0, TIMEOUT, status)
    side = torch.cuda.Stream()
    for epoch in range(1, 6):
        src.copy_(random_bytes(src.shape, device))
        signals.memset32(words, 1, epoch, 1)
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            signals.wait_signals(words[:1], epoch, TIMEOUT, status)
            seen.copy_(dst)
        graph.replay()
        torch.cuda.synchronize()
        assert status.item() == 0 and torch.equal(seen, src)


def launches(call) -> Counter:
    """Kernels by name, and "copy", of one call."""
    call()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        call()
        torch.cuda.synchronize()
    return Counter(
        "copy" if event.name.startswith("Memcpy") else event.name
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )


def test_what_is_launched_for_rows(push, device):
    src = random_bytes((8, 1024, 2048), device)
    dsts = [columns(1024, 2048, 0, 16, device)[0] for _ in range(8)]
    assert launches(lambda: push(dsts, list(src), blocks=0)) == {"copy": 8}
    found = launches(lambda: push(dsts, list(src)))
    assert sum(found.values()) == 1 and "rows_kernel" in next(iter(found))
    few, odd = [x[:64] for x in dsts], [x[:, 1:2033] for x in dsts]
    assert launches(lambda: push(few, list(src[:, :64]))) == {"copy": 8}
    assert launches(lambda: push(odd, list(src[:, :, 1:2033]))) == {"copy": 8}


def test_rows_two_gib_apart(push, device):
    """cudaMemcpy2DAsync takes no such pitch."""
    far = torch.zeros(2, 2**31 + 16, dtype=torch.uint8, device=device)
    near = torch.randint(1, 100, (2, 1000), dtype=torch.uint8, device=device)
    back = torch.zeros_like(near)
    push([far[:, 7:1007]], [near])
    push([back], [far[:, 7:1007]])
    assert torch.equal(back, near) and far[:, :1100].count_nonzero() == near.numel()


def test_a_stream_waits_for_the_copies_of_another(push, signals, device, words, status):
    """The wait is launched first; whoever comes behind it sees all that was pushed."""
    side = torch.cuda.Stream()
    loaded = torch.zeros(512, 1500, device=device)[:, 100:1100]  # no code may be loaded behind it
    push([loaded], [loaded.clone()])
    signals.memset32(words, 0, 0, 8)
    signals.wait_signals(words[:8], 0, TIMEOUT, status)
    for epoch in range(1, 51):
        src = torch.full((512, 1000), float(epoch), device=device)
        dst = torch.zeros(512, 1500, device=device)[:, 100:1100]
        torch.cuda.synchronize()
        with no_waits():
            signals.wait_signals(words[:8], epoch, TIMEOUT, status)
            seen = dst.clone()
            with torch.cuda.stream(side):
                push([dst], [src])
                if epoch % 2:
                    signals.memset32(words, 0, epoch, 8)
                else:
                    for i in range(8):
                        signals.stream_write_value32(words, i, epoch)
        torch.cuda.synchronize()
        assert status.item() == 0 and torch.equal(seen, src)


def test_a_late_word_stops_nothing_but_its_wait(signals, device, words, status):
    for device_status in (False, True):
        late = torch.zeros(1, dtype=torch.int32, device=device) if device_status else status
        signals.memset32(words, 0, 1, 40)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        signals.wait_signals(words, 1, 100, late)
        for _ in range(20):
            signals.wait_signals(words, 1, 100, late)  # they find the status and return
        end.record()
        torch.cuda.synchronize()
        assert late.item() == 41
        assert 90 < start.elapsed_time(end) < 200
        late.zero_()
        signals.wait_signals(words[:40], 1, 100, late)
        assert torch.ones(3, device=device).sum().item() == 3 and late.item() == 0


def test_a_graph_of_push_signal_and_wait(push, signals, device, words):
    """Every replay waits for an epoch of its own, which the word on the device counts."""
    late = torch.zeros(1, dtype=torch.int32, device=device)
    epoch = torch.ones(1, dtype=torch.uint32, device=device)
    src, dst = torch.zeros(300, 70, device=device), torch.zeros(300, 90, device=device)
    seen = torch.zeros_like(src)

    def exchange():
        push([dst[:, 20:], words[:1]], [src, epoch])
        signals.memset32(words, 8, 5, 2)
        signals.stream_write_value32(words, 10, 6)
        signals.wait_signals(words[:1], epoch, 1000, late, next=epoch)
        seen.copy_(dst[:, 20:])

    graph, _ = capture(exchange, warm_up=1)
    for turn in range(2, 7):
        src.fill_(turn)
        graph.replay()
        assert torch.equal(seen, src) and not dst[:, :20].any()
        assert epoch.item() == turn + 1 and words[0].item() == turn
    assert words[8:12].tolist() == [5, 5, 6, 0] and late.item() == 0


def test_an_exchange_launches_one_kernel(push, signals, device, words, status):
    """Copies and words are the driver's; what is launched is the wait."""
    srcs = [torch.ones(64, 64, device=device) for _ in range(16)]
    dsts = [torch.zeros(64, 80, device=device)[:, :64] for _ in range(8)]
    dsts += [torch.zeros(64, 64, device=device) for _ in range(8)]

    def exchange():
        push(dsts, srcs)
        signals.stream_write_value32(words, 0, 1)
        signals.wait_signals(words[:1], 1, TIMEOUT, status)

    found = launches(exchange)
    kernels = {name: count for name, count in found.items() if name != "copy"}
    assert found["copy"] == 16 and sum(kernels.values()) == 1, found


def test_opcheck_and_compile(push, ops, device, words):
    """Words are uint32, which the check of schemas cannot compare."""
    late = torch.zeros(1, dtype=torch.int32, device=device)
    src, dst = torch.ones(8, 4, device=device), torch.zeros(8, 6, device=device)[:, 1:5]
    torch.library.opcheck(
        ops.push.default, ([dst], [src]), test_utils=("test_schema", "test_faketensor")
    )
    for op, arguments in (
        (ops.stream_write_value32, (words, 0, 1)),
        (ops.memset32, (words, 0, 1, 4)),
        (ops.wait_signals, (words, 1, None, 1, late, words[5:6], [])),
    ):
        torch.library.opcheck(op.default, arguments, test_utils=("test_faketensor",))
    target = torch.zeros(8, 4, device=device)

    @torch.compile(fullgraph=True)
    def doubled(x, out):
        push([out], [x * 2])
        return out + 1

    assert torch.equal(doubled(src, target), src * 3) and torch.equal(target, src * 2)


SIDES = (256, 512)  # of what a rank pushes
DATA = 4 * 256 * 512  # bytes
WORDS = 64  # uint32 signals behind them


class Rank:
    """This rank's symmetric memory and its peer's."""

    def __init__(self) -> None:
        from .sanitizer_cases import loaded

        self.rank = int(os.environ["RANK"])
        self.peer = 1 - self.rank
        torch.cuda.set_device(0)
        store = f"file://{os.environ['STORE']}"
        distributed.init_process_group("gloo", store, rank=self.rank, world_size=2)
        package = loaded().__name__
        self.ops = importlib.import_module(f"{package}.kernels.communication")
        self.momentum = importlib.import_module(f"{package}.kernels").momentum
        buffer = symmetric.empty(DATA + 4 * WORDS, dtype=torch.uint8, device="cuda:0")
        self.handle = symmetric.rendezvous(buffer, distributed.group.WORLD.group_name)
        buffer.zero_()
        self.status = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self.settle()

    def slot(self, of: int, dtype: torch.dtype) -> torch.Tensor:
        return self.handle.get_buffer(of, SIDES, dtype)

    def words(self, of: int) -> torch.Tensor:
        return self.handle.get_buffer(of, (WORDS,), torch.uint32, storage_offset=DATA // 4)

    def given(self, of: int) -> torch.Tensor:
        """Small integers of a rank, which both know."""
        generator = torch.Generator().manual_seed(of)
        return torch.randint(-3, 3, SIDES, generator=generator).float().cuda()

    def settle(self) -> None:
        torch.cuda.synchronize()
        distributed.barrier()
        assert self.status.item() == 0, self.status.item()


def peers_momentum(x: Rank) -> None:
    """Momentum, Nesterov, the cast and the store to the owner, in one launch."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        buffers, out = [torch.ones(SIDES, device="cuda")], [x.slot(x.peer, dtype)]
        x.momentum([x.given(x.rank)], buffers, out, mu=0.5, nesterov=True, form="heavy_ball")
        x.settle()
        direction = x.given(x.peer) + 0.5 * (0.5 + x.given(x.peer))
        assert torch.equal(x.slot(x.rank, dtype), direction.to(dtype))
        x.settle()


def peers_push(x: Rank) -> None:
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


def peers_signals(x: Rank) -> None:
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


def peers_progress_matmul(x: Rank) -> None:
    """The peer's half of the rows arrives while the product runs."""
    a, half = x.slot(x.rank, torch.bfloat16), SIDES[0] // 2
    b = torch.randint(-3, 3, (SIDES[1], 320), device="cuda").bfloat16()
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


CASES = (peers_momentum, peers_push, peers_signals, peers_progress_matmul)


def test_two_ranks_on_one_gpu(tmp_path):
    """momentum, push, signals and the product that waits, on each other's symmetric memory."""
    environment = os.environ | {
        "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1",
        "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
        "CUDA_MODULE_LOADING": "EAGER",
        "STORE": str(tmp_path / "store"),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.kernels.test_communication_gpu"],
            cwd=ROOT,
            env=environment | {"RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, output in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, "\n".join(outputs)
        assert [line for line in output.splitlines() if line.startswith("peers_")] == [
            case.__name__ for case in CASES
        ], output


if __name__ == "__main__":
    here = Rank()
    for case in CASES:
        case(here)
        print(case.__name__, flush=True)
    distributed.destroy_process_group()
