"""progress_matmul on Hopper: exact at odd sizes, whatever arrives when; what is late hangs nothing.

Operands lie in memory that is NaN between their elements and until they arrive; outputs are NaN
before, and their frames must stay so.
"""

import pytest
import torch

from .._compare import capture, no_waits
from ..conftest import module_fixture
from ._products import Problem, exact, relaid
from .test_sm90_gpu import Framed

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("hopper")]

module = module_fixture("kernels.communication.progress_matmul")
communication = module_fixture("kernels.communication")

HALVES = (torch.float16, torch.bfloat16)
TIMEOUT = 5_000
# M, K, N: around the sides of tiles and stages; a ring holds three stages of 64.
SHAPES = (
    (8, 8, 8), (24, 64, 64), (128, 72, 200), (256, 192, 256), (384, 200, 448), (520, 128, 264),
    (640, 456, 1032), (1024, 264, 705), (2048, 520, 1601),
)  # fmt: skip


def operands(m, k, n, dtype, device, *, by_columns=False):
    given = Problem((), m, k, n).operands(dtype, device)
    laid = relaid(given, A="padded", B="transposed-padded" if by_columns else "padded")
    return laid["A"], laid["B"], exact(given, dtype)


@pytest.fixture
def status(device):
    return torch.zeros(1, dtype=torch.int32, device=device)


@pytest.fixture
def run(ops, device):
    """The op: `run(a, b, out, chunks, pivot, narrow=-1, signals=None, blocks=0)`."""

    def call(a, b, out, chunks, pivot, *, narrow=-1, signals=None, blocks=0):
        status = None if signals is None else torch.zeros(1, dtype=torch.int32, device=device)
        arguments = (signals, chunks, pivot, 1, None, TIMEOUT, status)
        ops.progress_matmul(a, b, out, *arguments, blocks, narrow)
        assert status is None or status.item() == 0

    return call


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("by_columns", (False, True))
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_is_exact(run, device, shape, by_columns, dtype):
    """Every number of narrow columns, chunks that end within a tile, and grids of few blocks."""
    m, k, n = shape
    a, b, expected = operands(m, k, n, dtype, device, by_columns=by_columns)
    for chunks in (1, 2, 4, 8):
        words = torch.ones(chunks, dtype=torch.uint32, device=device)
        for narrow in range(-1, -(-n // 192) + 1):
            frame = Framed(expected.shape, dtype, device)
            pivot, blocks = (narrow + 1) % chunks, (0, 1, 5)[narrow % 3]
            signals = words if narrow % 2 else None
            run(a, b, frame.out, chunks, pivot, narrow=narrow, signals=signals, blocks=blocks)
            assert torch.equal(frame.out, expected), (chunks, narrow)
            assert frame.intact(), (chunks, narrow)


def test_no_bit_depends_on_chunks_order_or_widths(run, ops, device):
    generator = torch.Generator(device).manual_seed(1)
    for dtype in HALVES:
        a, b = (
            torch.randn(shape, device=device, generator=generator).to(dtype)
            for shape in ((1024, 1032), (1032, 1600))
        )
        whole = torch.empty(1, 1024, 1600, dtype=dtype, device=device)
        ops.matmul_add(a[None], b[None], None, whole, 1.0, 0.0, 0)
        for chunks, pivot, narrow in ((1, 0, 0), (4, 1, 3), (8, 5, 9), (2, 1, -1)):
            out = torch.empty(1024, 1600, dtype=dtype, device=device)
            run(a, b, out, chunks, pivot, narrow=narrow)
            assert torch.equal(out, whole[0]), (chunks, narrow)


@pytest.mark.parametrize("chunks", (2, 4, 8))
def test_rows_that_arrive_meanwhile_are_read_when_they_are_there(
    module, communication, device, status, chunks
):
    """The product is launched before any row but the pivot's is there."""
    side = torch.cuda.Stream()
    m, k, n = 2048, 1024, 1536
    a, b, expected = operands(m, k, n, torch.bfloat16, device)
    words = torch.zeros(chunks, dtype=torch.uint32, device=device)
    rows = m // chunks
    for epoch in range(1, 16):
        pivot = epoch % chunks
        arriving = torch.full((m, k), torch.nan, dtype=a.dtype, device=device)
        arriving[pivot * rows :][:rows] = a[pivot * rows :][:rows]
        communication.memset32(words, pivot, epoch, 1)
        torch.cuda.synchronize()
        with no_waits():
            # Copies on one device may take multiprocessors, so the grid leaves some.
            out = module.progress_matmul(
                arriving, b, words, pivot, epoch=epoch, status=status, timeout_ms=TIMEOUT,
                blocks=64,
            )  # fmt: skip
            with torch.cuda.stream(side):
                for c in [(pivot + i) % chunks for i in range(1, chunks)]:
                    part = slice(c * rows, (c + 1) * rows)
                    communication.push([arriving[part]], [a[part]], blocks=0)
                    communication.stream_write_value32(words, c, epoch)
        torch.cuda.synchronize()
        assert status.item() == 0
        assert torch.equal(out, expected), epoch


def test_a_late_chunk_is_named_and_the_device_lives_on(module, communication, device, status):
    a, b, expected = operands(1024, 256, 512, torch.bfloat16, device)
    words = torch.ones(4, dtype=torch.uint32, device=device)
    communication.memset32(words, 2, 0, 1)
    for blocks in (None, 1, 132):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        module.progress_matmul(a, b, words, 3, status=status, timeout_ms=100, blocks=blocks)
        end.record()
        torch.cuda.synchronize()
        assert status.item() == 3 and 90 < start.elapsed_time(end) < 200
        # The status stands: nothing waits again.
        module.progress_matmul(a, b, words, 3, status=status, timeout_ms=TIMEOUT, blocks=blocks)
        assert status.item() == 3
        status.zero_()
    with pytest.raises(TimeoutError, match="chunk 2 of 4"):
        module.progress_matmul(a, b, words, 3, timeout_ms=50)
    communication.memset32(words, 2, 1, 1)
    assert torch.equal(module.progress_matmul(a, b, words, 3), expected)


def test_a_graph_waits_for_the_epoch_on_the_device(module, communication, device, status):
    a, b, expected = operands(512, 512, 768, torch.float16, device)
    words = torch.zeros(4, dtype=torch.uint32, device=device)
    epoch = torch.zeros(1, dtype=torch.uint32, device=device)
    out = torch.empty_like(expected)

    def product():
        module.progress_matmul(a, b, words, 1, epoch=epoch, status=status, timeout_ms=100, out=out)

    product()
    graph, _ = capture(product)
    for turn in range(1, 4):
        communication.memset32(epoch, 0, turn, 1)
        communication.memset32(words, 0, turn, 4)
        communication.memset32(words, 2, turn - 1, 1)
        graph.replay()
        assert status.item() == 3
        status.zero_()
        communication.memset32(words, 2, turn, 1)
        out.fill_(torch.nan)
        graph.replay()
        assert status.item() == 0 and torch.equal(out, expected)


def test_opcheck_and_refusals(ops, device, status):
    words = torch.ones(2, dtype=torch.uint32, device=device)
    a, b = (torch.ones(shape, device=device).half() for shape in ((8, 16), (16, 24)))
    out = torch.empty(8, 24, device=device).half()
    arguments = (a, b, out, words, 2, 1, 1, None, 1000, status)
    torch.library.opcheck(ops.progress_matmul.default, arguments, test_utils=("test_faketensor",))
    for change, why in (
        ({0: a.mT.contiguous().mT}, "TMA cannot read a"),
        ({2: out.mT.contiguous().mT}, "TMA cannot write out"),
        ({4: 3}, "8 rows are not 3 chunks"),
        ({5: 2}, "there is no chunk 2"),
        ({9: None}, "signals need a status"),
        ({3: words[:1]}, r"signals must be \(2,\)"),
    ):
        changed = [change.get(i, argument) for i, argument in enumerate(arguments)]
        with pytest.raises(RuntimeError, match=why):
            ops.progress_matmul(*changed)


def test_operands_that_tma_cannot_take_are_multiplied_all_the_same(module, device):
    words = torch.ones(2, dtype=torch.uint32, device=device)
    for m, k, n in ((6, 7, 9), (10, 16, 3)):
        a = torch.randint(-3, 3, (m, k), device=device).half()
        b = torch.randint(-3, 3, (k, n), device=device).half()
        assert torch.equal(module.progress_matmul(a, b, words, 1), a @ b)
