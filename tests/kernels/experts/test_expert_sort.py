"""expert_sort on every path: the same order, offsets and tiles as counting by hand."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ...conftest import module_fixture

PATHS = ("reference", "triton")


module = module_fixture("kernels.experts.expert_sort")


def by_hand(ids: list[list[int]], experts: int, tile_rows: int):
    """(slots, offsets, tiles in use) by Python's stable sort."""
    flat = [i if 0 <= i < experts else experts for row in ids for i in row]
    slots = sorted(range(len(flat)), key=lambda slot: flat[slot])
    starts = [sum(group < e for group in flat) for e in range(experts + 2)]
    tiles = []
    for group in range(experts + 1):
        for first in range(starts[group], starts[group + 1], tile_rows):
            tiles.append([group, first, min(first + tile_rows, starts[group + 1])])
    return slots, starts[: experts + 1], tiles


def parts(order) -> tuple[torch.Tensor, ...]:
    return order.slots, order.rows, order.offsets, order.tiles


def assert_sorted(module, path, ids, experts, device, tile_rows=16, dtype=torch.int64) -> None:
    top_k = max(len(ids[0]) if ids else 2, 1)
    given_ids = torch.tensor(ids, dtype=dtype).view(len(ids), top_k).to(device)
    result = module.expert_sort(given_ids, experts, tile_rows=tile_rows, backend=path)
    slots, rows, offsets, tiles = (part.tolist() for part in parts(result))
    expected_slots, expected_offsets, expected_tiles = by_hand(ids, experts, tile_rows)
    assert slots == expected_slots
    assert [slots[row] for row in rows] == list(range(len(slots)))
    assert offsets == expected_offsets
    used = len(expected_tiles)
    assert tiles[:used] == expected_tiles
    assert tiles[used:] == [[-1, -1, -1]] * (len(tiles) - used)


@pytest.mark.sees_defect("ids of sentinels lengthen the offsets in silence")
@pytest.mark.sees_defect("tiles straddle experts, and experts without rows are visited")
@pytest.mark.kernels_ci
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("ids", "experts"),
    [
        ([], 4),
        ([[2, 0]], 3),
        ([[1, 1]] * 40, 3),
        ([[0, 2]] * 20, 3),
        ([[-1, 4], [9, -7], [3, 0]], 4),
        ([[5, 6]] * 9, 4),
        ([[0]] * 33, 1),
    ],
    ids=["empty", "one-token", "one-expert", "gap", "sentinels", "only-sentinels", "E=1"],
)
def test_cases(module, device, path, ids, experts):
    assert_sorted(module, path, ids, experts, device)


@pytest.mark.parametrize("rows", [0, 5])
def test_what_is_recorded_is_launched_alone(module, device, monkeypatch, rows) -> None:
    """A recording refuses a copy by torch, and that launches from Python in every call."""
    seen, replayed = [], module.replayed

    def watched(name, function, operands, constants):
        seen.extend(ids.is_contiguous() and ids.numel() > 0 for ids in operands)
        return replayed(name, function, operands, constants)

    monkeypatch.setattr(module, "replayed", watched)
    ids = (torch.arange(4 * rows, device=device) % 3).view(rows, 4)[:, ::2]
    order = module.expert_sort(ids, 3, backend="triton")
    expected = module.expert_sort(ids, 3, backend="reference")
    for one, other in zip(parts(order), parts(expected), strict=True):
        assert torch.equal(one, other)
    assert seen == [True] * (rows > 0)


@settings(max_examples=40, deadline=None)
@given(
    ids=st.integers(1, 4).flatmap(
        lambda k: st.lists(st.lists(st.integers(-2, 12), min_size=k, max_size=k), max_size=30)
    ),
    experts=st.integers(1, 10),
    tile_rows=st.sampled_from([16, 32, 64]),
)
def test_generated_reference(module, device, ids, experts, tile_rows):
    assert_sorted(module, "reference", ids, experts, device, tile_rows)


def test_many_chunks_and_groups(module, device):
    """Several chunks, more experts than one block of the scan, long experts over many tiles."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, 42, (150, 3), generator=generator)
    assert_sorted(module, "triton", ids.tolist(), 40, device)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16, torch.int32], ids=str)
@pytest.mark.parametrize("path", PATHS)
def test_integer_dtypes(module, device, path, dtype):
    assert_sorted(module, path, [[3, 1], [0, 7]], 4, device, dtype=dtype)


STRIDES = {
    "columns skipped": lambda ids: ids.repeat_interleave(2, 1)[:, ::2].T.contiguous().T,
    "gaps": lambda ids: torch.stack((ids, ids + 1), -1)[..., 0],  # one flat view of stride 2
    "one id": lambda ids: ids[:1, :1].expand(2, 2),
}


@pytest.mark.parametrize("strides", STRIDES)
@pytest.mark.parametrize("path", PATHS)
def test_strided_ids(module, device, path, strides):
    ids = STRIDES[strides](torch.tensor([[3, 1], [0, 3]], device=device))
    slots = module.expert_sort(ids, 4, backend=path).slots
    assert slots.tolist() == module.expert_sort(ids.clone(), 4, backend="reference").slots.tolist()
    assert slots.tolist() == ([0, 1, 2, 3] if strides == "one id" else [2, 1, 0, 3])


def test_the_most_experts(module, device):
    assert_sorted(module, "auto", [[2**12 - 1, 5], [2**12, 0], [5, -1]], 2**12, device)


@pytest.mark.sees_defect("padding each expert to whole blocks waits for the device once per expert")
def test_tile_rows_follow_the_mean_and_never_the_routing(module, device):
    assert [module.tile_rows_for(rows, 8) for rows in (0, 128, 129, 192, 193, 384, 385)] == [
        16,
        16,
        32,
        32,
        64,
        64,
        128,
    ]
    shapes = {
        tuple(part.shape for part in parts(module.expert_sort(torch.full((50, 2), e), 4)))
        for e in (-1, 0, 3)
    }
    assert len(shapes) == 1


def test_opcheck(module, ops, device):
    ids = torch.tensor([[1, 5], [0, 1], [-1, 2]], device=device)
    for path in PATHS:
        torch.library.opcheck(ops.expert_sort.default, (ids, 4, 16, path))


@pytest.mark.sees_defect("compiled anew for each shape, with a wait for the device")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiles_without_a_graph_break(module, device, dynamic):
    @torch.compile(fullgraph=True, dynamic=dynamic, backend="aot_eager")
    def compiled(ids):
        return module.expert_sort(ids, 5)

    for tokens in (7, 9):
        ids = torch.randint(0, 5, (tokens, 2), device=device)
        found, expected = parts(compiled(ids)), parts(module.expert_sort(ids, 5))
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([[1, 2]], 4), TypeError, "expert_ids must be a dense tensor"),
        ((torch.ones(2, 2), 4), TypeError, "expert_ids must have dtype"),
        ((torch.ones(4, dtype=torch.int64), 4), ValueError, "expert_ids must have 2 dimensions"),
        ((torch.ones(2, 0, dtype=torch.int64), 4), ValueError, "expert_ids must name experts"),
        ((torch.ones(2, 2, dtype=torch.int64), 0), ValueError, "num_experts must be at least 1"),
        ((torch.ones(2, 2, dtype=torch.int64), 2**12 + 1), ValueError, "at most 4096, got 4097"),
        (
            (torch.ones(2, 2, dtype=torch.int64), 2**31),
            ValueError,
            "num_experts must be at least 1 a",
        ),
        ((torch.ones(2, 2, dtype=torch.int64), 4.0), TypeError, "num_experts must be an integer"),
        ((torch.ones(2, 2, dtype=torch.int64), True), TypeError, "num_experts must be an integer"),
    ],
)
def test_wrong_arguments(module, arguments, error, message):
    with pytest.raises(error, match=message):
        module.expert_sort(*arguments)


def test_wrong_options(module):
    ids = torch.zeros(2, 2, dtype=torch.int64)
    with pytest.raises(ValueError, match="tile_rows must be a power of two"):
        module.expert_sort(ids, 4, tile_rows=24)
    with pytest.raises(TypeError, match="tile_rows must be an integer or None"):
        module.expert_sort(ids, 4, tile_rows=32.0)
    with pytest.raises(ValueError, match="backend must be one of"):
        module.expert_sort(ids, 4, backend="cuda")
