"""Keys of groups and arguments of other optimizers, and the line that replaces them here."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any

import torch

from .options import AdamWOptions, MuonOptions, option_names

_KELLER_JORDAN = (
    "for his update write Muon(groups, adjust_lr_fn='original', ns_coefficients='keller_jordan', "
    "weight_decay=0.0, adamw_lr=3e-4, adamw_eps=1e-10, lr=0.02)"
)
_DION = (
    "for the update of dion's Muon write use_muon=True for algorithm='muon' and False for 'adamw', "
    "and Muon(groups, lr=0.01, momentum=0.95, nesterov=False, adjust_lr_fn='spectral', "
    "weight_decay=0.01, ns_coefficients='you')"
)
_MOONLIGHT = (
    "for Moonlight's update write Muon([{'params': muon_params, 'use_muon': True}, {'params': "
    "adamw_params, 'use_muon': False}], lr=lr, weight_decay=wd, ns_coefficients='keller_jordan')"
)
# What other optimizers call it -> what to write here.
FOREIGN: dict[str, str] = {
    "algorithm": _DION,
    "mu": f"it is called momentum here; {_DION}",
    "epsilon": f"it is called adamw_eps (eps in MuonAdamW) here; {_DION}",
    "adjust_lr": f"it is called adjust_lr_fn here; {_DION}",
    "distributed_mesh": f"DTensors bring their own mesh, and DDP has process_group; {_DION}",
    "muon_params": _MOONLIGHT,
    "adamw_params": _MOONLIGHT,
    "wd": f"it is called weight_decay here; {_MOONLIGHT}",
    "adamw_wd": "give weight_decay in the group with use_muon=False",
    "learning_rate": "it is called lr here",
    "backend_steps": "it is called ns_steps here",
}
# Switches of torch's AdamW that change what it computes.
_TORCH_RULES = frozenset({"maximize", "amsgrad", "differentiable"})
# Of torch's optimizers, which change nothing but how a step is computed.
_TORCH_SWITCHES = frozenset({"fused", "foreach", "capturable"})
# Arguments of the constructors that are no options of a group.
_OF_THE_OPTIMIZER = frozenset(
    {
        *("adamw_lr", "clip_config", "debug", "process_group", "distributed", "gradients"),
        *("reduce_op", "warmup_step", "chunk_size", "use_distributed_muon"),
    }
)
ONE_KIND = (
    "ZeroRedundancyOptimizer needs groups of one kind, and this one has parameters for muon and "
    "for adamw; pass it [{k: v for k, v in g.items() if k != 'names'} for g in "
    "get_default_muon_param_groups(model, split_fused=False)]"
)
_ZERO = "torch.distributed.optim.zero_redundancy_optimizer"
_NEAR = 0.85  # of difflib's ratio: "momentums", "ns_step", "nestrov"


def refuses_foreign_arguments(construct: Callable[..., None]) -> Callable[..., None]:
    """A constructor that raises TypeError for another optimizer's keyword, with its replacement.

    Also where `params` is missing, which Python would say first: Moonlight's has none. And for a
    keyword that is misspelt, and options by position, which mean something else in every optimizer.
    """

    known = [*inspect.signature(construct).parameters][1:]

    @functools.wraps(construct)
    def constructed(self: Any, *args: Any, **kwargs: Any) -> None:
        for name in kwargs:
            if name in FOREIGN:
                raise TypeError(f"{name} is no argument: {FOREIGN[name]}")
            remedy = "" if name in known else _remedy(name, known)
            if remedy:
                raise TypeError(f"got an unexpected keyword argument {name!r}{remedy}")
        if len(args) > 2:
            raise TypeError(
                f"{type(self).__name__} takes only the parameters and lr by position, got "
                f"{args[2]!r} as a third: it is weight_decay in torch.optim.Muon and momentum in "
                "Motif's Muon; pass options by name"
            )
        if args and isinstance(args[0], torch.nn.Module):
            raise TypeError(
                f"{type(self).__name__} takes parameters or groups, got a {type(args[0]).__name__}"
                "; pass get_default_muon_param_groups(model)"
            )
        construct(self, *args, **kwargs)

    return constructed


def _remedy(name: str, known: Iterable[str]) -> str:
    """What to do about a keyword that is none of the `known` ones; "" where nothing is known."""
    if name in _TORCH_SWITCHES:
        return ": every step is fused and can be captured in a CUDA graph; leave it out"
    if name in _TORCH_RULES:
        return ": AdamW has no such variant here; leave it out"
    if f"adamw_{name}" in known:
        return f": write adamw_{name}"
    if name in (*option_names(MuonOptions), *option_names(AdamWOptions)):
        return f": it is an option of a group: {{'params': ..., {name!r}: ...}}"
    near = difflib.get_close_matches(name, known, 1, _NEAR)
    return f"; write {near[0]!r} if that is meant" if near else ""


def check_other_key(key: Any, value: Any, options: Iterable[str], where: str) -> None:
    """Check a key of a group that is no option: one that nobody here reads is the caller's own.

    Raises:
        ValueError: it is an option misspelt, an argument of the optimizer, or an option of another
            optimizer that would change the update; the message says what to write.
    """
    if not isinstance(key, str):
        return
    if key in FOREIGN:
        raise ValueError(f"{where}: unknown key {key!r}: {FOREIGN[key]}")
    if key in _OF_THE_OPTIMIZER:
        raise ValueError(
            f"{where}: unknown key {key!r}: it is an argument of the optimizer, not of a group"
        )
    if key in _TORCH_RULES and value:
        raise ValueError(f"{where}: unknown key {key!r}: AdamW has no such variant here")
    near = difflib.get_close_matches(key, options, 1, _NEAR)
    if near:
        raise ValueError(f"{where}: unknown key {key!r}; write {near[0]!r} if that is meant")


def group_of_zero(number: int) -> dict[str, Any] | None:
    """Of which group of torch's ZeroRedundancyOptimizer a group is this rank's part, if of any.

    It keeps its own groups by number and brings options of the two together at every step: where a
    group here became two, a rate set in its copy would never reach the second.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") == _ZERO:
            return frame.f_locals["self"].param_groups[number]
        frame = frame.f_back
    return None


def keller_jordans(group: Mapping[str, Any], rule: Any, where: str) -> dict[str, Any]:
    """The group of an AdamW with his `betas` and `eps` under the keys of `Muon`.

    Raises:
        ValueError: the matrices beside it would move by another rule than his.
    """
    renamed = {key: f"adamw_{key}" for key in ("betas", "eps") if key in group}
    if renamed and rule not in ("original", None):
        key = next(iter(renamed))
        raise ValueError(
            f"{where}: unknown key {key!r}, which is adamw_{key} here. Groups with it are Keller "
            f"Jordan's: {_KELLER_JORDAN}"
        )
    return {renamed.get(key, key): value for key, value in group.items()}
