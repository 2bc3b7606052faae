"""packed_product: (x W_e + low F_e + bias_e) times gates over packed weights, compiled for Hopper.

The product inside of grouped_lora_quantized_forward and _dx, by TMA and wgmma: decoded weights are
wgmma's left operand in registers, up to 256 rows its right one. An element is one float32 sum over
growing k and then over the rank, so a row's bits do not depend on the others.

path     | op          | source                   | taken
compiled | nf4_product | kernels-src/quant        | capability 9.0, what `refusal` allows: bfloat16,
         |             |                          | N a multiple of 8; NF4 and FP4 in blocks of 64
         |             |                          | or more that do not leave their row; MXFP4 with
         |             |                          | K a multiple of 64, FP8 of 16 and blocks of 64
         |             |                          | columns or more; by name, or by `pays`
triton   |             | packed_product_triton.py | everything else

The op reads plain scales and ranks that are multiples of 8: nested scales and other ranks are made
so by launches ahead of it (plain_operands_triton.py), in memory that is let go behind it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.library import register_fake

from ... import dispatch
from ..._ops import add_op_namespace_prefix, ops
from ..experts.expert_sort import ExpertOrder

_BY_TRITON = "product over packed weights by Triton instead of CUDA: %s"
MAX_EXPERTS = 512  # kMaxExperts: their offsets lie in shared memory
RANKS = 8  # what a rank is padded to a multiple of: rows of 16 bytes
MIN_BLOCK = 64  # kMinBlock: a step of the sum takes one absmax per stored row
# Mean rows of an expert and depth of the sum, from which on it was faster than Triton's, and the
# most rows that were timed (docs/dev/decisions/2026-11-22-nf4-products.md and
# 2026-11-28-tiles-of-few-rows.md). LEAST_ROWS: of a format without tiles of few rows, and of scales
# that must be made plain first.
LEAST_ROWS, LEAST_ROWS_OF_FEW, MOST_ROWS = 64, 1, 512
LEAST_DEPTH = 768
# Of formats with tiles of few rows, up to a mean of so many (kSomeRows): two blocks share a
# multiprocessor there, and one multiplies while the other one writes.
MOST_LOW_ROWS, LEAST_DEPTH_OF_LOW = 64, 512
_LARGEST = 2**30
_LARGEST_ROWS = 2**35  # elements: 2^32 times 16 bytes


KINDS = ("4bit", "mxfp4", "fp8")  # as enum Format counts them


class PackedStack(NamedTuple):
    """A stack of experts as the products in registers take it.

    kind  | packed            | absmax: scales of blocks
    4bit  | even nibbles high | float32, or uint8 if nested; blocks end with their row
    mxfp4 | even nibbles low  | uint8 powers of two; blocks of 32
    fp8   | e4m3 bytes        | float32 of block_rows x blocksize elements of an expert
    """

    packed: Tensor  # (E N K / 2,) uint8; (E N K,) of FP8
    absmax: Tensor
    codebook: Tensor | None  # (16,) float32; FP8 and what only asks for reasons need none
    nested: tuple[Tensor, Tensor, Tensor] | None  # code (256,), scale, offset (1,)
    stored: tuple[int, int, int]  # (E, N, K)
    blocksize: int  # columns of a block
    kind: str = "4bit"
    block_rows: int = 1


def shift_of(side: int) -> int:
    """log2 of a side of a block; of one that is no power of two, the whole side, more than any."""
    return side.bit_length() - 1 if side & (side - 1) == 0 else 30


@register_fake(add_op_namespace_prefix("nf4_product"))
def _fake(*operands):
    return None


def packed_product(  # noqa: PLR0913
    x: Tensor,
    stack: PackedStack,
    slots: Tensor,
    offsets: Tensor,
    *,
    along: bool,
    low: Tensor | None = None,
    factor: Tensor | None = None,
    bias: Tensor | None = None,
    gates: Tensor | None = None,
    fan: int,
    grouped_out: bool,
    out: Tensor | None = None,
    activated: Tensor | None = None,
    early: bool = False,
) -> Tensor:
    """Multiply every expert's rows with its packed weight; no gradients, no other path.

    Args:
        x: Rows of K (along) or of N, bfloat16, contiguous, on 16 bytes.
        stack: Its bytes on 16 bytes.
        slots: (R,) of `expert_sort`, as offsets.
        offsets: (E + 1,).
        along: The sum runs along K and the result has N columns; else across N, and it has K.
        low: (R, r) in expert order, contiguous, bfloat16.
        factor: (E, r, columns) with low, of any floating dtype and strides.
        bias: (E, columns) of any floating dtype.
        gates: (T, k) of any floating dtype; scale the rows of the result.
        fan: Where row i lies in x: 0 at i (expert order), f > 0 at slots[i] // f.
        grouped_out: Write in expert order instead of slot order.
        out: (R, columns), contiguous, bfloat16; of no rows if only `activated` is wanted.
        activated: (R, columns / 2), contiguous, bfloat16, where `activates`: silu of the first half
            of the columns times the second half, in expert order and without gates.
        early: It begins while the launch before it ends, and waits for it; offsets were there when
            that one began.

    Returns:
        (R, columns) in bfloat16, or `out`; zero for sentinels.

    Raises:
        ValueError: What `refusal` says of the operands.
        RuntimeError: Shapes, dtypes or devices do not fit.
    """
    if reason := refusal(x, stack):
        raise ValueError(f"packed_product cannot take this product: {reason}")
    packed, absmax, codebook, nested, stored, blocksize, kind, block_rows = stack
    columns = stored[1] if along else stored[2]
    if out is None:
        out = x.new_empty((slots.shape[0], columns))
    if nested is not None:
        from .plain_operands_triton import unnested

        absmax = unnested(absmax, nested)
    low, factor = _low_rank_operands(low, factor, x.dtype)
    ops.nf4_product(
        x,
        packed,
        absmax,
        codebook if kind == "4bit" else None,
        stored,
        1 << shift_of(blocksize),
        along,
        low,
        factor,
        None if bias is None else _converted(bias[:, None], torch.float32, packs=True)[:, 0],
        None if gates is None else gates.float().contiguous(),
        slots,
        offsets,
        out,
        fan,
        not grouped_out,
        KINDS.index(kind),
        1 << shift_of(block_rows),
        activated,
        early,
    )
    return out


def _low_rank_operands(
    low: Tensor | None, factor: Tensor | None, dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """Both as the op reads them."""
    if factor is None or factor.shape[1] % RANKS == 0:
        return low, None if factor is None else _converted(factor, dtype)
    from .plain_operands_triton import padded

    return padded(low[:, :, None], dtype, RANKS)[:, :, 0], padded(factor, dtype, RANKS)


def _converted(x: Tensor, dtype: torch.dtype, *, packs: bool = False) -> Tensor:
    """x (E, r, N) in a dtype, contiguous if asked: by a launch that a plan can play again."""
    if x.dtype == dtype and (x.is_contiguous() or not packs):
        return x
    from ..experts.grouped_launch_triton import reorder

    return reorder(x, torch.empty(x.shape, dtype=dtype, device=x.device))


def refusal(x: Tensor, stack: PackedStack) -> str | None:
    """Why the compiled op cannot take the product; None if it can. Nothing depends on the rows.

    Args:
        x: Rows.
        stack: As `packed_product` of packed_product_triton.py takes it.
    """
    packed, scales, _, _, (experts, n, k), blocksize, kind, _ = stack
    if x.dtype != torch.bfloat16:
        return f"it needs bfloat16, got {x.dtype}"
    if kind == "mxfp4" and (k % MIN_BLOCK or scales.data_ptr() % 4):
        return f"K must be a multiple of {MIN_BLOCK} and scales start on 4 bytes, got K = {k}"
    if kind == "fp8" and (k % 16 or 1 << shift_of(blocksize) < MIN_BLOCK):
        return (
            f"K must be a multiple of 16 and blocks have {MIN_BLOCK} columns or more, got K = {k} "
            f"and {blocksize} columns"
        )
    if kind == "4bit" and (blocksize < MIN_BLOCK or k % blocksize):
        return (
            f"the blocksize must be {MIN_BLOCK} or more and divide K, got {blocksize} and K = {k}"
        )
    if experts > MAX_EXPERTS:
        return f"it takes at most {MAX_EXPERTS} experts, got {experts}"
    if n % 8 or max(k, n) > _LARGEST:
        return f"N must be a multiple of 8 and no side exceed 2^30, got {n} and {k}"
    if packed.data_ptr() % 16:
        return "packed must start on 16 bytes"
    if x.shape[0] * x.stride(0) > _LARGEST_ROWS:
        return f"rows of x may take 64 GiB, got {x.shape[0]} rows {x.stride(0)} elements apart"
    if x.stride(1) != 1 or x.data_ptr() % 16 or (x.shape[0] > 1 and x.stride(0) % 8):
        return f"rows of x must be contiguous and start on 16 bytes, got strides {x.stride()}"
    return None


def activates(x: Tensor, stack: PackedStack, activation: str, interleaved: bool) -> bool:
    """Whether the compiled op applies the activation behind a product along stored rows.

    A tile of FP8 holds two boxes of columns: of the gate, and the columns of up that go with them.

    Args:
        x: Rows.
        stack: Of gate and up.
        activation: Its name.
        interleaved: Whether columns of gate and up alternate.
    """
    fits = stack.kind == "fp8" and activation == "silu" and not interleaved
    return fits and refusal(x, stack) is None


def pays(mean_rows: float, depth: int, least_rows: int) -> bool:
    """Whether it takes less time than Triton's product: a rule from times on one H200.

    Args:
        mean_rows: Of an expert.
        depth: Of the sum: a tile's sums are written while nothing is multiplied.
        least_rows: From how many on, of the format.
    """
    low = least_rows == LEAST_ROWS_OF_FEW and mean_rows <= MOST_LOW_ROWS
    least_depth = LEAST_DEPTH_OF_LOW if low else LEAST_DEPTH
    return least_rows <= mean_rows <= MOST_ROWS and depth >= least_depth


def prefer_compiled(
    x: Tensor,
    stack: PackedStack,
    last: bool,
    low: Tensor,
    factor: Tensor | None,
    order: ExpertOrder,
    out: Tensor | None,
    *,
    activated: Tensor | None = None,
    early: bool = False,
    **options,
) -> Tensor | None:
    """What packed_product_triton.py does with these arguments, by CUDA if it can.

    `activated` and `early` as in `packed_product`. Triton's product applies no activation, and
    begins late.

    Raises:
        ValueError: `activated` is wanted of what CUDA cannot take.
    """
    from .packed_product_triton import gate_and_dot
    from .packed_product_triton import packed_product as by_triton

    reason = refusal(x, stack)
    if out is None:
        reason = "the gates' gradient alone is wanted"
    if reason is not None and activated is not None:
        raise ValueError(f"no product but the compiled one applies an activation: {reason}")
    if reason is not None:
        dispatch.say_once(_BY_TRITON, reason)
        return by_triton(x, stack, last, low, factor, order, out, **options)
    other, gates = options.get("other"), options.get("gates")
    packed_product(
        x,
        stack,
        order.slots,
        order.offsets,
        along=last,
        low=None if factor is None else low,
        factor=factor,
        bias=options.get("bias"),
        gates=gates if other is None else None,
        fan=options["fan"],
        grouped_out=not options["scatter"],
        out=out,
        activated=activated,
        early=early,
    )
    if other is None:
        return None
    place = (options.get("other_fan", 0), options["scatter"])
    return gate_and_dot(out, other, gates, order.slots, order.offsets, *place)
