"""Whether ranks that were told nothing about each other hold replicas with different gradients."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import timedelta

import torch
from torch import Tensor

from ...distributed import exchange
from ..groups.parameters import is_dtensor
from .consistency import checksum
from .digest import word

logger = logging.getLogger(__name__)

# How long the first step waits for other ranks: longer than one is behind another that trains with
# it, and bearable for one that trains alone, which waits once and in vain.
PATIENCE = timedelta(seconds=30)


def compare_replicas(groups: Sequence[Sequence[tuple[str, Tensor]]], number: int) -> bool:
    """Compare the gradients of this rank with those of ranks that hold the same parameters.

    Replicas are ranks whose plain parameters are equal, bit for bit, at their first step. Others
    are no business of this one, and so are ranks that do not step an optimizer of this kind. There
    is no collective: a rank that never comes is not waited for longer than PATIENCE, and one that
    comes after that does not count: it hears what the others found, as they did.

    Args:
        groups: (name for messages, parameter) of all groups.
        number: of the optimizer, as on the ranks that hold the same one.

    Returns:
        Whether there is nothing more to compare; there is as long as no replica has a gradient.

    Raises:
        RuntimeError: a replica has other gradients.
    """
    from torch import distributed

    if not (distributed.is_available() and distributed.is_initialized()):
        return False
    params = [param for named in groups for _, param in named if not is_dtensor(param)]
    if not params or distributed.get_world_size() == 1:
        return True
    captured = any(param.is_cuda for param in params) and torch.cuda.is_current_stream_capturing()
    if captured:
        return False
    forms = [(tuple(param.shape), param.dtype) for param in params]
    own = f"{_digest(forms, params)} {_digest(forms, [param.grad for param in params])}"
    try:
        found = exchange(f"optimizer/gradients/{number}", own, PATIENCE)
    except RuntimeError as error:
        logger.warning(
            "MuonAdamW was not told whether gradients are reduced, and the ranks could not be "
            "asked whether theirs are equal (%s); pass gradients='reduced' or 'unreduced'",
            error,
        )
        return True
    complete = len(found) == distributed.get_world_size()
    if not complete:
        logger.warning(
            "MuonAdamW was not told whether gradients are reduced, and only ranks %s stepped one "
            "within %g s, so others were not asked; pass gradients='reduced' or 'unreduced'",
            sorted(found),
            PATIENCE.total_seconds(),
        )
    replicas = [rank for rank, other in found.items() if other.split()[0] == own.split()[0]]
    if len({found[rank] for rank in replicas}) > 1:  # this one may have come too late to count
        raise RuntimeError(
            f"ranks {', '.join(map(str, replicas))} hold the same parameters with different "
            "gradients, which nothing has reduced: the replicas would drift apart. Pass "
            "gradients='unreduced' to MuonAdamW, which then reduces them; or reduce them before "
            "step(), as DistributedDataParallel does; or pass gradients='reduced' if each rank "
            "trains on its own"
        )
    return not complete or any(param.grad is not None for param in params)


def _digest(forms: Sequence[object], tensors: Sequence[Tensor | None]) -> int:
    """Of the bits of tensors; it waits for their devices."""
    sums = [None if tensor is None else checksum(tensor, tensor.device) for tensor in tensors]
    return word(str([forms, [None if found is None else found.item() for found in sums]]))
