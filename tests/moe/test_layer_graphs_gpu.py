"""A layer whose launches are played as nodes of CUDA graphs, from the third play of a plan on."""

import threading

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from .._compare import capture
from ._eager import LayerProblem, compare, step

pytestmark = pytest.mark.gpu

SIZES = {"top_k": 2, "experts": 8, "hidden": 256, "intermediate": 128, "dtype": torch.bfloat16}
PLAYS = 5  # two of single launches, one that makes the graphs, two that change their arguments


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
            for _ in range(25):
                found[place].append(step(layer, *inputs[place]))

    threads = [threading.Thread(target=run, args=(place,)) for place in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    torch.cuda.synchronize()
    for results, wanted in zip(found, expected, strict=True):
        assert len(results) == 25
        for one in results:
            compare(one, wanted)


def test_graphs_of_many_shapes_are_let_go_in_flight(moe, device, launched) -> None:
    """80 numbers of tokens, of which 32 may have graphs forward and back."""
    layer, kept = LayerProblem(tokens=1, **SIZES).module(moe, device), []
    for tokens in range(401, 481):
        arguments = drawn(LayerProblem(tokens=tokens, **SIZES), device, tokens)
        for _ in range(PLAYS - 1):
            found = step(layer, *arguments)
        kept.append((arguments, found))
    torch.cuda.synchronize()
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
