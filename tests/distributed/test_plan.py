"""Who does what and in which order: balance, bounded chunks, phases of a pipeline."""

import random

import pytest
import torch
from torch import distributed

from ..conftest import module_fixture
from ._ranks import same_everywhere
from .test_partition import give, gradients, module_of, plain_params

load_balance = module_fixture("distributed.load_balance")
schedule = module_fixture("distributed.pipeline")


def loads(costs, owners, ranks) -> list[float]:
    total = [0.0] * ranks
    for cost, owner in zip(costs, owners, strict=True):
        total[owner] += cost
    return total


@pytest.mark.sees_defect("owners in turn, not by what is left to do")
@pytest.mark.parametrize("seed", range(20))
def test_balance_is_within_grahams_bound(load_balance, seed) -> None:
    generator = random.Random(seed)
    ranks = generator.randint(1, 8)
    costs = [generator.choice([1, 2, 3, 10, 100]) * 1.0 for _ in range(generator.randint(0, 60))]
    owners = load_balance.assign(costs, [tuple(range(ranks))] * len(costs), ranks)
    down = sorted(costs, reverse=True)  # of k ranks + 1 pieces, one rank gets k + 1
    least = max([sum(costs) / ranks, *((i // ranks + 1) * cost for i, cost in enumerate(down))])
    assert max(loads(costs, owners, ranks)) <= (4 / 3 - 1 / (3 * ranks)) * least + 1e-9
    assert owners == load_balance.assign(costs, [tuple(range(ranks))] * len(costs), ranks)


def test_restricted_work_stays_and_the_rest_makes_up_for_it(load_balance) -> None:
    costs = [4.0, 4.0, 4.0, 1.0, 1.0, 1.0]
    owners = load_balance.assign(costs, [(0,), (1, 2), (1, 2), (0, 1, 2), (0, 1, 2), (1,)], 3)
    assert owners[0] == 0 and owners[5] == 1
    assert set(owners[1:3]) == {1, 2}
    assert max(loads(costs, owners, 3)) == 5.0


@pytest.mark.sees_defect("a chunk is a number of matrices, whatever their size")
@pytest.mark.parametrize("seed", range(20))
def test_chunks_are_bounded_complete_and_mixed(load_balance, seed) -> None:
    """Bytes, not numbers of matrices, bound what is on its way."""
    generator = random.Random(seed)
    ranks, limit = generator.randint(1, 5), 100
    sizes = [generator.choice([1, 5, 30, 60, 150]) for _ in range(generator.randint(0, 50))]
    held = [[size // ranks] * ranks for size in sizes]
    owners = load_balance.assign(sizes, [tuple(range(ranks))] * len(sizes), ranks)
    chunks = load_balance.chunked(owners, sizes, held, limit)
    assert sorted(number for chunk in chunks for number in chunk) == list(range(len(sizes)))
    for chunk in chunks:
        bytes_of = [
            sum(sizes[i] * (owners[i] == rank) + held[i][rank] for i in chunk)
            for rank in range(ranks)
        ]
        of_owners = [owners[i] for i in chunk]
        assert len(set(of_owners)) == len(chunk) or max(bytes_of) <= limit
        assert set(of_owners) == {owners[i] for c in chunks[chunks.index(chunk) :] for i in c}


def test_chunks_are_equal(load_balance) -> None:
    """Ten turns of which four fit are 4, 4 and 2, not 4, 4, 1 and 1.

    A turn has one piece of each owner also where that is more than the limit.
    """

    def lengths(ranks: int, each: int, limit: int, most: int | None = None) -> list[int]:
        count = ranks * each
        owners, held = (*range(ranks),) * each, [[0] * ranks] * count
        chunks = load_balance.chunked(owners, [10] * count, held, limit, most)
        return [len(chunk) for chunk in chunks]

    assert lengths(2, 4, 12) == [2] * 4
    assert lengths(2, 10, 49) == [8, 8, 4]
    assert lengths(2, 5, 49) == [6, 4]  # not 8 and 2
    assert lengths(2, 10, 1000, most=3) == [2] * 10
    assert lengths(3, 2, 1000, most=2) == [2, 1, 2, 1]


SHAPES = [(96, 96)] + [(8, 8)] * 12


def owners_of_shapes(opt, gradients_are: str) -> list[int]:
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
def test_owners_go_by_predicted_time(opt, ranks, load_balance, gradients_are) -> None:
    """Small matrices take far longer than their operations say."""
    choose = module_of(opt, "orthogonalize.choose")
    cpu, everyone = torch.device("cpu"), [(0, 1)] * len(SHAPES)
    times = [choose.predicted_ms(*shape, 8, torch.float32, cpu) / 8 for shape in SHAPES]
    expected = load_balance.assign(times, everyone, 2)
    operations = [float(m * m * n) for m, n in SHAPES]
    assert expected != load_balance.assign(operations, everyone, 2)
    assert tuple(same_everywhere(ranks(2).run(owners_of_shapes, gradients_are))) == expected


def chunk(number, log, later=0):
    log.append(f"open {number}")
    yield
    log.append(f"gather {number}")
    yield
    log.append(f"compute {number}")
    yield later
    log.append(f"scatter {number}")
    yield
    log.append(f"update {number}")


def run(schedule, count, ahead=1, later=lambda number: 0):
    log: list[str] = []
    schedule.run_pipeline(
        (chunk(n, log, later(n)) for n in range(count)),
        ahead=ahead,
        meanwhile=lambda: log.append("other"),
    )
    return log


@pytest.mark.sees_defect(
    "only the first gather runs under other work, and the pipeline drains between groups"
)
def test_every_transfer_has_a_computation_to_hide_under(schedule) -> None:
    """And what opens a chunk is sent before the scatter for which nobody waits yet."""
    assert run(schedule, 4) == [
        *("open 0", "gather 0", "open 1", "other", "gather 1"),
        *("compute 0", "open 2", "scatter 0", "gather 2"),
        *("compute 1", "update 0", "open 3", "scatter 1", "gather 3"),
        *("compute 2", "scatter 2", "update 1"),
        *("compute 3", "scatter 3", "update 2"),
        "update 3",
    ]


def test_parts_of_a_whole_are_scattered_when_all_are_computed(schedule) -> None:
    """One in each round, between the gathers of what comes next."""
    log = run(schedule, 7, later=lambda number: 2 - number % 3)  # wholes 0-2, 3-5; 6 is one of two
    for number in range(6):
        last = 3 * (number // 3) + 2
        assert log.index(f"scatter {number}") > log.index(f"compute {last}")
    rounds = [entry for entry in log if entry.startswith(("gather", "scatter"))]
    assert rounds[4:10] == [
        *("scatter 0", "gather 4", "scatter 1", "gather 5", "scatter 2", "gather 6")
    ]
    assert rounds[-1] == "scatter 6"


def test_what_needs_no_later_computation_is_not_behind_what_does(schedule) -> None:
    """Its message is written already, and would take up memory for as long as it waits."""
    log = run(schedule, 5, later=lambda number: [2, 1, 0, None, None][number])
    scattered = [entry for entry in log if entry.startswith("scatter")]
    assert scattered == [f"scatter {number}" for number in (0, 3, 4, 1, 2)]
