"""The call of axolotl's scattermoe_lora, for those who migrate; new code calls the seam itself."""

from __future__ import annotations

import torch
from torch import Tensor

from ..kernels.experts.expert_sort import ExpertOrder, tile_rows_for
from ..reference.moe import tile_map
from .grouped_linear import grouped_lora_linear


def parallel_linear_lora(  # noqa: PLR0913
    inputs: Tensor,
    expert_weights: Tensor,
    k: int,
    sorted_expert_idxs: Tensor,
    sorted_scattered_idxs: Tensor,
    expert_offsets: Tensor,
    lora_A: Tensor | None = None,
    lora_B: Tensor | None = None,
    scaling: float = 1.0,
    expert_biases: Tensor | None = None,
    gates: Tensor | None = None,
    grouped_in: bool = False,
    grouped_out: bool = False,
    use_fused_dX: bool = False,
    use_fused_gather: bool = False,
) -> Tensor:
    """`grouped_lora_linear` under the name and arguments of axolotl's scattermoe_lora.

    `expert_sort` and `grouped_lora_linear` do the same with the order computed once, also under
    autocast; here it is rebuilt from the three tensors at every call.

    Args:
        inputs: (M, K) in token order, or (M k, K) in expert order with `grouped_in`.
        expert_weights: (E, K, N), any strides.
        k: Experts per token. The second projection passes 1 with `grouped_in`.
        sorted_expert_idxs: (M k,) expert of every row.
        sorted_scattered_idxs: (M k,) slot of every row.
        expert_offsets: (E,) inclusive cumulative counts.
        lora_A: (r E, K), expert-major.
        lora_B: (N, r E), expert-major columns.
        scaling: s.
        expert_biases: (E, N).
        gates: (T, k of the routing).
        grouped_in: inputs are in expert order.
        grouped_out: Leave the result in expert order.
        use_fused_dX: Ignored: there is one implementation.
        use_fused_gather: Ignored likewise.

    Returns:
        (T, N) with gates, else (M k, N).

    Raises:
        TypeError: An argument is of a wrong kind or dtype.
        ValueError: Shapes or devices do not fit.
    """
    experts, _, n = expert_weights.shape
    if sorted_scattered_idxs.ndim != 1:
        raise ValueError(
            f"sorted_scattered_idxs must be (M k,), got {tuple(sorted_scattered_idxs.shape)}"
        )
    rows = sorted_scattered_idxs.shape[0]
    if expert_offsets.shape != (experts,):
        raise ValueError(
            f"expert_offsets must be (E,) = ({experts},), got {tuple(expert_offsets.shape)}"
        )
    if sorted_expert_idxs.shape != (rows,):
        raise ValueError(
            f"sorted_expert_idxs must be ({rows},) like sorted_scattered_idxs, got "
            f"{tuple(sorted_expert_idxs.shape)}"
        )
    # With gates, slots count over the routing's k even where the call says k = 1.
    top_k = k if gates is None else gates.shape[-1]
    if top_k < 1 or rows % top_k != 0:
        raise ValueError(f"k must divide the {rows} rows, got {top_k}")
    order = _rebuild(sorted_scattered_idxs, expert_offsets, top_k)
    if lora_A is not None and lora_B is not None:
        if lora_A.ndim != 2:
            raise ValueError(f"lora_A must be (r E, K), got shape {tuple(lora_A.shape)}")
        rank = lora_A.shape[0] // experts
        if lora_A.shape[0] != rank * experts or lora_B.shape != (n, rank * experts):
            raise ValueError(
                f"lora_A (r E, K) and lora_B (N, r E) must share r E, a multiple of E = {experts}, "
                f"got {tuple(lora_A.shape)} and {tuple(lora_B.shape)}"
            )
        lora_A = lora_A.view(experts, rank, -1)
        lora_B = lora_B.view(n, experts, rank).transpose(0, 1)
    return grouped_lora_linear(
        inputs,
        expert_weights,
        order,
        lora_A,
        lora_B,
        scaling=scaling,
        bias=expert_biases,
        gates=gates,
        grouped_in=grouped_in,
        grouped_out=grouped_out,
    )


def _rebuild(slots: Tensor, ends: Tensor, top_k: int) -> ExpertOrder:
    """The order that the three tensors describe; their sort need not be stable."""
    slots, ends = slots.detach().long(), ends.detach().long()
    total, experts = slots.shape[0], ends.shape[0]
    tile_rows = tile_rows_for(total, experts)
    rows = torch.zeros_like(slots).scatter(0, slots, torch.arange(total, device=slots.device))
    offsets = torch.cat((ends.new_zeros(1), ends))
    tiles = tile_map(torch.cat((offsets, ends.new_full((1,), total))), total, tile_rows)
    return ExpertOrder.of(slots, offsets, rows, tiles, tile_rows, top_k)
