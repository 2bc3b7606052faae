"""Parameter groups: names and shapes -> Muon or AdamW, and the keys that a group may have."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized

from ...dispatch import say_once
from .options import AdamWOptions, MuonOptions, option_names, tidy
from .parameters import check_parameter, label

logger = logging.getLogger(__name__)

# Components that wrappers put into names: torch.compile, activation checkpointing, FSDP1.
WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})
EXPERTS = "experts"
TOKEN_TABLES = frozenset({"wte", "wpe"})  # GPT-2's names; every other table says "embed" or "_emb"
HEADS = frozenset({"lm_head", "unembed", "classifier"})
# Words that name the head at the top of a model and an ordinary projection inside a layer.
TOP_LEVEL_HEADS = frozenset({"output", "head", "heads", "score", "proj_out", "output_layer"})


def components(name: str) -> list[str]:
    """The parts of a qualified name without those that wrappers add."""
    parts = [part for part in name.split(".") if part not in WRAPPERS]
    if parts[0] == "module" and len(parts) > 1:  # DistributedDataParallel
        del parts[0]
    return parts


def has_component(name: str, key: str) -> bool:
    """Whether `key` occurs in `name` as whole components; `shared_experts.w1` has no `experts`."""
    parts, wanted = components(name), key.split(".")
    last = len(parts) - len(wanted)
    return any(parts[i : i + len(wanted)] == wanted for i in range(last + 1))


def default_is_muon(name: str, param: Tensor) -> bool:
    """Whether a parameter is a hidden matrix, as far as its name and shape tell.

    Matrices, convolution filters (4 dimensions and more) and stacks of experts (3 dimensions and a
    name component `experts`) are; embeddings, output heads, norms, biases, other 3-D parameters,
    what has fewer than 2 dimensions and matrices of one row or column, which are vectors (heads of
    one output, magnitudes of weight_norm), are not. `output`, `head` and the like are heads only
    outside numbered layers, since `layers.0.attention.output` is an ordinary projection.
    `get_default_muon_param_groups` looks at the module types first, which is safer.

    Args:
        name: qualified name, as from `model.named_parameters()`.
        param: the parameter.
    """
    parts = components(name)
    if param.ndim < 2 or parts[-1].endswith("bias"):
        return False
    if param.ndim == 3 and EXPERTS not in parts:
        return False
    rows, *columns = param.shape[1:] if param.ndim == 3 else param.shape
    if rows == 1 or math.prod(columns) == 1:
        return False
    owners = [part.lower() for part in (parts[:-1] or parts)]
    if any(_names_table_or_norm(part) or part in HEADS for part in owners):
        return False
    numbered = any(part.isdigit() for part in parts)
    return numbered or not TOP_LEVEL_HEADS.intersection(owners)


def get_default_muon_param_groups(
    model: nn.Module, is_muon_func: Callable[[str, Tensor], bool] = default_is_muon
) -> list[dict[str, Any]]:
    """Split the trainable parameters of a model into a group for Muon and one for AdamW.

    By default the type of a module decides first: embeddings, output heads (tied to an embedding or
    not) and norms go to AdamW whatever their names; then `default_is_muon` decides. A head is what
    `model.get_output_embeddings()` returns, and any Linear outside the layers with as many outputs
    as an embedding has rows, or up to twice as many (vocabularies are padded). A tied parameter
    appears once. Another `is_muon_func` decides alone. The split is logged at INFO.

    Args:
        model: any module, also compiled or wrapped for checkpointing or DDP.
        is_muon_func: (name, parameter) -> True for Muon.

    Returns:
        `[{"params", "names", "use_muon": True}, {"params", "names", "use_muon": False}]`. The first
        also carries `expert_keys` where it holds 3-D stacks of experts, and `split_sizes` for the
        fused Q, K and V of `torch.nn.MultiheadAttention`. Groups may be empty.

    Raises:
        TypeError: `model` is not a module.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"model must be a torch.nn.Module, got {type(model).__name__}; write the groups "
            "yourself for a list of parameters"
        )
    by_type = _not_muon_by_type(model) if is_muon_func is default_is_muon else set()
    muon: dict[str, Any] = {"params": [], "names": [], "use_muon": True}
    adamw: dict[str, Any] = {"params": [], "names": [], "use_muon": False}
    for name, param in model.named_parameters():
        if param.requires_grad:
            chosen = muon if param not in by_type and is_muon_func(name, param) else adamw
            chosen["params"].append(param)
            chosen["names"].append(name)
    stacks = (p.ndim == 3 and has_component(n, EXPERTS) for p, n in zip(*_lists(muon), strict=True))
    if any(stacks):
        muon["expert_keys"] = (EXPERTS,)
    if fused := _fused_projections(model, muon):
        muon["split_sizes"] = fused
    logger.info("to Muon: %s; to AdamW: %s", *(", ".join(g["names"]) for g in (muon, adamw)))
    return [muon, adamw]


def _lists(group: dict[str, Any]) -> tuple[list[Tensor], list[str]]:
    return group["params"], group["names"]


def _names_table_or_norm(part: str) -> bool:
    return (
        part in TOKEN_TABLES
        or "embed" in part
        or part.endswith(("_emb", "norm"))
        or part.startswith("norm")
    )


def _fused_projections(model: nn.Module, muon: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Rows of Q, K and V in the one parameter that torch's own attention keeps them in."""
    fused = {
        module.in_proj_weight: (module.embed_dim,) * 3
        for module in model.modules()
        if isinstance(module, nn.MultiheadAttention) and module.in_proj_weight is not None
    }
    return {name: fused[p] for p, name in zip(*_lists(muon), strict=True) if p in fused}


def _not_muon_by_type(model: nn.Module) -> set[Tensor]:
    """Parameters of embeddings, heads and norms; a weight tied to one of these is the same one."""
    found: set[Tensor] = set()
    vocabularies: set[int] = set()
    for module in model.modules():
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
            vocabularies.add(module.num_embeddings)
            found.update(_own_parameters(module))
        elif type(module).__name__.lower().endswith("norm"):
            found.update(_own_parameters(module))
    for head in _heads(model, vocabularies):
        found.update(_own_parameters(head))
    return found


def _own_parameters(module: nn.Module) -> Iterator[Tensor]:
    """A module's parameters without those of its children; a parametrization is no child."""
    yield from module.parameters(recurse=False)
    if is_parametrized(module):
        yield from module.parametrizations.parameters()


def _heads(model: nn.Module, vocabularies: set[int]) -> Iterator[nn.Module]:
    """What the model declares as its head, and Linears onto a vocabulary that are in no layer."""
    getter = getattr(model, "get_output_embeddings", None)  # transformers
    if callable(getter):
        try:
            head = getter()
        except NotImplementedError:
            head = None
        if isinstance(head, nn.Module):
            yield head
    # Of wrappers and what they wrap, which share a path, the innermost is last and stays.
    modules = {_path(name): module for name, module in model.named_modules()}
    for path, module in modules.items():
        outputs = getattr(module, "out_features", None)
        # Padding, to a multiple of 64 or 128, less than doubles any vocabulary worth padding. A
        # bound keeps tables of a few rows (token types) from making every Linear a head.
        onto_vocabulary = isinstance(outputs, int) and any(
            rows <= outputs < 2 * rows for rows in vocabularies
        )
        if onto_vocabulary and not _in_layer(path, modules):
            yield module


def _path(name: str) -> tuple[str, ...]:
    """The components of a module's name, () for the model itself."""
    return tuple(components(f"{name}.weight" if name else "weight")[:-1])


def _in_layer(path: tuple[str, ...], modules: Mapping[tuple[str, ...], nn.Module]) -> bool:
    """Whether a Linear is part of a numbered block, or one itself, rather than the end of a model.

    The last Linear of a Sequential can be a head: Sequential(Embedding, ..., Linear).
    """
    parent = path[:-1]
    if any(part.isdigit() for part in parent):
        return True
    if isinstance(modules[parent], nn.Sequential):
        siblings = [p for p in modules if p[:-1] == parent and hasattr(modules[p], "out_features")]
        return path != siblings[-1]
    return bool(path) and path[-1].isdigit()


MUON, ADAMW = "muon", "adamw"
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
        self, group: dict[str, Any], check_as: str | None = None
    ) -> MuonOptions | AdamWOptions:
        """The group's options as they are now; schedulers may have changed them.

        With `check_as`, a name for messages, they are checked, which may read a Tensor lr.
        """
        self.settle(group)
        kind = self.kind(group)
        values = {name: group[key] for name, key in self._keys_of_options[kind]}
        if check_as is not None:
            OPTIONS[kind](**values).check(check_as)
        for name in ("lr", "weight_decay"):
            value = values[name]
            dense = isinstance(value, Tensor) and value.layout == torch.strided
            if dense and value.numel() == 1:
                values[name] = value.detach().reshape(())  # (1,) would lend its dtype to others
        return OPTIONS[kind](**values)

    def recheck(self, group: dict[str, Any], where: str) -> MuonOptions | AdamWOptions:
        """The options of a group that changed: tidied in place and checked; no Tensor is read."""
        for key in self.keys(self.kind(group)):
            group[key] = tidy(key, group[key])
        options = self.options(group)
        options.check(where, read_lr=False)
        return options

    def check_saved(
        self, saved: Mapping[str, Any], group: Mapping[str, Any], owner: str, where: str
    ) -> None:
        """Raise ValueError if a saved group has keys that the group it is loaded into cannot have.

        Keys that the group has already are its owner's business.
        """
        kind = self.kind(group)
        known = {"params", self.mark, *self.keys(kind), *SCHEDULER_KEYS, *group}
        unknown = sorted(set(saved) - known)
        if unknown:
            raise ValueError(
                f"{where}: the saved group has {', '.join(map(repr, unknown))}, which "
                f"{'an' if kind == ADAMW else 'a'} {kind} group of {owner} does not have; load it "
                "into an optimizer of the class that saved it"
            )

    def complete(
        self, group: Any, defaults: Mapping[str, Any], where: str
    ) -> tuple[dict[str, Any], list[str | None]]:
        """A checked copy of a group with every option filled in, and its parameters' names."""
        if not isinstance(group, dict):
            raise TypeError(f"{where}: must be a dict, got {type(group).__name__}")
        kind = self.kind(group, where)
        params, names = _parameters(group, where)
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
        completed |= {key: group[key] for key in group if key in SCHEDULER_KEYS}
        options = self.options(completed, where)
        if self.shares_lr and isinstance(options, MuonOptions):
            _warn_of_rate(options)
        return completed, names

    def _check_keys(self, group: dict[str, Any], kind: str, where: str) -> None:
        known = {"params", "names", "use_muon", "kind", *SCHEDULER_KEYS, *self.keys(kind)}
        for key in group:
            if key not in known:
                other = ADAMW if kind == MUON else MUON
                hint = f" (it is an option of {other} groups)" if key in self.keys(other) else ""
                raise ValueError(
                    f"{where}: unknown key {key!r}{hint}; a {kind} group takes "
                    f"{', '.join(self.keys(kind))}"
                )


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


def _parameters(group: dict[str, Any], where: str) -> tuple[list[Tensor], list[str | None]]:
    """The parameters and names of a group, from a tensor, an iterable, or (name, tensor) pairs."""
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
    elif group.get("names") is not None:
        names = _names(group["names"], len(entries), where)
    for index, (param, name) in enumerate(zip(entries, names, strict=True)):
        if name is not None and not isinstance(name, str):
            raise TypeError(f"{where}: a name must be a string, got {name!r}")
        check_parameter(param, label(where, index, name))
    return entries, names


def _names(given: Any, count: int, where: str) -> list[str | None]:
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise TypeError(f"{where}: names must be a sequence of strings, got {given!r}")
    names = list(given)
    if len(names) != count:
        raise ValueError(f"{where}: {len(names)} names for {count} parameters; give one for each")
    return names


def check_unique(groups: Iterable[dict[str, Any]], names: Iterable[list[str | None]]) -> None:
    """Raise ValueError if a parameter or a name occurs twice in all the groups."""
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
