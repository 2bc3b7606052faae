"""Launch plans: what a recording takes down, played again in Python on other addresses."""

from __future__ import annotations

import ctypes
import random
import struct
import types
from unittest import mock

import pytest
import torch

from ...conftest import module_fixture

plans = module_fixture("kernels.launch.launch_plan")
memory = module_fixture("kernels.launch.plan_memory")

ALLOCATE, FREE, WAIT, LAUNCH = range(4)
LOADED = ("function", "threads", "shared")
DTYPES = {6: torch.float32, 7: torch.float64, 0: torch.uint8, 4: torch.int64}


class Stream:
    """Stands for a CUDA stream."""

    def __init__(self, handle: int, device: str = "cpu", priority: int = 0) -> None:
        self.cuda_stream, self.device, self.priority = handle, device, priority

    def wait_stream(self, other: Stream) -> None:
        """All runs in order here."""


FIRST, SECOND = Stream(11), Stream(12)


@pytest.fixture
def current(monkeypatch):
    """The current stream, which a test may exchange."""
    holder = types.SimpleNamespace(stream=FIRST)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: holder.stream)
    return holder


class Kernel:
    """out = scale (a + b) of n floats, at bare addresses; looks like a kernel of triton.jit."""

    function, threads, shared = 77, 128, 512
    params = tuple(
        types.SimpleNamespace(name=name, is_constexpr=name == "BLOCK", do_not_specialize=False)
        for name in ("a", "b", "out", "n", "one", "scale", "BLOCK")
    )
    __name__ = "add"

    def __init__(self, *, fails: bool = False) -> None:
        self.fails = fails

    def __getitem__(self, grid):
        def run(a, b, out, n, one, scale, BLOCK, launch_pdl=False):
            self.at(a.data_ptr(), b.data_ptr(), out.data_ptr(), n, scale)

        return run

    @staticmethod
    def at(a: int, b: int, out: int, n: int, scale: float) -> None:
        floats = ctypes.c_float * n
        left, right = floats.from_address(a), floats.from_address(b)
        values = [scale * (x + y) for x, y in zip(left, right, strict=True)]
        floats.from_address(out)[:] = values


def play(program: list[int], operands: list[torch.Tensor]) -> list[torch.Tensor]:
    """What the op does with a program, for `Kernel`."""
    numbers = iter(program)
    take = numbers.__next__
    take()  # how many streams there are beside the current one
    shapes = []
    for _ in range(take()):
        dtype, dims = DTYPES[take()], take()
        sizes, strides = ([take() for _ in range(dims)] for _ in range(2))
        shapes.append((dtype, sizes, strides))
    kept = [take() for _ in range(take())]
    made: dict[int, torch.Tensor] = {}
    for _ in range(take()):
        kind = take()
        if kind == ALLOCATE:
            index = take()
            dtype, sizes, strides = shapes[index]
            made[index] = torch.empty_strided(sizes, strides, dtype=dtype)
            made[index].view(torch.uint8).fill_(255) if dtype == torch.uint8 else None
        elif kind == FREE:
            index = take()
            made[index].fill_(171)  # whoever reads it later sees nonsense
        elif kind == WAIT:
            take(), take()
        else:
            assert kind == LAUNCH
            _, *loaded, _, _, _, _, count = (take() for _ in range(9))
            assert loaded == [Kernel.function, Kernel.threads, Kernel.shared]
            values = []
            for _ in range(count):
                base, value = take(), take()
                if base >= len(operands):
                    value += made[base - len(operands)].data_ptr()
                elif base >= 0:
                    value += operands[base].data_ptr()
                values.append(value)
            a, b, out, n, scale, *scratch = values
            assert scratch == [0, 0]
            Kernel.at(a, b, out, n, struct.unpack("<fi", struct.pack("<q", scale))[0])
    assert next(numbers, None) is None
    return [made[index] for index in kept]


@pytest.fixture(autouse=True)
def compiler(plans, monkeypatch):
    """Compiles a `Kernel`, or fails; a list of what it was asked for."""
    asked = []

    def loaded(kernel):
        if kernel.fails:
            raise RuntimeError("no such instruction")
        return types.SimpleNamespace(**{name: getattr(kernel, name) for name in LOADED})

    def compile_kernel(kernel, found, options, device):
        asked.append((found.signature, options))
        return types.SimpleNamespace(loaded=lambda: loaded(kernel))

    monkeypatch.setattr(plans, "compile_kernel", compile_kernel)
    return asked


def record(plans, function, operands):
    """The recording of a call, stand-ins of its results, and its program."""
    recording = plans.Recording(operands)
    with recording.on():
        results = function(plans.launch, *operands)
    return recording, results, recording.program(results)


def drawn(*sizes: int) -> list[torch.Tensor]:
    return [torch.randn(size) for size in sizes]


def added(picked=lambda x, y: (x, y), n: int = 8, scale: float = 1.0):
    """One launch over what is picked of two operands."""

    def run(launch, x, y):
        out = torch.empty(8)
        launch(Kernel(), (1,))(*picked(x, y), out, n, 1, scale, BLOCK=64)
        return [out]

    return run


def chain(kernel, **options):
    """Four launches with two temporary tensors, the second of them in the first one's place."""

    def run(launch, x, y):
        add = launch(kernel, (3, 2))
        first = torch.empty(8)
        add(x[2:], y, first, 8, 1, 0.5, BLOCK=64, **options)
        second = x.new_empty(2, 4)
        add(first, y, second, 8, 1, 2.0, BLOCK=64, **options)
        out = torch.empty_like(second.T)
        launch(kernel, (1,))(second, second, out, 8, 1, 1.0, BLOCK=64, **options)
        kept = torch.empty(8)
        add(out, first, kept, 8, 1, 1.0, BLOCK=64, **options)
        return [out.T, kept]

    return run


@pytest.mark.parametrize("early", [False, True])
def test_played_on_other_addresses(plans, current, early) -> None:
    function = chain(Kernel(), launch_pdl=early)
    _, results, program = record(plans, function, drawn(10, 8))
    assert [tuple(x.shape) for x in results] == [(2, 4), (8,)]
    for _ in range(3):
        operands = drawn(10, 8)
        expected = function(lambda kernel, grid: kernel[grid], *operands)
        for one, other in zip(play(program, operands), expected, strict=True):
            assert one.shape == other.shape and one.stride() == other.stride()
            assert torch.equal(one, other)


def test_results_in_one_tensor(plans, current) -> None:
    """All but the first, each at an address that is as divisible as one of its own."""

    def run(launch, x, y):
        add, out = launch(Kernel(), (1,)), [torch.empty(8) for _ in range(4)]
        for n, one in enumerate(out):
            add(x, out[n - 1] if n else y, one, 8, 1, 1.0, BLOCK=64)
        return [out[1], out[3], torch.empty(0), out[0].view(2, 4).T]

    recording = plans.Recording(operands := drawn(8, 8))
    with recording.on():
        results = run(plans.launch, *operands)
    program = recording.program(results, True)
    described = [(x.shape, x.stride(), x.dtype) for x in results[1:]]
    expected = run(lambda kernel, grid: kernel[grid], *operands)
    first, joined = play(program, operands)
    assert torch.equal(first, expected[0]) and joined.shape == (2 * 512,)
    for one, other in zip(plans.apart(joined, described), expected[1:], strict=True):
        assert one.stride() == other.stride() and torch.equal(one, other)


def test_what_cannot_be_played_comes_as_the_function_gives_it(plans, current, monkeypatch) -> None:
    """Results that no plan joined are not copied into one tensor."""
    x, kept = torch.randn(4), [torch.randn(4), torch.randn(2)]
    monkeypatch.setattr(plans, "_plays", lambda _: True)
    unplayed = types.SimpleNamespace(launch_plan=lambda *_: [], nf4_product=plans.ops.nf4_product)
    monkeypatch.setattr(plans, "ops", unplayed)
    monkeypatch.setattr(plans, "_refused", refused := set())
    found = plans.replayed("a function", lambda x: [x + 1, *kept], [x], (), joins=True)
    assert refused, "it is computed by torch"
    assert found[1] is kept[0] and found[2] is kept[1]


@pytest.mark.sees_defect(
    "a second stream is as urgent as any",
    "    return torch.cuda.Stream(first.device, priority=priority)\n",
    "    return torch.cuda.Stream(first.device)\n",
)
def test_a_second_stream_is_as_urgent_as_the_first(plans, current, monkeypatch) -> None:
    made = []

    def stream(device, priority=0) -> Stream:
        made.append(Stream(100 + len(made), device, priority))
        return made[-1]

    monkeypatch.setattr(torch.cuda, "Stream", stream)
    x = types.SimpleNamespace(is_cuda=True, device="cuda:0")
    usual, urgent = Stream(1, x.device), Stream(2, x.device, -3)
    found = []
    for current.stream in (usual, urgent, usual):
        with plans.beside(x) as streams:
            found.append(streams.second)
    assert found == [made[0], made[1], made[0]]
    assert [one.priority for one in made] == [0, -3]


@pytest.mark.sees_defect(
    "what one stream writes shares memory with what another reads",
    "        in_order = self.stream is not None and self.stream == other.stream\n",
    "        in_order = True\n",
)
def test_two_streams_keep_their_memory_until_they_meet(plans, current, monkeypatch) -> None:
    kernel = Kernel()
    monkeypatch.setattr(plans, "_second", lambda *_: SECOND)

    def run(launch, x, y):
        before, beside, out = torch.empty(8), torch.empty(8), torch.empty(8)
        launch(kernel, (1,))(x, y, before, 8, 1, 1.0, BLOCK=64)
        with plans.beside(types.SimpleNamespace(is_cuda=True, device="cuda:0")):
            current.stream = SECOND
            launch(kernel, (1,))(x, y, beside, 8, 1, 1.0, BLOCK=64)
            current.stream = FIRST
            other = torch.empty(8)
            launch(kernel, (1,))(x, x, other, 8, 1, 1.0, BLOCK=64)
        launch(kernel, (1,))(other, before, out, 8, 1, 1.0, BLOCK=64)
        return [out]

    recording, _, program = record(plans, run, drawn(8, 8))
    assert program[0] == 1, "one stream beside the current one"
    operands = drawn(8, 8)
    (out,) = play(program, operands)
    assert torch.equal(out, operands[0] * 2 + (operands[0] + operands[1]))
    before, beside, _, other = (plans.Span(32, *recording._uses()[n]) for n in range(4))
    assert beside.stream == 1 and beside.region == (1, 4), "from the beginning until they met"
    assert beside.meets(other) and before.meets(beside), "what the first one writes meanwhile"


@pytest.mark.sees_defect(
    "an early launch may write what its predecessor reads",
    "                ends[at] = ends[following]  #",
    "                pass  #",
)
def test_an_early_launch_writes_nowhere_its_predecessor_reads(plans, current) -> None:
    def run(launch, x, y):
        first, second, out = torch.empty(8), torch.empty(8), torch.empty(8)
        launch(Kernel(), (1,))(x, y, first, 8, 1, 1.0, BLOCK=64)
        launch(Kernel(), (1,))(first, y, out, 8, 1, 1.0, BLOCK=64)
        launch(Kernel(), (1,))(x, y, second, 8, 1, 1.0, BLOCK=64, launch_pdl=True)
        launch(Kernel(), (1,))(second, y, out, 8, 1, 1.0, BLOCK=64)
        return [out]

    recording, _, _ = record(plans, run, drawn(8, 8))
    first, second = (plans.Span(32, *recording._uses()[n]) for n in (0, 1))
    assert first.steps == (0, 2) and second.steps[0] == 2
    assert first.meets(second), "they must not share a place"


def test_places_never_overlap(memory) -> None:
    source = random.Random(0)
    for _ in range(300):
        spans = {}
        for index in range(source.randint(1, 12)):
            begin = source.randint(0, 10)
            steps = (begin, begin + source.randint(0, 5))
            region = (steps[0] - source.randint(0, 2), steps[1] + source.randint(0, 2))
            stream = source.choice((0, 1, None))
            spans[index] = memory.Span(source.randint(1, 5000), steps, region, stream)
        offsets = memory.packed(spans)
        size = max(offsets[n] + span.bytes for n, span in spans.items())
        assert all(offset % 512 == 0 for offset in offsets.values())
        assert size <= sum(-(-span.bytes // 512) * 512 for span in spans.values())
        for one, span in spans.items():
            for other in range(one):
                beside = spans[other]
                if span.stream == beside.stream and span.stream is not None:
                    together = together_in(span.steps, beside.steps)
                else:
                    together = together_in(span.region, beside.region)
                assert together == span.meets(beside)
                if together:
                    low, high = sorted((one, other), key=offsets.__getitem__)
                    assert offsets[low] + spans[low].bytes <= offsets[high]


def together_in(one: tuple[int, int], other: tuple[int, int]) -> bool:
    return not set(range(one[0], one[1] + 1)).isdisjoint(range(other[0], other[1] + 1))


def test_a_result_in_float64(plans, current) -> None:
    """As the gradient of a router's weights in float64 is."""

    def run(launch, x, y):
        out = torch.empty(8, dtype=torch.float64)
        launch(Kernel(), (1,))(x, y, out.view(torch.float32)[:8], 8, 1, 1.0, BLOCK=64)
        return [out]

    x, y = drawn(8, 8)
    _, _, program = record(plans, run, [x, y])
    (found,) = play(program, [x, y])
    assert found.dtype == torch.float64
    assert torch.equal(found.view(torch.float32)[:8], x + y)


def test_an_empty_grid_launches_nothing(plans, current) -> None:
    """As Triton has it; the driver refuses such a launch."""

    def run(launch, x, y):
        out = torch.empty(8)
        launch(Kernel(), (0, 3))(x, y, out, 0, 1, 1.0, BLOCK=64)
        launch(Kernel(), (1,))(x, y, out, 8, 1, 1.0, BLOCK=64)
        return [out]

    recording, _, program = record(plans, run, drawn(8, 8))
    assert len(recording._steps) == 1
    assert play(program, drawn(8, 8))[0].shape == (8,)


STRANGER, WHOLE = torch.randn(8), torch.randn(16)


@pytest.mark.parametrize(
    ("reason", "function", "operands"),
    [
        ("computed by torch", lambda launch, x, y: [x + y], ()),
        ("not what was allocated", lambda launch, x, y: [x], ()),
        ("not what was allocated", lambda launch, x, y: [torch.empty(8)[:4]], ()),
        ("share their memory", lambda launch, x, y: [out := torch.empty(8), out], ()),
        ("memory of|result is of", lambda *_: [torch.empty(8, dtype=torch.complex64)], ()),
        ("no such instruction", chain(Kernel(fails=True)), drawn(10, 8)),
        ("none of the operands", added(lambda x, _: (x, STRANGER)), ()),
        ("in several", added(lambda x, y: (x[2:], y[2:]), n=6), (WHOLE, WHOLE[1:])),
    ],
)
def test_refusals(plans, current, reason, function, operands) -> None:
    """Also of a kernel that does not compile, and of an address of no operand or of two."""
    with pytest.raises(plans._NotPlayableError, match=reason):
        record(plans, function, [*operands] or drawn(8, 8))


@pytest.mark.sees_defect(
    "a copy by torch passes as a view",
    "        if not _is_view(func, args, kwargs):\n",
    "        if not func.is_view:\n",
)
def test_a_copy_is_no_view(plans, current) -> None:
    """Below autograd, ops that copy only where they must reach a recording undecomposed."""
    run = added(lambda x, y: (x.contiguous(), y.reshape(-1)))
    with torch.inference_mode():
        record(plans, run, drawn(8, 8))  # these are views
        for operands in ([torch.randn(8, 2)[:, 0], *drawn(8)], [*drawn(8), torch.randn(4, 2).T]):
            with pytest.raises(plans._NotPlayableError, match="computed by torch"):
                record(plans, run, operands)


def test_a_variant_without_the_op_plays_nothing(plans, submodule, device) -> None:
    """That for CPUs computes on a GPU by torch and by Triton."""
    there = torch.device("cuda", 0)
    assert plans._plays(there) == (device.type == "cuda")
    assert submodule("tensor_parallel.sharded_newton_schulz")._by_triton(there) == (
        device.type == "cuda"
    )


def test_memory_in_two_pieces_where_one_would_keep_too_much(
    plans, memory, current, monkeypatch
) -> None:
    """A large result that comes when all temporary tensors but a small one are gone."""

    def run(launch, x, y):
        add = launch(Kernel(), (1,))
        first, second = torch.empty(8192), torch.empty(8192)
        add(x, y, first, 8192, 1, 1.0, BLOCK=64)
        add(first, y, second, 8192, 1, 1.0, BLOCK=64)
        small = torch.empty(8)
        add(second, second, small, 8, 1, 1.0, BLOCK=64)
        out = torch.empty(16384)
        add(small, small, out, 8, 1, 1.0, BLOCK=64)
        return [out]

    for slack, buffers in ((2**20, 2), (0, 3)):
        monkeypatch.setattr(memory, "_SLACK", slack)
        _, _, program = record(plans, run, drawn(8192, 8192))
        assert program[:2] == [0, buffers]
        operands = drawn(8192, 8192)
        (out,) = play(program, operands)
        (expected,) = run(lambda kernel, grid: kernel[grid], *operands)
        assert torch.equal(out[:8], expected[:8])


def test_memory_that_runs_out_is_torchs_own_error(plans, monkeypatch) -> None:
    failed = RuntimeError("aoti_torch_empty_strided(...) API call failed at launch_plan.cu")
    function = mock.Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory."))
    monkeypatch.setattr(plans, "_plays", lambda _: True)
    monkeypatch.setattr(plans, "ops", mock.Mock(**{"launch_plan.side_effect": failed}))
    with pytest.raises(torch.OutOfMemoryError):
        plans.replayed("a function", function, [torch.randn(4)], ())


def test_nothing_is_computed_while_recording(plans, current, compiler) -> None:
    """Results are stand-ins, with an address at which nothing is; `prepare` gives them, too."""

    class Unlaunchable(Kernel):
        def __getitem__(self, grid):
            raise AssertionError("launched")

    def function(x, y, scale):
        return chain(Unlaunchable())(plans.launch, x, y)

    kind = (torch.float32, torch.device("cpu"))
    found = plans.prepare(function, drawn(10, 8), (1.0,))
    assert [tuple(x.shape) for x in found] == [(2, 4), (8,)]
    assert len({x.untyped_storage().data_ptr() for x in found}) == 2
    assert all(x.data_ptr() >= 1 << 60 for x in found)
    assert [signature["one"] for signature, _ in compiler] == ["constexpr"] * 4
    again = plans.prepare(function, [plans.stand_in((10,), (1,), *kind), found[1]], (1.0,))
    assert again is not None and len(compiler) == 8, "stand-ins may be operands"
    assert plans.prepare(lambda x: [x + 1], drawn(3), ()) is None


def test_a_tensor_given_twice_is_one_address(plans, current) -> None:
    x = torch.randn(8)
    _, _, program = record(plans, added(), [x, x])
    other = torch.randn(8)
    assert torch.equal(play(program, [other, other])[0], 2 * other)
