"""Options and layouts as words of 63 bits, which are equal on two ranks if what they say is."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ..groups.options import AdamWOptions, MuonOptions, option_names

OPTIONS = (*dict.fromkeys((*option_names(MuonOptions), *option_names(AdamWOptions))),)
NUMBERS = ("lr", "weight_decay")  # options that may be Tensors


def word(text: str) -> int:
    """A number in [0, 2^63), whose negative fits into an int64 too."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def canonical(option: str, value: Any) -> str:
    """One text for all values of an option that mean the same, such as 1, 1.0 and np.int64(1).

    Of a Tensor on a device it has the form, and of a function that it is one.
    """
    kind = type(value)
    if kind is float:
        return str(int(value)) if value.is_integer() else value.hex()
    if kind is str or kind is bool or value is None:
        return repr(value)
    if isinstance(value, Tensor):
        return f"{value.dtype} {'on a device' if is_on_device(value) else value.item()}"
    if isinstance(value, Integral):
        return str(int(value))
    if isinstance(value, Real):
        return canonical(option, float(value))
    if isinstance(value, Mapping):
        entries = ((str(name), canonical(option, entry)) for name, entry in value.items())
        return str(sorted(entries))
    if isinstance(value, Sequence):
        entries = [canonical(option, entry) for entry in value]
        # A set was given, perhaps, whose order differs between processes.
        return str(sorted(entries) if option == "expert_keys" else entries)
    return "a function" if callable(value) else str(value)


def is_on_device(value: Any) -> bool:
    """Whether a value is a Tensor that the host cannot read without waiting."""
    return isinstance(value, Tensor) and value.device.type != "cpu"


class OptionWords:
    """A word per option of some groups, renewed where one of them changed."""

    def __init__(self, groups: Sequence[int]) -> None:
        self._groups = groups
        self._seen: list[Any] = [None] * len(groups)
        self._texts: list[dict[str, str]] = [{} for _ in groups]
        self._words = dict.fromkeys(OPTIONS, word(""))

    def renew(
        self,
        options: Sequence[MuonOptions | AdamWOptions],
        fingerprints: Sequence[tuple[list[type], list[Any]]],
    ) -> list[int]:
        """The words for the options as they are now.

        Args:
            options: of all groups of the optimizer.
            fingerprints: of these.
        """
        changed: set[str] = set()
        for k, number in enumerate(self._groups):
            seen = fingerprints[number]
            if read := _read_on_host(options[number]):
                seen = (*seen, read)
            if seen != self._seen[k]:
                texts = self._texts[k]
                for name in _to_renew(option_names(type(options[number])), seen, self._seen[k]):
                    text = canonical(name, getattr(options[number], name))
                    if texts.get(name) != text:
                        texts[name] = text
                        changed.add(name)
                self._seen[k] = seen
        for name in changed:
            self._words[name] = word("; ".join(texts.get(name, "") for texts in self._texts))
        return [*self._words.values()]


def _to_renew(names: Sequence[str], seen: tuple[Any, ...], before: Any) -> set[str]:
    """The options that may mean something else than `before`, None at first.

    Numbers that may be in Tensors always do: a fingerprint has nothing of their values.
    """
    if before is None or before[0] != seen[0]:  # the types
        return {*names}
    pairs = zip(names, seen[1], before[1], strict=True)
    return {*NUMBERS, *(name for name, now, then in pairs if now != then)}


def _read_on_host(group: MuonOptions | AdamWOptions) -> list[float]:
    """Numbers in Tensors of the host, which change without a new fingerprint."""
    values = group.lr, group.weight_decay
    return [v.item() for v in values if isinstance(v, Tensor) and not is_on_device(v)]


def on_device(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """The bits of some numbers folded into one, by their device: 0-D int64."""
    wide = torch.stack([t.detach().reshape(()).to(device, torch.float64) for t in tensors])
    odd = torch.arange(1, 2 * len(tensors), 2, device=device)  # so that their order counts
    return (wide.view(torch.int64) * odd).sum()
