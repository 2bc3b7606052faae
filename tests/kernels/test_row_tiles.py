"""Which tile of nf4_product is where: row_tiles.h, compiled for the host."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest


@pytest.fixture(scope="module")
def probe(host_build):
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
def test_every_row_and_feature_comes_once(probe, routing, most, blocks):
    """Also behind and between experts without rows; a tile never exceeds the instruction."""
    counts = np.array(ROUTINGS[routing], dtype=np.int32)
    covered = np.zeros((max(counts.sum(), 1), blocks), dtype=np.int32)
    pointers = [x.ctypes.data_as(ctypes.POINTER(ctypes.c_int)) for x in (counts, covered)]
    largest = probe.cover(pointers[0], len(counts), most, blocks, pointers[1])
    assert (covered[: counts.sum()] == 1).all()
    assert largest <= most


@pytest.mark.parametrize("most", (128, 256))
def test_rows_are_divided_evenly(probe, most):
    """A few rows more than a tile holds make tiles of half the height, not a full and a low one."""
    found = (ctypes.c_int * 8)()
    for rows in range(1, 2 * most + 100):
        heights = found[: probe.heights(rows, most, found)]
        assert len(heights) == -(-rows // most)
        assert sum(heights) == rows
        assert heights[0] == max(heights) <= min(heights) + 1


def test_a_band_of_row_tiles_shares_its_weights(probe):
    """Tiles that run at the same time read the same block of features, and each row tile once."""
    found = (ctypes.c_int * 2)()
    places = []
    for unit in range(20 * 5):
        probe.place(ctypes.c_int64(unit), 20, 5, found)
        places.append(tuple(found))
    assert len(set(places)) == 100
    assert places[:8] == [(row, 0) for row in range(8)]
    assert places[40:48] == [(8 + row, 0) for row in range(8)]
    assert places[80:84] == [(16 + row, 0) for row in range(4)]
