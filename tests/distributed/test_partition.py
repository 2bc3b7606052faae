"""What ranks share and what they keep to themselves: counted, bounded, agreed upon."""

import contextlib
import importlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

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
