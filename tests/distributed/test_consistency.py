"""Ranks that disagree on gradients, options or parameters all raise, and none hangs or drifts."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh

from ._cases import mesh_of, placed_like, spread
from ._ranks import on_ranks
from .test_partition import assert_equal_bits, module_of, outcome, watched
from .test_saving import answers_that_come_later

pytestmark = pytest.mark.dist

SHAPES = [(8, 6), (6, 8), (8, 6), (12, 5)]
OTHERS = [(11, 4), (7,), (300, 5)]  # the last one is shared out where gradients are unreduced
HELD = ["process_group", "S0", "R", "unreduced"]
FAULTY = 1
ON_RANKS = [("process_group", 2), ("S0", 2), ("R", 2), ("unreduced", 2), ("HSDP", 4)]


def here() -> tuple[int, int]:
    return distributed.get_rank(), distributed.get_world_size()


def parameters(held: str, matrices=SHAPES, others=OTHERS) -> tuple[list, list]:
    generator = torch.Generator().manual_seed(0)

    def made(shape) -> nn.Parameter:
        value = torch.randn(shape, generator=generator)
        if held in ("process_group", "unreduced"):
            return nn.Parameter(value)
        world = here()[1]
        if held == "HSDP":
            return nn.Parameter(spread(value, mesh_of((2, world // 2)), "R", "S0"))
        return nn.Parameter(spread(value, mesh_of((world,)), held))

    return [made(shape) for shape in matrices], [made(shape) for shape in others]


def optimizer_of(opt, held: str, matrices, others, *, muon=None, adamw=None, **arguments):
    if held in ("process_group", "unreduced"):
        gradients = "unreduced" if held == "unreduced" else "reduced"
        sharing = {"gradients": gradients, "process_group": distributed.group.WORLD}
        arguments = {**sharing, **arguments}
    groups = [
        {"kind": "muon", "params": matrices, "lr": 0.1, **(muon or {})},
        {"kind": "adamw", "params": others, "lr": 0.1, **(adamw or {})},
    ]
    return opt.MuonAdamW([group for group in groups if group["params"]], **arguments)


def made(opt, held: str, matrices=SHAPES, others=OTHERS, **options) -> tuple[Any, list]:
    both = parameters(held, matrices, others)
    return optimizer_of(opt, held, *both, **options), [*both[0], *both[1]]


def give(held: str, params, step: int) -> None:
    for index, param in enumerate(params):
        rank = here()[0] if held == "unreduced" else 0
        generator = torch.Generator().manual_seed(1000 * rank + 100 * step + index)
        param.grad = placed_like(param, torch.randn(tuple(param.shape), generator=generator))


@pytest.mark.sees_defect("ranks with different gradients make different plans and hang")
@pytest.mark.parametrize("matrices", [SHAPES, []], ids=["matrices", "none"])
@pytest.mark.parametrize(("held", "world"), ON_RANKS)
@on_ranks()
def test_a_gradient_that_one_rank_misses_is_an_error_on_all(opt, held, world, matrices) -> None:
    """Nothing is written, and the next step goes on; for a matrix as for AdamW's parameters.

    Without any matrix there is no exchange to ask in but the question.
    """
    places = [(0, 2), *((1, number) for number in range(len(OTHERS)))] if matrices else [(0, 0)]
    for group, which in places:
        optimizer, params = made(opt, held, matrices)
        give(held, params, 0)
        optimizer.step()
        give(held, params, 1)
        if here()[0] == FAULTY:
            params[which + group * len(SHAPES)].grad = None
        message, written = outcome(optimizer, params)
        assert f"have gradients: group {group}, parameter {which}. Give zeros" in message
        assert not written
        give(held, params, 1)
        assert outcome(optimizer, params) == ("none", True)
        twin, others = made(opt, held, matrices)  # without the step that was refused
        for step in range(2):
            give(held, others, step)
            twin.step()
        assert_equal_bits(params, others)


@pytest.mark.sees_defect(
    "only the first team's answer is checked",
    "        for number, comparison in enumerate(comparisons):\n",
    "        for number, comparison in enumerate(comparisons[:1]):\n",
)
@on_ranks(4)
def test_the_answer_of_every_team_counts(opt) -> Any:
    """Not only that of the ranks that share matrices.

    Of a step that one team refuses no question of another one counts as that of a step that had
    been written.
    """
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    matrices = parameters("HSDP")[0]
    norms = [nn.Parameter(spread(torch.ones(7), mesh["data"], "R")) for _ in range(2)]
    optimizer = optimizer_of(opt, "HSDP", matrices, norms)
    params, found, odd = [*matrices, *norms], [], here()[0] >= 2  # one rank of both halves
    with pytest.MonkeyPatch.context() as patch:
        for wrong in ("gradient", "rate", None, None):
            if wrong == "rate":
                answers_that_come_later(opt, patch)
            give("HSDP", params, 0)
            optimizer.param_groups[1]["lr"] = 0.2 if odd and wrong == "rate" else 0.1
            if odd and wrong:
                (norms[1] if wrong == "gradient" else matrices[0]).grad = None
            found.append(outcome(optimizer, params))
    (gradient, of_gradient), (rate, of_rate), *later = found
    assert "parameters have gradients: group 1, parameter 1. Give zeros" in gradient
    assert rate.startswith("ranks disagree on lr (here ")
    assert not of_gradient and not of_rate
    assert later == [("none", True)] * 2
    return gradient


@on_ranks(2)
def test_each_of_many_parameters_is_named(opt) -> str:
    """More than there are numbers in the question."""
    which = [0, 63, 64, 1000, 1999]
    params = [nn.Parameter(torch.ones(1)) for _ in range(2000)]
    optimizer = optimizer_of(opt, "process_group", [], params)
    for index, param in enumerate(params):
        param.grad = torch.ones(1)
        if here()[0] == FAULTY and index in which:
            param.grad = None
    message, _ = outcome(optimizer, params)
    named = message.removeprefix("ranks disagree on which parameters have gradients: ")
    assert named.split(". ")[0] == "; ".join(f"group 0, parameter {k}" for k in which)
    return message


@pytest.mark.parametrize("named", [True, False])
@on_ranks(2)
def test_a_rank_whose_experts_got_no_token_may_have_no_gradient(opt, named) -> str:
    """Of their biases neither, if names say what they belong to."""
    up, bias = parameters("S0", [(4, 6, 5)], [(4, 6)])
    muon = {"names": ["layers.0.experts.up"], "expert_keys": ("experts",)}
    adamw = {"names": ["layers.0.experts.up_bias"]} if named else None
    params = [*up, *bias] if named else bias
    optimizer = optimizer_of(opt, "S0", up if named else [], bias, muon=muon, adamw=adamw)
    give("S0", params, 0)
    if here()[0] == FAULTY:
        for param in params:
            param.grad = None  # none of its experts was routed to
    message, _ = outcome(optimizer, params)
    assert message == "none" if named else "group 0, parameter 0. Give zeros" in message
    return message


@on_ranks(2)
def test_ranks_that_clip_by_another_configuration_are_an_error(opt) -> Any:
    """It decides what QK-clip sends."""
    config = {"threshold": 50.0} if here()[0] == FAULTY else None
    muon = {"names": [f"layers.{k}.w" for k in range(len(SHAPES))]}
    optimizer, params = made(opt, "S0", muon=muon, clip_config=config)
    give("S0", params, 0)
    message, written = outcome(optimizer, params)
    assert message.startswith("ranks disagree on clip_config. Give") and not written
    return message


# Options of a group of matrices, of one for AdamW, and arguments: the value of rank 1 alone.
MUON: dict[str, Any] = {
    "lr": 0.2,
    "weight_decay": 0.5,
    "momentum": 0.9,
    "nesterov": False,
    "beta2": 0.9,
    "ns_steps": 3,
    "ns_coefficients": "keller_jordan",
    "eps": 1e-6,
    "method": "newton_schulz",
    "dtype": torch.bfloat16,
    "momentum_form": "heavy_ball",
    "momentum_dtype": torch.float64,
    "cautious": False,
    "shaped_decay": False,
    "adjust_lr_fn": "spectral",
    "flatten": True,
    "num_heads": 1,
    "rounding": "residual",
    "rounding_seed": 3,
    "none_grad": True,
}
ADAMW: dict[str, Any] = {"lr": 0.2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}
ARGUMENTS: dict[str, Any] = {
    "transport": "nccl",
    "wire_dtype": torch.float16,
    "chunk_size": 2,
    "in_flight_bytes": 3000,
    "prefetch": 2,
}


@pytest.mark.parametrize(("held", "world"), ON_RANKS)
@on_ranks()
def test_options_that_differ_from_the_start_are_named_on_every_rank(opt, held, world) -> None:
    """Before anything is sent whose size depends on them."""
    cases = {
        **{f"muon {name}": {"muon": {name: value}} for name, value in MUON.items()},
        "muon no beta2": {"muon": {"beta2": None}},
        "muon Tensor lr": {"muon": {"lr": torch.tensor(0.1)}},
        **{f"adamw {name}": {"adamw": {name: value}} for name, value in ADAMW.items()},
        **{
            f"argument {name}": {"distributed": opt.DistributedConfig(**{name: value})}
            for name, value in ARGUMENTS.items()
        },
    }
    cases["muon function in adjust_lr_fn"] = {"muon": {"adjust_lr_fn": lambda lr, m, n: 2 * lr}}
    if held == "process_group":
        cases["argument gradients"] = {"gradients": "unreduced"}
    if held == "unreduced":
        cases["argument reduce_op"] = {"reduce_op": "sum"}
    faulty = here()[0] == FAULTY
    for case, changed in cases.items():
        alike: dict[str, Any] = {}
        if case.startswith("muon function"):  # which returns something else
            alike = {"muon": {"adjust_lr_fn": lambda lr, m, n: lr}}
        optimizer, params = made(opt, held, **(changed if faulty else alike))
        give(held, params, 0)
        message, written = outcome(optimizer, params)
        said = f"{case.split()[-1]} (here "
        assert message.startswith("ranks disagree on ") and said in message, case
        assert not written, case
        # What follows from an option, such as owners, is not what to mend.
        assert message.count(" (here ") == 1 and "owners" not in message, message
        if case == "adamw betas":
            assert ("(0.8, 0.95)" if faulty else "(0.9, 0.95)") in message
        if case == "argument chunk_size":
            assert f"chunk_size (here {2 if faulty else -1})" in message


@pytest.mark.parametrize("later", [False, True], ids=["at once", "on a device"])
@pytest.mark.parametrize("held", HELD)
@on_ranks(2)
def test_an_option_that_one_rank_changes_is_named_before_anything_is_written(
    opt, held, later
) -> None:
    """On a device by the step after it: the one that differs is queued, and no other one then.

    Such as "0 lr": before the second step rank 1 changes it in group 0.
    """
    changes = {f"0 {name}": value for name, value in MUON.items() if name != "momentum_dtype"}
    changes |= {"0 no beta2": None, "0 Tensor lr": torch.tensor(0.2)}
    changes |= {f"1 {name}": value for name, value in ADAMW.items()}
    if later:
        changes = {"0 lr": 0.2, "0 momentum": 0.9, "0 beta2": 0.9, "0 ns_steps": 3, "1 eps": 1e-6}
    for case, value in changes.items():
        optimizer, params = made(opt, held)
        steps = []
        with pytest.MonkeyPatch.context() as patch:
            if later:
                answers_that_come_later(opt, patch)
            for step in range(3 + later):
                give(held, params, step)
                if step == 1 and here()[0] == FAULTY:
                    group, name = optimizer.param_groups[int(case[0])], case.split()[-1]
                    assert name in group
                    group[name] = value
                steps.append(outcome(optimizer, params))
        good, (named, last) = steps[:-2], steps[-2:]
        said = f"{case.split()[-1]} (here "
        assert good == [("none", True)] * (1 + later), case
        assert said in named[0] and not named[1], case
        assert ("an earlier step failed midway" if later else said) in last[0], case
        assert not last[1], case


@pytest.mark.parametrize("held", HELD)
@on_ranks(2)
def test_on_a_device_a_layout_is_compared_before_anything_is_sent(opt, held) -> None:
    """The first answer is waited for on any device: sizes of messages depend on it."""
    config = opt.DistributedConfig(torch.float16 if here()[0] == FAULTY else None)
    with pytest.MonkeyPatch.context() as patch:
        answers_that_come_later(opt, patch)
        optimizer, params = made(opt, held, distributed=config)
        give(held, params, 0)
        message, written = outcome(optimizer, params)
    assert "wire_dtype (here " in message
    assert not written


@on_ranks(2)
def test_values_that_mean_the_same_do_not_differ(opt) -> None:
    matrices, others = parameters("process_group")
    names, odd = [f"layers.{k}.w" for k in range(len(matrices))], here()[0] % 2
    muon = {
        "names": names,
        "num_heads": dict.fromkeys(names if odd else reversed(names), 1),
        "momentum": np.float32(0.5) if odd else 0.5,
    }
    optimizer = optimizer_of(opt, "process_group", matrices, others, muon=muon)
    params, found = [*matrices, *others], []
    for step in range(3):
        optimizer.param_groups[0]["lr"] = 1 + step if odd else 1.0 + step
        give("process_group", params, step)
        found.append(outcome(optimizer, params))
    assert found == [("none", True)] * 3


NAMED = {
    "a matrix more": "number of parameters (here ",
    "fewer for AdamW": "number of parameters (here ",
    "another shape": "shapes, dtypes and placements",
    "a group less": "number of groups (here ",
    "a group later": "number of groups (here ",
}


@pytest.mark.parametrize("how", NAMED)
@pytest.mark.parametrize(("held", "world"), [("process_group", 2), ("unreduced", 4)])
@on_ranks()
def test_other_parameters_are_an_error_on_every_rank(opt, held, how, world) -> None:
    """The question is as long on all of them."""
    shapes, others = {
        "a matrix more": ([*SHAPES, (4, 4)], OTHERS),
        "fewer for AdamW": (SHAPES, OTHERS[:1]),
        "another shape": ([(6, 6), *SHAPES[1:]], OTHERS),
        "a group less": (SHAPES, []),
        "a group later": (SHAPES, OTHERS),
    }[how if here()[0] == FAULTY else "a group later"]
    optimizer, params = made(opt, held, shapes, others)
    if how == "a group later":
        give(held, params, 0)
        optimizer.step()
        if here()[0] == FAULTY:
            params.append(nn.Parameter(torch.ones(5, 4)))
            added = {"kind": "muon", "params": params[-1:], "lr": 0.1}
            optimizer.add_param_group(added)
    give(held, params, 1)
    message, written = outcome(optimizer, params)
    assert message.startswith("ranks disagree on ") and NAMED[how] in message
    assert not written


@pytest.mark.parametrize(
    ("held", "small", "per_chunk"),
    [("process_group", 0, 1), ("S0", 0, 2), ("HSDP", 0, 2), ("unreduced", 1, 2)],
)
@on_ranks(4)
def test_the_question_is_the_one_exchange_that_was_there(opt, held, small, per_chunk) -> Any:
    """Before options and AdamW's gradients were asked for it was one all-reduce a step, too."""
    config = opt.DistributedConfig(torch.float32)
    optimizer, params = made(opt, held, SHAPES, OTHERS, distributed=config)
    calls = []
    for step in range(3):
        give(held, params, step)
        for group in optimizer.param_groups:
            group["lr"] = 0.1 / (1 + step)
        with watched(opt) as watch:
            optimizer.step()
        calls.append((watch.calls["all_reduce"], watch.calls["all_to_all"]))
    exchanges = [all_to_all for _, all_to_all in calls]
    assert [all_reduce - small for all_reduce, _ in calls] == [1 + (held == "unreduced"), 1, 1]
    assert len({*exchanges}) == 1 and exchanges[0] >= 3 * per_chunk
    return calls


@pytest.mark.parametrize("held", HELD)
@on_ranks(2)
def test_a_rate_in_a_tensor_is_compared_without_reading_it(opt, held) -> None:
    module = module_of(opt, "optimizers.sharded.consistency")
    rate, found, asked = torch.tensor(0.1), [], []
    original = module.on_device

    def on_device(tensors, device):
        asked.append(len(tensors))
        return original(tensors, device)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "on_device", on_device)
        patch.setattr(module, "is_on_device", lambda value: isinstance(value, torch.Tensor))
        optimizer, params = made(opt, held, muon={"lr": rate}, adamw={"lr": rate})
        for step in range(3):
            give(held, params, step)
            rate.fill_(0.1 / (1 + step))
            if step == 2 and here()[0] == FAULTY:
                rate.fill_(0.2)
            found.append(outcome(optimizer, params))
    assert asked == [2] * 3
    assert found[:2] == [("none", True)] * 2
    assert "ranks disagree on lr (here " in found[2][0] and not found[2][1]
