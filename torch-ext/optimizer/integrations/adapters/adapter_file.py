"""Adapters of experts as PEFT's files: `adapter_model.safetensors` and `adapter_config.json`.

PEFT wraps the parameters of an experts module in the order in which they are registered, so that
the last one is the outermost: with both targeted, `experts.lora_A.weight` is down_proj's and
`experts.base_layer.lora_A.weight` gate_up_proj's; with one, it has no `base_layer`. Which of A and
B meets the input depends on the version that wrote the file (`peft.contracts_input`). Both follow
from the configuration and the model; shapes are compared afterwards, never asked.

Files may be anybody's, so what is read is checked: types, options, ranks. PEFT takes the keys of
`rank_pattern` and `alpha_pattern` for regular expressions, of which a short one can run for years;
here they are matched in time that grows with the length of the name times that of the pattern.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ...moe.lora import check_factor_dtype
from ...optimizers.groups.names import components
from ..models.experts import ATTACHED, experts_modules, operand_shape, parameter_names
from ..sharded_models import gathered_on_cpu, mesh_of, reshard, write_once
from . import peft
from .lora import (
    AdapterOptions,
    active_adapter,
    add_adapter,
    attached_modules,
    check_attachable,
    set_lora,
)

# Options that change what the factors mean, with the values that do not.
PLAIN = {
    "peft_type": ("LORA",),
    "lora_dropout": (0, 0.0, None),
    "bias": ("none", None),
    **dict.fromkeys(("use_dora", "lora_bias", "fan_in_fan_out", "use_qalora"), (False, None)),
    **dict.fromkeys(("modules_to_save", "trainable_token_indices", "layer_replication"), (None,)),
    **dict.fromkeys(("alora_invocation_tokens", "velora_config", "kasa_config"), (None,)),
}
# What the other options that are used here must be; those with None may be missing.
TYPES = {
    "r": (int,),
    "lora_alpha": (int, float),
    "use_rslora": (bool, None),
    "target_parameters": (list, None),
    "rank_pattern": (dict, None),
    "alpha_pattern": (dict, None),
    "peft_version": (str, None),
}
# One character, and how often: a letter, an escaped sign, any character, a digit or a class.
ATOM = re.compile(r"(\\[^A-Za-z0-9]|\\d|\.|\[\^?[\w.-]+\]|[\w/:,@ -])([*+?]?)", re.ASCII)
LENGTH, REPEATS, PATTERNS = 300, 8, 100  # of one pattern, in it, and how many may have any

Atom = tuple[Callable[[str], Any], str]  # whether a character fits; "", "*", "+" or "?"


@dataclass(frozen=True)
class Rule:
    """A value, and the names it is meant for."""

    atoms: tuple[Atom, ...]
    whole: bool  # ^: the whole name, and not what stands behind one of its dots
    value: Any


def read_config(file: Path) -> dict[str, Any]:
    """The configuration of LoRA on experts.

    Raises:
        ValueError: no JSON, a missing or wrong entry, or an option that experts do not support;
            the message names the file and the entry.
    """
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
    if config.get("target_modules"):
        raise ValueError(
            f"{file} also targets modules ({config['target_modules']!r}); load it with "
            "peft.PeftModel.from_pretrained, then use_in_transformers(model)"
        )
    targets = config.get("target_parameters")
    if not targets:
        raise ValueError(f"{file} targets no parameters, so it has nothing for experts")
    if not all(isinstance(target, str) for target in targets):
        raise ValueError(f"{file}: 'target_parameters' must be names, got {targets!r:.99}")
    return config


def peft_release(config: dict[str, Any], file: Path) -> tuple[int, ...]:
    """The version of PEFT that wrote a configuration; the roles of A and B depend on it.

    Raises:
        ValueError: no version, or one of development that does not say which roles it has.
    """
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


def pattern_rules(config: dict[str, Any], key: str, file: Path) -> list[Rule]:
    """The entries of `rank_pattern` or `alpha_pattern`, in their order.

    Raises:
        ValueError: a pattern that this module does not match, or too many of them.
    """
    rules: list[Rule] = []
    for pattern, value in (config.get(key) or {}).items():
        try:
            atoms = _atoms(pattern)
        except ValueError as error:
            raise ValueError(
                f"{file}: {key!r} has {pattern!r:.99}, {error}; write the end of a parameter's "
                "name, such as 'layers.0.mlp.experts.down_proj'"
            ) from error
        rules.append(Rule(atoms, pattern.startswith("^"), value))
    if sum(any(repeat for _, repeat in rule.atoms) for rule in rules) > PATTERNS:
        raise ValueError(f"{file}: {key!r} has more than {PATTERNS} patterns with repeats")
    return rules


def by_pattern(rules: list[Rule], name: str, otherwise: Any) -> Any:
    """PEFT's rule: the first pattern that matches the whole name or a dotted end of it."""
    return next((rule.value for rule in rules if _matches(rule, name)), otherwise)


def _atoms(pattern: str) -> tuple[Atom, ...]:
    """The parts of a pattern.

    Raises:
        ValueError: groups, alternatives, counts or anything else that is no ATOM.
    """
    if len(pattern) > LENGTH:
        raise ValueError(f"which is longer than {LENGTH} characters")
    body = pattern.removeprefix("^")
    if body.endswith("$") and not body.endswith("\\$"):
        body = body[:-1]
    atoms: list[Atom] = []
    at = 0
    while at < len(body):
        found = ATOM.match(body, at)
        if found is None:
            raise ValueError(f"where {body[at:]!r:.40} is no letter, digit, '.', class or repeat")
        try:
            atoms.append((re.compile(found[1]).fullmatch, found[2]))
        except re.error as error:
            raise ValueError(f"where {found[1]!r} is no class of characters") from error
        at = found.end()
    if sum(repeat != "" for _, repeat in atoms) > REPEATS:
        raise ValueError(f"which has more than {REPEATS} repeats")
    return tuple(atoms)


def _matches(rule: Rule, name: str) -> bool:
    """Whether a rule is meant for a name.

    All the places in the pattern that may have been reached are kept at once, so that no choice is
    ever taken back.
    """
    atoms = rule.atoms
    if not any(repeat for _, repeat in atoms):  # most rules are names
        start = len(name) - len(atoms)
        free = start == 0 or (start > 0 and not rule.whole and name[start - 1] == ".")
        return free and all(fits(char) for (fits, _), char in zip(atoms, name[start:], strict=True))
    places = _with_skipped(atoms, {0})
    for char in name:
        reached = {0} if char == "." and not rule.whole else set()
        for place in places:
            if place < len(atoms) and atoms[place][0](char):
                reached.add(place + 1)
                if atoms[place][1] in ("*", "+"):
                    reached.add(place)
        places = _with_skipped(atoms, reached)
    return len(atoms) in places


def _with_skipped(atoms: tuple[Atom, ...], places: set[int]) -> set[int]:
    """The places, and those behind parts that may be missing."""
    found = set(places)
    for place in places:
        while place < len(atoms) and atoms[place][1] in ("*", "?"):
            place += 1
            found.add(place)
    return found


TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PREFIX = "base_model.model."  # of every key that PEFT writes
LAYOUT_VERSION = "0.21.2"  # the PEFT whose layout is written; the same since 0.19.1


@dataclass(frozen=True)
class Place:
    """Where a parameter of the model stands in a file."""

    experts: str  # name of the module
    target: str  # name of its parameter
    key: str  # without ".lora_A.weight"


def save_peft_adapter(
    model: nn.Module, folder: str | os.PathLike[str], *, adapter: str | None = None
) -> None:
    """Write an attached adapter as PEFT (0.19.1 and later) writes it, exactly.

    Of a model under FSDP2 every rank must call it: the factors are gathered one by one, one rank
    writes the files, and all return when they are written.

    Args:
        model: as given to `attach_lora`.
        folder: made if it does not exist; each of its two files is replaced whole.
        adapter: name; None for the active one.

    Raises:
        ValueError: there is no such adapter; or it is trained together with parameters that the
            file has no place for, which the message names. Nothing has been written then.
        OSError: on every rank, if the one that writes failed.
        ImportError: safetensors is not installed.
    """
    from safetensors.torch import save_file

    name = adapter or active_adapter(model)
    attached = attached_modules(model)
    known = sorted({n for entry in attached.values() for n in entry.adapters})
    if name not in known:
        raise ValueError(f"adapter={name!r} is not attached; there are {known}")
    targets = {
        where: {t: by_name[name] for t, by_name in entry.options.items() if name in by_name}
        for where, entry in attached.items()
    }
    reshard(model)
    factors = {}
    for place in _places(model, {where: set(found) for where, found in targets.items()}):
        projection = attached[place.experts].projection(place.target)
        for side in ("lora_A", "lora_B"):
            factors[f"{place.key}.{side}.weight"] = getattr(projection, side)[name].weight
    trained = any(factor.requires_grad for factor in factors.values())
    _check_complete(model, tuple(f"{where}.{ATTACHED}." for where in attached), trained)
    mesh = mesh_of(factors.values())
    tensors = gathered_on_cpu(factors, mesh)
    text = json.dumps(_config(model, targets), indent=2)

    def write() -> None:
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        _replace(target / TENSORS, lambda path: save_file(tensors, path, {"format": "pt"}))
        _replace(target / CONFIG, lambda path: path.write_text(text + "\n"))

    write_once(mesh, write)


def load_peft_adapter(
    model: nn.Module,
    path_or_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    adapter: str = "default",
    trainable: bool = False,
    local_files_only: bool = False,
) -> None:
    """Attach an adapter from PEFT's files, without PEFT, exactly, and make it the active one.

    Adapters of PEFT 0.17 to 0.19.0, whose A and B have other roles, are converted without loss.
    Everything is read and checked before the model changes.

    Args:
        model: a transformers model without PEFT, before `fully_shard` and tensor parallelism.
        path_or_id: a folder, or the id of a Hub repository.
        revision: commit hash or tag of the repository. Needed for an id: what is loaded must not
            change under the same name.
        adapter: the name it gets here.
        trainable: train it, and freeze everything else; False leaves the model's flags alone.
        local_files_only: read the Hub's cache alone. A commit hash that lies in the cache needs
            no network either way.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the adapter does not fit the model, or has parts or options that experts do not
            support; the message names them. The model is unchanged.
        ImportError: safetensors, transformers or, for an id, huggingface_hub is not installed.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    check_attachable(model)
    config_file, tensors_file = _files(path_or_id, revision, local_files_only)
    config = read_config(config_file)
    try:
        tensors = load_file(tensors_file)
    except SafetensorError as error:
        raise ValueError(f"{tensors_file} is damaged: {error}") from error
    targets = _targeted(model, config, config_file)
    places = _places(model, {where: set(found) for where, found in targets.items()})
    release = peft_release(config, config_file)
    factors = _read_factors(model, places, targets, tensors, release, tensors_file)
    dtypes = {factor.dtype for pair in factors.values() for factor in pair}
    if len(dtypes) > 1:
        raise ValueError(f"{tensors_file} mixes {sorted(map(str, dtypes))}; save it in one dtype")
    dtype = dtypes.pop()
    try:
        check_factor_dtype(dtype)
    except ValueError as error:
        raise ValueError(f"{tensors_file}: {error}; save it as one of these") from error

    add_adapter(model, adapter, targets, dtype=dtype)
    attached = attached_modules(model)
    with torch.no_grad():
        for place in places:
            projection = attached[place.experts].projection(place.target)
            for side, value in zip(("lora_A", "lora_B"), factors[place], strict=True):
                getattr(projection, side)[adapter].weight.copy_(value)
    set_lora(model, adapter, trainable=trainable)


def _check_complete(model: nn.Module, ours: tuple[str, ...], trained: bool) -> None:
    """Raise ValueError if a file of LoRA on experts would leave out what belongs to the adapter.

    Args:
        model: with LoRA attached.
        ours: what the names of its parameters begin with.
        trained: whether it trains; what else does belongs to it then.
    """
    layer = peft.first_layer(model)
    if layer is not None:
        raise ValueError(
            f"PEFT has put {layer} into this model, which the file would leave out; name the "
            "experts in PEFT's target_parameters and save the whole with PEFT"
        )
    others = [
        name
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and not name.startswith(ours)
    ]
    if trained and others:
        raise ValueError(
            f"{others[0]} trains beside the experts' LoRA ({len(others)} such parameters), and the "
            "file would leave it out; freeze and save it yourself, or train it in one PEFT model: "
            "LoraConfig(target_parameters=[...], target_modules=[...], modules_to_save=[...])"
        )


def _places(model: nn.Module, targets: dict[str, set[str]]) -> list[Place]:
    """Keys in the file: PEFT nests its wrappers in the order of the module's parameters.

    Where a parameter is computed (quantized), PEFT goes by the alphabet instead.
    """
    found = dict(experts_modules(model))
    places = []
    for where, names in targets.items():
        experts = found[where]
        computed = parametrize.is_parametrized(experts)
        order = parameter_names(experts)
        order = sorted(names) if computed else [name for name in order if name in names]
        for depth, target in enumerate(reversed(order)):
            key = PREFIX + _plain(where) + ".base_layer" * depth
            places.append(Place(where, target, key))
    return places


def _plain(name: str) -> str:
    """A module's name without what torch.compile and data parallelism add to it."""
    return ".".join(components(name))


def _config(model: nn.Module, targets: dict[str, dict[str, AdapterOptions]]) -> dict[str, Any]:
    """adapter_config.json; ranks that differ from the most frequent one go into the patterns."""
    options = {
        f"{_plain(where)}.{target}": value
        for where, found in targets.items()
        for target, value in found.items()
    }
    (common, _), *_ = Counter(options.values()).most_common(1)
    other = {re.escape(name): value for name, value in options.items() if value != common}
    config = getattr(model, "config", None)
    return {
        "peft_type": "LORA",
        "peft_version": LAYOUT_VERSION,
        "task_type": None,
        "base_model_name_or_path": getattr(config, "_name_or_path", None) or None,
        "revision": None,
        "inference_mode": True,
        "r": common.r,
        "lora_alpha": common.alpha,
        "use_rslora": common.rslora,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": None,
        "rank_pattern": {name: value.r for name, value in other.items()},
        "alpha_pattern": {name: value.alpha for name, value in other.items()},
        "target_modules": [],  # None would make PEFT add the model type's attention projections
        "target_parameters": sorted(options),
    }


def _files(
    path_or_id: str | os.PathLike[str], revision: str | None, local_files_only: bool
) -> tuple[Path, Path]:
    folder = Path(path_or_id)
    if folder.is_dir():
        files = [folder / name for name in (CONFIG, TENSORS)]
        for file in files:
            if not file.is_file():
                raise FileNotFoundError(
                    f"{file} does not exist; an adapter is {CONFIG} and {TENSORS} (pickled "
                    "adapter_model.bin files are not read: load and save them with PEFT once)"
                )
        return files[0], files[1]
    if revision is None:
        raise ValueError(
            f"{os.fspath(path_or_id)!r} is no folder; if it is a Hub repository, pass revision= "
            "with a commit hash or tag, so that what is loaded cannot change"
        )
    from huggingface_hub import hf_hub_download

    paths = [
        hf_hub_download(
            os.fspath(path_or_id), name, revision=revision, local_files_only=local_files_only
        )
        for name in (CONFIG, TENSORS)
    ]
    return Path(paths[0]), Path(paths[1])


def _targeted(
    model: nn.Module, config: dict[str, Any], file: Path
) -> dict[str, dict[str, AdapterOptions]]:
    """The targeted parameters of every experts module, matched as PEFT does: whole dotted ends."""
    wanted = config["target_parameters"]
    rslora = bool(config.get("use_rslora"))
    ranks, alphas = (pattern_rules(config, f"{kind}_pattern", file) for kind in ("rank", "alpha"))
    targets: dict[str, dict[str, AdapterOptions]] = {}
    matched: set[str] = set()
    for where, experts in experts_modules(model):
        computed = getattr(experts, "parametrizations", {})
        for target in [*parameter_names(experts), *computed]:
            full = f"{_plain(where)}.{target}"
            hits = {name for name in wanted if full == name or full.endswith(f".{name}")}
            if not hits:
                continue
            matched |= hits
            r = by_pattern(ranks, full, config["r"])
            alpha = by_pattern(alphas, full, config["lora_alpha"])
            options = AdapterOptions(r, alpha, rslora)
            try:
                options.check()
            except ValueError as error:
                raise ValueError(f"{file}: of {full}, {error}") from error
            targets.setdefault(where, {})[target] = options
    missed = sorted(set(wanted) - matched)
    if missed:
        raise ValueError(f"{file} targets {missed}, which are no parameters of the model's experts")
    return targets


def _read_factors(
    model: nn.Module,
    places: list[Place],
    targets: dict[str, dict[str, AdapterOptions]],
    tensors: dict[str, Tensor],
    release: tuple[int, ...],
    file: Path,
) -> dict[Place, tuple[Tensor, Tensor]]:
    """A (E r, in) and B (out, E r) per place, in today's layout, checked."""
    found = dict(experts_modules(model))
    keys = {
        place: [f"{place.key}.{side}.weight" for side in ("lora_A", "lora_B")] for place in places
    }
    expected = {key for pair in keys.values() for key in pair}
    if expected != set(tensors):
        raise ValueError(
            f"{file} does not fit the model: missing {sorted(expected - set(tensors))[:4]}, "
            f"unexpected {sorted(set(tensors) - expected)[:4]}; an adapter with more than LoRA on "
            "experts is loaded with peft.PeftModel.from_pretrained, then use_in_transformers"
        )
    factors = {}
    for place in places:
        experts = found[place.experts]
        count, size_in, size_out = operand_shape(experts, place.target)
        a, b = (tensors[key] for key in keys[place])
        of_input = _input_side(release, experts.is_transposed)
        rows = count * targets[place.experts][place.target].r
        width, height = (size_in, size_out) if of_input else (size_out, size_in)
        if a.shape != (rows, width) or b.shape != (height, rows):
            raise ValueError(
                f"{file}: {place.experts}.{place.target} needs A ({rows}, {width}) and B "
                f"({height}, {rows}), the file has {tuple(a.shape)} and {tuple(b.shape)} under "
                f"{place.key!r}; it is of another model, or was saved over quantized experts, "
                "where PEFT exchanges the names of the two projections"
            )
        factors[place] = (a, b) if of_input else _exchanged(a, b, count)
    return factors


def _input_side(release: tuple[int, ...], transposed: bool) -> bool:
    """Whether A meets the input in files of a version of PEFT."""
    swapped = not transposed if release >= (0, 19, 1) else transposed and release == (0, 19, 0)
    return peft.contracts_input(swapped=swapped, transposed=transposed)


def _exchanged(a: Tensor, b: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """A (E r, out) and B (in, r E), which met the other sides, as A (E r, in) and B (out, r E)."""
    of_input = b.unflatten(1, (-1, num_experts))  # (in, r, E)
    of_output = a.unflatten(0, (num_experts, -1))  # (E, r, out)
    new_a = of_input.permute(2, 1, 0).flatten(0, 1)  # (E r, in)
    new_b = of_output.permute(2, 1, 0).flatten(1, 2)  # (out, r E)
    return new_a.contiguous(), new_b.contiguous()


def _replace(path: Path, write: Any) -> None:
    """Write beside the file, then rename over it: readers see the old one or the new one, whole."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        write(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
