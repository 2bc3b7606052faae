"""A layer whose launches are played as nodes of CUDA graphs, from the third play of a plan on."""

import contextlib
import ctypes
import threading
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from .._compare import assert_same_bits, capture
from ._eager import LayerProblem, compare, step

pytestmark = pytest.mark.gpu

SIZES = {"top_k": 2, "experts": 8, "hidden": 256, "intermediate": 128, "dtype": torch.bfloat16}
PLAYS = 5  # two of single launches, one that makes the graphs, two that change their arguments
MOVE = 32  # plays elsewhere that the graphs of a plan stay where they are for, kMove
LONG = 1 << 10  # kLong and kRetry of kernels-src/launch, in calls and in plays
HALF_A_SECOND = 10**9  # cycles of an H200


def drawn(problem, device, seed: int) -> tuple:
    (x, gates, grad), ids = problem.inputs(device, seed), problem.ids(device, seed)
    return x, ids, gates, grad


def warm(problem, moe, device):
    """A module whose plans were played often enough."""
    layer = problem.module(moe, device)
    for seed in range(PLAYS):
        step(layer, *drawn(problem, device, seed))
    return layer


def launches(run) -> tuple[int, int]:
    """How many graphs and kernels the op launches meanwhile; torch's own have another name."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        run()
        torch.cuda.synchronize()
    names = [event.name() for event in found.profiler.kineto_results.events()]
    return names.count("cudaGraphLaunch"), names.count("cuLaunchKernelEx")


@pytest.fixture
def room(moe, device) -> None:
    """Graphs of other tests' plans make room, as these have been unused for long."""
    problem = LayerProblem(tokens=1, **SIZES)
    layer, (x, ids, gates, _) = problem.module(moe, device), drawn(problem, device, 0)
    with torch.no_grad():
        for _ in range(LONG + PLAYS):
            layer(x, ids, gates)


@contextlib.contextmanager
def no_memory_left() -> Iterator[None]:
    """Outside of torch's pool: the driver gave all of it, in ever smaller pieces."""
    driver, held, size = ctypes.CDLL("libcuda.so.1"), [], 1 << 32
    try:
        while size >= 1 << 12:
            piece = ctypes.c_uint64()
            if driver.cuMemAlloc_v2(ctypes.byref(piece), ctypes.c_size_t(size)) == 0:
                held.append(piece)
            else:
                size //= 2
        yield
    finally:
        for piece in held:
            driver.cuMemFree_v2(piece)


def test_a_warm_layer_launches_graphs_alone(moe, device) -> None:
    """One forward and one back, or a few where memory is let go in between."""
    problem = LayerProblem(tokens=301, **SIZES)
    layer = problem.module(moe, device)
    arguments = drawn(problem, device, 0)
    graphs, kernels = launches(lambda: step(layer, *arguments))
    assert graphs == 0 and kernels > 15
    for _ in range(PLAYS):
        step(layer, *arguments)
    graphs, kernels = launches(lambda: step(layer, *arguments))
    assert 2 <= graphs <= 4 and kernels == 0


@pytest.mark.alone
def test_where_the_driver_has_no_memory_a_plan_plays_without_graphs(
    moe, device, submodule, launched, capfd
) -> None:
    """Many plans, as what the driver holds may do for the first ones; a warning says so once."""
    layer, cases = LayerProblem(tokens=1, **SIZES).module(moe, device), []
    for tokens in range(601, 625):
        arguments = drawn(LayerProblem(tokens=tokens, **SIZES), device, tokens)
        with launched():
            expected = step(layer, *arguments)
        for _ in range(2):
            compare(step(layer, *arguments), expected)
        cases.append((arguments, expected))
    submodule("kernels.launch.triton_compile").settle()  # kernels take memory, too
    sizes = (1 << 28, *[1 << 20] * 64)
    pool = [torch.empty(size, dtype=torch.uint8, device=device) for size in sizes]
    del pool  # large and small pieces, for torch to serve all that follows
    torch.cuda.synchronize()
    with no_memory_left(), warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        for arguments, expected in cases:
            for _ in range(3):
                compare(step(layer, *arguments), expected)
    arguments, expected = cases[-1]
    _, kernels = launches(lambda: step(layer, *arguments))
    assert kernels > 0, "the driver had memory for the last plan's graphs: nothing was tested"
    # torch hands it to Python in some calls of an op and writes it to stderr in others.
    said = "".join(str(one.message) for one in warned) + capfd.readouterr().err
    assert said.count("the CUDA driver gave no graph") == 1, said
    for _ in range(LONG + PLAYS):
        step(layer, *arguments)
    graphs, kernels = launches(lambda: compare(step(layer, *arguments), expected))
    assert graphs >= 2 and kernels == 0, "they are tried again, and there is memory"


@pytest.mark.parametrize("form", ({}, {"rank": 12, "rank_down": 1}, {"train_base": True}), ids=str)
def test_bits_of_many_plays(moe, device, launched, form) -> None:
    """Other addresses, another routing and changed parameters in each play."""
    problem = LayerProblem(tokens=302, **SIZES, **form)
    layer, kept = problem.module(moe, device), []
    for seed in range(PLAYS + 3):
        arguments = drawn(problem, device, seed)
        with torch.no_grad():
            for parameter in layer.parameters():
                parameter.mul_(1.01)
        with launched():
            expected = step(layer, *arguments)
        kept.append((step(layer, *arguments), expected))
    for found, expected in kept:
        compare(found, expected)


def test_a_capture_gets_the_launches_and_replays_them(moe, device, launched) -> None:
    problem = LayerProblem(tokens=303, **SIZES)
    layer, arguments = warm(problem, moe, device), drawn(problem, device, 0)
    graph, captured = capture(lambda: step(layer, *arguments), 1)
    other = drawn(problem, device, 9)
    with torch.no_grad():
        for into, value in zip(arguments, other, strict=True):
            into.copy_(value)
    with launched():
        expected = step(layer, *other)
    step(layer, *other)  # the plan's own graphs get other addresses meanwhile
    graph.replay()
    compare(captured, expected)


def test_threads_on_streams_of_their_own(moe, device, launched) -> None:
    """One plan, whose graphs one thread has at a time."""
    problem = LayerProblem(tokens=304, **SIZES)
    layer = warm(problem, moe, device)
    inputs = [drawn(problem, device, seed) for seed in range(4)]
    with launched():
        expected = [step(layer, *one) for one in inputs]
    torch.cuda.synchronize()
    found: list[list] = [[] for _ in inputs]

    def run(place: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for turn in range(25):
                found[place].append(step(layer, *inputs[(place + turn) % 4]))

    threads = [threading.Thread(target=run, args=(place,)) for place in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    torch.cuda.synchronize()
    for place, results in enumerate(found):
        assert len(results) == 25
        for turn, one in enumerate(results):
            compare(one, expected[(place + turn) % 4])


@pytest.mark.alone
def test_a_plan_on_two_streams_runs_beside_itself(moe, device, launched, room) -> None:
    """What waits on the graphs' stream holds up no other, of four: two may share a queue."""
    problem = LayerProblem(tokens=305, **SIZES)
    layer, inputs = problem.module(moe, device), [drawn(problem, device, n)[:3] for n in range(2)]
    with torch.no_grad(), launched():
        expected = [layer(*one) for one in inputs]
    torch.cuda.synchronize()
    first, *others = (torch.cuda.Stream() for _ in range(5))

    def on(stream: torch.cuda.Stream, place: int) -> torch.Tensor:
        with torch.no_grad(), torch.cuda.stream(stream):
            return layer(*inputs[place])

    def beside(stream: torch.cuda.Stream) -> bool:
        on(stream, 1)  # finds memory and a second stream
        torch.cuda.synchronize()
        with torch.cuda.stream(first):
            torch.cuda._sleep(HALF_A_SECOND)
        late, soon = on(first, 0), on(stream, 1)
        done = first.record_event()
        stream.synchronize()
        early = not done.query()
        assert_same_bits(soon, expected[1])
        done.synchronize()
        assert_same_bits(late, expected[0])
        return early

    for _ in range(PLAYS):
        on(first, 0)
    assert any(map(beside, others))
    graphs, kernels = launches(lambda: on(first, 0))
    assert graphs >= 1 and kernels == 0, "they were there all the time"


def test_graphs_follow_the_work_to_another_stream(moe, device, launched, room) -> None:
    """When many plays came there in a row; they are launched one by one until then."""
    problem = LayerProblem(tokens=306, **SIZES)
    layer = warm(problem, moe, device)
    torch.cuda.synchronize()

    def played(seed: int) -> tuple[int, int]:
        arguments, found = drawn(problem, device, seed), {}
        with launched():
            expected = step(layer, *arguments)
        counts = launches(lambda: found.update(step(layer, *arguments)))
        compare(found, expected)
        return counts

    with torch.cuda.stream(torch.cuda.Stream()):
        first = played(0)
        for seed in range(MOVE - 2):
            step(layer, *drawn(problem, device, seed))
        last, *later = map(played, range(4))
    for graphs, kernels in (first, last):
        assert graphs == 0 and kernels > 15
    for graphs, kernels in later:
        assert 2 <= graphs <= 4 and kernels == 0


def test_one_play_elsewhere_leaves_moved_graphs_where_they_are(moe, device, room) -> None:
    """The plays that moved them do not count for the way back."""
    problem = LayerProblem(tokens=307, **SIZES)
    layer, arguments = warm(problem, moe, device), drawn(problem, device, 0)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(MOVE + 1):  # the last one moves them
            step(layer, *arguments)
    torch.cuda.synchronize()
    graphs, kernels = launches(lambda: step(layer, *arguments))
    assert graphs == 0 and kernels > 15
    with torch.cuda.stream(stream):
        graphs, kernels = launches(lambda: step(layer, *arguments))
    assert graphs >= 2 and kernels == 0


def test_graphs_of_many_shapes_are_let_go_in_flight(moe, device, launched) -> None:
    """The first 32 have graphs, forward and back, until they have been unused for long."""
    layer, kept = LayerProblem(tokens=1, **SIZES).module(moe, device), []
    for tokens in range(401, 531):
        arguments = drawn(LayerProblem(tokens=tokens, **SIZES), device, tokens)
        for _ in range(PLAYS - 1):
            found = step(layer, *arguments)
        kept.append((arguments, found))
    graphs, kernels = launches(lambda: step(layer, *arguments))
    assert graphs >= 2 and kernels == 0, "the last one's are made in the room of others"
    with launched():
        for arguments, found in kept:
            compare(found, step(layer, *arguments))


def test_a_play_without_memory_leaves_the_plan_as_it_was(moe, device, launched) -> None:
    """The play that makes the graphs fails, and so does one that changes them."""
    problem = LayerProblem(tokens=1025, **SIZES)
    layer, arguments = problem.module(moe, device), drawn(problem, device, 0)
    with launched():
        expected = step(layer, *arguments)
    for _ in range(2):
        for _ in range(2):
            compare(step(layer, *arguments), expected)
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        held = []
        torch.cuda.set_per_process_memory_fraction(
            torch.cuda.memory_reserved(device) / torch.cuda.mem_get_info(device)[1], device
        )
        try:
            with pytest.raises(torch.OutOfMemoryError):
                while True:
                    held.append(step(layer, *arguments))
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        del held
        for _ in range(PLAYS):
            compare(step(layer, *arguments), expected)
