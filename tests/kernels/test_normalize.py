"""normalize: how matrices are cut up and scaled, compiled for the host, and the plain reference.

test_normalize_gpu.py is about the op.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from ..conftest import ROOT
from ._normalize import PREFACTOR, draw, exact


@pytest.mark.kernels_ci
@pytest.mark.parametrize("exponent", (-1000, -149, 0, 127, 1000))
def test_reference(submodule, exponent):
    """Any finite range; zeros stay, inf and NaN make their own matrix NaN."""
    normalize = submodule("reference.normalize").normalize
    x = draw(5, 7, 9, dtype=torch.float64, device="cpu")
    torch.testing.assert_close(
        normalize(x * 2.0**exponent, PREFACTOR), exact(x), rtol=1e-14, atol=0
    )
    x[0], x[1, 2, 3], x[2, 4, 5] = 0, torch.inf, torch.nan
    out = normalize(x, PREFACTOR)
    assert (out[0] == 0).all() and out[1:3].isnan().all() and out[3:].isfinite().all()


def test_explain(opt, device):
    said = opt.explain("normalize", device=device)
    assert said.split(":")[0] == ("compiled" if device.type == "cuda" else "torch")


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    """The host build of normalize.h."""
    library = tmp_path_factory.mktemp("probe") / "probe.so"
    compiler = shutil.which("g++")
    assert compiler, "the host build of the kernel's arithmetic needs g++"
    source = Path(__file__).with_name("normalize_probe.cpp")
    command = [compiler, "-std=c++17", "-O2", "-Wall", "-shared", "-fPIC"]
    command += [f"-I{ROOT / 'kernels-src'}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    loaded.covers.restype = ctypes.c_bool
    loaded.covers.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    loaded.sectors.restype = ctypes.c_double
    loaded.simulate.restype = ctypes.c_long
    loaded.simulate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, *[ctypes.c_int] * 7]
    return loaded


def test_every_element_is_read_once(probe):
    sides = (1, 2, 3, 4, 5, 8, 15, 16, 17, 31, 32, 33, 63, 64, 127, 128, 129, 257, 513, 1030)
    for rows in sides:
        for cols in sides:
            for chunk in (0, 1, 3):
                assert probe.covers(rows, cols, chunk), (rows, cols, chunk)
    for rows, cols in ((1, 10**6), (10**6, 1), (3, 300_001), (2047, 2049)):
        assert probe.covers(rows, cols, 0)


def test_threads_have_work_and_whole_sectors(probe):
    """From 1024 elements in 4 lines on, no thread is idle; no sector is read for nothing."""
    for rows, cols in ((4, 1024), (1024, 4), (8, 512), (512, 8), (32, 128), (128, 32), (64, 64)):
        assert probe.idle(rows, cols) == 0
    for rows, cols in ((64, 256), (256, 64), (128, 128)):
        for warp in range(8):
            for by_columns in (False, True):
                assert probe.sectors(rows, cols, warp, by_columns) == 1.0


def test_upper_tiles_hold_every_element_above_the_diagonal_once(probe):
    for side in (129, 132, 160, 256, 257, 515, 1025, 2050):
        for chunk in (1, 2, 3, 8):
            assert probe.covers_upper(side, chunk), (side, chunk)


def test_quotients_without_division(probe):
    """Divisors around powers of two, numerators around their multiples and up to 2^31 - 1."""
    largest = 2**31 - 1
    for divisor in (1, 2, 3, 5, 7, 255, 256, 257, 14336, 2**20 - 1, 2**30 + 1, largest):
        for k in (0, 1, 2, largest // divisor // 2, largest // divisor - 1, largest // divisor):
            for n in (k * divisor - 1, k * divisor, k * divisor + 1, largest):
                if 0 <= n <= largest:
                    assert probe.quotient(n, divisor) == n // divisor, (n, divisor)


SIMULATED = {"sides": (64, 256), "chunk": 0, "matrices": 7, "blocks": 5, "resident": 5, "slots": 4}
SIMULATED |= {"ahead": 2, "first": 3, "uneven": 0}


def simulated(probe, seed: int, **changes) -> int:
    """Tiles that were given up; negative if one was lost or the blocks wait for each other."""
    case = SIMULATED | changes
    names = ("chunk", "matrices", "blocks", "resident", "slots", "ahead", "first", "uneven")
    return probe.simulate(*case["sides"], *(case[name] for name in names), seed)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"matrices": 1, "blocks": 1, "resident": 1, "slots": 16},
        {"slots": 1, "ahead": 1, "first": 1},  # nothing can be kept
        {"sides": (256, 512), "slots": 2, "matrices": 2},  # far more tiles than slots
        {"chunk": 2, "slots": 9, "ahead": 4},
        {"chunk": 3, "slots": 3, "first": 1},  # longer chunks than slots ahead
        {"sides": (64, 1024), "chunk": 5, "slots": 3},  # chunks longer than the slots
        {"sides": (4, 4), "matrices": 40, "blocks": 9, "resident": 9},
        {"blocks": 12, "resident": 2},  # blocks that begin when others have ended
        {"blocks": 12, "resident": 1, "slots": 3, "matrices": 30},
        {"blocks": 16, "resident": 16, "uneven": 1, "matrices": 30},  # one block far ahead
        {"sides": (100, 300), "blocks": 3, "resident": 3, "first": 1, "uneven": 1},
    ],
    ids=str,
)
def test_every_tile_is_summed_and_written_once(probe, changes):
    """The kernel's decisions on the host, in any order of the blocks' rounds."""
    for seed in range(20):
        assert simulated(probe, seed, **changes) >= 0, seed


def test_tiles_are_read_twice_only_where_slots_run_out(probe):
    """A block that runs alone keeps a matrix if it has a slot for every tile of it, else not."""
    alone = {"matrices": 3, "blocks": 1, "resident": 1}  # matrices of four tiles
    assert simulated(probe, 0, **alone, slots=4) == 0
    assert simulated(probe, 0, **alone, slots=3) > 0


def scaled(probe, x: np.ndarray, prefactor: float = PREFACTOR) -> np.ndarray:
    out = np.full_like(x, np.nan)
    address = [array.ctypes.data_as(ctypes.POINTER(ctypes.c_float)) for array in (x, out)]
    squares = float(np.square(x.astype(np.float64)).sum())
    probe.scale(ctypes.c_double(squares), ctypes.c_double(prefactor), x.size, *address)
    return out


def test_factor_of_any_norm(probe):
    """The factor's two parts against float64, from the smallest norm to the largest."""
    rng = np.random.default_rng(0)
    for exponent in range(-149, 128):
        x = (rng.standard_normal(64).clip(-1, 1) * 2.0**exponent).astype(np.float32)
        if not x.any():
            continue
        wide = x.astype(np.float64)
        expected = wide / (PREFACTOR * np.sqrt(np.square(wide).sum()))
        off = np.abs(scaled(probe, x) - expected)
        assert (off <= np.abs(expected) * 2.0**-23 * 1.001).all(), exponent
    large = np.full(2**16, 3.4e38, dtype=np.float32)
    np.testing.assert_allclose(scaled(probe, large), 1 / (PREFACTOR * 256), rtol=2.0**-23)


def test_factor_of_zero_inf_and_nan(probe):
    assert (scaled(probe, np.zeros(3, dtype=np.float32)) == 0).all()
    for value in (np.inf, -np.inf, np.nan):
        assert np.isnan(scaled(probe, np.array([0, 1, value], dtype=np.float32))).all()
