"""How results are compared, how a call fails, and how a GPU's graphs and waits are watched."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """||actual - expected||_F / ||expected||_F in float64; NaN anywhere gives NaN."""
    actual, expected = actual.double(), expected.double()
    return ((actual - expected).norm() / expected.norm().clamp_min(1e-300)).item()


def assert_error_at_most(actual: torch.Tensor, expected: torch.Tensor, budget: float) -> None:
    """Shape must match and the relative Frobenius error must not exceed `budget` (NaN fails)."""
    assert actual.shape == expected.shape, f"shape {actual.shape}, expected {expected.shape}"
    error = relative_error(actual, expected)
    assert error <= budget, f"relative error {error:.3e} exceeds {budget:.3e}"


def assert_same_bits(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Same shape, dtype and bytes; NaNs with equal payload count as equal, +0 and -0 do not."""
    assert (actual.shape, actual.dtype) == (expected.shape, expected.dtype), (
        f"{actual.shape} {actual.dtype}, expected {expected.shape} {expected.dtype}"
    )
    left = actual.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    right = expected.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    different = (left != right).sum().item()
    assert different == 0, f"{different} of {left.numel()} bytes differ"


def assert_all_same_bits(actual: Iterable[torch.Tensor], expected: Iterable[torch.Tensor]) -> None:
    """As many tensors on both sides, in pairs of the same bits."""
    for one, other in zip(actual, expected, strict=True):
        assert_same_bits(one, other)


def assert_same_numbers(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits, but that one NaN is as good as another: payloads differ between processors."""
    nan = expected.isnan()
    assert torch.equal(actual.isnan(), nan)
    assert_same_bits(actual.masked_fill(nan, 0), expected.masked_fill(nan, 0))


def assert_same_tensors(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor]
) -> None:
    """The same names, and under each of them the same bits."""
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert_same_bits(actual[name], tensor)


def fail_at(monkeypatch, place, name: str, number: int, error: BaseException) -> list[tuple]:
    """The function raises at that call; the list gets the arguments of every call."""
    real, calls = getattr(place, name), []

    def call(*arguments, **options):
        calls.append(arguments)
        if len(calls) == number:
            raise error
        return real(*arguments, **options)

    monkeypatch.setattr(place, name, call)
    return calls


def capture(call: Callable[[], Any], warm_up: int = 0) -> tuple[torch.cuda.CUDAGraph, Any]:
    """A graph of `call`, with what it returned, after so many calls on a stream of their own."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and warms the allocator up
        for _ in range(warm_up):
            call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    return graph, found


@contextlib.contextmanager
def no_waits() -> Iterator[None]:
    """Raises where the host waits for the device, by torch's own watch."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")
