"""grouped_product without a GPU: its tile arithmetic, what it refuses, and what it hands on."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from ..conftest import ROOT

SOURCES = ROOT / "kernels-src"
HEADER = SOURCES / "grouped_lora" / "grouped_product.h"


@pytest.fixture(scope="session")
def module(submodule):
    """The module kernels.grouped_product of the loaded package."""
    return submodule("kernels.grouped_product")


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    """The host build of row_tiles.h."""
    library = tmp_path_factory.mktemp("probe") / "probe.so"
    compiler = shutil.which("g++")
    assert compiler, "the host build of the kernels' arithmetic needs g++"
    source = Path(__file__).with_name("row_tiles_probe.cpp")
    command = [compiler, "-std=c++17", "-O2", "-Wall", "-shared", "-fPIC", f"-I{SOURCES}"]
    subprocess.run([*command, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


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


def test_python_repeats_the_tables_of_the_source(module):
    """The numbers of tiles are positions; a changed table would silently run another tile."""
    body = re.search(r"kTiles\[\] = \{(.*?)\};", HEADER.read_text(), re.DOTALL)[1]
    assert re.findall(r'\{"(\w+)"', body) == list(module.TILES)
    shapes = re.findall(r'"sm90_(\d+)x(\d+)", (\d+), (\d+)', body)
    assert all(shape[:2] == shape[2:] for shape in shapes)
    limit = (SOURCES / "grouped_lora" / "tile_sm90.cuh").read_text()
    assert f"kMaxExperts = {module.MAX_EXPERTS};" in limit


def good(dtype: torch.dtype = torch.bfloat16) -> dict:
    """Operands that the compiled op takes: K contiguous in weight."""
    return {"x": torch.ones(5, 64, dtype=dtype), "weight": torch.ones(3, 32, 64, dtype=dtype).mT}


REFUSED = {
    "float16 or bfloat16": {"x": torch.ones(5, 64)},
    "at most 512 experts": {"weight": torch.ones(513, 8, 64, dtype=torch.bfloat16).mT},
    "K and N must be 8": {"weight": torch.ones(3, 7, 64, dtype=torch.bfloat16).mT},
    "multiple of 8, got 12": {"rank": 12},
    "rows of x": {"x": torch.ones(5, 65, dtype=torch.bfloat16)[:, 1:]},
    "K or N of weight": {"weight": torch.ones(3, 33, 65, dtype=torch.bfloat16)[:, 1:, 1:].mT},
}


@pytest.mark.parametrize("reason", REFUSED)
def test_what_it_cannot_take_is_said_in_words(module, reason):
    arguments = {**good(), "rank": 16, **REFUSED[reason]}
    assert reason in module.refusal(**arguments)
    assert module.refusal(**good(), rank=16) is None
    assert module.refusal(**good(torch.float16), rank=0) is None
    by_columns = torch.ones(3, 64, 40, dtype=torch.bfloat16)
    assert module.refusal(good()["x"], by_columns, 8) is None


def test_refused_operands_raise_before_the_op(module):
    slots, offsets = torch.arange(5), torch.tensor((0, 5, 5, 5))
    place = {"fan": 0, "grouped_out": True}
    with pytest.raises(ValueError, match="float16 or bfloat16, got"):
        module.grouped_product(torch.ones(5, 64), good()["weight"], slots, offsets, **place)
    with pytest.raises(ValueError, match="name auto or one of sm90_256x128"):
        module.grouped_product(**good(), slots=slots, offsets=offsets, **place, tile="sm90_1x1")


@pytest.mark.parametrize("lies", ("packed", "peft", "float32", "shifted"))
@pytest.mark.parametrize("k_contiguous", (True, False))
def test_a_factor_is_packed_as_the_weight_lies(module, k_contiguous, lies):
    """Equal values in weight's dtype, on 16 bytes, contiguous where weight is; no copy if it is."""
    experts, rank, n = 3, 8, 24
    weight = torch.ones(experts, n, 16, dtype=torch.bfloat16).mT
    if not k_contiguous:
        weight = weight.contiguous()
    values = torch.randn(experts, rank, n).bfloat16()
    factor = values.mT.contiguous().mT if k_contiguous else values
    if lies == "peft":  # (N, r E) with the expert fastest
        factor = values.permute(2, 1, 0).contiguous().permute(2, 1, 0)
    elif lies == "float32":
        factor = values.float()
    elif lies == "shifted":
        storage = torch.zeros(values.numel() + 4, dtype=torch.bfloat16)[4:]
        factor = storage.view(factor.mT.shape).mT if k_contiguous else storage.view(factor.shape)
        factor.copy_(values)
    packed = module.packed_factor(factor, weight)
    assert torch.equal(packed, values)
    assert packed.dtype == torch.bfloat16
    assert packed.data_ptr() % 16 == 0
    assert (packed.mT if k_contiguous else packed).is_contiguous()
    assert (packed.data_ptr() == factor.data_ptr()) == (lies == "packed")


def test_the_path_is_taken_by_name_on_hopper_alone(submodule, opt):
    paths = submodule("kernels._moe_paths")
    with pytest.raises(ValueError, match="and Triton, got cpu"):
        paths.pick(torch.device("cpu"), torch.bfloat16, "compiled")
    with pytest.raises(ValueError, match="needs a device of capability"):
        opt.explain("grouped_lora_linear", device="cpu", backend="compiled")
