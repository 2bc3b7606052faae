"""Options of parameter groups and of QK-clip, and the one place that says which are valid."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor

from ...orthogonalize.choose import GRAM_POLYNOMIAL_STEPS, METHODS
from ...orthogonalize.coefficients import (
    COEFFICIENT_SETS,
    MAX_STEPS,
    frozen_rows,
    resolve_coefficients,
)

FLOATING = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
LR_RULES = ("match_rms_adamw", "original", "spectral", "none")
POLAR_EXPRESS = "polar_express"
MOMENTUM_FORMS = ("heavy_ball", "ema")
MUON_SWITCHES = (
    *("nesterov", "row_equilibration", "renormalize", "cautious", "shaped_decay"),
    *("transposed", "flatten", "none_grad"),
)
ROUNDINGS = ("nearest", "stochastic", "residual")

# Of values that compare by == and that nobody changes in place.
_PLAIN_KINDS = frozenset({bool, int, float, str, tuple, type(None), torch.dtype})

LrRule = Callable[[Any, int, int], Any]


@dataclass(frozen=True)
class MuonOptions:
    """Options of a group of matrices. Every field is a key of the group, read at every step."""

    lr: float | Tensor
    momentum: float
    nesterov: bool
    momentum_form: str
    momentum_dtype: torch.dtype | None
    ns_steps: int
    ns_coefficients: str | tuple[Any, ...]
    eps: float
    row_equilibration: bool
    renormalize: bool
    method: str
    dtype: torch.dtype | None
    weight_decay: float | Tensor
    cautious: bool
    shaped_decay: bool
    adjust_lr_fn: str | LrRule
    beta2: float | None
    expert_keys: tuple[str, ...] | None
    split_sizes: tuple[int, ...] | Mapping[str, tuple[int, ...]] | None
    num_heads: int | Mapping[str, int] | None
    transposed: bool
    flatten: bool
    rounding: str
    rounding_seed: int
    none_grad: bool

    @property
    def iteration(self) -> dict[str, Any]:
        """What `choose` and `predicted_ms` are told; own coefficients decide the method."""
        method = self.method if self.ns_coefficients == POLAR_EXPRESS else "newton_schulz"
        return {"steps": self.ns_steps, "method": method, "iterate_dtype": self.dtype}

    @property
    def orthogonalization(self) -> tuple[Any, ...]:
        """Everything that decides which update (m, n) is made of a direction (m, n)."""
        coefficients = self.ns_coefficients, self.row_equilibration, self.renormalize
        return self.method, self.ns_steps, self.dtype, self.transposed, *coefficients

    @property
    def momentum_rule(self) -> dict[str, Any]:
        """How gradients become directions, as the kernel takes it."""
        return {"mu": float(self.momentum), "nesterov": self.nesterov, "form": self.momentum_form}

    def check(self, where: str, *, read_lr: bool = True) -> None:
        """Raise ValueError or TypeError naming `where`, the option, its value and what is valid.

        Without `read_lr` the value of a Tensor lr or weight_decay is not read, which would wait for
        its device.
        """
        _check_scalar("lr", self.lr, where, read_lr)
        _check_fraction("momentum", self.momentum, where)
        _check_scalar("weight_decay", self.weight_decay, where, read_lr)
        check_count("ns_steps", self.ns_steps, where, MAX_STEPS)
        _check_not_negative("eps", self.eps, where)
        if self.beta2 is not None:
            _check_fraction("beta2", self.beta2, where)
        for option in MUON_SWITCHES:
            check_switch(option, getattr(self, option), where)
        check_choice("momentum_form", self.momentum_form, MOMENTUM_FORMS, where)
        check_choice("method", self.method, METHODS, where)
        _check_rounding(self.rounding, self.rounding_seed, where)
        _check_coefficients(self.ns_coefficients, self.ns_steps, self.method, where)
        if not callable(self.adjust_lr_fn):
            check_choice("adjust_lr_fn", self.adjust_lr_fn, LR_RULES, where, "a callable")
        for option in ("dtype", "momentum_dtype"):
            _check_dtype(option, getattr(self, option), where)
        if self.method == "gram_polynomial":
            _check_gram_polynomial(self.ns_steps, self.dtype, where)
        for name, value in by_name(self.num_heads):
            check_count(f"num_heads{name}", value, where)
        for name, value in by_name(self.split_sizes):
            _check_sizes(f"split_sizes{name}", value, where)
        _check_expert_keys(self.expert_keys, where)
        if self.split_sizes is not None and self.num_heads is not None:
            raise ValueError(
                f"{where}: split_sizes and num_heads both cut the rows of a parameter; give one of "
                "them, or put the parameters into two groups"
            )


@dataclass(frozen=True)
class AdamWOptions:
    """Options of a group for AdamW. Every field is a key of the group, read at every step."""

    lr: float | Tensor
    betas: tuple[float, float]
    eps: float
    weight_decay: float | Tensor
    rounding: str
    rounding_seed: int
    none_grad: bool

    def check(self, where: str, *, read_lr: bool = True) -> None:
        """As `MuonOptions.check`."""
        _check_scalar("lr", self.lr, where, read_lr)
        if not isinstance(self.betas, Sequence) or len(self.betas) != 2:
            raise ValueError(f"{where}: betas must be two numbers, got {self.betas!r}")
        for beta in self.betas:
            _check_fraction("betas", beta, where)
        _check_not_negative("eps", self.eps, where)
        _check_scalar("weight_decay", self.weight_decay, where, read_lr)
        _check_rounding(self.rounding, self.rounding_seed, where)
        check_switch("none_grad", self.none_grad, where)


@functools.cache
def option_names(options: type) -> tuple[str, ...]:
    """The fields of MuonOptions or AdamWOptions."""
    return tuple(field.name for field in fields(options))


def tidy(option: str, value: Any) -> Any:
    """The value as a group stores it: a copy, tuples for sequences, Python's own numbers."""
    if option == "adjust_lr_fn" and value is None:
        return "original"  # as in torch; nothing else means None from here on
    if type(value) in _PLAIN_KINDS and type(value) is not tuple:
        return value
    if option == "ns_coefficients":
        return _rows(value)
    if option == "expert_keys" and isinstance(value, Iterable) and not isinstance(value, str):
        return tuple(value) or None
    if isinstance(value, Mapping):
        return {name: tidy(option, entry) for name, entry in value.items()}
    if option in ("split_sizes", "betas", "adamw_betas") and isinstance(value, (list, tuple)):
        return tuple(map(plain_number, value))
    return plain_number(value)


def _rows(value: Any) -> Any:
    """One (a, b, c), or one per step, as tuples of floats; anything else for the checks."""
    if isinstance(value, (list, tuple)):
        if all(isinstance(entry, (list, tuple)) for entry in value):
            return tuple(tuple(map(plain_number, entry)) for entry in value)
        return tuple(map(plain_number, value))
    return value


def rows_for(coefficients: str | tuple[Any, ...], steps: int) -> str | tuple[Any, ...]:
    """What `newton_schulz` takes of ns_coefficients: a name, or one row for each of the steps."""
    if isinstance(coefficients, str) or any(isinstance(row, tuple) for row in coefficients):
        return coefficients
    return (coefficients,) * steps


def plain_number(value: Any) -> Any:
    """An int or a float for a number of another library or class, anything else as it is.

    The ops take no others, and would say so when a step has already begun to write. A number that
    float cannot hold stays what it is, for the checks to refuse.
    """
    if type(value) in _PLAIN_KINDS:
        return value
    if isinstance(value, Integral):
        return int(value)
    return as_float(value) if isinstance(value, Real) and as_float(value) < math.inf else value


def as_float(value: Real) -> float:
    """The nearest float, inf beyond the largest."""
    try:
        return float(value)
    except OverflowError:
        return math.inf


def by_name(value: Any) -> Iterable[tuple[str, Any]]:
    """(label for messages, value) of an option that is one value, or one per parameter name."""
    if isinstance(value, Mapping):
        return [(f"[{name!r}]", entry) for name, entry in value.items()]
    return [] if value is None else [("", value)]


def fingerprint(options: MuonOptions | AdamWOptions) -> tuple[list[type], list[Any]]:
    """Equal for two sets of options if all types and values are, but for values of Tensors.

    Dicts are copied, so that a change inside one is seen. 5 and 5.0 are equal, hence the types.
    """
    values = [*vars(options).values()]
    kinds = [*map(type, values)]
    if _PLAIN_KINDS.issuperset(kinds):
        return kinds, values
    return kinds, [
        (value.dtype, value.shape)
        if isinstance(value, Tensor)
        else value.copy()
        if type(value) is dict
        else value
        for value in values
    ]


def all_plain(of_options: tuple[list[type], list[Any]]) -> bool:
    """Whether a fingerprint has all there is to know of its options: nothing changes in place."""
    return _PLAIN_KINDS.issuperset(of_options[0])


@dataclass(frozen=True, eq=False)
class KnownOptions:
    """The options of a group that were checked."""

    options: MuonOptions | AdamWOptions
    fingerprint: tuple[list[type], list[Any]]
    seen: list[Any]  # keys and values of the group that tell that nothing changed; [] if none do


def _check_scalar(option: str, value: Any, where: str, read: bool) -> None:
    if isinstance(value, Tensor):
        dense = value.layout == torch.strided
        if value.numel() != 1 or not value.is_floating_point() or not dense:
            raise ValueError(
                f"{where}: a Tensor {option} must hold one floating-point number, got "
                f"{value.dtype} of shape {tuple(value.shape)}{'' if dense else f', {value.layout}'}"
            )
        if not read:
            return
        value = value.item()  # once, when a group is added or loaded; a step never reads it
    _check_not_negative(option, value, where)


def is_zero(value: float | Tensor) -> bool:
    """Whether a number is 0; of a Tensor it is not read."""
    return not isinstance(value, Tensor) and value == 0


def _check_number(option: str, value: Any, where: str) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{where}: {option} must be a number, got {value!r}")


def _check_not_negative(option: str, value: Any, where: str) -> None:
    _check_number(option, value, where)
    if not 0 <= as_float(value) < math.inf:
        raise ValueError(f"{where}: {option} must be finite and at least 0, got {value!r}")


def _check_fraction(option: str, value: Any, where: str) -> None:
    _check_number(option, value, where)
    if not 0 <= value < 1:
        raise ValueError(f"{where}: {option} must lie in [0, 1), got {value!r}")


def check_count(
    option: str,
    value: Any,
    where: str,
    most: float = math.inf,
    *,
    least: int = 1,
    otherwise: str = "",
) -> None:
    """Raise if a value is no integer in its range; `otherwise` is what a message adds."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{where}: {option} must be an integer{otherwise}, got {value!r}")
    if value < least:
        raise ValueError(f"{where}: {option} must be at least {least}{otherwise}, got {value!r}")
    if value > most:
        raise ValueError(f"{where}: {option} must be at most {most}, got {value!r}")


def _check_coefficients(value: Any, steps: int, method: str, where: str) -> None:
    if value == POLAR_EXPRESS:
        return
    if isinstance(value, str):
        check_choice("ns_coefficients", value, (POLAR_EXPRESS, *COEFFICIENT_SETS), where, "rows")
    elif not isinstance(value, tuple) or not value:
        raise TypeError(
            f"{where}: ns_coefficients must be a name, (a, b, c) or one (a, b, c) per step, got "
            f"{value!r}"
        )
    if method not in ("auto", "newton_schulz"):
        raise ValueError(
            f"{where}: ns_coefficients={value!r} are of method='newton_schulz', got "
            f"method={method!r}; leave one of them out"
        )
    try:
        resolve_coefficients(frozen_rows(rows_for(value, steps)), steps)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{where}: ns_coefficients: {error}") from None


def _check_gram_polynomial(steps: int, dtype: torch.dtype | None, where: str) -> None:
    if steps != GRAM_POLYNOMIAL_STEPS:
        raise ValueError(
            f"{where}: method='gram_polynomial' is made for ns_steps={GRAM_POLYNOMIAL_STEPS}, got "
            f"ns_steps={steps!r}; use method='polar_express', which derives any number of steps"
        )
    if dtype == torch.bfloat16:
        raise ValueError(
            f"{where}: method='gram_polynomial' amplifies the rounding of dtype=torch.bfloat16; "
            "use dtype=torch.float16 or None, or method='polar_express'"
        )


def _check_rounding(rounding: Any, seed: Any, where: str) -> None:
    check_choice("rounding", rounding, ROUNDINGS, where)
    if isinstance(seed, bool) or not isinstance(seed, Integral):
        raise TypeError(f"{where}: rounding_seed must be an integer, got {seed!r}")
    if not 0 <= seed < 1 << 64:
        raise ValueError(f"{where}: rounding_seed must have 64 bits, in [0, 2^64), got {seed!r}")


def _check_sizes(option: str, value: Any, where: str) -> None:
    if not isinstance(value, tuple) or not value:
        raise TypeError(f"{where}: {option} must be a sequence of row counts, got {value!r}")
    for size in value:
        check_count(option, size, where)


def _check_expert_keys(value: Any, where: str) -> None:
    if value is None:
        return
    if not isinstance(value, tuple) or not all(isinstance(key, str) and key for key in value):
        raise TypeError(
            f"{where}: expert_keys must be a sequence of name components such as ('experts',), "
            f"got {value!r}"
        )


def check_switch(option: str, value: Any, where: str) -> None:
    """Raise TypeError if the value is neither True nor False."""
    if not isinstance(value, bool):
        raise TypeError(f"{where}: {option} must be True or False, got {value!r}")


def check_choice(
    option: str, value: Any, choices: tuple[str, ...], where: str, also: str = ""
) -> None:
    """Raise ValueError if the value is not one of the choices."""
    if value not in choices:
        valid = ", ".join([*map(repr, choices), *([also] if also else [])])
        raise ValueError(f"{where}: {option} must be one of {valid}, got {value!r}")


def _check_dtype(option: str, value: Any, where: str) -> None:
    if value is None:
        return
    if not isinstance(value, torch.dtype):
        raise TypeError(f"{where}: {option} must be a torch.dtype or None, got {value!r}")
    if value not in FLOATING:
        names = ", ".join(str(valid).removeprefix("torch.") for valid in FLOATING)
        raise ValueError(f"{where}: {option} must be one of {names} or None, got {value}")


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
    _check_number("threshold", threshold, "clip_config")
    if not 0 < as_float(threshold) < math.inf:
        raise ValueError(f"clip_config: threshold must be finite and above 0, got {threshold!r}")
    check_switch("is_mla", config.is_mla, "clip_config")
    for key in ("head_dim", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"):
        value = getattr(config, key)
        if value is None and key != "head_dim":
            if config.is_mla:
                raise ValueError(f"clip_config: {key} must be given with is_mla=True")
            continue
        check_count(key, value, "clip_config")


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
