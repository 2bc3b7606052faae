"""Adapters as PEFT's files: `adapter_model.safetensors` and `adapter_config.json`.

PEFT wraps the parameters of an experts module in the order in which they are registered, so that
the last one is the outermost: with both targeted, `experts.lora_A.weight` is down_proj's and
`experts.base_layer.lora_A.weight` gate_up_proj's; with one, it has no `base_layer`. Which of A and
B meets the input depends on the version that wrote the file (`peft.contracts_input`). Both follow
from the configuration and the model; shapes are compared afterwards, never asked.
"""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from ..models.experts import operand_shape, parameter_names
from ..models.safetensors_reader import hub_file
from ..sharded_models import gathered_on_cpu, mesh_of, reshard, write_once
from ..tensor_file import read_tensors, replacing, write_tensors
from . import injection, peft
from .adapter_config import Targets, beyond_experts, peft_release, plain, read_config, targeted
from .injection import PREFIX
from .lora import (
    active_adapter,
    add_adapter,
    attached_modules,
    check_addable,
    known_adapters,
    set_lora,
)

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
SIDES = ("lora_A", "lora_B")
LAYOUT_VERSION = "0.21.2"  # the PEFT whose layout is written; the same since 0.19.1


def save_peft_adapter(
    model: nn.Module, folder: str | os.PathLike[str], *, adapter_name: str | None = None
) -> None:
    """Write an attached adapter as PEFT (0.19.1 and later) writes it, exactly: all that it trains.

    Of a model under FSDP2 every rank must call it: the tensors are gathered one by one, one rank
    writes the files, and all return when they are written.

    Args:
        model: of `attach_lora`, or a PeftModel with LoRA.
        folder: made if it does not exist; each of its two files is replaced whole. The tensors have
            checksums, which `load_peft_adapter` compares and others leave alone.
        adapter_name: None for the active one.

    Raises:
        ValueError: there is no such adapter; or it is trained together with parameters that the
            file has no place for, which the message names. Nothing has been written then.
        OSError: on every rank, if the one that writes failed.
    """
    name = adapter_name or active_adapter(model)
    known = known_adapters(model)
    if name not in known:
        said = f"adapter_name={name!r} is not attached; there are {known}"
        raise ValueError(said if known else "the model has no LoRA to save; attach_lora first")
    _check_complete(model, name)
    reshard(model)
    if injection.is_injected(model):
        found, config = injection.contents(model, name)
    else:
        targets = {
            where: {t: own[name] for t, own in entry.options.items() if name in own}
            for where, entry in attached_modules(model).items()
        }
        found, config = _parameters(model, targets, name), _config(model, targets)
    mesh = mesh_of(found.values())
    tensors = gathered_on_cpu(found, mesh)
    text = json.dumps(config, indent=2)

    def write() -> None:
        target = Path(folder)
        target.mkdir(parents=True, exist_ok=True)
        write_tensors(target / TENSORS, tensors, {"format": "pt"})
        with replacing(target / CONFIG) as file:
            file.write(f"{text}\n".encode())

    write_once(mesh, write)


def _parameters(model: nn.Module, targets: Targets, adapter: str) -> dict[str, nn.Parameter]:
    """A and B of an adapter on the experts alone, by their keys in the file."""
    attached = attached_modules(model)
    return {
        key: getattr(attached[where].projection(target), side)[adapter].weight
        for (where, target), keys in _keys(model, targets).items()
        for key, side in zip(keys, SIDES, strict=True)
    }


def load_peft_adapter(
    model: nn.Module,
    path_or_id: str | os.PathLike[str],
    *,
    revision: str | None = None,
    adapter_name: str = "default",
    trainable: bool = False,
    local_files_only: bool = False,
) -> nn.Module:
    """Attach an adapter from PEFT's files, exactly, and make it the active one.

    Adapters of PEFT 0.17 to 0.19.0, whose A and B have other roles, are converted without loss. One
    on the experts alone needs no PEFT, one on other modules too is put there by PEFT. Everything is
    read and checked before the model changes.

    Args:
        model: a transformers model or a PeftModel, before `fully_shard` and tensor parallelism.
        path_or_id: a folder, or the id of a Hub repository.
        revision: commit hash or tag of the repository. Needed for an id: what is loaded must not
            change under the same name.
        adapter_name: the name it gets here.
        trainable: train it, and freeze everything else; False leaves the model's flags alone.
        local_files_only: read the Hub's cache alone. A commit hash that lies in the cache needs
            no network either way.

    Returns:
        The model, as `attach_lora` returns it.

    Raises:
        FileNotFoundError: a file is missing.
        ValueError: the adapter does not fit the model, or has parts or options that experts do not
            support; the message names them. The model is unchanged.
        ImportError: safetensors, transformers or, for an id, huggingface_hub is not installed.
    """
    check_addable(model, adapter_name)
    config_file, tensors_file = _files(path_or_id, revision, local_files_only)
    config = read_config(config_file)
    tensors, _ = read_tensors(tensors_file)
    beyond, names = beyond_experts(config, model)
    targets = targeted(model, config | {"target_parameters": names}, config_file)
    release = peft_release(config, config_file)
    by_peft = beyond or injection.is_injected(model)
    factors = _read_factors(model, targets, tensors, release, tensors_file, whole=not by_peft)
    if by_peft:
        model = injection.load(model, config, tensors | factors, adapter_name, tensors_file)
    else:
        dtype = injection.dtype_of(tensors, tensors_file)
        add_adapter(model, adapter_name, targets, dtype=dtype)
        with torch.no_grad():
            for key, parameter in _parameters(model, targets, adapter_name).items():
                parameter.copy_(factors[key])
    set_lora(model, adapter_name, trainable=trainable)
    return model


def _check_complete(model: nn.Module, adapter: str) -> None:
    """Raise ValueError if a file of an adapter would leave out what trains with it."""
    layer = peft.first_layer(model)
    if layer is not None and not injection.is_injected(model):
        raise ValueError(
            f"PEFT has put {layer} around this model, which the file would leave out; save the "
            "whole with PEFT, or call attach_lora on the model alone"
        )
    trained = [name for name, p in model.named_parameters() if p.requires_grad]
    others = [name for name in trained if injection.adapter_of(name) is None]
    if others and any(injection.adapter_of(name) == adapter for name in trained):
        raise ValueError(
            f"{others[0]} trains beside the adapter ({len(others)} such parameters), and the "
            "file would leave it out; freeze and save it yourself, or name its module in "
            "attach_lora(modules_to_save=[...])"
        )


def _keys(model: nn.Module, targets: Targets) -> dict[tuple[str, str], tuple[str, str]]:
    """Keys of A and B by module and parameter: PEFT nests its wrappers in the parameters' order.

    Where a parameter is computed (quantized), PEFT goes by the alphabet instead.
    """
    keys = {}
    for where, names in targets.items():
        experts = model.get_submodule(where)
        computed = parametrize.is_parametrized(experts)
        order = sorted(names) if computed else [n for n in parameter_names(experts) if n in names]
        for depth, target in enumerate(reversed(order)):
            key = PREFIX + plain(where) + ".base_layer" * depth
            keys[where, target] = tuple(f"{key}.{side}.weight" for side in SIDES)
    return keys


def _config(model: nn.Module, targets: Targets) -> dict[str, Any]:
    """adapter_config.json; ranks that differ from the most frequent one go into the patterns."""
    options = {
        f"{plain(where)}.{target}": value
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
    source = os.fspath(path_or_id)
    if Path(source).is_dir():
        files = tuple(Path(source) / name for name in (CONFIG, TENSORS))
        for file in files:
            if not file.is_file():
                raise FileNotFoundError(
                    f"{file} does not exist; an adapter is {CONFIG} and {TENSORS} (pickled "
                    "adapter_model.bin files are not read: load and save them with PEFT once)"
                )
        return files
    if revision is None:
        raise ValueError(
            f"{source!r} is no folder; if it is a Hub repository, pass revision= with a commit "
            "hash or tag, so that what is loaded cannot change"
        )
    return tuple(hub_file(source, name, revision, local_files_only) for name in (CONFIG, TENSORS))


def _read_factors(
    model: nn.Module,
    targets: Targets,
    tensors: dict[str, Tensor],
    release: tuple[int, ...],
    file: Path,
    *,
    whole: bool,
) -> dict[str, Tensor]:
    """A (E r, in) and B (out, E r) by key, in today's layout, checked; `whole`: no others."""
    places = _keys(model, targets)
    expected = {key for keys in places.values() for key in keys}
    missing, others = expected - tensors.keys(), tensors.keys() - expected if whole else set()
    if missing or others:
        raise ValueError(
            f"{file} does not fit the model: missing {sorted(missing)[:4]}, unexpected "
            f"{sorted(others)[:4]}; what it targets is not what it holds"
        )
    factors = {}
    for (where, target), keys in places.items():
        experts = model.get_submodule(where)
        count, size_in, size_out = operand_shape(experts, target)
        a, b = (tensors[key] for key in keys)
        transposed = experts.is_transposed
        swapped = not transposed if release >= (0, 19, 1) else transposed and release == (0, 19, 0)
        of_input = peft.contracts_input(swapped=swapped, transposed=transposed)
        rows = count * targets[where][target].r
        width, height = (size_in, size_out) if of_input else (size_out, size_in)
        if a.shape != (rows, width) or b.shape != (height, rows):
            raise ValueError(
                f"{file}: {where}.{target} needs A ({rows}, {width}) and B "
                f"({height}, {rows}), the file has {tuple(a.shape)} and {tuple(b.shape)} under "
                f"{keys[0]!r}; it is of another model, or was saved over quantized experts, "
                "where PEFT exchanges the names of the two projections"
            )
        pair = (a, b) if of_input else _exchanged(a, b, count)
        factors |= zip(keys, pair, strict=True)
    return factors


def _exchanged(a: Tensor, b: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """A (E r, out) and B (in, r E), which met the other sides, as A (E r, in) and B (out, r E)."""
    of_input = b.unflatten(1, (-1, num_experts))  # (in, r, E)
    of_output = a.unflatten(0, (num_experts, -1))  # (E, r, out)
    new_a = of_input.permute(2, 1, 0).flatten(0, 1)  # (E r, in)
    new_b = of_output.permute(2, 1, 0).flatten(1, 2)  # (out, r E)
    return new_a.contiguous(), new_b.contiguous()
