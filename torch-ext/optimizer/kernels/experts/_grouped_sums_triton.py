"""Launches of the sums over every expert's rows: gradients of LoRA, of weights and of biases.

Gradients in PEFT's layout, whose experts are fastest, are written in one go.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import triton
from torch import Tensor

from ..launch.launch_plan import launch
from . import _grouped_config as config
from ._expert_product_triton import _expert_products
from ._grouped_launch_triton import is_scattered, reorder, tile_of, widens
from ._grouped_triton import _expert_sum


@dataclasses.dataclass(frozen=True)
class RowSum:
    """One product of `expert_products`: out[e] = sum over the expert's rows of left^T right."""

    left: Tensor  # rows of A
    right: Tensor  # rows of B
    out: Tensor  # (E, A, B), any strides
    left_fan: int
    right_fan: int
    gated: bool = False  # each row times its gate

    def sizes(self) -> tuple[int, ...]:
        """The arguments of the kernel from A on."""
        strides = (*self.left.stride(), *self.right.stride(), *self.out.stride())
        return (*self.out.shape[1:], *strides)


def expert_products(
    sums: Sequence[RowSum],
    gates: Tensor | None,
    slots: Tensor,
    offsets: Tensor,
    *,
    in_place: bool = True,
) -> None:
    """Sums over every expert's rows, two in a launch where their results lie alike.

    Where experts are fastest in a result, `in_place` shares its tiles between neighbours; else it
    is computed apart and reordered, which takes as much memory again.
    """
    scattered = [one for one in sums if is_scattered(one.out)]
    plain = [one for one in sums if not is_scattered(one.out)]
    if in_place:
        for at in range(0, len(scattered), 2):
            _launch_expert_products(scattered[at : at + 2], gates, slots, offsets, True)
    else:
        for one in scattered:
            out = torch.empty(one.out.shape, dtype=one.out.dtype, device=one.out.device)
            plain.append(dataclasses.replace(one, out=out))
    for at in range(0, len(plain), 2):
        _launch_expert_products(plain[at : at + 2], gates, slots, offsets, False)
    if not in_place:
        for one, apart in zip(scattered, plain[len(plain) - len(scattered) :], strict=True):
            reorder(apart.out, one.out)


def _launch_expert_products(
    sums: Sequence[RowSum], gates: Tensor | None, slots: Tensor, offsets: Tensor, together: bool
) -> None:
    first, second = sums[0], sums[-1]
    experts = offsets.shape[0] - 1
    tallest, widest = (max(one.out.shape[side] for one in sums) for side in (1, 2))
    direction = "neighbours" if together else "product"
    tile = tile_of(first.left, tallest, slots.shape[0], widest, direction)
    neighbours = config.NEIGHBOURS if together else 1
    block_a = config.lanes(tile, tallest) if together else tile.rows

    def programs(one: RowSum) -> int:
        _, a, b = one.out.shape
        groups = triton.cdiv(experts, neighbours)
        return groups * triton.cdiv(a, block_a) * triton.cdiv(b, tile.columns)

    grid = (sum(programs(one) for one in sums),)
    launch(_expert_products, grid)(
        first.left,
        first.right,
        first.out,
        second.left,
        second.right,
        second.out,
        first.left if gates is None else gates.contiguous(),
        slots,
        offsets,
        experts,
        programs(first),
        *first.sizes(),
        *second.sizes(),
        LEFT_FAN=first.left_fan,
        RIGHT_FAN=first.right_fan,
        GATED=first.gated,
        OTHER_LEFT_FAN=second.left_fan,
        OTHER_RIGHT_FAN=second.right_fan,
        OTHER_GATED=second.gated,
        TWO=len(sums) > 1,
        WIDEN=widens(first.right),
        EXPERTS=neighbours,
        EXPERTS_LAST=together,
        BLOCK_A=block_a,
        BLOCK_B=tile.columns,
        BLOCK_M=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


def expert_sum(
    right: Tensor,  # rows of B
    gates: Tensor | None,  # (T, k)
    slots: Tensor,
    offsets: Tensor,
    out: Tensor,  # (E, B)
    *,
    fan: int,
) -> None:
    """out[e] = sum over the expert's rows of gates right."""
    experts, b = out.shape
    launch(_expert_sum, (experts, triton.cdiv(b, 128)))(
        right,
        right if gates is None else gates.contiguous(),
        slots,
        offsets,
        out,
        b,
        *right.stride(),
        *out.stride(),
        FAN=fan,
        GATED=gates is not None,
        BLOCK_B=128,
        BLOCK_M=32,
        num_warps=4,
    )
