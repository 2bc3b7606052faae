"""State of other Muon optimizers, turned into state_dicts that ours load.

source    | matrices                                 | the rest
torch     | momentum_buffer, a moving average        | exp_avg, exp_avg_sq, step, of its AdamW
motif     | momentum_buffer, heavy ball              | moment1, moment2, step
nanochat  | momentum_buffer (K, r, c), a moving      | exp_avg, exp_avg_sq, step
          | average, and second_momentum_buffer,     |
          | stacked under the first of K parameters  |
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..optimizers.groups.default_groups import ADAMW, MUON
from ..optimizers.groups.param_groups import SCHEDULER_KEYS
from ..optimizers.step import MuonBase
from .checkpoint import check_class, order_of

StateDict = Mapping[str, Any]
STATISTICS = "second_momentum_buffer"


@dataclass(frozen=True, eq=False)
class Saved:
    """A parameter in another optimizer, its state under our keys and its options under ours."""

    kind: str
    name: str | None
    options: Mapping[str, Any]
    state: Mapping[str, Any]
    form: str | None = None  # of its momentum


def convert_state_dict(
    optimizer: MuonBase,
    saved: StateDict | Sequence[StateDict],
    *,
    source: str,
    keep_options: bool = False,
) -> dict[str, Any]:
    """Turn the state of another Muon optimizer into a state_dict for `optimizer.load_state_dict`.

    Parameters are matched by name where both sides have names; otherwise the matrices, in the order
    of the groups, and the other parameters, in theirs. Momentum is rescaled where one side keeps a
    moving average and the other a heavy ball, which is exact for a constant momentum. State that
    the other optimizer had not made yet, or does not have, starts from zeros.

    Args:
        optimizer: `Muon` or `MuonAdamW`, whose groups hold the same parameters. Options of the
            other optimizer that ours do not have (coefficients, eps of the iteration) and the rule
            (cautious, shaped_decay, whether there is a beta2, ...) are chosen when it is
            constructed; so is adjust_lr_fn, but for "torch", whose lr means nothing without it.
        saved: "torch": the state_dict of a torch.optim.Muon, or a sequence with those of the
            torch.optim.AdamW beside it. "motif": that of the Motif optimizer's Muon. "nanochat":
            that of nanochat's MuonAdamW, or a sequence with those of all ranks of DistMuonAdamW.
        source: "torch", "motif" or "nanochat".
        keep_options: keep the options of `optimizer` instead of taking over lr, weight_decay,
            momentum, nesterov, ns_steps, beta2 (where there is one), betas, eps, none_grad
            ("motif") and adjust_lr_fn ("torch").

    Returns:
        A new state_dict; `optimizer` is left as it is.

    Raises:
        ValueError: the source is unknown, parameters, shapes or options do not fit, or the state
            belongs to a variant (amsgrad, maximize, Adam's weight_decay) that ours do not have.
        TypeError: `optimizer` is not one of ours, or `saved` is no state_dict.
    """
    check_class(optimizer)
    if source not in READERS:
        raise ValueError(f"source must be one of {', '.join(READERS)}, got {source!r}")
    dicts = [saved] if isinstance(saved, Mapping) else list(saved)
    for number, entry in enumerate(dicts):
        if not _is_state_dict(entry):
            raise TypeError(f"saved[{number}] is no state_dict of an optimizer: {entry!r:.80}")
    matched = _match(optimizer, READERS[source](dicts))
    converted, present = optimizer.state_dict(), optimizer.completed_state()
    state, groups = {}, []
    for number, (group, entries) in enumerate(zip(converted["param_groups"], matched, strict=True)):
        options = {} if keep_options else _common_options(optimizer, entries, f"group {number}")
        if group.get("beta2", 0) is None:
            options.pop("beta2", None)  # the run goes on without variance reduction
        group = {**group, **options}
        groups.append(group)
        params = optimizer.param_groups[number]["params"]
        for index, param, entry in zip(group["params"], params, entries, strict=True):
            state[index] = _state(present[param], entry, group)
    return {"state": state, "param_groups": groups}


def _is_state_dict(saved: Any) -> bool:
    """Whether it has the parts of a state_dict of an optimizer."""
    if not isinstance(saved, Mapping):
        return False
    states, groups = saved.get("state"), saved.get("param_groups")
    return (
        isinstance(states, Mapping)
        and all(isinstance(state, Mapping) for state in states.values())
        and isinstance(groups, Sequence)
        and all(isinstance(group, Mapping) and "params" in group for group in groups)
    )


def _state(present: Mapping[str, Tensor], entry: Saved, group: Mapping[str, Any]) -> dict[str, Any]:
    """The state of a parameter under our keys; what is missing is zero."""
    state = {key: torch.zeros_like(value) for key, value in present.items()}
    for key in present.keys() & entry.state.keys():
        state[key] = _whole(entry.state[key], present[key])
    if entry.form is not None and "momentum_buffer" in entry.state:
        buffer = entry.state["momentum_buffer"]
        if not isinstance(buffer, Tensor):
            raise ValueError(f"saved: a momentum_buffer must be a Tensor, got {buffer!r:.80}")
        buffer = buffer.to(torch.promote_types(buffer.dtype, torch.float32))
        rest = 1 - float(entry.options["momentum"])
        if (entry.form, group["momentum_form"]) == ("ema", "heavy_ball"):
            buffer = buffer / rest
        elif (entry.form, group["momentum_form"]) == ("heavy_ball", "ema"):
            buffer = buffer * rest
        state["momentum_buffer"] = buffer
    return state


def _common_options(optimizer: MuonBase, entries: Sequence[Saved], where: str) -> dict[str, Any]:
    """The saved options of the parameters of a group, under the group's keys."""
    options: dict[str, Any] = {}
    for entry in entries:
        for field, value in entry.options.items():
            key = optimizer.format.key(entry.kind, field)
            if key in options and not _equal(options[key], value):
                raise ValueError(
                    f"{where}: its parameters were saved with {field}={options[key]!r} and with "
                    f"{field}={value!r}; make groups as they were, or give keep_options=True"
                )
            options[key] = value
    return options


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and one == other


def _match(optimizer: MuonBase, saved: Sequence[Saved]) -> list[list[Saved]]:
    """For every group the saved parameters that are its own."""
    taken = {}
    for kind in (MUON, ADAMW):
        present = [
            name
            for number, group in enumerate(optimizer.param_groups)
            if optimizer.format.kind(group) == kind
            for name in optimizer.parameter_names(number)
        ]
        entries = [entry for entry in saved if entry.kind == kind]
        order = order_of([entry.name for entry in entries], present, f"kind {kind!r}")
        taken[kind] = iter([entries[index] for index in order])
    return [
        [next(taken[optimizer.format.kind(group)]) for _ in group["params"]]
        for group in optimizer.param_groups
    ]


def _options(
    group: Mapping[str, Any], fields: Sequence[str], renamed: Mapping[str, str] | None = None
) -> dict[str, Any]:
    """The fields that a group has, under our names, and the keys of schedulers."""
    found = {field: group[field] for field in fields if field in group}
    found |= {ours: group[key] for key, ours in (renamed or {}).items() if key in group}
    found = {key: tuple(v) if isinstance(v, list) else v for key, v in found.items()}
    return found | {key: group[key] for key in SCHEDULER_KEYS if key in group}


def _each(group: Mapping[str, Any], states: Mapping[Any, Any]) -> Iterator[tuple[str | None, Any]]:
    """Name and state of every parameter of a group."""
    names = group.get("names") or group.get("param_names") or [None] * len(group["params"])
    return zip(names, (states.get(index, {}) for index in group["params"]), strict=True)


def _from_torch(dicts: Sequence[StateDict]) -> list[Saved]:
    """torch.optim.Muon, and torch.optim.AdamW beside it."""
    found = []
    for saved in dicts:
        for number, group in enumerate(saved["param_groups"]):
            if "amsgrad" in group:  # of AdamW, and of Adam, which is AdamW where nothing decays
                _check_adamw(group, f"group {number}")
                kind, form = ADAMW, None
                options = _options(group, ("lr", "betas", "eps", "weight_decay"))
            elif "ns_steps" in group:
                kind, form = MUON, "ema"
                fields = ("lr", "weight_decay", "momentum", "nesterov", "ns_steps")
                options = _options(group, fields)
                options["adjust_lr_fn"] = group.get("adjust_lr_fn") or "original"
            else:
                raise ValueError(
                    f"group {number} is neither of torch.optim.Muon nor of torch.optim.AdamW; it "
                    f"has {', '.join(sorted(map(str, group)))}"
                )
            each = _each(group, saved["state"])
            found += [Saved(kind, name, options, state, form) for name, state in each]
    return found


def _check_adamw(group: Mapping[str, Any], where: str) -> None:
    """Raise ValueError if a group of torch's Adam or AdamW has a rule that ours do not have."""
    for option in ("amsgrad", "maximize"):
        if group.get(option):
            raise ValueError(f"{where}: {option} has no counterpart here")
    if group.get("weight_decay") and not group.get("decoupled_weight_decay", True):
        raise ValueError(
            f"{where}: weight_decay={group['weight_decay']!r} of torch.optim.Adam is no decoupled "
            "decay and has no counterpart here; set it to 0 in the saved group to go on without"
        )


def _from_motif(dicts: Sequence[StateDict]) -> list[Saved]:
    """The Motif optimizer's Muon: one optimizer with `use_muon` groups."""
    if len(dicts) != 1:
        raise ValueError(f"motif is one optimizer: give its state_dict, not {len(dicts)}")
    (saved,) = dicts
    renamed = {"moment1": "exp_avg", "moment2": "exp_avg_sq"}
    found = []
    for number, group in enumerate(saved["param_groups"]):
        if "use_muon" not in group:
            raise ValueError(f"group {number} has no 'use_muon': it is not of the Motif optimizer")
        shared = ("lr", "weight_decay", "none_grad")
        if group["use_muon"]:
            kind, form = MUON, "heavy_ball"
            options = _options(group, (*shared, "momentum", "nesterov", "ns_steps"))
        else:
            kind, form = ADAMW, None
            options = _options(group, shared, {"adamw_betas": "betas", "adamw_eps": "eps"})
        for name, state in _each(group, saved["state"]):
            ours = {renamed.get(key, key): value for key, value in state.items()}
            found.append(Saved(kind, name, options, ours, form))
    return found


def _from_nanochat(dicts: Sequence[StateDict]) -> list[Saved]:
    """nanochat's MuonAdamW, or DistMuonAdamW rank by rank: blocks along the first dimension."""
    found = []
    for number, group in enumerate(dicts[0]["param_groups"]):
        kind, members = group.get("kind"), group["params"]
        states = {i: [saved["state"].get(i, {}) for saved in dicts] for i in members}
        if kind == ADAMW:
            options = _options(group, ("lr", "betas", "eps", "weight_decay"))
            for name, parts in _each(group, states):
                state = {key: [part[key] for part in parts] for key in parts[0]}
                found.append(Saved(ADAMW, name, options, state))
        elif kind == MUON:
            options = _options(group, ("lr", "momentum", "ns_steps", "beta2", "weight_decay"))
            parts = states[members[0]] if members else []
            stacks = _stacked(parts, len(members), f"group {number}")
            for place, (name, _) in enumerate(_each(group, states)):
                state = {key: stack[place] for key, stack in stacks.items()}
                found.append(Saved(MUON, name, options, state, "ema"))
        else:
            raise ValueError(f"group {number} has no kind 'muon' or 'adamw': it is not nanochat's")
    return found


def _stacked(parts: Sequence[StateDict], count: int, where: str) -> dict[str, Tensor]:
    """The stacks of a group of `count` matrices; ranks hold equal blocks, the last ones padded."""
    stacks = {}
    for key in ("momentum_buffer", STATISTICS):
        held = [part[key] for part in parts if key in part]
        if not held:
            continue
        stack = torch.cat([block.to(held[0].device) for block in held])
        if len(stack) < count:
            raise ValueError(
                f"{where}: {key} holds {len(stack)} of {count} matrices; give the state_dicts of "
                "all ranks, in their order"
            )
        stacks[key] = stack[:count]
    return stacks


def _whole(value: Any, present: Tensor) -> Any:
    """What ranks hold of AdamW's state: slices of the first dimension, or each the whole."""
    if not isinstance(value, list):
        return value
    first = value[0]
    if len(value) == 1 or not isinstance(first, Tensor) or first.shape == present.shape:
        return first
    return torch.cat([part.to(first.device) for part in value])


READERS: dict[str, Callable[[Sequence[StateDict]], list[Saved]]] = {
    "torch": _from_torch,
    "motif": _from_motif,
    "nanochat": _from_nanochat,
}
