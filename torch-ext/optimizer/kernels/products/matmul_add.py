"""matmul_add: s (alpha A B + beta C), the dense products of an iteration: Q X and a X + B X.

path     | op              | source                           | taken
compiled | matmul_add      | kernels-src/products/*sm90* | capability 9.0, half precision
torch    | matmul_add_auto | torch's baddbmm or bmm           | everything else

The compiled path needs strides that TMA can take. The pick looks at addresses, so it is made inside
of an op, which torch.compile does not look into; `product` is for callers that are inside of one.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.library import custom_op, register_fake

from ... import dispatch
from ..._ops import add_op_namespace_prefix, ops
from ..autocast import without_autocast
from .operands import as_batch, check_dense, check_out, check_scalars, check_scale

# Numbers of the compiled op's tiles: the order of kMatmulAddTiles in
# kernels-src/products/tiles_sm90.h, which a test compares.
TILES = ("sm90_128x256", "sm90_128x256_pair", "sm90_256x128", "sm90_128x128")
AUTO = -1
HALF_PRECISION = (torch.float16, torch.bfloat16)


@register_fake(add_op_namespace_prefix("matmul_add"))
def _fake(a, b, c, out, alpha, beta, tile, scale=None, upper=0):
    return None


@custom_op(
    add_op_namespace_prefix("matmul_add_auto"),
    mutates_args=("out",),
    schema="(Tensor a, Tensor b, Tensor? c, Tensor(a!) out, float alpha, float beta, "
    "Tensor? scale=None) -> ()",
)
def _auto(
    a: Tensor,  # (B, m, k)
    b: Tensor,  # (B, k, n)
    c: Tensor | None,  # (B, m, n)
    out: Tensor,  # (B, m, n)
    alpha: float,
    beta: float,
    scale: Tensor | None = None,  # (B,)
) -> None:
    product(a, b, c, out, alpha, beta, scale)


_auto.register_fake(lambda *_, **__: None)


def product(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    out: Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    scale: Tensor | None = None,
) -> None:
    """`matmul_add` of (B, ., .) operands into `out`, unchecked."""
    if _takes_compiled(a, b, c, out):
        ops.matmul_add(a, b, c, out, alpha, beta, AUTO, scale)
        return
    with without_autocast(a.device):
        _dense_product(a, b, c, out, alpha, beta, scale)


def _dense_product(
    a: Tensor,
    b: Tensor,
    c: Tensor | None,
    out: Tensor,
    alpha: float,
    beta: float,
    scale: Tensor | None,
) -> None:
    """`product` by torch."""
    if scale is None and (a.device.type == "cuda" or a.dtype == torch.float32):
        # cuBLAS adds beta C in float32 before the one rounding; with beta = 0 nothing is read.
        torch.baddbmm(out if c is None else c, a, b, beta=beta, alpha=alpha, out=out)
        return
    value = torch.bmm(a.float(), b.float()).mul_(alpha)
    if c is not None:
        value.add_(c, alpha=beta)
    if scale is not None:
        value.mul_(scale[:, None, None])
    out.copy_(value)


def runs_compiled(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the compiled kernel serves tensors of this dtype, if TMA can take their strides."""
    return dtype in HALF_PRECISION and dispatch.runs_compiled("matmul_add", device)


def by_tma(x: Tensor | None) -> bool:
    """Whether TMA can take x (B, rows, cols): `fits_tensor_map` of product_sm90.h."""
    if x is None:
        return True
    batch, row, col = x.stride()
    line = row if col == 1 else col
    return (
        1 in (row, col)
        and x.data_ptr() % 16 == 0
        and line % 8 == 0
        and line > 0
        and (x.shape[0] == 1 or (batch % 8 == 0 and batch > 0))
    )


def _takes_compiled(a: Tensor, b: Tensor, c: Tensor | None, out: Tensor) -> bool:
    """Whether `auto` runs the compiled op. The batch has no say: it must not change a bit."""
    return (
        runs_compiled(a.device, a.dtype)
        and min(a.shape) > 0
        and b.shape[-1] > 0
        and all(by_tma(x) for x in (a, b, c, out))
        and (c is None or (c.stride(-1) == 1) == (out.stride(-1) == 1))
    )


def matmul_add(
    A: Tensor,
    B: Tensor,
    *,
    alpha: float = 1.0,
    C: Tensor | None = None,
    beta: float = 0.0,
    scale: Tensor | None = None,
    out: Tensor | None = None,
    tile: str = "auto",
) -> Tensor:
    """scale (alpha A B + beta C) of a batch, rounded once.

    Sums are float32; the scalars and C are applied in float32. The compiled path gives a matrix the
    same bits in any batch; torch's BLAS chooses its kernels by the batch. Float32 operands follow
    `torch.set_float32_matmul_precision`. Builds no autograd graph.

    Args:
        A: (..., m, k), float16, bfloat16 or float32, any strides. Leading dimensions that no single
            stride walks are copied.
        B: (..., k, n), with A's leading dimensions and dtype.
        alpha: Factor of the product.
        C: (..., m, n) of A's dtype; may be `out` itself.
        beta: Factor of C; 0 leaves C unread.
        scale: (...,) float32, a factor for each matrix; None means 1.
        out: (..., m, n) of A's dtype, any strides; must not overlap A or B.
        tile: "auto", or one of `TILES` for tests and measurements: capability 9.0, half precision,
            strides that TMA can take.

    Returns:
        (..., m, n) in A's dtype, or `out`. With k = 0 the product is 0.

    Raises:
        TypeError: An argument is of a wrong kind or dtype.
        ValueError: Shapes or devices do not fit, beta without C, out overlaps an operand, or the
            device has no such tile.
    """
    scalars = {"alpha": alpha, "beta": beta}
    _check_operands(A, B, C, scalars)
    check_scale(scale, A)
    shape = (*A.shape[:-1], B.shape[-1])
    if out is None:
        out = A.new_empty(shape)
    check_out(out, shape, A=A, B=B, C=C)
    if tile != "auto" and tile not in TILES:
        raise ValueError(f"tile={tile!r} is unknown; name auto or one of {', '.join(TILES)}")
    if tile != "auto" and not dispatch.runs_compiled("matmul_add", A.device):
        raise ValueError(f"tile={tile!r} needs a device of capability 9.0, got {A.device}")
    batch = math.prod(A.shape[:-2])
    a, b, c = (
        None if x is None else x.detach().reshape(batch, *x.shape[-2:])
        for x in (A, B, C if beta != 0 else None)
    )
    target = as_batch(out.detach(), batch)
    result = A.new_empty((batch, *shape[-2:])) if target is None else target
    factors = None if scale is None else scale.detach().reshape(batch).contiguous()
    scalars = {name: float(value) for name, value in scalars.items()}
    with torch.no_grad():
        if tile == "auto":
            ops.matmul_add_auto(a, b, c, result, **scalars, scale=factors)
        else:
            number = TILES.index(tile)
            ops.matmul_add(a, b, c, result, **scalars, tile=number, scale=factors)
        if target is None:
            out.copy_(result.view(shape))
    return out


def _check_operands(A: Tensor, B: Tensor, C: Tensor | None, scalars: dict[str, float]) -> None:
    if not isinstance(B, Tensor):
        raise TypeError(f"B must be a dense tensor, got {type(B).__name__}")
    check_dense(A=A, B=B, C=C)
    check_scalars(scalars, C)
    if A.ndim < 2 or B.ndim != A.ndim or A.shape[:-2] != B.shape[:-2]:
        raise ValueError(
            f"A must be (..., m, k) and B (..., k, n) with equal leading dimensions, got shapes "
            f"{tuple(A.shape)} and {tuple(B.shape)}"
        )
    if A.shape[-1] != B.shape[-2]:
        raise ValueError(
            f"A and B must agree in k, got shapes {tuple(A.shape)} and {tuple(B.shape)}"
        )
    if C is not None and C.shape != (*A.shape[:-1], B.shape[-1]):
        raise ValueError(f"C must have shape {(*A.shape[:-1], B.shape[-1])}, got {tuple(C.shape)}")
