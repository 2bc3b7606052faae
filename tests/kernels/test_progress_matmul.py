"""progress_matmul: the order of its tiles, what it refuses, and the path without the kernel."""

import ctypes
import logging
import math
import time

import pytest
import torch

from ..conftest import module_fixture

progress = module_fixture("kernels.communication.progress_matmul")

ROWS, WIDE, NARROW = 128, 256, 192


@pytest.fixture(scope="module")
def probe(host_build):
    found = host_build("progress_probe")
    found.time_of.restype = ctypes.c_double
    return found


def order(probe, chunks, pivot, rows, n, narrow, blocks) -> list[tuple[int, int, int, bool]]:
    count = probe.tiles(chunks, pivot, rows, n, narrow, blocks, None)
    found = (ctypes.c_int * (4 * count))()
    probe.tiles(chunks, pivot, rows, n, narrow, blocks, found)
    values = list(found)
    return [tuple(values[i : i + 4]) for i in range(0, len(values), 4)]


@pytest.mark.parametrize("n", (1, 64, 191, 192, 256, 257, 3584, 5000))
@pytest.mark.parametrize(
    ("chunks", "rows"), ((1, 1), (1, 4096), (3, 130), (8, 512), (4, 1024), (5, 4))
)
def test_every_tile_comes_once_and_chunks_in_order(probe, n, chunks, rows):
    for narrow in range(-(-n // NARROW) + 1):
        for blocks in (1, 7, 132):
            pivot = (n + narrow) % chunks
            tiles = order(probe, chunks, pivot, rows, n, narrow, blocks)
            turns = [(chunk - pivot) % chunks for chunk, *_ in tiles]
            assert turns == sorted(turns)  # from the pivot on, round the end
            columns = sorted({(col, thin) for _, _, col, thin in tiles})
            ends = [col + (NARROW if thin else WIDE) for col, thin in columns]
            assert [col for col, _ in columns] == [0, *ends[:-1]] and ends[-1] >= n
            wanted = {
                (chunk, row, *column)
                for chunk in range(chunks)
                for row in range(0, rows, ROWS)
                for column in columns
            }
            assert len(tiles) == len(wanted) and set(tiles) == wanted


def pick(probe, *problem) -> tuple[int, int]:
    found = (ctypes.c_int * 2)()
    probe.pick(*problem, found)
    return tuple(found)


def test_widths_and_blocks_are_picked_by_the_busiest_block(probe):
    """4096 x 3584: 448 wide tiles are 3.4 rounds of 132, 512 of both widths 4 shorter ones of 128,
    which begin where chunks of 1024 or 512 rows begin.
    """
    for chunks in (1, 2, 4, 8):
        problem = (chunks, 4096 // chunks, 3584, 8192)
        narrow, blocks = pick(probe, *problem, 132)
        assert (narrow, blocks) == (8, 132 if chunks < 4 else 128)
        times = [probe.time_of(*problem, n, b) for n in range(20) for b in range(96, 133)]
        assert probe.time_of(*problem, narrow, blocks) == min(times)
    assert pick(probe, 4, 4096, 3584, 8192, 132) == (0, 132)
    assert pick(probe, 1, 128, 192, 64, 132) == (1, 132)


@pytest.mark.parametrize("most", (1, 24, 132))
@pytest.mark.parametrize("n", (8, 200, 1601, 3584, 5000))
def test_no_picked_grid_has_more_rounds_or_blocks_than_asked(probe, n, most):
    for chunks, rows in ((1, 130), (3, 1024), (8, 512)):
        narrow, blocks = pick(probe, chunks, rows, n, 4096, most)
        tiles = len(order(probe, chunks, 0, rows, n, narrow, blocks))
        assert 1 <= blocks <= most and -(-tiles // blocks) == -(-tiles // most)


@pytest.mark.parametrize("blocks", (1, 7, 132))
@pytest.mark.parametrize("n", (1, 192, 3584, 5000))
@pytest.mark.parametrize("chunks_and_rows", ((1, 4096), (3, 130), (8, 512), (5, 4)), ids=str)
def test_the_busiest_block_is_counted_as_if_all_tiles_were_walked(
    probe, chunks_and_rows, n, blocks
):
    chunks, rows = chunks_and_rows
    cost = {False: 128 * 0.7223 + 1.70, True: 128 * 0.5700 + 1.60}  # K = 8192
    for narrow in range(-(-n // NARROW) + 1):
        times = [0.0] * blocks
        for tile, (*_, thin) in enumerate(order(probe, chunks, 0, rows, n, narrow, blocks)):
            times[tile % blocks] += cost[thin]
        predicted = probe.time_of(chunks, rows, n, 8192, narrow, blocks)
        assert math.isclose(predicted, max(times), rel_tol=1e-12), narrow


def test_the_largest_product_is_picked_for_at_once(probe):
    """2^20 x 2^20 has 4e7 tiles and 5e3 splits of N."""
    began = time.process_time()
    pick(probe, 8, 1 << 17, 1 << 20, 8192, 132)
    assert time.process_time() - began < 1


@pytest.fixture
def operands(device):
    a = torch.randint(-3, 3, (12, 16), device=device).float()
    b = torch.randint(-3, 3, (16, 10), device=device).float()
    return a, b, torch.ones(3, dtype=torch.uint32, device=device)


def test_without_the_kernel_it_waits_then_multiplies(progress, dispatch, operands, caplog):
    a, b, words = operands  # float32, which the kernel never takes
    dispatch.say_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger=dispatch.__name__):
        for pivot in range(3):
            assert torch.equal(progress.progress_matmul(a, b, words, pivot), a @ b)
    assert len(caplog.records) == 1 and "progress_matmul" in caplog.records[0].message
    out = torch.full((12, 10), math.nan, device=a.device)
    assert progress.progress_matmul(a, b.T.contiguous().T, words, 2, out=out) is out
    assert torch.equal(out, a @ b)


def test_a_late_chunk_is_said(progress, signals, operands, device):
    a, b, words = operands
    signals.memset32(words, 1, 0, 1)
    with pytest.raises(TimeoutError, match="chunk 1 of 3 did not reach its epoch within 20 ms"):
        progress.progress_matmul(a, b, words, 2, timeout_ms=20)
    status = torch.zeros(1, dtype=torch.int32, device=device)
    result = progress.progress_matmul(a, b, words, 2, timeout_ms=20, status=status)
    assert status.item() == 2 and result.shape == (12, 10)
    status.zero_()
    epoch = torch.zeros(1, dtype=torch.uint32, device=device)
    result = progress.progress_matmul(a, b, words, 0, epoch=epoch, status=status)
    assert status.item() == 0 and torch.equal(result, a @ b)


WRONG = {  # words of the message: what is changed
    "a must be a dense tensor": {"a": 3},
    "a must have 2 dimensions": {"a": torch.zeros(12)},
    "b must have dtype float32": {"b": torch.zeros(16, 10).half()},
    "share no K": {"b": torch.zeros(10, 16)},
    "pad the rows to a multiple": {"chunk_signals": torch.zeros(5, dtype=torch.uint32)},
    "chunk_signals must have dtype uint32": {"chunk_signals": torch.zeros(3)},
    "pivot must be one of the 3 chunks": {"pivot": 3},
    "pivot must be an integer": {"pivot": 1.0},
    "epoch must be in": {"epoch": -1},
    "timeout_ms must be in": {"timeout_ms": -1},
    "blocks must be positive": {"blocks": 0},
    "status must have dtype int32": {"status": torch.zeros(1)},
    r"out must be \(M, N\)": {"out": torch.zeros(10, 12)},
    "a requires a gradient": {"a": torch.zeros(12, 16, requires_grad=True)},
}


@pytest.mark.parametrize("why", WRONG)
def test_refusals(progress, operands, device, why):
    a, b, words = operands
    arguments = {"a": a, "b": b, "chunk_signals": words, "pivot": 0} | {
        name: value.to(device) if isinstance(value, torch.Tensor) else value
        for name, value in WRONG[why].items()
    }
    with pytest.raises((TypeError, ValueError), match=why):
        progress.progress_matmul(**arguments)


def test_out_may_not_be_an_operand(progress, operands):
    a, _, words = operands
    square = torch.zeros(16, 16, device=a.device)
    with pytest.raises(ValueError, match="out overlaps a or b"):
        progress.progress_matmul(a, square, words, 0, out=square[:12])


@pytest.fixture
def on_hopper(dispatch, monkeypatch):
    """The choice between kernel and torch as on a Hopper GPU, whatever there is."""
    name = torch.compiler.assume_constant_result(lambda op, device: "compiled")
    monkeypatch.setattr(dispatch, "path_name", name)
    dispatch.say_once.cache_clear()


CHOSEN = {  # M, K, N, chunks, dtype: whether the kernel takes them
    (16, 16, 24, 2, torch.float16): True,
    (16, 16, 24, 2, torch.float32): False,
    (16, 7, 24, 2, torch.bfloat16): False,
    (16, 16, 3, 2, torch.bfloat16): False,
    (16, 0, 24, 2, torch.float16): False,
    ((1 << 20) + 2, 8, 8, 2, torch.float16): False,
    (2, 8, (1 << 20) + 8, 2, torch.float16): False,
    (2050, 8, 8, 1025, torch.float16): False,
}


def halves(device, m, k, n, dtype):
    a = torch.ones(m, k, dtype=dtype, device=device)
    return a, torch.ones(k, n, dtype=dtype, device=device), a.new_empty(m, n)


@pytest.mark.parametrize("problem", CHOSEN, ids=str)
def test_eager_and_compiled_calls_choose_alike(
    progress, dispatch, monkeypatch, on_hopper, device, problem, caplog
):
    m, k, n, chunks, dtype = problem
    a, b, out = halves(device, m, k, n, dtype)
    words = torch.ones(chunks, dtype=torch.uint32, device=device)
    status = torch.zeros(1, dtype=torch.int32, device=device)
    called, nodes = [], []
    with (
        monkeypatch.context() as patched,
        caplog.at_level(logging.WARNING, logger=dispatch.__name__),
    ):
        patched.setattr(progress.ops, "progress_matmul", lambda *_: called.append("the kernel"))
        progress.progress_matmul(a, b, words, 0, status=status, out=out)
    assert called == ["the kernel"] * CHOSEN[problem]
    assert [record.levelname for record in caplog.records] == ["WARNING"] * (not CHOSEN[problem])

    def keep(graph, _):
        nodes.extend(str(node.target) for node in graph.graph.nodes)
        (results,) = graph.graph.output_node().args
        return lambda *_: (out,) * len(results)

    torch._dynamo.reset()
    torch.compile(
        lambda a, b, out: progress.progress_matmul(a, b, words, 0, status=status, out=out),
        backend=keep,
    )(a, b, out)
    assert any("progress_matmul" in node for node in nodes) == CHOSEN[problem]
    assert any("matmul" in node for node in nodes)


def test_an_address_that_tma_cannot_take_is_multiplied_by_torch(
    progress, monkeypatch, on_hopper, device
):
    monkeypatch.setattr(progress.ops, "progress_matmul", None)
    flat = torch.ones(16 * 16 + 1, dtype=torch.float16, device=device)
    _, b, _ = halves(device, 16, 16, 24, torch.float16)
    words = torch.ones(2, dtype=torch.uint32, device=device)
    product = progress.progress_matmul(flat[1:].view(16, 16), b, words, 0)
    assert torch.equal(product, torch.full_like(product, 16))


def test_autograd_is_told_that_out_was_written(progress, monkeypatch, on_hopper, device):
    monkeypatch.setattr(progress.ops, "progress_matmul", lambda *_: None)
    a, b, out = halves(device, 16, 16, 24, torch.float16)
    words = torch.ones(2, dtype=torch.uint32, device=device)
    status = torch.zeros(1, dtype=torch.int32, device=device)
    version = out._version
    progress.progress_matmul(a, b, words, 0, status=status, out=out)
    assert out._version == version + 1
