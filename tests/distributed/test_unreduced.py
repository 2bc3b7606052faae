"""Unreduced gradients: the step of one rank on their mean, with the state spread over all."""

import copy
import itertools
import re
from typing import Any
from unittest import mock

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from ._cases import bits, device, local
from ._ranks import on_ranks
from .test_partition import (
    assert_equal_bits,
    give,
    gradients,
    module_of,
    on_all,
    outcome,
    plain_params,
    shared_report,
    watched,
)

pytestmark = pytest.mark.dist

MATRICES = [(8, 6), (6, 8), (8, 6), (5, 12), (8, 6)]
# 37 and 2 rows are no multiples of any number of ranks; 2 rows leave ranks without any.
OTHERS = [(37, 40), (2, 600), (5, 3), (7,), (1200,), ()]


def parameters() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    shapes = MATRICES + OTHERS
    return [nn.Parameter(torch.randn(s, generator=generator).to(device())) for s in shapes]


def contribution(shape, rank: int, step: int, index: int) -> torch.Tensor:
    """Multiples of 1/8 up to 64: their sums, and their means over 2, 4 or 8 ranks, are exact."""
    generator = torch.Generator().manual_seed(1000 * rank + 100 * step + index)
    return (torch.randint(-512, 512, shape, generator=generator) / 8).to(device())


def contribute(params, step: int) -> None:
    for index, param in enumerate(params):
        param.grad = contribution(param.shape, distributed.get_rank(), step, index)


def groups(params, beta2=0.9) -> list[dict[str, Any]]:
    matrices, others = params[: len(MATRICES)], params[len(MATRICES) :]
    return [
        {"kind": "adamw", "params": others[:3], "lr": 0.1},
        {"kind": "muon", "params": matrices[:2], "lr": 0.1, "weight_decay": 0.1, "beta2": beta2},
        {"kind": "muon", "params": matrices[2:], "lr": 0.2, "beta2": beta2},
        {"kind": "adamw", "params": others[3:], "lr": 0.2, "weight_decay": 0.1},
    ]


def missing(step: int, index: int) -> bool:
    return (step, index) in {(1, 1), (1, 6), (2, 8), (0, 4)}


def reference(opt, world: int, steps: int, reduce_op="avg", beta2=0.9) -> tuple[Any, list]:
    params = parameters()
    optimizer = opt.MuonAdamW(groups(params, beta2))
    for step in range(steps):
        for index, param in enumerate(params):
            parts = [contribution(param.shape, rank, step, index) for rank in range(world)]
            total = torch.stack(parts).sum(0)
            total = total / world if reduce_op == "avg" else total
            param.grad = None if missing(step, index) else total
        optimizer.step()
    return optimizer, params


def train(optimizer, params, steps) -> None:
    for step in steps:
        for index, param in enumerate(params):
            grad = contribution(param.shape, distributed.get_rank(), step, index)
            param.grad = None if missing(step, index) else grad
        kept = [None if p.grad is None else p.grad.clone() for p in params]
        optimizer.step()
        for param, before in zip(params, kept, strict=True):  # none_grad is False here
            assert (param.grad is None) == (before is None)
            assert before is None or torch.equal(param.grad, before)


def equals_one_rank(opt, reduce_op: str, limit: int) -> int:
    params = parameters()
    optimizer = opt.DistMuonAdamW(
        groups(params),
        reduce_op=reduce_op,
        distributed=opt.DistributedConfig(in_flight_bytes=limit),
    )
    train(optimizer, params, range(4))
    world = distributed.get_world_size()
    single, expected = reference(opt, world, 4, reduce_op)
    assert_equal_bits(params, expected)
    rank, elements = distributed.get_rank(), 0
    for param, other in zip(params, expected, strict=True):
        for key, value in optimizer.state[param].items():
            whole = single.state[other][key]
            here = local(value)
            elements += here.numel()
            if hasattr(value, "to_local"):
                each = -(-whole.shape[0] // world)
                whole = whole[rank * each : (rank + 1) * each]
            assert bits(here) == bits(whole), key
    return elements


@pytest.mark.sees_defect(
    "rows that the number of ranks does not divide are dropped, then fail in NCCL"
)
@pytest.mark.parametrize("limit", [2**28, 20000])
def test_unreduced_equals_one_rank(ranks, world, limit) -> None:
    """Any number of rows, several chunks; the state is spread, not repeated."""
    matrices = [r * c for r, c in MATRICES]
    statistics = sum(max(shape) for shape in MATRICES)
    large = 2 * (37 * 40 + 2 * 600 + 1200)
    small = 2 * (5 * 3 + 7 + 1) + len(OTHERS)
    row = 600 * 2 + 40 * 2 + 2  # slices differ by at most one row
    fair = (sum(matrices) + statistics + large) / world
    for reduce_op in ("avg", "sum")[world == 3 :]:  # a third is no binary number
        elements = ranks(world).run(equals_one_rank, reduce_op, limit)
        assert sum(elements) == sum(matrices) + statistics + large + world * small
        assert max(elements) <= fair + max(matrices) + max(map(max, MATRICES)) + row + small


@pytest.mark.parametrize("wire", [None, torch.float16], ids=str)
@on_ranks(2)
def test_rows_in_bands_change_no_bit_and_bound_the_messages(opt, wire) -> Any:
    """Whole matrices of every owner at once would be messages of any size."""
    shapes = [(20, 6), (6, 40), (20, 6), (3, 12, 4), (33, 9)]
    limit = 3 * 2400
    rank, world = distributed.get_rank(), distributed.get_world_size()
    params, single = (
        [nn.Parameter(torch.ones(shape, device=device())) for shape in shapes] for _ in range(2)
    )
    options = {"kind": "muon", "lr": 0.1, "beta2": 0.9, "expert_keys": ["experts"]}
    names = [f"experts.{k}" if len(shape) == 3 else f"w.{k}" for k, shape in enumerate(shapes)]
    group, alone = ({"params": p, "names": names, **options} for p in (params, single))
    optimizer = opt.DistMuonAdamW(
        [group], distributed=opt.DistributedConfig(wire, in_flight_bytes=limit)
    )
    one = opt.MuonAdamW([alone])
    with watched(opt) as watch:
        for step in range(3):
            for index, (param, other) in enumerate(zip(params, single, strict=True)):
                parts = [contribution(param.shape, r, step, index) for r in range(world)]
                param.grad = None if (step, index) == (1, 2) else parts[rank]
                other.grad = None if param.grad is None else torch.stack(parts).sum(0) / world
            optimizer.step()
            one.step()
    for param, other in zip(params, single, strict=True):
        if wire is None:
            assert bits(param) == bits(other)
        else:  # the updates are rounded to 11 bits
            assert (param - other).abs().max() <= 3 * 0.1 * 2**-10
    assert watch.largest <= limit // 3
    chunks = watch.calls["all_to_all"] // 2 // 3
    assert chunks > 5  # shapes
    return chunks


@pytest.mark.parametrize("world", [2, 3])
@on_ranks()
def test_what_an_owner_has_does_not_travel_and_whole_matrices_are_not_cut(opt, world) -> None:
    """Messages to oneself double the traffic of two ranks; rows take a view per matrix and band."""
    params = [nn.Parameter(torch.ones(16, 8, device=device())) for _ in range(4 * world)]
    table = nn.Parameter(torch.ones(64 * world, 16, device=device()))
    listed = [{"kind": "muon", "params": params, "lr": 0.1}]
    listed += [{"kind": "adamw", "params": [table], "lr": 0.1}]
    limit = 3 * 2 * (world - 1) * 2 * 16 * 8 * 4  # two matrices of every owner
    config = opt.DistributedConfig(in_flight_bytes=limit)
    optimizer = opt.DistMuonAdamW(listed, distributed=config)
    contribute([*params, table], 0)
    bands = module_of(opt, "optimizers.sharded.partition").Owners
    cut: list[int] = []
    original = bands._banded

    def banded(self, *arguments):
        found = original(self, *arguments)
        cut.extend(int(rows != (0, 16)) for rows in found.rows)
        return found

    with mock.patch.object(bands, "_banded", banded), watched(opt) as watch:
        optimizer.step()
    assert watch.sent == 2 * (world - 1) * 4 * (4 * 16 * 8 + 64 * 16)
    assert (len(cut), sum(cut)) == (2, 0)


@on_ranks(3)
def test_ranks_hold_the_same_parameters(opt) -> list[bytes]:
    """Means of three are not exact: the ranks still agree in every bit."""
    params = parameters()
    optimizer = opt.DistMuonAdamW(groups(params))
    train(optimizer, params, range(2))
    _, expected = reference(opt, 3, 2)
    for param, other in zip(params, expected, strict=True):
        torch.testing.assert_close(param, other, rtol=1e-3, atol=1e-3)
    return [bits(param) for param in params]


@on_ranks(2)
def test_contributions_and_updates_travel_in_half_precision_if_asked(opt) -> list[bytes]:
    results, sent = [], []
    for wire in (torch.float32, torch.float16):
        params, config = parameters(), opt.DistributedConfig(wire)
        optimizer = opt.DistMuonAdamW(groups(params, beta2=None), distributed=config)
        with watched(opt) as watch:
            train(optimizer, params, range(2))
        results.append(params)
        sent.append(watch.sent)
    for full, half in zip(*results, strict=True):
        # One step moves an element by up to lr: the contributions, exact in float16 here, are
        # equal; the updates of matrices are rounded to 11 bits.
        assert (full - half).abs().max() <= 2 * 0.2 * 2**-10
    assert sent[1] < 0.8 * sent[0]  # the new rows of large parameters come back in float32
    return [bits(param) for param in results[1]]


@pytest.mark.sees_defect("small gradients are reduced one by one, into p.grad")
@pytest.mark.sees_defect(
    "fewer matrices than ranks leave ranks idle, and padding travels both ways"
)
@pytest.mark.parametrize("none_grad", [True, False])
@on_ranks(2)
def test_small_parameters_share_one_all_reduce(opt, none_grad) -> None:
    """Private buffers, one call; two exchanges per shape of a group and large parameter."""
    params = parameters()
    optimizer = opt.DistMuonAdamW([{**g, "none_grad": none_grad} for g in groups(params)])
    contribute(params, 0)
    with watched(opt) as watch:
        optimizer.step()
    assert all((param.grad is None) == none_grad for param in params)
    questions = 2  # which gradients there are, and in the first step whether they differ
    assert watch.calls["all_reduce"] == 1 + questions
    # By predicted time both 8 x 6 matrices of the second group are one rank's: a turn for each.
    assert watch.calls["all_to_all"] == 2 * (2 + (2 + 1) + 3)


@pytest.mark.sees_defect("gradients that DDP reduced are averaged again")
@on_ranks(2)
def test_gradients_that_ddp_reduced_are_noticed(opt) -> Any:
    """They would be averaged twice; also after a step before the first backward pass."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 6), nn.Linear(6, 4, bias=False))
    wrapped = DistributedDataParallel(model)
    optimizer = opt.DistMuonAdamW(
        [
            {"kind": "muon", "params": [p for p in model.parameters() if p.ndim == 2], "lr": 0.1},
            {"kind": "adamw", "params": [p for p in model.parameters() if p.ndim < 2], "lr": 0.1},
        ]
    )
    optimizer.step()
    torch.manual_seed(distributed.get_rank())
    wrapped(torch.randn(3, 8)).square().sum().backward()
    message, written = outcome(optimizer, [*model.parameters()])
    assert "every rank has the same gradients, bit for bit" in message
    assert "DistributedDataParallel" in message and not written
    return message


@pytest.mark.sees_defect("zeros on every rank are taken for gradients that something reduced")
@on_ranks(2)
def test_gradients_of_zeros_are_no_sign_of_a_reduction(opt) -> None:
    params = parameters()
    optimizer = opt.DistMuonAdamW([{**g, "weight_decay": 0.0} for g in groups(params)])
    before = [bits(param) for param in params]
    for param in params:
        param.grad = torch.zeros_like(param)
    optimizer.step()
    assert before == [bits(param) for param in params]


@on_ranks(4)
def test_a_resumed_run_continues_bit_for_bit(opt) -> None:
    world = distributed.get_world_size()
    params = parameters()
    optimizer = opt.DistMuonAdamW(groups(params))
    train(optimizer, params, range(2))
    _, expected = reference(opt, world, 4)
    # This rank's own part; and the whole state of one rank, as from another number of ranks.
    single, _ = reference(opt, world, 2)
    for saved in (optimizer.state_dict(), single.state_dict()):
        copies = [nn.Parameter(param.detach().clone()) for param in params]
        fresh = opt.DistMuonAdamW(groups(copies))
        fresh.load_state_dict(saved)
        train(fresh, copies, range(2, 4))
        assert_equal_bits(copies, expected)


@on_ranks(2)
def test_a_copied_optimizer_keeps_its_owners_and_says_who_they_are(opt) -> str:
    params = parameters()
    optimizer = opt.DistMuonAdamW(groups(params))
    train(optimizer, params, range(2))
    clone = copy.deepcopy(optimizer)
    originals, copies = (
        [param for group in one.param_groups for param in group["params"]]
        for one in (optimizer, clone)
    )
    for one, of_one in ((optimizer, originals), (clone, copies)):
        contribute(of_one, 9)
        one.step()
    assert_equal_bits(copies, originals)
    text = shared_report(clone)
    assert "parameter 0 (37, 40): adamw | rows shared out to 2 ranks" in text
    assert "parameter 2 (5, 3): adamw | owner every rank\n" in text
    assert "1 x (8, 6) on rank 0 of 2, float32 on the wire" in text
    assert "5 parameters by muon in 5 batches" in text
    return text


@on_ranks(2)
def test_a_later_group_takes_no_state_from_its_owners(opt) -> None:
    params = parameters()
    first, second = params[:2], params[2:5]
    optimizer = opt.DistMuonAdamW([{"kind": "muon", "params": first, "lr": 0.1}])
    optimizer.fit_state()
    kept = {param: bool(optimizer.state[param]) for param in first}
    optimizer.add_param_group({"kind": "muon", "params": second, "lr": 0.1})
    optimizer.fit_state()
    assert kept == {param: bool(optimizer.state[param]) for param in first}
    owned = torch.tensor([bool(optimizer.state[param]) for param in params[:5]]).int()
    owned = owned.to(device())
    assert 2 <= owned.sum() <= 3
    distributed.all_reduce(owned)
    assert owned.tolist() == [1] * 5


@on_ranks(2)
def test_a_refused_group_gets_no_owners(opt) -> None:
    """The ranks that refuse it, and those that never saw it, still agree about the next group."""
    params = parameters()
    optimizer = opt.DistMuonAdamW([{"kind": "muon", "params": params[:2], "lr": 0.1}])
    owners = optimizer._ranks.unreduced
    before = dict(owners._owners), list(owners._load)
    bad = {"kind": "muon", "params": params[2:5], "names": ["a", "b", "c"], "lr": 0.1}
    for options in ({"num_heads": {"d": 2}}, {"rounding": "stochastic"}, {"num_heads": {"b": 3}}):
        with torch.no_grad():
            narrow = [nn.Parameter(param.bfloat16()) for param in params[2:5]]
        with pytest.raises(ValueError):
            optimizer.add_param_group({**bad, "params": narrow, **options})
        assert (owners._owners, owners._load) == before
    (param,) = on_all("S0", [(4, 4)])
    group = {"kind": "muon", "params": [("w", param)], "lr": 0.1}
    with pytest.raises(TypeError, match="parameter 'w': gradients='unreduced' takes plain parame"):
        opt.DistMuonAdamW([group])


def test_one_byte_in_flight_is_one_row_at_a_time(ranks) -> None:
    """The least that can be asked for is served, not divided by."""
    ranks(2).run(equals_one_rank, "avg", 1)


STEADY = [(16, 8)] * 6 + [(24, 16)] * 2
TABLE = (384, 16)
LIMIT = 3 * 4096


def steady(opt, **config: Any) -> tuple[Any, list[nn.Parameter]]:
    params = [nn.Parameter(torch.ones(shape, device=device())) for shape in [*STEADY, TABLE]]
    muon = {"kind": "muon", "params": params[:-1], "lr": 0.1}
    others = {"kind": "adamw", "params": params[-1:], "lr": 0.1}
    config = opt.DistributedConfig(**config)
    return opt.DistMuonAdamW([muon, others], distributed=config), params


@pytest.mark.parametrize("wire", [None, torch.float16], ids=str)
@on_ranks(2)
def test_messages_are_bounded(opt, wire) -> None:
    """Also those of new rows, which come back in float32 where contributions go in float16."""
    travels = wire or torch.float32
    optimizer, params = steady(opt, in_flight_bytes=LIMIT, wire_dtype=wire)
    for step in range(2):
        contribute(params, step)
        optimizer.step()
    shared = optimizer._plan.shared
    (where,) = shared.staging.devices()
    blocks = shared.staging._blocks
    messages = sum(block.numel() for block in blocks["message", where])
    names = module_of(opt, "optimizers.sharded.cuda_graphs")
    here, beside = (shared.graphs._room[where, pool] for pool in (names.HERE, names.BESIDE))
    blocks = shared.staging.held(where)
    assert 0 < messages <= LIMIT
    largest = max(6 // 2 * 16 * 8, 24 * 16)  # elements that an owner orthogonalizes at once
    # directions of two batches, and updates of those that are computed or on their way
    assert blocks <= LIMIT + largest * (2 * 4 + 3 * travels.itemsize)
    # contributions of a sixth of all messages, in float32, if they travel in float16
    assert 0 < here <= 2 * LIMIT // 6 if wire else here == 0
    assert beside == 13 * largest


@on_ranks(2)
def test_slices_travel_between_bands(opt) -> Any:
    """They keep the wire busy, and bands the multiprocessors."""
    optimizer, _ = steady(opt, in_flight_bytes=LIMIT // 8)
    optimizer.fit_state()
    optimizer.report()  # which plans
    order = [type(chunk).__name__ for _, chunk in optimizer._plan.shared.order]
    bands = [number for number, kind in enumerate(order) if kind == "Bands"]
    assert len(bands) >= 3 and order.count("SliceChunk") > len(bands)
    assert all(later - one > 1 for one, later in itertools.pairwise(bands))
    return order


@pytest.mark.gpu
@on_ranks(2)
def test_captures_cut_up_one_block(opt) -> None:
    """Not the sum of their sizes; and the pool outlives the last of them."""
    where = torch.device("cuda", torch.cuda.current_device())
    capture = module_of(opt, "optimizers.sharded.cuda_graphs").capturer(where, 2**26)
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    for power in (23, 24, 25, 26):
        graph = capture(lambda size=2**power: torch.zeros(size, dtype=torch.uint8, device=where))
        graph.replay()
        torch.cuda.synchronize()
        del graph
    assert 2**26 <= torch.cuda.memory_reserved() - before <= 2**26 + 2**22


SHAPES = [(12, 8), (12, 8), (40, 30)]  # two matrices, a table for AdamW
PER_ELEMENT = 7 * 4  # gradient, buffer or moments twice, direction twice, parameter twice
MOMENTUM = 4 * 4  # gradient, buffer twice, direction


def reported(opt: Any, held: str) -> list[int]:
    """The bytes that this rank moves, by parameter."""
    params = on_all("S0", SHAPES) if held == "sharded" else plain_params(SHAPES)
    arguments = {"gradients": "unreduced"} if held == "unreduced" else {}
    groups = [
        {"kind": "muon", "params": params[:2], "lr": 0.1, "beta2": None},
        {"kind": "adamw", "params": params[2:], "lr": 0.1},
    ]
    optimizer = opt.MuonAdamW(groups, **arguments)
    optimizer.measure_steps()
    values = gradients(params, distributed.get_rank() if held == "unreduced" else 0)
    give(params, values)
    optimizer.step()
    *lines, last = optimizer.report(verbose=True).splitlines()
    assert ", of what this rank does" in last
    # AdamW on shards is each rank's own.
    assert last.endswith("beside what ranks share") == (held == "sharded")
    return [int(re.search(r"(\d+) bytes moved", line)[1]) for line in lines]


@pytest.mark.parametrize("held", ["sharded", "unreduced"])
def test_bytes_are_those_of_this_rank(ranks, held) -> None:
    """The whole parameter on every rank would count everything twice."""
    totals = [sum(of_param) for of_param in zip(*ranks(2).run(reported, held), strict=True)]
    matrix, table = 12 * 8, 40 * 30
    if held == "sharded":
        assert totals == [matrix * PER_ELEMENT] * 2 + [table * PER_ELEMENT]
    else:  # one owner advances the momentum, and both apply the update
        assert totals == [matrix * (MOMENTUM + 2 * 12)] * 2 + [table * PER_ELEMENT]
