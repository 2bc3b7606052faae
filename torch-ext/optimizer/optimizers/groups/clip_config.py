"""The `clip_config` argument: which heads QK-clip scales, and by how large a logit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

from .options import as_float, plain_number


@dataclass(frozen=True)
class ClipConfig:
    """QK-clip of all attention layers of an optimizer.

    Args:
        q_indices: entry i is the query head that qk_logits[layer][i] belongs to. A head may occur
            more than once: its largest logit counts.
        k_indices: entry i is the key head that this query head attends to; under grouped-query
            attention several share one. Both empty: no clipping.
        head_dim: rows of a head, without MLA.
        threshold: the logit from which on a head is scaled.
        is_mla: multi-head latent attention: heads of wq_b have qk_nope_head_dim rows and
            qk_rope_head_dim rows, those of wkv_b qk_nope_head_dim and v_head_dim.
        qk_nope_head_dim, qk_rope_head_dim, v_head_dim: only with is_mla.
    """

    q_indices: tuple[int, ...] = ()
    k_indices: tuple[int, ...] = ()
    head_dim: int = 128
    threshold: float = 100.0
    is_mla: bool = False
    qk_nope_head_dim: int | None = None
    qk_rope_head_dim: int | None = None
    v_head_dim: int | None = None

    @property
    def active(self) -> bool:
        return bool(self.q_indices)

    def as_dict(self) -> dict[str, Any]:
        """The mapping that `parse_clip_config` takes."""
        return asdict(self)

    def rows_of_head(self, query: bool) -> tuple[int, int]:
        """(rows scaled as a query or key head, rows scaled otherwise) of one head."""
        if not self.is_mla:
            return self.head_dim, 0
        assert self.qk_nope_head_dim is not None
        other = self.qk_rope_head_dim if query else self.v_head_dim
        assert other is not None
        return self.qk_nope_head_dim, other

    def heads(self, rows: int, query: bool, where: str) -> int:
        """The heads of a projection with so many rows.

        Raises:
            ValueError: the rows are no whole number of heads, or fewer than the indices name.
        """
        per_head = sum(self.rows_of_head(query))
        option = "q_indices" if query else "k_indices"
        largest = max(self.q_indices if query else self.k_indices)
        if rows % per_head:
            sizes = "the head dimensions of MLA" if self.is_mla else f"head_dim={self.head_dim}"
            raise ValueError(
                f"{where}: {rows} rows are no multiple of the {per_head} of a head; correct "
                f"{sizes} in clip_config"
            )
        if largest >= rows // per_head:
            raise ValueError(
                f"{where}: {option} of clip_config names head {largest}, but {rows} rows hold "
                f"{rows // per_head} heads of {per_head}"
            )
        return rows // per_head


def parse_clip_config(config: Any) -> ClipConfig | None:
    """A checked copy of the argument.

    Raises:
        TypeError: it is no mapping, or an entry has a wrong type.
        ValueError: an entry is unknown, missing or out of range, or the index lists contradict each
            other.
    """
    if config is None:
        return None
    if not isinstance(config, Mapping):
        raise TypeError(f"clip_config must be a dict or None, got {type(config).__name__}")
    known = [field.name for field in fields(ClipConfig)]
    for key in config:
        if key not in known:
            raise ValueError(f"clip_config: unknown key {key!r}; it takes {', '.join(known)}")
    values = {key: plain_number(value) for key, value in config.items()}
    for key in ("q_indices", "k_indices"):
        values[key] = _indices(key, values.get(key, ()))
    parsed = ClipConfig(**values)
    _check_numbers(parsed)
    _check_indices(parsed)
    return replace(parsed, threshold=float(parsed.threshold))


def _indices(key: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Iterable):
        raise TypeError(f"clip_config: {key} must be a sequence of head numbers, got {value!r}")
    indices = tuple(value)
    for index in indices:
        if isinstance(index, bool) or not isinstance(index, Integral):
            raise TypeError(f"clip_config: {key} must hold integers, got {index!r}")
        if index < 0:
            raise ValueError(f"clip_config: {key} must hold head numbers from 0 on, got {index}")
    return tuple(int(index) for index in indices)


def _check_numbers(config: ClipConfig) -> None:
    threshold = config.threshold
    if isinstance(threshold, bool) or not isinstance(threshold, Real):
        raise TypeError(f"clip_config: threshold must be a number, got {threshold!r}")
    if not 0 < as_float(threshold) < math.inf:
        raise ValueError(f"clip_config: threshold must be finite and above 0, got {threshold!r}")
    if not isinstance(config.is_mla, bool):
        raise TypeError(f"clip_config: is_mla must be True or False, got {config.is_mla!r}")
    for key in ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        value = getattr(config, key)
        if value is None and not (key == "head_dim" or config.is_mla):
            continue
        if value is None:
            raise ValueError(f"clip_config: {key} must be given with is_mla=True")
        if isinstance(value, bool) or not isinstance(value, Integral):
            raise TypeError(f"clip_config: {key} must be an integer, got {value!r}")
        if value < 1:
            raise ValueError(f"clip_config: {key} must be at least 1, got {value}")


def _check_indices(config: ClipConfig) -> None:
    queries, keys = config.q_indices, config.k_indices
    if len(queries) != len(keys):
        raise ValueError(
            f"clip_config: q_indices has {len(queries)} entries and k_indices {len(keys)}; give "
            "for every logit the query head and the key head it belongs to"
        )
    key_of: dict[int, int] = {}
    for query, key in zip(queries, keys, strict=True):
        if key_of.setdefault(query, key) != key:
            raise ValueError(
                f"clip_config: query head {query} is given the key heads {key_of[query]} and {key};"
                " it attends to one"
            )
