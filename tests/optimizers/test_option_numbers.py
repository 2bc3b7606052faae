"""Numbers of other libraries as options: a step takes what was accepted, or nothing is written."""

from __future__ import annotations

import copy
import enum
import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .._compare import assert_same_bits
from ._steps import new_gradients, parameters, values


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
    **{
        f"np.{kind.__name__}": kind
        for kind in (np.uint8, np.int64, np.float32, np.float64, np.longdouble)
    },
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


def of_kind(kind, value):
    return tuple(map(kind, value)) if isinstance(value, tuple) else kind(value)


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
    return (
        value if isinstance(value, bool) else int(value) if value == round(value) else float(value)
    )


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
    before, state = values(params), copy.deepcopy(changed.state_dict()["state"])
    new_gradients(params, seed=9)
    try:
        given_value = of_kind(KINDS[kind], value)
    except (TypeError, ValueError, OverflowError):
        return  # the kind itself refuses the number
    try:
        optimizer, own = built(opt, device, number, **{option: given_value})
    except (TypeError, ValueError) as refusal:
        assert option in str(refusal), refusal
        changed.param_groups[number][option] = given_value
        with pytest.raises((TypeError, ValueError), match=option):
            changed.step()
        for param, old in zip(params, before, strict=True):
            assert_same_bits(param.detach(), old)
        torch.testing.assert_close(changed.state_dict()["state"], state, rtol=0, atol=0)
        return
    found = stepped(optimizer, own)
    expected = stepped(*built(opt, device, number, **{option: plain(given_value)}))
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)
    stored = optimizer.param_groups[number][option]
    for entry in stored if isinstance(stored, tuple) else (stored,):
        assert type(entry) in (int, float) or isinstance(entry, torch.Tensor)
    if option != "beta2":  # which brings state of its own
        changed.param_groups[number][option] = given_value
        changed.step()


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_numbers_together(opt, data) -> None:
    """Whatever the constructor accepts, two steps take."""
    kinds = [np.float32, np.float64, np.longdouble, Fraction, Real, np.int64, round, torch.tensor]
    options: list[dict] = [{}, {}]
    device = torch.device("cpu")
    for number, option, value in OPTIONS:
        if option in ("num_heads", "split_sizes") and {"num_heads", "split_sizes"} & {*options[0]}:
            continue
        if not data.draw(st.booleans()):
            continue
        kind = data.draw(st.sampled_from(kinds))
        drawn = st.floats(0, 4) if isinstance(plain(value), float) else st.integers(1, 8)
        count = len(value) if isinstance(value, tuple) else 1
        numbers = tuple(kind(data.draw(drawn)) for _ in range(count))
        options[number][option] = numbers if isinstance(value, tuple) else numbers[0]
    params = parameters([(4, 4), (4, 8), (5,), (3,)], device=device)
    try:
        optimizer = opt.MuonAdamW(
            [
                {"kind": "muon", "params": params[:2], "lr": 0.1, **options[0]},
                {"kind": "adamw", "params": params[2:], "lr": 0.1, **options[1]},
            ]
        )
    except (TypeError, ValueError):
        return
    stepped(optimizer, params)


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
        (param,) = parameters(
            [(10, 4) if key == "head_dim" and value == 5 else (4, 4)], device=device
        )
        named = [("layers.0.q_proj.weight", param)]
        try:
            optimizer = opt.Muon(named, clip_config={**config, key: own})
        except (TypeError, ValueError) as refusal:
            assert key in str(refusal)
            return
        optimizer.step(qk_logits=logits)
        results.append(param.detach().clone())
    assert_same_bits(*results)
