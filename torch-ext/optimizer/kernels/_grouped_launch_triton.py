"""Launches of `_grouped_triton`'s kernels: tiles by `_grouped_config`, arguments as they come."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction

from . import _grouped_config as config
from ._grouped_triton import _expert_product, _expert_sum, _grouped_product, _low_rank


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
    _low_rank[(tiles.shape[0], triton.cdiv(rank, tile.columns))](
        x,
        factor,
        slots,
        tiles,
        out,
        k,
        rank,
        experts,
        *x.stride(),
        *factor.stride(),
        scaling,
        FAN=fan,
        SCATTER=scatter,
        WIDEN=widens(x),
        BLOCK_M=tile.rows,
        BLOCK_R=tile.columns,
        BLOCK_K=tile.depth,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )


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
    tile = _tile(x, tile_rows, k, n, direction, rank)
    column_tiles = triton.cdiv(n, tile.columns)
    rows = slots.shape[0]
    dots = None
    if other is not None:
        dots = torch.empty((column_tiles, rows), dtype=torch.float32, device=x.device)
    if tiles.shape[0] > 0:
        _grouped_product[(tiles.shape[0] * column_tiles,)](
            x,
            weight,
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
