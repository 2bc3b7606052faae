"""push and signals on any device: what they copy and write, what they refuse, when they give up."""

import functools
import threading
import time

import pytest
import torch

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64)


def drawn(shape: tuple[int, ...], dtype: torch.dtype, device) -> torch.Tensor:
    return torch.randint(0, 100, shape, device=device).to(dtype)


# How a pair lies in memory: (destination, source) of one shape inside larger tensors.
PAIRS = {
    "contiguous": lambda new: (new(6, 10), new(6, 10)),
    "rows of more columns": lambda new: (new(6, 30)[:, 7:17], new(6, 10)),
    "into rows": lambda new: (new(6, 10), new(6, 12)[:, :10]),
    "columns on both sides": lambda new: (new(6, 11)[:, 1:], new(6, 30)[:, 20:]),
    "both transposed": lambda new: (new(10, 6).mT, new(10, 8)[:, 2:].mT),
    "planes of experts": lambda new: (new(4, 6, 10)[:, :3], new(4, 3, 10)),
    "every second element": lambda new: (new(40)[::2], new(20)),
    "one row": lambda new: (new(8, 10)[3:4], new(1, 10)),
    "one column": lambda new: (new(8, 10)[:, 3:4], new(8, 1)),
    "a number": lambda new: (new(5)[2], new(3)[0]),
    "nothing": lambda new: (new(0, 10), new(0, 10)),
    "nothing of many strides": lambda new: (new(3, 4, 0, 5).permute(2, 0, 3, 1), new(0, 3, 5, 4)),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_push_copies_every_pair(push, device, dtype):
    pairs = [make(lambda *shape: drawn(shape, dtype, device)) for make in PAIRS.values()]
    whole = [(dst if dst._base is None else dst._base).clone() for dst, _ in pairs]
    push([], [])
    push([dst for dst, _ in pairs], [src for _, src in pairs])
    for before, (dst, src) in zip(whole, pairs, strict=True):
        before.as_strided(dst.size(), dst.stride(), dst.storage_offset()).copy_(src)
        assert torch.equal(dst if dst._base is None else dst._base, before)


REFUSED = {  # why, and lists of destinations and sources
    "give one per copy": lambda new: ([new(2)] * 2, [new(2)]),
    "dsts has 0 entries": lambda new: ([], [new(2)]),
    r"dsts\[0\] must be a dense tensor": lambda new: ([3], [new(2)]),
    r"srcs\[0\] must be a dense tensor": lambda new: ([new(2)], [None]),
    "convert the source first": lambda new: ([new(2)], [new(2).half()]),
    "they must be equal": lambda new: ([new(2)], [new(3)]),
    "make them contiguous": lambda new: ([new(4, 6)], [new(6, 4).mT]),
    "no rows at equal distances": lambda new: ([new(3, 4)], [new(4).expand(3, 4)]),
    "are no rows": lambda new: ([new(2, 3, 4)], [new(2, 5, 7)[:, :3, :4]]),
}


@pytest.mark.parametrize("why", REFUSED)
def test_push_refuses_and_copies_nothing(push, device, why):
    dsts, srcs = REFUSED[why](functools.partial(torch.zeros, device=device))
    good = torch.zeros(2, device=device)
    if len(dsts) == len(srcs):
        dsts, srcs = [good, *dsts], [torch.ones(2, device=device), *srcs]
        why = why.replace("[0", "[1")
    with pytest.raises((TypeError, ValueError), match=why):
        push(dsts, srcs)
    assert not good.any()


@pytest.mark.parametrize(
    ("blocks", "error"), ((1.5, TypeError), (True, TypeError), (-1, ValueError))
)
def test_push_refuses_numbers_of_blocks(push, device, blocks, error):
    good = torch.zeros(2, device=device)
    with pytest.raises(error, match="blocks must be"):
        push([good], [torch.ones(2, device=device)], blocks=blocks)
    assert not good.any()
    push([good], [torch.ones(2, device=device)], blocks=3)
    assert good.all()


class On(torch.Tensor):
    """A tensor that says that it is on a GPU of this number."""

    number = 0

    @property
    def device(self) -> torch.device:
        return torch.device("cuda", self.number)


def test_push_refuses_another_device(push, dispatch, monkeypatch):
    """Streams order tensors of one device; a peer's memory is a tensor of this one."""
    monkeypatch.setattr(dispatch, "runs_compiled", lambda *_: False)
    here, there = (torch.zeros(3).as_subclass(On) for _ in range(2))
    there.number = 1
    for dsts, srcs in (([there], [here]), ([here, here], [here, there])):
        with pytest.raises(ValueError, match="all must be on one"):
            push(dsts, srcs)


def test_push_tells_autograd_what_it_wrote(push, device):
    x = torch.ones(3, device=device, requires_grad=True)
    held = torch.ones(3, device=device)
    y = (x * held).sum()
    push([held], [torch.zeros(3, device=device)])
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward()


@pytest.fixture
def words(device):
    return torch.arange(8, device=device, dtype=torch.int32).view(torch.uint32)


def read(words: torch.Tensor) -> list[int]:
    return words.cpu().tolist()


def test_memset32_and_stream_write_value32(signals, words):
    signals.memset32(words, 2, 2**32 - 1, 3)
    signals.stream_write_value32(words, 7, 2**31)
    signals.memset32(words, 8, 5, 0)
    assert read(words) == [0, 1, 2**32 - 1, 2**32 - 1, 2**32 - 1, 5, 6, 2**31]


WRONG = [  # function, what is passed beside the words, error, words of its message
    ("memset32", (7, 0, 2), ValueError, "words 7 to 9 lie outside of t, which has 8"),
    ("memset32", (0, 0, -1), ValueError, "lie outside"),
    ("memset32", (-1, 0, 1), ValueError, "lie outside"),
    ("memset32", (0, 2**32, 1), ValueError, "modulo 2"),
    ("memset32", (0, 1.0, 1), TypeError, "value must be an integer"),
    ("memset32", (True, 1, 1), TypeError, "offset must be an integer"),
    ("stream_write_value32", (8, 0), ValueError, "lie outside"),
    ("stream_write_value32", (0, -1), ValueError, "must be in"),
]


@pytest.mark.parametrize(("name", "arguments", "error", "message"), WRONG)
def test_writes_are_bounds_checked(signals, words, name, arguments, error, message):
    with pytest.raises(error, match=message):
        getattr(signals, name)(words, *arguments)
    assert read(words) == list(range(8))


def test_writes_want_flat_contiguous_uint32(signals, device):
    words = torch.zeros(4, 2, device=device, dtype=torch.int32)
    with pytest.raises(TypeError, match="t must have dtype uint32"):
        signals.memset32(words[0], 0, 1, 1)
    words = words.view(torch.uint32)
    with pytest.raises(ValueError, match="1 dimensions"):
        signals.memset32(words, 0, 1, 1)
    with pytest.raises(ValueError, match="t must be contiguous"):
        signals.stream_write_value32(words[:, 0], 0, 1)


@pytest.fixture
def status(device):
    return torch.zeros(1, dtype=torch.int32, device=device)


@pytest.mark.parametrize(("word", "epoch", "there"), [
    (5, 5, True), (6, 5, True), (4, 5, False), (0, 2**32 - 1, True), (2**32 - 1, 0, False),
    (2**31 + 4, 5, True), (2**31 + 5, 5, False),
])  # fmt: skip
def test_a_word_reaches_an_epoch_modulo_2_32(signals, words, status, word, epoch, there):
    signals.memset32(words, 0, epoch, 8)
    signals.stream_write_value32(words, 3, word)
    signals.wait_signals(words, epoch, 20, status)
    assert status.item() == (0 if there else 4)


def test_the_first_late_word_is_named_after_the_timeout(signals, words, status):
    began = time.monotonic()
    signals.wait_signals(words, 3, 60, status)
    assert status.item() == 1 and time.monotonic() - began > 0.05
    signals.wait_signals(words[2:], 4, 60_000, status)  # the status is set: it does not wait
    assert status.item() == 1
    status.zero_()
    signals.wait_signals(words[3:], 3, 60_000, status)
    assert status.item() == 0 and time.monotonic() - began < 30
    signals.wait_signals(words[:0], 3, 0, status)
    assert status.item() == 0


@pytest.mark.parametrize("late", ((40, 9, 33), (63, 31), (95, 64, 32), (2, 1)), ids=str)
def test_of_several_late_words_the_first_is_named(signals, device, status, late):
    """On CUDA lane l of a warp looks at words l, l + 32 and so on."""
    words = torch.zeros(96, dtype=torch.uint32, device=device)
    signals.memset32(words, 0, 1, 96)
    for i in late:
        signals.memset32(words, i, 0, 1)
    for _ in range(3):
        signals.wait_signals(words, 1, 10, status)
        assert status.item() == min(late) + 1
        status.zero_()


def test_a_word_that_comes_meanwhile_ends_the_wait(signals, device, status):
    words = torch.zeros(2, dtype=torch.uint32, device=device)
    signals.stream_write_value32(words, 0, 1)
    other = torch.cuda.Stream() if device.type == "cuda" else None

    def write():
        with torch.cuda.stream(other):
            signals.stream_write_value32(words, 1, 1)

    timer = threading.Timer(0.05, write)
    timer.start()
    signals.wait_signals(words, 1, 10_000, status)
    assert status.item() == 0 and read(words) == [1, 1]
    timer.join()


def test_next_and_clear(signals, words, status, device):
    """A wait that succeeds hands out the next epoch, one that gives up leaves zeros."""
    epoch = torch.zeros(1, dtype=torch.uint32, device=device)
    for size in (0, 1, 15, 16, 17, 1000, 4099):
        data = torch.ones(size + 1, dtype=torch.uint8, device=device)
        for slot in (data[:size], data[1:]):
            signals.memset32(words, 0, 7, 8)
            signals.memset32(epoch, 0, 7, 1)
            signals.wait_signals(words, epoch, 1000, status, next=epoch, clear=[slot])
            assert read(epoch) == [8] and slot.all() and status.item() == 0
            signals.wait_signals(words, epoch, 1, status, next=epoch, clear=[slot])
            assert read(epoch) == [8] and not slot.any() and status.item() == 1
            assert data.sum() == 1
            slot.fill_(1)
            signals.wait_signals(words, 7, 60_000, status, next=epoch, clear=[slot])
            assert read(epoch) == [8] and not slot.any() and status.item() == 1
            status.zero_()
            slot.fill_(1)
    several = torch.ones(64, 3, dtype=torch.uint8, device=device)
    signals.wait_signals(words, 7, 1000, status, clear=[*several])
    assert several.all() and status.item() == 0
    signals.wait_signals(words, 8, 1, status, clear=[*several[1:]])
    assert several[0].all() and not several[1:].any() and status.item() == 1
    status.zero_()
    signals.memset32(words, 0, 2**32 - 1, 8)
    signals.wait_signals(words, 2**32 - 1, 1000, status, next=epoch)
    assert read(epoch) == [0]


WAITS = {  # what is said: what of (flags, value, timeout_ms, status) or of the options is another
    TypeError: {
        "flags must have dtype uint32": {"flags": lambda w: w.view(torch.int32)},
        "status must have dtype int32": {"status": lambda w: w[:1]},
        "timeout_ms must be an integer": {"timeout_ms": 0.5},
        "value must have dtype uint32": {"value": lambda w: w[:1].view(torch.int32)},
    },
    ValueError: {
        "flags must be contiguous": {"flags": lambda w: w[::2]},
        r"status must have shape \(1,\)": {"status": lambda w: w[:2].view(torch.int32)},
        "timeout_ms must be in": {"timeout_ms": -1},
        "value must be in": {"value": 2**32},
        r"clear\[0\] must be contiguous uint8": {"clear": lambda w: [w]},
        "clear may have at most 64 .* got 65": {"clear": lambda w: [w.view(torch.uint8)] * 65},
        r"next must have shape \(1,\)": {"next": lambda w: w},
    },
}


@pytest.mark.parametrize(("error", "said"), [(e, said) for e in WAITS for said in WAITS[e]])
def test_waits_are_checked(signals, words, status, error, said):
    given = {"flags": words, "value": 1, "timeout_ms": 1, "status": status} | WAITS[error][said]
    given = {name: x(words) if callable(x) else x for name, x in given.items()}
    positional = [given.pop(name) for name in ("flags", "value", "timeout_ms", "status")]
    with pytest.raises(error, match=said):
        signals.wait_signals(*positional, **given)
    if words.is_cuda:
        with pytest.raises(ValueError, match="or in pinned memory"):
            signals.wait_signals(words, 1, 1, status.cpu())
    assert status.item() == 0
