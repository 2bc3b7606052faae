"""square_chain: the bits of product by product, upper storage alone touched, any batch, no hang.

The order of its tiles and the rule of its buffers are the kernel's own, compiled for the host.
"""

from __future__ import annotations

import ctypes
import functools
import itertools

import pytest
import torch

from .._compare import assert_same_bits, relative_error
from .._gpu import capture
from ..conftest import module_fixture
from ._products import CHAINS, definition, operand, run_chain

HALF = torch.float16
BLOCK = 128
SIDES = (8, 64, 136, 512, 520, 768, 1000, 1024)


module = module_fixture("kernels.products.square_chain")


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
    reference = submodule("reference.products")
    x, scale = operand(3, 40, HALF, torch.device("cpu"))
    expected = definition(x, CHAINS[name], scale, HALF)
    assert relative_error(reference.square_chain(x, CHAINS[name], scale), expected) < 2.0**-8


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

    @pytest.mark.parametrize("name", CHAINS)
    def test_definition(self, chain, device, name):
        x, scale = operand(3, 136, HALF, device)
        expected = definition(x, CHAINS[name], scale, HALF)
        result = chain(x.clone(), CHAINS[name], scale)
        assert relative_error(above(result), above(expected)) < 2.0**-8
        small = x / 1024  # every eigenvalue below 1, without factors
        expected = definition(small, CHAINS["second"], None, HALF)
        result = chain(small, CHAINS["second"])
        assert relative_error(above(result), above(expected)) < 2.0**-8

    def test_nan_stays_in_its_matrix_and_zeros_give_the_constant(self, chain, device):
        x, scale = operand(4, 136, HALF, device)
        clean = above(chain(x.clone(), CHAINS["second"], scale))
        x[1, 3, 4] = x[1, 4, 3] = torch.nan
        x[2] = 0
        constant = definition(x[2:3], CHAINS["second"], None, HALF)[0]
        result = chain(x, CHAINS["second"], scale)
        assert above(result, torch.nan)[1].isnan().all()
        assert_same_bits(above(result)[[0, 3]], clean[[0, 3]])
        assert torch.equal(above(result)[2].double(), above(constant))

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

    def test_what_the_op_refuses(self, ops, device):
        x, scale = operand(2, 64, HALF, device)
        shifted = torch.empty(2, 64, 72, device=device, dtype=HALF)[..., 1:65]
        numbers = [0], [1.0], [1.0], [0.0]
        cases = {
            "TMA cannot use a buffer": ([shifted, x], [1], *numbers, None, 0),
            "m must be a multiple of 8": ([x[:, :60, :60], x[:, :60, :60]], [1], *numbers, None, 0),
            "a place holds what this product": ([x, x.clone()], [0], *numbers, None, 0),
            "there must be 2 to 6 buffers": ([x], [0], *numbers, None, 0),
            "buffers must be float16": ([x.float(), x.float()], [1], *numbers, None, 0),
            "one shape, dtype and device": ([x, x[:1]], [1], *numbers, None, 0),
            "scale must be": ([x, x.clone()], [1], *numbers, scale[:1], 0),
            "there must be 1 to 8 squares": ([x, x.clone()], [], [], [], [], [], None, 0),
        }
        before = x.clone()
        for message, arguments in cases.items():
            with pytest.raises(RuntimeError, match=message):
                ops.square_chain(*arguments)
        assert_same_bits(x, before)


def below(m: int, device: torch.device) -> torch.Tensor:
    """(m, m): whether an element lies in a block below the diagonal."""
    block = torch.arange(m, device=device) // BLOCK
    return block[:, None] > block


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


OPERANDS = (0, 0, 1, 2, 2)  # of gram_polynomial


@pytest.fixture(scope="module")
def probe(host_build):
    """The host build of chain.h."""
    loaded = host_build("chain_probe")
    loaded.groups.restype = loaded.tickets.restype = ctypes.c_int64
    loaded.refused.restype = ctypes.c_char_p
    return loaded


def tickets(probe, m: int, matrices: int, groups: int, products: int = 5) -> list[tuple[int, ...]]:
    """(product, matrix, row, column) in the order of the tickets; tiles of 128 x 128."""
    count = probe.tickets(m, 128, 128, matrices, groups, products, None)
    found = (ctypes.c_int * (4 * count))()
    probe.tickets(m, 128, 128, matrices, groups, products, found)
    return [tuple(found[i : i + 4]) for i in range(0, len(found), 4)]


SHAPES = ((1, 1, 1), (128, 5, 2), (512, 7, 3), (513, 12, 1), (768, 13, 4), (1024, 3, 3))


@pytest.mark.parametrize(("m", "matrices", "groups"), SHAPES)
def test_every_tile_comes_once_and_behind_its_operands(probe, m, matrices, groups):
    """All tiles of M_j of a matrix have smaller tickets than any tile of M_j+1."""
    order = tickets(probe, m, matrices, groups)
    blocks = -(-m // 128)
    each = blocks * (blocks + 1) // 2
    assert len(set(order)) == len(order) == 5 * matrices * each
    assert all(row <= col < m and row % 128 == col % 128 == 0 for _, _, row, col in order)
    stored: dict[tuple[int, int], int] = {}
    for product, matrix, _, _ in order:
        assert product == 0 or stored[product - 1, matrix] == each
        stored[product, matrix] = stored.get((product, matrix), 0) + 1
    assert set(stored) == set(itertools.product(range(5), range(matrices)))


def test_groups_are_equal_and_one_behind_the_other(probe):
    for matrices, groups in ((128, 5), (48, 4), (7, 7), (10, 3)):
        sizes, seen = [], []
        for product, matrix, row, col in tickets(probe, 128, matrices, groups):
            assert (row, col) == (0, 0)
            if matrix not in seen and product == 0:
                seen.append(matrix)
            if product == 4 and len(seen) > sum(sizes):
                sizes.append(len(seen) - sum(sizes))  # the first last product of a group
        assert seen == list(range(matrices))
        assert sum(sizes) == matrices and len(sizes) == groups
        assert max(sizes) - min(sizes) <= 1


def test_a_group_has_tiles_for_every_multiprocessor_and_few_more(probe):
    """Between two thirds and three halves of so many, if there are so many."""
    for m in range(1, 1025, 37):
        blocks = -(-m // 128)
        each = blocks * (blocks + 1) // 2
        wanted = 132 * (2 + blocks / 2)
        for matrices in (1, 2, 7, 48, 128, 300, 5000):
            count = probe.groups(matrices, m, 132)
            assert 1 <= count <= matrices
            size = matrices // count  # of the smallest
            assert count == 1 or size * each >= 2 / 3 * wanted - each
            assert (matrices - 1) // count * each <= 1.5 * wanted + each
    # What was the fastest, or within one in a hundred of it, on an H200.
    measured = {(128, 512): 2, (64, 768): 2, (48, 768): 2, (24, 1024): 1, (12, 768): 1}
    measured |= {(256, 256): 2, (500, 128): 2}
    assert {key: probe.groups(*key, 132) for key in measured} == measured


def refused(probe, operands, places, buffers: int) -> str:
    numbers = ctypes.c_int64 * len(operands)
    return probe.refused(numbers(*operands), numbers(*places), len(operands), buffers).decode()


def intact(operands, places) -> bool:
    """Whether every product finds what it reads where its M was put, while later ones write."""
    memory, of = {0: 0}, [0, *places]
    for j, i in enumerate(operands):
        if memory.get(of[j]) != j or memory.get(of[i]) != i or places[j] in (of[j], of[i]):
            return False
        memory[places[j]] = j + 1
    return True


def test_a_place_is_refused_exactly_if_it_holds_what_is_read(probe):
    for operands in itertools.product(*(range(j + 1) for j in range(4))):
        for places in itertools.product(range(3), repeat=4):
            assert (refused(probe, operands, places, 3) == "") == intact(operands, places)
    assert "operand" in refused(probe, (0, 2), (1, 2), 3)
    assert "no buffer" in refused(probe, (0, 0), (1, 3), 3)


def test_python_puts_every_matrix_where_it_may_lie(probe, submodule):
    module = submodule("kernels.products.square_chain")
    assert (
        probe.most_squares(),
        probe.most_buffers(),
    ) == (module.MOST_SQUARES, module.MOST_BUFFERS)
    assert module.places_of(OPERANDS) == ([1, 2, 0, 1, 0], 3)
    for operands in itertools.product(*(range(j + 1) for j in range(probe.most_squares()))):
        places, count = module.places_of(operands)
        assert intact(operands, places)
        assert count <= probe.most_buffers()
        assert refused(probe, operands, places, count) == ""
