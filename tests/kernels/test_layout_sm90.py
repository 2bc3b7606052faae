"""The address arithmetic of the sm_90a kernels against models of the hardware, on the CPU.

The models are written down from the PTX ISA ("Shared Memory Matrix Layout", "Matrix descriptor",
"Accumulator D" of wgmma.mma_async.m64nNk16, stmatrix) and from the tensor map's 128-byte swizzle.
The arithmetic, and which tile of nf4_product is where, are the kernels' own, compiled for the host.
"""

from __future__ import annotations

import ctypes
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from ..conftest import ROOT

SOURCES = ROOT / "kernels-src"
BLOCK = 64 * 64  # elements that a TMA box carries
LINE = 128  # bytes


@pytest.fixture(scope="module")
def probe(host_build):
    """The host build of sm90/layout.h and common/schedule.h."""
    loaded = host_build("layout_sm90_probe")
    loaded.descriptor.restype = ctypes.c_uint64
    loaded.tiles.restype = ctypes.c_int64
    return loaded


def hardware_swizzle(address):
    """128-byte swizzle: address bits 4-6 are XORed with bits 7-9."""
    return address ^ ((address >> 7 & 7) << 4)


def copied_in(operand: np.ndarray, rows_major: bool) -> np.ndarray:
    """Shared memory, in elements, after the copies of operand (rows, 64): a box per 64 rows."""
    memory = np.full(operand.size, -1, dtype=operand.dtype)
    for block in range(operand.shape[0] // 64):
        box = operand[64 * block : 64 * block + 64]
        lines = box.T if rows_major else box
        for line in range(64):
            for at in range(64):
                address = block * 2 * BLOCK + line * LINE + at * 2
                memory[hardware_swizzle(address) // 2] = lines[line, at]
    return memory


def read_by_wgmma(memory: np.ndarray, descriptor: int, rows: int, rows_major: bool) -> np.ndarray:
    """The rows x 16 elements that an instruction reads through its descriptor."""
    start = (descriptor & 0x3FFF) * 16
    leading, stride = (descriptor >> 16 & 0x3FFF) * 16, (descriptor >> 32 & 0x3FFF) * 16
    assert descriptor >> 62 == 1, "128-byte swizzle"
    assert descriptor >> 49 & 7 == 0, "base offset"
    assert descriptor >> 14 & 3 == descriptor >> 30 & 3 == descriptor >> 46 & 7 == 0
    row, k = np.meshgrid(np.arange(rows), np.arange(16), indexing="ij")
    if rows_major:  # ((8, n), (8, k)) : ((1, LBO), (8, SBO)) in units of 16 bytes
        address = start + row // 64 * leading + row % 64 * 2 + k // 8 * stride + k % 8 * LINE
    else:  # ((8, n), 2) : ((8, SBO), 1)
        address = start + row // 8 * stride + row % 8 * LINE + k * 2
    return memory[hardware_swizzle(address) // 2]


@pytest.mark.parametrize("rows_major", (False, True))
@pytest.mark.parametrize("start", (0, 3 * 1024, 200 * 1024))
def test_an_instruction_reads_its_rows_and_k(probe, start, rows_major):
    """n = 64 to 256 rows from every block on, every step of a stage, wherever the stage lies."""
    operand = np.arange(256 * 64, dtype=np.int64).reshape(256, 64)
    memory = np.concatenate((np.full(start // 2, -1), copied_in(operand, rows_major)))
    for block in range(4):
        for rows in range(64, 256 - 64 * block + 1, 64):
            for step in range(4):
                descriptor = probe.descriptor(start, block, step, int(rows_major))
                actual = read_by_wgmma(memory, descriptor, rows, rows_major)
                first = 64 * block
                expected = operand[first : first + rows, 16 * step : 16 * step + 16]
                assert np.array_equal(actual, expected), (block, rows, step)


def test_the_swizzle_is_the_tensor_map_s(probe):
    for line in range(64):
        for chunk in range(8):
            assert probe.swizzle(line, chunk) == hardware_swizzle(line * LINE + chunk * 16)


def accumulators(probe, columns: int) -> np.ndarray:
    """[thread, register] -> 1000 row + column of the 64 x columns tile, by the PTX ISA's figure."""
    held = np.empty((128, columns // 2), dtype=np.int64)
    element = (ctypes.c_int * 2)()
    for thread in range(128):
        warp, lane = divmod(thread, 32)
        group, member = divmod(lane, 4)
        for register in range(columns // 2):
            part, within = divmod(register, 4)
            row = 16 * warp + group + 8 * (within // 2)
            column = 8 * part + 2 * member + within % 2
            probe.accumulator(thread, register, element)
            assert tuple(element) == (row, column), (thread, register)
            held[thread, register] = 1000 * row + column
    return held


@pytest.mark.parametrize("columns", (128, 192, 256))
def test_accumulators_cover_the_tile(probe, columns):
    held = accumulators(probe, columns)
    expected = 1000 * np.arange(64)[:, None] + np.arange(columns)
    assert np.array_equal(np.sort(held.ravel()), np.sort(expected.ravel()))


def staged(probe, held: np.ndarray, i: int, tall: int, *, transposed: bool) -> dict[int, int]:
    """Byte address -> element, after stmatrix of all fragments of the i-th 64 rows."""
    columns = held.shape[1] * 2
    wide, written = columns // 64, {}
    for j in range(columns // 16):
        for warp in range(4):
            lanes = range(32 * warp, 32 * warp + 32)
            place = probe.mirrored if transposed else probe.fragment
            lines = [place(thread, i, j, tall if transposed else wide) for thread in lanes]
            for q in range(4):
                chunks = {address // 16 % 8 for address in lines[8 * q : 8 * q + 8]}
                assert len(chunks) == 8, "8 lines of a matrix in different banks"
                for lane in range(32):
                    # The lane holds two elements of line lane / 4 of the 8 x 8 matrix.
                    for e in range(2):
                        line, at = lane // 4, lane % 4 * 2 + e
                        if transposed:
                            line, at = at, line
                        address = lines[8 * q + line] + 2 * at
                        assert address not in written
                        register = probe.pair(j, q) + e
                        written[address] = i * 64000 + held[32 * warp + lane, register]
    return written


@pytest.mark.parametrize(("tall", "columns"), ((1, 128), (1, 192), (1, 256), (2, 128)))
def test_the_staged_part_leaves_in_place(probe, tall, columns):
    """stmatrix, then a TMA copy of every block, gives the part; transposed, its mirror image."""
    held = accumulators(probe, columns)
    wide = columns // 64
    for transposed in (False, True):
        memory = {}
        for i in range(tall):
            memory |= staged(probe, held, i, tall, transposed=transposed)
        out = np.full((64 * tall, columns), -1, dtype=np.int64)
        for block in range(tall * wide):
            for line in range(64):
                for at in range(64):
                    value = memory[block * 2 * BLOCK + hardware_swizzle(line * LINE + at * 2)]
                    if transposed:  # block / tall columns, block % tall rows; a line is a column
                        row, column = block % tall * 64 + at, block // tall * 64 + line
                    else:
                        row, column = block // wide * 64 + line, block % wide * 64 + at
                    out[row, column] = value
        assert np.array_equal(out, 1000 * np.arange(64 * tall)[:, None] + np.arange(columns))


TILES = ((128, 256), (128, 192), (128, 128), (64, 128), (256, 128), (64, 64))


@pytest.mark.parametrize(("rows", "cols"), TILES)
def test_every_tile_above_the_diagonal_comes_once(probe, rows, cols):
    """All m up to 8192, two matrices; nothing that lies wholly below the diagonal is computed."""
    assert probe.triangular_gap(8192, rows, cols) == 0


def test_one_matrix_of_2048_is_one_wave_of_tiles(probe):
    """On 132 multiprocessors; 136 and 72 are what 128 and 256 columns make of it."""
    assert [probe.tiles(2048, 128, cols) for cols in (128, 192, 256)] == [136, 101, 72]


@pytest.mark.parametrize(("rows", "cols"), TILES)
def test_bands_of_large_matrices_begin_where_they_should(probe, rows, cols):
    """To 2^29 tiles, where a float has lost the last bits of their number."""
    m, found = 2**21, (ctypes.c_int64 * 3)()
    ends = np.arange(1, -(-m // cols) + 1, dtype=np.int64) * cols
    before = np.cumsum(-(-np.minimum(ends, m) // rows))
    assert probe.tiles(m, rows, cols) == before[-1]
    for col in range(8, len(ends), 8 * 37):
        for tile, place in ((before[col - 1], (0, col)), (before[col - 1] - 1, (None, col - 1))):
            row = (ends[col - 1] - 1) // rows if place[0] is None else 0
            probe.locate_triangular(m, rows, cols, ctypes.c_int64(tile), found)
            assert tuple(found) == (0, row * rows, place[1] * cols)


@pytest.mark.parametrize(("rows", "cols"), TILES)
def test_every_tile_of_a_dense_result_comes_once(probe, rows, cols):
    for n in (1, 127, 768, 2049):
        assert probe.rectangular_gap(1300, n, rows, cols) == 0


def test_the_ring_counts_stages_and_phases(probe):
    for advances in range(23):
        for skipped in range(37):
            phase, slot = divmod(advances + skipped, 5)
            assert probe.ring(advances, skipped) == slot | phase % 2 << 8


def test_upper_storage_is_read_where_it_exists(probe):
    """Every block that a product copies is on or above the diagonal, and taken the right way."""
    found = (ctypes.c_int * 4)()
    for m in (64, 120, 128, 136, 512, 776, 1024):
        stages = -(-m // 64)
        for row in range(0, m, 64):
            for k in range(0, m, 64):
                probe.upper_block(row, k, stages, found)
                stored_row, stored_col, transposed, expected = found
                assert stored_row // 128 <= stored_col // 128
                place = (stored_col, stored_row) if transposed else (stored_row, stored_col)
                assert place == (row, k)
                assert transposed == expected, "copy and instruction disagree"


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


# batch, m, k and the tile that was fastest on an H200, of 132 multiprocessors.
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
}
# batch, m, k, n
FASTEST_DENSE = {
    (256, 512, 512, 2048): "sm90_128x256",
    (128, 768, 768, 2048): "sm90_128x256",
    (24, 1024, 1024, 4096): "sm90_128x256",
    (16, 2048, 2048, 8192): "sm90_128x256",
    (12, 768, 768, 3072): "sm90_128x256",
    (48, 768, 768, 768): "sm90_128x256",
    (1, 2048, 2048, 2048): "sm90_128x256",
    (1, 4096, 4096, 4096): "sm90_128x256",
}


@pytest.fixture(scope="module")
def pick(tmp_path_factory):
    """`pick` of tiles_sm90.h, built for the host: symmetric or dense, upper operands, sizes."""
    source = tmp_path_factory.mktemp("pick") / "pick.cpp"
    source.write_text(
        """#include "products/tiles_sm90.h"
        using namespace optimizer::products;
        extern "C" int64_t pick_tile(int symmetric, int upper, int64_t batches, int m, int k, int n,
                                     int64_t processors) {
          Problem p{};
          p.batches = batches, p.m = m, p.n = n, p.k = k;
          p.upper_a = upper & 1, p.upper_b = upper & 2;
          return symmetric ? pick(kSymmetricTiles, p, true, processors)
                           : pick(kMatmulAddTiles, p, false, processors);
        }"""
    )
    torch_headers = Path(torch.__file__).with_name("include")
    # -O2 leaves out what nothing calls, and with it torch's own functions.
    command = ["g++", "-std=c++17", "-O2", "-shared", "-fPIC"]
    command += [f"-I{SOURCES}", f"-isystem{torch_headers}"]
    subprocess.run([*command, str(source), "-o", str(source.with_suffix(".so"))], check=True)
    function = ctypes.CDLL(str(source.with_suffix(".so"))).pick_tile
    function.argtypes = (*(ctypes.c_int,) * 2, ctypes.c_int64, *(ctypes.c_int,) * 3, ctypes.c_int64)
    function.restype = ctypes.c_int64
    return function


@pytest.mark.parametrize("shape", FASTEST, ids=str)
def test_auto_takes_the_tile_that_was_fastest(pick, submodule, shape):
    tiles = submodule("kernels.products.symmetric_matmul").TILES[3:]
    assert tiles[pick(1, 0, *shape, shape[1], 132)] == FASTEST[shape]


@pytest.mark.parametrize("shape", FASTEST_DENSE, ids=str)
def test_auto_takes_the_dense_tile_that_was_fastest(pick, submodule, shape):
    tiles = submodule("kernels.products.matmul_add").TILES
    assert tiles[pick(0, 0, *shape, 132)] == FASTEST_DENSE[shape]


def test_auto_respects_blocks_of_upper_storage(pick, submodule):
    """A tile's rows of the left operand, or columns of the right one, are of one such block."""
    tiles = submodule("kernels.products.matmul_add").TILES
    for batch, m, n in ((256, 512, 2048), (24, 1024, 4096), (1, 128, 256), (3, 200, 100)):
        left, right = pick(0, 1, batch, m, m, n, 132), pick(0, 2, batch, n, m, m, 132)
        assert tiles[left] in ("sm90_128x256", "sm90_128x128")
        assert tiles[right] in ("sm90_256x128", "sm90_128x128")


@pytest.fixture(scope="module")
def probe_rows(host_build):
    """The host build of row_tiles.h."""
    return host_build("row_tiles_probe")


ROUTINGS = {
    "empty": [0, 0, 0],
    "one": [1],
    "edges": [0, 0, 127, 128, 129, 0, 255, 256, 257, 0],
    "one-has-all": [0, 5000, 0],
    "many-experts": [3, 0, 130] * 170,
}


@pytest.mark.parametrize("blocks", (1, 3, 8))
@pytest.mark.parametrize("most", (128, 256))
@pytest.mark.parametrize("routing", ROUTINGS)
def test_every_row_and_feature_comes_once(probe_rows, routing, most, blocks):
    """Also behind and between experts without rows; a tile never exceeds the instruction."""
    counts = np.array(ROUTINGS[routing], dtype=np.int32)
    covered = np.zeros((max(counts.sum(), 1), blocks), dtype=np.int32)
    pointers = [x.ctypes.data_as(ctypes.POINTER(ctypes.c_int)) for x in (counts, covered)]
    largest = probe_rows.cover(pointers[0], len(counts), most, blocks, pointers[1])
    assert (covered[: counts.sum()] == 1).all()
    assert largest <= most


@pytest.mark.parametrize("most", (128, 256))
def test_rows_are_divided_evenly(probe_rows, most):
    """A few rows more than a tile holds make tiles of half the height, not a full and a low one."""
    found = (ctypes.c_int * 8)()
    for rows in range(1, 2 * most + 100):
        heights = found[: probe_rows.heights(rows, most, found)]
        assert len(heights) == -(-rows // most)
        assert sum(heights) == rows
        assert heights[0] == max(heights) <= min(heights) + 1


def test_a_band_of_row_tiles_shares_its_weights(probe_rows):
    """Tiles that run at the same time read the same block of features, and each row tile once."""
    found = (ctypes.c_int * 2)()
    places = []
    for unit in range(20 * 5):
        probe_rows.place(ctypes.c_int64(unit), 20, 5, found)
        places.append(tuple(found))
    assert len(set(places)) == 100
    assert places[:8] == [(row, 0) for row in range(8)]
    assert places[40:48] == [(8 + row, 0) for row in range(8)]
    assert places[80:84] == [(16 + row, 0) for row in range(4)]
