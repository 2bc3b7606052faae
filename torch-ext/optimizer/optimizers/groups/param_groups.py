"""The keys that a parameter group may have, and their values: checked, completed, told apart.

Keys and arguments that other optimizers have are refused with the line that replaces them here.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from ...dispatch import say_once
from .default_groups import ADAMW, EXPERTS, MUON, default_is_muon, fused_by_names
from .options import AdamWOptions, MuonOptions, option_names, tidy
from .parameters import check_parameter, has_component, label

OPTIONS = {MUON: MuonOptions, ADAMW: AdamWOptions}
# What torch's schedulers write into groups, and ask for when they resume.
SCHEDULER_KEYS = frozenset(
    {"initial_lr", "max_lr", "min_lr", "swa_lr", "max_momentum", "base_momentum"}
)
# Names of AdamW's options in `defaults` of both classes. OneCycleLR and CyclicLR cycle `betas` of
# every group if "betas" is a default, and `momentum` of every group otherwise; only `momentum` fits
# all groups here: see Format.settle.
DEFAULT_KEYS = {"betas": "adamw_betas", "eps": "adamw_eps"}
LARGE_RATE = 0.01  # for AdamW; of match_rms_adamw, whose rates are AdamW's
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


@dataclass(frozen=True)
class Format:
    """How a class names the kinds of its groups, and AdamW's options in them."""

    mark: str  # "use_muon" or "kind"
    adamw_keys: Mapping[str, str]  # field of AdamWOptions -> key of the group, where they differ
    shares_lr: bool = False  # AdamW groups take the default lr of Muon groups

    def key(self, kind: str, option: str) -> str:
        return self.adamw_keys.get(option, option) if kind == ADAMW else option

    def keys(self, kind: str) -> list[str]:
        return [key for _, key in self._keys_of_options[kind]]

    @cached_property
    def _keys_of_options(self) -> dict[str, list[tuple[str, str]]]:
        """(field, key of a group) of every option, per kind."""
        return {
            kind: [(option, self.key(kind, option)) for option in option_names(options)]
            for kind, options in OPTIONS.items()
        }

    def kind(self, group: Mapping[str, Any], where: str = "group") -> str:
        """What `use_muon` or `kind` says: "muon" or "adamw"."""
        kinds = []
        if "kind" in group:
            if group["kind"] not in OPTIONS:
                raise ValueError(f"{where}: kind must be 'muon' or 'adamw', got {group['kind']!r}")
            kinds.append(group["kind"])
        if "use_muon" in group:
            if not isinstance(group["use_muon"], bool):
                raise TypeError(
                    f"{where}: use_muon must be True or False, got {group['use_muon']!r}"
                )
            kinds.append(MUON if group["use_muon"] else ADAMW)
        if not kinds:
            raise ValueError(
                f"{where}: {self.mark!r} is missing; get_default_muon_param_groups(model) makes "
                "groups for Muon and for AdamW"
            )
        if len(set(kinds)) > 1:
            raise ValueError(
                f"{where}: kind={group['kind']!r} contradicts use_muon={group['use_muon']}; give "
                "one of them"
            )
        return kinds[0]

    def settle(self, group: dict[str, Any]) -> None:
        """Give values that other code wrote into a group the form that they have here.

        The momentum that OneCycleLR or CyclicLR wrote into an AdamW group becomes its beta1; they
        are told from other code by the bounds they leave in the group. adjust_lr_fn=None is
        "original", as in torch.
        """
        if group.get("adjust_lr_fn", "") is None:
            group["adjust_lr_fn"] = tidy("adjust_lr_fn", None)
        cycled = {"momentum", "max_momentum", "base_momentum"} <= group.keys()
        if cycled and self.kind(group) == ADAMW:
            key = self.key(ADAMW, "betas")
            if isinstance(group[key], (tuple, list)):  # else the check of betas says so
                group[key] = (group.pop("momentum"), *group[key][1:])

    def options(
        self, group: dict[str, Any], where: str = "group", *, check: bool = False
    ) -> MuonOptions | AdamWOptions:
        """The group's options as they are now; schedulers may have changed them.

        With `check` they are checked, which may read a Tensor lr.

        Raises:
            ValueError: an option is gone, as where the mark of a group was changed.
        """
        self.settle(group)
        kind = self.kind(group, where)
        try:
            values = {name: group[key] for name, key in self._keys_of_options[kind]}
        except KeyError as missing:
            raise ValueError(
                f"{where}: a group of kind {kind!r} has {missing}; a group keeps its kind and its "
                "options, and others are added with add_param_group"
            ) from None
        if check:
            OPTIONS[kind](**values).check(where)
        for name in ("lr", "weight_decay"):
            value = values[name]
            dense = isinstance(value, Tensor) and value.layout == torch.strided
            if dense and value.numel() == 1:
                values[name] = value.detach().reshape(())  # (1,) would lend its dtype to others
        return OPTIONS[kind](**values)

    def tidy(self, group: dict[str, Any]) -> None:
        """Give every option of a group its stored form, in place."""
        for key in self.keys(self.kind(group)):
            group[key] = tidy(key, group[key])

    def recheck(self, group: dict[str, Any], where: str) -> MuonOptions | AdamWOptions:
        """The options of a group that changed: tidied in place and checked; no Tensor is read."""
        self.tidy(group)
        options = self.options(group, where)
        options.check(where, read_lr=False)
        return options

    def check_saved(
        self, saved: Mapping[str, Any], group: Mapping[str, Any], owner: str, where: str
    ) -> None:
        """Raise ValueError if a saved group has keys that the group it is loaded into cannot have.

        Keys that the group has already are its owner's business.
        """
        kind = self.kind(group)
        options = {"use_muon", "kind", "adamw_betas", "adamw_eps"}
        options |= {name for of_kind in OPTIONS.values() for name in option_names(of_kind)}
        known = {"params", self.mark, "param_names", *self.keys(kind), *SCHEDULER_KEYS, *group}
        unknown = sorted((set(saved) & options) - known)
        if unknown:
            raise ValueError(
                f"{where}: the saved group has {', '.join(map(repr, unknown))}, which "
                f"{'an' if kind == ADAMW else 'a'} {kind} group of {owner} does not have; load it "
                "into an optimizer of the class that saved it"
            )
        for key in set(saved) - known:
            check_other_key(key, saved[key], self.keys(kind), f"{where}, saved")

    def complete(
        self, group: Any, defaults: Mapping[str, Any], where: str
    ) -> tuple[dict[str, Any], list[str | None]]:
        """A checked copy of a group with every option filled in, and its parameters' names."""
        if not isinstance(group, dict):
            raise TypeError(f"{where}: must be a dict, got {type(group).__name__}")
        kind = self.kind(group, where)
        if kind == ADAMW and self.mark == "use_muon":
            group = keller_jordans(group, defaults["adjust_lr_fn"], where)
        params, names, paired = _parameters(group, where)
        self._check_keys(group, kind, where)
        default_keys = dict(DEFAULT_KEYS) if kind == ADAMW else {}
        if kind == ADAMW and not (self.shares_lr and defaults["adamw_lr"] is None):
            default_keys["lr"] = "adamw_lr"
        sources = {  # key of the group -> its key in defaults
            self.key(kind, option): default_keys.get(option, option)
            for option in option_names(OPTIONS[kind])
        }
        if "lr" not in group and defaults[sources["lr"]] is None:
            raise ValueError(
                f"{where}: lr must be given for kind {kind!r}, in the group or as {sources['lr']}"
            )
        mark = kind == MUON if self.mark == "use_muon" else kind
        completed = {"params": params, self.mark: mark}
        for key, source in sources.items():
            completed[key] = tidy(key, group[key] if key in group else defaults[source])
        own = {"params", "names", "use_muon", "kind", *sources}  # every other key is the caller's
        completed |= {key: group[key] for key in group if key not in own}
        if paired:
            completed["param_names"] = names
        options = self.options(completed, where, check=True)
        if self.shares_lr and isinstance(options, MuonOptions):
            _warn_of_rate(options)
        return completed, names

    def _check_keys(self, group: dict[str, Any], kind: str, where: str) -> None:
        other = ADAMW if kind == MUON else MUON
        own, others = self.keys(kind), self.keys(other)
        known = {"params", "names", "param_names", "use_muon", "kind", *SCHEDULER_KEYS, *own}
        for key, value in group.items():
            if key in others and key not in known:
                raise ValueError(
                    f"{where}: unknown key {key!r} (it is an option of {other} groups); a {kind} "
                    f"group takes {', '.join(own)}"
                )
            if key not in known:
                check_other_key(key, value, [*own, *others], where)

    def is_marked(self, group: Any) -> bool:
        """Whether a group says what it is for, or is none at all."""
        return not isinstance(group, dict) or bool({"kind", "use_muon"} & group.keys())

    def with_marks(
        self, group: Any, defaults: Mapping[str, Any], where: str
    ) -> tuple[list[Any], str]:
        """A group that says what it is for, or the groups that one without a mark is split into.

        Names decide by `default_is_muon`; without them the shape does, as in torch, and what it
        decided is the second value, for a warning; "" where nothing was guessed. 3-D parameters
        are for Muon where expert_keys or flatten say how to take them.
        """
        if self.is_marked(group):
            return [group], ""
        params, names, paired = _parameters(group, where)
        chosen = self._chosen(group, defaults, params, names)
        kinds = [kind for kind in OPTIONS if chosen[kind]] or [ADAMW]
        parts, guesses = [], []
        for kind in kinds:
            others = {key for other in kinds if other != kind for key in self.keys(other)}
            foreign = others - {*self.keys(kind)}
            part = {k: v for k, v in group.items() if k not in foreign} | {"kind": kind}
            part["params"] = [params[i] for i in chosen[kind]]
            part.pop("names", None)
            if any(name is not None for name in names):
                part["names"] = [names[i] for i in chosen[kind]]
            if paired or "param_names" in group:
                part["param_names"] = part["names"]
            parts.append(part)
            shapes = {tuple(params[i].shape) for i in chosen[kind] if names[i] is None}
            if shapes:
                guesses.append(f"{', '.join(map(str, sorted(shapes)))} to {kind}")
        experts = [names[i] for i in chosen[MUON] if params[i].ndim == 3]
        keys = tuple(group.get("expert_keys", defaults["expert_keys"]) or ())
        if EXPERTS not in keys and any(has_component(name or "", EXPERTS) for name in experts):
            parts[0]["expert_keys"] = (*keys, EXPERTS)
        keys = ("split_sizes", "num_heads", "transposed", "flatten")
        told = {key: group.get(key, defaults[key]) for key in keys}
        of_muon = [(names[i], params[i]) for i in chosen[MUON] if names[i] is not None]
        named = {name: p for name, p in of_muon if p.ndim == 2 or not told["flatten"]}
        if named and not told["split_sizes"] and not told["num_heads"]:
            parts[0]["split_sizes"] = fused_by_names(named, told["transposed"]) or None
        return parts, "; ".join(guesses)

    def _chosen(
        self,
        group: Mapping[str, Any],
        defaults: Mapping[str, Any],
        params: list[Tensor],
        names: list[str | None],
    ) -> dict[str, list[int]]:
        """Kind -> numbers of its parameters."""
        keys = tuple(group.get("expert_keys", defaults["expert_keys"]) or ())
        chosen: dict[str, list[int]] = {MUON: [], ADAMW: []}
        for index, (param, name) in enumerate(zip(params, names, strict=True)):
            if name is None:
                is_muon = param.ndim == 2 or param.ndim > 3
            else:
                is_muon = default_is_muon(name, param)
            if param.ndim == 3 and not is_muon:
                is_muon = bool(group.get("flatten", defaults["flatten"])) or any(
                    has_component(name or "", key) for key in keys if isinstance(key, str)
                )
            chosen[MUON if is_muon else ADAMW].append(index)
        return chosen


def _warn_of_rate(options: MuonOptions) -> None:
    """Rates of Keller Jordan's rule are far too large under the default one."""
    lr, rule = options.lr, options.adjust_lr_fn
    if rule == "match_rms_adamw" and not isinstance(lr, Tensor) and lr >= LARGE_RATE:
        say_once(
            "lr=%s under adjust_lr_fn='match_rms_adamw' moves a 1024 x 1024 matrix 6.4 times as "
            "far as torch.optim.Muon does at its default rule; take a rate of AdamW such as 1e-3, "
            "or adjust_lr_fn='original' for rates such as 0.02",
            lr,
        )


def _parameters(group: dict[str, Any], where: str) -> tuple[list[Tensor], list[str | None], bool]:
    """The parameters and names of a group, and whether they were (name, tensor) pairs."""
    if "params" not in group:
        raise ValueError(f"{where}: 'params' is missing")
    given = group["params"]
    if isinstance(given, (set, frozenset)):
        raise TypeError(f"{where}: params must be ordered; a set has no fixed order between runs")
    if not isinstance(given, Iterable):
        raise TypeError(f"{where}: params must be an iterable, got {type(given).__name__}")
    entries = [given] if isinstance(given, Tensor) else list(given)
    paired = [isinstance(entry, tuple) and len(entry) == 2 for entry in entries]
    names: list[str | None] = [None] * len(entries)
    if any(paired):
        if not all(paired) or "names" in group:
            raise ValueError(f"{where}: give a name with every parameter, or `names`, not both")
        names, entries = [entry[0] for entry in entries], [entry[1] for entry in entries]
    elif (given := group.get("names", group.get("param_names"))) is not None:
        names = _names(given, len(entries), where)
    for index, (param, name) in enumerate(zip(entries, names, strict=True)):
        if name is not None and not isinstance(name, str):
            raise TypeError(f"{where}: a name must be a string, got {name!r}")
        check_parameter(param, label(where, index, name))
    return entries, names, any(paired)


def _names(given: Any, count: int, where: str) -> list[str | None]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{where}: names must be a sequence of strings, got {given!r}")
    names = list(given)
    if len(names) != count:
        raise ValueError(f"{where}: {len(names)} names for {count} parameters; give one for each")
    return names


def check_unique(groups: Iterable[dict[str, Any]], names: Iterable[list[str | None]]) -> None:
    """Raise ValueError if a parameter or a name occurs twice in all the groups.

    And, as torch.optim does, if some groups have `param_names` and parameters of others no names.
    """
    groups, names = list(groups), list(names)
    seen_params: dict[Tensor, str] = {}
    seen_names: dict[str, str] = {}
    for number, (group, group_names) in enumerate(zip(groups, names, strict=True)):
        for index, (param, name) in enumerate(zip(group["params"], group_names, strict=True)):
            here = label(f"group {number}", index, name)
            if param in seen_params:
                raise ValueError(f"{here}: this parameter is already {seen_params[param]}")
            if name is not None and name in seen_names:
                raise ValueError(f"{here}: the name is already that of {seen_names[name]}")
            seen_params[param] = here
            if name is not None:
                seen_names[name] = here
    named = [i for i, group in enumerate(groups) if "param_names" in group]
    unnamed = [  # a group may have `param_names` from a state that was loaded
        i
        for i, given in enumerate(names)
        if given and set(given) == {None} and "param_names" not in groups[i]
    ]
    if named and unnamed:
        raise ValueError(
            f"group {unnamed[0]} has no names and group {named[0]} has `param_names`; give (name, "
            "parameter) pairs in all groups, or names in none"
        )


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
        if args and isinstance(args[0], Real):
            raise TypeError(
                f"{type(self).__name__} takes parameters or groups first, got {args[0]!r}; "
                f"{_MOONLIGHT}"
            )
        if len(args) > 2:
            third = args[2] if isinstance(args[2], Real) else f"a {type(args[2]).__name__}"
            raise TypeError(
                f"{type(self).__name__} takes only the parameters and lr by position, got "
                f"{third} as a third: it is weight_decay in torch.optim.Muon and momentum in "
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
