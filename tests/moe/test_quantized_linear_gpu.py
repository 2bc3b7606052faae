"""What only a GPU shows of products over 4-bit experts: capture, and the two streams of slices."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from .._compare import assert_same_bits
from ._eager import Problem
from .test_quantized_linear import quantize, results, run

pytestmark = pytest.mark.gpu
PROBLEM = Problem(96, 4, 15, 256, 128, 16, dtype=torch.bfloat16, gates=True, bias=True)


def packed_experts(opt, submodule, monkeypatch, leaves, strategy):
    """4-bit experts (E, K, N), of which `chunked` decodes four at a time: an odd last slice."""
    both = (4 * PROBLEM.k * PROBLEM.n * 2,) * 2
    monkeypatch.setattr(submodule("moe.quantized.strategy"), "SLICE_BYTES", both)
    return quantize(opt, PROBLEM, leaves, strategy=strategy)[0].transpose(1, 2)


@pytest.mark.parametrize("strategy", ("chunked", "fused"))
def test_a_captured_step_follows_another_routing(opt, submodule, device, monkeypatch, strategy):
    """Capture forks to the second stream and joins it; the replay gives the bits of eager calls."""
    leaves, ids = PROBLEM.inputs(device), PROBLEM.ids(device)
    weight = packed_experts(opt, submodule, monkeypatch, leaves, strategy)
    grad = torch.randn(PROBLEM.grad_shape(), device=device).bfloat16()

    def step():
        return results(run(opt, PROBLEM, leaves, ids, weight), leaves, grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed, routing in enumerate(("one", "gap", "sentinels", "all-sentinels", "random")):
        ids.copy_(dataclasses.replace(PROBLEM, routing=routing).ids(device, seed))
        with torch.no_grad():
            leaves["x"].mul_(-1)
        expected = step()
        for value in captured.values():
            value.fill_(torch.nan)
        graph.replay()
        for name, value in expected.items():
            assert_same_bits(captured[name], value)


def test_slices_take_turns_over_two_streams(opt, submodule, device, monkeypatch):
    """And whatever follows on the current stream waits for both, though the second one is late."""
    leaves, ids = PROBLEM.inputs(device), PROBLEM.ids(device)
    weight = packed_experts(opt, submodule, monkeypatch, leaves, "chunked")
    expected = run(opt, PROBLEM, leaves, ids, weight).detach()
    kind = submodule("kernels.quant.formats").Blockwise4Bit
    decoder, used = kind.decoder, []

    def late(*arguments):
        decode = decoder(*arguments)

        def slowly(ids):
            used.append(torch.cuda.current_stream())
            if used[-1] != torch.cuda.default_stream():
                torch.cuda._sleep(20_000_000)
            return decode(ids)

        return slowly

    monkeypatch.setattr(kind, "decoder", late)
    found = run(opt, PROBLEM, leaves, ids, weight).detach()
    assert_same_bits(found, expected)
    assert len(used) == 4 and used[0] == used[2] != used[1] == used[3]
