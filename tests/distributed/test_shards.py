"""What a rank holds, against what DTensor really gives it."""

from __future__ import annotations

import importlib
import itertools
import math

import pytest
import torch

pytestmark = pytest.mark.dist

MESHES = {1: [(1,)], 2: [(2,), (1, 2)], 3: [(3,)], 4: [(4,), (2, 2), (4, 1)], 8: [(2, 2, 2)]}
SHAPES = [(8, 6), (5, 3), (1, 4), (7, 1), (9, 10), (3, 7, 2), (2, 1, 5), (0, 3), ()]


def placements_of(mesh, ndim):
    """Every combination of replication, shards of each dimension, and strided shards."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    choices = []
    for number in range(len(mesh)):
        later = math.prod(mesh[number + 1 :])
        of_dim = [Replicate(), *(Shard(k) for k in range(min(ndim, 2)))]
        of_dim += [_StridedShard(0, split_factor=later)] if later > 1 and ndim else []
        of_dim += [_StridedShard(1, split_factor=3)] if number == 0 and ndim > 1 else []
        choices.append(of_dim)
    return itertools.product(*choices)


def shards_module(opt):
    return importlib.import_module(f"{opt.__name__}.distributed.shards")


def compare_with_dtensor(opt, world: int) -> int:
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    shards, checked = shards_module(opt), 0
    rank = distributed.get_rank()
    for mesh_shape in MESHES[world]:
        mesh = init_device_mesh("cpu", mesh_shape)
        coordinate = mesh.get_coordinate()
        for shape in SHAPES:
            whole = torch.arange(math.prod(shape)).reshape(shape)
            for placements in placements_of(mesh_shape, len(shape)):
                case = f"rank {rank} of {mesh_shape}, {shape}, {placements}"
                expected = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
                layout = shards.Layout(shape, mesh_shape, shards.splits_of(placements, len(shape)))
                assert layout.local_shape(coordinate) == tuple(expected.shape), case
                assert_boxes(shards, layout.runs(coordinate), whole, expected, case)
                checked += 1
    return checked


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


@pytest.mark.parametrize("world", [1, 2, 3, 4])
def test_shards_are_those_of_dtensor(ranks, world) -> None:
    for checked in ranks(world).run(compare_with_dtensor, world):
        assert checked >= 50 // (5 - world)


def test_every_element_is_held_once_per_replica(opt) -> None:
    """On a mesh of three dimensions, without any process."""
    shards, mesh = shards_module(opt), (2, 2, 2)
    coordinates = list(itertools.product(*map(range, mesh)))
    count = 0
    for shape in [(8, 8), (5, 3), (1, 7), (3, 5, 2)]:
        for placements in placements_of(mesh, len(shape)):
            layout = shards.Layout(shape, mesh, shards.splits_of(placements, len(shape)))
            seen: dict[tuple, list] = {}
            for coordinate in coordinates:
                runs = layout.runs(coordinate)
                elements = itertools.product(
                    *([i for s, n in of_dim for i in range(s, s + n)] for of_dim in runs)
                )
                seen.setdefault(layout.replica(coordinate), []).extend(elements)
            everything = sorted(itertools.product(*map(range, shape)))
            assert all(sorted(elements) == everything for elements in seen.values())
            count += 1
    assert count > 150


def test_a_number_is_one_box(opt) -> None:
    """As a 0-D parameter has whose state is loaded."""
    (box,) = shards_module(opt).boxes((), ())
    number = torch.tensor(3.0)
    assert box.whole and box.numel == 1 and box.view(number) is number


def test_partial_tensors_have_no_shards(opt) -> None:
    from torch.distributed.tensor import Partial, Replicate

    with pytest.raises(TypeError, match="Partial"):
        shards_module(opt).splits_of((Replicate(), Partial()), 2)
