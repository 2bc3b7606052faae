"""QK-clip: after the update, shrink the query and key heads whose attention logits grew too large.

For the largest logit S of a head and a threshold t, gamma = t / S where S > t, else 1, and

    query head g    gamma_g / sqrt(min gamma)      min over the query heads that share the key head
    key head        sqrt(min gamma)                so that the product is gamma_g for every g
    MLA, wq_b       its nope rows as a query head, its rope rows by gamma_g
    MLA, wkv_b      its nope rows as a key head, its value rows by 1

(Kimi K2, arXiv 2507.20534, Algorithm 1; with one query head per key head both factors are
sqrt(gamma).) Everything is computed on the device: nothing is read on the host.

Legend: L layers, N logits of a layer, H heads, r rows of a projection.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..distributed import Team, whole
from ..reference import rounding
from .groups.default_groups import EXPERTS
from .groups.options import ClipConfig
from .groups.parameters import components, is_dtensor, local

logger = logging.getLogger(__name__)

QUERY, KEY = "query", "key"
KINDS = {"wq": QUERY, "q_proj": QUERY, "wk": KEY, "k_proj": KEY}
# Projections out of MLA's latents, and of queries that have none (DeepSeek-V2-Lite).
MLA_KINDS = {"wq_b": QUERY, "q_b_proj": QUERY, "wq": QUERY, "q_proj": QUERY}
MLA_KINDS |= {"wkv_b": KEY, "kv_b_proj": KEY}

Rows = slice | Tensor | None  # the rows of the whole projection that a process holds; None: all


@dataclass(frozen=True, eq=False)
class Target:
    """A projection of a layer."""

    where: str  # for messages
    param: Tensor  # (r, c)
    layer: int
    kind: str
    heads: int


@dataclass(frozen=True, eq=False)
class Batch:
    """Layers of equal head counts on one device, and which logit belongs to which head there."""

    config: ClipConfig
    layers: Mapping[int, Mapping[str, Target]]  # layer -> kind -> projection
    query_members: (
        Tensor  # (H_q, most logits of a head), positions in N + 1; position N has gamma 1
    )
    key_members: Tensor  # (H_k, most logits of a head)
    key_of_query: Tensor  # (H_q,), the key head of a query head; H_k where there is none

    def scales(self, logits: Tensor) -> dict[str, Tensor]:
        """Kind -> one float32 factor per row (L, r), from the largest logits (L, N)."""
        gammas = clip_factors(logits, self.config.threshold)
        gammas = torch.cat([gammas, torch.ones_like(gammas[:, :1])], 1)  # (L, N + 1)
        query = gammas[:, self.query_members].amin(-1)  # (L, H_q)
        key = gammas[:, self.key_members].amin(-1)  # (L, H_k)
        kinds = next(iter(self.layers.values())).keys()
        if KEY not in kinds:
            return {QUERY: self._rows(QUERY, query, query)}
        if QUERY not in kinds:
            return {KEY: self._rows(KEY, key, torch.ones_like(key))}
        root = key.sqrt()
        beside = torch.cat([root, torch.ones_like(root[:, :1])], 1)[:, self.key_of_query]
        return {
            QUERY: self._rows(QUERY, query / beside, query),
            KEY: self._rows(KEY, root, torch.ones_like(root)),
        }

    def _rows(self, kind: str, nope: Tensor, rest: Tensor) -> Tensor:
        """The factors (L, H) of a head's first rows and of its other ones, for every row."""
        first, other = self.config.rows_of_head(kind == QUERY)
        parts = [nope.unsqueeze(-1).expand(*nope.shape, first)]
        if other:
            parts.append(rest.unsqueeze(-1).expand(*rest.shape, other))
        return torch.cat(parts, -1).flatten(1)


def clip_factors(logits: Tensor, threshold: float) -> Tensor:
    """gamma = threshold / S in float32 where S is finite and larger, else 1."""
    logits = logits.float()
    tiny = torch.finfo(torch.float32).tiny  # not 0, by which a query head would be divided
    gammas = (threshold / logits).clamp_min(tiny)
    return torch.where((logits > threshold) & logits.isfinite(), gammas, 1.0)


def find_targets(
    config: ClipConfig | None,
    entries: Iterable[tuple[str, Tensor, str | None]],  # (label for messages, parameter, name)
    expert_keys: Sequence[str] | None = None,
    *,
    transposed: bool = False,
) -> list[Target]:
    """The projections among the matrices of a group, by their names.

    Raises:
        ValueError: the rows of one do not fit the heads of the configuration, or are its columns.
    """
    if config is None or not config.active:
        return []
    kinds, found = MLA_KINDS if config.is_mla else KINDS, []
    for where, param, name in entries:
        parts = [] if name is None else components(name)
        numbers = [int(part) for part in parts if part.isdigit()]
        if len(parts) < 3 or not numbers or parts[-2] not in kinds or param.ndim != 2:
            continue
        expert = any(key in parts for key in (EXPERTS, *(expert_keys or ())))
        if expert:
            continue
        if transposed:
            raise ValueError(
                f"{where}: QK-clip scales rows of projections (out, in), and this group is "
                "transposed; leave clip_config out"
            )
        kind = kinds[parts[-2]]
        heads = config.heads(param.shape[0], kind == QUERY, where)
        found.append(Target(where, param, numbers[-1], kind, heads))
    return found


def plan_batches(config: ClipConfig | None, targets: Sequence[Target]) -> list[Batch]:
    """The targets by layer, and layers with equal heads together.

    Raises:
        ValueError: a layer has two projections of a kind, or on two devices.
    """
    if config is None or not targets:
        return []
    layers: dict[int, dict[str, Target]] = {}
    for target in targets:
        layer = layers.setdefault(target.layer, {})
        for other in layer.values():
            if other.kind == target.kind or other.param.device != target.param.device:
                raise ValueError(
                    f"{target.where}: layer {target.layer} has a {target.kind} projection on "
                    f"{target.param.device} beside {other.where} on {other.param.device}; QK-clip "
                    "takes one query and one key projection per layer number, on one device"
                )
        layer[target.kind] = target
    lonely = sorted(number for number, layer in layers.items() if len(layer) == 1)
    if lonely:
        logger.info("layers %s have one projection for QK-clip, which takes the whole clip", lonely)
    alike: dict[tuple[Any, ...], dict[int, dict[str, Target]]] = {}
    for number, layer in layers.items():
        device = next(iter(layer.values())).param.device
        heads = tuple((kind, layer[kind].heads) for kind in (QUERY, KEY) if kind in layer)
        alike.setdefault((device, heads), {})[number] = layer
    return [_batch(config, batch, device, dict(heads)) for (device, heads), batch in alike.items()]


def _batch(
    config: ClipConfig,
    layers: Mapping[int, Mapping[str, Target]],
    device: torch.device,
    heads: Mapping[str, int],
) -> Batch:
    """The tables of a batch: made once, so that a step copies nothing to the device."""
    query_heads = heads.get(QUERY, max(config.q_indices) + 1)
    key_heads = heads.get(KEY, max(config.k_indices) + 1)
    key_of = dict(zip(config.q_indices, config.k_indices, strict=True))
    tables = (
        _members(config.q_indices, query_heads),
        _members(config.k_indices, key_heads),
        [key_of.get(head, key_heads) for head in range(query_heads)],
    )
    return Batch(config, layers, *(torch.tensor(table, device=device) for table in tables))


def _members(indices: Sequence[int], heads: int) -> list[list[int]]:
    """For every head the positions of its logits, filled up with the position after the last."""
    found = [[i for i, index in enumerate(indices) if index == head] for head in range(heads)]
    width = max(map(len, found))
    return [row + [len(indices)] * (width - len(row)) for row in found]


def check_logits(
    qk_logits: Any, config: ClipConfig | None, batches: Sequence[Batch]
) -> Mapping[int, Tensor]:
    """The logits of the layers that are here, whole, plain tensors.

    Sharded ones are put together by all ranks of their mesh.

    Raises:
        ValueError: QK-clip is not configured, or a layer's logits have a wrong shape or device.
        TypeError: they are no mapping of tensors of floating-point numbers.
    """
    if qk_logits is None:
        return {}
    if config is None:
        raise ValueError(
            "qk_logits was given, but no QK-clip is configured; construct the optimizer with "
            "clip_config={'q_indices': ..., 'k_indices': ..., 'head_dim': ..., 'threshold': ...}"
        )
    if not isinstance(qk_logits, Mapping):
        raise TypeError(
            "qk_logits must map layer numbers to tensors of the largest logit per head, got "
            f"{type(qk_logits).__name__}"
        )
    devices = {
        number: next(iter(layer.values())).param.device
        for batch in batches
        for number, layer in batch.layers.items()
    }
    return {
        number: _checked(qk_logits[number], f"qk_logits[{number}]", config, device)
        for number, device in devices.items()
        if number in qk_logits
    }


def _checked(logits: Any, where: str, config: ClipConfig, device: torch.device) -> Tensor:
    if not isinstance(logits, Tensor) or not logits.is_floating_point():
        kind = logits.dtype if isinstance(logits, Tensor) else type(logits).__name__
        raise TypeError(f"{where} must be a floating-point tensor, got {kind}")
    if tuple(logits.shape) != (len(config.q_indices),):
        raise ValueError(
            f"{where} must hold one number for each of the {len(config.q_indices)} entries of "
            f"q_indices, got shape {tuple(logits.shape)}"
        )
    if logits.device not in (device, torch.device("cpu")):
        raise ValueError(f"{where} is on {logits.device}, the layer on {device}; move it there")
    if is_dtensor(logits) and not all(p.is_replicate() for p in logits.placements):
        return whole(logits).detach()
    return local(logits).detach()


def clip(
    batches: Sequence[Batch],
    logits: Mapping[int, Tensor],  # layer -> (N,), as from check_logits
    rows: Mapping[Tensor, Rows] | None = None,
    residuals: Mapping[Tensor, Tensor] | None = None,
) -> None:
    """Scale the heads of every layer that has logits, whether it had gradients or not.

    This process holds some `rows` of parameters; `residuals` (int16): what rounding kept back.
    """
    for batch in batches:
        present = [number for number in batch.layers if number in logits]
        if not present:
            continue
        device = batch.query_members.device
        stacked = torch.stack([logits[n].to(device, non_blocking=True).float() for n in present])
        for kind, scales in batch.scales(stacked).items():  # (L, r)
            for number, scale in zip(present, scales.unbind(), strict=True):
                param = batch.layers[number][kind].param
                held = None if rows is None else rows.get(param)
                scale_rows(
                    local(param),
                    scale if held is None else scale[held],
                    None if residuals is None else residuals.get(param),
                )


def scale_rows(param: Tensor, scale: Tensor, residual: Tensor | None = None) -> None:
    """param (r, c) <- scale (r,) param, multiplied in float32 or more, with one rounding.

    With a residual, which is exact, the value scaled is the one before the update's rounding.
    """
    if residual is None:
        param.mul_(scale[:, None])  # rows with factor 1 keep their bits
    else:
        rounding.store(param, rounding.load(param, residual) * scale[:, None], residual)


def largest_logits(
    batches: Sequence[Batch],
    logits: Mapping[int, Tensor],  # layer -> (N,), as from check_logits
    team_of: Callable[[Tensor], Team | None],
) -> Mapping[int, Tensor]:
    """Layer -> (N,), the largest that any rank gave; NaN and inf count as none.

    One all-reduce per batch of layers and team, of all its layers, whatever a rank was given: so
    no rank waits for one that measured nothing. A layer that no rank has logits for gets -inf,
    which clips nothing.
    """
    found = dict(logits)
    for batch in batches:
        shared: dict[int, tuple[Team, list[int]]] = {}
        for number, layer in batch.layers.items():
            for target in layer.values():
                team = team_of(target.param)
                if team is not None and team.size > 1:
                    shared.setdefault(id(team), (team, []))[1].append(number)
                    break
        for team, numbers in shared.values():
            found |= _largest(batch, numbers, team, logits)
    return found


def _largest(
    batch: Batch, numbers: Sequence[int], team: Team, logits: Mapping[int, Tensor]
) -> dict[int, Tensor]:
    device, entries = batch.query_members.device, len(batch.config.q_indices)
    nothing = torch.full((entries,), -math.inf, device=device)
    given = torch.stack(
        [
            logits[number].to(device, non_blocking=True).float() if number in logits else nothing
            for number in numbers
        ]
    )  # (L, N)
    largest = team.transport.maximum(torch.where(given.isfinite(), given, -math.inf)).wait()
    if (alive := team.transport.alive) is not None:  # a step that failed scales nothing either
        largest = torch.where(alive > 0, largest, -math.inf)
    return dict(zip(numbers, largest.unbind(), strict=True))
