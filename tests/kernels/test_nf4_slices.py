"""Slices of 4-bit experts: which tiles of rows are whose."""

from __future__ import annotations

import pytest
import torch


@pytest.mark.parametrize("count", (1, 2, 3, 4, 7, 8))
@pytest.mark.parametrize("seed", range(3))
def test_every_tile_belongs_to_one_slice_and_comes_first(submodule, device, count, seed):
    """With its expert counted from the slice's first; sentinels follow the last one's experts."""
    experts = 7
    module = submodule("kernels.quant._nf4_slices_triton")
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(-1, experts + 1, (90, 2), generator=generator)
    ids[ids == seed] = 3  # an expert without rows
    tiles = (
        submodule("kernels.experts.expert_sort")
        .expert_sort(ids.to(device), experts, tile_rows=16)
        .tiles
    )
    parts = module.tiles_of_slices(tiles, experts, count)
    assert parts.shape == (-(-experts // count), *tiles.shape)
    found = []
    for number, part in enumerate(parts.tolist()):
        used = [tile for tile in part if tile[0] >= 0]
        assert part[: len(used)] == used, "a slice's tiles come first"
        size = min(count, experts - number * count)
        last = number == parts.shape[0] - 1
        assert all(expert < size or (last and expert == size) for expert, *_ in used)
        found += [[expert + number * count, *rows] for expert, *rows in used]
    assert found == [tile for tile in tiles.tolist() if tile[0] >= 0]
