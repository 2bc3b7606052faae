"""What nf4_dequant promises on a CUDA device: capture, streams, sizes, a traced Triton op."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_same_bits
from .test_nf4_dequant import DTYPES, NF4, STACKS, Stack, oracle

pytestmark = pytest.mark.gpu


def test_graph_capture_replays_with_new_contents(opt, device):
    """No synchronisation and no copy from the host: the replay reads ids and weights afresh."""
    arguments = Stack(6, (40, 64), nested=True).arguments(device)
    ids = torch.tensor([0, 1, 2], device=device)
    opt.nf4_dequant(active_experts=ids, **arguments)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = opt.nf4_dequant(active_experts=ids, **arguments)
    ids.copy_(torch.tensor([5, 5, 3]))
    arguments["packed"].copy_(Stack(6, (40, 64)).build(device, seed=1)["packed"])
    graph.replay()
    assert_same_bits(out, oracle(arguments, [5, 5, 3], torch.bfloat16))


def test_capture_with_a_number_as_offset(opt, device):
    """A number reaches the device as a kernel argument, not by a copy that capture forbids."""
    arguments = Stack(2, (40, 64), nested=True).arguments(device)
    arguments["absmax_offset"] = 0.25
    ids = torch.tensor([1], device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = opt.nf4_dequant(active_experts=ids, **arguments)
    graph.replay()
    arguments["absmax_offset"] = torch.tensor([0.25])
    assert_same_bits(out, oracle(arguments, [1], torch.bfloat16))


def test_runs_on_the_current_stream(opt, device):
    """The decode waits for a slow producer on the same stream and for nothing else."""
    arguments = Stack(2, (256, 256)).arguments(device)
    expected = oracle(arguments, [1, 0], torch.bfloat16)
    ids = torch.tensor([1, 0], device=device)
    packed, staged = arguments["packed"].clone(), arguments["packed"]
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    packed.zero_()
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        torch.cuda._sleep(50_000_000)
        packed.copy_(staged)
        out = opt.nf4_dequant(active_experts=ids, **{**arguments, "packed": packed})
    stream.synchronize()
    assert_same_bits(out, expected)


@pytest.mark.parametrize("rows", (1023, 1024))  # odd and even starts
@pytest.mark.parametrize("path", ("compiled", "triton"))
def test_output_beyond_two_to_the_31_elements(run_nf4, device, path, rows):
    """Rows of the output that lie above 2**31 elements equal those below."""
    stack = Stack(2, (rows, 4099), 64)
    arguments = stack.arguments(device)
    count = 2**31 // stack.numel + 2
    ids = torch.zeros(count, dtype=torch.int32, device=device)
    ids[-1] = 1
    out = run_nf4(path, arguments, ids, torch.bfloat16)
    assert out.numel() > 2**31
    assert_same_bits(out[[0, count // 2, -1]], oracle(arguments, [0, 0, 1], torch.bfloat16))
    assert (out[:-1].view(torch.int16) == out[0].view(torch.int16)).all()


@pytest.mark.parametrize("rows", (1023, 1024))
@pytest.mark.parametrize("path", ("compiled", "triton"))
def test_stack_beyond_two_to_the_31_elements_is_read(run_nf4, device, path, rows):
    stack = Stack(520, (rows, 4099), 64)
    assert (stack.experts - 1) * stack.numel > 2**31
    generator = torch.Generator(device).manual_seed(0)
    elements = stack.experts * stack.numel
    packed = torch.randint(
        0, 256, (elements // 2,), dtype=torch.uint8, device=device, generator=generator
    )
    absmax = torch.rand(-(-elements // 64), device=device, generator=generator)
    arguments = {
        **dict.fromkeys(("codebook", "absmax_code", "absmax_scale", "absmax_offset")),
        "packed": packed,
        "absmax": absmax,
        "expert_shape": stack.shape,
        "blocksize": 64,
    }
    out = run_nf4(path, arguments, torch.tensor([519], device=device), torch.float32)
    element = torch.arange(519 * stack.numel, elements, device=device)
    byte = packed[element // 2]
    nibble = torch.where(element % 2 == 0, byte >> 4, byte & 15)
    expected = torch.tensor(NF4, device=device)[nibble.long()] * absmax[element // 64]
    assert_same_bits(out.reshape(-1), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_paths_agree_on_a_model_shape(run_nf4, device, dtype):
    arguments = Stack(8, (1536, 2048)).arguments(device)
    ids = torch.tensor([7, 0, 3], device=device)
    compiled = run_nf4("compiled", arguments, ids, dtype)
    assert_same_bits(run_nf4("triton", arguments, ids, dtype), compiled)
    assert_same_bits(run_nf4("reference", arguments, ids, dtype), compiled)


def test_opcheck_of_the_triton_op(nf4, device):
    arguments = STACKS[14].arguments(device)
    arguments |= {"active_experts": torch.tensor([1, 0], device=device), "dtype": torch.float16}
    torch.library.opcheck(nf4._op("triton").default, (), arguments)


def test_triton_op_compiles_with_inductor(nf4, device):
    arguments = STACKS[14].arguments(device)
    op = nf4._op("triton")

    @torch.compile(fullgraph=True)
    def decode(ids: torch.Tensor) -> torch.Tensor:
        return op(active_experts=ids, dtype=torch.float16, **arguments) * 1

    ids = torch.tensor([4, 1], device=device)
    assert_same_bits(decode(ids), oracle(arguments, [4, 1], torch.float16))
