"""`MuonAdamW` that nobody told whether gradients are reduced, as nanochat constructs its own."""

import copy
import logging
import time
from typing import Any
from unittest import mock

import pytest
from torch import distributed

from ._ranks import on_ranks
from .test_consistency import here
from .test_partition import give, gradients, messages_of, module_of, outcome, plain_params, watched

pytestmark = pytest.mark.dist

SHAPES = [(8, 6), (6, 8), (7,)]


def optimizer_of(opt, params, **arguments: Any):
    groups = [
        {"kind": "muon", "params": [p for p in params if p.ndim == 2], "lr": 0.02},
        {"kind": "adamw", "params": [p for p in params if p.ndim != 2], "lr": 0.02},
    ]
    return opt.MuonAdamW(groups, **arguments)


def exchanges(opt) -> Any:
    """Counts what is asked of the store."""
    module = module_of(opt, "optimizers.sharded.consistency")
    return mock.patch.object(module, "exchange", wraps=module.exchange)


@pytest.mark.parametrize("index", range(len(SHAPES)))
@on_ranks()
def test_replicas_with_different_gradients_are_an_error_on_every_rank(opt, world, index) -> Any:
    """Nothing is written; when the gradients are reduced, the step goes on."""
    params = plain_params(SHAPES)
    optimizer = optimizer_of(opt, params)
    give(params, gradients(params, 1))
    if here()[0]:
        params[index].grad += 1
    first = outcome(optimizer, params)
    give(params, gradients(params, 1))
    assert outcome(optimizer, params) == ("none", True)
    message, written = first
    if world == 1:
        assert first == ("none", True)
        return message
    assert "hold the same parameters with different gradients" in message
    assert "gradients='unreduced'" in message and "gradients='reduced'" in message
    assert message.startswith(f"ranks {', '.join(map(str, range(world)))} ")
    assert not written
    return message


@pytest.mark.parametrize("count", [1, len(SHAPES)])
@on_ranks(2)
def test_gradients_that_a_replica_misses_are_an_error(opt, count) -> Any:
    params = plain_params(SHAPES)
    optimizer = optimizer_of(opt, params)
    give(params, gradients(params, 1))
    for param in params[:count] if here()[0] else []:
        param.grad = None
    message, written = outcome(optimizer, params)
    assert "different gradients" in message and not written
    return message


@pytest.mark.parametrize("world", [2, 4])
@on_ranks()
def test_reduced_gradients_are_compared_once_and_without_a_collective(opt, world) -> None:
    params = plain_params(SHAPES)
    optimizer = optimizer_of(opt, params)
    found = [outcome(optimizer, params)]  # without any gradient
    with exchanges(opt) as exchange, watched(opt) as watch:
        for step in range(4):
            give(params, gradients(params, step))
            found.append(outcome(optimizer, params))
        copied = copy.deepcopy(optimizer)
        for group in copied.param_groups:
            give(group["params"], gradients(group["params"], 5))
        copied.step()
    assert found == [("none", False), *[("none", True)] * 4]
    assert exchange.call_count == 1 and not watch.calls


@pytest.mark.parametrize("how", ["other values", "other shapes", "other numbers", "said so"])
@on_ranks(2)
def test_ranks_that_train_on_their_own_go_on(opt, how) -> None:
    """Ranks that train different models, or say that they do."""
    rank = here()[0]
    shapes = {"other shapes": SHAPES[rank:], "other numbers": SHAPES * (1 + rank)}.get(how, SHAPES)
    params = plain_params(shapes, rank if how == "other values" else 0)
    arguments = {"gradients": "reduced"} if how == "said so" else {}
    optimizer = optimizer_of(opt, params, **arguments)
    give(params, gradients(params, 10 + rank))
    with exchanges(opt) as exchange:
        start = time.monotonic()
        found = outcome(optimizer, params)
        assert time.monotonic() - start < optimizer._ranks.config.timeout == 30
    assert found == ("none", True)
    assert exchange.call_count == (how != "said so")


def only_one_steps(opt) -> tuple[str, bool, float, str]:
    found, seconds, logged = ("none", True), 0.0, []
    logger = logging.getLogger(module_of(opt, "optimizers.sharded.consistency").__name__)
    if here()[0] == 0:
        params = plain_params(SHAPES)
        optimizer = optimizer_of(opt, params, distributed=opt.DistributedConfig(timeout=0.5))
        start = time.monotonic()
        with messages_of(logger) as logged:
            for step in range(3):
                give(params, gradients(params, step))
                found = outcome(optimizer, params)
        seconds = time.monotonic() - start
    distributed.barrier()
    return (*found, seconds, "\n".join(logged))


def test_a_rank_that_steps_alone_waits_once(ranks) -> None:
    """An initialised process group changes nothing but that."""
    (message, written, seconds, logged), _ = ranks(2).run(only_one_steps)
    ranks(2).close()  # whose exchanges are out of step
    assert (message, written) == ("none", True)
    assert 0.5 <= seconds < 5
    assert logged.count("only ranks [0] stepped one within 0.5 s") == 1


def one_after_the_other(opt, skipped: int) -> tuple[list[str], list[str]]:
    """The last rank comes to its first step when the others have given up; then all step another.

    Of so many optimizers between these two rank 0 alone takes a step.
    """
    rank, world = here()
    logger = logging.getLogger(module_of(opt, "optimizers.sharded.consistency").__name__)
    every = [plain_params(SHAPES) for _ in range(2 + skipped)]
    config = opt.DistributedConfig(timeout=0.5)
    optimizers = [optimizer_of(opt, params, distributed=config) for params in every]
    found = []
    with messages_of(logger) as logged:
        for number, (optimizer, params) in enumerate(zip(optimizers, every, strict=True)):
            give(params, gradients(params, rank))
            if number == 0 and rank == world - 1:
                time.sleep(1.5)
            if rank == 0 or number in (0, len(every) - 1):
                if number == len(every) - 1:
                    distributed.barrier()
                found.append(outcome(optimizer, params)[0])
    return [found[0], found[-1]], logged


@pytest.mark.parametrize(("world", "skipped"), [(2, 0), (2, 1), (3, 0)])
def test_a_rank_that_comes_late_answers_as_those_that_gave_up(ranks, world, skipped) -> None:
    """And hears what they found; the next optimizers meet, of however many one took no step."""
    said = "ranks {} hold the same parameters with different gradients"
    everyone = ", ".join(map(str, range(world)))
    early = everyone.removesuffix(f", {world - 1}")
    for (first, second), logged in ranks(world).run(one_after_the_other, skipped):
        assert first == "none" if world == 2 else said.format(early) in first
        assert f"only ranks [{early}] stepped one within 0.5 s" in logged[0]
        assert said.format(everyone) in second


@pytest.mark.parametrize(
    ("told", "equal", "seed_apart", "said"),
    [
        (None, False, 0, "hold the same parameters with different gradients"),
        (None, True, 0, ""),
        ("reduced", False, 0, ""),
        # Neither DistributedDataParallel nor a common seed: no reason to leave each other alone.
        (None, False, 1, "of process_group hold different parameters"),
        (None, True, 1, "of process_group hold different parameters"),
    ],
)
@on_ranks(2)
def test_ranks_of_a_group_are_compared_in_the_first_step(opt, told, equal, seed_apart, said) -> Any:
    params = plain_params(SHAPES, seed_apart * here()[0])
    optimizer = optimizer_of(opt, params, gradients=told, process_group=distributed.group.WORLD)
    give(params, gradients(params, 1 if equal else 10 + here()[0]))
    message, written = outcome(optimizer, params)
    assert message.startswith(f"ranks 0, 1 {said}" if said else "none") and written == (not said)
    assert ("gradients='unreduced'" in message) == ("gradients" in said)
    assert ("Broadcast" in message and "DistributedDataParallel" in message) == bool(seed_apart)
    return message
