"""grouped_product: (x W_e + low F_e + bias_e) times gates for the rows of every expert, on Hopper.

The product inside of grouped_lora_forward and grouped_lora_dx, by TMA and wgmma. The weights are
wgmma's M side and the rows its N side, as many as an expert has: each weight is read once, and no
tile table is needed. An element is one float32 sum over growing k and then over the rank, so that a
row's bits depend neither on the other rows nor on the tile.

path     | op              | source                          | taken
compiled | grouped_product | kernels-src/grouped_lora/*sm90* | capability 9.0, what `refusal` allows
triton   |                 | _grouped_launch_triton.py       | everything else on that path
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable

import torch
from torch import Tensor
from torch.library import register_fake

from .._ops import add_op_namespace_prefix, ops
from ._moe_paths import HALF_PRECISION

_logger = logging.getLogger(__name__)

# Numbers of the compiled op's tiles, features x rows: the order of kTiles in
# kernels-src/grouped_lora/grouped_product.h, which a test compares.
TILES = ("sm90_256x128", "sm90_128x256")
AUTO = -1
DOT_COLUMNS = 64  # of the result, whose products with other are summed by one warpgroup
MAX_EXPERTS = 512  # kMaxExperts: their offsets lie in shared memory
_LARGEST = 2**30


@register_fake(add_op_namespace_prefix("grouped_product"))
def _fake(  # noqa: PLR0913
    x,
    weight,
    low,
    factor,
    bias,
    gates,
    other,
    slots,
    offsets,
    out,
    dots,
    fan,
    other_fan,
    scatter,
    tile,
):
    return None


def grouped_product(  # noqa: PLR0913
    x: Tensor,
    weight: Tensor,
    slots: Tensor,
    offsets: Tensor,
    *,
    low: Tensor | None = None,
    factor: Tensor | None = None,
    bias: Tensor | None = None,
    gates: Tensor | None = None,
    other: Tensor | None = None,
    fan: int,
    other_fan: int = 0,
    grouped_out: bool,
    out: Tensor | None = None,
    tile: str = "auto",
) -> tuple[Tensor, Tensor | None]:
    """Multiply every expert's rows with its weight; no gradients, no other path.

    Args:
        x: Rows of K, float16 or bfloat16, contiguous in K, on 16 bytes.
        weight: (E, K, N) of x's dtype, contiguous in K or in N, on 16 bytes.
        slots: (R,) of `expert_sort`, as offsets.
        offsets: (E + 1,).
        low: (R, r) in expert order, contiguous, of x's dtype; r is a multiple of 8.
        factor: (E, r, N) with low, of any floating dtype and strides; copied unless it lies as
            weight does.
        bias: (E, N) of any floating dtype.
        gates: (T, k) of any floating dtype; scale the rows of the result.
        other: Rows of N of x's dtype, contiguous in N, on 16 bytes; N is then a multiple of 8.
        fan: Where row i lies in x: 0 at i (expert order), f > 0 at slots[i] // f.
        other_fan: The same for other.
        grouped_out: Write in expert order instead of slot order.
        out: (R, N), contiguous, of x's dtype.
        tile: "auto", or one of `TILES` for tests and measurements.

    Returns:
        (R, N) in x's dtype, or `out`; zero for sentinels. With `other` the products of its rows
        with those of the result before their gates, (R,) float32 in slot order, else None.

    Raises:
        ValueError: unknown tile, or what `refusal` says of the operands.
        RuntimeError: Shapes, dtypes or devices do not fit.
    """
    if tile != "auto" and tile not in TILES:
        raise ValueError(f"tile={tile!r} is unknown; name auto or one of {', '.join(TILES)}")
    if reason := refusal(x, weight, 0 if factor is None else factor.shape[1], other):
        raise ValueError(f"grouped_product cannot take this product: {reason}")
    if out is None:
        out = x.new_empty((slots.shape[0], weight.shape[2]))
    dots = None
    if other is not None:
        shape = (-(-weight.shape[2] // DOT_COLUMNS), slots.shape[0])
        dots = torch.empty(shape, dtype=torch.float32, device=x.device)
    ops.grouped_product(
        x,
        weight,
        low,
        None if factor is None else packed_factor(factor, weight),
        None if bias is None else bias.float().contiguous(),
        None if gates is None else gates.float().contiguous(),
        other,
        slots,
        offsets,
        out,
        dots,
        fan,
        other_fan,
        not grouped_out,
        AUTO if tile == "auto" else TILES.index(tile),
    )
    return out, None if dots is None else dots.sum(0)


def packed_factor(factor: Tensor, weight: Tensor) -> Tensor:
    """factor (E, r, N) in weight's dtype, contiguous along r where weight (E, K, N) is along K."""
    if weight.stride(1) == 1:
        packed = factor.transpose(1, 2).to(weight.dtype).contiguous().transpose(1, 2)
    else:
        packed = factor.to(weight.dtype).contiguous()
    return packed if packed.data_ptr() % 16 == 0 else packed.clone()


def refusal(x: Tensor, weight: Tensor, rank: int, other: Tensor | None = None) -> str | None:
    """Why the compiled op cannot take the product; None if it can. Nothing depends on the rows."""
    experts, k, n = weight.shape
    if x.dtype not in HALF_PRECISION or weight.dtype != x.dtype:
        return f"it needs float16 or bfloat16, got {x.dtype} and {weight.dtype}"
    if experts > MAX_EXPERTS:
        return f"it takes at most {MAX_EXPERTS} experts, got {experts}"
    if k < 8 or n < 8 or max(k, n) > _LARGEST:
        return f"K and N must be 8 to 2^30, got {k} and {n}"
    if rank % 8:
        return f"the rank must be a multiple of 8, got {rank}"
    for name, rows in (("x", x), ("other", other)):
        if rows is not None and not _on_16_bytes(rows):
            return (
                f"rows of {name} must be contiguous and start on 16 bytes, got strides "
                f"{rows.stride()}"
            )
    if other is not None and n % 8:
        return f"N must be a multiple of 8 for the products with other, got {n}"
    expert, line, other = weight.stride()
    if line == 1:
        line, other = other, line
    if other != 1 or weight.data_ptr() % 16 or line % 8 or (experts > 1 and expert % 8):
        return (
            "K or N of weight must be contiguous, and its lines start on 16 bytes, got strides "
            f"{weight.stride()}"
        )
    return None


def _on_16_bytes(rows: Tensor) -> bool:
    apart = rows.shape[0] > 1 and rows.stride(0) % 8
    return rows.stride(1) == 1 and rows.data_ptr() % 16 == 0 and not apart


@functools.cache
def _say_once(reason: str) -> None:
    _logger.warning("grouped product by Triton instead of the compiled kernel: %s", reason)


def product_of(path: str, offsets: Tensor) -> Callable[..., Tensor | None] | None:
    """A function of the arguments of Triton's product that prefers ours; None for Triton's."""
    if path != "compiled":
        return None
    from ._grouped_launch_triton import grouped_product as by_triton

    def prefer_compiled(x, weight, low, factor, slots, tiles, out, **options) -> Tensor | None:
        other = options.get("other")
        reason = refusal(x, weight, 0 if factor is None else factor.shape[1], other)
        if out is None:
            reason = "the gates' gradient alone is wanted"
        if reason is not None:
            _say_once(reason)
            return by_triton(x, weight, low, factor, slots, tiles, out, **options)
        _, dots = grouped_product(
            x,
            weight,
            slots,
            offsets,
            low=None if factor is None else low,
            factor=factor,
            bias=options.get("bias"),
            gates=options.get("gates"),
            other=other,
            fan=options["fan"],
            other_fan=options.get("other_fan", 0),
            grouped_out=not options["scatter"],
            out=out,
        )
        return dots

    return prefer_compiled
