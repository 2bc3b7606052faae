"""What ranks share and what they keep to themselves: counted, bounded, agreed upon.

And who does what in which order: balance, chunks, phases of a pipeline.
"""

import contextlib
import importlib
import logging
import random
import re
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from ..conftest import module_fixture
from ._cases import bits, held_like, local, mesh_of, placed_like, spread
from ._ranks import on_ranks, same_everywhere

pytestmark = pytest.mark.dist

SHAPES = [(8, 6), (8, 6), (6, 8), (12, 5), (8, 6), (3, 4)]


def module_of(opt: Any, name: str) -> Any:
    return importlib.import_module(f"{opt.__name__}.{name}")


def plain_params(shapes=SHAPES, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]


def gradients(params, step: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return [torch.randn(tuple(param.shape), generator=generator) for param in params]


def placed(params, mesh, *texts: str) -> list[nn.Parameter]:
    return [nn.Parameter(spread(param.detach(), mesh, *texts)) for param in params]


def on_all(text: str, shapes=SHAPES) -> list[nn.Parameter]:
    """The same parameters placed alike, such as "S0", on one mesh of all ranks."""
    return placed(plain_params(shapes), mesh_of((distributed.get_world_size(),)), text)


def message_of(call: Callable[[], Any]) -> str:
    """What a call raised, behind the error's name."""
    try:
        call()
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    return "none"


@contextlib.contextmanager
def messages_of(logger: logging.Logger) -> Iterator[list[str]]:
    """What it is told meanwhile, which goes nowhere else."""
    found: list[str] = []
    logger.addFilter(keep := lambda record: found.append(record.getMessage()))
    try:
        yield found
    finally:
        logger.removeFilter(keep)


def outcome(optimizer, params) -> tuple[str, bool]:
    """What a step raised, and whether it wrote something."""
    before = [bits(local(param.detach())) for param in params]
    message = message_of(optimizer.step).removeprefix("RuntimeError: ")
    return message, before != [bits(local(param.detach())) for param in params]


def give(params, grads) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = placed_like(param, grad)


def assert_equal_bits(params, expected) -> None:
    """On this rank, parameter by parameter."""
    for index, (param, other) in enumerate(zip(params, expected, strict=True)):
        one, other = local(param.detach()), local(other.detach())
        assert bits(one) == bits(other), f"parameter {index}: {(one - other).abs().max()}"


def advance(optimizer, params, *steps: int) -> None:
    """A step on the gradients of each of these numbers."""
    for step in steps:
        give(params, gradients(params, step))
        optimizer.step()


def assert_as_alone(opt, params, steps: int, shapes=SHAPES, **options) -> None:
    """As after so many steps of one process by `gradients`, on any placement."""
    alone = plain_params(shapes)
    advance(opt.Muon(alone, **options), alone, *range(steps))
    pairs = zip(params, alone, strict=True)
    assert_equal_bits(params, [held_like(param, one.detach()) for param, one in pairs])


@contextlib.contextmanager
def watched(opt) -> Iterator[SimpleNamespace]:
    """Counts matrices that this rank orthogonalizes, its calls, and the bytes that it sends."""
    step, transport = module_of(opt, "optimizers.step"), module_of(opt, "distributed.transport")
    transport = transport.AllToAll
    found = SimpleNamespace(matrices=0, calls=Counter(), largest=0, sent=0)
    kept = step.orthogonalize, transport.exchange, transport._reduce

    def orthogonalize(x, **options):
        found.matrices += x.numel() // (x.shape[-1] * x.shape[-2])
        return kept[0](x, **options)

    def exchange(here, going, outbox, coming, inbox):
        found.calls["all_to_all"] += 1
        found.largest = max(found.largest, going.size, coming.size)
        found.sent += going.size
        return kept[1](here, going, outbox, coming, inbox)

    def reduce(here, values, op):
        found.calls["all_reduce"] += 1
        return kept[2](here, values, op)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "orthogonalize", orthogonalize)
        patch.setattr(transport, "exchange", exchange)
        patch.setattr(transport, "_reduce", reduce)
        yield found


def split_work(opt, mesh_shape, texts) -> tuple[int, Counter]:
    params, arguments = plain_params(), {}
    if texts is None:
        arguments = {"process_group": distributed.group.WORLD}
    elif mesh_shape == "strided":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))["data"]
        params = placed(params, mesh, *texts)
    else:
        params = placed(params, mesh_of(mesh_shape), *texts)
    optimizer = opt.Muon(params, **arguments)
    with watched(opt) as watch:
        advance(optimizer, params, 0, 1)
    assert_as_alone(opt, params, 2)
    return watch.matrices, watch.calls


@pytest.mark.sees_defect("replicas repeat the same orthogonalization")
@pytest.mark.parametrize(
    ("mesh", "placements"),
    [((4,), None), ((4,), ("R",)), ((2, 2), ("R", "S0")), ((2, 2), ("S1", "R")), ((4,), ("S0",))],
    ids=["DDP", "replicated", "HSDP", "HSDP columns", "FSDP"],
)
def test_no_matrix_is_orthogonalized_twice(ranks, mesh, placements) -> None:
    """Replicas split the work instead of repeating it, and every rank has some."""
    answers = ranks(4).run(split_work, mesh, placements)
    counts = [matrices for matrices, _ in answers]
    assert sum(counts) == 2 * len(SHAPES)
    assert min(counts) >= 2
    calls = same_everywhere([calls for _, calls in answers])
    per_chunk = 1 if placements is None or set(placements) == {"R"} else 2
    assert calls["all_to_all"] == 2 * 4 * per_chunk  # four shapes, two steps
    assert calls["all_reduce"] == 2  # whether all have the same gradients


@pytest.mark.sees_defect(
    "the owner is a global rank modulo the group's size: a strided group uses half its ranks"
)
def test_every_rank_of_a_strided_group_owns_something(ranks) -> None:
    """Ranks 0 and 2 of four are numbers 0 and 1 of their group."""
    counts = [matrices for matrices, _ in ranks(4).run(split_work, "strided", ("S0",))]
    assert [counts[0] + counts[2], counts[1] + counts[3]] == [2 * len(SHAPES)] * 2
    assert min(counts) >= 4


@on_ranks(2)
def test_a_parameter_that_is_sharded_anew_gets_a_new_plan(opt) -> None:
    """Equal names and shapes, other placements."""
    for text in ("S0", "S1", "R"):
        params = on_all(text)
        optimizer = opt.Muon([(f"w{i}", param) for i, param in enumerate(params)])
        advance(optimizer, params, 0)
        assert_as_alone(opt, params, 1)
    # Trainers put other parameters into the groups: here plain ones for DTensors.
    optimizer.param_groups[0]["params"] = fresh = plain_params()
    optimizer.state.clear()
    advance(optimizer, fresh, 0)
    assert_as_alone(opt, fresh, 1)


@on_ranks(3)
def test_experts_that_are_sharded_along_themselves_stay_local(opt) -> None:
    """No communication, and a rank whose experts got no token goes on."""
    (param,) = on_all("S0", [(7, 5, 4)])
    options = {"kind": "muon", "lr": 0.1, "expert_keys": ("experts",)}
    optimizer = opt.MuonAdamW([{"params": [("layers.0.experts.up", param)], **options}])
    give([param], gradients([param], 0))
    if distributed.get_rank() == 1:
        param.grad = None  # none of its experts was routed to
    with watched(opt) as watch:
        _, changed = outcome(optimizer, [param])
    assert changed == (distributed.get_rank() != 1)
    assert watch.calls == Counter()


@pytest.mark.parametrize(
    ("flow", "chunks"),
    [
        ({"in_flight_bytes": 1}, 5),  # one owner has two matrices of a shape
        ({"in_flight_bytes": 3000}, 4),
        ({"in_flight_bytes": 10**6}, 4),
        ({"in_flight_bytes": 3000, "prefetch": 8}, 5),  # ten chunks are alive
        ({"chunk_size": 2}, 5),
        ({"chunk_size": 1, "prefetch": 3}, len(SHAPES)),
    ],
    ids=str,
)
@on_ranks(3)
def test_chunks_are_bounded_and_change_no_bit(opt, flow, chunks) -> None:
    params = on_all("S0")
    optimizer = opt.Muon(params, distributed=opt.DistributedConfig(**flow))
    with watched(opt) as watch:
        advance(optimizer, params, 0, 1)
    assert_as_alone(opt, params, 2)
    assert watch.calls["all_to_all"] == 2 * 2 * chunks
    assert flow != {"in_flight_bytes": 3000} or watch.largest <= 3000 // 3


@pytest.mark.parametrize("wire", [torch.float32, torch.float16], ids=str)
@on_ranks(2)
def test_equal_runs_of_rows_take_no_copy_each(opt, wire) -> None:
    """Messages, batches and updates are one tensor each, whatever the number of matrices."""
    world = distributed.get_world_size()
    shapes = [(8 * world, 8)] * 5 + [(8, 8)] * 2 + [(4 * world, 16)] * 3
    params, config = on_all("S0", shapes), opt.DistributedConfig(wire)
    optimizer = opt.Muon(params, distributed=config)
    copied: Counter[str] = Counter()
    with pytest.MonkeyPatch.context() as patch:
        module = module_of(opt, "optimizers.sharded.exchange")
        patch.setattr(module, "copy_all", lambda to, of: copied.update(pieces=len(to)))
        advance(optimizer, params, 0, 1)
    assert_as_alone(opt, params, 2, shapes, distributed=config)
    assert copied == Counter()


@on_ranks(2)
def test_state_of_another_placement_is_refused(opt) -> Any:
    optimizer = opt.Muon(on_all("S0"))
    optimizer.fit_state()
    message = message_of(lambda: opt.Muon(on_all("S1")).load_state_dict(optimizer.state_dict()))
    assert message.startswith("ValueError: ")
    assert "parameter 0: the loaded momentum_buffer has placements" in message
    assert "torch.distributed.checkpoint" in message
    return message


def shared_report(optimizer) -> str:
    """Its report without the ends of lines: bytes and times, which every rank has of its own."""
    lines = optimizer.report(verbose=True).splitlines()
    return "\n".join(re.split(", kernels|; ", line)[0] for line in lines)


@on_ranks(2)
def test_report_names_owners_and_the_wire(opt) -> str:
    text = shared_report(opt.Muon(on_all("S0")))
    assert "1 x (12, 5) on rank" in text
    assert "| owner rank 0 of 2" in text and "| owner rank 1 of 2" in text
    assert "of 2, float32 on the wire" in text
    assert "6 parameters by muon" in text
    return text


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


UNEVEN = [(96, 96)] + [(8, 8)] * 12


@pytest.mark.parametrize("gradients_are", ["reduced", "unreduced"])
@on_ranks(2)
def test_owners_go_by_predicted_time(opt, gradients_are) -> None:
    """Small matrices take far longer than their operations say."""
    params = plain_params(UNEVEN)
    arguments = {"process_group": distributed.group.WORLD, "gradients": gradients_are}
    optimizer = opt.MuonAdamW([{"kind": "muon", "params": params, "lr": 0.1}], **arguments)
    give(params, gradients(params, distributed.get_rank() if gradients_are == "unreduced" else 0))
    optimizer.step()
    chunks = [c for of_group in optimizer._plan.shared.chunks for c in of_group]
    wholes = [getattr(chunk, "whole", chunk) for chunk in chunks]
    owner = {m.param: o for c in wholes for m, o in zip(c.members, c.owners, strict=True)}
    predicted_ms = module_of(opt, "orthogonalize.choose").predicted_ms
    assign, everyone = module_of(opt, "distributed.load_balance").assign, [(0, 1)] * len(UNEVEN)
    times = [predicted_ms(*shape, 8, torch.float32, torch.device("cpu")) / 8 for shape in UNEVEN]
    expected = assign(times, everyone, 2)
    assert expected != assign([float(m * m * n) for m, n in UNEVEN], everyone, 2)
    assert tuple(owner[param] for param in params) == expected


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


@pytest.mark.parametrize("ahead", [1, 2, 3])
@pytest.mark.parametrize("count", [0, 1, 2, 5, 9])
def test_phases_are_in_order_and_few_chunks_are_alive(schedule, count, ahead) -> None:
    log = run(schedule, count, ahead)
    assert log.count("other") == 1
    before = log[: log.index("other")]
    assert [e for e in before if "gather" in e] == [f"gather {n}" for n in range(min(count, ahead))]
    alive: set[str] = set()
    for entry in log:
        phase, *number = entry.split()
        if phase == "open":
            alive.add(number[0])
        if phase == "update":
            alive.remove(number[0])
        assert len(alive) <= schedule.in_flight(ahead)
    assert len(log) == 5 * count + 1
    for phase in ("open", "gather", "compute", "scatter", "update"):
        order = [entry for entry in log if entry.startswith(phase)]
        assert order == [f"{phase} {n}" for n in range(count)]


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
