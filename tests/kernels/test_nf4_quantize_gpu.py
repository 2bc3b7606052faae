"""nf4_quantize's CUDA kernel against bitsandbytes' own: equal to the bit."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_same_bits
from .test_nf4_quantize import BLOCKSIZES, DTYPES, QUANT_TYPES, SHAPES, draw, run

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("quant_type", QUANT_TYPES)
@pytest.mark.parametrize("blocksize", BLOCKSIZES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bits_of_bitsandbytes(ops, device, dtype, blocksize, quant_type):
    functional = pytest.importorskip("bitsandbytes.functional")
    for seed, shape in enumerate((*SHAPES, (8, 768, 2048))):
        for scale in (1.0, 0.02, 1e-3):
            weight = draw(shape, dtype, device, seed=seed, scale=scale)
            weight.view(-1)[: weight.numel() // 9] = 0  # blocks of zeros
            packed, absmax = run(ops, "compiled", weight, blocksize, quant_type)
            theirs, state = functional.quantize_4bit(
                weight, blocksize=blocksize, quant_type=quant_type
            )
            assert_same_bits(absmax, state.absmax)
            assert_same_bits(packed, theirs.reshape(-1))


def test_a_user_gets_the_kernel_without_asking(opt, ops, dispatch, device, caplog):
    """The portable path, which takes 250 times as long, is neither taken nor reported."""
    weight = draw((6, 700), torch.bfloat16, device)
    dispatch.say_once.cache_clear()
    for actual, expected in zip(
        opt.nf4_quantize(weight), run(ops, "compiled", weight, 64, "nf4"), strict=True
    ):
        assert_same_bits(actual, expected)
    assert dispatch.path_name("nf4_quantize", device) == "compiled"
    assert not [r for r in caplog.records if "nf4_quantize" in r.getMessage()]


def test_unaligned_weight(ops, device):
    buffer = draw((4097,), torch.bfloat16, device)
    for ours, expected in zip(
        run(ops, "compiled", buffer[1:], 64, "nf4"),
        run(ops, "compiled", buffer[1:].clone(), 64, "nf4"),
        strict=True,
    ):
        assert_same_bits(ours, expected)


def test_beyond_two_to_the_31_elements(ops, device):
    elements = 2**31 + 4096 + 33
    weight = torch.zeros(elements, dtype=torch.bfloat16, device=device)
    tail = draw((4096 + 33,), torch.bfloat16, device)
    weight[2**31 :] = tail
    packed, absmax = run(ops, "compiled", weight, 64, "nf4")
    expected = run(ops, "compiled", tail, 64, "nf4")
    assert_same_bits(packed[2**30 :], expected[0])
    assert_same_bits(absmax[2**25 :], expected[1])
    assert (packed[: 2**30] == 0).all() and (absmax[: 2**25] == 0).all()


def test_runs_inside_a_graph_and_repeats(ops, device):
    weight = draw((64, 512), torch.float16, device)
    eager = run(ops, "compiled", weight, 64, "nf4")
    packed, absmax = (torch.zeros_like(tensor) for tensor in eager)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ops.nf4_quantize(weight, packed, absmax, 64, False)
    graph.replay()
    assert_same_bits(packed, eager[0])
    assert_same_bits(absmax, eager[1])
