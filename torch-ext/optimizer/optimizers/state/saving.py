"""Whether one process may save an optimizer's state as the whole of it."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from ..sharded.plan import Ranks
from .placements import sharded_dims


def check_whole(ranks: Ranks, labelled: Iterable[tuple[str, Tensor, str | None]]) -> None:
    """Raise if one process should not save this state as that of the optimizer.

    Args:
        ranks: of the optimizer.
        labelled: (label for messages, parameter, name) of every parameter.

    Raises:
        TypeError: other ranks have parts of it.
        RuntimeError: a step went wrong, so that it may not fit the parameters.
    """
    ranks.consistency.check()
    parts = None
    if ranks.unreduced is not None:
        parts = "with gradients='unreduced' every rank keeps a part of the state"
    for where, param, _ in labelled:
        if sharded_dims(param):
            parts = parts or f"{where}: ranks share it out as {tuple(param.placements)}"
    if parts is not None:
        raise TypeError(f"{parts}; save it with torch.distributed.checkpoint, on all ranks")
