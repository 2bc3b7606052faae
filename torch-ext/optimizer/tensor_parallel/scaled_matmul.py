"""Products of float8 operands with their scales, and how operands become float8.

(a s_a) (b s_b) with a and b in float8_e4m3fn: tensorwise scales are one number per operand, rowwise
ones one per row of a and one per column of b. Sums are float32 and rounded once.

path      | what                                 | taken
_scaled_mm| torch's, on the tensor cores         | CUDA from capability 8.9
reference | a float32 product of scaled operands | everything else
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .. import dispatch

FLOAT8 = torch.float8_e4m3fn
FLOAT8_TYPES = (torch.float8_e4m3fn, torch.float8_e5m2)
LARGEST = 448.0  # of float8_e4m3fn
LEAST = (8, 9)  # capability of tensor cores that multiply float8
MULTIPLE = 16  # of K and N in torch._scaled_mm
SMALLEST_SCALE = 2.0**-100  # of zeros, whose quotient stays zero


@torch.compiler.assume_constant_result
def has_float8_products(device: torch.device) -> bool:
    """Whether the tensor cores of a device multiply float8."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device) >= LEAST


@torch.compiler.assume_constant_result
def _say_reference(device: torch.device) -> None:
    dispatch.report_slow("scaled_matmul", f"no float8 products on {device.type} tensors here")


def scaled_product(
    a: Tensor,  # (M, K) float8, rows contiguous
    b: Tensor,  # (K, N) float8, columns contiguous
    a_scale: Tensor,  # () or (M, 1) float32
    b_scale: Tensor,  # () or (1, N) float32
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> Tensor:
    """(a a_scale) (b b_scale) in out_dtype, (M, N); unchecked."""
    if has_float8_products(a.device):
        scales = a_scale.contiguous(), b_scale.contiguous()
        return torch._scaled_mm(a, b, *scales, out_dtype=out_dtype, use_fast_accum=fast_accum)
    _say_reference(a.device)
    return ((a.float() * a_scale) @ (b.float() * b_scale)).to(out_dtype)


def scaled_matmul(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    *,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
) -> Tensor:
    """The product of scaled float8 operands, for any number of leading dimensions of a.

    Builds no autograd graph: `all_gather_matmul` and `matmul_reduce_scatter` with `scaling` do.

    Args:
        a: (..., K) float8.
        b: (K, N) float8 with contiguous columns, as the transpose of a contiguous (N, K) has.
        a_scale: float32; one number for all of a, or (..., 1) with a's leading dimensions.
        b_scale: float32; one number, or (1, N); of the same kind as a_scale.
        out_dtype: Dtype of the result; rowwise scales on the tensor cores serve bfloat16.
        use_fast_accum: Let the tensor cores add in less than float32.

    Returns:
        (..., N) in out_dtype.

    Raises:
        TypeError: An operand is no float8 tensor, or a scale not float32.
        ValueError: Shapes, strides, devices or kinds of scales do not fit; on CUDA also K or N that
            is not a multiple of 16.
    """
    rowwise = check_scaled(a, b, a_scale, b_scale)
    check_inner(a.shape[-1], b)
    rows = a.reshape(-1, a.shape[-1])
    scales = flat_scales(a_scale, b_scale, rowwise=rowwise)
    out = scaled_product(rows.contiguous(), b, *scales, out_dtype, use_fast_accum)
    return out.view(*a.shape[:-1], b.shape[1])


def flat_scales(a_scale: Tensor, b_scale: Tensor, *, rowwise: bool) -> tuple[Tensor, Tensor]:
    """Scales of N dimensions as a product of two takes them: () and (), or (M, 1) and (1, N)."""
    if rowwise:
        return a_scale.reshape(-1, 1), b_scale.reshape(1, -1)
    return a_scale.reshape(()), b_scale.reshape(())


def check_scaled(
    a: Tensor,
    b: Tensor,
    a_scale: Tensor,
    b_scale: Tensor,
    *,
    rowwise: bool | None = None,
    leading: tuple[int, ...] | None = None,
) -> bool:
    """Whether the scales are rowwise; TypeError or ValueError unless operands and scales fit.

    `rowwise` is what the caller said of the scales, or None; `leading` are the leading dimensions
    of rowwise scales of a, if they are not those of a.
    """
    for name, value in {"a": a, "b": b}.items():
        if not isinstance(value, Tensor) or value.dtype not in FLOAT8_TYPES:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name} must be a float8 tensor, got {kind}; quantize it first")
    for name, value in {"a_scale": a_scale, "b_scale": b_scale}.items():
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            kind = value.dtype if isinstance(value, Tensor) else type(value).__name__
            raise TypeError(f"{name} must be a float32 tensor, got {kind}; convert it first")
    check_product(a, b)
    if b.stride(0) != 1 and b.shape[0] > 1:
        raise ValueError(
            f"b {tuple(b.shape)} must have contiguous columns, got strides {b.stride()}; pass "
            "weight.t() of a contiguous weight (N, K), or b.t().contiguous().t()"
        )
    check_multiples(a, b)
    if rowwise is None:  # one row or one column has one number of either kind
        rowwise = a_scale.numel() != 1 or b_scale.numel() != 1
    columns, rows = (1, b.shape[1]), (*(a.shape[:-1] if leading is None else leading), 1)
    for name, scale, shape in (("a_scale", a_scale, rows), ("b_scale", b_scale, columns)):
        if not _fits(scale, shape if rowwise else None):
            raise ValueError(
                f"{name} must be {f'rowwise, {shape},' if rowwise else 'one number'} here, got "
                f"shape {tuple(scale.shape)}: both are tensorwise or both rowwise"
            )
    return rowwise


def _fits(scale: Tensor, shape: tuple[int, ...] | None) -> bool:
    """Whether a scale has a shape, or is one number; one of one element may be written as such."""
    if shape is None or scale.ndim == 0:
        return scale.numel() == math.prod(shape or ())
    return scale.shape == shape


def check_product(a: Tensor, b: Tensor) -> None:
    """TypeError or ValueError unless a (..., K) and b (K, N) can be multiplied."""
    for name, value in {"a": a, "b": b}.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a tensor, got {type(value).__name__}")
    if a.ndim < 2:
        raise ValueError(
            f"a must have at least 2 dimensions (..., K), got shape {tuple(a.shape)}; a single "
            "row is a.unsqueeze(0)"
        )
    if b.ndim != 2:
        raise ValueError(f"b must be (K, N), got shape {tuple(b.shape)}")
    if a.device != b.device:
        raise ValueError(f"b must be on the device of a ({a.device}), got {b.device}")


def check_multiples(a: Tensor, b: Tensor) -> None:
    """ValueError if float8 products on the device of a take no b of these sizes."""
    if a.is_cuda and (b.shape[0] % MULTIPLE or b.shape[1] % MULTIPLE):
        raise ValueError(
            f"b must have sizes that are multiples of {MULTIPLE} in float8, got {tuple(b.shape)}; "
            "pad it with zeros"
        )


def check_inner(columns: int, b: Tensor) -> None:
    """ValueError unless b (K, N) has a row for each of so many columns of a on all ranks."""
    if b.shape[0] != columns:
        raise ValueError(
            f"b {tuple(b.shape)} must have as many rows as a has columns on all ranks, {columns}"
        )


def largest(x: Tensor, dim: int | None) -> Tensor:
    """The largest magnitude of x in float32: over a dimension, which stays with size 1, or ()."""
    x = x.detach().abs()
    if x.numel() == 0:  # has no maximum
        x = x.new_zeros([1 if i == dim else size for i, size in enumerate(x.shape)])
        return x.float() if dim is not None else x.new_zeros((), dtype=torch.float32)
    return (x.amax(dim, keepdim=True) if dim is not None else x.amax()).float()


def scale_for(amax: Tensor) -> Tensor:
    """The scale that takes a largest magnitude to float8_e4m3fn's."""
    return (amax / LARGEST).clamp_min(SMALLEST_SCALE)


def quantized(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale in float8_e4m3fn, clamped and rounded to nearest, with contiguous rows."""
    return (x.detach().float() / scale).clamp(-LARGEST, LARGEST).to(FLOAT8).contiguous()


def quantized_right(b: Tensor, *, rowwise: bool) -> tuple[Tensor, Tensor]:
    """b (K, N) in float8 with contiguous columns, and its scales: (1, N), or ()."""
    columns = b.t()
    scale = scale_for(largest(columns, 1 if rowwise else None))
    return quantized(columns, scale).t(), scale.t() if rowwise else scale
