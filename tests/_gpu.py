"""What tests on a GPU have in common: graphs that are captured, and steps that wait for nothing."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch


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
