"""What a checkpoint's tensors are in the model: transformers' own conversions, read as data.

`from_pretrained` renames the keys of the files and then merges, splits or turns their tensors
(`transformers.conversion_mapping`). The same mapping is asked here, for each key; what it makes of
the experts can be had one expert at a time.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .experts import experts_modules

KEPT_WIDE = {  # what transformers keeps in float32, by the dtype of the rest
    torch.float16: ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
    torch.bfloat16: ("_keep_in_fp32_modules_strict",),
}
DIMENSIONS = ("dim", "dim0", "dim1")  # of transformers' operations
# Its operations that do to a stack what they do to each expert of it, if they leave dimension 0.
PER_EXPERT = ("Chunk", "Concatenate", "Interleave", "Transpose")


@dataclass
class Source:
    """The tensors of the files that make up one tensor of the model, or several at once."""

    name: str  # the model's, of the (first) tensor
    converter: Any = None  # transformers' `WeightConverter`; None where a tensor is taken as it is
    keys: dict[str, list[str]] = field(default_factory=dict)  # in the files, by its patterns

    def all_keys(self) -> list[str]:
        """Every name in the files."""
        return [key for keys in self.keys.values() for key in keys]

    @property
    def apart(self) -> bool:
        """Whether every expert has tensors of its own."""
        return any(len(keys) > 1 for keys in self.keys.values())

    def of_expert(self, expert: int, count: int) -> dict[str, tuple[str, int, int]]:
        """By pattern a name in the files, and which of how many shares of it the expert has."""
        apart = self.apart
        return {
            pattern: (keys[expert], 0, 1) if apart else (keys[0], expert, count)
            for pattern, keys in self.keys.items()
        }

    def per_expert(self, experts: int, shape_of: Callable[[str], tuple[int, ...]]) -> bool:
        """Whether each expert can be converted alone, from a slice or from tensors of its own."""
        stacked = all(len(k) == 1 and shape_of(k[0])[0] == experts for k in self.keys.values())
        if self.converter is None:
            return stacked
        merged = False
        for operation in self.converter.operations:
            kind = type(operation).__name__
            dimensions = [getattr(operation, name, 1) for name in DIMENSIONS]
            if kind == "MergeModulelist" and operation.dim == 0:
                merged = True
            elif kind not in PER_EXPERT or not all(d >= 1 or d in (-1, -2) for d in dimensions):
                return False
        apart = all(len(keys) == experts for keys in self.keys.values())
        return apart if merged else stacked

    def joins_rows(self) -> bool:
        """Whether the stack is matrices put below each other: then packed rows make it, too."""
        kinds = {"MergeModulelist": 0, "Concatenate": 1}  # along these dimensions
        operations = () if self.converter is None else self.converter.operations
        return all(kinds.get(type(one).__name__) == getattr(one, "dim", None) for one in operations)

    def convert(self, model: Any, tensors: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        """The model's tensors by name, from those of the files by pattern; the lists are emptied.

        A ValueError says that the conversion failed, as for another shape or a missing tensor.
        """
        if self.converter is None:
            return {self.name: tensors.popitem()[1].pop()}
        converter = copy.deepcopy(self.converter)  # it collects the tensors of one conversion
        for pattern in list(tensors):
            converter.collected_tensors[pattern] = tensors.pop(pattern)
        try:
            made = converter.convert(self.name, model=model, config=model.config)
        except Exception as error:
            raise ValueError(
                f"transformers' {converter!r} cannot make {self.name} of {self.all_keys()}: {error}"
            ) from error
        return {k: v[0] if isinstance(v, list) else v for k, v in made.items()}

    def convert_expert(self, model: nn.Module, tensors: dict[str, list[Tensor]]) -> Tensor:
        """(1, N, K) of a stack (E, N, K), from the tensors of one expert."""

        def get_parameter(name: str) -> Tensor:
            return model.get_parameter(name)[:1]

        one = SimpleNamespace(config=model.config, get_parameter=get_parameter)
        return self.convert(one, tensors)[self.name]


def spelling(model: nn.Module, name: str, known: Callable[[str], bool]) -> str:
    """A name as this model has it, with or without the prefix of the base model."""
    prefix = f"{model.base_model_prefix}."
    spellings = (name, name.removeprefix(prefix), prefix + name)
    return next((one for one in spellings if known(one)), name)


class ModelNames:
    """What a model, whose parameters may be on the meta device, calls a checkpoint's tensors."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._experts = tuple(f"{name}." for name, _ in experts_modules(model))
        # With duplicates: a file may name tied weights twice, or by the second name alone.
        self.tensors: dict[str, Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }

    def of(self, key: str) -> str:
        """The model's name for a key that no conversion applies to, which this package wrote."""

        def known(name: str) -> bool:
            return name in self.tensors or name.startswith(self._experts)

        return spelling(self._model, key, known)

    def sources(self, keys: Iterable[str]) -> Iterator[Source]:
        """What makes up the model, as `from_pretrained` would put it together of these keys."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import (
            WeightConverter,
            WeightRenaming,
            dot_natural_key,
            rename_source_key,
        )

        mapping = get_model_conversion_mapping(self._model)
        renamings = [entry for entry in mapping if isinstance(entry, WeightRenaming)]
        converters = [entry for entry in mapping if isinstance(entry, WeightConverter)]
        by_pattern = {pattern: entry for entry in converters for pattern in entry.source_patterns}
        prefix = self._model.base_model_prefix
        found: dict[str, Source] = {}
        for key in sorted(keys, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, prefix, self.tensors)
            if name not in self.tensors and key in self.tensors:
                name, pattern = key, None  # a name of today that an older one's rule fits, too
            source = found.setdefault(name, Source(name, by_pattern.get(pattern)))
            same = source.keys.setdefault(pattern or "", [])
            if same and source.converter is None:
                raise ValueError(f"the files have {name} twice: {same[0]} and {key}")
            same.append(key)
        yield from found.values()

    def ignored(self, key: str) -> bool:
        """Whether the model's class says that its files may hold this beside its own tensors."""
        patterns = set(self._model._keys_to_ignore_on_load_unexpected or ())
        patterns.add(r"rotary_emb\.inv_freq$")  # of old files; computed today
        return any(re.search(pattern, key) for pattern in patterns)

    def dtype(self, name: str, dtype: torch.dtype) -> torch.dtype:
        """Of a tensor when the model is loaded in `dtype`: what its module or its class decide."""
        for attribute in KEPT_WIDE.get(dtype, ()):
            for kept in getattr(self._model, attribute, None) or ():
                if re.search(kept.replace("*", ".*"), name):
                    return torch.float32
        return self.tensors[name].dtype
