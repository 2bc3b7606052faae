"""Launches of the grouped kernels: tiles by `_grouped_config`, arguments as they come.

LoRA factors in PEFT's layout, whose experts are fastest, would be read two bytes per sector: a copy
in which N (or the rank) is fastest is made first, and their gradients are written in one go.
"""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from . import _grouped_config as config
from ._grouped_triton import _expert_product, _expert_sum, _grouped_product
from ._low_rank_triton import _low_rank, _reorder, _sum_parts

_REORDER = 64  # a side of the tile that is reordered: 128 bytes of bfloat16 either way
_SUM = 1024


@functools.cache
def arch(device: torch.device) -> str:
    """ "sm90" for an H100 or H200; "hip" for AMD; the interpreter counts as "sm90"."""
    if device.type != "cuda":
        return "sm90"
    if torch.version.hip is not None:
        return "hip"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm{major}{minor}"


def widens(x: Tensor) -> bool:
    """Whether the interpreter must widen: it multiplies the bits of bfloat16 operands."""
    return x.dtype == torch.bfloat16 and not isinstance(_grouped_product, JITFunction)


def _tile(x: Tensor, rows: int, depth: int, columns: int, direction: str, rank: int = 0):
    shape = config.Shape(arch(x.device), rows, depth, columns, x.element_size(), direction, rank)
    return config.choose(shape)


def is_scattered(factor: Tensor) -> bool:
    """Whether neighbours in both inner dimensions of (E, r, N) lie apart, as in PEFT's B."""
    _, rank, n = factor.shape
    return n > 1 and factor.stride(2) != 1 and (rank == 1 or factor.stride(1) != 1)


def reorder(source: Tensor, target: Tensor) -> Tensor:
    """Copy (E, r, N) between strides, near the speed of a copy where either is PEFT's; target."""
    experts, rank, n = source.shape
    sides = (source.stride(), target.stride())
    _reorder[(triton.cdiv(n, _REORDER), triton.cdiv(rank * experts, _REORDER))](
        source,
        target,
        n,
        rank * experts,
        experts,
        *source.stride(),
        *target.stride(),
        **{
            name: by_rank == experts * by_expert
            for name, (by_expert, by_rank, _) in zip(
                ("SOURCE_FLAT", "TARGET_FLAT"), sides, strict=True
            )
        },
        BLOCK_N=_REORDER,
        BLOCK_C=_REORDER,
        num_warps=4,
    )
    return target


def packed(factor: Tensor, dtype: torch.dtype) -> Tensor:
    """factor (E, r, N), or a contiguous copy in dtype where its elements lie apart."""
    if not is_scattered(factor):
        return factor
    return reorder(factor, torch.empty(factor.shape, dtype=dtype, device=factor.device))


def low_rank(
    x: Tensor,  # rows of K
    factor: Tensor,  # (E, r, K)
    slots: Tensor,
    tiles: Tensor,
    out: Tensor,  # (R, r), contiguous
    *,
    tile_rows: int,
    scaling: float,
    fan: int,
    scatter: bool = False,
) -> None:
    """out = scaling x factor_e^T, in expert order or scattered to slots."""
    experts, rank, k = factor.shape
    tile = _tile(x, tile_rows, k, rank, "low_rank", rank)
    if tiles.shape[0] == 0:
        return
    factor = packed(factor, x.dtype)
    span = config.span(k, tile)
    parts, target = triton.cdiv(k, span), out
    if parts > 1:
        target = torch.empty((parts, *out.shape), dtype=torch.float32, device=x.device)
    share = triton.cdiv(tile_rows, tile.rows)
    _low_rank[(tiles.shape[0] * share, triton.cdiv(rank, tile.columns), parts)](
        x,
        factor,
        slots,
        tiles,
        target,
        k,
        rank,
        experts,
        out.shape[0],
        span,
        *x.stride(),
        *factor.stride(),
        scaling if parts == 1 else 1.0,
        FAN=fan,
        SCATTER=scatter,
        WIDEN=widens(x),
        EVEN=k % tile.depth == 0,
        SHARE=share,
        BLOCK_M=tile.rows,
        BLOCK_R=tile.columns,
        BLOCK_K=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if parts > 1:
        grid = (triton.cdiv(out.numel(), _SUM),)
        _sum_parts[grid](target, out, out.numel(), parts, scaling, BLOCK=_SUM, num_warps=4)


def _described(x: Tensor, block: tuple[int, ...]) -> TensorDescriptor | None:
    """A tensor descriptor of x, whose strides and address must be multiples of 16 bytes."""
    unit = 16 // x.element_size()
    fits = x.stride(-1) == 1 and all(s > 0 and s % unit == 0 for s in x.stride()[:-1])
    if not fits or x.data_ptr() % 16 or x.numel() == 0:
        return None
    return TensorDescriptor(x, [*x.shape], [*x.stride()], [*block])


def _weight_described(weight: Tensor, tile: config.Tile) -> tuple[str, TensorDescriptor | None]:
    """("K" or "N", what lies together, and the descriptor of the stack), or ("", None)."""
    if tile.descriptors >= 1:
        for name, stored, block in (
            ("K", weight.transpose(1, 2), (1, tile.columns, tile.depth)),
            ("N", weight, (1, tile.depth, tile.columns)),
        ):
            found = _described(stored, block)
            if found is not None:
                return name, found
    return "", None


def grouped_product(  # noqa: PLR0913
    x: Tensor,  # rows of K
    weight: Tensor,  # (E, K, N)
    low: Tensor,  # (R, r)
    factor: Tensor | None,  # (E, r, N)
    slots: Tensor,
    tiles: Tensor,
    out: Tensor | None,  # (R, N), contiguous
    *,
    direction: str,
    tile_rows: int,
    fan: int,
    scatter: bool,
    bias: Tensor | None = None,  # (E, N)
    gates: Tensor | None = None,  # (T, k)
    other: Tensor | None = None,  # rows of N
    other_fan: int = 0,
) -> Tensor | None:
    """out = (x weight_e + low factor_e + bias_e) gates; returns <row before its gate, other>."""
    experts, k, n = weight.shape
    rank = 0 if factor is None else factor.shape[1]
    tile = _tile(x, tile_rows, k, n, direction if other is None else "dots", rank)
    factor = None if factor is None else packed(factor, x.dtype)
    described, stack = _weight_described(weight, tile)
    source = None
    if tile.descriptors >= 2 and fan == 0:
        source = _described(x, (tile.rows, tile.depth))
    column_tiles = triton.cdiv(n, tile.columns)
    rows = slots.shape[0]
    dots = None
    if other is not None:
        dots = torch.empty((column_tiles, rows), dtype=torch.float32, device=x.device)
    if tiles.shape[0] > 0:
        _grouped_product[(tiles.shape[0] * column_tiles,)](
            x if source is None else source,
            weight if stack is None else stack,
            low,
            weight if factor is None else factor,
            weight if bias is None else bias,
            weight if gates is None else gates.contiguous(),
            weight if other is None else other,
            slots,
            tiles,
            weight if out is None else out,
            weight if dots is None else dots,
            k,
            n,
            rank,
            experts,
            rows,
            tiles.shape[0],
            column_tiles,
            *x.stride(),
            *weight.stride(),
            *((0, 0, 0) if factor is None else factor.stride()),
            *((0, 0) if bias is None else bias.stride()),
            *((0, 0) if other is None else other.stride()),
            FAN=fan,
            OTHER_FAN=other_fan,
            SCATTER=scatter,
            LORA=factor is not None,
            BIAS=bias is not None,
            GATED=gates is not None,
            DOTS=other is not None,
            STORES=out is not None,
            WIDEN=widens(x),
            EVEN_K=k % tile.depth == 0,
            EVEN_N=n % tile.columns == 0,
            DESCRIBED=described,
            ROWS_DESCRIBED=source is not None,
            BLOCK_M=tile.rows,
            BLOCK_N=tile.columns,
            BLOCK_K=tile.depth,
            BLOCK_R=config.block_rank(max(rank, 1)),
            GROUP=config.GROUP,
            num_warps=tile.warps,
            num_stages=tile.stages,
        )
    return None if dots is None else dots.sum(0)


def expert_product(
    left: Tensor,  # rows of A
    right: Tensor,  # rows of B
    gates: Tensor | None,  # (T, k)
    slots: Tensor,
    offsets: Tensor,
    out: Tensor,  # (E, A, B), any strides
    *,
    left_fan: int,
    right_fan: int,
) -> None:
    """out[e] = sum over the expert's rows of gates left^T right."""
    experts, a, b = out.shape
    tile = _tile(left, a, slots.shape[0], b, "product")
    given = out
    if is_scattered(out):
        out = torch.empty(out.shape, dtype=out.dtype, device=out.device)
    a_tiles, b_tiles = triton.cdiv(a, tile.rows), triton.cdiv(b, tile.columns)
    _expert_product[(experts * a_tiles * b_tiles,)](
        left,
        right,
        left if gates is None else gates.contiguous(),
        slots,
        offsets,
        out,
        a,
        b,
        a_tiles,
        b_tiles,
        *left.stride(),
        *right.stride(),
        *out.stride(),
        LEFT_FAN=left_fan,
        RIGHT_FAN=right_fan,
        GATED=gates is not None,
        WIDEN=widens(left),
        BLOCK_A=tile.rows,
        BLOCK_B=tile.columns,
        BLOCK_M=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    if given is not out:
        reorder(out, given)


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
    _expert_sum[(experts, triton.cdiv(b, 128))](
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
