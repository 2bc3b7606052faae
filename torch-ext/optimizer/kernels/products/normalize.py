"""normalize: out = x / (prefactor ||x||_F) for every matrix of a batch, in a frame of zeros.

The start of every iteration. Squares are added in double, the factor is computed in double, an
element is multiplied by it in float32 and rounded once to out's dtype. The op reads x once, as far
as shared memory holds what waits for its factor, and again what it had no room for; it writes out.
One persistent kernel behind a short one that clears its flags; no copy of x.

path      | op                  | source                          | taken
compiled  | normalize           | kernels-src/products       | CUDA >= 8.0, up to float32
reference | normalize_reference | reference/normalize.py          | everything else
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.library import custom_op, register_fake

from ... import dispatch
from ..._ops import add_op_namespace_prefix, ops
from ...reference import normalize as reference
from . import operands as _operands

DTYPES = _operands.DTYPES  # of the compiled path
_WIDE = (*DTYPES, torch.float64)


@register_fake(add_op_namespace_prefix("normalize"))
def _fake(pieces, out, prefactor, zeros=None):
    return None


@custom_op(
    add_op_namespace_prefix("normalize_reference"),
    mutates_args=("out",),
    schema="(Tensor[] pieces, Tensor(a!) out, float prefactor) -> ()",
)
def _reference(
    pieces: Sequence[Tensor],  # (b, r, c) each
    out: Tensor,  # (G, R, C)
    prefactor: float,
) -> None:
    out.zero_()
    r, c = pieces[0].shape[1:]
    matrices = (matrix for piece in pieces for matrix in piece)
    for target, matrix in zip(out, matrices, strict=False):
        # A fresh contiguous operand: torch's order of a sum may depend on layout and alignment.
        fresh = torch.empty((r, c), dtype=torch.float64, device=out.device).copy_(matrix)
        target[:r, :c] = reference.normalize(fresh, prefactor)


_reference.register_fake(lambda *_: None)


def runs_compiled(device: torch.device, source: torch.dtype, target: torch.dtype) -> bool:
    """Whether the compiled kernel takes matrices of one dtype to another on this device."""
    return source in DTYPES and target in DTYPES and dispatch.runs_compiled("normalize", device)


def normalize(
    pieces: Tensor | Sequence[Tensor],
    *,
    prefactor: float = 1.0,
    dtype: torch.dtype | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Every matrix scaled to the Frobenius norm 1 / prefactor, without epsilon.

    Right for every finite input, subnormal ones and those whose norm overflows float32 included.
    Zero matrices stay zero; an inf or NaN makes its own matrix NaN and no other. A matrix gives the
    same bits in any batch, at any place in it and under any strides. Builds no autograd graph.

    Args:
        pieces: (b, r, c), or a sequence of these with one r and c, dtype and device; float16,
            bfloat16, float32 or float64, any strides. B matrices in all, at least one tensor.
        prefactor: Positive number.
        dtype: Of the result; None means that of the pieces. Give it or `out`.
        out: (G, R, C), contiguous, G >= B, R >= r, C >= c, one of the four dtypes; must not overlap
            a piece. Matrices, rows and columns behind those of the pieces become zero.

    Returns:
        `out`, or a new (B, r, c) in `dtype`.

    Raises:
        TypeError: An argument is of a wrong kind or dtype.
        ValueError: Shapes or devices do not fit, prefactor is not positive, out overlaps a piece.
    """
    pieces = [pieces] if isinstance(pieces, Tensor) else list(pieces)
    _check_pieces(pieces)
    if isinstance(prefactor, bool) or not isinstance(prefactor, (int, float)):
        raise TypeError(f"prefactor must be a number, got {_operands.kind(prefactor)}")
    if not (prefactor > 0 and math.isfinite(prefactor)):
        raise ValueError(f"prefactor must be positive and finite, got {prefactor}")
    matrices, (r, c) = sum(len(x) for x in pieces), pieces[0].shape[-2:]
    if out is None:
        dtype = pieces[0].dtype if dtype is None else dtype
        if dtype not in _WIDE:
            raise TypeError(f"dtype must be one of {_WIDE}, got {dtype}")
        out = pieces[0].new_empty((matrices, r, c), dtype=dtype)
    elif dtype is not None:
        raise ValueError(f"give dtype={dtype} or out, not both; out has its own dtype")
    else:
        _check_out(out, (matrices, r, c), pieces)
    with torch.no_grad():
        wide = torch.float64 in (pieces[0].dtype, out.dtype)
        path = "reference" if wide else dispatch.path_name("normalize", out.device)
        op = ops.normalize if path == "compiled" else ops.normalize_reference
        op([x.detach() for x in pieces], out.detach(), float(prefactor))
    return out


def _check_pieces(pieces: list[Tensor]) -> None:
    if not pieces:
        raise ValueError("pieces is empty; pass at least one tensor (b, r, c)")
    first = pieces[0]
    for k, x in enumerate(pieces):
        if not isinstance(x, Tensor) or x.layout != torch.strided or x.dtype not in _WIDE:
            raise TypeError(f"pieces[{k}] must be dense, of {_WIDE}, got {_operands.kind(x)}")
        if x.ndim != 3 or x.shape[1:] != first.shape[1:]:
            raise ValueError(
                f"pieces[{k}] must be (b, r, c) with the r and c of pieces[0], got shape "
                f"{tuple(x.shape)} beside {tuple(first.shape)}"
            )
        if x.dtype != first.dtype or x.device != first.device:
            raise ValueError(
                f"pieces[{k}] must have pieces[0]'s dtype {first.dtype} and device {first.device}, "
                f"got {x.dtype} on {x.device}"
            )


def _check_out(out: Tensor, room: tuple[int, int, int], pieces: list[Tensor]) -> None:
    if not isinstance(out, Tensor) or out.layout != torch.strided or out.dtype not in _WIDE:
        raise TypeError(f"out must be dense, of {_WIDE}, got {_operands.kind(out)}")
    if out.ndim != 3 or any(n < needed for n, needed in zip(out.shape, room, strict=True)):
        raise ValueError(
            f"out must be (G, R, C) with room for {tuple(room)}, got shape {tuple(out.shape)}"
        )
    if not out.is_contiguous():
        raise ValueError(f"out must be contiguous, got strides {tuple(out.stride())}")
    if out.device != pieces[0].device:
        raise ValueError(f"out must be on the pieces' device {pieces[0].device}, got {out.device}")
    if torch.compiler.is_compiling():  # storages are opaque to the compiler, which copies anyway
        return
    for k, x in enumerate(pieces):
        if _operands._overlap(x, out):
            raise ValueError(f"out overlaps pieces[{k}] in memory; pass another tensor")
