"""symmetric_matmul: s (alpha A B^T + beta C) + diag I where the result is known to be symmetric.

Tiles on and above the diagonal are computed and stored twice, so the two triangles are equal bit
for bit at half the work. Sums are float32 over growing k; s, alpha, beta C and diag are applied in
float32 and the result is rounded once.

path      | op                         | source                        | taken
compiled  | symmetric_matmul           | kernels-src/products          | CUDA >= 8.0
reference | symmetric_matmul_reference | reference/orthogonalize.py    | everything else

The compiled op has two families of tiles: mma.sync for every GPU from 8.0 on, and TMA with wgmma
for capability 9.0 ("sm90_..."), which `auto` takes in half precision where TMA reads the strides.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.library import custom_op, register_fake

from ... import dispatch
from ..._ops import add_op_namespace_prefix, ops
from ...reference import orthogonalize as reference
from .operands import DTYPES, as_batch, check_dense, check_out, check_scalars, check_scale


@register_fake(add_op_namespace_prefix("symmetric_matmul"))
def _fake(*operands_and_options, **more):
    return None


@custom_op(
    add_op_namespace_prefix("symmetric_matmul_reference"),
    mutates_args=("out",),
    schema="(Tensor a, Tensor b, Tensor? c, Tensor(a!) out, float alpha, float beta, float diag, "
    "Tensor? scale=None) -> ()",
)
def _reference(
    a: Tensor,  # (B, m, k)
    b: Tensor,  # (B, m, k)
    c: Tensor | None,  # (B, m, m)
    out: Tensor,  # (B, m, m)
    alpha: float,
    beta: float,
    diag: float,
    scale: Tensor | None = None,  # (B,)
) -> None:
    options = {"alpha": alpha, "C": c, "beta": beta, "diag": diag, "scale": scale}
    out.copy_(reference.symmetric_matmul(a, b, **options))


_reference.register_fake(lambda *_: None)


def runs_compiled(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the compiled kernel serves tensors of this dtype on this device."""
    return dtype in DTYPES and dispatch.runs_compiled("symmetric_matmul", device)


def symmetric_matmul(
    A: Tensor,
    B: Tensor | None = None,
    *,
    alpha: float = 1.0,
    C: Tensor | None = None,
    beta: float = 0.0,
    diag: float = 0.0,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    tile: str = "auto",
) -> Tensor:
    """scale (alpha A B^T + beta C) + diag I of a batch that the caller knows to be symmetric.

    A B^T is symmetric for B = A, and for products of polynomials of one symmetric matrix. Only the
    part on and above the diagonal is computed; the rest is its mirror image, bit for bit. Sums are
    float32, the scalars and C are applied in float32, and the result is rounded once. A matrix
    gives the same bits in any batch and under any strides. Builds no autograd graph.

    Args:
        A: (..., m, k), float16, bfloat16 or float32, any strides: `x.mT` gives X^T X of a tall X
            without a copy. Leading dimensions that no single stride walks are copied.
        B: Like A; None means A. For a symmetric B, A B^T is A B.
        alpha: Factor of the product.
        C: (..., m, m), symmetric (either triangle may be read), of A's dtype; may be `out` itself.
        beta: Factor of C; 0 leaves C unread.
        diag: Added to the diagonal.
        scale: (...,) float32, a factor for each matrix, such as a norm that the device alone knows;
            None means 1.
        out: (..., m, m) of A's dtype, any strides; must not overlap A or B.
        tile: One of `TILES`, for tests and measurements. Those that start with sm90 need capability
            9.0, half precision and strides that TMA can take: rows or columns contiguous, on 16
            bytes, the same dimension for A and B, rows of out and C on 16 bytes.

    Returns:
        (..., m, m) in A's dtype, or `out`. With k = 0 the product is 0.

    Raises:
        TypeError: An argument is of a wrong kind or dtype.
        ValueError: Shapes or devices do not fit, beta without C, out overlaps an operand, or the
            path that serves the device has no such tile.
    """
    scalars = {"alpha": alpha, "beta": beta, "diag": diag}
    _check_operands(A, B, C, scalars)
    check_scale(scale, A)
    m = A.shape[-2]
    square = (*A.shape[:-1], m)
    if out is None:
        out = A.new_empty(square)
    check_out(out, square, A=A, B=B, C=C)
    batch = math.prod(A.shape[:-2])
    views = [
        None if x is None else x.detach().reshape(batch, *x.shape[-2:])
        for x in (A, A if B is None else B, C if beta != 0 else None)
    ]
    target = as_batch(out.detach(), batch)
    result = A.new_empty((batch, m, m)) if target is None else target
    options = {name: float(value) for name, value in scalars.items()}
    options["scale"] = None if scale is None else scale.detach().reshape(batch).contiguous()
    with torch.no_grad():
        path = dispatch.path_name("symmetric_matmul", A.device)
        if path == "compiled":
            options["tile"] = _tile_number(tile)
        elif tile != "auto":
            raise ValueError(f"tile={tile!r} is one of the compiled op's; {A.device} takes {path}")
        op = ops.symmetric_matmul if path == "compiled" else ops.symmetric_matmul_reference
        op(*views, result, **options)
        if target is None:
            out.copy_(result.view(square))
    return out


# The compiled op's table picks the tile; tests and measurements name one, by its position here:
# three of symmetric_matmul.cu, then kSymmetricTiles of kernels-src/products/tiles_sm90.h, as
# a test makes sure.
AUTO = -1
TILES = (
    *("64x64", "64x128", "128x128"),
    *("sm90_128x256", "sm90_128x128", "sm90_64x128", "sm90_128x192"),
)


def _tile_number(tile: str) -> int:
    if tile == "auto":
        return AUTO
    if tile not in TILES:
        raise ValueError(f"tile={tile!r} is unknown; name auto or one of {', '.join(TILES)}")
    return TILES.index(tile)


def _check_operands(A: Tensor, B: Tensor | None, C: Tensor | None, scalars: dict) -> None:
    check_dense(A=A, B=B, C=C)
    check_scalars(scalars, C)
    if A.ndim < 2:
        raise ValueError(f"A must be (..., m, k), got shape {tuple(A.shape)}")
    if B is not None and B.shape != A.shape:
        raise ValueError(
            f"B must have the shape of A {tuple(A.shape)}, got {tuple(B.shape)}; it is read as its "
            "transpose, so pass B.mT for A B"
        )
    if C is not None and C.shape != (*A.shape[:-1], A.shape[-2]):
        raise ValueError(
            f"C must have shape {(*A.shape[:-1], A.shape[-2])} for A of shape {tuple(A.shape)}, "
            f"got {tuple(C.shape)}"
        )
