"""square_chain and slices of gram_polynomial: the bits of product by product, any batch."""

import functools

import pytest
import torch

from .._compare import assert_same_bits, capture, relative_error
from ..conftest import module_fixture
from ._products import (
    CHAINS,
    PREFACTOR,
    below,
    definition,
    draw,
    exact_norms,
    operand,
    run_chain,
)

module = module_fixture("kernels.products.square_chain")
slices = module_fixture("kernels.products.gram_polynomial_slice")
iteration = module_fixture("orthogonalize.gram_polynomial")

HALF = torch.float16
SIDES = (8, 64, 136, 512, 520, 768, 1000, 1024)


@pytest.fixture(scope="session")
def chain(module, ops):
    """`chain(x, squares, scale, groups, zeros=...)`: the op in buffers of its own."""
    return functools.partial(run_chain, module, ops)


def test_it_serves_float16_on_hopper_alone(module):
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        assert not module.serves(1000, 512, dtype, torch.device("cpu"))
    assert [module.tiles(m) for m in (1, 128, 129, 512, 1000, 1024)] == [1, 1, 3, 10, 36, 36]


@pytest.mark.parametrize("name", CHAINS)
def test_reference_is_the_definition(submodule, name):
    reference = submodule("reference.orthogonalize")
    x, scale = operand(3, 40, HALF, torch.device("cpu"))
    expected = definition(x, CHAINS[name], scale, HALF)
    assert relative_error(reference.square_chain(x, CHAINS[name], scale), expected) < 2.0**-8


@pytest.mark.kernels_ci
@pytest.mark.parametrize("exponent", (-1000, -149, 0, 127, 1000))
def test_reference_of_normalize(submodule, exponent):
    """Any finite range; zeros stay, inf and NaN make their own matrix NaN."""
    normalize = submodule("reference.orthogonalize").normalize
    x = draw(5, 7, 9, dtype=torch.float64, device="cpu")
    torch.testing.assert_close(
        normalize(x * 2.0**exponent, PREFACTOR), exact_norms(x), rtol=1e-14, atol=0
    )
    x[0], x[1, 2, 3], x[2, 4, 5] = 0, torch.inf, torch.nan
    out = normalize(x, PREFACTOR)
    assert (out[0] == 0).all() and out[1:3].isnan().all() and out[3:].isfinite().all()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
class TestOnHopper:
    def test_what_it_serves(self, module, device):
        count = torch.cuda.get_device_properties(device).multi_processor_count
        assert module.serves(count, 512, HALF, device)
        assert module.serves(count // 10, 512, HALF, device)  # ten tiles each
        assert not module.serves(count // 25, 512, HALF, device)
        assert not module.serves(count, 512, torch.bfloat16, device)

    @pytest.mark.parametrize("name", CHAINS)
    @pytest.mark.parametrize("m", SIDES)
    def test_bits_are_those_of_product_by_product(self, module, ops, device, m, name):
        """Any groups; what lies below the diagonal or outside is neither read nor written."""
        squares = CHAINS[name]
        for batch in (1, 2, 7, 48, 300):
            if batch * m * m > 2**27:
                continue
            x, scale = operand(batch, m, HALF, device, seed=m + batch)
            expected = one_by_one(ops, x, squares, scale)
            for groups in {0, 1, min(batch, 5)}:
                found = framed_chain(module, ops, x, squares, scale, groups)
                assert torch.equal(found, above(expected)), (batch, groups)

    def test_zeros_of_the_caller(self, chain, device):
        """Whoever cleared the counters, the result is the same."""
        squares = CHAINS["second"]
        x, scale = operand(40, 264, HALF, device)
        expected = above(chain(x.clone(), squares, scale))
        for _ in range(3):
            zeros = torch.zeros(1 + len(squares) * len(x), device=device, dtype=torch.int32)
            found = chain(x.clone(), squares, scale, zeros=zeros)
            assert_same_bits(above(found), expected)
        with pytest.raises(RuntimeError, match="zeros must be"):
            chain(x.clone(), squares, scale, zeros=zeros[1:])

    def test_two_streams_with_delays(self, ops, chain, device):
        """Launches share the device; a wait for a tile of a block without a place would hang."""
        squares = CHAINS["first"]
        sets = [operand(batch, 512, HALF, device, seed=batch) for batch in (40, 41, 3)]
        expected = [above(one_by_one(ops, x, squares, scale)) for x, scale in sets]
        streams = [torch.cuda.Stream(device) for _ in sets]
        for turn in range(20):
            found = []
            for k, (stream, (x, scale)) in enumerate(zip(streams, sets, strict=True)):
                stream.wait_stream(torch.cuda.current_stream(device))
                with torch.cuda.stream(stream):
                    torch.cuda._sleep((turn * 7919 + k * 104729) % 60_000)
                    found.append(chain(x.clone(), squares, scale))
            torch.cuda.synchronize(device)
            assert all(map(torch.equal, map(above, found), expected)), turn

    def test_graph_capture_replays_with_new_contents(self, ops, chain, device):
        x, scale = operand(6, 200, HALF, device)
        chain(x.clone(), CHAINS["second"], scale)
        graph, out = capture(lambda: chain(x.clone(), CHAINS["second"], scale))
        for seed in (1, 2):
            fresh = operand(6, 200, HALF, device, seed=seed)
            x.copy_(fresh[0])
            scale.copy_(fresh[1])
            graph.replay()
            expected = one_by_one(ops, x, CHAINS["second"], scale)
            assert_same_bits(above(out), above(expected))

    def test_opcheck(self, ops, device):
        x, scale = operand(2, 24, HALF, device)
        numbers = [0], [0.5], [2.0], [3.0]
        arguments = ([x, torch.empty_like(x)], [1], *numbers, scale, 0)
        torch.library.opcheck(ops.square_chain.default, arguments)


def above(x: torch.Tensor, filling: float = 0.0) -> torch.Tensor:
    """x (..., m, m) with `filling` in the blocks below the diagonal."""
    return x.masked_fill(below(x.shape[-1], x.device), filling)


def framed_chain(module, ops, x, squares, scale, groups: int) -> torch.Tensor:
    """The chain in buffers of NaN, which all stay NaN outside of upper storage."""
    batch, m, _ = x.shape
    places, count = module.places_of([square[0] for square in squares])
    whole = [x.new_full((batch, m + 1, m + 8), torch.nan) for _ in range(count)]
    buffers = [buffer[:, :m, :m] for buffer in whole]
    buffers[0].copy_(above(x, torch.nan))
    columns = [[square[k] for square in squares] for k in range(4)]
    ops.square_chain(buffers, places, *columns, scale, groups)
    lower = below(m, x.device)
    for frame, inside in zip(whole, buffers, strict=True):
        assert frame[:, m:].isnan().all() and frame[:, :, m:].isnan().all()
        assert inside[:, lower].isnan().all()
    return above(buffers[places[-1]])


def one_by_one(ops, x, squares, scale) -> torch.Tensor:
    """The same by symmetric_matmul, on whole matrices."""
    terms = [x]
    for j, (i, alpha, beta, delta) in enumerate(squares):
        powers = (2 if j == 0 else 0, 1 if i == 0 else 0)
        out = torch.empty_like(x)
        options = (alpha, beta, delta, -1, scale, *powers)
        ops.symmetric_matmul(terms[j], terms[j], terms[i], out, *options)
        terms.append(out)
    return terms[-1]


def test_the_table_in_the_form_that_the_op_takes(slices, submodule) -> None:
    table = submodule("orthogonalize.polynomials").POLYNOMIALS
    both = slices.Polynomials(table, 64.0, 1.02)
    assert both.operands == [square.operand for square in table[1]]
    assert len(both.coefficients) == 3 * sum(map(len, table))
    assert both.coefficients[-1] == table[1][-1].delta
    with pytest.raises(ValueError, match="two polynomials of one form"):
        slices.Polynomials([table[0], table[1][:-1]], 64.0, 1.02)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize(
    "shape",
    [
        *[(14, 512, 640), (7, 768, 768), (50, 1300, 200), (140, 128, 256), (9, 129, 131)],
        *[(2, 1100, 2300), (1, 2048, 1024)],
    ],
)
def test_slices_have_the_bits_of_the_ops_one_by_one(opt, iteration, device, monkeypatch, shape):
    """With the chain, without it, and op by op from Python; alone and in a batch."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device)
    assert iteration._runs_compiled(x.dtype, HALF, x.device)
    found = opt.orthogonalize(x, method="gram_polynomial")
    few = opt.orthogonalize(x[:1], method="gram_polynomial")
    assert_same_bits(few, found[:1])
    chained = iteration.chain_serves(len(x), min(shape[1:]), HALF, x.device)
    assert chained == (shape[0] > 2 and shape[0] != 9)
    monkeypatch.setattr(iteration, "chain_serves", lambda *_: False)
    assert_same_bits(found, opt.orthogonalize(x, method="gram_polynomial"))
    monkeypatch.setattr(iteration, "_runs_compiled", lambda *_: False)
    assert_same_bits(found, opt.orthogonalize(x, method="gram_polynomial"))
