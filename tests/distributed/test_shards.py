"""What a rank holds of a shard, against DTensor: every placement on meshes of up to four ranks."""

import itertools
import math

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from ._ranks import on_ranks
from .test_partition import module_of

MESHES = {1: [(1,)], 2: [(2,), (1, 2)], 3: [(3,)], 4: [(4,), (2, 2), (4, 1), (2, 1, 2)]}
SHARDS_SHAPES = [(8, 6), (5, 3), (1, 4), (7, 1), (9, 10), (3, 7, 2), (2, 1, 5), (0, 3), ()]


def placements_of(mesh, ndim):
    """Every combination of replication, shards of each dimension, and strided shards."""
    choices = []
    for number in range(len(mesh)):
        later = math.prod(mesh[number + 1 :])
        of_dim = [Replicate(), *(Shard(k) for k in range(min(ndim, 2)))]
        of_dim += [_StridedShard(0, split_factor=later)] if later > 1 and ndim else []
        of_dim += [_StridedShard(1, split_factor=3)] if number == 0 and ndim > 1 else []
        choices.append(of_dim)
    return itertools.product(*choices)


def assert_boxes(shards, runs, whole, local, case) -> None:
    """The boxes of the whole tensor, and of its inner part, take exactly what is held."""
    for cut in (0, 1):
        region = [(min(cut, size), max(size - 2 * cut, 0)) for size in whole.shape]
        part = whole[tuple(slice(start, start + size) for start, size in region)]
        found = shards.boxes(runs, region)
        rebuilt = torch.full_like(part, -1)
        for box in found:
            assert box.shape == tuple(box.view(local).shape), case
            assert (rebuilt[box.region] == -1).all(), f"{case}: boxes overlap"
            rebuilt[box.region] = box.view(local)
        held = set(local.flatten().tolist()) & set(part.flatten().tolist())
        assert set(rebuilt.flatten().tolist()) - {-1} == held, case
        assert (rebuilt[rebuilt >= 0] == part[rebuilt >= 0]).all(), case


@pytest.mark.dist
@pytest.mark.parametrize("world", [1, 2, 3, 4])
@on_ranks()
def test_shards_are_those_of_dtensor(opt, world) -> None:
    shards, checked = module_of(opt, "distributed.shards"), 0
    rank = distributed.get_rank()
    for mesh_shape in MESHES[world]:
        mesh = init_device_mesh("cpu", mesh_shape)
        coordinate = mesh.get_coordinate()
        for shape in SHARDS_SHAPES:
            whole = torch.arange(math.prod(shape)).reshape(shape)
            for placements in placements_of(mesh_shape, len(shape)):
                case = f"rank {rank} of {mesh_shape}, {shape}, {placements}"
                expected = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
                layout = shards.Layout(shape, mesh_shape, shards.splits_of(placements, len(shape)))
                assert layout.local_shape(coordinate) == tuple(expected.shape), case
                assert_boxes(shards, layout.runs(coordinate), whole, expected, case)
                checked += 1
    assert checked >= 50 // (5 - world)


def test_partial_tensors_have_no_shards(opt) -> None:
    with pytest.raises(TypeError, match="Partial"):
        module_of(opt, "distributed.shards").splits_of((Replicate(), Partial()), 2)
