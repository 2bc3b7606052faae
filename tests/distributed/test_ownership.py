"""Who does what: balance, restrictions, chunks of bounded size, the same answer everywhere."""

from __future__ import annotations

import importlib
import random

import pytest
import torch

from ._ranks import same_everywhere
from .test_sharing import give, gradients, module_of, plain_params


@pytest.fixture(scope="module")
def ownership(opt):
    return importlib.import_module(f"{opt.__name__}.distributed.ownership")


def loads(costs, owners, ranks) -> list[float]:
    total = [0.0] * ranks
    for cost, owner in zip(costs, owners, strict=True):
        total[owner] += cost
    return total


@pytest.mark.parametrize("seed", range(20))
def test_balance_is_within_grahams_bound(ownership, seed) -> None:
    generator = random.Random(seed)
    ranks = generator.randint(1, 8)
    costs = [generator.choice([1, 2, 3, 10, 100]) * 1.0 for _ in range(generator.randint(0, 60))]
    owners = ownership.assign(costs, [tuple(range(ranks))] * len(costs), ranks)
    down = sorted(costs, reverse=True)  # of k ranks + 1 pieces, one rank gets k + 1
    least = max([sum(costs) / ranks, *((i // ranks + 1) * cost for i, cost in enumerate(down))])
    assert max(loads(costs, owners, ranks)) <= (4 / 3 - 1 / (3 * ranks)) * least + 1e-9
    assert owners == ownership.assign(costs, [tuple(range(ranks))] * len(costs), ranks)


@pytest.mark.sees_defect("owners in turn, not by what is left to do")
def test_longest_first_beats_turns(ownership) -> None:
    """Owners in turn leave one rank with most of the work."""
    costs = [8.0, 1.0, 8.0, 1.0, 8.0, 1.0, 8.0, 1.0]
    owners = ownership.assign(costs, [(0, 1)] * 8, 2)
    assert loads(costs, owners, 2) == [18.0, 18.0]
    turns = [i % 2 for i in range(8)]
    assert max(loads(costs, turns, 2)) == 32.0


def test_equal_work_goes_to_all_ranks_equally(ownership) -> None:
    owners = ownership.assign([5.0] * 12, [tuple(range(4))] * 12, 4)
    assert loads([1.0] * 12, owners, 4) == [3.0] * 4


def test_restricted_work_stays_and_the_rest_makes_up_for_it(ownership) -> None:
    costs = [4.0, 4.0, 4.0, 1.0, 1.0, 1.0]
    owners = ownership.assign(costs, [(0,), (1, 2), (1, 2), (0, 1, 2), (0, 1, 2), (1,)], 3)
    assert owners[0] == 0 and owners[5] == 1
    assert set(owners[1:3]) == {1, 2}
    assert max(loads(costs, owners, 3)) == 5.0


@pytest.mark.parametrize("candidates", [(), (2,), (-1,)])
def test_impossible_candidates(ownership, candidates) -> None:
    with pytest.raises(ValueError, match="piece 0 has candidates"):
        ownership.assign([1.0], [candidates], 2)


@pytest.mark.sees_defect("a chunk is a number of matrices, whatever their size")
@pytest.mark.parametrize("seed", range(20))
def test_chunks_are_bounded_complete_and_mixed(ownership, seed) -> None:
    """Bytes, not numbers of matrices, bound what is on its way."""
    generator = random.Random(seed)
    ranks, limit = generator.randint(1, 5), 100
    sizes = [generator.choice([1, 5, 30, 60, 150]) for _ in range(generator.randint(0, 50))]
    held = [[size // ranks] * ranks for size in sizes]
    owners = ownership.assign(sizes, [tuple(range(ranks))] * len(sizes), ranks)
    chunks = ownership.chunked(owners, sizes, held, limit)
    assert sorted(number for chunk in chunks for number in chunk) == list(range(len(sizes)))
    for chunk in chunks:
        bytes_of = [
            sum(sizes[i] * (owners[i] == rank) + held[i][rank] for i in chunk)
            for rank in range(ranks)
        ]
        of_owners = [owners[i] for i in chunk]
        assert len(set(of_owners)) == len(chunk) or max(bytes_of) <= limit
        assert set(of_owners) == {owners[i] for c in chunks[chunks.index(chunk) :] for i in c}


def test_a_chunk_has_work_for_all_owners(ownership) -> None:
    owners = (0, 0, 0, 0, 1, 1, 1, 1)
    chunks = ownership.chunked(owners, [10] * 8, [[0, 0]] * 8, 20)
    assert [sorted(owners[i] for i in chunk) for chunk in chunks] == [[0, 0, 1, 1]] * 2
    # Also where one piece of each owner is more than the limit: or all but one would wait.
    chunks = ownership.chunked(owners, [10] * 8, [[2, 2]] * 8, 12)
    assert [sorted(owners[i] for i in chunk) for chunk in chunks] == [[0, 1]] * 4


def test_chunks_are_equal(ownership) -> None:
    """Ten turns of which four fit are 4, 4 and 2, not 4, 4, 1 and 1."""
    owners = (0, 1) * 10
    chunks = ownership.chunked(owners, [10] * 20, [[0, 0]] * 20, 49)
    assert [len(chunk) for chunk in chunks] == [8, 8, 4]
    chunks = ownership.chunked((0, 1) * 5, [10] * 10, [[0, 0]] * 10, 49)
    assert [len(chunk) for chunk in chunks] == [6, 4]  # not 8 and 2
    chunks = ownership.chunked(owners, [10] * 20, [[0, 0]] * 20, 1000, most=3)
    assert [len(chunk) for chunk in chunks] == [2] * 10
    chunks = ownership.chunked((0, 1, 2) * 2, [10] * 6, [[0] * 3] * 6, 1000, most=2)
    assert [len(chunk) for chunk in chunks] == [2, 1, 2, 1]


SHAPES = [(96, 96)] + [(8, 8)] * 12


def owners_of_shapes(opt, gradients_are: str) -> list[int]:
    from torch import distributed

    params = plain_params(SHAPES)
    arguments = {"process_group": distributed.group.WORLD, "gradients": gradients_are}
    optimizer = opt.MuonAdamW([{"kind": "muon", "params": params, "lr": 0.1}], **arguments)
    give(params, gradients(params, distributed.get_rank() if gradients_are == "unreduced" else 0))
    optimizer.step()
    chunks = [c for of_group in optimizer._plan.shared.chunks for c in of_group]
    wholes = [getattr(chunk, "whole", chunk) for chunk in chunks]
    owner = {m.param: o for c in wholes for m, o in zip(c.members, c.owners, strict=True)}
    return [owner[param] for param in params]


@pytest.mark.dist
@pytest.mark.parametrize("gradients_are", ["reduced", "unreduced"])
def test_owners_go_by_predicted_time(opt, ranks, ownership, gradients_are) -> None:
    """Small matrices take far longer than their operations say."""
    choose = module_of(opt, "orthogonalize.choose")
    cpu, everyone = torch.device("cpu"), [(0, 1)] * len(SHAPES)
    times = [choose.predicted_ms(*shape, 8, torch.float32, cpu) / 8 for shape in SHAPES]
    expected = ownership.assign(times, everyone, 2)
    operations = [float(m * m * n) for m, n in SHAPES]
    assert expected != ownership.assign(operations, everyone, 2)
    assert tuple(same_everywhere(ranks(2).run(owners_of_shapes, gradients_are))) == expected
