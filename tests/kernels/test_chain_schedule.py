"""The order of the tiles of a chain of squares, and where its buffers may lie.

Both are the kernel's own (kernels-src/products/chain.h), compiled for the host.
"""

from __future__ import annotations

import ctypes
import itertools
import shutil
import subprocess
from pathlib import Path

import pytest

from ..conftest import ROOT

OPERANDS = (0, 0, 1, 2, 2)  # of gram_polynomial


@pytest.fixture(scope="module")
def probe(tmp_path_factory):
    """The host build of chain.h."""
    library = tmp_path_factory.mktemp("probe") / "chain.so"
    compiler = shutil.which("g++")
    assert compiler, "the host build of the schedule needs g++"
    source = Path(__file__).with_name("chain_probe.cpp")
    command = [compiler, "-std=c++17", "-O2", "-Wall", "-shared", "-fPIC"]
    command += [f"-I{ROOT / 'kernels-src'}", str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
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
