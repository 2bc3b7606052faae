"""Stage 1 of the layer: the slots of all tokens in expert order."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from ..kernels.experts.expert_sort import expert_sort as _sort
from ..kernels.experts.expert_sort import tile_rows_for


@dataclasses.dataclass(frozen=True)
class ExpertOrder:
    """The rows of all experts, one after the other; all tensors lie on the device, int64.

    Slot t k + j is the j-th expert of token t. A row is a slot in expert order; rows from
    offsets[E] on belong to sentinels. The same order serves both projections and their backward.

    Args:
        slots: (T k,) slot of every row, stable: the token of row i is slots[i] // k.
        offsets: (E + 1,) first row of every expert; offsets[E] is the number of valid rows.
        rows: (T k,) row of every slot, the inverse of `slots`.
        tiles: (bound, 3) expert, first row and end row of every tile of at most `tile_rows` rows;
            expert E are sentinels, -1 is an unused tile. The bound depends on T k and E alone.
        tokens: T.
        top_k: k.
        num_experts: E.
        tile_rows: Rows per tile, chosen by T k / E.
    """

    slots: Tensor
    offsets: Tensor
    rows: Tensor
    tiles: Tensor
    tokens: int
    top_k: int
    num_experts: int
    tile_rows: int


def expert_sort(expert_ids: Tensor, num_experts: int, *, backend: str = "auto") -> ExpertOrder:
    """Sort the slots of all tokens by expert, once per layer and step.

    Nothing waits for the device, so the call can be captured in a CUDA graph.

    Args:
        expert_ids: (T, k) of any integer dtype. Ids below 0 or from `num_experts` on are sentinels
            (expert parallelism): their rows are skipped and give zeros.
        num_experts: E.
        backend: "auto", "triton" or "reference".

    Returns:
        The order.

    Raises:
        TypeError: expert_ids is no integer tensor, or num_experts no integer.
        ValueError: A shape or size is out of range.
    """
    ids = expert_ids.detach() if isinstance(expert_ids, Tensor) else expert_ids
    slots, rows, offsets, tiles = _sort(ids, num_experts, backend=backend)
    tokens, top_k = ids.shape
    tile_rows = tile_rows_for(tokens * top_k, num_experts)
    return ExpertOrder(slots, offsets, rows, tiles, tokens, top_k, num_experts, tile_rows)
