"""The names of a checkpoint's tensors and the model's, matched as from_pretrained does it."""

from __future__ import annotations

import re
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from .experts import experts_modules

BACKBONE = "language_model"  # what vision-language models call the text model inside them
KEPT_WIDE = {  # what transformers keeps in float32, by the dtype of the rest
    torch.float16: ("_keep_in_fp32_modules", "_keep_in_fp32_modules_strict"),
    torch.bfloat16: ("_keep_in_fp32_modules_strict",),
}


class ModelNames:
    """What a model calls the tensors of a checkpoint.

    Args:
        model: a transformers model; parameters may be on the meta device.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._prefix = f"{model.base_model_prefix}."
        self._experts = tuple(f"{name}." for name, _ in experts_modules(model))
        # With duplicates: a file may name tied weights twice, or by the second name alone.
        self.tensors: dict[str, Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }

    def of(self, key: str) -> str:
        """The model's name for a key of the files; the key itself if there is none."""
        fitting = (name for name in self._spellings(key) if self._has(name))
        return next(fitting, key)

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

    def _spellings(self, key: str) -> Iterator[str]:
        """The key, with and without the prefix of the base model, also out of a larger model."""
        yield key
        yield key.removeprefix(self._prefix)
        yield self._prefix + key
        if f"{BACKBONE}." in key:
            yield from self._spellings(key.replace(f"{BACKBONE}.", "", 1))

    def _has(self, name: str) -> bool:
        return name in self.tensors or name.startswith(self._experts)
