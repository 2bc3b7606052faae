"""A batch of matrices as a walk over slices of normalized ones: what every iteration shares.

Legend: matrices of r rows and c columns in the caller's orientation; G of them in one slice, stored
as (G, R, C) with R >= r and C >= c.

A matrix gives the same bits in any batch because nothing it meets depends on the batch. BLAS
libraries choose kernels, hence summation orders, by batch size and by the alignment of operands, so
neither varies: a slice always holds G matrices (missing ones are zero), each slice is a fresh
buffer of one layout, and on CUDA rows and columns are filled up with zeros to multiples of 8. Zero
rows and columns stay zero and change no other element.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from .precision import ieee_float32

# A slice holds as many matrices as a large GPU iterates in the time that its 30 to 50 launches take
# anyway (about 0.5 ms): missing matrices cost little, and a long batch does not wait for launches.
SLICE_FLOP = 2.5e11
# Elements of X in a slice, unless one matrix has more. An iteration then needs at most 256 MiB of
# workspace in half precision, 512 MiB in float32.
SLICE_ELEMENTS = 16 * 2**20
MAX_SLICE = 64
# 8 half-precision elements are 16 bytes, the widest alignment that BLAS kernels distinguish.
CUDA_ALIGNMENT = 8


@dataclass(frozen=True)
class Slice:
    """Shape of the buffer that matrices of one shape are iterated in; independent of the batch."""

    matrices: int
    rows: int
    columns: int


def slice_for(r: int, c: int, device_type: str) -> Slice:
    """The slice that r x c matrices are iterated in on a kind of device.

    On the CPU it is one matrix: its operands stay in the caches, and launches are cheap.
    """
    if device_type == "cpu":
        return Slice(1, r, c)
    rows, columns = (CUDA_ALIGNMENT * -(-size // CUDA_ALIGNMENT) for size in (r, c))
    m, n = min(rows, columns), max(rows, columns)
    flop = 5 * (4 * m * m * n + 2 * m * m * m)  # five dense steps
    fitting = min(MAX_SLICE, SLICE_ELEMENTS // (m * n), int(SLICE_FLOP // flop))
    return Slice(1 << (max(1, fitting).bit_length() - 1), rows, columns)


def walk(
    x: torch.Tensor,
    out: torch.Tensor,
    dtype: torch.dtype,
    prefactor: float,
    iterate: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Normalizes x (..., r, c) slice by slice, applies `iterate`, writes the result to `out`.

    Args:
        x: Input, not modified.
        out: Receives the result, rounded from `dtype` to its own.
        dtype: Dtype of the iterates.
        prefactor: The iteration starts at x / (prefactor * ||x||_F).
        iterate: (G, R, C) in `dtype` -> (G, R, C) in `dtype`; may overwrite its argument.
    """
    if x.numel() == 0:
        return
    source, target = _as_batch(x), _as_batch(out)
    batch, r, c = source.shape
    shape = slice_for(r, c, x.device.type)
    with ieee_float32(x.device, dtype):
        for start in range(0, batch, shape.matrices):
            taken = source[start : start + shape.matrices]
            result = iterate(normalized(taken, shape, dtype, prefactor))
            target[start : start + shape.matrices].copy_(result[: taken.shape[0], :r, :c])
    if target.untyped_storage().data_ptr() != out.untyped_storage().data_ptr():
        out.copy_(target.view(out.shape))  # leading strides that no (B, r, c) view can express


def normalized(x: torch.Tensor, shape: Slice, dtype: torch.dtype, prefactor: float) -> torch.Tensor:
    """x (b, r, c) in a contiguous (G, R, C) buffer of zeros, each matrix of norm 1 / prefactor.

    The maths is float32 (float64 for a float64 input or iterate) and rounds to `dtype` last.
    Dividing by the largest element first keeps the sum of squares in range for any finite input,
    subnormal ones included. max(., tiny) leaves zero matrices zero without biasing any other. An
    inf or NaN makes its whole matrix NaN and no other.
    """
    b, r, c = x.shape
    wide = torch.float64 in (x.dtype, dtype)
    full = (shape.matrices, shape.rows, shape.columns)
    allocate = x.new_empty if full == (b, r, c) else x.new_zeros
    staged = allocate(full, dtype=torch.float64 if wide else torch.float32)
    staged[:b, :r, :c].copy_(x)
    tiny = torch.finfo(staged.dtype).tiny
    staged.div_(_norm(staged, float("inf")).clamp_min_(tiny))
    staged.div_(_norm(staged, 2).clamp_min_(tiny).mul_(prefactor))
    return staged.to(dtype)


def _norm(x: torch.Tensor, order: float) -> torch.Tensor:
    """Norm of the elements of each matrix of x (G, R, C) -> (G, 1, 1).

    Rows first: a float32 sum over one row of 10^4 is accurate where one over 10^8 drifts.
    """
    rows = torch.linalg.vector_norm(x, order, dim=-1, keepdim=True)
    return torch.linalg.vector_norm(rows, order, dim=-2, keepdim=True)


def _as_batch(x: torch.Tensor) -> torch.Tensor:
    """x (..., r, c) as (B, r, c): a view wherever strides allow one."""
    return x.unsqueeze(0) if x.ndim == 2 else x.flatten(0, -3)
