"""Projections that are kept in one parameter or transposed, and the rows of their parts."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from .names import components

logger = logging.getLogger(__name__)

ATTENTION = frozenset({"c_attn", "qkv_proj"})
GATED = "gate_up_proj"
# Of which some keep Q, K and V head by head, which neither name nor shape tell.
UNKNOWN = frozenset({"query_key_value", "qkv", "wqkv", "Wqkv", "W_pack"})


def fused_projections(model: nn.Module, names: Mapping[Tensor, str]) -> dict[str, tuple[int, ...]]:
    """Name -> row counts of the fused projections among these parameters.

    What has the name of one and is not known to be cut by rows is logged.
    """
    found: dict[str, tuple[int, ...]] = {}
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            if module.in_proj_weight in names:
                found[names[module.in_proj_weight]] = (module.embed_dim,) * 3
            continue
        for called, part in [*module.named_children(), *module.named_parameters(recurse=False)]:
            weight = part if isinstance(part, Tensor) else getattr(part, "weight", None)
            if called not in ATTENTION | UNKNOWN | {GATED} or weight not in names:
                continue
            sizes = _sizes(module, part, called, tuple(weight.shape))
            if sizes is not None:
                found[names[weight]] = sizes
            else:
                logger.warning(
                    "%s %s looks fused, and is taken as one matrix: its parts are not known to be "
                    "runs of rows. Give it to AdamW, or split_sizes to the Muon group",
                    ".".join(components(names[weight])),
                    tuple(weight.shape),
                )
    return found


def _sizes(
    owner: nn.Module, part: Any, called: str, shape: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Rows, or of Conv1D columns, of the parts of a projection that `owner` calls `called`."""
    if called == GATED:
        rows = shape[-1] if is_transposed(part) else shape[-2]
        if len(shape) == 3 and not _is_concatenated(owner, shape):
            return None
        return None if rows % 2 else (rows // 2,) * 2
    if len(shape) != 2 or called in UNKNOWN:
        return None
    rows, columns = shape[::-1] if is_transposed(part) else shape
    heads, of_keys, size = _heads(owner)
    if heads and size and (heads + 2 * of_keys) * size == rows:
        return heads * size, of_keys * size, of_keys * size
    return (columns,) * 3 if rows == 3 * columns else None


def is_transposed(part: Any) -> bool:
    """Whether a module keeps (in, out), as Conv1D of GPT-2 does; convolutions of that name do not.

    Theirs have a weight of three dimensions, or none where they wrap another module.
    """
    weight = getattr(part, "weight", None)
    return type(part).__name__ == "Conv1D" and isinstance(weight, Tensor) and weight.ndim == 2


def _is_concatenated(experts: nn.Module, shape: tuple[int, ...]) -> bool:
    """Whether a stack (E, 2 intermediate, hidden) has the gates before the rest in its rows."""
    down = getattr(experts, "down_proj", None)
    if not isinstance(down, Tensor) or not getattr(experts, "is_concatenated", True):
        return False
    return tuple(down.shape) == (shape[0], shape[2], shape[1] // 2)


def _heads(attention: nn.Module) -> tuple[int, int, int]:
    """(query heads, key heads, rows of a head), 0 for what neither it nor its config says."""

    def said(*names: str) -> int:
        for holder in (attention, getattr(attention, "config", None)):
            for name in names:
                value = getattr(holder, name, None)
                if isinstance(value, int):
                    return value
        return 0

    heads = said("num_attention_heads", "num_heads", "n_head", "n_heads")
    return heads, said("num_key_value_heads", "n_kv_head", "n_kv_heads") or heads, said("head_dim")
