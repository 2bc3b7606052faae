"""Options that change after construction: checked at the next step, before anything is written."""

from __future__ import annotations

import copy
import pickle
from collections import OrderedDict

import pytest
import torch

from .._compare import assert_same_bits
from ._steps import both, new_gradients, parameters, values
from .test_groups import ADAMW_OPTIONS, MUON_OPTIONS
from .test_numbers import NoHostReads

# A step does not read a Tensor lr, so that its value is looked at in the constructor only.
READ_AT_CONSTRUCTION = "got -1.0"
CHANGED = [
    (0, option, value, error, message)
    for option, value, error, message in MUON_OPTIONS
    if READ_AT_CONSTRUCTION not in message
]
CHANGED += [(1, *case) for case in ADAMW_OPTIONS]


def failing_rule(lr, rows, columns):
    if rows == 4:
        raise ValueError("no rate for 4 rows")
    return lr


CHANGED += [
    (0, "adjust_lr_fn", failing_rule, ValueError, "no rate for 4 rows"),
    (0, "adjust_lr_fn", lambda *_: "fast", TypeError, "adjust_lr_fn returned 'fast'"),
    (0, "nesterov", 1, TypeError, "nesterov must be True or False, got 1"),
    (0, "momentum", torch.tensor(0.95), TypeError, "momentum must be a number"),
    (0, "split_sizes", {"w": (6,)}, ValueError, "names no parameter of the group"),
    (0, "expert_keys", ("exprts",), ValueError, "expert_keys 'exprts' names no parameter"),
]


@pytest.mark.parametrize(
    ("number", "option", "value", "error", "message"),
    CHANGED,
    ids=[f"{option}-{message}" for _, option, _, _, message in CHANGED],
)
@pytest.mark.parametrize("name", ["Muon", "MuonAdamW"])
def test_a_wrong_option_stops_the_step_before_any_write(
    opt, device, name, number, option, value, error, message
) -> None:
    """Parameters, gradients and state are what they were, and the step works once it is repaired.

    The matrices are of several shapes, so that a rule that fails for one of them fails too late if
    it is called batch by batch.
    """
    params = parameters([(6, 4), (4, 6), (5,), (3,)], device=device)
    optimizer = both(opt, params, none_grad=True)[name]()
    optimizer.step()
    new_gradients(params, seed=7)
    grads = [param.grad for param in params]
    before, state = values(params), copy.deepcopy(optimizer.state_dict()["state"])
    group = optimizer.param_groups[number]
    key = f"adamw_{option}" if name == "Muon" and option in ("betas", "eps") else option
    good = group[key]
    group[key] = value
    named = message if callable(value) else f"group {number}.*{message}"
    with NoHostReads(), pytest.raises(error, match=named):
        optimizer.step()
    for param, old, grad in zip(params, before, grads, strict=True):
        assert_same_bits(param.detach(), old)
        assert param.grad is grad
    torch.testing.assert_close(optimizer.state_dict()["state"], state, rtol=0, atol=0)
    group[key] = good
    optimizer.step()
    assert not any(torch.equal(p.detach(), old) for p, old in zip(params, before, strict=True))


def test_a_changed_value_of_a_dict_option_is_followed(opt, device) -> None:
    """The dict stays the same object."""
    (param,) = parameters([(8, 4)], device=device)
    optimizer = opt.Muon([("w", param)], num_heads=OrderedDict(w=2))
    optimizer.step()
    optimizer.param_groups[0]["num_heads"]["w"] = 4
    new_gradients([param], seed=1)
    optimizer.step()
    assert "4 x (2, 4)" in optimizer.report()
    optimizer.param_groups[0]["num_heads"]["w"] = 0
    new_gradients([param], seed=2)
    with pytest.raises(ValueError, match=r"num_heads\[.w.\] must be at least 1, got 0"):
        optimizer.step()


def test_a_list_set_later_is_taken_as_in_the_constructor(opt, device) -> None:
    (param,) = parameters([(8, 4)], device=device)
    optimizer = opt.Muon([("w", param)])
    optimizer.param_groups[0]["split_sizes"] = [6, 2]
    optimizer.step()
    assert optimizer.param_groups[0]["split_sizes"] == (6, 2)


def test_options_are_checked_only_when_they_change(opt, submodule, device, monkeypatch) -> None:
    """The host time of a step: one comparison per group."""
    params = parameters([(6, 4), (5,)], device=device)
    optimizer = both(opt, params)["Muon"]()
    options = submodule("optimizers.groups.options")
    checks = []
    for kind in (options.MuonOptions, options.AdamWOptions):
        monkeypatch.setattr(kind, "check", lambda self, where, **_: checks.append(where))
    optimizer.step()
    assert checks == ["group 0", "group 1"]
    optimizer.step()
    optimizer.param_groups[1]["lr"] = 0.5
    optimizer.step()
    assert checks == ["group 0", "group 1", "group 1"]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: m("muon").factor_of("bogus", 2, 3), "adjust_lr_fn must be one of"),
        (
            lambda m: m("muon").momentum(
                [torch.ones(2, 3)], [torch.ones(2, 3)], (2, 3), mu=0.9, nesterov=True, form="emaa"
            ),
            "form must be one of",
        ),
    ],
    ids=["rate", "momentum"],
)
def test_no_stage_takes_an_unknown_word_for_another(submodule, call, message) -> None:
    with pytest.raises(ValueError, match=message):
        call(lambda name: submodule(f"optimizers.stages.{name}"))


@pytest.mark.sees_defect("a bad chunk_size surfaces at the first step")
@pytest.mark.parametrize(
    ("option", "value", "error", "message"),
    [
        ("warmup_step", 0, ValueError, "warmup_step must be at least 1, got 0"),
        ("warmup_step", 1.5, TypeError, "warmup_step must be an integer, at least 1, got 1.5"),
        ("chunk_size", 0, ValueError, "chunk_size must be at least 1, or -1 .*, got 0"),
        ("chunk_size", -2, ValueError, "chunk_size must be at least 1, or -1 .*, got -2"),
        ("chunk_size", True, TypeError, "chunk_size must be an integer, at least 1, .* got True"),
    ],
)
def test_motifs_keywords_are_checked_at_construction(opt, option, value, error, message):
    """Not at the first step, and by the name that was given."""
    with pytest.raises(error, match=message):
        opt.Muon(parameters([(4, 3)]), **{option: value})


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("prefetch", 0, ValueError, "prefetch must be at least 1, got 0"),
        ("prefetch", 1.5, TypeError, "prefetch must be an integer, at least 1, got 1.5"),
        ("chunk_size", 0, ValueError, "chunk_size must be at least 1, or -1 .*, got 0"),
        ("chunk_size", -2, ValueError, "chunk_size must be at least 1, or -1 .*, got -2"),
        ("chunk_size", True, TypeError, "chunk_size must be an integer, at least 1, .* got True"),
        ("in_flight_bytes", 0, ValueError, "in_flight_bytes must be at least 1, got 0"),
        ("cuda_graphs", 1, TypeError, "cuda_graphs must be True or False, got 1"),
        ("wire_dtype", torch.bfloat16, ValueError, "wire_dtype must be None, torch"),
        ("timeout", 0, ValueError, "timeout must be above 0 and below 86400 seconds, got 0"),
        ("timeout", float("nan"), ValueError, "timeout must be above 0"),
        ("timeout", "30", TypeError, "timeout must be a number of seconds, got '30'"),
    ],
)
def test_a_distributed_config_is_checked_when_it_is_made(opt, field, value, error, message):
    with pytest.raises(error, match=message):
        opt.DistributedConfig(**{field: value})


@pytest.mark.parametrize("name", ["Muon", "MuonAdamW", "DistMuonAdamW"])
def test_keywords_that_are_fields_now_name_them(opt, name) -> None:
    group = {"params": parameters([(4, 3)]), "kind": "muon", "lr": 0.1}
    moved = {"wire_dtype": "wire_dtype", "in_flight_bytes": "in_flight_bytes"}
    moved |= {"cuda_graphs": "cuda_graphs"}
    if name != "Muon":
        moved |= {"warmup_step": "prefetch", "chunk_size": "chunk_size"}
    for option, field in moved.items():
        message = rf"{option} is no keyword .*distributed=DistributedConfig\({field}="
        with pytest.raises(TypeError, match=message):
            getattr(opt, name)([group], **{option: 1})
    with pytest.raises(TypeError, match="unexpected keyword argument 'lrr'"):
        getattr(opt, name)([group], lrr=1)
    with pytest.raises(TypeError, match="distributed must be a DistributedConfig or None, got 1"):
        getattr(opt, name)([group], distributed=1)


def test_what_motif_calls_it_is_not_given_twice(opt) -> None:
    given = {"distributed": opt.DistributedConfig(), "warmup_step": 3}
    with pytest.raises(ValueError, match="give prefetch in distributed"):
        opt.Muon(parameters([(4, 3)]), **given)


@pytest.mark.parametrize("motif", [False, True], ids=["record", "motif's names"])
def test_a_distributed_config_is_taken_and_copied(opt, motif) -> None:
    """A copy keeps it, as it keeps the process group."""
    if motif:
        config = opt.DistributedConfig(prefetch=5, chunk_size=8)
        optimizer = opt.Muon(parameters([(4, 3)]), warmup_step=5, chunk_size=8)
    else:
        config = opt.DistributedConfig(torch.float16, 5, 8, 2**20, cuda_graphs=False, timeout=2)
        optimizer = opt.Muon(parameters([(4, 3)]), distributed=config)
    for one in (optimizer, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        assert one._ranks.config == config
