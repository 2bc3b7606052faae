"""The tiles of the sm_90a products away from a GPU: each once, which one is taken."""

import ctypes
import itertools
import re

import pytest
import torch

from .._checkout import tool
from ..conftest import ROOT, module_fixture
from ._products import TILES as NAMED

module = module_fixture("kernels.products.matmul_add")

SOURCES = ROOT / "kernels-src"


@pytest.fixture(scope="module")
def probe(host_build):
    """The host build of common/schedule.h, products/chain.h and products/tiles_sm90.h."""
    loaded = host_build("tiles_probe")
    loaded.tiles.restype = loaded.tickets.restype = loaded.pick_tile.restype = ctypes.c_int64
    loaded.refused.restype = ctypes.c_char_p
    return loaded


TILES = ((128, 256), (128, 192), (128, 128), (64, 128), (256, 128), (64, 64))


@pytest.mark.parametrize(("rows", "cols"), TILES)
def test_every_tile_above_the_diagonal_comes_once(probe, rows, cols):
    """All m up to 8192, two matrices; nothing that lies wholly below the diagonal is computed."""
    assert probe.triangular_gap(8192, rows, cols) == 0


def test_one_matrix_of_2048_is_one_wave_of_tiles(probe):
    """On 132 multiprocessors; 136 and 72 are what 128 and 256 columns make of it."""
    assert [probe.tiles(2048, 128, cols) for cols in (128, 192, 256)] == [136, 101, 72]


@pytest.mark.parametrize(("rows", "cols"), TILES)
def test_every_tile_of_a_dense_result_comes_once(probe, rows, cols):
    for n in (1, 127, 768, 2049):
        assert probe.rectangular_gap(1300, n, rows, cols) == 0


def test_python_names_the_tiles_of_the_table(submodule):
    """The numbers of tiles are positions; a changed table would silently run another tile."""
    text = (SOURCES / "products" / "tiles_sm90.h").read_text()

    def table(name: str) -> list[str]:
        body = re.search(rf"{name}\[\] = \{{(.*?)\}};", text, re.DOTALL)[1]
        rows = re.findall(r'\{"(\w+)", \d+, \d+, ([\d.e-]+), ([\d.e-]+)\}', body)
        assert any(float(block) > 0 for _, block, _ in rows), "`auto` has none to take"
        return [row[0] for row in rows]

    symmetric = submodule("kernels.products.symmetric_matmul")
    dense = submodule("kernels.products.matmul_add")
    assert table("kSymmetricTiles") == list(symmetric.TILES[3:])
    assert table("kMatmulAddTiles") == list(dense.TILES)


# Batch, m, k and, of a dense product, n: the tile that was fastest on an H200, of 132
# multiprocessors.
FASTEST = {
    (1, 2048, 2048): "sm90_128x192",
    (4, 2048, 2048): "sm90_128x128",
    (13, 2048, 2048): "sm90_128x192",
    (16, 2048, 2048): "sm90_128x256",
    (16, 2048, 8192): "sm90_128x256",
    (1, 4096, 4096): "sm90_128x128",
    (8, 4096, 4096): "sm90_128x256",
    (48, 768, 768): "sm90_128x192",
    (64, 768, 768): "sm90_128x192",
    (128, 768, 2048): "sm90_128x256",
    (128, 512, 512): "sm90_128x128",
    (256, 512, 2048): "sm90_128x128",
    (4, 1024, 1024): "sm90_128x192",
    (24, 1024, 1024): "sm90_128x128",
    (256, 512, 512, 2048): "sm90_128x256",
    (128, 768, 768, 2048): "sm90_128x256",
    (24, 1024, 1024, 4096): "sm90_128x256",
    (16, 2048, 2048, 8192): "sm90_128x256",
    (12, 768, 768, 3072): "sm90_128x256",
    (48, 768, 768, 768): "sm90_128x256",
    (1, 2048, 2048, 2048): "sm90_128x256",
    (1, 4096, 4096, 4096): "sm90_128x256",
}


@pytest.mark.parametrize("shape", FASTEST, ids=str)
def test_auto_takes_the_tile_that_was_fastest(probe, submodule, shape):
    symmetric = len(shape) == 3
    tiles = submodule("kernels.products.matmul_add").TILES
    if symmetric:
        tiles, shape = submodule("kernels.products.symmetric_matmul").TILES[3:], (*shape, shape[1])
    taken = tiles[probe.pick_tile(symmetric, 0, *shape, 132)]
    assert taken == FASTEST[shape[:3] if symmetric else shape]


def test_auto_respects_blocks_of_upper_storage(probe, submodule):
    """A tile's rows of the left operand, or columns of the right one, are of one such block."""
    tiles = submodule("kernels.products.matmul_add").TILES
    for batch, m, n in ((256, 512, 2048), (24, 1024, 4096), (1, 128, 256), (3, 200, 100)):
        left = probe.pick_tile(0, 1, batch, m, m, n, 132)
        right = probe.pick_tile(0, 2, batch, n, m, m, 132)
        assert tiles[left] in ("sm90_128x256", "sm90_128x128")
        assert tiles[right] in ("sm90_256x128", "sm90_128x128")


def test_the_tiles_have_their_numbers(module):
    assert ("auto", *module.TILES) == NAMED


def test_half_precision_is_served_where_the_kernel_is(module, dispatch, monkeypatch):
    asked = []
    monkeypatch.setattr(dispatch, "runs_compiled", lambda op, device: asked.append(op) or True)
    device = torch.device("cuda", 0)
    assert module.runs_compiled(device, torch.float16) and module.runs_compiled(
        device, torch.bfloat16
    )
    assert not module.runs_compiled(device, torch.float32)
    assert set(asked) == {"matmul_add"}


def test_strides_that_tma_takes(module):
    x = torch.zeros(2, 16, 16, dtype=torch.float16)
    assert module.by_tma(x) and module.by_tma(x.mT)
    buffer = torch.zeros(2, 16, 48, dtype=torch.float16)
    assert module.by_tma(buffer[..., 8:24]) and module.by_tma(buffer[1:, :, :16])
    rows_of_72_bytes = buffer.as_strided((2, 16, 16), (576, 36, 1))
    for bad in (buffer[..., 1:17], buffer[..., ::3], rows_of_72_bytes):
        assert not module.by_tma(bad)
    assert not module.by_tma(buffer[:1, :, :16].expand(2, -1, -1))


OPERANDS = (0, 0, 1, 2, 2)  # of gram_polynomial


def tickets(probe, m: int, matrices: int, groups: int, products: int = 5) -> list[tuple[int, ...]]:
    """(product, matrix, row, column) in the order of the tickets; tiles of 128 x 128."""
    count = probe.tickets(m, 128, 128, matrices, groups, products, None)
    found = (ctypes.c_int * (4 * count))()
    probe.tickets(m, 128, 128, matrices, groups, products, found)
    return [tuple(found[i : i + 4]) for i in range(0, len(found), 4)]


CHAINED = ((1, 1, 1), (128, 5, 2), (512, 7, 3), (513, 12, 1), (768, 13, 4), (1024, 3, 3))


@pytest.mark.parametrize(("m", "matrices", "groups"), CHAINED)
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


def test_it_runs_every_tile_that_the_op_names(submodule):
    tune = tool("tune")
    for op in tune.OPS:
        assert tune._tiles(op) == list(submodule(f"kernels.products.{op}").TILES)
