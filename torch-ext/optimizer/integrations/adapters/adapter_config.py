"""adapter_config.json of PEFT: which parameters of the experts it names, with which rank and alpha.

Files may be anybody's, so what is read is checked: types, options, ranks. PEFT takes the keys of
`rank_pattern` and `alpha_pattern`, and some names of modules, for regular expressions, of which a
short one can run for years: the time is a power of the number of repeats, so few are allowed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...optimizers.groups.parameters import components
from ..models.experts import experts_modules, parameter_names

LARGEST = 65_536  # rank: more than any width that it could stand for


@dataclass(frozen=True)
class AdapterOptions:
    """What scales an adapter on one projection: alpha / r, or alpha / sqrt(r) with rslora.

    Raises:
        ValueError: r is no rank, alpha no finite number or rslora no bool.
    """

    r: int
    alpha: float
    rslora: bool = False

    def __post_init__(self) -> None:
        if type(self.r) is not int or not 1 <= self.r <= LARGEST:
            raise ValueError(f"r must be an integer from 1 to {LARGEST}, got {self.r!r:.99}")
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, (int, float)):
            raise ValueError(f"lora_alpha must be a number, got {self.alpha!r}")
        if not abs(self.alpha) <= torch.finfo(torch.float32).max:  # nor an integer without end
            raise ValueError(f"lora_alpha must be a finite float32, got {self.alpha!r:.99}")
        if not isinstance(self.rslora, bool):
            raise ValueError(f"use_rslora must be True or False, got {self.rslora!r}")


Targets = dict[str, dict[str, AdapterOptions]]  # by names of the experts module and its parameter

# Options that change what the factors mean, with the values that do not.
PLAIN = {
    "peft_type": ("LORA",),
    "lora_dropout": (0, 0.0, None),
    "bias": ("none", None),
    **dict.fromkeys(("use_dora", "lora_bias", "fan_in_fan_out", "use_qalora"), (False, None)),
    **dict.fromkeys(("trainable_token_indices", "layer_replication", "velora_config"), (None,)),
    **dict.fromkeys(("alora_invocation_tokens", "kasa_config", "arrow_config"), (None,)),
    **dict.fromkeys(("layers_to_transform", "layers_pattern"), (None, [])),
}
# What the other options that are used here must be; those with None may be missing.
TYPES = {
    "r": (int,),
    "lora_alpha": (int, float),
    "use_rslora": (bool, None),
    "target_parameters": (list, None),
    "target_modules": (list, str, None),
    "exclude_modules": (list, str, None),
    "modules_to_save": (list, None),
    "rank_pattern": (dict, None),
    "alpha_pattern": (dict, None),
    "peft_version": (str, None),
}
# One character, and how often: a letter, an escaped sign, any character, a digit or a class.
ATOM = re.compile(r"(\\[^A-Za-z0-9]|\\d|\.|\[\^?[\w.-]+\]|[\w/:,@ -])([*+?]?)", re.ASCII)
LENGTH, REPEATS, PATTERNS = 300, 2, 100  # of one pattern, in it, and how many may have any

Rules = list[tuple[re.Pattern[str], Any]]  # a value, and the names it is meant for


def read_config(file: Path) -> dict[str, Any]:
    """The configuration of LoRA on experts, checked; a ValueError names the file and the entry."""
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is no JSON that can be read: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object, got {type(config).__name__}")
    for key, kinds in TYPES.items():
        value = config.get(key)
        if not (value is None and None in kinds) and type(value) not in kinds:
            names = " or ".join("null" if kind is None else kind.__name__ for kind in kinds)
            raise ValueError(f"{file}: {key!r} must be {names}, got {value!r:.99}")
    wrong = {
        key: config[key] for key, plain in PLAIN.items() if config.get(key, plain[0]) not in plain
    }
    if wrong:
        raise ValueError(f"{file}: LoRA on experts has no support for {wrong}")
    for key in ("target_parameters", "target_modules", "exclude_modules", "modules_to_save"):
        names = config.get(key) or []
        if not isinstance(names, str) and not all(isinstance(name, str) for name in names):
            raise ValueError(f"{file}: {key!r} must be names, got {names!r:.99}")
        if isinstance(names, str) or key == "modules_to_save":  # PEFT takes them for patterns
            for pattern in [names] if isinstance(names, str) else names:
                _compiled(pattern, key, file, "a list of the ends of modules' names")
    if not config.get("target_parameters"):
        raise ValueError(f"{file} targets no parameters; load it with PeftModel.from_pretrained")
    return config


def peft_release(config: dict[str, Any], file: Path) -> tuple[int, ...]:
    """The version of PEFT that wrote a configuration; the roles of A and B depend on it."""
    text = config.get("peft_version") or "0.17.0"  # recorded since 0.18.0
    match = re.match(r"(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(.*)", text)
    if match is None:
        raise ValueError(f"{file}: peft_version={text!r:.99} is no version")
    release = tuple(int(part or 0) for part in match.groups()[:3])
    if "dev" in match[4] and (0, 18, 1) <= release <= (0, 20, 0):
        raise ValueError(
            f"{file} was written by a development version of PEFT, {text}, and the roles of A and "
            "B changed between 0.18 and 0.20; set peft_version to the release it behaves like"
        )
    return release


def pattern_rules(config: Mapping[str, Any], key: str, file: Path | str) -> Rules:
    """The entries of `rank_pattern` or `alpha_pattern`, in their order; ValueError for others."""
    remedy = "the end of a parameter's name, such as 'layers.0.mlp.experts.down_proj'"
    named = config.get(key) or {}
    if sum(any(sign in pattern for sign in "*+?") for pattern in named) > PATTERNS:
        raise ValueError(f"{file}: {key!r} has more than {PATTERNS} patterns with repeats")
    return [(_compiled(pattern, key, file, remedy), value) for pattern, value in named.items()]


def by_pattern(rules: Rules, name: str, otherwise: Any) -> Any:
    """PEFT's rule: the first pattern that matches the whole name or a dotted end of it."""
    return next((value for pattern, value in rules if pattern.match(name)), otherwise)


def _compiled(pattern: str, key: str, file: Path | str, remedy: str) -> re.Pattern[str]:
    """A pattern as PEFT matches it; ValueError where it has groups, alternatives or counts."""

    def refused(why: str) -> ValueError:
        return ValueError(
            f"{file}: {key!r} has {pattern!r:.99}, {why}; write {remedy}, or load a file that you "
            "trust with peft.PeftModel.from_pretrained and call use_in_transformers"
        )

    if len(pattern) > LENGTH:
        raise refused(f"which is longer than {LENGTH} characters")
    body = pattern.removeprefix("^")
    if body.endswith("$") and not body.endswith("\\$"):
        body = body[:-1]
    at = repeats = 0
    while at < len(body):
        found = ATOM.match(body, at)
        if found is None:
            raise refused(f"where {body[at:]!r:.40} is no letter, digit, '.', class or repeat")
        at, repeats = found.end(), repeats + bool(found[2])
    if repeats > REPEATS:
        raise refused(f"which has more than {REPEATS} repeats")
    try:
        return re.compile(rf"(.*\.)?({pattern})$")
    except re.error as error:
        raise refused(f"which is no pattern ({error})") from error


def targeted(model: nn.Module, config: Mapping[str, Any], source: Path | str) -> Targets:
    """The parameters of the experts that a configuration names.

    A ValueError, for a name that no experts have or a wrong rank or alpha, begins with `source`.
    """
    wanted = config["target_parameters"]
    ranks, alphas = (pattern_rules(config, f"{kind}_pattern", source) for kind in ("rank", "alpha"))
    targets: Targets = {}
    matched: set[str] = set()
    places = _places(model)
    for where, target, full in places:
        hits = {name for name in wanted if ends(full, name)}
        if not hits:
            continue
        matched |= hits
        r = by_pattern(ranks, full, config["r"])
        alpha = by_pattern(alphas, full, config["lora_alpha"])
        try:
            options = AdapterOptions(r, alpha, config.get("use_rslora") or False)
        except ValueError as error:
            raise ValueError(f"{source}: of {full}, {error}") from error
        targets.setdefault(where, {})[target] = options
    missed = sorted(set(wanted) - matched)
    if missed:
        raise ValueError(
            f"{source}: target_parameters has {missed}, which are no parameters of the model's "
            f"experts; they have {sorted({target for _, target, _ in places})}"
        )
    return targets


def beyond_experts(config: Mapping[str, Any], model: nn.Module) -> tuple[bool, list[str]]:
    """Whether a configuration names more than experts, and which target_parameters are theirs.

    A name that no parameter of the model has is taken for one of the experts, who miss it then.
    """
    others = [plain(name) for name, _ in model.named_parameters()]
    known = {full for _, _, full in _places(model)}
    names, beyond = [], bool(config.get("target_modules") or config.get("modules_to_save"))
    for name in config["target_parameters"]:
        ours = any(ends(full, name) for full in known)
        if ours or not any(ends(full, name) for full in others):
            names.append(name)
        beyond |= name not in names
    return beyond, names


def _places(model: nn.Module) -> list[tuple[str, str, str]]:
    """(name of the module, of the parameter, of both) of every parameter of the experts."""
    return [
        (where, target, f"{plain(where)}.{target}")
        for where, experts in experts_modules(model)
        for target in [*parameter_names(experts), *getattr(experts, "parametrizations", {})]
    ]


def ends(place: str, target: str) -> bool:
    """PEFT's rule: a whole dotted end."""
    return place == target or place.endswith(f".{target}")


def plain(name: str) -> str:
    """A module's name without what torch.compile, data parallelism and PEFT add to it."""
    parts = components(name)
    if parts[:2] == ["base_model", "model"]:
        parts = parts[2:]
    return ".".join(part for part in parts if part != "base_layer")
