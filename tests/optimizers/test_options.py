"""Options that change after construction, and numbers of other libraries: taken or refused."""

import copy
import enum
import math
import pickle
from collections import OrderedDict
from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from .._compare import assert_all_same_bits, assert_same_bits, no_waits
from ._steps import CLASSES, both, new_gradients, nothing_written, parameters, values
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
    (0, "adjust_lr_fn", lambda *_: math.nan, ValueError, "returned nan for a 6 x 4 matrix"),
    (0, "adjust_lr_fn", lambda *_: math.inf, ValueError, "a rate must be finite"),
    (0, "adjust_lr_fn", lambda lr, *_: -lr, ValueError, "returned -.* at least 0"),
    (0, "adjust_lr_fn", lambda *_: torch.ones(2), ValueError, "must return one floating-point num"),
    (0, "adjust_lr_fn", lambda *_: torch.ones(()).long(), ValueError, "one floating-point number"),
    (1, "lr", torch.ones((), device="meta"), ValueError, "parameter 0: lr is on meta, the param"),
    (0, "nesterov", 1, TypeError, "nesterov must be True or False, got 1"),
    (0, "momentum", torch.tensor(0.95), TypeError, "momentum must be a number"),
    (0, "split_sizes", {"w": (6,)}, ValueError, "names no parameter of the group"),
    (0, "num_heads", 5, ValueError, "num_heads=5 does not divide the 6 rows"),
]


@pytest.mark.parametrize(
    ("number", "option", "value", "error", "message"),
    CHANGED,
    ids=[f"{option}-{message}" for _, option, _, _, message in CHANGED],
)
@CLASSES
def test_a_wrong_option_stops_the_step_before_any_write(
    opt, device, name, number, option, value, error, message
) -> None:
    """Of several shapes: a rule that fails for one would fail too late batch by batch."""
    params = parameters([(6, 4), (4, 6), (5,), (3,)], device=device)
    optimizer = both(opt, name, params, none_grad=True)
    optimizer.step()
    new_gradients(params, seed=7)
    grads = [param.grad for param in params]
    before, group = values(params), optimizer.param_groups[number]
    named_apart = name == "Muon" and number == 1 and option in ("betas", "eps")
    key = f"adamw_{option}" if named_apart else option
    good = group[key]
    named = message if callable(value) else f"group {number}.*{message}"
    with nothing_written(optimizer):
        group[key] = value
        with NoHostReads(), pytest.raises(error, match=named):
            optimizer.step()
    assert all(param.grad is grad for param, grad in zip(params, grads, strict=True))
    group[key] = good
    optimizer.step()
    assert not any(torch.equal(p.detach(), old) for p, old in zip(params, before, strict=True))


def test_a_changed_value_of_a_dict_option_is_followed(opt, device) -> None:
    """The dict stays the same object; the step is that of an optimizer with the value."""
    (param,), (twin,) = (parameters([(8, 4)], device=device) for _ in range(2))
    optimizer = opt.Muon([("w", param)], num_heads=OrderedDict(w=2))
    other = opt.Muon([("w", twin)], num_heads=4)
    optimizer.step()
    twin.data.copy_(param.data)
    other.fit_state()
    other.state[twin]["momentum_buffer"].copy_(optimizer.state[param]["momentum_buffer"])
    optimizer.param_groups[0]["num_heads"]["w"] = 4
    for one, of_one in ((optimizer, param), (other, twin)):
        new_gradients([of_one], seed=1)
        one.step()
    assert_same_bits(param.detach(), twin.detach())
    assert "4 x (2, 4)" in optimizer.report(verbose=True)
    optimizer.param_groups[0]["num_heads"]["w"] = 0
    with pytest.raises(ValueError, match=r"num_heads\[.w.\] must be at least 1, got 0"):
        optimizer.step()


def test_a_list_set_later_is_taken_as_in_the_constructor(opt, device) -> None:
    (param,) = parameters([(8, 4)], device=device)
    optimizer = opt.Muon([("w", param)])
    optimizer.param_groups[0]["split_sizes"] = [6, 2]
    optimizer.step()
    assert optimizer.param_groups[0]["split_sizes"] == (6, 2)


def test_options_are_checked_only_when_they_change(opt, submodule, device, monkeypatch) -> None:
    params = parameters([(6, 4), (5,)], device=device)
    optimizer = both(opt, "Muon", params)
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


def test_what_may_give_another_value_is_asked_at_every_step(opt, device) -> None:
    """A function and a Tensor; of numbers and words the last answer counts."""
    (param,) = parameters([(6, 4)], device=device)
    rates = iter([0.5, 0.25])
    optimizer = opt.Muon([("w", param)], lr=1.0, weight_decay=0.0, adjust_lr_fn="none")
    optimizer.step()
    group = optimizer.param_groups[0]

    def moved() -> float:
        before = param.detach().clone()
        new_gradients([param], seed=1)
        optimizer.step()
        return float((param.detach() - before).norm())

    usual = moved()
    group["adjust_lr_fn"] = lambda lr, rows, columns: next(rates) * lr
    assert moved() == pytest.approx(0.5 * usual, rel=0.05)
    assert moved() == pytest.approx(0.25 * usual, rel=0.05)
    group["adjust_lr_fn"] = "none"
    group["lr"] = torch.tensor(0.5)
    assert moved() == pytest.approx(0.5 * usual, rel=0.05)
    group["lr"].data = torch.tensor(0.25)
    assert moved() == pytest.approx(0.25 * usual, rel=0.05)


@pytest.mark.sees_defect("a bad chunk_size surfaces at the first step")
@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("prefetch", 0, ValueError, " must be at least 1, got 0"),
        ("prefetch", 1.5, TypeError, " must be an integer, got 1.5"),
        ("chunk_size", 0, ValueError, " must be at least 1, or -1 .*, got 0"),
        ("chunk_size", -2, ValueError, " must be at least 1, or -1 .*, got -2"),
        ("chunk_size", True, TypeError, " must be an integer, or -1 .*, got True"),
        ("in_flight_bytes", 0, ValueError, " must be at least 1, got 0"),
        ("cuda_graphs", 1, TypeError, " must be True or False, got 1"),
        ("wire_dtype", torch.bfloat16, ValueError, " must be one of None, torch"),
        ("timeout", 0, ValueError, " must be above 0 and below 86400 seconds, got 0"),
        ("timeout", float("nan"), ValueError, " must be above 0"),
        ("timeout", "30", TypeError, " must be a number of seconds, got '30'"),
        ("transport", "mpi", ValueError, " must be"),
        ("transport", None, ValueError, " must be"),
        ("strict", 1, TypeError, " must be"),
        ("slots", 1, ValueError, " must be"),
        ("slots", 2.5, TypeError, " must be"),
        ("min_bytes", -1, ValueError, " must be"),
        ("min_bytes", True, TypeError, " must be"),
        ("timeout_ms", 0, ValueError, " must be"),
        ("timeout_ms", 10**9, ValueError, " must be"),
    ],
)
def test_a_distributed_config_is_checked_when_it_is_made(opt, field, value, error, message):
    """Motif's keywords, too, not at the first step, and by the name that was given."""
    with pytest.raises(error, match=field + message):
        opt.DistributedConfig(**{field: value})
    keyword = {"prefetch": "warmup_step", "chunk_size": "chunk_size"}.get(field)
    if keyword:
        with pytest.raises(error, match=keyword + message):
            opt.Muon(parameters([(4, 3)]), **{keyword: value})


@pytest.mark.parametrize("name", ["Muon", "MuonAdamW", "DistMuonAdamW"])
def test_a_distributed_config_is_the_only_way_to_its_fields(opt, name) -> None:
    group = {"params": parameters([(4, 3)]), "kind": "muon", "lr": 0.1}
    for option in ("wire_dtype", "lrr"):
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{option}'"):
            getattr(opt, name)([group], **{option: 1})
    with pytest.raises(TypeError, match="distributed must be a DistributedConfig or None, got 1"):
        getattr(opt, name)([group], distributed=1)
    with pytest.raises(ValueError, match="give prefetch in distributed"):
        opt.Muon(group["params"], distributed=opt.DistributedConfig(), warmup_step=3)


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


class Five(enum.IntEnum):
    FIVE = 5


class Real(float):
    """A number that is not exactly a float."""


def symbol(kind):
    """A number of torch's compiler, which has no value to read."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv()
    made = env.create_symbol(5, source=torch._dynamo.source.ConstantSource("s"))
    return {int: env.create_symintnode, float: env.create_symfloatnode}[kind](made, hint=kind(5))


NUMPY = ("uint8", "int64", "float32", "float64", "longdouble")
# A number that stands for the kind's value of it. What cannot hold it makes another of it.
KINDS = {
    "int": round,
    "bool": bool,
    "IntEnum": lambda value: Five.FIVE,
    "float": float,
    "subclass": Real,
    "Fraction": Fraction,
    "third": lambda value: Fraction(1, 3),
    "nearly one": lambda value: 1 - Fraction(1, 10**30),
    "huge": lambda value: 10**400,
    "huge Fraction": lambda value: Fraction(10**400, 3),
    "large": lambda value: 10**30,
    "nan": lambda value: np.float32(math.nan),
    "negative": lambda value: np.int64(-1),
    "Decimal": Decimal,
    "complex": complex,
    "SymInt": lambda value: symbol(int),
    "SymFloat": lambda value: symbol(float),
    "array": np.array,
    "np.bool": np.bool_,
    **{f"np.{kind}": getattr(np, kind) for kind in NUMPY},
    "Tensor": torch.tensor,
    "integer Tensor": lambda value: torch.tensor(round(value)),
    "half Tensor": lambda value: torch.tensor(float(value), dtype=torch.float16),
    "sparse Tensor": lambda value: torch.tensor([float(value)]).to_sparse(),
    "float8 Tensor": lambda value: torch.tensor(float(value)).to(torch.float8_e4m3fn),
    "Parameter": lambda value: torch.nn.Parameter(torch.tensor(float(value))),
}
# (group, option, a value in its range)
OPTIONS = [
    (0, "lr", 0.25),
    (0, "weight_decay", 0.25),
    (0, "momentum", 0.75),
    (0, "beta2", 0.5),
    (0, "ns_steps", 5),
    (0, "num_heads", 2),
    (0, "split_sizes", (2, 2)),
    (0, "rounding_seed", 3),
    (1, "lr", 0.25),
    (1, "weight_decay", 0.25),
    (1, "betas", (0.75, 0.5)),
    (1, "eps", 0.125),
]


def built(opt, device, number=0, **options):
    params = parameters([(4, 4), (5,)], device=device)
    groups = [
        {"kind": "muon", "params": params[:1], "lr": 0.1, "rounding": "stochastic", "beta2": None},
        {"kind": "adamw", "params": params[1:], "lr": 0.1},
    ]
    groups[number] |= options
    return opt.MuonAdamW(groups), params


def stepped(optimizer, params) -> list[torch.Tensor]:
    for seed in range(2):
        new_gradients(params, seed=seed)
        optimizer.step()
    return values(params)


def plain(value):
    if isinstance(value, tuple):
        return tuple(map(plain, value))
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to_dense().item()
    if isinstance(value, bool):
        return value
    return int(value) if value == round(value) else float(value)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("number", "option", "value"), OPTIONS, ids=lambda x: str(x))
def test_a_number_is_taken_or_refused_before_anything_is_written(
    opt, device, number, option, value, kind
) -> None:
    """In the constructor, and between two steps; the bits are those of Python's own number."""
    if option == "ns_steps" and kind in ("huge", "large"):  # numbers of steps, if too many
        return
    if option == "betas" and kind == "sparse Tensor":  # which torch cannot compare with a number
        return
    changed, params = built(opt, device)
    stepped(changed, params)
    new_gradients(params, seed=9)
    try:
        make = KINDS[kind]
        given_value = tuple(map(make, value)) if isinstance(value, tuple) else make(value)
    except (TypeError, ValueError, OverflowError):
        return  # the kind itself refuses the number
    try:
        optimizer, own = built(opt, device, number, **{option: given_value})
    except (TypeError, ValueError) as refusal:
        assert option in str(refusal), refusal
        with nothing_written(changed):
            changed.param_groups[number][option] = given_value
            with pytest.raises((TypeError, ValueError), match=option):
                changed.step()
        return
    found = stepped(optimizer, own)
    expected = stepped(*built(opt, device, number, **{option: plain(given_value)}))
    assert_all_same_bits(found, expected)
    stored = optimizer.param_groups[number][option]
    for entry in stored if isinstance(stored, tuple) else (stored,):
        assert type(entry) in (int, float) or isinstance(entry, torch.Tensor)
    if option != "beta2":  # which brings state of its own
        changed.param_groups[number][option] = given_value
        changed.step()


@pytest.mark.parametrize("kind", ["np.int64", "IntEnum", "np.uint8"])
def test_a_distributed_config_keeps_ints(opt, kind) -> None:
    numbers = {field: KINDS[kind](5) for field in ("prefetch", "chunk_size", "in_flight_bytes")}
    config = opt.DistributedConfig(**numbers)
    assert all(type(getattr(config, field)) is int for field in numbers)
    optimizer = opt.Muon(parameters([(4, 3)]), warmup_step=KINDS[kind](5))
    assert type(optimizer._ranks.config.prefetch) is int


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("threshold", Fraction(1, 3)),
        ("threshold", np.float32(0.5)),
        ("threshold", np.int64(2)),
        ("threshold", Fraction(10**400)),
        ("head_dim", np.int64(2)),
        ("head_dim", Five.FIVE),
        ("q_indices", np.array([0, 1])),
    ],
    ids=str,
)
def test_qk_clip_takes_numbers_or_refuses_them(opt, device, key, value) -> None:
    """A threshold that no float holds would fail behind the update of every parameter."""
    config = {"q_indices": [0, 1], "k_indices": [0, 1], "head_dim": 2, "threshold": 0.5, key: value}
    logits = {0: torch.ones(2, device=device)}
    results = []
    for own in (value, value.tolist() if key == "q_indices" else plain(value)):
        rows = 10 if key == "head_dim" and value == 5 else 4
        (param,) = parameters([(rows, 4)], device=device)
        named = [("layers.0.q_proj.weight", param)]
        try:
            optimizer = opt.Muon(named, clip_config={**config, key: own})
        except (TypeError, ValueError) as refusal:
            assert key in str(refusal)
            return
        optimizer.step(qk_logits=logits)
        results.append(param.detach().clone())
    assert_same_bits(*results)


@pytest.mark.gpu
def test_a_question_waits_for_nothing_on_the_device(opt, submodule, device) -> None:
    """Rates of a schedule, in numbers and in Tensors, and gradients that come and go."""
    agreement = submodule("optimizers.sharded.consistency")
    options = submodule("optimizers.groups.options")
    params = [nn.Parameter(torch.ones(3, device=device)) for _ in range(200)]
    rate = torch.tensor(0.1, device=device)
    optimizer = opt.MuonAdamW(
        [
            {"kind": "adamw", "params": params[:100], "lr": rate},
            {"kind": "adamw", "params": params[100:], "lr": 0.1},
        ]
    )
    layout = dict.fromkeys(agreement.LAYOUT, "")
    alone = submodule("distributed").alone()
    labelled = [(str(number), param) for number, param in enumerate(params)]
    common = agreement.Common(alone, labelled, [0, 1], layout)
    asking = agreement.Consistency()

    def ask(step: int) -> list[Any]:
        for number, param in enumerate(params):
            param.grad = None if (number + step) % 3 == 0 else torch.ones_like(param)
        rate.fill_(0.1 / (1 + step))
        optimizer.param_groups[1]["lr"] = 0.1 / (1 + step)
        groups = [optimizer.format.options(group) for group in optimizer.param_groups]
        prints = [*map(options.fingerprint, groups)]
        return asking._ask([common], groups, prints, [None], (0, 0, False, False))

    asking._settle(ask(0), False, True)
    torch.cuda.synchronize(device)
    with no_waits():
        with torch.inference_mode():
            ask(1)
        (question,) = ask(2)
    question.check()
    place = len(agreement.LAYOUT) + agreement.OPTIONS.index("lr")
    told = question.found[0].tolist()
    assert told[place] == agreement.word(f"torch.float32 on a device; {(0.1 / 3).hex()}")
    first = len(agreement.LAYOUT) + len(agreement.OPTIONS)
    bits = agreement.on_device([torch.tensor(0.1 / 3)], torch.device("cpu")).item()
    assert told[first : first + 2] == [bits, 0]
    assert sum(int(mask).bit_count() for mask in told[-agreement.MASKS :]) == 200 - 200 // 3 - 1
