"""normalize on every path: rounded once in any range, one answer per matrix, a clean frame."""

from __future__ import annotations

import ctypes
import logging
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from .._compare import assert_same_bits
from ..conftest import ROOT
from ._normalize import DTYPES, PREFACTOR, assert_rounded_once, draw, exact, framed
from ._symmetric import PATTERNS, laid_out

PATHS = ("public", "reference")
SHAPES = ((1, 1, 1), (3, 1, 7), (2, 9, 1), (2, 4, 4), (3, 33, 131), (1, 128, 64), (2, 5, 1030))


@pytest.fixture(scope="session")
def module(submodule):
    """The module kernels.normalize of the loaded package."""
    return submodule("kernels.products.normalize")


@pytest.fixture(scope="session")
def run(module, ops):
    """`run(path, pieces, out, prefactor)`: the public function, or one path's op, into out."""

    def call(path: str, pieces, out: torch.Tensor, prefactor: float = PREFACTOR) -> torch.Tensor:
        if path == "public":
            return module.normalize(pieces, prefactor=prefactor, out=out)
        getattr(ops, f"normalize_{path}")(pieces, out, prefactor)
        return out

    return call


@pytest.mark.kernels_ci
@pytest.mark.parametrize("target", DTYPES, ids=str)
@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_every_element_is_rounded_once(run, device, path, source, target):
    for seed, shape in enumerate(SHAPES):
        x = draw(*shape, dtype=source, device=device, seed=seed)
        assert_rounded_once(run(path, [x], framed([x], target)), x)


@pytest.mark.parametrize("path", PATHS)
def test_float64(run, device, path):
    x = draw(2, 7, 9, dtype=torch.float64, device=device) * 1e200
    actual = run(path, [x], framed([x], torch.float64))
    expected = exact(x * 2.0**-700)
    torch.testing.assert_close(actual, expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("more", ((0, 0, 0), (2, 0, 0), (0, 7, 0), (1, 3, 5), (3, 130, 260)))
@pytest.mark.parametrize("path", PATHS)
def test_frame_is_zero(run, device, path, more):
    """Whatever was in out: missing matrices, rows and columns are zeros."""
    for dtype in DTYPES:
        x = draw(2, 37, 70, dtype=torch.float32, device=device)
        x[1, 3, 3] = torch.nan
        out = run(path, [x], framed([x], dtype, more))
        assert_rounded_once(out[:1, :37, :70], x[:1])
        assert out[1, :37, :70].isnan().all()
        out[:2, :37, :70] = 0
        assert (out == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_any_finite_range(run, device, path, dtype):
    """Squares that leave float32, norms beyond its largest number, subnormal numbers."""
    x = draw(6, 20, 40, dtype=torch.float32, device=device).clamp(-3, 3)
    x[0] *= 1e-45
    x[1] *= 1e38
    x[2] *= 1e-20
    x[3] *= 1e20
    x[4] = 0
    x[4, 19, 39] = 1e-45
    x[5] = 3.4e38
    assert (x[0] != 0).any()
    assert_rounded_once(run(path, [x], framed([x], dtype)), x)


@pytest.mark.parametrize("path", PATHS)
def test_multiples_by_powers_of_two_give_the_same_bits(run, device, path):
    x = draw(1, 33, 65, dtype=torch.float32, device=device)
    x = torch.where(x.abs() < 2.0**-8, 1.0, x)  # so that no multiple below loses a digit
    expected = run(path, [x], framed([x], torch.float16))
    for exponent in (-115, -100, -1, 1, 100, 120):
        multiple = x * 2.0**exponent
        assert_same_bits(run(path, [multiple], framed([x], torch.float16)), expected)


@pytest.mark.parametrize("path", PATHS)
def test_zero_inf_and_nan(run, device, path):
    """Zeros stay, inf and NaN make their own matrix NaN, and the others do not notice."""
    x = draw(6, 35, 50, dtype=torch.float32, device=device)
    x[1] = 0
    for matrix, value in ((2, torch.inf), (3, -torch.inf), (4, torch.nan)):
        x[matrix, 34, 49] = value
        x[matrix, 0, 0] = 0
    out = run(path, [x], framed([x], torch.float16))
    assert (out[1] == 0).all() and out[2:5].isnan().all()
    for matrix in (0, 5):
        alone = x[matrix : matrix + 1]
        assert_same_bits(out[matrix : matrix + 1], run(path, [alone], framed([alone], out.dtype)))


@pytest.mark.parametrize("path", PATHS)
def test_a_matrix_has_one_answer(run, device, path):
    """In any batch, at any place, in any piece, under any strides, in any frame."""
    x = draw(7, 45, 83, dtype=torch.float32, device=device)
    expected = run(path, [x], framed([x], torch.bfloat16))
    alone = [run(path, [m], framed([m], torch.bfloat16)) for m in x[:, None]]
    assert_same_bits(torch.cat(alone), expected)
    pieces = [
        laid_out(part, PATTERNS[k % len(PATTERNS)])
        for k, part in enumerate((x[:1], x[1:1], x[1:4], x[4:5], x[5:5], x[5:7], x[7:]))
    ]
    out = run(path, pieces, framed(pieces, torch.bfloat16, (2, 3, 5)))
    assert_same_bits(out[:7, :45, :83], expected)
    backwards = run(path, [x[k : k + 1] for k in reversed(range(7))], framed([x], torch.bfloat16))
    assert_same_bits(backwards.flip(0), expected)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("path", PATHS)
def test_layouts_give_the_same_bits(run, device, path, pattern):
    for dtype in DTYPES:
        for shape in ((3, 64, 132), (2, 1, 40), (2, 40, 1), (3, 31, 57), (2, 6, 600)):
            x = draw(*shape, dtype=dtype, device=device)
            expected = run(path, [x], framed([x], torch.float16))
            actual = run(path, [laid_out(x, pattern)], framed([x], torch.float16))
            assert_same_bits(actual, expected)


@pytest.mark.parametrize("path", PATHS)
def test_nothing_to_read(run, device, path):
    for shape in ((0, 3, 4), (2, 0, 4), (2, 3, 0)):
        x = torch.empty(shape, device=device)
        out = run(path, [x], framed([x], torch.float16, (2, 5, 9)))
        assert (out == 0).all()
        assert run(path, [x], framed([x], torch.float16)).numel() == 0


def test_new_output(module, device):
    x = draw(2, 6, 10, dtype=torch.bfloat16, device=device)
    assert module.normalize(x).dtype == torch.bfloat16
    out = module.normalize([x, x], dtype=torch.float32)
    assert out.shape == (4, 6, 10) and out.is_contiguous()
    assert_rounded_once(out[2:], x, 1.0)


def test_wrong_arguments(module, device):
    x = torch.ones(2, 3, 4, device=device)
    room = torch.empty(2, 3, 4, device=device)
    for pieces, options, error, message in (
        ([], {}, ValueError, "empty"),
        ([3.0], {}, TypeError, r"pieces\[0\]"),
        ([x.int()], {}, TypeError, "int32"),
        ([x[0]], {}, ValueError, r"\(b, r, c\)"),
        ([x, x[:, :2]], {}, ValueError, r"pieces\[1\]"),
        ([x, x.half()], {}, ValueError, "float16"),
        (x, {"prefactor": 0.0}, ValueError, "positive"),
        (x, {"prefactor": float("inf")}, ValueError, "finite"),
        (x, {"prefactor": "1"}, TypeError, "prefactor"),
        (x, {"dtype": torch.int32}, TypeError, "int32"),
        (x, {"dtype": torch.float16, "out": room}, ValueError, "not both"),
        (x, {"out": room[:1]}, ValueError, "room"),
        (x, {"out": room.int()}, TypeError, "int32"),
        (x, {"out": torch.empty(2, 4, 3, device=device).mT}, ValueError, "contiguous"),
        (x, {"out": x}, ValueError, "overlaps"),
        (x, {"out": torch.empty(2, 3, 4, device="meta")}, ValueError, "device"),
    ):
        with pytest.raises(error, match=message):
            module.normalize(pieces, **options)
    assert (x == 1).all()


def test_opcheck(ops, device):
    x = draw(2, 5, 9, dtype=torch.float32, device=device)
    out = torch.empty(3, 8, 16, device=device)
    names = (
        ("normalize", "normalize_reference") if device.type == "cuda" else ("normalize_reference",)
    )
    for name in names:
        torch.library.opcheck(getattr(ops, name).default, ([x[:1], x[1:]], out, 1.5))


def test_compiles_without_a_graph_break(module, device):
    x = draw(2, 6, 10, dtype=torch.float32, device=device)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(y):
        return module.normalize([y, y], prefactor=2.0, dtype=torch.float16) * 2

    assert_same_bits(step(x), module.normalize([x, x], prefactor=2.0, dtype=torch.float16) * 2)


def test_meta(module):
    x = torch.empty(2, 6, 10, device="meta")
    assert module.normalize(x, dtype=torch.float16).shape == (2, 6, 10)


def test_explain(opt, module, dispatch, device, caplog):
    said = opt.explain("normalize", device=device)
    assert said.split(":")[0] == ("compiled" if device.type == "cuda" else "reference")
    if device.type == "cpu":
        dispatch.say_once.cache_clear()
        with caplog.at_level(logging.WARNING):
            module.normalize(torch.ones(1, 2, 2))
            module.normalize(torch.ones(1, 2, 2))
        assert caplog.text.count("portable path") == 1


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
