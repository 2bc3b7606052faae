"""expert_sort: slots in expert order, where each expert starts, and its tiles of rows.

Stable, so that the order within an expert is the order of tokens. Ids outside [0, E) are sentinels
of expert parallelism: they come last and no product reads them. Nothing waits for the device.

path      | source            | taken
triton    | rows_triton.py    | CUDA, and there are slots
reference | reference/moe.py  | everything else
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor
from torch.library import define, impl, register_fake

from ..._ops import add_op_namespace_prefix, ops
from ...dispatch import TRITON_PATHS, experts_path_name
from ...reference import moe as reference
from ..checks import INTEGERS, check_tensor, untraced
from ..launch.launch_plan import replayed

# Rows of a tile by mean rows per expert: (up to, rows). Experts get more and fewer rows than the
# mean, and every tile reads its expert's weights again: from three quarters of a tile on the next
# size takes less time. Timed at means of 64, 128 and 256 alone (2026-11-22-expert-tiles.md).
TILE_ROWS = ((16, 16), (24, 32), (48, 64))
LARGEST_TILE_ROWS = 128
# 8 times as many as the widest published layers have (512). The Triton path keeps a counter of
# every expert for every 128 slots, here 128 bytes per slot, and all experts in one block.
MAX_EXPERTS = 1 << 12


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

    @classmethod
    def of(
        cls,
        slots: Tensor,
        offsets: Tensor,
        rows: Tensor,
        tiles: Tensor,
        tile_rows: int,
        top_k: int,
    ) -> ExpertOrder:
        """The order of `operands`, the form in which an op takes it (`ORDER`)."""
        sizes = (slots.shape[0] // top_k, top_k, offsets.shape[0] - 1, tile_rows)
        return cls(slots, offsets, rows, tiles, *sizes)

    def operands(self) -> tuple[Tensor, Tensor, Tensor, Tensor, int, int]:
        """What an op takes."""
        tensors = (self.slots, self.offsets, self.rows, self.tiles)
        return *tensors, self.tile_rows, self.top_k


# Of an order among the arguments of an op, and how many they are.
ORDER = "Tensor slots, Tensor offsets, Tensor rows, Tensor tiles, int tile_rows, int top_k"
ORDER_LENGTH = 6


def tile_rows_for(rows: int, num_experts: int) -> int:
    """Rows per tile: a function of the mean rows per expert alone, never of the routing."""
    for limit, size in TILE_ROWS:
        if rows <= limit * num_experts:
            return size
    return LARGEST_TILE_ROWS


# Without `custom_op`, whose care for gradients takes half of a call: integers have none.
define(
    add_op_namespace_prefix("expert_sort"),
    "(Tensor expert_ids, int num_experts, int tile_rows, str path) -> "
    "(Tensor slots, Tensor rows, Tensor offsets, Tensor tiles)",
    tags=torch.Tag.pt2_compliant_tag,
)


@impl(add_op_namespace_prefix("expert_sort"), "default")
@untraced
def _expert_sort(
    expert_ids: Tensor,  # (T, k)
    num_experts: int,
    tile_rows: int,
    path: str,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if path in TRITON_PATHS and expert_ids.numel() > 0:
        from .rows_triton import expert_sort_triton

        ids, constants = expert_ids.contiguous(), (num_experts, tile_rows)
        return tuple(replayed("expert_sort", expert_sort_triton, (ids,), constants))
    return reference.expert_sort(expert_ids, num_experts, tile_rows)


@register_fake(add_op_namespace_prefix("expert_sort"))
def _fake(expert_ids, num_experts, tile_rows, path):
    rows = expert_ids.numel()
    new = expert_ids.new_empty
    return (
        new((rows,), dtype=torch.int64),
        new((rows,), dtype=torch.int64),
        new((num_experts + 1,), dtype=torch.int64),
        new((reference.tile_bound(rows, num_experts, tile_rows), 3), dtype=torch.int64),
    )


def check_ids(expert_ids: Tensor, num_experts: int) -> None:
    """Raise the TypeError or ValueError that `expert_sort` owes to ids (T, k) and E."""
    check_tensor("expert_ids", expert_ids, 2, INTEGERS)
    if isinstance(num_experts, bool) or not isinstance(num_experts, int):
        raise TypeError(f"num_experts must be an integer, got {type(num_experts).__name__}")
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(
            f"num_experts must be at least 1 and at most {MAX_EXPERTS}, got {num_experts}; pass "
            "the number of experts of one layer"
        )
    if expert_ids.shape[1] < 1:
        raise ValueError(f"expert_ids must name experts, got shape {tuple(expert_ids.shape)}")


def expert_sort(
    expert_ids: Tensor, num_experts: int, *, tile_rows: int | None = None, backend: str = "auto"
) -> ExpertOrder:
    """Sort the slots (token t, choice j) -> t k + j by expert, stably, once per layer and step.

    Nothing waits for the device, so the call can be captured in a CUDA graph.

    Args:
        expert_ids: (T, k) of any integer dtype. Ids below 0 or from `num_experts` on are sentinels
            (expert parallelism): their rows are skipped and give zeros.
        num_experts: E, at most 4096.
        tile_rows: Rows per tile, a power of two of at least 16; None chooses by T k / E.
        backend: "auto", "triton" or "reference".

    Returns:
        The order.

    Raises:
        TypeError: expert_ids is no integer tensor, or num_experts or tile_rows no integer.
        ValueError: A shape, size, tile_rows or backend is out of range.
    """
    check_ids(expert_ids, num_experts)
    expert_ids = expert_ids.detach()
    if tile_rows is None:
        tile_rows = tile_rows_for(expert_ids.numel(), num_experts)
    elif isinstance(tile_rows, bool) or not isinstance(tile_rows, int):
        raise TypeError(f"tile_rows must be an integer or None, got {type(tile_rows).__name__}")
    elif tile_rows < 16 or tile_rows & (tile_rows - 1):
        raise ValueError(f"tile_rows must be a power of two from 16, got {tile_rows}")
    path = experts_path_name("expert_sort", expert_ids.device, torch.float32, backend)
    slots, rows, offsets, tiles = ops.expert_sort(expert_ids, num_experts, tile_rows, path)
    tokens, top_k = expert_ids.shape
    return ExpertOrder(slots, offsets, rows, tiles, tokens, top_k, num_experts, tile_rows)
