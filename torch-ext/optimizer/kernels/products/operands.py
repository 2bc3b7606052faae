"""What the matrix products ask of their operands, and of the tensor they write."""

from __future__ import annotations

import torch
from torch import Tensor

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def check_dense(**operands: Tensor | None) -> None:
    """Each operand is dense, of A's dtype, on A's device; A comes first, the others may be None."""
    A = operands["A"]
    for name, x in operands.items():
        if x is None and name != "A":
            continue
        if not isinstance(x, Tensor) or x.layout != torch.strided:
            raise TypeError(f"{name} must be a dense tensor, got {kind(x)}")
        if x.dtype not in DTYPES or x.dtype != A.dtype:
            allowed = "float16, bfloat16 or float32" if name == "A" else f"A's dtype {A.dtype}"
            raise TypeError(f"{name} must have {allowed}, got {x.dtype}; convert it first")
        if x.device != A.device:
            raise ValueError(f"{name} must be on the device of A {A.device}, got {x.device}")


def check_scalars(scalars: dict[str, float], C: Tensor | None) -> None:
    """Refuses a scalar that is no number, and a weight of C without C."""
    for name, value in scalars.items():
        if isinstance(value, bool) or not isinstance(value, (int, float, torch.SymFloat)):
            raise TypeError(f"{name} must be a number, got {kind(value)}; scalars stay on the host")
    if C is None and scalars["beta"] != 0:
        raise ValueError(f"beta={scalars['beta']} scales C, which is None; pass C or beta=0")


def check_scale(scale: Tensor | None, A: Tensor) -> None:
    """scale is None or (...,) float32, one factor per matrix of A (..., m, k)."""
    if scale is None:
        return
    if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
        raise TypeError(f"scale must be a float32 tensor, got {kind(scale)}")
    if scale.shape != A.shape[:-2]:
        raise ValueError(
            f"scale must have shape {tuple(A.shape[:-2])}, one factor per matrix of A, "
            f"got {tuple(scale.shape)}"
        )
    if scale.device != A.device:
        raise ValueError(f"scale must be on the device of A {A.device}, got {scale.device}")


def check_out(out: Tensor, shape: tuple[int, ...], **operands: Tensor | None) -> None:
    """out fits, and overlaps no operand but a C that it is."""
    A = operands["A"]
    if not isinstance(out, Tensor) or out.layout != torch.strided or out.dtype != A.dtype:
        raise TypeError(f"out must be a dense tensor of A's dtype {A.dtype}, got {kind(out)}")
    if out.shape != shape:
        raise ValueError(f"out must have shape {tuple(shape)}, got {tuple(out.shape)}")
    if out.device != A.device:
        raise ValueError(f"out must be on the device of A {A.device}, got {out.device}")
    if any(s == 0 and n > 1 for n, s in zip(out.shape, out.stride(), strict=True)):
        raise ValueError("out is an expanded tensor, whose elements share memory; pass a full one")
    if torch.compiler.is_compiling():  # storages are opaque to the compiler, which copies anyway
        return
    for name, x in operands.items():
        if x is not None and overlap(x, out) and not (name == "C" and _same(x, out)):
            raise ValueError(f"out overlaps {name} in memory; pass another tensor")


def as_batch(out: Tensor, batch: int) -> Tensor | None:
    """out (..., m, n) as a view (batch, m, n); None if its strides allow none."""
    if out.ndim == 3:
        return out
    try:
        return out.view(batch, *out.shape[-2:])
    except RuntimeError:
        return None


def kind(x: object) -> str:
    """What an argument is, for messages."""
    return f"{x.dtype} with layout {x.layout}" if isinstance(x, Tensor) else type(x).__name__


def _same(x: Tensor, y: Tensor) -> bool:
    return x.storage_offset() == y.storage_offset() and x.stride() == y.stride()


def overlap(x: Tensor, y: Tensor) -> bool:
    """Whether two tensors share bytes, by the ranges that their strides span."""
    if x.numel() == 0 or x.untyped_storage()._cdata != y.untyped_storage()._cdata:
        return False
    (x_first, x_end), (y_first, y_end) = _byte_range(x), _byte_range(y)
    return x_first < y_end and y_first < x_end


def _byte_range(t: Tensor) -> tuple[int, int]:
    first = t.storage_offset()
    last = first + sum((n - 1) * s for n, s in zip(t.shape, t.stride(), strict=True))
    return first * t.element_size(), (last + 1) * t.element_size()
