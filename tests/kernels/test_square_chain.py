"""square_chain: the definition, the bits of product by product, any batch, named errors."""

from __future__ import annotations

import pytest
import torch

from .._compare import assert_same_bits, relative_error
from ._chains import CHAINS, definition, operand
from ._symmetric import DTYPES, laid_out

HALVES = (torch.float16, torch.bfloat16)
BUDGET = {torch.float16: 2.0**-8, torch.bfloat16: 2.0**-5, torch.float32: 2.0**-20}


@pytest.fixture(scope="session")
def module(submodule):
    return submodule("kernels.square_chain")


@pytest.fixture(scope="session")
def hopper(device):
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("machine code for compute capability 9.0")


@pytest.mark.kernels_ci
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("m", (1, 5, 64, 130))
def test_definition(module, device, m, name, dtype):
    x, scale = operand(3, m, dtype, device)
    expected = definition(x, CHAINS[name], scale, dtype)
    before = x.clone()
    result = module.square_chain(x, CHAINS[name], scale)
    assert_same_bits(x, before)
    assert (result.shape, result.dtype) == (x.shape, dtype)
    assert relative_error(result, expected) < BUDGET[dtype]
    assert_same_bits(result, result.mT)
    assert_same_bits(module.square_chain(x, CHAINS[name], scale, overwrite=True), result)


def test_without_a_scale(module, device):
    x = operand(2, 40, torch.float16, device)[0] / 64
    expected = definition(x, CHAINS["second"], None, torch.float16)
    assert relative_error(module.square_chain(x, CHAINS["second"]), expected) < 2.0**-8


@pytest.mark.parametrize("m", (8, 65))
def test_the_same_bits_in_any_batch(module, device, m):
    x, scale = operand(9, m, torch.float16, device)
    every = module.square_chain(x, CHAINS["first"], scale)
    for k in range(9):
        one = module.square_chain(x[k : k + 1].clone(), CHAINS["first"], scale[k : k + 1])
        assert_same_bits(one, every[k : k + 1])


def test_nan_stays_in_its_matrix_and_zeros_give_the_constant(module, device):
    x, scale = operand(4, 72, torch.float16, device)
    clean = module.square_chain(x, CHAINS["second"], scale)
    broken = x.clone()
    broken[1, 3, 4] = broken[1, 4, 3] = torch.nan
    broken[2] = 0
    result = module.square_chain(broken, CHAINS["second"], scale)
    assert result[1].isnan().all()
    assert_same_bits(result[[0, 3]], clean[[0, 3]])
    constant = definition(broken[2:3], CHAINS["second"], None, torch.float16)[0]
    assert torch.equal(result[2].double(), constant)


def test_empty(module, device):
    for shape in ((0, 4, 4), (3, 0, 0)):
        assert module.square_chain(torch.zeros(shape, device=device), CHAINS["one"]).shape == shape


def test_opcheck(module, ops, device):
    x, scale = operand(2, 24, torch.float16, device)
    squares = CHAINS["second"]
    places, count = module.places_of([square[0] for square in squares], True)
    columns = [[square[k] for square in squares] for k in range(4)]
    arguments = (module.buffers_for(x, count), places, *columns, scale)
    torch.library.opcheck(ops.square_chain_auto.default, arguments)
    if device.type == "cuda" and module.takes_compiled([x]):
        torch.library.opcheck(ops.square_chain.default, (*arguments, 0, module.AUTO))


def test_compiles_without_a_graph_break(module, device):
    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return module.square_chain(x * 1, CHAINS["first"], scale, overwrite=True) + 1

    for m in (8, 24):
        x, scale = operand(2, m, torch.float16, device)
        assert_same_bits(step(x, scale), module.square_chain(x, CHAINS["first"], scale) + 1)


ONE = torch.zeros(2, 4, 4)
BAD = {
    "X must be dense": (TypeError, {"X": [[1.0]]}),
    "got torch.float64": (TypeError, {"X": ONE.double()}),
    "X must be (G, m, m), got shape (2, 4, 3)": (ValueError, {"X": ONE[..., :3]}),
    "squares must be 1 to 8, got 0": (ValueError, {"squares": []}),
    "squares must be 1 to 8, got 9": (ValueError, {"squares": [(0, 1.0, 0.0, 0.0)] * 9}),
    "squares[0] must be (i, alpha, beta, delta)": (TypeError, {"squares": [(0.0, 1.0, 1.0, 0.0)]}),
    "squares[0] must hold numbers": (TypeError, {"squares": [(0, torch.ones(()), 1.0, 0.0)]}),
    "squares[0] adds M_1; there are M_0 to M_0": (ValueError, {"squares": [(1, 1.0, 1.0, 0.0)]}),
    "scale must be a float32 tensor, got float": (TypeError, {"scale": 1.0}),
    "scale must be (2,), contiguous": (ValueError, {"scale": torch.ones(3)}),
    "scale must be on the device of X": (ValueError, {"scale": torch.ones(2, device="meta")}),
}


@pytest.mark.parametrize("message", BAD)
def test_wrong_arguments_are_named(module, message):
    error, changed = BAD[message]
    with pytest.raises(error) as caught:
        module.square_chain(**{"X": ONE, "squares": CHAINS["one"], **changed})
    assert message in str(caught.value)


def buffers_of(module, x, squares, framed: bool = False):
    """Buffers that are NaN but for x, and places; `framed`: between NaN columns, see `intact`."""
    places, count = module.places_of([square[0] for square in squares], True)
    batch, m, _ = x.shape
    pitch = -(-m // 8) * 8 + 8 * framed
    whole = [torch.full((batch, m + framed, pitch), torch.nan).to(x) for _ in range(count)]
    buffers = [buffer[:, :m, :m] for buffer in whole]
    buffers[0].copy_(x)
    return buffers, places, whole


def intact(whole: list[torch.Tensor], m: int) -> bool:
    return all(b[:, m:].isnan().all() and b[:, :, m:].isnan().all() for b in whole)


def one_by_one(module, x, squares, scale) -> torch.Tensor:
    buffers, places, _ = buffers_of(module, x, squares)
    module._products(buffers, places, squares, scale)
    return buffers[places[-1]]


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.parametrize("m", (1, 64, 130, 512, 513, 768, 1000, 1024))
def test_bits_are_those_of_product_by_product(module, device, m, name, dtype):
    """Every tile, any groups, nothing written outside of the matrices."""
    squares = CHAINS[name]
    for batch in (1, 2, 7, 48, 300):
        if batch * m * m > 2**27:
            continue
        x, scale = operand(batch, m, dtype, device, seed=m + batch)
        expected = one_by_one(module, x, squares, scale)
        for tile in range(len(module.TILES)):
            for groups in {0, 1, min(batch, 5)}:
                buffers, places, whole = buffers_of(module, x, squares, framed=True)
                assert module.takes_compiled(buffers)
                module.chain(buffers, places, squares, scale, groups, tile)
                assert torch.equal(buffers[places[-1]], expected), (batch, tile, groups)
                assert intact(whole, m), (batch, tile, groups)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_two_streams_with_delays(module, device):
    """Launches that share the device; a wait for a tile of a block that has no place would hang."""
    squares = CHAINS["first"]
    sets = [operand(batch, 512, torch.float16, device, seed=batch) for batch in (40, 41, 3)]
    expected = [one_by_one(module, x, squares, scale) for x, scale in sets]
    streams = [torch.cuda.Stream(device) for _ in sets]
    for turn in range(20):
        found = []
        for k, (stream, (x, scale)) in enumerate(zip(streams, sets, strict=True)):
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                torch.cuda._sleep((turn * 7919 + k * 104729) % 60_000)
                found.append(module.square_chain(x, squares, scale))
        torch.cuda.synchronize(device)
        assert all(map(torch.equal, found, expected)), turn


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_graph_capture_replays_with_new_contents(module, device):
    x, scale = operand(6, 200, torch.float16, device)
    module.square_chain(x, CHAINS["second"], scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = module.square_chain(x, CHAINS["second"], scale)
    for seed in (1, 2):
        fresh = operand(6, 200, torch.float16, device, seed=seed)
        x.copy_(fresh[0])
        scale.copy_(fresh[1])
        graph.replay()
        assert_same_bits(out, one_by_one(module, x, CHAINS["second"], scale))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
def test_strides_that_tma_cannot_take(module, device):
    """Product by product, by other instructions; the op itself refuses in words."""
    x, scale = operand(2, 67, torch.float16, device)
    shifted = laid_out(x, "shifted")
    assert not module.takes_compiled([shifted])
    expected = definition(x, CHAINS["first"], scale, torch.float16)
    assert relative_error(module.square_chain(shifted, CHAINS["first"], scale), expected) < 2.0**-8
    buffers, places, _ = buffers_of(module, x, CHAINS["one"])
    numbers = [[0], [1.0], [1.0], [0.0], None, 0, 0]
    with pytest.raises(RuntimeError, match="TMA cannot use a buffer"):
        module.ops.square_chain([shifted, buffers[1]], places, *numbers)
    with pytest.raises(RuntimeError, match="a place holds what this product"):
        module.ops.square_chain(buffers, [0], *numbers)
