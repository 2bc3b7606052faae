"""The largest attention logits over all ranks that hold a layer, so that all clip it alike."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ...distributed import Team
from .qk_clip import Batch


def largest_logits(
    batches: Sequence[Batch],
    logits: Mapping[int, Tensor],  # layer -> (N,), as from check_logits
    team_of: Callable[[Tensor], Team | None],
) -> Mapping[int, Tensor]:
    """Layer -> (N,), the largest that any rank gave; NaN and inf count as none.

    One all-reduce per batch of layers and team, of all its layers, whatever a rank was given: so
    no rank waits for one that measured nothing. A layer that no rank has logits for gets -inf,
    which clips nothing.

    Args:
        batches: from `plan_batches`.
        logits: of this rank's part of the data.
        team_of: the ranks that hold a parameter.
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
    return dict(zip(numbers, largest.unbind(), strict=True))
